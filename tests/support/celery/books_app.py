"""An app that keeps its books in the SQLite file that is its idempotency store too: BOOKS is the file."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from typing import Any

from celery import Celery

from celery_idempotent import IdempotentTask
from tests.support.celery.apps import from_env
from tests.support.celery.gates import Gates
from tests.support.celery.journal import Journal
from tests.support.celery.shop import work

app = from_env(Celery("books"))


@app.task(base=IdempotentTask, idempotency={"key": "order_id"})
def charge(order_id: str) -> str:
    """Takes effect elsewhere."""
    return str(work("charged", order_id, f"charged {order_id}"))


@app.task(base=IdempotentTask, bind=True, idempotency={"key": "order_id"})
def book(self: Any, order_id: str) -> str:
    """Takes effect in the books, and is settled with it."""
    Journal.from_env().write("started", order_id)
    with closing(sqlite3.connect(os.environ["BOOKS"])) as books, books:
        books.execute("INSERT INTO books VALUES (?)", (order_id,))
        self.lease.settle(f"booked {order_id}", using=books)
        Gates.from_env().wait(f"before the commit of {order_id}")
    Gates.from_env().wait(f"after the commit of {order_id}")
    return f"booked {order_id}"
