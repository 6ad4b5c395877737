"""One effect under the package that ARM names, as its own documentation configures it; the others are not imported.

Gates say where a body stands still.
"""

from __future__ import annotations

import os
import time
from typing import Any

import redis
from celery import Celery, signals

__all__ = ["app", "journal"]

ARM = os.environ.get("ARM", "plain")
env = os.environ
app = Celery("benchmarks.faults_app", broker=env.get("BROKER_URL"), backend=env.get("RESULT_URL"))
app.conf.update(
    broker_connection_retry_on_startup=True,
    # Looked at every second, not every 100: a fault is the same, and comes sooner.
    broker_transport_options={"visibility_timeout": 5, "unacked_restore_interval": 1, "unacked_restore_throttle": 1},
    task_acks_late=True,
    worker_prefetch_multiplier=1,
)
#: What declares the task: of the package, its own class and options.
options: dict[str, Any] = {"name": "charge", "bind": True, "max_retries": 3}
if ARM == "keyed":
    from celery_idempotent import IdempotentTask

    app.conf.update(idempotency_store=env.get("STORE_URL"), idempotency={"lease_ttl": 3})
    options |= {"base": IdempotentTask, "idempotency": {"key": "order"}}
elif ARM == "singleton":
    from celery_singleton import Singleton

    app.conf.update(singleton_backend_url=env.get("STORE_URL"), singleton_lock_expiry=60)
    options |= {"base": Singleton, "unique_on": ["order"]}
elif ARM == "once":
    from celery_once import QueueOnce

    settings = {"url": env.get("STORE_URL"), "default_timeout": 60}
    app.conf.ONCE = {"backend": "celery_once.backends.Redis", "settings": settings}
    options |= {"base": QueueOnce, "once": {"keys": ["order"], "graceful": True}}
elif ARM == "setting":
    app.conf.worker_deduplicate_successful_tasks = True


def journal() -> redis.Redis:
    """Return a client of the database in which bodies note what they do: no fault touches it."""
    return redis.Redis.from_url(env["JOURNAL_URL"])


def wait(notes: redis.Redis, gate: str) -> None:
    """Stand still while a gate is closed."""
    while notes.exists(gate):
        time.sleep(0.01)


@app.task(**options)
def charge(self: Any, order: str, retries: bool = False) -> str:
    """Have an effect, which is counted, and return its receipt; stop at the gates ``before`` and ``after``."""
    notes = journal()
    notes.rpush("begun", os.getpid())
    wait(notes, "before")
    if retries and not self.request.retries:
        raise self.retry(countdown=0.5)
    if ARM == "keyed":
        self.lease.check()  # as the guide on effects has it: a holder that was paused may have lost its lease
    receipt = f"{order}: {notes.rpush(f'effects of {order}', os.getpid())}"
    notes.rpush("charged", os.getpid())
    wait(notes, "after")
    notes.close()
    return receipt


@app.task(name="total", **({"base": options["base"]} if ARM == "keyed" else {}))
def total(receipts: list[str]) -> str:
    """End a chord, which is an effect of its own."""
    notes = journal()
    receipt = f"total: {notes.rpush('effects of total', os.getpid())}"
    notes.close()
    return receipt


@signals.task_postrun.connect
def returned(task: Any, **_: Any) -> None:
    """Stand still once the task has returned and its result is stored, before its message is acked."""
    if task.name == "charge":
        notes = journal()
        notes.rpush("returned", os.getpid())
        wait(notes, "returned gate")
        notes.close()
