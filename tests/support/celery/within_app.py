"""A shop whose charges and whose idempotency records are in one database, and are committed together."""

from __future__ import annotations

import os
import uuid
from typing import Any

from celery import Celery

from celery_idempotent import IdempotentTask
from tests.support.celery.apps import from_env
from tests.support.celery.business import Business
from tests.support.celery.gates import Gates
from tests.support.celery.journal import Journal

app = from_env(Celery("within"))
app.conf.idempotency = {"lease_ttl": float(os.environ.get("LEASE_TTL", "600")), "max_crashes": 50}


@app.task(base=IdempotentTask, bind=True, idempotency={"key": "order_id"})
def charge(self: Any, order_id: str, how: str = "commit") -> str:
    """Charge an order, and end as told: "commit", "forget to commit", "raise late"."""
    journal, gates, business = Journal.from_env(), Gates.from_env(), Business(os.environ["STORE_URL"])
    journal.write("started", order_id)
    taken = uuid.uuid4().hex
    with business.transaction() as connection:
        business.charge(connection, order_id, taken)
        gates.wait(f"charged {order_id}")
        self.lease.settle(taken, using=connection)
        gates.wait(f"settled {order_id}")
        if how == "forget to commit":
            connection.rollback()
    gates.wait(f"committed {order_id}")
    if how == "raise late":
        raise ValueError("the receipt could not be sent")
    return "this is not the result"
