"""The same task under each plugin, with a body that notes that it begins, sleeps and retries as it is told."""

from __future__ import annotations

import os
import time
from typing import Any

import redis
from celery import Celery
from celery_once import QueueOnce
from celery_singleton import Singleton

from celery_idempotent import IdempotentTask

from .app import configured

__all__ = ["app"]

app = configured(Celery("benchmarks.rival_faults_app"))
app.conf.update(
    singleton_backend_url=os.environ.get("STORE_URL"),
    ONCE={
        "backend": "celery_once.backends.Redis",
        "settings": {"url": os.environ.get("STORE_URL"), "default_timeout": 3600},
    },
)


def note(self: Any, number: int, seconds: float, retry: bool) -> int:
    """Do what every task here does."""
    journal = redis.Redis.from_url(os.environ["STORE_URL"].rpartition("/")[0] + "/5")
    journal.rpush("begun", number)
    journal.close()
    time.sleep(seconds)
    if retry and not self.request.retries:
        raise self.retry(countdown=0.5)
    return number


@app.task(acks_late=True)
def plain(number: int) -> int:
    """Return its argument."""
    return number


@app.task(base=IdempotentTask, bind=True, unique="number", max_retries=3)
def unique(self: Any, number: int, seconds: float = 0, retry: bool = False) -> int:
    """Ours."""
    return note(self, number, seconds, retry)


@app.task(base=QueueOnce, bind=True, once={"keys": ["number"], "graceful": True}, acks_late=True, max_retries=3)
def once(self: Any, number: int, seconds: float = 0, retry: bool = False) -> int:
    """celery-once's."""
    return note(self, number, seconds, retry)


@app.task(base=Singleton, bind=True, unique_on=["number"], acks_late=True, max_retries=3)
def singleton(self: Any, number: int, seconds: float = 0, retry: bool = False) -> int:
    """celery-singleton's."""
    return note(self, number, seconds, retry)
