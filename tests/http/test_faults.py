"""Servers that are killed, stores that go away: a request takes effect once, or its client is not answered."""

from __future__ import annotations

import http.client
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.http.server import WebServer, fresh
from tests.support.servers import RedisServer
from tests.support.waiting import wait_until


def test_a_server_that_is_killed_in_a_handler_leaves_the_request_to_its_repetition(web: WebServer) -> None:
    key = fresh()
    with pytest.raises((OSError, http.client.HTTPException)):
        web.call(key, tag=key, then="die")
    web.revive()
    replies = []

    def again() -> bool:
        replies.append(web.call(key, tag=key, then="die"))
        return replies[-1].status == 201

    wait_until(again, 20)
    assert {reply.kind for reply in replies[:-1]} <= {"in-progress"}
    assert not replies[-1].replayed
    assert web.call(key, tag=key, then="die").replayed
    assert web.count(key, "lease") == 2


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
    reply = web.call(key, tag=key)
    assert (reply.status, reply.kind) == (503, "store-unavailable")
    assert int(reply.headers["Retry-After"]) >= 1
    assert web.count(key) == 1
