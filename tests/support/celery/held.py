"""A Celery app whose tasks are held: guarded ones beside a plain one, and one that may not be held for ever."""

from __future__ import annotations

import os

from celery import Celery

from celery_idempotent import IdempotentTask
from tests.support.celery.apps import from_env
from tests.support.celery.gates import Gates
from tests.support.celery.journal import Journal

app = from_env(Celery("held"))
app.conf.idempotency = {"lease_ttl": float(os.environ.get("LEASE_TTL", "60"))}


def work(name: str) -> str:
    journal = Journal.from_env()
    journal.write("started", name)
    Gates.from_env().wait(name)
    journal.write("ended", name)
    return f"done {name}"


@app.task(base=IdempotentTask, idempotency={"key": "name"})
def guarded(name: str) -> str:
    return work(name)


@app.task(base=IdempotentTask, idempotency={"key": "name", "lease_ttl": 1, "max_lease": 1})
def bounded(name: str) -> str:
    return work(name)


@app.task(acks_late=True)
def plain(name: str) -> str:
    return work(name)


def fail_too(*_: object) -> None:
    raise ValueError("the hook fails too")


@app.task(acks_late=True, on_failure=fail_too)
def failing(name: str) -> str:
    """A task that fails at first, and then in its hook."""
    if not Journal.from_env().count("started", name):
        Journal.from_env().write("started", name)
        raise ValueError(f"no {name}")
    return work(name)
