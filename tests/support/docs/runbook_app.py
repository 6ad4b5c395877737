"""The shop of the runbook."""

from __future__ import annotations

import os

from celery import Celery

from celery_idempotent import IdempotentTask
from tests.support.celery.apps import from_env
from tests.support.celery.gates import Gates

app = from_env(Celery("shop"))
app.conf.idempotency = {"lease_ttl": float(os.environ.get("LEASE_TTL", "60")), "key": "order_id"}


@app.task(name="shop.charge", base=IdempotentTask)
def charge(order_id: str) -> str:
    """Charge an order, once the gate of that name is open."""
    Gates.from_env().wait(f"charging {order_id}")
    return f"charged {order_id}"
