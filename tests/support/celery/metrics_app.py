"""Tasks of workers whose metrics are scraped."""

from __future__ import annotations

import os
import sys
from typing import Any

from celery import Celery

from celery_idempotent import IdempotentTask
from celery_idempotent.metrics import prometheus
from tests.support.celery.apps import from_env
from tests.support.celery.gates import Gates
from tests.support.celery.journal import Journal

app = from_env(Celery("metrics"))
app.conf.idempotency = {"key": "order_id"}

if "METRICS_PORT" in os.environ:  # in workers, and never in the test's own process
    prometheus.install(port=int(os.environ["METRICS_PORT"]), address="127.0.0.1")


@app.task(base=IdempotentTask)
def charge(order_id: str) -> str:
    Journal.from_env().write("ran", order_id)
    return f"charged {order_id}"


@app.task(base=IdempotentTask, bind=True)
def flaky(self: Any, order_id: str) -> str:
    Journal.from_env().write("ran", order_id)
    if self.request.retries < 1:
        raise self.retry(countdown=0.1)
    return f"charged {order_id}"


@app.task(base=IdempotentTask)
def leaves(order_id: str) -> str:
    """Ends its process, the first time."""
    journal = Journal.from_env()
    journal.write("ran", order_id)
    if journal.count("ran", order_id) == 1:
        sys.exit(3)
    return f"charged {order_id}"


@app.task(base=IdempotentTask)
def slow(order_id: str) -> str:
    """Stands at a gate, the first time."""
    journal = Journal.from_env()
    journal.write("ran", order_id)
    if journal.count("ran", order_id) == 1:
        Gates.from_env().wait(order_id)
    return f"charged {order_id}"
