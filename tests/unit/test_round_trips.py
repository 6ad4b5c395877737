"""What a duplicate is given is what the first run's consumer was given, whatever the value; or nothing, and it says so.

The consumer reads what Celery's result backend was given: kombu's serializer over a mapping that has the value in it.
"""

from __future__ import annotations

import itertools
import math
import struct
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from pathlib import Path
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo, available_timezones

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kombu import serialization

from celery_idempotent.celery.app import TaskResultStorage
from celery_idempotent.core.results import Codec, Kind, Origin

SERIALIZERS = ["json", "pickle", "yaml", "msgpack"]
#: With how many values each is tried in the soak: 10,000 and more.
MANY = {"json": 5000, "pickle": 4000, "yaml": 1000, "msgpack": 1000}
LIMIT = 2000


@dataclass
class Order:
    """What a task may return as well; at the top of a module, so that pickle finds it."""

    number: int
    lines: Any


class Colour(Enum):
    RED = "red"


class Name(str):
    """A text that is more than that."""


class Unreadable:
    """What pickle writes and cannot read."""

    def __reduce__(self) -> Any:
        return (int, ("no number",))


zones = [timezone.utc, timezone(timedelta(hours=-3, minutes=-30)), timezone(timedelta(seconds=5), "odd")]
zones += [ZoneInfo(name) for name in ("Europe/Paris", "Australia/Lord_Howe") if name in available_timezones()]
aware = st.none() | st.sampled_from(zones)
texts = st.text() | st.text(st.characters(categories=["Cs", "Cc", "Zs", "Zl", "Lu"]), max_size=8)
hashable = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(min_value=10**300, max_value=10**320),
    st.floats(),
    texts,
    st.binary(),
    st.decimals().filter(lambda number: not number.is_snan()),
    st.datetimes(timezones=aware),
    st.dates(),
    st.times(),
    st.timedeltas(),
    st.uuids(),
    st.fractions(),
    st.complex_numbers(),
    st.sampled_from([Colour.RED, Name("x"), "!ignored:", "json:", "2020-01-01", "null", "~", "1_000", "0x10", ""]),
)
others = st.one_of(
    st.builds(object),
    st.decimals(),
    st.sampled_from([4000, 5000]).map(lambda digits: 10**digits),
    st.builds(Unreadable),
    st.binary().map(bytearray),
    st.sampled_from([{"__type__": "nobody knows", "__value__": 1}, {"__type__": "bytes", "__value__": "abc"}]),
    st.integers(500, 3000).map(lambda n: "long " * n),
    st.integers(100, 1500).map(lambda n: list(range(n))),
    st.sampled_from([150, 250, 100_000]).map(lambda depth: nested(depth)),
)
values = st.recursive(
    hashable | hashable | others,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.tuples(inner, inner),
        st.dictionaries(hashable, inner, max_size=4),
        st.dictionaries(st.text(), inner, max_size=4).map(OrderedDict),
        st.frozensets(hashable, max_size=4),
        st.sets(hashable, max_size=4),
        st.builds(Order, st.integers(), inner),
        inner.map(lambda value: [value, value]),
    ),
    max_leaves=8,
)


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


def consumed(value: Any, serializer: str) -> tuple[Any, ...]:
    """Return, in a tuple, what a consumer of the result backend gets; an empty one if it gets an error."""
    meta = {"status": "SUCCESS", "result": value, "traceback": None, "children": []}
    try:
        content_type, encoding, body = serialization.dumps(meta, serializer=serializer)
        back = serialization.loads(body, content_type, encoding, accept={content_type})
    except Exception:  # noqa: BLE001 - each serializer has its own
        return ()
    return (back["result"],)


def same(one: Any, other: Any) -> bool:
    """Tell whether two values are equal and of equal type in all their parts; NaN is NaN, and 0.0 is not -0.0."""
    if type(one) is not type(other):
        return False
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return same(list(one.items()), list(other.items()))
    if isinstance(one, (set, frozenset)):
        return same(sorted(one, key=repr), sorted(other, key=repr))
    if isinstance(one, float):
        return struct.pack("d", one) == struct.pack("d", other) or (math.isnan(one) and math.isnan(other))
    if isinstance(one, complex):
        return same([one.real, one.imag], [other.real, other.imag])
    if isinstance(one, Decimal):
        return one.as_tuple() == other.as_tuple()
    if isinstance(one, (datetime, time)):
        return one.isoformat() == other.isoformat() and one.fold == other.fold and str(one.tzinfo) == str(other.tzinfo)
    if isinstance(one, Order):
        return same([one.number, one.lines], [other.number, other.lines])
    return bool(one == other) or type(one) is object


def test_the_comparison_sees_what_equality_does_not() -> None:
    assert same([float("nan"), {1: Decimal("NaN")}], [float("nan"), {1: Decimal("NaN")}])
    differing = [1, True, 1.0, Decimal(1), Decimal("1.0"), "1", b"1", (1,), [1], {1}, frozenset({1}), {1: 1}, {"1": 1}]
    differing += [Name("1"), OrderedDict({1: 1}), Fraction(1), UUID(int=1), bytearray(b"1"), date(1, 1, 1), 1 + 0j]
    differing += [0.0, -0.0, datetime(1, 1, 1), datetime(1, 1, 1, tzinfo=timezone.utc), Order(1, 1), Order(1, True)]
    assert not [pair for pair in itertools.combinations(differing, 2) if same(*pair)]
    assert all(same(value, value) for value in differing)


@pytest.fixture(params=SERIALIZERS)
def serializer(request: pytest.FixtureRequest) -> str:
    try:
        serialization.dumps(1, serializer=request.param)
    except serialization.SerializerNotInstalled:
        pytest.skip(f"kombu's {request.param} needs what is not installed")
    return str(request.param)


Check = Callable[[Any, str, str], None]


@pytest.fixture
def check(serializer: str, tmp_path: Path) -> Check:
    """A function that has a value settled and replayed, and fails if a duplicate is told another story."""
    places = {"record": None, "memory": "memory://results", "file": f"file://{tmp_path}"}

    def replay(value: Any, compression: str, target: str) -> None:
        storage = TaskResultStorage(None, places[target])
        codec = Codec(
            serializer=serializer,
            compress_above=100,
            compression=compression,
            result_max_bytes=LIMIT if target == "record" else 50,
            storage=storage,
        )
        read = codec.decode(codec.encode_value(value, origin=Origin("key", 1)))
        expected = consumed(value, serializer)
        if read.kind is Kind.VALUE:
            assert expected, "a duplicate gets a value, and the consumer got none"
            assert same(read.data, expected[0])
        else:
            assert read.kind is Kind.UNAVAILABLE
            assert not expected or (target == "record" and "result_max_bytes is" in read.reason), read.reason

    return replay


choices = (
    values,
    st.sampled_from(["none", "zlib", "bzip2", "lzma", "zstd"]),
    st.sampled_from(["record", "memory", "file"]),
)
UNHURRIED = settings(deadline=None, suppress_health_check=list(HealthCheck))


def test_a_replay_is_what_the_consumer_got_or_nothing(check: Check) -> None:
    @settings(UNHURRIED, max_examples=50)
    @given(*choices)
    def a_few(value: Any, compression: str, target: str) -> None:
        check(value, compression, target)

    a_few()


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.unmeasured
def test_ten_thousand_replays_are_what_the_consumer_got_or_nothing(check: Check, serializer: str) -> None:
    @settings(UNHURRIED, max_examples=MANY[serializer])
    @given(*choices)
    def many(value: Any, compression: str, target: str) -> None:
        check(value, compression, target)

    many()
