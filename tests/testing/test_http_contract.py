"""What a fact about an application tells its user when it fails: what was sent and answered, and what to do."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.client import HTTPMessage
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

import pytest

from celery_idempotent.testing import HttpContract
from celery_idempotent.testing._http import ROWS, Shop
from celery_idempotent.testing._http_client import PROBLEM, Reply, check


class Bare(BaseHTTPRequestHandler):
    """An application without a middleware."""

    runs = 0
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(200, b"%d" % Bare.runs)

    def do_POST(self) -> None:
        Bare.runs += 1
        if self.headers["Transfer-Encoding"]:
            self._answer(400, b"Bad Request: no length")
            return
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self._answer(int(parse_qs(urlsplit(self.path).query)["status"][0]), b"run %d " % Bare.runs + body)

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Write nothing."""


@pytest.fixture
def shop() -> Iterator[Shop]:
    """An application without a middleware, as the facts reach it."""
    Bare.runs = 0
    server = ThreadingHTTPServer(("127.0.0.1", 0), Bare)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield Shop(HttpContract(), f"http://127.0.0.1:{server.server_port}")
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_red_row_says_what_was_sent_and_answered_and_what_to_do(shop: Shop) -> None:
    row = next(each for each in ROWS if each.name == "201 is replayed")
    with pytest.raises(AssertionError) as failed:
        HttpContract().test_requests_are_answered_as_in_the_table(shop, row)
    text = str(failed.value)
    assert f"answered '201' to POST /orders?tag={shop.tag}&status=201, with the body b'run 2 body'" in text
    assert "expected '201 replayed'" in text
    assert "one store for all processes" in text


def test_a_body_without_a_length_that_is_not_read_names_the_attribute_for_it(shop: Shop) -> None:
    with pytest.raises(AssertionError, match=r"no length(.|\n)*reads_chunked = False"):
        HttpContract().test_a_chunked_body_is_read_whole(shop)


def reply(status: int, *, kind: str = "", replayed: bool = False, body: bytes = b"body") -> Reply:
    headers = HTTPMessage()
    if kind:
        headers["Content-Type"], headers["Cache-Control"] = PROBLEM, "no-store"
        body = b'{"type": "urn:a:%s", "status": %d, "title": "t", "detail": "d"}' % (kind.encode(), status)
    if replayed:
        headers["Idempotent-Replayed"] = "true"
    return Reply(status, headers, body)


@pytest.mark.parametrize(
    ("got", "expected", "advice"),
    [
        (reply(201, replayed=True), "201", "scope"),
        (reply(201, replayed=True), "422 key-reused", "fingerprint"),
        (reply(201), "422 key-reused", "one store"),
        (reply(201, replayed=True), "409 not-kept", "response_max_bytes"),
        (reply(201), "413 body-too-large", "request_max_bytes"),
        (reply(401, kind="caller-unknown"), "201", "anna and bert"),
        (reply(400, kind="key-missing"), "201", "required=True"),
        (reply(409, kind="in-progress"), "201 replayed", "log"),
        (reply(409, kind="not-kept"), "201 replayed", "remember"),
        (reply(503, kind="store-unavailable"), "201", "its store"),
        (reply(404), "201", "`path`"),
        (reply(405), "422 key-reused", "PATCH"),
        (reply(403), "201", "CSRF"),
        (reply(500), "201", "log"),
        (reply(201), "401", "scope"),
        (reply(400), "400 key-malformed", "before the middleware"),
    ],
)
def test_each_mistake_that_many_make_has_an_advice(got: Reply, expected: str, advice: str) -> None:
    with pytest.raises(AssertionError) as failed:
        check(got, expected)
    assert advice in str(failed.value).partition("expected")[2]


def test_what_is_as_expected_passes_and_what_nobody_has_met_is_shown_without_an_advice() -> None:
    check(reply(201, replayed=True), "201 replayed")
    with pytest.raises(AssertionError, match=r"answered '204', .* expected '303'\.$"):
        check(reply(204), "303")
