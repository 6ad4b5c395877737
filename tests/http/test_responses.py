"""Responses on real servers: which are kept, in parts, of files, and to clients that go while they are sent."""

from __future__ import annotations

import http.client
from contextlib import suppress

import pytest

from celery_idempotent.testing._http_client import request_bytes
from tests.support.http.server import Reply, WebServer, fresh
from tests.support.waiting import wait_until

BOTH = pytest.mark.parametrize("path", ["/orders", "/async/orders"])


def settled(web: WebServer, key: str, **query: object) -> Reply:
    """Repeat a request until it is no more in progress, for its end is recorded after its last byte was sent."""
    replies: list[Reply] = []

    def is_known() -> bool:
        replies.append(web.call(key, tag=key, **query))  # type: ignore[arg-type]
        return replies[-1].kind != "in-progress"

    wait_until(is_known)
    return replies[-1]


# -- what is kept ------------------------------------------------------------------------------------------------------


def test_a_response_without_content_is_replayed_without_a_length(web: WebServer) -> None:
    key = fresh()
    first, second = (web.call(key, tag=key, status=204) for _ in range(2))
    assert (first.status, first.replayed) == (204, False)
    assert (second.status, second.replayed, second.headers["Content-Length"]) == (204, True, None)


def test_not_modified_may_be_tried_again(web: WebServer) -> None:
    key = fresh()
    assert [web.call(key, tag=key, status=304).summary for _ in range(2)] == ["304", "304"]


def test_the_options_decide_which_headers_are_kept(web: WebServer) -> None:
    key = fresh()
    first, second = web.call(key, tag=key), web.call(key, tag=key)
    for name in ("Location", "Vary", "X-Kept"):
        assert second.headers[name] == first.headers[name] != None  # noqa: E711 - it is there
    for name in ("Set-Cookie", "X-Request-Id", "RateLimit-Remaining", "X-Dropped"):
        assert first.headers[name]
        assert second.headers[name] is None


@pytest.mark.parametrize("wish", ["yes", "no", "fact"])
def test_the_application_decides_what_is_remembered(web: WebServer, wish: str) -> None:
    key = fresh()
    status = 500 if wish == "yes" else 201
    first, second = (web.call(key, tag=key, status=status, remember=wish) for _ in range(2))
    assert first.status == status
    if wish == "fact":
        assert (second.status, second.kind) == (409, "not-kept")
        assert (second.problem["first_status"], second.problem["location"]) == (201, "/orders/1")
        assert second.headers["Retry-After"] is None
    else:
        assert (second.status, second.replayed) == (status, wish == "yes")
    assert web.count(key) == (2 if wish == "no" else 1)


# -- in parts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "query",
    [
        {"parts": 60, "bytes": 990},
        {"parts": 3, "type": "text/event-stream"},
        {"parts": 3, "pause": 0.5},
    ],
    ids=["large", "events", "slow"],
)
@BOTH
def test_a_response_that_is_not_kept_is_known_to_have_been_sent(
    web: WebServer, query: dict[str, object], path: str
) -> None:
    key, query = fresh(), {**query, "path": path}
    first = web.call(key, tag=key, **query)  # type: ignore[arg-type]
    assert first.status == 201
    assert first.body.startswith(b"run 1")
    assert b"part" in first.body
    second = settled(web, key, **query)
    # Django on WSGI reads a stream of asyncio's whole before it hands it on, and so has it whole.
    assert second.kind == "not-kept" or (second.body == first.body and (web.kind, path) == ("django", "/async/orders"))
    assert web.count(key) == 1


@BOTH
def test_a_client_that_goes_in_mid_stream_has_had_what_was_done(web: WebServer, path: str) -> None:
    key, query = fresh(), {"parts": 60, "bytes": 2000, "pause": 0.02}
    target = f"{path}?tag={key}&" + "&".join(f"{name}={value}" for name, value in query.items())
    with web.connect() as connection:
        connection.send(request_bytes("POST", target, [("X-Api-Key", "anna"), ("Idempotency-Key", key)], b"body"))
        connection.first_line()
    second = settled(web, key, path=path, **query)
    assert second.kind == "not-kept" or (second.replayed and (web.kind, path) == ("django", "/async/orders"))
    assert web.count(key) == 1


@BOTH
def test_a_response_in_parts_is_replayed_whole(web: WebServer, path: str) -> None:
    key = fresh()
    first, second = (web.call(key, tag=key, parts=3, path=path) for _ in range(2))
    assert second.replayed
    assert second.body == first.body
    assert first.body.endswith(b"part 2 ")


@BOTH
def test_a_stream_that_breaks_leaves_the_key_free(web: WebServer, path: str) -> None:
    if web.kind == "daphne":
        pytest.skip("daphne leaves the connection open of a response that its application has broken off")
    key = fresh()
    for turn in (1, 2):
        with suppress(OSError, http.client.HTTPException):  # as some servers end it
            settled(web, key, path=path, parts=3, pause=0.6, then="break")
        assert web.count(key) == turn


def test_a_stream_of_a_failure_leaves_the_key_free(web: WebServer) -> None:
    key = fresh()
    for turn in (1, 2):
        reply = settled(web, key, status=500, parts=60, bytes=990)
        assert (reply.status, reply.body.endswith(b"part 59 ")) == (500, True)
        assert web.count(key) == turn


@pytest.mark.parametrize("size", [900, 90_000])
def test_a_file_is_sent_whole_and_kept_if_it_is_small(web: WebServer, size: int) -> None:
    """Servers have ways to send a file themselves, past all middlewares."""
    key = fresh()
    first = web.call(key, tag=key, file=size)
    assert (first.status, len(first.body)) == (201, size)
    second = settled(web, key, file=size)
    if size == 900:
        assert (second.summary, second.body) == ("201 replayed", first.body)
        assert second.headers["ETag"] == first.headers["ETag"]
    else:
        assert second.kind == "not-kept"
    assert web.count(key) == 1
