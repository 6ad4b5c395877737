"""The response is recorded in the view's own transaction: effect and record commit together, and all get it."""

from __future__ import annotations

import sqlite3
import threading
from pathlib import Path
from typing import Any

import pytest

from celery_idempotent import current_lease
from celery_idempotent.http import wsgi
from tests.support.http.inproc import request_wsgi


class Orders:
    """A view that inserts an order, and settles within the same transaction."""

    def __init__(self, path: Path, how: str) -> None:
        self.path, self.how = path, how
        with sqlite3.connect(path) as connection:
            connection.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY)")

    def count(self) -> int:
        with sqlite3.connect(self.path) as connection:
            return int(connection.execute("SELECT count(*) FROM orders").fetchone()[0])

    def __call__(self, environ: Any, start_response: Any) -> list[bytes]:
        connection = sqlite3.connect(self.path)
        connection.execute("INSERT INTO orders DEFAULT VALUES")
        lease = current_lease()
        assert lease is not None
        lease.settle((201, {"Location": "/orders/1"}, "settled"), using=connection)
        if self.how != "open":
            connection.commit()
        connection.close()
        if self.how == "raise":
            raise ValueError("after the commit")
        start_response("200 OK", [("Content-Type", "text/plain")])
        return [b"returned"]


@pytest.mark.parametrize("how", ["return", "raise"])
def test_everyone_gets_the_response_that_was_committed(tmp_path: Path, how: str) -> None:
    orders = Orders(tmp_path / "shop.db", how)
    app = wsgi.IdempotencyMiddleware(orders, store=f"sqlite:///{tmp_path}/shop.db", scope=None)
    replies = [request_wsgi(app) for _ in range(3)]
    assert [(reply.status, reply.body, reply.header("location")) for reply in replies] == [
        (201, b"settled", "/orders/1")
    ] * 3
    assert orders.count() == 1


def test_a_store_that_cannot_confirm_a_commit_in_time_changes_no_response(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = wsgi.IdempotencyMiddleware(
        Orders(tmp_path / "shop.db", "return"), store=f"sqlite:///{tmp_path}/shop.db", scope=None, settle_timeout=0.01
    )
    confirmed, store = threading.Event(), app.binding.guard.store
    get = store.get
    monkeypatch.setattr(store, "get", lambda key: confirmed.wait(10) and get(key))
    replies = [request_wsgi(app)]
    confirmed.set()
    assert [(reply.status, reply.body) for reply in replies] == [(201, b"settled")]


def test_what_was_not_committed_is_not_sent(tmp_path: Path) -> None:
    orders = Orders(tmp_path / "shop.db", "open")
    app = wsgi.IdempotencyMiddleware(orders, store=f"sqlite:///{tmp_path}/shop.db", scope=None)
    reply = request_wsgi(app)
    assert reply.status == 500
    assert b"not-committed" in reply.body
    orders.how = "return"
    assert request_wsgi(app).status == 201
    assert orders.count() == 1
