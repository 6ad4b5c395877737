"""A Celery app whose tasks are idempotent: what the worker tests send orders to."""

from __future__ import annotations

import os
from typing import Any

from celery import Celery, group
from celery.exceptions import Ignore, Reject

from celery_idempotent import IdempotentTask
from tests.support.celery.apps import from_env
from tests.support.celery.gates import Gates
from tests.support.celery.journal import Journal
from tests.support.celery.values import VALUES

app = from_env(Celery("shop"))
app.conf.idempotency = {
    "lease_ttl": float(os.environ.get("LEASE_TTL", "60")),
    "on_store_error": os.environ.get("ON_STORE_ERROR", "wait"),
    "on_conflict": os.environ.get("ON_CONFLICT", "defer"),
    "on_duplicate": os.environ.get("ON_DUPLICATE", "replay"),
    "history": "NO_HISTORY" not in os.environ,
    "max_crashes": int(os.environ.get("MAX_CRASHES", "5")),
}


def work(event: str, key: object, result: Any, **fields: object) -> Any:
    """Do the work that every task here does: two gates around an effect in the journal."""
    journal, gates = Journal.from_env(), Gates.from_env()
    journal.write("started", key, **fields)
    gates.wait(f"before {key}")
    journal.write(event, key, **fields)
    gates.wait(f"after {key}")
    return result


@app.task(base=IdempotentTask)
def resize(path: str) -> str:
    """The key is the task id."""
    return work("resized", path, f"small {path}")


@app.task(base=IdempotentTask, idempotency={"key": "order_id"})
def dispatch(order_id: str, several: bool = False) -> Any:
    """Return what Celery returns of tasks that were published: of one, or of a group."""
    work("dispatched", order_id, None)
    return group(resize.s(order_id), resize.s("b")).apply_async() if several else resize.delay(order_id)


@app.task(base=IdempotentTask, bind=True, idempotency={"key": "order_id"})
def charge(self: Any, order_id: str, cents: int = 999) -> dict[str, Any]:
    """The key is the order."""
    return work(
        "charged",
        order_id,
        {"order": order_id, "cents": cents},
        task_id=self.request.id,
        headers=sorted(self.request.headers or {}),
    )


@app.task(base=IdempotentTask, idempotency={"key": "order_id"}, send_events=False)
def quiet(order_id: str) -> str:
    """No monitor is to hear of it."""
    return work("charged", order_id, f"charged {order_id}")


@app.task(base=IdempotentTask, bind=True, idempotency={"key": "order_id"}, max_retries=5)
def flaky(self: Any, order_id: str, failures: int = 2, countdown: float = 0.1) -> str:
    """Retries by hand until it has failed often enough."""
    work("tried", order_id, None, retries=self.request.retries)
    if self.request.retries < failures:
        raise self.retry(countdown=countdown)
    Journal.from_env().write("charged", order_id)
    return f"{order_id} after {self.request.retries}"


@app.task(
    base=IdempotentTask,
    bind=True,
    acks_late=False,
    idempotency={"key": "order_id", "allow_early_ack": True},
    max_retries=5,
)
def early(self: Any, order_id: str) -> str:
    """Its messages are acked before it runs; it retries once."""
    work("tried", order_id, None, retries=self.request.retries)
    if not self.request.retries:
        raise self.retry(countdown=0)
    Journal.from_env().write("charged", order_id)
    return f"charged {order_id}"


@app.task(
    base=IdempotentTask,
    bind=True,
    idempotency={"key": "order_id"},
    autoretry_for=(Exception,),
    retry_kwargs={"countdown": 0.1},
)
def shaky(self: Any, order_id: str, failures: int = 2) -> str:
    """Retries by itself."""
    work("tried", order_id, None, retries=self.request.retries)
    if self.request.retries < failures:
        raise OSError("not yet")
    self.lease.check()
    Journal.from_env().write("charged", order_id)
    return f"{order_id} after {self.request.retries}"


@app.task(base=IdempotentTask, idempotency={"key": "order_id"})
def failing(order_id: str, fail: bool = True) -> str:
    """Fails when it is told to."""
    work("tried", order_id, None)
    if fail:
        raise ValueError(f"no {order_id}")
    return f"done {order_id}"


class Declined(Exception):
    """A failure that is final."""


@app.task(base=IdempotentTask, idempotency={"key": "order_id", "remember_failures": (Declined,)})
def decline(order_id: str) -> None:
    """Fails for good."""
    work("tried", order_id, None)
    raise Declined(f"card of {order_id} declined")


@app.task(base=IdempotentTask, bind=True, idempotency={"key": "order_id"}, max_retries=3)
def endings(self: Any, order_id: str, ending: str) -> Any:
    """Ends as it is told."""
    retries = self.request.retries
    work("tried", order_id, None, retries=retries, fence=self.lease.fence, derived=self.lease.derived_key("gateway"))
    if ending == "return":
        return f"{order_id} by {self.lease.fence}"
    if ending == "raise":
        raise ValueError(f"no {order_id}")
    if ending == "retry" and retries == 0:
        raise self.retry(countdown=0)
    if ending == "ignore":
        raise Ignore
    if ending == "reject":
        raise Reject("no", requeue=False)
    if ending == "requeue" and not self.request.delivery_info.get("redelivered"):
        raise Reject("again", requeue=True)
    if ending == "replace":
        return self.replace(charge.si(order_id))
    if ending == "replace itself" and not self.request.replaced_task_nesting:
        return self.replace(endings.si(order_id, ending))
    if ending == "exit":
        raise SystemExit(3)
    return f"{order_id} done"


@app.task(base=IdempotentTask, idempotency={"key": "name"})
def value(name: str) -> Any:
    """Returns one of `VALUES`, or something that cannot be kept."""
    if name == "object":
        return work("returned", name, object())
    if name == "50 MB":
        return work("returned", name, os.urandom(25_000_000).hex())
    return work("returned", name, VALUES[name])


@app.task
def collect(value: Any, name: str) -> None:
    """A plain callback that writes down what it was given."""
    Journal.from_env().write("collected", name, value=value)
