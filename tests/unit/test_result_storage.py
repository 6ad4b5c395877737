"""What is too large for its record, what is not read back, and what becomes of the duplicates that ask for it."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import pytest
from celery.exceptions import SoftTimeLimitExceeded
from kombu import serialization

from celery_idempotent.core import compression
from celery_idempotent.core.guard import Busy, Ran, Replayed
from celery_idempotent.core.policy import Policy
from celery_idempotent.core.results import Codec, Kind, NotStored, Origin, Payload, ResultStorage
from celery_idempotent.errors import RecordUnreadable, ResultUnavailable, StoreError, StoreRefused, StoreUnreachable
from celery_idempotent.stores import Outcome, State
from celery_idempotent.units import masked
from tests.unit.test_guard import KEY, Bench, bench, clock, heard, sure
from tests.unit.test_guard_within import Database, Shop, settles

__all__ = ["bench", "clock", "heard"]

ORIGIN = Origin("key", 1, "id-1")


@dataclass
class Shelf(ResultStorage):
    """A storage in memory, which fails when it is told to."""

    kept: dict[str, bytes] = field(default_factory=dict)
    origins: list[Origin] = field(default_factory=list)
    ages: list[float] = field(default_factory=list)
    error: Exception | None = None
    meanwhile: Callable[[], object] = lambda: None

    def keep(self, content: bytes, origin: Origin) -> str:
        self.meanwhile()
        if self.error is not None:
            raise self.error
        self.origins.append(origin)
        reference = f"shelf:{len(self.kept)}"
        self.kept[reference] = content
        return reference

    def read(self, reference: str, decode: Callable[[bytes], Payload], age: float) -> Payload:
        self.ages.append(age)
        if self.error is not None:
            raise self.error
        if reference not in self.kept:
            return Payload(Kind.UNAVAILABLE, reason="it is gone")
        return decode(self.kept[reference])


@pytest.fixture
def shelf() -> Shelf:
    return Shelf()


def codec(**options: Any) -> Codec:
    return Codec(**{"compress_above": 10**9, "result_max_bytes": 10, **options})


# -- the codec ---------------------------------------------------------------------------------------------------------


def test_what_is_too_large_is_referred_to_and_read_from_there(shelf: Shelf) -> None:
    assert codec(storage=shelf).encode_value("x" * 8, origin=ORIGIN) == b'json:"xxxxxxxx"'
    payload = codec(storage=shelf).encode_value("x" * 9, origin=ORIGIN)
    assert payload == b"!reference:shelf:0"
    assert shelf.kept == {"shelf:0": b'json:"xxxxxxxxx"'}
    assert shelf.origins == [ORIGIN]
    assert codec(storage=shelf).decode(payload, age=3.0) == Payload(Kind.VALUE, "x" * 9)
    codec(storage=shelf).decode(payload)
    assert shelf.ages == [3.0, float("inf")]


def test_what_is_kept_elsewhere_is_compressed_too(shelf: Shelf) -> None:
    writer = codec(storage=shelf, compress_above=100, compression="zstd")
    payload = writer.encode_value("x" * 5000, origin=ORIGIN)
    [content] = shelf.kept.values()
    assert content.startswith(b"json+zstd:")
    assert len(content) < 100
    assert codec(storage=shelf).decode(payload).data == "x" * 5000


def test_a_result_of_no_run_is_kept_nowhere_else(shelf: Shelf) -> None:
    assert codec(storage=shelf).encode_value("x" * 9) == (
        b"!unavailable:the result has 11 bytes, result_max_bytes is 10"
    )
    assert not shelf.kept


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (NotStored(), ""),
        (NotStored("nobody reads it"), ", and nobody reads it"),
        (OSError(28, "No space left"), ", and it could not be kept elsewhere: OSError: [Errno 28] No space left"),
        (
            RuntimeError("s3://id:secret@host \ud800"),
            ", and it could not be kept elsewhere: RuntimeError: s3://***@host \\ud800",
        ),
    ],
)
def test_what_a_storage_does_not_take_settles_all_the_same(
    shelf: Shelf, error: Exception, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    shelf.error = error
    payload = codec(storage=shelf).encode_value("x" * 9, origin=ORIGIN)
    why = f"the result has 11 bytes, result_max_bytes is 10{said}"
    assert payload.decode() == f"!unavailable:{why}"
    logged = [message.encode("utf-8", "backslashreplace").decode() for message in caplog.messages]
    assert logged == [f"The result of {ORIGIN.key} is not kept: {why}"] * (not isinstance(error, NotStored))


@pytest.mark.parametrize("place", ["serializer", "storage"])
def test_a_soft_time_limit_while_a_result_is_written_costs_no_result(shelf: Shelf, place: str) -> None:
    interruptions: list[Exception] = []

    def interrupted() -> None:
        if interruptions:
            raise interruptions.pop()

    def dumps(value: object) -> str:
        if place == "serializer":
            interrupted()
        return json.dumps(value)

    if place == "storage":
        shelf.meanwhile = interrupted
    serialization.register("interrupted", dumps, json.loads, "application/x-interrupted", "utf-8")
    try:
        codec = Codec(serializer="interrupted", compress_above=1000, result_max_bytes=10, storage=shelf)
        interruptions.append(SoftTimeLimitExceeded())
        assert codec.decode(codec.encode_value("x" * 20, origin=ORIGIN)).data == "x" * 20
        assert not interruptions
    finally:
        serialization.unregister("interrupted")


@pytest.mark.unmeasured
def test_a_soft_time_limit_between_two_steps_of_writing_a_result_costs_no_result() -> None:
    """Whatever rings outside of what it tries twice is raised, and the guard has the result written again."""
    writer, payloads, left = codec(), set[bytes](), 0

    def ring(frame: FrameType, event: str, _: object) -> Any:
        nonlocal left
        if frame.f_code is not Codec.encode_value.__code__:
            return None
        frame.f_trace_opcodes = True
        left -= event == "opcode"
        if left == 0 and event == "opcode":
            raise SoftTimeLimitExceeded
        return ring

    before = sys.gettrace()
    for step in range(1, 200):
        left = step
        sys.settrace(ring)
        with suppress(SoftTimeLimitExceeded):
            payloads.add(writer.encode_value("x"))
        sys.settrace(before)
    assert left > 0
    assert payloads == {b'json:"x"'}


@pytest.mark.parametrize("size", [3, 20])
def test_a_soft_time_limit_while_a_result_is_read_is_no_damage_of_it(shelf: Shelf, size: int) -> None:
    interruptions: list[Exception] = []

    def loads(text: str) -> object:
        if interruptions:
            raise interruptions.pop()
        return json.loads(text)

    serialization.register("interrupted", json.dumps, loads, "application/x-interrupted", "utf-8")
    try:
        codec = Codec(serializer="interrupted", compress_above=1000, result_max_bytes=10, storage=shelf)
        payload = codec.encode_value("x" * size, origin=ORIGIN)
        interruptions.append(SoftTimeLimitExceeded())
        assert codec.decode(payload).data == "x" * size
        assert not interruptions
    finally:
        serialization.unregister("interrupted")


def test_what_is_not_read_back_is_not_kept_elsewhere_either(shelf: Shelf) -> None:
    value = {"__type__": "nobody knows", "__value__": 1}
    assert b"cannot be serialized as json" in codec(storage=shelf).encode_value(value, origin=ORIGIN)
    assert not shelf.kept


def test_a_codec_without_a_storage_says_where_the_result_is(shelf: Shelf) -> None:
    read = codec().decode(b"!reference:file:///x")
    assert read == Payload(Kind.UNAVAILABLE, reason="it is at file:///x, and nothing here can read that")


@pytest.mark.parametrize("content", [b"!reference:shelf:0", b"!unavailable:x", b'!exception:json:{"a": 1}', b"", b"js"])
def test_what_a_reference_leads_to_is_a_value(shelf: Shelf, content: bytes) -> None:
    shelf.kept["shelf:0"] = content
    with pytest.raises(RecordUnreadable):
        codec(storage=shelf).decode(b"!reference:shelf:0")


@pytest.mark.parametrize("error", [StoreUnreachable("away"), StoreRefused("no"), RecordUnreadable("newer")])
def test_what_a_storage_says_of_its_place_is_passed_on(shelf: Shelf, error: StoreError) -> None:
    shelf.error = error
    with pytest.raises(type(error)) as caught:
        codec(storage=shelf).decode(b"!reference:shelf:0")
    assert caught.value is error


def test_content_that_is_not_accepted_is_not_read_from_elsewhere_either(shelf: Shelf) -> None:
    payload = codec(storage=shelf, serializer="pickle").encode_value({"x" * 9}, origin=ORIGIN)
    assert codec(storage=shelf).decode(payload).kind is Kind.UNAVAILABLE
    assert codec(storage=shelf, serializer="pickle").decode(payload).data == {"x" * 9}


def test_none_compresses_nothing() -> None:
    assert codec(compression="none", compress_above=0, result_max_bytes=10**6).encode_value("x" * 5000) == (
        b'json:"' + b"x" * 5000 + b'"'
    )


def test_a_result_that_no_reader_would_inflate_is_not_kept(shelf: Shelf) -> None:
    small = codec(storage=shelf, compress_above=0, largest=1000, result_max_bytes=10**6)
    assert small.decode(small.encode_value("x" * 998, origin=ORIGIN)).data == "x" * 998
    assert b"it has 1001 bytes, of which no more than 1000 are ever kept" in small.encode_value("x" * 999)
    assert not shelf.kept


def test_a_payload_that_inflates_to_more_than_a_worker_has_room_for_is_unreadable() -> None:
    bomb = b"json+zlib:" + compression.compress(b'"' + b"x" * 10**6 + b'"', "zlib")
    with pytest.raises(RecordUnreadable, match="it inflates to more than 1000 bytes"):
        codec(largest=1000).decode(bomb)
    assert codec().decode(bomb).data == "x" * 10**6


# -- values that are written and cannot be read ------------------------------------------------------------------------


class Unreadable:
    def __reduce__(self) -> Any:
        return (int, ("no number",))


@pytest.mark.parametrize(("serializer", "value"), [("pickle", Unreadable()), ("yaml", "\ud800"), ("yaml", "\x00")])
def test_what_cannot_be_read_back_is_unavailable_and_says_why(serializer: str, value: object) -> None:
    own = codec(serializer=serializer, result_max_bytes=10**6)
    read = own.decode(own.encode_value(value))
    assert read.kind is Kind.UNAVAILABLE or read.data == value
    if serializer == "pickle":
        assert read.reason == (
            "the result cannot be serialized as pickle: ValueError: invalid literal for int() with base 10: 'no number'"
        )


def test_json_that_is_deeply_nested_is_read_back_before_it_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    own = codec(result_max_bytes=10**6)
    reads: list[bytes] = []
    real = own._unpack
    monkeypatch.setattr(own, "_unpack", lambda payload: (reads.append(payload), real(payload))[1])
    own.encode_value(json.loads("[" * 199 + "]" * 199))
    assert not reads
    own.encode_value(json.loads("[" * 100 + '{"a":' * 100 + "0" + "}" * 100 + "]" * 100))
    assert len(reads) == 1


def test_what_this_process_may_not_read_is_kept_for_those_that_may() -> None:
    assert codec(serializer="pickle", accept=["json"], result_max_bytes=100).encode_value(1).startswith(b"pickle:")


# -- exceptions --------------------------------------------------------------------------------------------------------


class Declined(Exception):
    pass


@pytest.mark.parametrize("limit", [0, 50, 100, 300, 1000, 3000, 10_000])
@pytest.mark.parametrize("exc", [Declined("x" * 5000), Declined("\ud800" * 5000), Declined(b"x" * 5000), Declined(1)])
def test_a_description_of_an_exception_never_exceeds_the_limit(limit: int, exc: Exception) -> None:
    own = codec(result_max_bytes=limit)
    payload = own.encode_exception(exc)
    assert len(payload) <= max(limit + len("!exception:json:"), 200)
    raised = own.rebuild_exception(own.decode(payload), (Declined,))
    assert "Declined" in type(raised).__name__ + str(raised)


def test_an_exception_that_does_not_fit_at_all_leaves_its_name() -> None:
    own = codec(result_max_bytes=20)
    back = own.rebuild_exception(own.decode(own.encode_exception(ValueError("no"))), (ValueError,))
    assert re.fullmatch(
        "Expected the exception of what failed for good, got builtins:ValueError, whose description is not kept: "
        r"it has \d\d bytes, result_max_bytes is 20: look into the first log",
        str(back),
    )


def test_a_class_with_an_endless_name_fits() -> None:
    endless = type("X" * 10_000, (Exception,), {})
    assert len(codec(result_max_bytes=1000).encode_exception(endless("no"))) < 700


def test_a_serializer_that_takes_no_mapping_leaves_the_name_of_an_exception() -> None:
    serialization.register("numbers", lambda value: str(int(value or 0)), int, "application/x-numbers", "utf-8")
    try:
        own = codec(serializer="numbers")
        assert b"ValueError, whose description is not kept: TypeError" in own.encode_exception(ValueError("no"))
    finally:
        serialization.unregister("numbers")


# -- the guard ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def large(bench: Bench, shelf: Shelf) -> Bench:
    bench.codec = codec(storage=shelf)
    return bench


def test_a_duplicate_replays_what_is_kept_elsewhere(large: Bench, shelf: Shelf) -> None:
    assert large.deliver("x" * 100, task_id="id-7", published=True) == Ran("x" * 100)
    large.clock.advance(7.0)
    answer = large.deliver("second")
    assert isinstance(answer, Replayed)
    assert answer.value == "x" * 100
    assert shelf.origins == [Origin(KEY, large.record.fence, "id-7", True)]
    assert shelf.ages == [7.0]
    assert len(large.runs) == 1


def test_a_large_result_is_written_before_the_record_and_under_the_heartbeat(large: Bench, shelf: Shelf) -> None:
    seen: list[tuple[int, int]] = []
    shelf.meanwhile = lambda: seen.append((large.store.count("settle"), len(large.heartbeat.holdings())))
    large.deliver("x" * 100)
    assert seen == [(0, 1)]
    assert large.store.count("settle") == 1
    assert not large.heartbeat.holdings()


def test_a_duplicate_whose_result_is_gone_is_told_so(large: Bench, shelf: Shelf) -> None:
    large.deliver("x" * 100)
    shelf.kept.clear()
    error = sure(ResultUnavailable, large.deliver)
    assert "its result was not kept (it is gone)" in str(error)
    assert large.deliver(wants_result=False) == Replayed(None, large.record)
    assert len(large.runs) == 1


@pytest.mark.parametrize("error", [StoreUnreachable("away"), StoreRefused("no"), RecordUnreadable("newer")])
@pytest.mark.parametrize("on_store_error", ["wait", "run", "raise"])
def test_a_duplicate_whose_result_cannot_be_had_now_stands_aside(
    large: Bench, shelf: Shelf, error: StoreError, on_store_error: Any
) -> None:
    large.deliver("x" * 100)
    large.policy = Policy(on_store_error=on_store_error)
    shelf.error = error
    if on_store_error == "raise":
        assert sure(type(error), large.deliver) is error
    else:
        assert isinstance(large.deliver(), Busy)
    shelf.error = None
    answer = large.deliver()
    assert isinstance(answer, Replayed)
    assert answer.value == "x" * 100
    assert len(large.runs) == 1


def test_a_place_that_takes_nothing_repeats_no_effect(large: Bench, shelf: Shelf) -> None:
    shelf.error = OSError("full")
    assert large.deliver("x" * 100) == Ran("x" * 100)
    assert large.record.state is State.COMPLETED
    sure(ResultUnavailable, large.deliver)
    assert len(large.runs) == 1


def test_a_run_that_lost_its_lease_answers_with_the_others_result(large: Bench, shelf: Shelf) -> None:
    def overtaken(holding: object) -> str:
        lease = large.overtake()
        payload = large.codec.encode_value("theirs, and long", origin=Origin(lease.key, lease.fence, "b"))
        large.store.inner.settle(lease, Outcome(State.COMPLETED, payload), ttl=60.0)
        return "mine, and longer than that"

    answer = large.deliver(overtaken)
    assert isinstance(answer, Replayed)
    assert answer.value == "theirs, and long"


def test_a_result_that_is_settled_within_a_transaction_is_written_one_time(large: Bench, shelf: Shelf) -> None:
    large.store = Shop(Database())
    assert large.deliver(lambda holding: settles(holding, "x" * 100) or "y" * 100) == Ran("x" * 100)
    assert list(shelf.kept.values()) == [b'json:"' + b"x" * 100 + b'"']
    answer = large.deliver()
    assert isinstance(answer, Replayed)
    assert answer.value == "x" * 100


def test_a_url_is_shown_without_who_opens_it() -> None:
    assert masked("s3://id:secret@host/x") == "s3://***@host/x"
    assert masked("s3://bucket/a@b") == "s3://bucket/a@b"
    assert masked("simplecache::ftp://me@host/x") == "simplecache::ftp://***@host/x"
