"""What a key, a fingerprint and the canonical form are made of."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import decimal
import enum
import functools
import inspect
import io
import json
import os
import subprocess
import sys
import threading
import types
from collections import Counter, OrderedDict
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import wrapt
from celery import Celery, signature
from kombu.utils import json as kombu_json
from pydantic import v1 as pydantic_1

from celery_idempotent.core import keys
from celery_idempotent.core.keys import (
    bind,
    canonical,
    compose,
    compose_default,
    compose_part,
    compose_slot,
    defaults_of,
    fingerprint,
    has_fields,
    hides_arguments,
    is_made_of,
    own_signature,
    placed,
    resolve,
)
from celery_idempotent.core.serialization import serialization
from celery_idempotent.errors import MissingKey
from tests.support.unit import compared

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
    environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(keys.__file__).parents[2])}
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


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("idem:shop.charge:ORD-1", "ORD-1", True),
        ("idem:shop.charge:ORD-1", "ORD", False),
        ("idem:shop.charge:acme:ORD%3A1", "ORD:1", True),
        ("idem:shop.charge:acme:ORD-1", "acme", True),
        ("idem:shop.charge:~[ORD-1,17]", "17", True),
        ("idem:shop.charge:~[ORD-1,17]", "7", False),
        ("idem:shop.charge:~~17", "17", False),
        ("idem:ORD-1:x", "ORD-1", False),
    ],
)
def test_the_name_of_an_operation_shows_what_it_is_made_of(name: str, value: str, shown: bool) -> None:
    assert is_made_of(name, value) is shown


def test_the_part_of_a_chords_member_has_a_name_of_its_own() -> None:
    assert compose_part("idem", "a:b", "c") == "idem:~part:a%3Ab:c" != compose_part("idem", "a", "b:c")


def test_an_instance_of_a_model_has_fields_and_its_class_has_none() -> None:
    @dataclasses.dataclass
    class Order:
        id: int

    assert (has_fields(Order(1)), has_fields(Order), has_fields({"id": 1})) == (True, False, False)


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
    monkeypatch.setattr(serialization, "reduce", float)  # what register_type(Decimal, None, float) does
    assert canonical(Decimal("1.5")) == canonical(1.5)


# -- fingerprint -------------------------------------------------------------------------------------------------------


def test_a_fingerprint_is_32_hex_digits_over_the_arguments_in_any_order() -> None:
    assert fingerprint({"a": 1, "b": [2]}) == fingerprint({"b": (2,), "a": 1})
    assert fingerprint({"a": 1, "b": [2]}) != fingerprint({"a": 1, "b": ["2"]})
    assert len(fingerprint({})) == 32
    assert int(fingerprint({}), 16)


def test_a_fingerprint_leaves_out_what_it_is_told_to() -> None:
    assert fingerprint({"a": 1, "at": 5}, leave_out=["at"]) == fingerprint({"a": 1}) != fingerprint({"a": 1, "at": 5})


def test_an_argument_that_equals_its_default_does_not_count() -> None:
    def old(order: str) -> None: ...

    def new(order: str, cents: Any = (5, 6), *more: int, note: str = "", **others: int) -> None: ...

    def digest(task: Any, *args: Any, **kwargs: Any) -> str:
        signature = inspect.signature(task)
        return fingerprint(bind(signature, args, kwargs), defaults=defaults_of(signature))

    before = digest(old, "A")
    assert digest(new, "A") == digest(new, "A", (5, 6)) == digest(new, "A", [5, 6]) == before
    assert digest(new, "A", note="") == digest(new, order="A", cents=[5, 6]) == before
    others = [digest(new, "A", 5), digest(new, "A", [5, 6.0]), digest(new, "A", (5, 6), 7), digest(new, "A", note="x")]
    others += [digest(new, "A", x=1), digest(new, "B"), digest(new, "A", None), digest(new, "A", ["5", "6"])]
    assert len({before, *others}) == 1 + len(others)


def test_a_default_that_has_no_value_is_left_out_where_it_is_not_given() -> None:
    missing = threading.Lock()
    defaults = {"a": missing}
    assert fingerprint({"a": missing}, defaults=defaults) == fingerprint({})
    assert fingerprint({"a": 1}, defaults=defaults) == fingerprint({"a": 1})
    with pytest.raises(MissingKey):
        fingerprint({"a": threading.Lock()}, defaults=defaults)


def test_a_default_that_a_body_changed_is_still_the_default() -> None:
    collected = [1]
    assert fingerprint({"a": collected}, defaults={"a": collected}) == fingerprint({})


# -- fingerprint: by value ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pair", compared.LOST.values(), ids=compared.LOST)
def test_what_a_class_adds_to_one_of_pythons_own_counts_although_pickle_loses_it(pair: tuple[Any, Any]) -> None:
    one, other = (fingerprint({"a": value}) for value in pair)
    assert one != other
    assert fingerprint({"a": pair[0]}) == one


@pytest.mark.parametrize("pair", compared.PAIRS.values(), ids=compared.PAIRS)
def test_what_json_cannot_carry_is_compared_by_value(pair: tuple[Any, Any]) -> None:
    one, other = (fingerprint({"a": value}) for value in pair)
    assert one != other
    assert fingerprint({"a": copy.deepcopy(pair[0])}) == one
    for around in (lambda value: [value], lambda value: {"in": (value,)}):
        assert fingerprint({"a": around(pair[0])}) != fingerprint({"a": around(pair[1])})


def test_no_two_values_are_equal_that_are_not() -> None:
    written = compared.fingerprints()
    assert len(set(written)) == len(written)


@pytest.mark.parametrize("seed", ["1", "12345"])
def test_a_value_is_compared_alike_in_every_process_and_after_the_trip_through_pickle(seed: str) -> None:
    found = f"{Path(keys.__file__).parents[2]}:{Path(__file__).parents[2]}"
    environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": found}
    command = [sys.executable, "-c", "from tests.support.unit import compared; compared.write()"]
    written = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    assert written.splitlines() == compared.fingerprints()


def test_equal_fields_of_different_classes_differ() -> None:
    alike = [
        *(compared.Order("A", 1), compared.Refund("A", 1), compared.Parcel("A", 1), compared.Letter("A", 1)),
        *({"number": "A", "cents": 1}, ["A", 1], compared.Plain(number="A", cents=1)),
        *(Path("/a"), "/a", Fraction(1), 1, complex(1), range(1), [0], compared.Kind.CARD, "CARD"),
    ]
    assert len({fingerprint({"a": value}) for value in alike}) == len(alike)
    lines = [compared.Line(item="x"), compared.DearLine.model_construct(item="x")]
    assert len({fingerprint({"a": compared.Cart.model_construct(lines=[line])}) for line in lines}) == 2


def test_what_follows_from_the_rest_does_not_count() -> None:
    fresh, asked = compared.Plain(cents=1), compared.Plain(cents=1)
    assert asked.total == 1
    assert fingerprint({"a": asked}) == fingerprint({"a": fresh})
    posted, read = compared.Registered("A", "x"), compared.Registered("A", "x")
    assert read.label == "A"
    assert fingerprint({"a": posted}) == fingerprint({"a": read})
    carts = [compared.Cart(number="A", lines=[compared.Line(item="x")]) for _ in range(2)]
    assert carts[0].first.item == "x"
    assert fingerprint({"a": carts[0]}) == fingerprint({"a": carts[1]})  # nor what is private
    assert fingerprint({"a": compared.Cart(number="A", cents=0)}) == fingerprint({"a": compared.Cart(number="A")})


def test_what_a_model_instance_of_django_has_read_of_others_does_not_count() -> None:
    shop = compared.Row(7)
    shop._state.fields_cache["shop"] = shop
    read = compared.Row(1, {"shop": shop}, _prefetched_objects_cache={"lines": [shop]})
    assert fingerprint({"a": read}) == fingerprint({"a": compared.Row(1)})
    assert read._state.fields_cache == {"shop": shop}
    assert fingerprint({"a": compared.Row(1, {}, note="x")}) != fingerprint({"a": compared.Row(1)})


def test_a_model_of_pydantic_1_is_compared_by_its_fields() -> None:
    class Old(pydantic_1.BaseModel):
        number: str
        cents: int = 0
        _seen: int = pydantic_1.PrivateAttr(default_factory=iter(range(9)).__next__)

    assert fingerprint({"a": Old(number="A")}) == fingerprint({"a": Old(number="A", cents=0)})
    assert fingerprint({"a": Old(number="A")}) != fingerprint({"a": Old(number="A", cents=1)})


def test_an_enum_is_its_name_whatever_its_value_is() -> None:
    class Open(enum.Enum):
        DOOR = threading.Lock()
        GATE = threading.RLock()

    assert fingerprint({"a": Open.DOOR}) == fingerprint({"a": Open.DOOR}) != fingerprint({"a": Open.GATE})


def test_a_field_that_was_never_set_is_none() -> None:
    @dataclasses.dataclass
    class Late:
        number: str
        total: int = dataclasses.field(init=False)

    done = Late("A")
    done.total = 0
    assert fingerprint({"a": Late("A")}) == fingerprint({"a": Late("A")}) != fingerprint({"a": done})


def test_what_json_makes_of_a_value_is_what_counts_where_it_carries_it() -> None:
    class Signed(str): ...

    class Registered(Money):
        def __json__(self) -> object:
            return self.amount

    class Colour(str, enum.Enum):
        RED = "red"

    app = Celery(set_as_current=False)
    alike = [
        *((Signed("x"), "x"), (Registered("5"), "5"), (Colour.RED, "red"), (compared.Point(1, 2), [1, 2])),
        *((OrderedDict(b=1, a=2), {"a": 2, "b": 1}), (Counter("aab"), {"a": 2, "b": 1}), (bytearray(b"a"), b"a")),
        (signature("shop.charge", ("A",), app=app), json.loads(json.dumps(signature("shop.charge", ("A",))))),
    ]
    for value, read in alike:
        assert fingerprint({"a": value}) == fingerprint({"a": read})


def local() -> None: ...


class Stateful:
    def __init__(self, state: object) -> None:
        self.state = state


class Unwilling:
    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ValueError("no")


@pytest.mark.parametrize(
    "make",
    [
        *(lambda: lambda: None, lambda: (n for n in ()), lambda: iter({"a"}), threading.Lock, io.StringIO, Unwilling),
        *(
            functools.partial(open, os.devnull),
            lambda: [Stateful(threading.Lock())],
            lambda: {"a": Stateful(lambda: 1)},
        ),
        *(lambda: compared.Order("A", threading.Lock()), lambda: json, lambda: type("Local", (), {})),
        *(lambda: compared.Order("A", [{"a": lambda: 1}]), lambda: {(1, 2): lambda: None}),
        *(lambda: compared.named("a", threading.Lock()), lambda: functools.partial(lambda: None)),  # type: ignore[arg-type]
    ],
)
def test_what_has_no_value_to_compare_is_an_error_and_equal_to_nothing(make: Any) -> None:
    value = make()
    with pytest.raises(MissingKey, match=r"Expected the argument 'order' to have a value.*got \S+\.") as caught:
        fingerprint({"order": value})
    assert 'fingerprint=["order"]' in str(caught.value)
    assert "fingerprint=False" in str(caught.value)
    assert fingerprint({"order": value}, leave_out=["order"]) == fingerprint({})
    if isinstance(value, io.IOBase):
        value.close()


def test_an_error_of_comparison_names_what_has_no_value() -> None:
    with pytest.raises(
        MissingKey, match=r"got tests\.support\.unit\.compared\.Order\. What is in _thread\.lock cannot be read"
    ):
        fingerprint({"order": compared.Order("A", threading.Lock())})


def test_objects_that_contain_themselves_are_refused_and_those_that_are_met_twice_are_not() -> None:
    with pytest.raises(MissingKey, match=r"compared\.Node contains itself"):
        fingerprint({"a": compared.ring()})
    one = compared.Order("A", 1)
    assert fingerprint({"a": [one, one]}) == fingerprint({"a": [one, compared.Order("A", 1)]})


def test_objects_nested_too_deeply_are_refused() -> None:
    def nested(depth: int) -> Any:
        value: Any = 1
        for _ in range(depth):
            value = compared.Order("A", value)
        return value

    most = keys.MAX_DEPTH // 2
    assert fingerprint({"a": nested(most)}) != fingerprint({"a": nested(most - 1)})
    with pytest.raises(MissingKey, match="Nested more than 100 levels deep"):
        fingerprint({"a": nested(most + 1)})


def test_a_lack_of_room_on_the_stack_is_no_equality() -> None:
    class Deep(list):  # type: ignore[type-arg]
        def __iter__(self) -> Any:
            raise RecursionError("maximum recursion depth exceeded")

    with pytest.raises(MissingKey, match="maximum recursion depth"):
        fingerprint({"a": Deep()})
    assert fingerprint({"a": 1}, defaults={"a": Deep()}) == fingerprint({"a": 1})


def test_the_order_of_members_does_not_count() -> None:
    assert fingerprint({"a": {(1, 2): 1, (3, 4): 2}}) == fingerprint({"a": {(3, 4): 2, (1, 2): 1}})
    assert fingerprint({"a": compared.Plain(x=1, y=2)}) == fingerprint({"a": compared.Plain(y=2, x=1)})
    assert fingerprint({"a": compared.bag(x=1, y=2)}) == fingerprint({"a": compared.bag(y=2, x=1)})


def test_keys_are_as_strict_as_before() -> None:
    for value in (compared.Order("A"), Path("/a"), compared.Kind.CARD, {(1, 2): 3}):
        with pytest.raises(MissingKey, match="Expected the key to be text"):
            key(value)


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


# -- own_signature -----------------------------------------------------------------------------------------------------


def with_session(function: Any) -> Any:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function("session", *args, **kwargs)

    return wrapper


def dated(function: Any) -> Any:
    @functools.wraps(function)
    def wrapper(order: str, *args: Any) -> Any:
        return function("today", order, *args)

    return wrapper


def charge(session: str, order: str, cents: int = 0) -> Any:
    return (session, order, cents)


def spelled(function: Any) -> str:
    names = {p.name: p.name if p.kind is not p.VAR_POSITIONAL else f"*{p.name}" for p in parameters_of(function)}
    return ", ".join(f"**{p.name}" if p.kind is p.VAR_KEYWORD else names[p.name] for p in parameters_of(function))


def parameters_of(function: Any) -> list[inspect.Parameter]:
    return list(own_signature(function).parameters.values())


class Shop:
    def charge(self, order: str) -> None: ...

    decorated = with_session(charge)

    @contextlib.contextmanager
    def opened(self) -> Any:
        yield

    @functools.lru_cache  # noqa: B019
    def cached(self, order: str) -> None: ...


@contextlib.contextmanager
def transaction() -> Iterator[None]:
    yield


def described(function: Any) -> Any:
    """Have a function say what it takes, as makefun and the package decorator do."""
    function.__signature__ = inspect.Signature([inspect.Parameter("order", inspect.Parameter.KEYWORD_ONLY)])
    return function


def described_as_is(function: Any) -> Any:
    """Have a decorated function say that it takes what the decorated one takes, as a cure for hidden arguments."""
    decorated = with_session(function)
    decorated.__signature__ = inspect.signature(function)
    return decorated


@wrapt.decorator
def injecting(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    return wrapped("session", *args, **kwargs)


@wrapt.decorator(adapter=lambda order: None)
def adapted(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    return wrapped("session", *args, **kwargs)


@pytest.mark.parametrize(
    ("function", "takes", "hidden"),
    [
        (charge, "session, order, cents", False),
        (with_session(charge), "*args, **kwargs", True),
        (dated(charge), "order, *args", True),
        (with_session(described(lambda session, order: None)), "*args, **kwargs", True),
        (described(with_session(charge)), "order", False),
        (transaction()(charge), "session, order, cents", False),
        (transaction()(with_session(charge)), "*args, **kwargs", True),
        (with_session(transaction()(charge)), "*args, **kwargs", True),
        (functools.lru_cache(charge), "session, order, cents", False),
        (functools.partial(charge, "session"), "order, cents", False),
        (functools.partial(with_session(charge), cents=1), "*args, **kwargs", True),
        (Shop().charge, "order", False),
        (Shop().decorated, "*args, **kwargs", True),
        (types.MethodType(described_as_is(charge), "session"), "order, cents", False),
        (types.MethodType(with_session(described_as_is(charge)), "session"), "*args, **kwargs", True),
        (types.MethodType(dated(described_as_is(charge)), "session"), "*args", True),
        (transaction()(Shop().charge), "order", False),
        (types.MethodType(transaction()(charge), "session"), "order, cents", False),
        (types.MethodType(functools.lru_cache(charge), "session"), "order, cents", False),
        (injecting(charge), "*args, **kwargs", True),
        (adapted(charge), "order", False),
        (lambda *args, **kwargs: None, "*args, **kwargs", False),
    ],
)
def test_a_signature_is_the_callables_own_and_not_that_of_what_it_wraps(
    function: Any, takes: str, hidden: bool
) -> None:
    assert (spelled(function), hides_arguments(function)) == (takes, hidden)


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


def test_a_callable_gets_what_itself_takes_and_not_what_it_wraps() -> None:
    def renamed(function: Any) -> Any:
        @functools.wraps(function)
        def wrapper(order: str) -> Any:
            return function(order)

        return wrapper

    def with_tenant(function: Any) -> Any:
        @functools.wraps(function)
        def wrapper(**arguments: Any) -> Any:
            return arguments.pop("tenant", "?"), function(**arguments)

        return wrapper

    arguments = {"order": "A", "tenant": "T"}
    assert resolve(renamed(lambda number: number), arguments) == "A"
    assert resolve(with_tenant(lambda order: order), arguments) == ("T", "A")
    assert resolve(functools.lru_cache(lambda order: order), arguments) == "A"


def test_a_callable_that_does_not_tell_its_signature_gets_them_all() -> None:
    with pytest.raises(ValueError, match="signature"):
        inspect.signature(dict)
    assert resolve(dict, {"a": 1}) == {"a": 1}


def test_a_callable_that_raises_leaves_no_key() -> None:
    with pytest.raises(MissingKey, match=r"key callable .*lambda.* got KeyError: 'id'\. Fix it; ") as caught:
        resolve(lambda order: {}["id"], ARGUMENTS)
    assert isinstance(caught.value.__cause__, KeyError)
    with pytest.raises(MissingKey, match=r"the scope callable .* to return a scope, got ZeroDivisionError"):
        resolve(lambda order: 1 / 0, ARGUMENTS, "scope")
    with pytest.raises(MissingKey, match="TypeError"):
        resolve(lambda invoice: invoice, ARGUMENTS)


#: What names nothing, and what has nothing else in it.
NOTHING = [None, "", (), [], {}, b"", set(), frozenset(), float("nan")]
NOTHING += [(None, None), ["", (None, [b""])], {None}, [float("nan"), {}]]


@pytest.mark.parametrize("result", NOTHING)
def test_a_callable_that_returns_nothing_leaves_no_key(result: Any) -> None:
    with pytest.raises(MissingKey, match=r"Expected what the key callable .* to name the operation"):
        resolve(lambda: result, ARGUMENTS)


@pytest.mark.parametrize("result", [str, repr, lambda order: f"order-{order}", lambda order: ("A", [str(order)])])
@pytest.mark.parametrize("what", ["key", "scope"])
def test_a_callable_that_returns_the_address_of_an_object_leaves_no_key(result: Any, what: str) -> None:
    with pytest.raises(MissingKey, match=r"to be the same in every process, got <\S+ object at 0x\w+>, the address"):
        resolve(lambda order: result(object()), ARGUMENTS, what)
    with pytest.raises(MissingKey, match="to be the same in every process"):
        resolve(lambda order: result(order), {"order": object()}, what)


def test_an_address_that_the_message_has_is_the_same_in_every_process() -> None:
    text = "no answer from <shop.Gateway object at 0x7f3c0>"
    assert resolve(lambda report: report["text"][:100], {"report": {"text": text}}) == text
    assert resolve("text", {"text": text}) == text


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


@pytest.mark.parametrize("value", NOTHING)
def test_an_empty_key_is_missing(value: Any) -> None:
    with pytest.raises(MissingKey, match="Expected the key to name the operation, got"):
        key(value)


@pytest.mark.parametrize(
    "value", ["null", "nan", "[]", "{}", ',:"', 0, False, (None, 0), {"id": None}, {"": "a"}, ["", " "]]
)
def test_a_key_with_something_in_it_is_not_empty(value: Any) -> None:
    assert key(value)


@pytest.mark.parametrize("value", NOTHING)
def test_calls_that_name_nothing_wait_for_no_common_message(value: Any) -> None:
    """With one reservation for all of them, that with the first one's arguments would be the only one published."""
    with pytest.raises(MissingKey, match="to name the operation, got"):
        compose_slot("n", "t", "document", {"document": value}, message=())


@pytest.mark.parametrize("value", NOTHING[1:])
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


def test_arguments_that_make_no_unique_key_are_refused_with_what_to_write_instead() -> None:
    """A model of Django's, say, which an application that pickles its messages passes."""
    with pytest.raises(
        MissingKey, match=r"Money .*Or name what distinguishes two calls: unique=lambda price: price\.\.\."
    ):
        compose_slot("n", "t", None, {"price": Money("1")}, message=())
