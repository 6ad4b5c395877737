"""A task that catches up with a document's changes, of which a test counts that none is swallowed."""

from __future__ import annotations

import os
from typing import Any

from celery import Celery

from celery_idempotent import IdempotentTask
from tests.support.celery.apps import from_env
from tests.support.celery.journal import Journal
from tests.support.faults.documents import Documents

app = from_env(Celery("changes"))
app.conf.idempotency = {"lease_ttl": 3, "max_crashes": 1000}
app.conf.idempotency_unique = {"for": float(os.environ.get("UNIQUE_FOR", "3600"))}
app.conf.worker_prefetch_multiplier = 1


def catch_up(task: Any, number: int) -> None:
    Journal.from_env().write("begin", number, task_id=task.request.id)
    Documents(os.environ["DOCUMENTS"]).index(number, float(os.environ.get("SECONDS", "0.1")))


@app.task(base=IdempotentTask, bind=True, unique="number")
def index(self: Any, number: int) -> None:
    """Until its body starts."""
    catch_up(self, number)


@app.task(base=IdempotentTask, bind=True, unique="number", idempotency={"key": "number", "result_ttl": 0})
def index_in_turn(self: Any, number: int) -> None:
    """Likewise, and one at a time."""
    catch_up(self, number)


@app.task(base=IdempotentTask, bind=True, unique={"key": "number", "on_duplicate": "replace"})
def index_newest(self: Any, number: int) -> None:
    """A later call takes the place of one that waits."""
    catch_up(self, number)


TASKS = (index, index_in_turn, index_newest)
