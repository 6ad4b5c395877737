"""What a store keeps of an ending, and what a duplicate gets of it."""

from __future__ import annotations

import inspect
import pickle
import sys
from datetime import datetime, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from kombu import compression, serialization
from kombu.utils import json as kombu_json

from celery_idempotent.core.results import Codec, Kind, Payload, why_unavailable
from celery_idempotent.errors import ConfigurationError, PreviouslyFailed, RecordUnreadable


def codec(**options: Any) -> Codec:
    return Codec(**{"compress_above": 1024, "result_max_bytes": 1048576, **options})


JSON = codec()


def value_of(payload: bytes, reader: Codec = JSON) -> Any:
    read = reader.decode(payload)
    assert read.kind is Kind.VALUE, read
    return read.data


def test_what_is_made_of_a_value_is_kept_in_its_place() -> None:
    prepared = codec(prepare=lambda value: {"told": value} if value else 1 / 0)
    assert value_of(prepared.encode_value(5)) == {"told": 5}
    read = prepared.decode(prepared.encode_value(0))
    assert read.kind is Kind.UNAVAILABLE
    assert "ZeroDivisionError" in read.reason


class Declined(Exception):
    """What a task raises for good."""


class Stubborn(Exception):
    def __init__(self, code: int) -> None:
        super().__init__(f"code {code}")


class Keyword(Exception):
    def __init__(self, *, code: int) -> None:
        super().__init__(code)


class Other(Exception):
    def __new__(cls, *args: object) -> Any:
        return Declined(*args) if args and args[0] == "swap" else super().__new__(cls, *args)


# -- values ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value", [None, False, True, 0, 0.0, "", [], {}, 42, "x:y", "!ignored:", {"a": [1, None]}, b"\xff"]
)
def test_a_value_comes_back_as_itself(value: Any) -> None:
    back = value_of(JSON.encode_value(value))
    assert back == value
    assert type(back) is type(value)


def test_what_kombu_keeps_comes_back_with_its_type() -> None:
    value = [Decimal("1.10"), UUID(int=5), datetime(2024, 1, 1, tzinfo=timezone.utc), b"abc"]
    assert value_of(JSON.encode_value(value)) == value


def test_a_tuple_comes_back_as_the_list_that_the_first_consumer_got() -> None:
    value = {"pair": (1, 2), 3: None}
    assert (
        value_of(JSON.encode_value(value)) == kombu_json.loads(kombu_json.dumps(value)) == {"pair": [1, 2], "3": None}
    )


def test_a_small_payload_is_readable_and_tiny() -> None:
    assert JSON.encode_value(42) == b"json:42"
    assert JSON.encode_value(None) == b"json:null"
    for value in (42, None):
        assert codec(serializer="pickle").encode_value(value) == b"pickle:" + serialization.dumps(value, "pickle")[2]


def test_a_large_value_is_compressed_where_that_helps() -> None:
    text = "x" * 5000
    packed = JSON.encode_value(text)
    assert packed.startswith(b"json+zlib:")
    assert len(packed) < 100
    assert value_of(packed) == text
    assert codec(compress_above=5002).encode_value(text) == b'json:"' + text.encode() + b'"'
    assert codec(compress_above=5001).encode_value(text) == packed
    assert codec(compress_above=0).encode_value(42) == b"json:42"


@pytest.mark.parametrize(("saved", "head"), [(4, b'json:"'), (5, b"json+cut:x")], ids=["nothing saved", "a byte saved"])
def test_a_value_is_compressed_where_that_saves_more_than_its_longer_head_costs(saved: int, head: bytes) -> None:
    compression.register(lambda body: body[1:-1][saved - 2 :], lambda _: b'"%b"' % (b"x" * 100), "x-cut", ["cut"])
    try:
        assert codec(compression="cut", compress_above=50).encode_value("x" * 100).startswith(head)
    finally:
        del compression._encoders["x-cut"], compression._decoders["x-cut"], compression._aliases["cut"]


def test_the_compression_can_be_chosen_and_any_is_read() -> None:
    packed = codec(compression="bzip2", compress_above=10).encode_value("x" * 500)
    assert packed.startswith(b"json+bzip2:")
    assert value_of(packed) == "x" * 500


def test_a_value_above_the_limit_is_unavailable_and_says_why() -> None:
    reader = codec(result_max_bytes=10, compress_above=10**9)
    assert reader.encode_value("x" * 8) == b'json:"xxxxxxxx"'
    assert reader.encode_value("x" * 9) == b"!unavailable:the result has 11 bytes, result_max_bytes is 10"
    assert codec(result_max_bytes=3).encode_value(None).startswith(b"!unavailable:the result has 4 bytes")
    assert codec(result_max_bytes=100).encode_value("x" * 5000).startswith(b"json+zlib:")  # what is kept counts
    read = reader.decode(reader.encode_value("x" * 9))
    assert read == Payload(Kind.UNAVAILABLE, reason="the result has 11 bytes, result_max_bytes is 10")


def test_a_value_that_cannot_be_serialized_is_unavailable_and_says_why() -> None:
    reason = JSON.decode(JSON.encode_value({1, 2})).reason
    assert reason == (
        "the result cannot be serialized as json: TypeError: Object of type set is not JSON serializable"
    ) or reason.startswith("the result cannot be serialized as json: TypeError: Object of type set")  # 3.13 adds a note
    loop: list[Any] = []
    loop.append(loop)
    assert "Circular" in JSON.decode(JSON.encode_value(loop)).reason
    deep: list[Any] = []
    for _ in range(200_000):
        deep = [deep]
    assert JSON.decode(JSON.encode_value(deep)).kind is Kind.UNAVAILABLE


def test_the_reason_is_short_and_survives_strange_text() -> None:
    class Broken:
        def __json__(self) -> object:
            raise ValueError("\ud800" + "x" * 10_000)

    class Mute(Exception):
        def __str__(self) -> str:
            raise ValueError

    class Silent:
        def __json__(self) -> object:
            raise Mute

    assert len(JSON.encode_value(Broken())) < 300
    assert "\\ud800xxx" in JSON.decode(JSON.encode_value(Broken())).reason
    assert "its text cannot be shown" in JSON.decode(JSON.encode_value(Silent())).reason


def test_a_value_that_is_written_and_cannot_be_read_is_unavailable() -> None:
    read = JSON.decode(JSON.encode_value({"__type__": "nobody knows", "__value__": 1}))
    assert read.kind is Kind.UNAVAILABLE
    assert "Unsupported type" in read.reason
    assert value_of(JSON.encode_value({"__type__": "bytes", "__value__": "abc"})) == b"abc"


def test_however_deep_a_value_is_what_is_kept_can_be_read() -> None:
    value: object = 1
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack(0)) + 260)  # near which the deepest are written and not read
    try:
        for depth in range(300):
            value = [value]
            if depth > 200:
                JSON.decode(JSON.encode_value(value))
    finally:
        sys.setrecursionlimit(limit)


def test_store_result_off_keeps_the_fact_alone() -> None:
    assert JSON.encode_value(42, store_result=False) == b"!unavailable:store_result is off"
    assert JSON.decode(b"!unavailable:store_result is off").reason == "store_result is off"


def test_an_ignored_ending_keeps_a_reference() -> None:
    assert JSON.encode_ignored() == b"!ignored:"
    assert JSON.decode(JSON.encode_ignored()) == Payload(Kind.IGNORED)
    assert JSON.decode(JSON.encode_ignored("id-\u00e9-\ud800")) == Payload(Kind.IGNORED, reason="id-\u00e9-\ud800")


def test_an_ending_by_replacement_keeps_how_often_too() -> None:
    assert JSON.encode_ignored("a:b", 12) == b"!replaced:12:a:b"
    assert JSON.decode(JSON.encode_ignored("a:b", 0)) == Payload(Kind.IGNORED, 0, "a:b")


def test_a_kind_prints_as_its_word_on_every_python() -> None:
    assert f"{Kind.VALUE}" == str(Kind.VALUE) == "%s" % Kind.VALUE == "value"  # noqa: UP031 - that is what is shown


# -- what is read ------------------------------------------------------------------------------------------------------


class Bomb:
    gone_off = False

    def __reduce__(self) -> Any:
        return (setattr, (Bomb, "gone_off", True))


def test_nothing_is_unpickled_unless_pickle_is_accepted() -> None:
    payload = b"pickle:" + pickle.dumps(Bomb())
    packed = b"pickle+zlib:" + compression.compress(pickle.dumps(Bomb()), "zlib")[0]
    failed = b"!exception:" + payload
    for content in (payload, packed, failed):
        read = JSON.decode(content)
        assert read.kind is Kind.UNAVAILABLE
        assert "pickle" in read.reason
    assert not Bomb.gone_off


def test_what_is_accepted_is_read_whatever_is_written() -> None:
    payload = codec(serializer="pickle").encode_value({1, 2})
    assert value_of(payload, codec(serializer="pickle")) == {1, 2}
    assert value_of(payload, codec(accept=["json", "pickle"])) == {1, 2}
    assert value_of(payload, codec(accept={"application/json", "application/x-python-serialize"})) == {1, 2}
    assert codec(accept=[]).decode(b"json:42").kind is Kind.UNAVAILABLE


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"42",
        b"json",
        b"json:",
        b"json:{",
        b"json+zlib:42",
        b"json+nothing:42",
        b"nothing:42",
        b"n\xff:42",
        b"!new:42",
        b"!unavailable:\xff",
        b"!exception:json:42",
        b'!exception:json:{"type": "a:b"}',
        b'!exception:json:{"type": 1, "text": ""}',
        b"!exception:42",
    ],
)
def test_what_is_damaged_or_new_is_unreadable(payload: bytes) -> None:
    with pytest.raises(RecordUnreadable, match=r"Expected a payload of this version, got .*Upgrade this worker"):
        JSON.decode(payload)


def test_a_result_whose_class_was_renamed_is_unreadable_and_the_error_asks_for_the_class() -> None:
    payload = b"pickle:ccelery_idempotent.units\nReceipt\n."
    with pytest.raises(RecordUnreadable, match=r"'Receipt'.*bring back the class .*then runs again"):
        codec(accept=["pickle"]).decode(payload)


@pytest.mark.skipif(sys.platform != "linux", reason="needs a limit on a process's memory")
@pytest.mark.parametrize("serializer", ["json", "pickle"])
def test_a_payload_for_which_there_is_no_memory_is_no_damaged_one(serializer: str) -> None:
    """Else its reader would be asked to forget the key, and the operation would run twice."""
    import resource

    value = "x" * 40_000_000
    reader = codec(serializer=serializer, accept=[serializer], result_max_bytes=2**26, compress_above=2**26)
    payload = reader.encode_value(value)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 10_000_000, hard))
    try:
        with pytest.raises(RecordUnreadable, match=r"the memory to read a payload of 400\d+ bytes.*not forget its key"):
            reader.decode(payload)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    assert value_of(payload, reader) == value


def test_an_error_shows_the_head_of_a_payload_and_no_content() -> None:
    with pytest.raises(RecordUnreadable) as caught:
        JSON.decode(b'json:{"card": 4111')
    assert "4111" not in str(caught.value)
    assert "b'json'" in str(caught.value)


def test_a_payload_may_come_as_a_memoryview() -> None:
    assert value_of(memoryview(b"json:42")) == 42  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options",
    [
        {"serializer": "jsn"},
        {"serializer": "raw"},
        {"serializer": "raw", "accept": ["json"]},
        {"accept": ["nothing"]},
        {"accept": "json"},
        {"compression": "nothing"},
    ],
)
def test_a_codec_that_kombu_has_not_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="Expected serializers and a compression that kombu has, got"):
        codec(**options)


def test_a_serializer_whose_name_looks_like_an_envelope_works() -> None:
    serialization.register("my+own:one", repr, lambda text: int(text), "application/x-own", "utf-8")
    try:
        own = codec(serializer="my+own:one")
        assert own.encode_value(42) == b"my%2Bown%3Aone:42"
        assert value_of(own.encode_value(42), own) == 42
    finally:
        serialization.unregister("my+own:one")


def test_a_serializer_that_writes_nothing_leaves_no_value() -> None:
    serialization.register("mute", lambda value: "", lambda text: text, "application/x-mute", "utf-8")
    try:
        own = codec(serializer="mute")
        assert "ValueError: it writes nothing" in own.decode(own.encode_value(42)).reason
    finally:
        serialization.unregister("mute")


# -- exceptions --------------------------------------------------------------------------------------------------------


def rebuilt(exc: BaseException, *allowed: type[BaseException], reader: Codec = JSON) -> BaseException:
    return reader.rebuild_exception(reader.decode(reader.encode_exception(exc)), allowed)


@pytest.mark.parametrize("serializer", ["json", "pickle"])
def test_a_named_exception_comes_back_as_itself(serializer: str) -> None:
    reader = codec(serializer=serializer)
    back = rebuilt(Declined("card", 5, None), KeyError, Declined, reader=reader)
    assert type(back) is Declined
    assert back.args == ("card", 5, None)
    assert type(rebuilt(KeyError("a"), KeyError, reader=reader)) is KeyError


def test_an_exception_is_readable_where_it_is_stored() -> None:
    assert JSON.encode_exception(ValueError("no")) == (
        b'!exception:json:{"type": "builtins:ValueError", "text": "no", "args": ["no"]}'
    )


def test_an_exception_that_is_not_named_is_told_by_type_and_text() -> None:
    back = rebuilt(Declined("card"), ValueError)
    assert type(back) is PreviouslyFailed
    assert "test_results:Declined: card. To have the exception itself raised, name its very class" in str(back)


def test_a_class_derived_from_a_named_one_is_not_looked_for() -> None:
    assert type(rebuilt(FileNotFoundError(2, "x"), OSError)) is PreviouslyFailed
    assert type(rebuilt(FileNotFoundError(2, "x"), OSError, FileNotFoundError)) is FileNotFoundError


@pytest.mark.parametrize("exc", [Stubborn(5), Keyword(code=5)])
def test_a_class_that_does_not_take_its_arguments_back_is_told(exc: Exception) -> None:
    described = Payload(
        Kind.EXCEPTION,
        {"type": f"{type(exc).__module__}:{type(exc).__qualname__}", "text": str(exc), "args": list(exc.args)},
    )
    assert type(JSON.rebuild_exception(described, (type(exc),))) is PreviouslyFailed


def test_a_constructor_may_hand_out_another_class() -> None:
    described = Payload(Kind.EXCEPTION, {"type": f"{__name__}:Other", "text": "", "args": ["swap"]})
    assert type(JSON.rebuild_exception(described, (Other,))) is PreviouslyFailed
    assert type(rebuilt(Other("keep"), Other)) is Other


@pytest.mark.parametrize(
    "argument", [{1, 2}, object(), ValueError("inner"), "x" * 2000, {"__type__": "nobody knows", "__value__": 1}]
)
def test_arguments_that_cannot_be_kept_leave_type_and_text(argument: object) -> None:
    reader = codec(result_max_bytes=1000, compress_above=10**9)
    payload = reader.decode(reader.encode_exception(Declined(argument)))
    assert payload.kind is Kind.EXCEPTION
    assert isinstance(payload.data, dict)
    assert payload.data.keys() == {"type", "text"}
    whole = str(Declined(argument))
    assert payload.data["text"] == (whole if len(whole) < 1000 else whole[:200])
    assert type(reader.rebuild_exception(payload, (Declined,))) is PreviouslyFailed


def test_no_exception_is_pickled() -> None:
    payload = codec(serializer="pickle").encode_exception(Declined(ValueError("inner")))
    assert b"Declined" in payload
    assert b"cbuiltins" not in payload
    assert payload.count(b"ValueError") == 0


def test_a_payload_that_holds_no_exception_still_raises() -> None:
    back = JSON.rebuild_exception(JSON.decode(b"!unavailable:it is of pickle"), (ValueError,))
    assert type(back) is PreviouslyFailed
    assert "got it is of pickle" in str(back)
    for value in (42, {"type": 1}):
        assert "got a payload of kind value" in str(JSON.rebuild_exception(Payload(Kind.VALUE, value), (ValueError,)))


def test_the_arguments_of_an_exception_are_kept_up_to_the_last_byte_that_there_is_room_for() -> None:
    whole = JSON.encode_exception(ValueError("no"))
    room = len(whole.removeprefix(b"!exception:json:"))
    assert codec(result_max_bytes=room).encode_exception(ValueError("no")) == whole
    assert b"args" not in codec(result_max_bytes=room - 1).encode_exception(ValueError("no"))


@pytest.mark.parametrize(
    ("payload", "why"), [(b"!unavailable:it is large", "it is large"), (b"json:1", ""), (b"!ignored:id", "")]
)
def test_why_a_payload_has_no_value_is_told_without_its_codec(payload: bytes, why: str) -> None:
    assert why_unavailable(payload) == why
