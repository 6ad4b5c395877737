"""The Celery app of the benchmarks: no-op tasks. The environment tells it where its servers are."""

from __future__ import annotations

import os
import time

from celery import Celery

from celery_idempotent import IdempotentTask

from .plain_app import configured as plainly

__all__ = ["app", "configured", "guarded", "keyed", "once_only", "plain", "unique"]


def configured(app: Celery) -> Celery:
    """Point an app at BROKER_URL, RESULT_URL and STORE_URL."""
    plainly(app).conf.idempotency_store = os.environ.get("STORE_URL")
    return app


app = configured(Celery("benchmarks.app"))


@app.task(acks_late=True)
def plain(number: int) -> None:
    """Do nothing, unguarded."""


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
