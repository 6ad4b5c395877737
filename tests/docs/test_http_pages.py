"""What the pages on HTTP say of statuses, keys and defaults is what the middlewares have."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any, ClassVar

import pytest
import requests

from celery_idempotent import events
from celery_idempotent.http import Options, Response
from celery_idempotent.http.request import LONGEST_KEY
from celery_idempotent.http.response import is_remembered
from tests.support.docs.pages import PYTHON, ROOT, blocks

PAGE = "docs/guides/http-clients.md"
[TEXT] = [block.text for block in blocks(PAGE) if block.language == "text"]
#: The same in one line.
WORDS = " ".join(TEXT.split())


def problems() -> dict[str, int]:
    """Return the status of each problem that the middlewares make, by its name."""
    made = "".join(path.read_text() for path in (ROOT / "celery_idempotent/http").glob("*.py"))
    return {name: int(status) for name, status in re.findall(r'Problem\(\s*"([\w-]+)", (\d{3})', made)}


def test_the_text_for_clients_has_a_section_for_each_problem() -> None:
    sections = re.findall(r"^#### ([\w-]+)\n\n(\d{3})[.,]", TEXT, re.MULTILINE)
    assert {name: int(status) for name, status in sections} == problems()


def test_the_guide_lists_each_problem_that_a_client_can_help() -> None:
    guide = (ROOT / "docs/guides/http.md").read_text()
    listed = {name: int(status) for status, name in re.findall(r"\| (\d{3}) `([\w-]+)`", guide)}
    own = {"body-incomplete", "crash-loop", "not-committed", "record-unreadable"}
    assert listed == {name: status for name, status in problems().items() if name not in own}


def test_the_text_for_clients_has_the_defaults() -> None:
    options = Options(scope=None, store="memory://")
    assert f"{options.policy.result_ttl / 3600:g} hours" in WORDS
    assert f"{options.request_max_bytes / 2**20:g} MiB" in WORDS
    assert f"1 to {LONGEST_KEY} visible" in WORDS
    assert all(f"{method} and PATCH" in WORDS for method in options.methods if method != "PATCH")
    assert f"header {options.header}" in WORDS


def test_the_text_for_clients_names_statuses_that_leave_a_key_free() -> None:
    [named] = re.findall(r"refused with ([\d, or]+), or that failed with 5xx", WORDS)
    statuses = [int(status) for status in re.findall(r"\d+", named)]
    assert len(statuses) >= 9
    assert not [status for status in [*statuses, 500, 503] if is_remembered(status)]


def test_the_failures_that_a_2xx_may_hide_are_told_by_their_body() -> None:
    [code] = [block.text for block in blocks("docs/guides/http-graphql.md") if "def remember(" in block.text]
    names: dict[str, Any] = {}
    exec(code.partition("\n\n\napp =")[0], names)
    failed = [
        b'{"data": null, "errors": [{"message": "down"}]}',
        b'{"jsonrpc": "2.0", "error": {"code": 1}, "id": 1}',
        b'{"errors": [{"message": "no such field"}]}',
        b'{"data": {"pay": null}, "errors": [{"message": "down"}]}',
    ]
    done = [
        b'{"data": {"order": 1}}',
        b'{"jsonrpc": "2.0", "result": 1, "id": 1}',
        b'{"data": {"pay": {"ok": true, "errors": []}}}',
        b'{"data": {"pay": {"ok": true}, "ship": null}, "errors": [{"message": "down"}]}',
        b'[{"data": {"pay": 1}}, {"errors": [{"message": "down"}]}]',
        b"\x1f\x8bcompressed",
        b"",
    ]
    found = [names["remember"](Response(200, (), body)) for body in [*failed, *done]]
    assert found == [False] * len(failed) + [None] * len(done)


def test_what_leaves_out_the_slips_of_clients_keeps_those_of_tasks(caplog: pytest.LogCaptureFixture) -> None:
    [shown] = [block.text for block in blocks("docs/guides/observing.md") if "is_no_slip" in block.text]
    names: dict[str, Any] = {}
    exec(shown, names)
    try:
        for task in (Options(scope=None, store="memory://").name, "shop.charge"):
            events.log(events.KeyReused("idem:a", task))
        events.log(events.CrashLooped("idem:a", "http"))
    finally:
        logging.getLogger("celery_idempotent").removeFilter(names["is_no_slip_of_a_client"])
    assert [(vars(each)["event"], vars(each)["data"]["task"]) for each in caplog.records] == [
        ("KeyReused", "shop.charge"),
        ("CrashLooped", "http"),
    ]


class Busy(BaseHTTPRequestHandler):
    """A proxy that answers as a list says, from its end on: a status, and Retry-After; or not at all."""

    left: ClassVar[list[tuple[int, str | None]]] = []

    def do_POST(self) -> None:
        status, retry_after = self.left.pop()
        self.close_connection = True
        if not status:
            return
        self.send_response(status)
        if retry_after is not None:
            self.send_header("Retry-After", retry_after)
        self.send_header("Content-Length", "0")
        self.end_headers()


@contextmanager
def busy(*answers: tuple[int, str | None]) -> Iterator[str]:
    """Run a server that gives these answers, and no more; give its URL."""
    Busy.left[:] = reversed(answers)
    with ThreadingHTTPServer(("127.0.0.1", 0), Busy) as server:
        Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


def shown(name: str) -> Any:
    """Return what a block of the page defines."""
    [code] = [block.text for block in blocks(PAGE) if block.language == PYTHON and f"def {name}(" in block.text]
    names: dict[str, Any] = {}
    exec(code, names)
    return names[name]


def test_the_client_comes_again_after_seconds_and_after_a_date() -> None:
    send = shown("send")
    with busy((503, "0"), (503, "Wed, 21 Oct 2015 07:28:00 GMT"), (201, None)) as url:
        answer = send(url, {"item": "book"}, {}, "k")
    assert (answer.status_code, Busy.left) == (201, [])


def test_the_session_that_repeats_does_so_until_its_request_is_answered_and_no_longer() -> None:
    def post(url: str) -> int:
        with repeating(requests.Session()) as session:
            return int(session.post(url, data=b"body", headers={"Idempotency-Key": "k"}, timeout=10).status_code)

    repeating = shown("repeating")
    with busy((0, None), (409, "0"), (503, None), (201, None)) as url:
        assert (post(url), Busy.left) == (201, [])
    for final in (409, 422, 400):
        with busy((final, None), (201, None)) as url:
            assert (post(url), len(Busy.left)) == (final, 1)
