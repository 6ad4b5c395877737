"""What a client sees of a request with an Idempotency-Key, on real servers."""

from __future__ import annotations

import gzip
import http.client
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from tests.support.http.server import Reply, WebServer, fresh
from tests.support.waiting import wait_until

# -- a request and its repetition --------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [200, 201, 202, 303, 402, 404, 410, 412, 451])
def test_a_response_is_replayed(web: WebServer, status: int) -> None:
    key = fresh()
    first, second = (web.call(key, tag=key, status=status) for _ in range(2))
    assert (first.status, first.replayed) == (status, False)
    assert (second.status, second.body, second.replayed) == (status, first.body, True)
    assert web.count(key, "lease") == 1


@pytest.mark.parametrize("status", [304, 400, 401, 403, 405, 406, 408, 409, 413, 415, 422, 425, 428, 429, 500, 503])
def test_a_refusal_may_be_tried_again(web: WebServer, status: int) -> None:
    key = fresh()
    replies = [web.call(key, tag=key, status=status) for _ in range(2)]
    assert [(reply.status, reply.replayed) for reply in replies] == [(status, False)] * 2
    assert web.count(key, "lease") == 2


def test_a_replay_has_the_headers_of_the_operation_and_none_of_the_first_callers(web: WebServer) -> None:
    key = fresh()
    first, second = web.call(key, tag=key), web.call(key, tag=key)
    assert int(second.headers["Content-Length"]) == len(first.body)
    for name in ("Content-Type", "Location", "Vary", "X-Kept"):
        assert second.headers[name] == first.headers[name] != None  # noqa: E711 - it is there
    for name in ("Set-Cookie", "X-Request-Id", "RateLimit-Remaining", "X-Dropped"):
        assert first.headers[name]
        assert second.headers[name] is None
    assert len(second.headers.get_all("Date", [])) <= 1


def test_a_response_without_content_is_replayed_without_a_length(web: WebServer) -> None:
    key = fresh()
    web.call(key, tag=key, status=204)
    second = web.call(key, tag=key, status=204)
    assert (second.status, second.replayed, second.headers["Content-Length"]) == (204, True, None)


def test_any_bytes_are_replayed(web: WebServer) -> None:
    key = fresh()
    first, second = (web.call(key, tag=key, binary=1) for _ in range(2))
    assert second.replayed
    assert second.body == first.body
    assert second.body.endswith(b"\xff\x00")


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


def test_an_exception_leaves_the_key_free(web: WebServer) -> None:
    key = fresh()
    assert [web.call(key, tag=key, then="raise").status for _ in range(2)] == [500, 500]
    assert web.count(key, "lease") == 2


# -- which requests are guarded ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "request_", [{"key": None}, {"method": "PUT"}, {"method": "GET"}, {"method": "DELETE"}, {"path": "/exempt/a"}]
)
def test_others_pass(web: WebServer, request_: dict[str, str]) -> None:
    tag = fresh()
    given = {"key": tag, **request_}
    for _ in range(2):
        assert web.call(tag=tag, **given).status == 201  # type: ignore[arg-type]
    assert web.count(tag, "bare") == 2


def test_a_path_that_only_begins_like_an_exempt_one_is_guarded(web: WebServer) -> None:
    key = fresh()
    assert [web.call(key, tag=key, path="/exemption").replayed for _ in range(2)] == [False, True]


@pytest.mark.parametrize("method", ["POST", "PATCH"])
def test_methods_that_change_something_are_guarded(web: WebServer, method: str) -> None:
    key = fresh()
    assert [web.call(key, tag=key, method=method).replayed for _ in range(2)] == [False, True]


# -- callers and keys --------------------------------------------------------------------------------------------------


def test_a_key_is_its_callers_own(web: WebServer) -> None:
    key = fresh()
    assert [web.call(key, tag=key, caller=caller).replayed for caller in ("anna", "bert")] == [False, False]
    assert web.count(key) == 2


def test_a_caller_who_is_not_known_is_refused(web: WebServer) -> None:
    key = fresh()
    reply = web.call(key, tag=key, caller="")
    assert (reply.status, reply.kind) == (401, "caller-unknown")
    assert web.count(key) == 0


def test_a_caller_may_be_let_through(web: WebServer) -> None:
    """By a scope that returns UNGUARDED; the name of a header lets nobody through."""
    key = fresh()
    replies = [web.call(key, tag=key, caller="pass") for _ in range(2)]
    assert [reply.status for reply in replies] == [201, 201]
    assert web.count(key) == (1 if web.kind == "flask" else 2)


def test_a_key_is_the_same_bare_and_between_quotation_marks(web: WebServer) -> None:
    key = fresh()
    forms = [key, f'"{key}"', f' "{key}" ', f'"{key}";a=1; b="x"']
    assert [web.call(form, tag=key).replayed for form in forms] == [False, True, True, True]


@pytest.mark.parametrize("key", ['""', '"', '"a', '"a" "b"', "a,b", '"a","b"', "a b", "x" * 256, '"\\a"', "\xfc"])
def test_a_malformed_key_is_refused(web: WebServer, key: str) -> None:
    tag = fresh()
    reply = web.call(key, tag=tag)
    assert (reply.status, reply.kind) == (400, "key-malformed")
    assert web.count(tag) == 0


def raw(*headers: bytes, tag: str = "-", body: bytes = b"body") -> bytes:
    lines = [f"POST /orders?tag={tag} HTTP/1.1".encode(), b"Host: x", b"X-Api-Key: anna", b"Connection: close"]
    return b"\r\n".join([*lines, *headers, b"Content-Length: %d" % len(body), b"", body])


@pytest.mark.parametrize(
    "headers",
    [
        [b"Idempotency-Key:"],
        [b"Idempotency-Key: a", b"Idempotency-Key: b"],
        [b"Idempotency-Key: a", b"idempotency-key: a"],
        [b'Idempotency-Key: "a\\"'],
        [b"Idempotency-Key: " + b"k" * 7000],
        [b"Idempotency-Key: sch\xc3\xb6n"],
        [b"Idempotency-Key: a\tb"],
    ],
    ids=["empty", "two", "two equal", "open", "7 kB", "UTF-8", "tab"],
)
def test_raw_bytes_that_are_no_key_are_refused(web: WebServer, headers: list[bytes]) -> None:
    tag = fresh()
    reply = web.send(raw(*headers, tag=tag))
    assert reply is not None
    assert reply.status == 400
    assert web.count(tag) == 0


def test_a_header_with_an_underscore_is_no_key(web: WebServer) -> None:
    tag = fresh()
    for _ in range(2):
        reply = web.send(raw(f"Idempotency_Key: {tag}".encode(), tag=tag))
        assert reply is not None
    assert web.count(tag, "lease") == 0


# -- what is the same request ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "other",
    [
        {"body": b"another"},
        {"path": "/others"},
        {"path": "/%6Frders"},
        {"method": "PATCH"},
        {"extra": 1},
        {"headers": {"Content-Type": "text/csv"}},
        {"headers": {"Accept-Language": "de"}},
    ],
    ids=["body", "path", "escaped path", "method", "query", "type", "header"],
)
def test_a_key_of_another_request_is_refused(web: WebServer, other: dict[str, object]) -> None:
    key = fresh()
    assert web.call(key, tag=key).status == 201
    reply = web.call(key, tag=key, **other)  # type: ignore[arg-type]
    assert (reply.status, reply.kind) == (422, "key-reused")
    assert web.call(key, tag=key).replayed
    assert web.count(key) == 1


def test_a_key_whose_request_was_refused_takes_another(web: WebServer) -> None:
    key = fresh()
    assert web.call(key, tag=key, status=400).status == 400
    assert web.call(key, b"corrected", tag=key).status == 201


def test_headers_that_are_not_compared_may_differ(web: WebServer) -> None:
    key = fresh()
    replies = [web.call(key, tag=key, headers={"User-Agent": agent, "X-Trace": agent}) for agent in ("a", "b")]
    assert [reply.replayed for reply in replies] == [False, True]


def multipart(boundary: str, content: str) -> dict[str, object]:
    body = f'--{boundary}\r\nContent-Disposition: form-data; name="a"\r\n\r\n{content}\r\n--{boundary}--\r\n'
    return {"body": body.encode(), "headers": {"Content-Type": f"multipart/form-data; boundary={boundary}"}}


def test_a_form_is_the_same_with_another_boundary(web: WebServer) -> None:
    key = fresh()
    forms = [multipart("aaa", "1"), multipart("bbbb", "1"), multipart("ccc", "2")]
    replies = [web.call(key, tag=key, **form) for form in forms]  # type: ignore[arg-type]
    assert [(reply.status, reply.replayed) for reply in replies] == [(201, False), (201, True), (422, False)]


def test_a_body_is_the_same_when_it_was_compressed_later(web: WebServer) -> None:
    key = fresh()
    bodies = [gzip.compress(b"body", mtime=1), gzip.compress(b"body", mtime=2), gzip.compress(b"other", mtime=1)]
    replies = [web.call(key, body, tag=key, headers={"Content-Encoding": "gzip"}) for body in bodies]
    assert [(reply.status, reply.replayed) for reply in replies] == [(201, False), (201, True), (422, False)]


# -- at once, large, slow, broken --------------------------------------------------------------------------------------


def test_of_many_at_once_one_runs_and_the_others_come_again(web: WebServer) -> None:
    key = fresh()

    def call(_: int) -> Reply:
        return web.call(key, tag=key, seconds=0.5)

    with ThreadPoolExecutor(100) as clients:
        replies = list(clients.map(call, range(100)))
    assert sorted({reply.status for reply in replies} | {201}) in ([201], [201, 409])
    assert {reply.kind for reply in replies if reply.status == 409} <= {"in-progress"}
    assert all(1 <= int(reply.headers["Retry-After"]) <= 2 for reply in replies if reply.status == 409)
    again = web.call(key, tag=key, seconds=0.5)
    assert again.replayed
    assert {reply.body for reply in replies if reply.status == 201} <= {again.body}
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


def test_a_body_that_is_too_large_is_refused(web: WebServer) -> None:
    key = fresh()
    reply = web.call(key, b"x" * 10_001, tag=key)
    assert (reply.status, reply.kind) == (413, "body-too-large")
    assert web.call(key, b"x" * 10_000, tag=key).status == 201
    assert web.count(key) == 1


def test_a_chunked_body_is_read_whole_and_has_the_same_limit(web: WebServer) -> None:
    key = fresh()
    head = [b"POST /orders?tag=" + key.encode() + b" HTTP/1.1", b"Host: x", b"X-Api-Key: anna", b"Connection: close"]
    head += [b"Idempotency-Key: " + key.encode(), b"Transfer-Encoding: chunked", b"", b""]
    small, large = b"2\r\nbo\r\n2\r\ndy\r\n0\r\n\r\n", b"".join(b"3e8\r\n" + b"x" * 1000 + b"\r\n" for _ in range(11))
    replies = [web.send(b"\r\n".join(head) + body) for body in (small, small, large + b"0\r\n\r\n")]
    # Django on WSGI reads no body of which it does not know the length, and so has none to compare.
    last = (201, True) if web.kind == "django" else (413, False)
    assert [reply and (reply.status, reply.replayed) for reply in replies] == [(201, False), (201, True), last]


def test_a_body_that_is_cut_off_claims_nothing(web: WebServer) -> None:
    key = fresh()
    whole = raw(f"Idempotency-Key: {key}".encode(), tag=key)
    web.send(whole.replace(b"Content-Length: 4", b"Content-Length: 9"), close=True)
    time.sleep(0.3)
    assert web.count(key) == 0
    assert web.call(key, tag=key).status == 201


def test_a_client_that_goes_away_finds_its_response(web: WebServer) -> None:
    key = fresh()
    head = f"POST /orders?tag={key}&seconds=0.5 HTTP/1.1\r\nHost: x\r\nX-Api-Key: anna\r\n"
    web.send(f"{head}Idempotency-Key: {key}\r\nContent-Length: 4\r\n\r\nbody".encode(), close=True)
    wait_until(lambda: web.count(key) == 1)
    time.sleep(1)
    assert web.call(key, tag=key, seconds=0.5).replayed
    assert web.count(key) == 1


@pytest.mark.parametrize(
    "query",
    [
        {"bytes": 1001},
        {"parts": 60, "bytes": 990},
        {"parts": 3, "type": "text/event-stream"},
        {"parts": 3, "pause": 0.5},
    ],
    ids=["large", "large in parts", "events", "slow"],
)
@pytest.mark.parametrize("path", ["/orders", "/async/orders"])
def test_a_response_that_is_not_kept_is_known_to_have_been_sent(
    web: WebServer, query: dict[str, object], path: str
) -> None:
    key, query = fresh(), {**query, "path": path}
    first = web.call(key, tag=key, **query)  # type: ignore[arg-type]
    assert first.status == 201
    assert first.body.startswith(b"run 1")
    assert b"part" in first.body or len(first.body) == 1001
    replies: list[Reply] = []

    def is_known() -> bool:
        """Its end is recorded after its last byte was sent."""
        replies.append(web.call(key, tag=key, **query))  # type: ignore[arg-type]
        return replies[-1].kind != "in-progress"

    wait_until(is_known)
    second = replies[-1]
    # Django on WSGI reads a stream of asyncio's whole before it hands it on, and so has it whole.
    assert second.kind == "not-kept" or (second.body == first.body and (web.kind, path) == ("django", "/async/orders"))
    assert web.count(key) == 1


@pytest.mark.parametrize("path", ["/orders", "/async/orders"])
def test_a_response_in_parts_is_replayed_whole(web: WebServer, path: str) -> None:
    key = fresh()
    first, second = (web.call(key, tag=key, parts=3, path=path) for _ in range(2))
    assert second.replayed
    assert second.body == first.body
    assert first.body.endswith(b"part 2 ")


@pytest.mark.parametrize("path", ["/orders", "/async/orders"])
def test_a_stream_that_breaks_leaves_the_key_free(web: WebServer, path: str) -> None:
    key = fresh()
    for turn in (1, 2):
        with suppress(OSError, http.client.HTTPException):  # as some servers end it
            web.call(key, tag=key, path=path, parts=3, pause=0.6, then="break")
        assert web.count(key) == turn


def test_a_stream_of_a_failure_leaves_the_key_free(web: WebServer) -> None:
    key = fresh()
    for turn in (1, 2):
        reply = web.call(key, tag=key, status=500, parts=60, bytes=990)
        assert (reply.status, reply.body.endswith(b"part 59 ")) == (500, True)
        assert web.count(key) == turn
