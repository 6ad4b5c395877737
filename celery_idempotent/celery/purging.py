"""Remove what has expired from an app's stores, as a Celery task that beat sends."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from celery.app.task import Task
from celery.schedules import BaseSchedule

from ..errors import StoreError
from ..hooks import logger
from ..stores import purging

__all__ = ["LIMIT", "PURGE", "register", "schedule_purge"]

#: The name of the task.
PURGE = "celery_idempotent.purge"
#: Records that one run removes from each store at most; the next run goes on.
LIMIT = 100_000


def schedule_purge(
    app: Any,
    every: float | timedelta | BaseSchedule = 3600.0,
    *,
    limit: int = LIMIT,
    **options: Any,
) -> None:
    """Have beat remove what has expired from every store that the app's tasks use.

    Arguments:
        app: A Celery app.
        every: Seconds between two runs, a ``timedelta``, or a schedule of Celery's such as ``crontab(minute=17)``.
        limit: Remove about so many records from each store in one run.
        options: How the task is published, as ``apply_async`` takes them, such as ``queue="maintenance"``.
    """
    register(app)
    seconds = every.total_seconds() if isinstance(every, timedelta) else every
    if isinstance(seconds, (int, float)):
        # While no worker takes them, runs must not pile up.
        options.setdefault("expires", float(seconds))
    # What beat runs it by; under the name, a second call replaces the first.
    app.add_periodic_task(every, app.signature(PURGE, kwargs={"limit": limit}), name=PURGE, **options)


def register(app: Any) -> None:
    """Let the app know the task; twice is the same as once. Workers with idempotent tasks do it by themselves."""
    # A plain task, also where the app's task class is ours: to purge twice does no harm.
    app.task(purge, name=PURGE, base=Task, bind=True, shared=False)


def purge(self: Any, limit: int = LIMIT) -> dict[str, int | None]:
    """Remove expired records from every store that the app's tasks use; return how many by store, None where it failed.

    A store that cannot serve is logged, and asked again by the next run.
    """
    from .used import used_stores

    removed: dict[str, int | None] = {}
    for used in used_stores(self.app):
        try:
            removed[used.name] = purging.purge(used.store, limit)
        except StoreError as error:
            removed[used.name] = None
            logger.warning("What has expired in %s is not removed: %s The next run tries again.", used.name, error)
    logger.info("Expired records removed: %s", removed)
    return removed
