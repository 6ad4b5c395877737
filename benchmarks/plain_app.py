"""The same tasks of plain Celery, whose worker has no part of this library; two bodies send its scripts."""

from __future__ import annotations

import os
from functools import cache
from typing import TYPE_CHECKING

from celery import Celery

if TYPE_CHECKING:
    from .bare import BareRuns

__all__ = ["app", "configured", "one_script", "plain", "two_scripts"]


def configured(app: Celery) -> Celery:
    """Point an app at BROKER_URL and RESULT_URL."""
    env = os.environ
    app.conf.update(
        broker_url=env.get("BROKER_URL"),
        result_backend=env.get("RESULT_URL"),
        broker_connection_retry_on_startup=True,
        result_expires=600,
    )
    return app


app = configured(Celery("benchmarks.plain_app"))


@app.task(acks_late=True)
def plain(number: int) -> None:
    """Do nothing, as plain Celery does it."""


@cache
def _runs() -> BareRuns:
    from .bare import BareRuns

    return BareRuns(os.environ["STORE_URL"])


@app.task(acks_late=True)
def two_scripts(number: int) -> None:
    """Send what a first run sends, unprotected."""
    _runs().acquire(number)
    _runs().settle(number)


@app.task(acks_late=True)
def one_script(number: int) -> None:
    """Send half of it."""
    _runs().acquire(number)
