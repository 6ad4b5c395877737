"""What is written without kombu is what kombu writes, and each reads the other's."""

from __future__ import annotations

import sys
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_idempotent.core import serialization as module
from celery_idempotent.core.serialization import KombuSerialization, StandardSerialization

KOMBU, STANDARD = KombuSerialization(), StandardSerialization()
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.dates()
    | st.times()
    | st.datetimes(timezones=st.none() | st.sampled_from([timezone.utc, timezone(timedelta(hours=5, minutes=30))]))
    | st.decimals(allow_nan=False)
    | st.uuids()
)
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4))


class Order:
    def __json__(self) -> dict[str, int]:
        return {"order": 7}


def refusal(serialization: StandardSerialization, value: object) -> str:
    with pytest.raises(TypeError) as caught:
        serialization.reduce(value)
    return str(caught.value)


@pytest.mark.nightly
@given(VALUES)
def test_json_is_the_same_with_and_without_kombu(value: object) -> None:
    text = KOMBU.to_json(value)
    assert STANDARD.to_json(value) == text
    assert STANDARD.from_json(text) == KOMBU.from_json(text)


@pytest.mark.parametrize("name", ["json", "pickle"])
def test_a_serializer_reads_what_the_other_side_wrote(name: str) -> None:
    value = {"at": datetime(2026, 11, 25, 8), "cents": Decimal("9.99"), "members": [1, None, "x"], "raw": b"\xff"}
    for one, other in ((KOMBU, STANDARD), (STANDARD, KOMBU)):
        content = one.dumps(value, name)
        body = content.encode() if isinstance(content, str) else content
        assert other.loads(body, one.content_types[name], other.accepted([name])) == value


@pytest.mark.parametrize("side", [KOMBU, STANDARD], ids=["kombu", "standard"])
def test_content_that_is_not_accepted_is_not_read(side: StandardSerialization) -> None:
    with pytest.raises(side.not_accepted):
        side.loads(b"not even a pickle", "application/x-python-serialize", side.accepted(["json"]))
    assert side.accepted(["application/json"]) == side.accepted(["json"])


@pytest.mark.parametrize("name", ["zlib", "gzip", "bzip2", "bzip", "lzma", "xz", "application/x-bz2"])
def test_a_compression_is_the_same_on_both_sides(name: str) -> None:
    for one, other in ((KOMBU, STANDARD), (STANDARD, KOMBU)):
        compress, content_type = one.compressor(name)
        assert other.decompressor(name)(compress(b"ab" * 500)) == b"ab" * 500
        assert other.compressor(name)[1] == content_type


@pytest.mark.parametrize("side", [KOMBU, STANDARD], ids=["kombu", "standard"])
def test_a_name_that_is_not_known_is_refused(side: StandardSerialization) -> None:
    for call in (side.compressor, side.decompressor, side.content_types.__getitem__):
        with pytest.raises(KeyError):
            call("snappy")
    with pytest.raises(side.missing):
        side.dumps(1, "snappy")
    with pytest.raises(side.missing):
        side.accepted(["snappy"])
    with pytest.raises(ValueError, match=r"snappy|Unsupported"):
        side.from_json('{"__type__": "snappy", "__value__": 1}')


def test_a_value_is_reduced_to_the_same_form() -> None:
    from django.utils.functional import lazystr

    for value in (Order(), lazystr("lazy"), b"x", b"\xff", date(2026, 1, 2), time(3, 4), Decimal("1.50")):
        assert STANDARD.reduce(value) == KOMBU.reduce(value)
    number = UUID(int=5, version=4)
    assert STANDARD.from_json(STANDARD.to_json(number)) == number
    assert refusal(STANDARD, object()) == refusal(KOMBU, object()) == "Object of type object is not JSON serializable"


def test_kombu_is_used_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(module.serialization, KombuSerialization)
    monkeypatch.setitem(sys.modules, "kombu", None)
    assert type(module._installed()) is StandardSerialization
