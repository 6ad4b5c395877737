"""A Celery app whose workers can be killed at every step of a delivery; see `failpoints`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from celery import Celery, Task, signals, states
from celery.app import trace
from celery.backends.base import Backend
from celery.worker.request import Request

from celery_idempotent import IdempotentTask
from celery_idempotent.celery import IdempotentRequest
from celery_idempotent.celery.delivery import CeleryDelivery
from celery_idempotent.stores.redis import RedisStore
from tests.support.celery.apps import from_env
from tests.support.celery.journal import Journal
from tests.support.faults.failpoints import FailPoints

app = from_env(Celery("sweep"))
app.conf.idempotency = {"lease_ttl": float(os.environ.get("LEASE_TTL", "600")), "max_crashes": 50}
points = FailPoints.from_env()


def strike(point: str) -> None:
    if points is not None:
        points.strike(point)


class NoticedRequest(IdempotentRequest):
    """Writes down when the worker's main process learns of a lost child."""

    def on_failure(self, *args: Any, **kwargs: Any) -> Any:
        Journal.from_env().write("noticed", self.id)
        return super().on_failure(*args, **kwargs)


class PlainRequest(Request):
    """The same for a task without this library."""

    def on_failure(self, *args: Any, **kwargs: Any) -> Any:
        Journal.from_env().write("noticed", self.id)
        return super().on_failure(*args, **kwargs)


class SweptTask(IdempotentTask):
    """Has a fail point in its own hook."""

    abstract = True
    Request = NoticedRequest

    def on_success(self, *args: Any) -> None:
        strike("in on_success")


class PlainTask(Task):
    """What Celery alone offers, to compare with."""

    abstract = True
    acks_late = True
    reject_on_worker_lost = True
    Request = PlainRequest


def pay(key: str) -> None:
    """Ask a gateway that honours keys to take the money; it takes it once per key."""
    (Path(os.environ["GATEWAY"]) / key).touch()


@app.task(base=SweptTask, bind=True, idempotency={"key": "order_id"})
def charge(self: Any, order_id: str) -> str:
    journal = Journal.from_env()
    journal.write("started", order_id, fence=self.lease.fence)
    strike("in the body, before the effect")
    journal.write("charged", order_id)
    pay(self.lease.derived_key("charge"))
    strike("in the body, after the effect")
    return f"charged {order_id}"


@app.task(base=PlainTask)
def plain(order_id: str) -> str:
    Journal.from_env().write("started", order_id)
    strike("in the body, before the effect")
    Journal.from_env().write("charged", order_id)
    return f"charged {order_id}"


@app.task(base=IdempotentTask, bind=True)
def notify(self: Any, receipt: str, order_id: str) -> None:
    """The callback."""
    Journal.from_env().write("notified", order_id, receipt=receipt, id=self.request.id)


@app.task(base=IdempotentTask, bind=True)
def ship(self: Any, receipt: str, order_id: str) -> str:
    """The rest of the chain."""
    Journal.from_env().write("shipped", order_id, receipt=receipt, id=self.request.id)
    return f"shipped, {receipt}"


def enter(task: Any = None, task_id: str = "", args: Any = (), **_: Any) -> None:
    """Remember which operation this process is busy with; only those of `charge` and `plain` are swept."""
    swept = task.name in (charge.name, plain.name)
    assert points is not None
    points.operation = args[0] if swept else None
    if swept:
        Journal.from_env().write("delivered", task_id)


def leave(task: Any = None, task_id: str = "", state: str = "", **_: Any) -> None:
    """Write down that a delivery was answered; connected after the library's own receiver."""
    if task.name in (charge.name, plain.name):
        strike("in task_postrun")
        Journal.from_env().write("answered" if state == states.SUCCESS else "put off", task_id, state=state)


def published(when: str) -> Any:
    names = {notify.name: "callback", ship.name: "chain"}

    def receive(sender: str = "", **_: Any) -> None:
        if sender in names:
            if when == "after":
                Journal.from_env().write(f"sent {names[sender]}", points and points.operation)
            strike(f"{when} the {names[sender]} is published")

    return receive


def in_child(**_: Any) -> None:
    """What the parent sends to its children by name must be the original there."""
    assert points is not None
    for name in ("fast_trace_task", "trace_task_ret"):
        if hasattr(trace, name):
            points.around(trace, name, after="before the child tells its parent")


if points is not None:
    points.around(RedisStore, "acquire", "before acquire is sent", "after acquire, before the body")
    points.around(RedisStore, "settle", "before settle is sent", "settle applied, reply not used")
    points.around(RedisStore, "mark_dispatched", "before the announce mark", "announce mark set, reply not used")
    points.around(CeleryDelivery, "answer", after="after settle, value not returned")
    points.around(Backend, "mark_as_done", "before the result is stored", "after the result is stored")
    signals.task_prerun.connect(enter, weak=False)
    signals.task_postrun.connect(leave, weak=False)
    signals.before_task_publish.connect(published("before"), weak=False)
    signals.after_task_publish.connect(published("after"), weak=False)
    signals.worker_process_init.connect(in_child, weak=False)
