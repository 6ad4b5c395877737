"""Equal after the trip through the broker <=> equal canonical form <=> equal key: over 100,000 generated pairs."""

from __future__ import annotations

import pickle
from collections import OrderedDict, deque
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from hashlib import sha256
from itertools import combinations
from pathlib import Path, PurePosixPath
from typing import Any
from uuid import UUID

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kombu import serialization
from kombu.utils import json as kombu_json

from celery_idempotent.core.keys import canonical, compose, compose_default, fingerprint
from tests.support.unit import compared

# The same examples in every run: a test that fails once in a thousand runs tells nobody what broke it.
checked = settings(
    max_examples=200, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)

ALIKE: list[Any] = [None, True, False, 0, 1, -1, 0.0, -0.0, 1.0, float("nan"), float("inf"), 2**2048, 2**2047, 1e16]
ALIKE += ["", "0", "1", "1.0", "true", "null", "~1", "a:b", "a%3Ab", '"', "\\", "[1]", "\ud83d", "\ude00", "\U0001f600"]
ALIKE += [
    "\ud83d\ude00",
    "b",
    "__type__",
    "bytes",
    b"",
    b"1",
    b"b",
    b"\xff",
    Decimal("1"),
    Decimal("1.0"),
    Decimal("1E+5"),
]
ALIKE += [UUID(int=1), UUID(int=2), "00000000-0000-0000-0000-000000000001", date(2024, 1, 1), "2024-01-01"]
ALIKE += [datetime(2024, 1, 1), datetime(2024, 1, 1, tzinfo=timezone.utc), time(0), time(0, tzinfo=timezone.utc)]
ALIKE += [datetime(2024, 1, 1, tzinfo=timezone(timedelta(hours=1))), "2024-01-01T00:00:00+00:00", "00:00:00"]

# A small choice of look-alikes makes equal pairs and near misses; the rest makes what nobody thought of.
leaves = st.sampled_from(ALIKE) | st.one_of(
    st.integers(),
    st.floats(),
    st.text(st.characters(), max_size=5),
    st.binary(max_size=5),
    st.decimals(allow_nan=False),
    st.uuids(),
    st.dates(),
    st.datetimes(timezones=st.sampled_from([None, timezone.utc, timezone(timedelta(hours=-5, minutes=-30))])),
    st.times(),
)
names = st.sampled_from(["1", 1, True, "true", None, "null", 1.5, "1.5", "a", "b", "__type__", "__value__", ""])
marks = st.fixed_dictionaries(
    {"__type__": st.sampled_from(["bytes", "base64", "uuid", "decimal", "date", "?"])}
).flatmap(lambda mark: leaves.map(lambda value: {**mark, "__value__": value}))
values = st.recursive(
    leaves | marks,
    lambda inner: (
        st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple) | st.dictionaries(names, inner, max_size=3)
    ),
    max_leaves=6,
)


UNREADABLE = object()


def trip(value: Any) -> Any:
    """Return what a consumer gets, UNREADABLE if it gets an error: a mark that kombu does not know, or cannot read."""
    try:
        return kombu_json.loads(kombu_json.dumps(value))
    except Exception:  # noqa: BLE001 - each of kombu's decoders has its own
        return UNREADABLE


def told(value: Any) -> Any:
    """Describe a value that was read so that two descriptions are equal when nobody could tell the values apart."""
    if isinstance(value, list):
        return ("list", tuple(told(member) for member in value))
    if isinstance(value, dict):
        return ("dict", frozenset((name, told(member)) for name, member in value.items()))
    if isinstance(value, (float, datetime, time, Decimal)):
        return (type(value).__name__, str(value))  # nan is nan, -0.0 is not 0.0, +01:00 is not +00:00
    return (type(value).__name__, value)


def near(value: Any) -> list[Any]:
    """Return values that differ little from this one, or not at all once they were read."""
    found: list[Any] = [[value], (value,), {"a": value}, {1: value}, {"1": value}, str(value)]
    if isinstance(value, (list, tuple)):
        found += [list(value), tuple(value), list(value)[::-1], [*value, None]]
        found += [
            [*value[:place], other, *value[place + 1 :]]
            for place in range(len(value))
            for other in near_leaf(value[place])
        ]
    elif isinstance(value, dict):
        found += [dict(reversed(value.items())), OrderedDict(value), list(value.items()), {**value, "a": None}]
        found += [{**value, name: other} for name in value for other in near_leaf(value[name])]
        found += [{str(name): member for name, member in value.items()}]
    else:
        found += near_leaf(value)
    return found


def near_leaf(value: Any) -> list[Any]:
    found: list[Any] = [None, str(value)]
    if isinstance(value, (int, float)) and value == value and abs(value) < 1e15:
        found += [int(value), float(value), bool(value), Decimal(value), value + 1]
    if isinstance(value, str):
        found += [value.encode("utf-8", "surrogatepass"), value + "0", value.upper(), [value]]
    if isinstance(value, bytes):
        found += [value + b"0", value.decode("latin-1")]
    return found


pairs = {"compared": 0, "equal": 0}


def compare(sample: list[Any]) -> None:
    sample = [value for value in sample if trip(value) is not UNREADABLE]
    forms = [canonical(value) for value in sample]
    read = [told(trip(value)) for value in sample]
    for value, form in zip(sample, forms, strict=True):
        assert canonical(trip(value)) == form
        assert form.isascii()
    for one, other in combinations(range(len(sample)), 2):
        pairs["compared"] += 1
        pairs["equal"] += read[one] == read[other]
        assert (read[one] == read[other]) == (forms[one] == forms[other]), (sample[one], sample[other])
    composed = [compose("n", "t", key=["A", value]) for value in sample]  # nothing beside nothing is no key
    assert len(set(composed)) == len(set(forms)) == len({fingerprint({"a": value}) for value in sample})


def test_all_look_alikes_are_told_apart() -> None:
    compare(ALIKE)


@checked
@given(st.lists(values, min_size=14, max_size=20))
def check_strangers(sample: list[Any]) -> None:
    compare(sample)


@checked
@given(values)
def check_relatives(value: Any) -> None:
    compare([value, *near(value)])


@pytest.mark.nightly
@pytest.mark.thorough
@pytest.mark.parametrize("number", [25_000, pytest.param(250_000, marks=pytest.mark.soak)])
@pytest.mark.timeout(300)  # beside two busy loops it needs more than others may
def test_equal_once_read_means_equal_form_and_nothing_else_does(number: int) -> None:
    pairs.update(compared=0, equal=0)
    while pairs["compared"] < number:  # how many pairs a round compares depends on what it draws
        check_strangers()
        check_relatives()
    assert pairs["compared"] >= number, pairs
    assert pairs["equal"] >= number // 100, pairs


@pytest.mark.thorough
@settings(checked, max_examples=100)
@given(st.lists(st.tuples(*[st.text(st.sampled_from("ab:%~ \u00e9\ud800"), min_size=1, max_size=3)] * 4), min_size=20))
def test_no_two_names_compose_to_one_key(names: list[tuple[str, str, str, str]]) -> None:
    distinct = set(names)
    explicit = {compose(space, task, scope=scope, key=key) for space, task, scope, key in distinct}
    default = {compose_default(space, task, id_) for space, task, id_, _ in distinct}
    assert len(explicit) == len(distinct)
    assert len(default) == len({name[:3] for name in distinct})
    assert not explicit & default
    assert all(key.count(":") == 3 for key in explicit)


@checked
@given(values)
def test_pickle_keeps_the_form_too(value: Any) -> None:
    content_type, encoding, body = serialization.dumps(value, serializer="pickle")
    assert canonical(serialization.loads(body, content_type, encoding, accept={content_type})) == canonical(value)


# -- by value ----------------------------------------------------------------------------------------------------------

LOOK_ALIKES: list[Any] = [1, "1", True, None, 1.0, (1, 2), {"number": "a"}, "CARD", "card", "/a", Fraction(1), 1 + 0j]
LOOK_ALIKES += [Path("/a"), PurePosixPath("/a"), compared.Kind.CARD, compared.Rights.READ, range(2), range(0, 2, 1)]
LOOK_ALIKES += [frozenset({"a", "b"}), frozenset({"a", "b", "c"}), timedelta(1), timezone.utc, compared.int64(1)]


def boxes(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Return what holds other values, of several classes with the same fields."""
    one = [compared.Order, compared.Refund, compared.Parcel, compared.Letter]
    return st.one_of(
        *(st.builds(make, st.sampled_from(["a", "b"]), inner) for make in one),
        st.builds(lambda value: compared.Plain(number="a", cents=value), inner),
        st.builds(lambda value: compared.Told(value), inner),
        st.builds(lambda value: deque([value]), inner),
        st.builds(lambda value: {(1, 2): value, "a": 1}, inner),
        st.lists(inner, max_size=2),
        st.dictionaries(st.sampled_from(["number", "cents"]), inner, max_size=2),
    )


objects = st.recursive(st.sampled_from(LOOK_ALIKES), boxes, max_leaves=5)


def described(value: Any) -> Any:
    """Describe an object so that two descriptions are equal when nobody could tell the objects apart."""
    if isinstance(value, (list, tuple)):
        return ("list", tuple(described(member) for member in value))
    if isinstance(value, dict):
        return ("dict", frozenset((name, described(member)) for name, member in value.items()))
    if isinstance(value, (deque, compared.Told)):
        return (type(value), described(list(value) if isinstance(value, deque) else value.cents))
    if hasattr(value, "cents"):
        return (type(value), value.number, described(value.cents))
    return (type(value), value.number if isinstance(value, compared.int64) else value)


@pytest.mark.nightly
@checked
@given(st.lists(objects, min_size=2, max_size=12))
def test_objects_have_equal_fingerprints_when_nobody_could_tell_them_apart(sample: list[Any]) -> None:
    written = [fingerprint({"a": value}) for value in sample]
    for (value, form), (other, its_form) in combinations(zip(sample, written, strict=True), 2):
        assert (form == its_form) == (described(value) == described(other)), (value, other)


@checked
@given(objects)
def test_pickle_keeps_the_fingerprint_of_an_object(value: Any) -> None:
    assert fingerprint({"a": pickle.loads(pickle.dumps(value))}) == fingerprint({"a": value})


@checked
@given(values)
def test_what_json_can_carry_has_the_fingerprint_of_its_canonical_form(value: Any) -> None:
    written = sha256(f'{{"a":{canonical(value)}}}'.encode()).hexdigest()[:32]
    assert fingerprint({"a": value}) == written
    assert trip(value) is UNREADABLE or fingerprint({"a": trip(value)}) == written
