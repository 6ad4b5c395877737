"""A Celery app whose results are too large for their records."""

from __future__ import annotations

import os
from typing import Any

from celery import Celery

from celery_idempotent import IdempotentTask
from tests.support.celery.apps import from_env
from tests.support.celery.gates import Gates
from tests.support.celery.journal import Journal

SIZE = 3 * 1024**2

app = from_env(Celery("large"))
app.conf.idempotency = {"large_results": os.environ.get("LARGE_RESULTS"), "compression": "none"}


def text(name: str) -> str:
    """Return a result of 3 MiB that is not like another one's."""
    return f"{name} " * (SIZE // (len(name) + 1) + 1)


def work(name: str) -> dict[str, Any]:
    Journal.from_env().write("made", name)
    Gates.from_env().wait(f"made {name}")
    return {"name": name, "text": text(name), "pair": (1, None)}


@app.task(base=IdempotentTask, idempotency={"key": "name"})
def report(name: str) -> dict[str, Any]:
    """Returns 3 MiB."""
    return work(name)


@app.task(base=IdempotentTask, idempotency={"key": "name"}, ignore_result=True)
def unread(name: str) -> dict[str, Any]:
    """Returns 3 MiB to nobody."""
    return work(name)


@app.task(base=IdempotentTask, idempotency={"key": "name"})
def bundle(name: str) -> dict[str, Any]:
    """Returns 3 MiB, to a callback too."""
    return work(name)


@app.task
def measured(result: dict[str, Any]) -> None:
    """A plain callback that writes down what it was given."""
    right = result == {"name": result["name"], "text": text(result["name"]), "pair": [1, None]}
    Journal.from_env().write("measured", result["name"], right=right)
