"""One effect under each package, as its own documentation configures it; gates say where a body stands still."""

from __future__ import annotations

import os
import time
from typing import Any

import redis
from celery import Celery, signals
from celery_once import QueueOnce
from celery_singleton import Singleton

from celery_idempotent import IdempotentTask

from .app import configured

__all__ = ["app", "journal"]

app = configured(Celery("benchmarks.faults_app"))
app.conf.update(
    broker_transport_options={"visibility_timeout": 5},
    task_acks_late=True,
    worker_prefetch_multiplier=1,
    worker_deduplicate_successful_tasks=os.environ.get("ARM") == "celerys",
    idempotency={"lease_ttl": 3},
    singleton_backend_url=os.environ.get("STORE_URL"),
    singleton_lock_expiry=60,
    ONCE={
        "backend": "celery_once.backends.Redis",
        "settings": {"url": os.environ.get("STORE_URL"), "default_timeout": 60},
    },
)


def journal() -> redis.Redis:
    """Return a client of the database in which bodies note what they do: no fault touches it."""
    return redis.Redis.from_url(os.environ["JOURNAL_URL"])


def effect(task: Any, order: str, retries: bool = False) -> str:
    """Have an effect, which is counted, and return its receipt; stop at the gates ``before`` and ``after``."""
    notes = journal()
    notes.rpush("begun", os.getpid())
    wait(notes, "before")
    if retries and not task.request.retries:
        raise task.retry(countdown=0.5)
    if isinstance(task, IdempotentTask):
        task.lease.check()  # as the guide on effects has it: a holder that was paused may have lost its lease
    receipt = f"{order}: {notes.rpush(f'effects of {order}', os.getpid())}"
    notes.rpush("charged", os.getpid())
    wait(notes, "after")
    notes.close()
    return receipt


def wait(notes: redis.Redis, gate: str) -> None:
    """Stand still while a gate is closed."""
    while notes.exists(gate):
        time.sleep(0.01)


@signals.task_postrun.connect
def returned(task: Any, **_: Any) -> None:
    """Stand still once the task has returned and its result is stored, before its message is acked."""
    if task.name.startswith(__name__):
        notes = journal()
        notes.rpush("returned", os.getpid())
        wait(notes, "returned gate")
        notes.close()


@app.task(bind=True, max_retries=3)
def plain(self: Any, order: str, retries: bool = False) -> str:
    """Plain Celery, acked late."""
    return effect(self, order, retries)


@app.task(bind=True, max_retries=3)
def celerys(self: Any, order: str, retries: bool = False) -> str:
    """Celery's ``worker_deduplicate_successful_tasks``."""
    return effect(self, order, retries)


@app.task(base=Singleton, bind=True, unique_on=["order"], max_retries=3)
def singleton(self: Any, order: str, retries: bool = False) -> str:
    """celery-singleton's."""
    return effect(self, order, retries)


@app.task(base=QueueOnce, bind=True, once={"keys": ["order"], "graceful": True}, max_retries=3)
def once(self: Any, order: str, retries: bool = False) -> str:
    """celery-once's."""
    return effect(self, order, retries)


@app.task(base=IdempotentTask, bind=True, idempotency={"key": "order"}, max_retries=3)
def keyed(self: Any, order: str, retries: bool = False) -> str:
    """Ours."""
    return effect(self, order, retries)


@app.task(name="sum of plain")
def total(receipts: list[str]) -> str:
    """End a chord; an effect of its own."""
    notes = journal()
    return f"total: {notes.rpush('effects of total', os.getpid())}"


@app.task(name="sum of ours", base=IdempotentTask)
def guarded_total(receipts: list[str]) -> str:
    """End a chord whose members are guarded, and which is guarded itself."""
    notes = journal()
    return f"total: {notes.rpush('effects of total', os.getpid())}"
