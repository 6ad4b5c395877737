"""The same task under each package, with a body that notes that it begins, sleeps and retries as it is told."""

from __future__ import annotations

import os
import time
from typing import Any

import redis
from celery import Celery
from celery_once import QueueOnce
from celery_singleton import Singleton
from idemkit import MethodConfig, RedisBackend, idempotent_sync

from celery_idempotent import IdempotentTask

from .app import configured

__all__ = ["app"]

app = configured(Celery("benchmarks.rival_faults_app"))
app.conf.update(
    singleton_backend_url=os.environ.get("STORE_URL"),
    worker_deduplicate_successful_tasks=os.environ.get("DEDUPLICATE") == "1",
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
def plain(number: int, seconds: float = 0) -> int:
    """Celery's."""
    return note(None, number, seconds, False)


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


@app.task(base=IdempotentTask, bind=True, idempotency={"key": "number"}, max_retries=3)
def keyed(self: Any, number: int, seconds: float = 0, retry: bool = False) -> int:
    """Ours, by a key."""
    return note(self, number, seconds, retry)


@app.task(bind=True, acks_late=True, max_retries=3)
def celerys(self: Any, number: int, seconds: float = 0, retry: bool = False) -> int:
    """Celery's own, in a worker with ``worker_deduplicate_successful_tasks``."""
    return note(self, number, seconds, retry)


@app.task(acks_late=True)
@idempotent_sync(
    backend=RedisBackend.from_url(os.environ.get("STORE_URL", "redis://localhost")),
    config=MethodConfig(key_fields=["number"], scope=lambda _: "all"),
)
def idemkits(number: int, seconds: float = 0) -> int:
    """idemkit's, as its documentation has it under Celery."""
    return note(None, number, seconds, False)
