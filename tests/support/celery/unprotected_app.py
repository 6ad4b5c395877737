"""An app whose only task has options and not the base class: nothing of the library is imported but the options."""

from __future__ import annotations

from celery import Celery

from celery_idempotent import Policy
from tests.support.celery.apps import from_env

app = from_env(Celery("unprotected"))


@app.task(idempotency=Policy(key="order"))
def charge(order: str) -> str:
    """Charge an order."""
    return order
