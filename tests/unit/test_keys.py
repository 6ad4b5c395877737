"""What a key, a fingerprint and the canonical form are made of."""

from __future__ import annotations

import decimal
import inspect
import os
import subprocess
import sys
from datetime import datetime, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from kombu.utils import json as kombu_json

from celery_idempotent import keys
from celery_idempotent.errors import MissingKey
from celery_idempotent.keys import bind, canonical, compose, compose_default, fingerprint, placed, resolve

DATA = Path(__file__).parent / "data"


def key(value: Any) -> str:
    return compose("idem", "shop.charge", key=value)


def through_kombu(value: Any) -> Any:
    return kombu_json.loads(kombu_json.dumps(value))


class Money:
    """A type that an application registers with kombu."""

    def __init__(self, amount: str) -> None:
        self.amount = amount


class Coin(Money):
    """Another one, read back as Money."""


@pytest.fixture
def money(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kombu_json, "_encoders", dict(kombu_json._encoders))
    monkeypatch.setattr(kombu_json, "_decoders", dict(kombu_json._decoders))
    kombu_json.register_type(Coin, "coin", lambda coin: {"amount": coin.amount}, lambda fields: Money(**fields))
    kombu_json.register_type(Money, "money", lambda money: {"amount": money.amount}, lambda fields: Money(**fields))


# -- canonical ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", ["0", "1", "12345"])
def test_frozen_keys_are_the_same_in_every_process(seed: str) -> None:
    environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(keys.__file__).parents[1])}
    command = [sys.executable, str(DATA / "write_keys.py")]
    written = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    frozen = (DATA / "key_vectors.txt").read_text(encoding="ascii")
    assert written.splitlines() == frozen.splitlines()
    assert len(frozen.splitlines()) >= 40


def test_look_alikes_all_differ() -> None:
    moment = datetime(2024, 1, 1, tzinfo=timezone.utc)
    alike = [1, "1", True, "true", 1.0, "1.0", Decimal("1"), Decimal("1.0"), b"1", [1], ["1"], {"1": 1}, {1}]
    alike += [None, "null", "None", "", b"", [], {}, set(), 0, False, 0.0, -0.0, moment, moment.isoformat()]
    alike += [moment.date(), moment.time(), moment.replace(tzinfo=None), moment.date().isoformat()]
    assert len({canonical(value) for value in alike}) == len(alike)


def test_an_offset_counts_and_the_kind_of_tzinfo_does_not() -> None:
    class Zone(timezone.__base__):  # type: ignore[misc,name-defined]
        def utcoffset(self, when: datetime | None) -> timedelta:
            return timedelta(0)

    utc = datetime(2024, 1, 1, tzinfo=timezone.utc)
    assert canonical(utc.replace(tzinfo=Zone())) == canonical(utc) == 'datetime"2024-01-01T00:00:00+00:00"'
    assert canonical(utc) != canonical(utc.replace(tzinfo=None))


def test_a_decimal_does_not_depend_on_the_context() -> None:
    with decimal.localcontext() as context:
        context.capitals = 0
        assert canonical(Decimal("1E+5")) == 'decimal"1E+5"'


def test_a_memoryview_is_the_bytes_that_msgpack_makes_of_it() -> None:
    assert canonical(memoryview(b"abc")) == canonical(b"abc")


def test_a_mapping_key_that_json_cannot_write_is_refused() -> None:
    with pytest.raises(TypeError, match=r"Expected text or a number .* as mapping key, got builtins\.tuple"):
        canonical({(1, 2): 3})
    with pytest.raises(TypeError, match=r"less than 4300 digits as mapping key, got builtins\.int"):
        canonical({10**5000: 3})
    assert canonical({10**1000: 3}) == canonical(through_kombu({10**1000: 3}))


def test_an_unknown_type_is_refused_by_name_and_with_advice() -> None:
    with pytest.raises(TypeError, match=r"got \S*test_keys\.Money .*pass its id, give the class a __json__"):
        canonical([Money("1")])


def test_a_failing_json_method_is_refused_like_an_unknown_type() -> None:
    class Broken:
        def __json__(self) -> object:
            raise ZeroDivisionError("no")

    with pytest.raises(TypeError, match="Broken"):
        canonical(Broken())


def test_depth_and_loops_are_refused_in_words() -> None:
    deep: Any = 1
    for _ in range(keys.MAX_DEPTH):
        deep = [deep]
    assert canonical(deep) == "[" * keys.MAX_DEPTH + "1" + "]" * keys.MAX_DEPTH
    loop: list[Any] = []
    loop.append(loop)
    round_: dict[str, Any] = {}
    round_["me"] = round_

    class Self:
        def __json__(self) -> object:
            return self

    for value in ([deep], {"a": deep}, loop, round_, Self()):
        with pytest.raises(TypeError, match="Nested more than 100 levels deep, or contains itself"):
            canonical(value)


@pytest.mark.usefixtures("money")
def test_a_type_registered_with_kombu_has_a_form_that_survives_the_trip() -> None:
    assert canonical(Money("5")) == 'type("money",{"amount":"5"})'
    assert canonical(through_kombu([Money("5")])) == canonical([Money("5")])
    assert canonical({"__type__": "money", "__value__": {"amount": "5"}}) == canonical(Money("5"))
    assert canonical(Money("5")) != canonical(Money("6"))


@pytest.mark.usefixtures("money")
def test_a_type_that_is_read_back_as_another_is_that_other() -> None:
    assert canonical(Coin("5")) == canonical(through_kombu(Coin("5"))) == canonical(Money("5"))


@pytest.mark.usefixtures("money")
def test_a_type_that_cannot_be_read_back_is_the_mapping_that_is_written() -> None:
    kombu_json.register_type(Money, "unread", lambda money: money.amount, lambda text: 1 / 0)
    assert canonical(Money("5")) == '{"__type__":"unread","__value__":"5"}'


@pytest.mark.usefixtures("money")
def test_a_mark_that_is_read_back_as_a_mapping_is_that_mapping() -> None:
    kombu_json.register_type(Money, "plain", lambda money: money.amount, lambda text: {"amount": text})
    assert canonical(through_kombu(Money("5"))) == canonical(Money("5")) == '{"amount":"5"}'
    assert canonical({"__type__": "plain", "__value__": "5"}) == '{"amount":"5"}'


@pytest.mark.usefixtures("money")
def test_a_type_that_the_app_sends_as_plain_json_is_that_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "_to_kombu", lambda value: float(value))  # what register_type(Decimal, None, float) does
    assert canonical(Decimal("1.5")) == canonical(1.5)


# -- fingerprint -------------------------------------------------------------------------------------------------------


def test_a_fingerprint_is_32_hex_digits_over_the_arguments_in_any_order() -> None:
    assert fingerprint({"a": 1, "b": [2]}) == fingerprint({"b": (2,), "a": 1})
    assert fingerprint({"a": 1, "b": [2]}) != fingerprint({"a": 1, "b": ["2"]})
    assert len(fingerprint({})) == 32
    assert int(fingerprint({}), 16)


def test_a_fingerprint_leaves_out_what_it_is_told_to() -> None:
    assert fingerprint({"a": 1, "at": 5}, leave_out=["at"]) == fingerprint({"a": 1}) != fingerprint({"a": 1, "at": 5})


def test_a_value_without_canonical_form_counts_by_its_type() -> None:
    assert fingerprint({"a": Money("1")}) == fingerprint({"a": Money("2")}) != fingerprint({"a": Coin("1")})
    assert fingerprint({"a": Money("1")}) != fingerprint({"a": f"<{keys._name(Money)}>"})


# -- bind --------------------------------------------------------------------------------------------------------------


def test_positional_keyword_and_default_spell_the_same() -> None:
    def task(order: int, amount: int = 5, *, note: str = "") -> None: ...

    signature = inspect.signature(task)
    wanted = {"order": 1, "amount": 5, "note": ""}
    assert bind(signature, (1,), {}) == bind(signature, (1, 5), {}) == bind(signature, (), {"order": 1}) == wanted


def test_collected_arguments_stand_beside_the_named_ones() -> None:
    def task(order: int, *args: int, **kwargs: int) -> None: ...

    signature = inspect.signature(task)
    assert bind(signature, (1, 2, 3), {"x": 4}) == {"order": 1, "args": (2, 3), "x": 4}
    assert bind(signature, (1,), {}) == {"order": 1, "args": ()}
    assert bind(signature, (1,), {"kwargs": 2}) == {"order": 1, "args": (), "kwargs": 2}


def test_collected_arguments_that_clash_stand_apart() -> None:
    def task(order: int, /, *args: int, **kwargs: Any) -> None: ...

    signature = inspect.signature(task)
    assert bind(signature, (1,), {"order": 2, "args": 3, "x": 4}) == {
        "order": 1,
        "args": (),
        "x": 4,
        "**": {"order": 2, "args": 3},
    }
    assert bind(signature, (1,), {"**": 5})["**"] == {"**": 5}


def test_arguments_that_do_not_fit_raise_what_the_call_would() -> None:
    with pytest.raises(TypeError, match="missing a required argument: 'order'"):
        bind(inspect.signature(lambda order: None), (), {})


# -- resolve -----------------------------------------------------------------------------------------------------------

ARGUMENTS = {"order": "A-1", "lines": [{"id": 7}], "count": 0, "nothing": None, "empty": ""}


def test_a_name_gives_the_argument_and_names_give_a_tuple_in_order() -> None:
    assert resolve("order", ARGUMENTS) == "A-1"
    assert resolve("count", ARGUMENTS) == 0
    assert resolve(["count", "order"], ARGUMENTS) == (0, "A-1")
    assert resolve(("order", "count"), ARGUMENTS) == ("A-1", 0)


@pytest.mark.parametrize("name", ["nothing", "empty"])
def test_an_argument_that_names_nothing_is_no_key(name: str) -> None:
    for source in (name, ["order", name]):
        with pytest.raises(MissingKey, match=f"Expected the argument '{name}', of which the key is made, to name"):
            resolve(source, ARGUMENTS)


def test_an_argument_that_is_missing_is_named_with_those_that_are_there() -> None:
    with pytest.raises(MissingKey, match=r"Expected an argument 'invoice' .* got \['a', 'b'\]: pass it"):
        resolve("invoice", {"b": 1, "a": 2})


def test_an_argument_without_canonical_form_is_no_key() -> None:
    with pytest.raises(MissingKey, match=r"Expected the argument 'a'.* got \S*test_keys\.Money"):
        resolve("a", {"a": Money("1")})


def test_a_callable_gets_the_arguments_it_names() -> None:
    class Unhashable:
        __hash__ = None  # type: ignore[assignment]

        def __call__(self, *, order: str) -> str:
            return order

    assert resolve(lambda lines: lines[0]["id"], ARGUMENTS) == 7
    assert resolve(lambda order, invoice="none": (order, invoice), ARGUMENTS) == ("A-1", "none")
    assert resolve(lambda **everything: sorted(everything), ARGUMENTS) == sorted(ARGUMENTS)
    assert resolve(Unhashable(), ARGUMENTS) == "A-1"


def test_a_callable_that_does_not_tell_its_signature_gets_them_all() -> None:
    with pytest.raises(ValueError, match="signature"):
        inspect.signature(dict)
    assert resolve(dict, {"a": 1}) == {"a": 1}


def test_a_callable_that_raises_leaves_no_key() -> None:
    with pytest.raises(MissingKey, match=r"key callable .*lambda.* got KeyError: 'id'") as caught:
        resolve(lambda order: {}["id"], ARGUMENTS)
    assert isinstance(caught.value.__cause__, KeyError)
    with pytest.raises(MissingKey, match="TypeError"):
        resolve(lambda invoice: invoice, ARGUMENTS)


@pytest.mark.parametrize("result", [None, "", (), [], {}, b"", set(), frozenset()])
def test_a_callable_that_returns_nothing_leaves_no_key(result: Any) -> None:
    with pytest.raises(MissingKey, match=r"Expected what the key callable .* to name the operation"):
        resolve(lambda: result, ARGUMENTS)


def test_a_callable_that_returns_an_object_leaves_no_key() -> None:
    with pytest.raises(MissingKey, match=r"Expected what the key callable .* to be text, a number"):
        resolve(lambda: Money("1"), ARGUMENTS)


# -- compose -----------------------------------------------------------------------------------------------------------


def test_a_key_is_readable() -> None:
    assert compose("idem", "shop.charge", key="ORD-1") == "idem:shop.charge::ORD-1"
    assert compose("idem", "shop.charge", key="ORD-1", scope="acme") == "idem:shop.charge:acme:ORD-1"
    assert compose("idem", "shop.charge", key=("ORD-1", 3), scope=0) == 'idem:shop.charge:~0:~["ORD-1",3]'
    assert compose_default("idem", "shop.charge", "0b3b6c1e") == "idem:shop.charge:0b3b6c1e"


def test_an_operation_that_is_one_at_each_place_is_named_by_the_place_as_no_other_is() -> None:
    key = compose_default("idem", "shop.reload", "0b3b6c1e")
    assert placed(key, "") == key
    assert placed(key, "bcast.7") == "idem:shop.reload:0b3b6c1e:~@bcast.7"
    assert placed(key, "a:~@b") == "idem:shop.reload:0b3b6c1e:~@a%3A%7E@b"
    assert compose("idem", "shop.reload", key="@bcast.7", scope="0b3b6c1e") != placed(key, "bcast.7")
    assert compose("idem", "shop.reload", key="~@bcast.7", scope="0b3b6c1e") != placed(key, "bcast.7")
    assert len(placed(key, "q" * 1000)) < 150


def test_a_colon_in_a_part_parts_nothing() -> None:
    composed = {
        compose("n", "t", scope="a", key="b:c"),
        compose("n", "t", scope="a:b", key="c"),
        compose("n", "t:a", scope="b", key="c"),
        compose("n:t", "a", scope="b", key="c"),
        compose("n", "t", key="a:b:c"),
        compose_default("n", "t:a:b", "c"),
        compose_default("n", "t", "a:b:c"),
        compose_default("n:t", "a", "b:c"),
    }
    assert len(composed) == 8


def test_no_text_looks_like_another_value() -> None:
    long = ["x"] * 100
    assert key(1) == "idem:shop.charge::~1"
    assert key("~1") == "idem:shop.charge::%7E1"
    assert key("%7E1") == "idem:shop.charge::%257E1"
    digest = key(long).rpartition(":")[2]
    assert len(digest) == 66
    assert digest.startswith("~~")
    assert key(digest) != key(long) != key(str(long))


def test_a_long_part_is_hashed_and_the_last_short_one_is_not() -> None:
    assert key("x" * 128).endswith(":" + "x" * 128)
    assert key("x" * 129).rpartition(":")[2].startswith("~~")
    assert key("x" * 129) != key("x" * 130)
    assert key("%" * 43).rpartition(":")[2].startswith("~~")  # what counts is what is stored
    assert len(compose_default("n", "t", "x" * 500)) == 4 + 66


def test_what_kombu_turns_into_text_is_that_text() -> None:
    class Reference:
        def __json__(self) -> object:
            return "ORD-1"

    assert key(Reference()) == key("ORD-1")
    assert key("\ud83d\ude00") == key("\U0001f600")


@pytest.mark.parametrize("value", [None, "", (), [], {}, b"", set()])
def test_an_empty_key_is_missing(value: Any) -> None:
    with pytest.raises(MissingKey, match="Expected the key to name the operation, got"):
        key(value)


@pytest.mark.parametrize("value", ["", (), [], {}, b""])
def test_an_empty_scope_is_missing(value: Any) -> None:
    with pytest.raises(MissingKey, match="Expected the scope to name the operation, got"):
        compose("n", "t", key="k", scope=value)


def test_an_empty_task_id_is_missing() -> None:
    with pytest.raises(MissingKey, match="Expected the task id to name the operation"):
        compose_default("n", "t", "")


def test_a_key_or_scope_without_canonical_form_is_missing() -> None:
    with pytest.raises(MissingKey, match="Expected the key to be text, a number or a sequence"):
        key(Money("1"))
    with pytest.raises(MissingKey, match="Expected the scope to be text"):
        compose("n", "t", key="k", scope=Money("1"))
