"""A Celery app whose tasks take turns: one at a time per customer, and nothing is remembered."""

from __future__ import annotations

from typing import Any

from celery import Celery

from celery_idempotent import IdempotentTask
from tests.support.celery.apps import from_env
from tests.support.celery.gates import Gates
from tests.support.celery.journal import Journal

app = from_env(Celery("turns"))
TURNS: dict[str, Any] = {"key": "customer", "result_ttl": 0}


@app.task(base=IdempotentTask, idempotency=TURNS)
def invoice(customer: str, number: int) -> int:
    """Write an invoice; two of a customer must not be written at the same time."""
    journal = Journal.from_env()
    journal.write("begin", customer, number=number)
    Gates.from_env().wait(f"{customer} {number}")
    journal.write("end", customer, number=number)
    return number


@app.task(base=IdempotentTask, bind=True, idempotency=TURNS)
def remind(self: Any, customer: str) -> str:
    """Retries once, much later."""
    Journal.from_env().write("reminded", customer, retries=self.request.retries)
    if not self.request.retries:
        raise self.retry(countdown=600)
    return customer


@app.task(base=IdempotentTask, idempotency={**TURNS, "key": lambda customer: customer})
def fail(customer: str) -> None:
    """Raise."""
    Journal.from_env().write("failed", customer)
    raise ValueError(customer)
