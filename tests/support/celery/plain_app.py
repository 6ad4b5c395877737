"""A Celery app without idempotency: what the harness itself is tested with, and what plain Celery is compared by."""

from __future__ import annotations

import os

from celery import Celery

from tests.support.celery.apps import from_env
from tests.support.celery.gates import Gates
from tests.support.celery.journal import Journal

app = from_env(Celery("plain", include=["pytest_celery.vendors.worker.tasks"]))


@app.task(acks_late=True)
def charge(order: str) -> str:
    """Charge an order: the journal is the ledger."""
    journal, gates = Journal.from_env(), Gates.from_env()
    journal.write("started", order)
    gates.wait("before")
    journal.write("charged", order)
    gates.wait("after")
    return f"charged {order}"


@app.task
def whoami() -> int:
    """Return the pid of the process that runs tasks."""
    return os.getpid()
