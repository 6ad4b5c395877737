"""Requests on real servers, as the options of the tests' applications have them guarded, compared and read."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from celery_idempotent.testing._http_client import request_bytes
from tests.http.conftest import OTHERS
from tests.support.http.server import WebServer, fresh
from tests.support.waiting import wait_until


@pytest.mark.parametrize("request_", [{"method": "PUT"}, {"method": "DELETE"}, {"path": "/exempt/a"}])
def test_others_pass(web: WebServer, request_: dict[str, str]) -> None:
    key = fresh()
    for _ in range(2):
        assert web.call(key, tag=key, **request_).status == 201  # type: ignore[arg-type]
    assert web.count(key, "bare") == 2


@pytest.mark.parametrize("request_", [{"method": "PATCH"}, {"path": "/exemption"}])
def test_methods_that_change_something_are_guarded_and_paths_by_whole_segments(
    web: WebServer, request_: dict[str, str]
) -> None:
    key = fresh()
    assert [web.call(key, tag=key, **request_).replayed for _ in range(2)] == [False, True]  # type: ignore[arg-type]


def test_a_caller_may_be_let_through(web: WebServer) -> None:
    """By a scope that returns UNGUARDED; the name of a header lets nobody through."""
    key = fresh()
    replies = [web.call(key, tag=key, caller="pass") for _ in range(2)]
    assert [reply.status for reply in replies] == [201, 201]
    assert web.count(key) == (1 if web.kind == "flask" else 2)


@pytest.mark.parametrize(
    "other", [{"path": "/%6Frders"}, {"headers": {"Accept-Language": "de"}}], ids=["escaped path", "header"]
)
def test_a_key_of_a_request_that_differs_where_the_options_compare_is_refused(
    web: WebServer, other: dict[str, object]
) -> None:
    key = fresh()
    assert web.call(key, tag=key).status == 201
    assert web.call(key, tag=key, **other).kind == "key-reused"  # type: ignore[arg-type]
    assert web.count(key) == 1


def test_a_request_that_takes_longer_than_its_lease_runs_once(web: WebServer) -> None:
    key = fresh()
    with ThreadPoolExecutor(1) as client:
        first = client.submit(web.call, key, tag=key, seconds=3.5)
        wait_until(lambda: web.count(key) == 1)
        time.sleep(2.5)
        assert web.call(key, tag=key, seconds=3.5).kind == "in-progress"
        assert first.result().status == 201
    assert web.call(key, tag=key, seconds=3.5).replayed
    assert web.count(key) == 1


@pytest.mark.parametrize("path", ["/exempt/get-then-set", "/orders"])
def test_of_many_at_once_on_four_processes_one_runs_where_get_then_set_runs_several(
    serve: Callable[[str], WebServer], path: str
) -> None:
    web, key = serve("flask"), fresh()

    def call(_: int) -> str:
        return web.call(key, tag=key, path=path, seconds=0.3).summary

    with ThreadPoolExecutor(100) as clients:
        found = set(clients.map(call, range(100)))
    assert found <= {"201", "201 replayed", "409 in-progress"}
    runs = web.count(key)
    assert runs == 1 if path == "/orders" else runs > 1


@pytest.mark.parametrize("kind", ["starlette", "django-asgi", *OTHERS])
def test_a_lease_ends_with_its_request_where_others_wait_behind_it_on_its_connection(
    serve: Callable[[str], WebServer], kind: str
) -> None:
    """Servers begin what waits within the call that sends the last part, and so in the context of its caller."""
    web, key, other = serve(kind), fresh(), fresh()
    caller, head = ("X-Api-Key", "anna"), ("Idempotency-Key", key)
    first = request_bytes("POST", f"/orders?tag={key}&bytes=2000&parts=1", [caller, head])
    with web.connect() as connection:
        connection.send(first + first + request_bytes("POST", f"/orders?tag={other}", [caller]))
        wait_until(lambda: web.count(other) == 1)
    assert (web.count(key), web.count(other, "bare")) == (1, 1)


@pytest.mark.parametrize("kind", ["starlette", *OTHERS])
def test_a_lease_ends_with_an_upload_whose_body_came_under_it(serve: Callable[[str], WebServer], kind: str) -> None:
    """Servers that have stopped reading go on within the call that asks for more, in the context of its caller."""
    web, key, other = serve(kind), fresh(), fresh()
    caller = ("X-Api-Key", "anna")
    upload = request_bytes("POST", f"/uploads/a?tag={key}", [caller, ("Idempotency-Key", key)], b"x" * 120_000)
    with web.connect() as connection:
        connection.send(upload[:100_000], upload[100_000:], pause=0.3)
        assert connection.read().summary == "201"
        connection.send(request_bytes("POST", f"/uploads/a?tag={other}", [caller]))
        assert connection.read().summary == "201"
    assert (web.count(key, "lease"), web.count(other, "bare")) == (1, 1)


# -- uploads -----------------------------------------------------------------------------------------------------------

SIZE = 50_000_000


def head(key: str, path: str) -> bytes:
    """Return the head of an upload."""
    headers = [("X-Api-Key", "anna"), ("Idempotency-Key", key), ("Expect", "100-continue")]
    empty = request_bytes("POST", f"{path}?tag={key}", headers)
    return empty.replace(b"Content-Length: 0", b"Content-Length: %d" % SIZE)


@pytest.mark.parametrize("kind", ["starlette", "flask"])
def test_an_upload_of_50_mb_is_taken_where_bodies_are_not_compared(
    serve: Callable[[str], WebServer], kind: str
) -> None:
    web, key = serve(kind), fresh()
    assert web.call(key, b"x" * SIZE, path="/uploads/a", tag=key).summary == "201"
    with web.connect() as connection:  # its repetition is answered before it is sent
        connection.send(head(key, "/uploads/a"))
        assert connection.read().summary == "201 replayed"
    assert web.call(key, b"x", path="/uploads/a", tag=key).kind == "key-reused"  # the length is compared
    # A proxy sends it all, and has no answer where the server closes its connection before that.
    assert web.call(key, b"x" * SIZE, path="/uploads/a", tag=key).summary == "201 replayed"
    assert web.call(key, b"x" * (SIZE - 1), path="/uploads/a", tag=key).kind == "key-reused"
    assert web.count(key, "lease") == 1


@pytest.mark.parametrize("kind", ["starlette", "flask"])
def test_an_upload_that_is_cut_off_is_taken_when_it_comes_whole(serve: Callable[[str], WebServer], kind: str) -> None:
    web, key, content = serve(kind), fresh(), b"x" * 90_000
    headers = [("X-Api-Key", "anna"), ("Idempotency-Key", key)]
    with web.connect() as connection:
        connection.send(request_bytes("POST", f"/uploads/a?tag={key}", headers, content)[:-40_000], b"", pause=0.5)
    replies = []

    def is_known() -> bool:
        replies.append(web.call(key, content, path="/uploads/a", tag=key))
        return replies[-1].kind != "in-progress"

    wait_until(is_known)
    assert replies[-1].summary == "201"
    assert content in replies[-1].body
    assert web.count(key) == 1


@pytest.mark.parametrize("kind", ["starlette", "fastapi"])
def test_an_upload_of_50_mb_is_refused_before_its_client_sends_it(serve: Callable[[str], WebServer], kind: str) -> None:
    """uvicorn sends 100 Continue once the body is read; gunicorn before it calls any application."""
    web, key = serve(kind), fresh()
    with web.connect() as connection:
        connection.send(head(key, "/orders"))
        assert connection.first_line().startswith(b"HTTP/1.1 413")
    assert web.count(key) == 0
