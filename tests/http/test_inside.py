"""`scope=INSIDE`: the view alone knows the caller, and takes the lease by `begin`."""

from __future__ import annotations

import http.client
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from celery_idempotent.testing._http_client import request_bytes
from tests.support.http.server import WebServer, fresh
from tests.support.waiting import wait_until

#: Servers, and the ways in which a request begins there: in a dependency, a permission, a hook, a view; sync and async.
WAYS = {
    "inside-fastapi": [
        "/sync/sync",
        "/sync/async",
        "/async/sync",
        "/async/async",
        "/view/sync",
        "/view/async",
    ],
    "inside-flask": ["/before/orders", "/view/orders"],
    "inside-drf": ["/permission/orders", "/initial/orders", "/view/orders", "/async/orders"],
    "inside-drf-asgi": ["/permission/orders", "/initial/orders", "/view/orders", "/async/orders"],
}


@pytest.fixture(scope="module", params=list(WAYS))
def inside(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, redis_databases: Any
) -> Iterator[WebServer]:
    """An application whose views know the caller, on a server."""
    db = redis_databases.take()
    server = WebServer(request.param, tmp_path_factory.mktemp("inside"), redis_databases.server.url(db))
    yield server
    server.stop()
    redis_databases.give_back(db)


def test_each_way_to_begin_runs_once_under_a_lease_and_is_replayed(inside: WebServer) -> None:
    for way in WAYS[inside.kind]:
        key = fresh()
        first, *others = [inside.call(key, path=way, tag=key) for _ in range(3)]
        assert (first.status, first.replayed) == (201, False), way
        assert [(each.status, each.body, each.replayed) for each in others] == [(201, first.body, True)] * 2, way
        assert (inside.count(key), inside.count(key, "lease")) == (1, 1), way


def test_a_key_is_the_callers_own(inside: WebServer) -> None:
    key, way = fresh(), WAYS[inside.kind][0]
    replies = [inside.call(key, path=way, caller=caller, tag=key) for caller in ("anna", "ben", "anna")]
    assert [reply.replayed for reply in replies] == [False, False, True]
    assert inside.count(key, "lease") == 2


def test_a_caller_whom_the_view_does_not_know_is_refused(inside: WebServer) -> None:
    for way in WAYS[inside.kind]:
        key = fresh()
        reply = inside.call(key, path=way, caller="", tag=key)
        assert (reply.status, reply.kind) == (401, "caller-unknown"), way
        assert inside.count(key) == 0


def test_what_the_application_refuses_before_it_begins_is_its_own_answer_and_no_error(inside: WebServer) -> None:
    key, way = fresh(), WAYS[inside.kind][0]
    assert inside.call(key, path=way, tag=key).status == 201
    reply = inside.call(key, path=way, caller="locked", tag=key)
    assert (reply.status, reply.kind, reply.replayed) == (403, "", False)
    assert f"{way} did not call begin" not in inside.log.read_text()


def test_without_a_key_and_unguarded_a_request_passes(inside: WebServer) -> None:
    way = WAYS[inside.kind][0]
    for key, caller in ((None, "anna"), (None, ""), (fresh(), "pass")):
        tag = fresh()
        replies = [inside.call(key, path=way, caller=caller, tag=tag) for _ in range(2)]
        assert [(reply.status, reply.replayed) for reply in replies] == [(201, False)] * 2
        assert (inside.count(tag), inside.count(tag, "bare")) == (2, 2)


def test_another_body_is_refused_and_so_is_a_malformed_key(inside: WebServer) -> None:
    key, way = fresh(), WAYS[inside.kind][0]
    assert inside.call(key, b"one", path=way, tag=key).status == 201
    assert inside.call(key, b"two", path=way, tag=key).kind == "key-reused"
    assert inside.call("a b", b"two", path=way, tag=key).kind == "key-malformed"
    assert inside.call(key, b"x" * 20_000, path=way, tag=key).kind == "body-too-large"
    assert inside.count(key) == 1


def test_of_many_at_once_one_runs(inside: WebServer) -> None:
    for way in WAYS[inside.kind][:2]:
        key = fresh()
        with ThreadPoolExecutor(8) as clients:
            calls = [clients.submit(inside.call, key, path=way, tag=key, seconds=0.2) for _ in range(8)]
            replies = [call.result() for call in calls]
        assert {reply.kind for reply in replies} <= {"", "in-progress"}
        assert all(reply.headers["Retry-After"] == "1" for reply in replies if reply.status == 409)
        assert sum(reply.status == 201 and not reply.replayed for reply in replies) == 1
        assert inside.count(key) == 1


def test_a_view_that_fails_leaves_the_key_free(inside: WebServer) -> None:
    key, way = fresh(), WAYS[inside.kind][0]
    for how in ({"status": 500}, {"then": "raise"}, {"status": 400}):
        assert inside.call(key, path=way, tag=key, **how).status == how.get("status", 500)
    assert inside.call(key, path=way, tag=key).status == 201
    assert inside.count(key, "lease") == 4


def test_a_view_that_never_begins_runs_and_is_logged_as_an_error(inside: WebServer) -> None:
    key = fresh()
    replies = [inside.call(key, path="/never", tag=key) for _ in range(2)]
    assert [(reply.status, reply.replayed) for reply in replies] == [(201, False)] * 2
    assert inside.count(key, "bare") == 2
    wait_until(lambda: "the view for POST /never did not call begin(request, account)" in inside.log.read_text())


def test_a_response_that_is_passed_on_is_known_to_have_been_sent_if_its_view_began(inside: WebServer) -> None:
    for way, kind in ((WAYS[inside.kind][-1], "not-kept"), ("/never", "")):
        key = fresh()
        call = partial(inside.call, key, path=way, tag=key, parts=2, bytes=2000)
        first = call()
        # What was sent is recorded when its last part is out.
        second = wait_until(lambda call=call: (reply := call()).kind != "in-progress" and reply)
        assert (first.status, len(first.body) > 2000, second.kind) == (201, True, kind), way


def test_a_view_that_catches_all_does_not_keep_the_middleware_from_answering(inside: WebServer) -> None:
    key = fresh()
    first, second = (inside.call(key, path="/catch", tag=key) for _ in range(2))
    assert (second.status, second.body, second.replayed) == (201, first.body, True)
    wait_until(lambda: "The view for POST /catch went on after begin() had raised" in inside.log.read_text())


@pytest.mark.parametrize("inside", ["inside-fastapi", "inside-drf"], indirect=True)
def test_a_server_that_is_killed_after_begin_leaves_the_request_to_its_repetition(inside: WebServer) -> None:
    key, way = fresh(), WAYS[inside.kind][0]
    with pytest.raises((OSError, http.client.HTTPException)):
        inside.call(key, path=way, tag=key, then="die")
    inside.revive()
    replies = []

    def again() -> bool:
        replies.append(inside.call(key, path=way, tag=key, then="die"))
        return replies[-1].status == 201

    wait_until(again, 20)
    assert {reply.kind for reply in replies[:-1]} <= {"in-progress"}
    assert inside.call(key, path=way, tag=key, then="die").replayed
    assert inside.count(key, "lease") == 2


@pytest.mark.parametrize("inside", ["inside-fastapi"], indirect=True)
def test_a_lease_ends_with_its_request_where_others_wait_behind_it_on_its_connection(inside: WebServer) -> None:
    key, other = fresh(), fresh()
    caller, way = ("X-Api-Key", "anna"), WAYS[inside.kind][-1]
    first = request_bytes("POST", f"{way}?tag={key}&bytes=2000&parts=1", [caller, ("Idempotency-Key", key)])
    with inside.connect() as connection:
        connection.send(first + first + request_bytes("POST", f"/exempt?tag={other}", [caller]))
        wait_until(lambda: inside.count(other) == 1)
    assert (inside.count(key), inside.count(other, "bare")) == (1, 1)
