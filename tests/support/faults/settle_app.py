"""A charge under a killer: settled within its own transaction, and asked of a gateway that honours derived keys."""

from __future__ import annotations

import gc
import os
import uuid
from pathlib import Path
from typing import Any

import psutil
from celery import Celery, signals

from celery_idempotent import IdempotentTask
from celery_idempotent.celery import IdempotentRequest
from tests.support.celery.apps import from_env
from tests.support.celery.business import Business
from tests.support.celery.journal import Journal
from tests.support.faults.killer import Killer

app = from_env(Celery("settle"))
app.conf.result_expires = 86_400  # a soak looks at the last answers of a wave after more than ten minutes
app.conf.idempotency = {"lease_ttl": 600.0, "max_crashes": 100_000}
killer = Killer.from_env() if "DOOM" in os.environ else None


class NoticedRequest(IdempotentRequest):
    """Writes down that a child was lost before its message was acked."""

    def on_failure(self, exc_info: Any, *args: Any, **kwargs: Any) -> Any:
        Journal.from_env().write("killed", self.args[0])
        return super().on_failure(exc_info, *args, **kwargs)


class Charge(IdempotentTask):
    """A charge that a killer watches."""

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

    def begin(self, order_id: str) -> None:
        """Let the journal and the killer know that the run has made its first statement."""
        journal = Journal.from_env()
        journal.write("ran", order_id)
        assert killer is not None
        killer.begins(lambda: journal.write("struck", order_id))


@app.task(base=Charge, bind=True, idempotency={"key": "order_id"})
def within(self: Any, order_id: str) -> str:
    """Commit the charge and its record together."""
    taken = uuid.uuid4().hex
    business, connection = self.connect()
    business.charge(connection, order_id, taken)
    self.begin(order_id)
    self.lease.settle(taken, using=connection)
    connection.commit()
    return taken


@app.task(base=Charge, bind=True, idempotency={"key": "order_id"})
def gateway(self: Any, order_id: str) -> str:
    """Ask a gateway that takes one payment for a key; the record follows when the body has returned."""
    self.begin(order_id)
    payment = Path(os.environ["GATEWAY"]) / self.lease.derived_key("charge")
    Journal.from_env().write("asked", order_id, payment=payment.name)
    payment.touch()
    return payment.name


@signals.worker_before_create_process.connect
def forks(**_: Any) -> None:
    """Count the children; Celery collects garbage before each, which takes longer than the fork."""
    if killer is not None:
        killer.forks()
        gc.freeze()


def inherits() -> None:
    """Write down which files of SQLite a child has open: it believes in their locks, which are its parent's."""
    path = os.environ["STORE_URL"].partition("?")[0].removeprefix("sqlite:///")
    for file in psutil.Process().open_files():
        if file.path.startswith(path):
            Journal.from_env().write("inherited", file.path)


if os.environ.get("STORE_URL", "").startswith("sqlite:"):
    os.register_at_fork(after_in_child=inherits)


@signals.task_postrun.connect
def answered(**_: Any) -> None:
    """Celery has stored the result; what remains is to tell the parent, which acks."""
    if killer is not None:
        killer.ends()
