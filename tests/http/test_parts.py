"""The parts of the middlewares: keys, fingerprints, records of responses."""

from __future__ import annotations

from time import process_time
from types import SimpleNamespace
from typing import Any

import pytest
from flask import Response as FlaskResponse
from starlette.responses import Response as StarletteResponse

from celery_idempotent.errors import ConfigurationError, RecordUnreadable
from celery_idempotent.http import Response
from celery_idempotent.http.problems import Problem
from celery_idempotent.http.request import Request, fingerprints, read_key
from celery_idempotent.http.response import Recorder, as_response


def digest(body: bytes, compare: Any = "json", **headers: str) -> str:
    pairs = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return fingerprints(Request("POST", b"/", b"", pairs, None), body, compare, ())[0]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (b'{"a": 1, "b": 2}', b'{"b":2,\n"a":1}'),
        (b"[1.0, 10000000000.0]", b"[1,10000000000]"),
        (b'"\\u00e9"', b'"\xc3\xa9"'),
        (b"[0.1]", b"[ 0.1 ]"),
    ],
)
def test_equal_json_is_the_same(one: bytes, other: bytes) -> None:
    assert digest(one) == digest(other)
    assert digest(one, "bytes") != digest(other, "bytes")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (b'{"a": 1, "a": 2}', b'{"a": 2}'),
        (b"[NaN]", b"[ NaN]"),
        (b"[0.1000000000000000055]", b"[0.1]"),
        (b"[" * 150 + b"]" * 150, b"[ " + b"[" * 149 + b"]" * 150),
        (b"[" * 100_000, b" " + b"[" * 100_000),
        (b"{", b"{ "),
        (b"true", b"1"),
        (b'"1"', b"1"),
    ],
    ids=["names twice", "no number", "digits", "deep", "deeper", "no JSON", "true", "text"],
)
def test_json_that_servers_read_differently_is_compared_by_its_bytes(one: bytes, other: bytes) -> None:
    assert digest(one) != digest(other)
    assert digest(one) == digest(one)


def test_a_multipart_type_without_a_boundary_is_compared_by_its_bytes() -> None:
    assert digest(b"a", "bytes", content_type="multipart/mixed") != digest(
        b"b", "bytes", content_type="multipart/mixed"
    )


@pytest.mark.parametrize("blanks", [" " * 3, "\t" * 3], ids=["spaces", "tabs"])
def test_a_malformed_key_is_refused_as_soon_as_it_is_read(blanks: str) -> None:
    header = f'"a"{f";a={blanks}" * 12},'
    began = process_time()
    with pytest.raises(Problem, match="of 1 to 255 visible ASCII characters"):
        read_key("Idempotency-Key", [header.encode()])
    assert process_time() - began < 1.0
    assert read_key("Idempotency-Key", [header[:-1].encode()]) == "a"


def test_a_boundary_may_have_another_length_where_bodies_are_not_read() -> None:
    def of(kind: str, length: int) -> str:
        return digest(b"", "headers", content_type=kind, content_length=str(length))

    parts = "multipart/form-data; boundary="
    assert of(f"{parts}{'a' * 30}", 1000) == of(f"{parts}{'b' * 31}", 1002)
    assert of("text/csv", 1000) != of("text/csv", 1002)


@pytest.mark.parametrize(
    "given",
    [
        (201, [("X-A", "1")], "made"),
        (201, {"X-A": "1"}, b"made"),
        StarletteResponse("made", 201, {"X-A": "1"}),
        FlaskResponse("made", 201, {"X-A": "1"}),
        Response(201, ((b"x-a", b"1"),), b"made"),
        SimpleNamespace(status_code=201, headers={"X-A": "1"}, content=b"made"),
    ],
    ids=["pairs", "mapping", "Starlette", "Flask", "own", "Django"],
)
def test_a_response_of_any_framework_is_read(given: object) -> None:
    found = as_response(given)
    assert (found.status, found.header("x-a"), found.body) == (201, "1", b"made")


@pytest.mark.parametrize(
    "given", [None, "made", ("201", {}, b""), SimpleNamespace(status_code=200, headers={}, streaming=True)]
)
def test_what_is_no_whole_response_is_refused(given: object) -> None:
    with pytest.raises(ConfigurationError, match="Expected a response of your framework"):
        as_response(given)


@pytest.mark.parametrize(
    "record",
    [
        None,
        "text",
        {"headers": []},
        {"status": "x", "headers": [], "text": ""},
        {"status": 20, "headers": [], "text": ""},
        {"status": float("inf"), "headers": [], "text": ""},
        {"status": 200, "headers": [["X", "a\r\nSet-Cookie: b"]], "text": ""},
        {"status": 200, "headers": [["X Y", "a"]], "text": ""},
        {"status": 200, "headers": [], "base64": "?"},
    ],
)
def test_a_record_that_another_wrote_is_not_replayed(record: object) -> None:
    with pytest.raises(RecordUnreadable, match="Expected the record of a response"):
        Recorder().read(record)


@pytest.mark.parametrize("header", [(b"X Y", b"a"), (b"X-\xe9", b"a"), (b"X", b"a\nb")])
def test_what_is_no_header_does_not_make_the_record_unreadable(header: tuple[bytes, bytes]) -> None:
    written = Recorder().write(Response(201, (header, (b"x", b"1")), b"made"))
    assert Recorder().read(written) == Response(201, [(b"x", b"1")], b"made")


@pytest.mark.parametrize("name", [b"RateLimit", b"RateLimit-Policy", b"X-RateLimit-Remaining"])
def test_limits_of_the_first_request_are_not_replayed(name: bytes) -> None:
    assert Recorder().write(Response(200, ((name, b"9"), (b"x", b"1"))))["headers"] == [["x", "1"]]


def test_headers_are_checked_again_when_they_are_read() -> None:
    record = {"status": 200, "headers": [["Set-Cookie", "a=b"], ["Content-Length", "999"], ["X", "1"]], "text": "ok"}
    found = Recorder(keep=frozenset({b"content-length"})).read(record)
    assert found is not None
    assert found.sent() == [(b"X", b"1"), (b"content-length", b"2"), (b"idempotent-replayed", b"true")]
