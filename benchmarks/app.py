"""The Celery app of the benchmarks: no-op tasks, plain and guarded, told where its servers are by the environment."""

from __future__ import annotations

import os
import time
from functools import cache

from celery import Celery

from celery_idempotent import IdempotentTask

from .bare import BareRuns

__all__ = ["app", "configured", "guarded", "keyed", "once_only", "one_script", "plain", "two_scripts", "unique"]


def configured(app: Celery) -> Celery:
    """Point an app at BROKER_URL, RESULT_URL and STORE_URL."""
    env = os.environ
    app.conf.update(
        broker_url=env.get("BROKER_URL"),
        result_backend=env.get("RESULT_URL"),
        idempotency_store=env.get("STORE_URL"),
        broker_connection_retry_on_startup=True,
        result_expires=600,
    )
    return app


app = configured(Celery("benchmarks.app"))


@app.task(acks_late=True)
def plain(number: int) -> None:
    """Do nothing, as plain Celery does it."""


@cache
def _runs() -> BareRuns:
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


@app.task(base=IdempotentTask)
def guarded(number: int) -> None:
    """Do nothing, once per task id."""


@app.task(base=IdempotentTask, idempotency={"key": "number"})
def keyed(number: int) -> None:
    """Do nothing, once per number."""


@app.task(base=IdempotentTask, unique="number")
def unique(number: int) -> None:
    """Do nothing, and is not published while a message of the number waits."""


@app.task(base=IdempotentTask, bind=True)
def once_only(self: IdempotentTask, seconds: float) -> str:
    """Take some time, and return what no other run returns."""
    time.sleep(seconds)
    return f"{self.request.id}/{self.lease.fence}"
