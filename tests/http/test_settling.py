"""The response is recorded in the view's own transaction: effect and record commit together, and all get it."""

from __future__ import annotations

import asyncio
import re
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from celery_idempotent import current_lease
from celery_idempotent.errors import ConfigurationError
from celery_idempotent.http import IdempotencyMiddleware, Response, wsgi
from tests.support.http.inproc import request_asgi, request_wsgi
from tests.support.waiting import wait_until

SETTLED = (201, {"Location": "/orders/1"}, "settled")


class Orders:
    """A view that inserts an order, and settles within the same transaction."""

    def __init__(self, path: Path, how: str) -> None:
        self.path, self.how = path, how
        self.settled: object = SETTLED
        with closing(sqlite3.connect(path)) as connection:
            connection.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY)")

    def count(self) -> int:
        with closing(sqlite3.connect(self.path)) as connection:
            return int(connection.execute("SELECT count(*) FROM orders").fetchone()[0])

    def __call__(self, environ: Any, start_response: Any) -> list[bytes]:
        with closing(sqlite3.connect(self.path)) as connection:
            connection.execute("INSERT INTO orders DEFAULT VALUES")
            lease = current_lease()
            assert lease is not None
            lease.settle(self.settled, using=connection)
            if self.how != "open":
                connection.commit()
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


@pytest.mark.parametrize(
    ("settled", "got"),
    [
        ({"id": 1}, "got dict"),
        (({"id": 1}, 201, {}), "got (dict, int, dict)"),
        ((201, {"Location": 1}, ""), "got (int, dict, str): names and values of headers are text, got int"),
        ((201, {"X-Name": "\u0142"}, ""), "got (int, dict, str): 'latin-1' codec can't encode"),
        ((201, ["Location"], ""), "got (int, list, str): too many values to unpack"),
        (
            SimpleNamespace(status_code=201, headers={}, is_rendered=False),
            "got SimpleNamespace: it is not rendered yet. Render it first: response.render(), in a view of Django REST "
            "framework self.finalize_response(request, response).render().",
        ),
    ],
)
def test_what_is_no_response_is_refused_before_it_is_committed(tmp_path: Path, settled: object, got: str) -> None:
    orders = Orders(tmp_path / "shop.db", "return")
    app = wsgi.IdempotencyMiddleware(orders, store=f"sqlite:///{tmp_path}/shop.db", scope=None)
    orders.settled = settled
    with pytest.raises(ConfigurationError, match=re.escape(got)):
        request_wsgi(app)
    assert orders.count() == 0
    orders.settled = SETTLED
    assert request_wsgi(app).status == 201
    assert orders.count() == 1


@pytest.mark.nightly
def test_of_django_the_first_caller_gets_its_cookies_and_what_is_not_rendered_is_refused(tmp_path: Path) -> None:
    code = """
import sys
import django
from django.conf import settings
settings.configure(
    ALLOWED_HOSTS=["*"], ROOT_URLCONF=__name__, SECRET_KEY="-", INSTALLED_APPS=["rest_framework"],
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": sys.argv[1]}},
    REST_FRAMEWORK={"DEFAULT_AUTHENTICATION_CLASSES": [], "UNAUTHENTICATED_USER": None},
    MIDDLEWARE=["celery_idempotent.http.django.IdempotencyMiddleware"],
    IDEMPOTENCY_HTTP={"store": "django://default", "scope": None},
)
django.setup()
from django.db import connection, transaction
from django.http import JsonResponse
from django.test import Client
from django.urls import path
from rest_framework.decorators import api_view
from rest_framework.response import Response
from celery_idempotent import current_lease

def settle(response):
    with transaction.atomic():
        connection.cursor().execute("INSERT INTO orders DEFAULT VALUES")
        current_lease().settle(response, using="default")
    return response

def plain(request):
    response = JsonResponse({"id": 1}, status=201)
    response.set_cookie("cart", "42")
    return settle(response)

@api_view(["POST"])
def unrendered(request):
    return settle(Response({"id": 1}, 201))

urlpatterns = [path("plain", plain), path("unrendered", unrendered)]
cursor = connection.cursor()
cursor.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY)")
client = Client(raise_request_exception=False)
for target, statuses, cookies, orders in (
    ("/unrendered", [500, 500], [False, False], 0),
    ("/plain", [201, 201], [True, False], 1),
):
    replies = [client.post(target, headers={"Idempotency-Key": target}) for _ in range(2)]
    assert [reply.status_code for reply in replies] == statuses
    assert ["cart" in reply.cookies for reply in replies] == cookies, target
    assert cursor.execute("SELECT count(*) FROM orders").fetchone() == (orders,)
"""
    command = [sys.executable, "-c", code, str(tmp_path / "shop.db")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


class Parts(list[bytes]):
    """A response of WSGI, whose server calls ``close`` when it is out."""

    def __init__(self, close: Callable[[], None]) -> None:
        super().__init__([b"inserted"])
        self.close = close


class Late(Orders):
    """A view that commits when its response is out, in the file of the store."""

    def __call__(self, environ: Any, start_response: Any) -> Any:
        connection = self.insert()
        start_response("201 Created", [])
        return Parts(partial(self.commit, connection))

    async def asgi(self, scope: Any, receive: Any, send: Any) -> None:
        connection = self.insert()
        await send({"type": "http.response.start", "status": 201, "headers": []})
        await send({"type": "http.response.body", "body": b"inserted"})
        self.commit(connection)

    def insert(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self.path, check_same_thread=False)
        connection.execute("INSERT INTO orders DEFAULT VALUES")
        return connection

    def commit(self, connection: sqlite3.Connection) -> None:
        connection.commit()
        connection.close()


@pytest.mark.parametrize("kind", ["asgi", "wsgi"])
def test_a_transaction_that_waits_for_the_response_that_waits_for_it_is_logged(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    late = Late(tmp_path / "shop.db", "late")
    options: Any = {"store": f"sqlite:///{tmp_path}/shop.db", "scope": None, "settle_timeout": 0.2}
    asgi_app = IdempotencyMiddleware(late.asgi, **options)
    wsgi_app = wsgi.IdempotencyMiddleware(late, **options)

    def call() -> Response:
        return request_wsgi(wsgi_app) if kind == "wsgi" else asyncio.run(request_asgi(asgi_app))

    assert call().status == 201
    assert "is answered before its end is recorded, which takes longer than 0.2 s" in caplog.text
    wait_until(lambda: (reply := call()).status == 201 and reply.header("idempotent-replayed"))
    assert late.count() == 1
