"""Servers that are killed, stores that go away: a request takes effect once, or its client is not answered."""

from __future__ import annotations

import http.client
import sqlite3
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from tests.support.http.server import Reply, WebServer, fresh
from tests.support.servers import RedisServer
from tests.support.waiting import wait_until

GONE = (OSError, http.client.HTTPException)


def answered(web: WebServer, key: str, **query: object) -> Reply:
    """Repeat a request until it is answered, by 409 until then, and return the answer."""
    replies: list[Reply] = []

    def is_answered() -> bool:
        replies.append(web.call(key, tag=key, **query))  # type: ignore[arg-type]
        return replies[-1].status == 201

    wait_until(is_answered, 20)
    assert {reply.kind for reply in replies[:-1]} <= {"in-progress"}
    return replies[-1]


def test_a_server_that_is_killed_in_a_handler_leaves_the_request_to_its_repetition(web: WebServer) -> None:
    key = fresh()
    with pytest.raises(GONE):
        web.call(key, tag=key, then="die")
    web.revive()
    assert not answered(web, key, then="die").replayed
    assert web.call(key, tag=key, then="die").replayed
    assert web.count(key, "lease") == 2


@pytest.mark.nightly
def test_a_server_that_is_killed_while_it_sends_a_stream_leaves_the_request_to_its_repetition(
    serve: Callable[[str], WebServer],
) -> None:
    """What it has sent until then is known to no record."""
    for kind in ("starlette", "flask"):
        web, key = serve(kind), fresh()
        with pytest.raises(GONE):
            web.call(key, tag=key, die="response", parts=3, type="text/event-stream")
        web.revive()
        assert answered(web, key, die="response", parts=3, type="text/event-stream").body.endswith(b"part 2 ")
        assert web.count(key, "lease") == 2


def test_what_commits_after_the_response_is_recorded_with_settle_at_return(serve: Callable[[str], WebServer]) -> None:
    """FastAPI leaves dependencies with yield after it has sent: there a process may die, and a commit may fail."""
    web, key = serve("fastapi"), fresh()
    with pytest.raises(GONE):
        web.call(key, tag=key, die="exit")
    web.revive()
    assert not answered(web, key, die="exit").replayed
    assert web.call(key, tag=key, die="exit").replayed
    assert (web.count(key, "lease"), web.count(f"{key}-committed")) == (2, 1)
    key = fresh()
    assert [web.call(key, tag=key, exit="raise").status for _ in range(2)] == [500, 500]
    assert (web.count(key, "lease"), web.count(f"{key}-committed")) == (2, 0)


@pytest.mark.parametrize("kind", ["starlette", "flask"])
def test_an_order_settled_in_its_transaction_is_placed_once_whenever_its_server_is_killed(
    kind: str, tmp_path: Path
) -> None:
    """In the handler, after the effect, before the commit, after it, and while the response is sent."""
    shop = tmp_path / "shop.db"
    with closing(sqlite3.connect(shop)) as connection:
        connection.execute("CREATE TABLE orders (tag TEXT)")
        connection.commit()
    web = WebServer(kind, tmp_path, f"sqlite:///{shop}")
    keys = {fresh(): stage for stage in ("handler", "effect", "settle", "commit", "response")}
    for key, stage in keys.items():
        stream = {"stream": 1} if stage == "response" else {}
        with pytest.raises(GONE):
            web.call(key, tag=key, order=1, die=stage, **stream)
        web.revive()
    for key, stage in keys.items():
        stream = {"stream": 1} if stage == "response" else {}
        replies = [answered(web, key, order=1, die=stage, **stream) for _ in range(2)]
        assert [reply.body for reply in replies] == [f"order {key}".encode()] * 2, stage
        assert [reply.replayed for reply in replies] == [stage in ("commit", "response"), True], stage
    web.stop()
    with closing(sqlite3.connect(shop)) as connection:
        placed = dict(connection.execute("SELECT tag, count(*) FROM orders GROUP BY tag").fetchall())
    assert placed == dict.fromkeys(keys, 1)


@pytest.fixture(params=["starlette", "flask", "django", "django-asgi"])
def alone(
    request: pytest.FixtureRequest, tmp_path: Path, own_redis: Callable[..., RedisServer]
) -> Iterator[tuple[WebServer, RedisServer]]:
    """A server and the store that is its alone."""
    store = own_redis()
    server = WebServer(request.param, tmp_path, store.url(0))
    yield server, store
    server.stop()


def test_a_store_that_goes_away_holds_up_no_response_for_long(alone: tuple[WebServer, RedisServer]) -> None:
    web, store = alone
    key = fresh()
    assert web.call(key, tag=key).status == 201
    other = fresh()
    with ThreadPoolExecutor(1) as client:
        first = client.submit(web.call, other, tag=other, seconds=1)
        wait_until(lambda: web.count(other) == 1)
        store.kill()
        began = time.monotonic()
        assert first.result().status == 201
        assert time.monotonic() - began < 1 + 5 + 3  # its work, settle_timeout, and what the machine takes
    wait_until(lambda: other in web.log.read_text(), 60)  # which response was sent unrecorded
    reply = web.call(key, tag=key)
    assert (reply.status, reply.kind) == (503, "store-unavailable")
    assert int(reply.headers["Retry-After"]) >= 1
    assert web.count(key) == 1


@pytest.mark.nightly
def test_daphne_ends_once_it_has_answered_what_it_was_carrying_out(
    tmp_path: Path, fresh_redis: Callable[[], str]
) -> None:
    """It cancels requests, and its loop waits for nothing else."""
    web, key = WebServer("daphne", tmp_path, fresh_redis()), fresh()
    try:
        with ThreadPoolExecutor() as clients:
            reply = clients.submit(web.call, key, tag=key, seconds=1.5)
            wait_until(lambda: web.count(key) == 1, 10)
            web.process.terminate()
            assert reply.result().status == 201
        assert web.process.wait(20) == 0
        web.revive()
        assert web.call(key, tag=key, seconds=1.5).replayed
    finally:
        web.stop()
