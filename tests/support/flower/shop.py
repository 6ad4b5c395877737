"""The app that Flower watches: one task, that waits at a gate which has the order's name."""

from __future__ import annotations

from celery import Celery

from celery_idempotent import IdempotentTask
from tests.support.celery.apps import from_env
from tests.support.celery.gates import Gates

app = from_env(Celery("shop"))


@app.task(base=IdempotentTask, name="shop.charge", idempotency={"key": "order_id"})
def charge(order_id: str, cents: int) -> str:
    Gates.from_env().wait(order_id)
    return f"receipt for {order_id}"


@app.task(name="shop.greet")
def greet(name: str) -> str:
    """A plain task."""
    return f"hello {name}"
