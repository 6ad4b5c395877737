"""The same charge twice: settled within its own transaction, and in a transaction of its own, under a killer."""

from __future__ import annotations

import os
import uuid
from pathlib import Path
from typing import Any

from celery import Celery, signals

from celery_idempotent import IdempotentTask
from celery_idempotent.celery import IdempotentRequest
from tests.support.celery.apps import from_env
from tests.support.celery.business import Business
from tests.support.celery.journal import Journal
from tests.support.faults.killer import Killer

app = from_env(Celery("settle"))
app.conf.idempotency = {"lease_ttl": 600.0, "max_crashes": 100_000}
killer = Killer.from_env() if "DOOM" in os.environ else None


class NoticedRequest(IdempotentRequest):
    """Writes down that a child was lost before its message was acked."""

    def on_failure(self, exc_info: Any, *args: Any, **kwargs: Any) -> Any:
        Journal.from_env().write("killed", self.id)
        return super().on_failure(exc_info, *args, **kwargs)


class Charge(IdempotentTask):
    """A charge on a database that a killer watches."""

    abstract = True
    Request = NoticedRequest
    business: Business | None = None
    connection: Any = None

    def connect(self) -> tuple[Business, Any]:
        if self.connection is None:
            self.business = Business(os.environ["STORE_URL"])
            self.connection = self.business.connect()
        assert self.business is not None
        return self.business, self.connection

    def write(self, order_id: str) -> tuple[str, Any]:
        """Make the run's first statement, and let the killer know."""
        taken = uuid.uuid4().hex
        business, connection = self.connect()
        business.charge(connection, order_id, taken)
        Journal.from_env().write("ran", order_id)
        assert killer is not None
        killer.begins()
        return taken, connection


@app.task(base=Charge, bind=True, idempotency={"key": "order_id"})
def within(self: Any, order_id: str) -> str:
    """Commit the charge and its record together."""
    taken, connection = self.write(order_id)
    self.lease.settle(taken, using=connection)
    connection.commit()
    return str(taken)


@app.task(base=Charge, bind=True, idempotency={"key": "order_id"})
def apart(self: Any, order_id: str) -> str:
    """Commit the charge, and let the record follow in a transaction of its own."""
    taken, connection = self.write(order_id)
    connection.commit()
    return str(taken)


@app.task(base=Charge, bind=True, idempotency={"key": "order_id"})
def at_gateway(self: Any, order_id: str) -> str:
    """Pay at a gateway that takes one payment for a key."""
    Journal.from_env().write("ran", order_id)
    key = str(self.lease.derived_key("charge"))
    (Path(os.environ["GATEWAY"]) / f"{order_id}.{key}").touch()
    assert killer is not None
    killer.begins()
    return key


@signals.task_postrun.connect
def answered(**_: Any) -> None:
    """Celery has stored the result; what remains is to tell the parent, which acks."""
    if killer is not None:
        killer.ends()
