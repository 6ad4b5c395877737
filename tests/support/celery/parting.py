"""A Celery app whose tasks have one effect and then end as they are told."""

from __future__ import annotations

import os
import resource
import time
from typing import Any

from celery import Celery
from celery.exceptions import Ignore, Reject

from celery_idempotent import IdempotentTask, add_hook, idempotent
from celery_idempotent.celery import signals
from celery_idempotent.events import Event
from tests.support.celery.apps import from_env
from tests.support.celery.gates import Gates
from tests.support.celery.journal import Journal

app = from_env(Celery("parting"))
app.conf.idempotency = {
    "lease_ttl": float(os.environ.get("LEASE_TTL", "60")),
    "max_crashes": int(os.environ.get("MAX_CRASHES", "5")),
}


def receive(event: Event, **_: Any) -> None:
    """Wait at the gate of this kind of event."""
    Gates.from_env().wait(event.name)


if os.environ.get("EVENTS") == "hook":
    add_hook(receive)
if os.environ.get("EVENTS") == "signal":
    signals.task_acquired.connect(receive)


class Declined(Exception):
    """A failure that is final."""


class Abandoned(BaseException):
    """What only a bare except catches."""


@app.task(base=IdempotentTask, bind=True, max_retries=1, idempotency={"key": "order", "remember_failures": (Declined,)})
def part(self: Any, order: str, ending: str = "return") -> Any:
    """Charge the order, between two gates, and end as told, or only "... at first"."""
    journal, gates = Journal.from_env(), Gates.from_env()
    first = not journal.count("started", order)
    attempt = {"retries": self.request.retries, "nesting": self.request.replaced_task_nesting or 0}
    journal.write("started", order, fence=self.lease.fence, **attempt)
    gates.wait(f"before {order}")
    journal.write("charged", order, **attempt)
    gates.wait(f"after {order}")
    if first and ending.startswith("retry, and "):
        self.retry(countdown=1, throw=False)
        gates.wait(f"retried {order}")
        ending = ending.removeprefix("retry, and ")
    if first or not ending.endswith(" at first"):
        end(self, order, ending.removesuffix(" at first"))
    return f"{order} charged" if first else f"{order} charged again"


def end(task: Any, order: str, ending: str) -> None:
    """Raise what an ending raises, or return."""
    raised: dict[str, BaseException] = {
        "raise": ValueError(f"no {order}"),
        "decline": Declined(f"no {order}"),
        "ignore": Ignore(),
        "reject": Reject("no", requeue=False),
        "requeue": Reject("again", requeue=True),
        "exit": SystemExit(3),
        "interrupt": KeyboardInterrupt(),
        "abandon": Abandoned("left alone"),
    }
    if ending in raised:
        raise raised[ending]
    if ending == "retry" and not task.request.retries:
        raise task.retry(countdown=3)  # seconds in which a test sees what waits
    if ending == "retry for ever":
        # Not at once: Celery would write RETRY over the FAILURE of a retry that is quicker than it.
        raise task.retry(countdown=1, exc=ValueError(f"no {order}"))
    if ending == "replace":
        task.replace(other.si(order))
    if ending == "replace itself" and not task.request.replaced_task_nesting:
        task.replace(part.si(order, ending))
    if ending == "check":
        task.lease.check()
    if ending == "memory":
        resource.setrlimit(resource.RLIMIT_AS, (2**32, 2**32))
        bytearray(2**33)
    while ending == "hold on":  # deaf to the signal that ends others
        try:
            Journal.from_env().write("deaf", order)
            time.sleep(60)
        except BaseException as error:  # noqa: BLE001
            Journal.from_env().write("heard", type(error).__name__)


# It waits: the lease of a worker that died may last a moment longer here than that of the task which calls it.
@idempotent(key="order", store=app.conf.idempotency_store, on_conflict="wait", **app.conf.idempotency)
def charge(order: str) -> str:
    """A guarded function, which holds on for ever when it runs for the first time."""
    journal = Journal.from_env()
    first = not journal.count("charged", order)
    journal.write("charged", order)
    while first:
        time.sleep(60)
    return f"{order} charged again"


@app.task(base=IdempotentTask)
def call(order: str) -> str:
    """Call a guarded function, which holds a lease of its own."""
    return charge(order)


@app.task(base=IdempotentTask, idempotency={"key": "order"})
def other(order: str) -> str:
    """Another task, for an operation of its own."""
    Journal.from_env().write("charged elsewhere", order)
    return f"{order} charged elsewhere"


@app.task
def collect(value: Any, name: str) -> Any:
    """A plain callback that writes down what it was given."""
    Journal.from_env().write("collected", name, value=value)
    return value
