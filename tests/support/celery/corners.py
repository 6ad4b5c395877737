"""A Celery app with the tasks of the corner tests."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from celery import Celery
from celery.exceptions import Retry

from celery_idempotent import IdempotentTask
from celery_idempotent.celery import app as binding
from tests.support.celery.apps import from_env
from tests.support.celery.gates import Gates
from tests.support.celery.journal import Journal

app = from_env(Celery("corners"))
app.conf.idempotency = {
    "lease_ttl": float(os.environ.get("LEASE_TTL", "60")),
    "max_crashes": int(os.environ.get("MAX_CRASHES", "3")),
}
binding.GRACE = float(os.environ.get("GRACE", binding.GRACE))


@app.task(base=IdempotentTask, idempotency={"key": "order_id"})
def charge(order_id: str) -> str:
    Journal.from_env().write("started", order_id)
    Gates.from_env().wait(f"before {order_id}")
    Journal.from_env().write("charged", order_id)
    return f"charged {order_id}"


@app.task(base=IdempotentTask, idempotency={"key": "order_id"}, time_limit=1)
def limited(order_id: str) -> str:
    return charge(order_id)


@app.task(base=IdempotentTask, bind=True, idempotency={"key": "order_id"})
def stamped(self: Any, order_id: str) -> Any:
    """Returns its stamp, after one deferral where another publish holds the gate."""
    return (self.request.stamps or {}).get("tenant")


@app.task(base=IdempotentTask, idempotency={"key": "order_id"})
def leave(order_id: str) -> None:
    Journal.from_env().write("charged", order_id)
    sys.exit(1)


@app.task(base=IdempotentTask, bind=True, idempotency={"key": "order_id"}, max_retries=1)
def hasty(self: Any, order_id: str) -> None:
    """Retries at once, and takes its time to say so: the retry runs before this attempt has released its lease."""
    Journal.from_env().write("tried", order_id, retries=self.request.retries)
    try:
        raise self.retry(countdown=0, exc=ValueError(f"no {order_id}"))
    except Retry:
        time.sleep(1)
        raise


@app.task(base=IdempotentTask, bind=True, idempotency={"key": "order_id"})
def again(self: Any, order_id: str) -> str:
    Journal.from_env().write("tried", order_id, nesting=self.request.replaced_task_nesting)
    if not self.request.replaced_task_nesting:
        return self.replace(again.si(order_id))
    return f"done {order_id}"


@app.task
def mail(value: Any, subject: str, body: str = "", tasks: Any = ()) -> None:
    Journal.from_env().write("mailed", subject, value=value, body=body, tasks=list(tasks))


@app.task(base=IdempotentTask, bind=True, retry_on_worker_lost=True, default_retry_delay=0)
def fragile(self: Any, order_id: str) -> str:
    Journal.from_env().write("started", order_id, store_key=self.lease.key)
    Gates.from_env().wait(f"before {order_id}")
    return f"done {order_id}"
