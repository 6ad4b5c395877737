"""Arguments that kombu's JSON cannot carry and that have a value: each with one of the same class that differs.

As a module, that other processes can import what pickle refers to.
"""

from __future__ import annotations

import array
import collections
import enum
import functools
import operator
import pickle
import re
import sys
from dataclasses import dataclass, field
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path, PureWindowsPath
from types import SimpleNamespace as Namespace
from typing import Any, NamedTuple
from uuid import UUID
from zoneinfo import ZoneInfo

import attr
import pydantic

from celery_idempotent.core.keys import fingerprint


@dataclass
class Order:
    number: str
    cents: Any = 0


@dataclass
class Refund:  # what an Order has, and is none
    number: str
    cents: Any = 0


@dataclass(frozen=True, order=True)
class Queued:
    priority: int
    order: Any = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Slotted:
    number: str


class Rush(Order):
    def __init__(self, number: str, fee: int) -> None:
        super().__init__(number)
        self.fee = fee


@attr.s(auto_attribs=True)
class Parcel:
    number: str
    cents: Any = 0


@attr.frozen
class Letter:
    number: str
    cents: Any = 0


class Registered(Letter):
    def __init__(self, number: str, place: str) -> None:
        super().__init__(number)
        vars(self)["place"] = place

    @functools.cached_property
    def label(self) -> str:
        return self.number


class Marked(Slotted):
    def __init__(self, number: str, mark: str) -> None:
        super().__init__(number)
        vars(self)["mark"] = mark


class Line(pydantic.BaseModel):
    item: str


class DearLine(Line):
    cents: int


class Cart(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="allow")

    number: str
    cents: int = pydantic.Field(default=0, exclude=True)
    lines: list[Line] = []
    secret: pydantic.SecretStr | None = None
    _seen: datetime = pydantic.PrivateAttr(default_factory=datetime.now)

    @functools.cached_property
    def first(self) -> Line:
        return self.lines[0]


class Kind(enum.Enum):
    CARD = "card"
    CASH = "cash"


class Rights(enum.Flag):
    READ = 1
    WRITE = 2


class Money(Decimal):
    currency: str


def money(text: str, currency: str) -> Money:
    made = Money(text)
    made.currency = currency
    return made


class Named(str):
    __slots__ = ("__owner", "__weakref__", "never_set")


def named(text: str, owner: str) -> Named:
    made = Named(text)
    made._Named__owner = owner  # type: ignore[attr-defined]
    return made


class Tagged(dict):  # type: ignore[type-arg]
    __slots__ = "tag"


def tagged(tag: str, **members: int) -> Tagged:
    made = Tagged(members)
    made.tag = tag
    return made


class Amount(Decimal):
    """Pickled with its currency, as its author wrote."""

    currency: str

    def __reduce__(self) -> Any:
        return amount, (str(self), self.currency)


def amount(text: str, currency: str) -> Amount:
    made = Amount(text)
    made.currency = currency
    return made


class Upload(type(Path())):  # type: ignore[misc]
    owner: str


def upload(path: str, owner: str) -> Any:
    made = Upload(path)
    made.owner = owner
    return made


class Delay(timedelta):
    reason: str


def delay(seconds: int, reason: str) -> Delay:
    made = Delay(seconds=seconds)
    made.reason = reason
    return made


class Plain:
    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)

    @functools.cached_property
    def total(self) -> int:
        return len(vars(self))


class WithSlots:
    __slots__ = ("__dict__", "cents")

    def __init__(self, cents: Any, **attributes: Any) -> None:
        self.cents = cents
        vars(self).update(attributes)


class State:
    """That of a row."""

    def __init__(self, cache: dict[str, Any]) -> None:
        self.db, self.adding, self.fields_cache = "default", False, cache


class Row:
    """A model instance as Django's."""

    _meta = Namespace(concrete_fields=())

    def __init__(self, pk: int, cache: dict[str, Any] | None = None, **attributes: Any) -> None:
        vars(self).update(attributes, id=pk, _state=State(cache or {}))


class Told:
    """Says itself what is in it."""

    def __init__(self, cents: int) -> None:
        self.cents, self.lock = cents, operator

    def __getstate__(self) -> dict[str, int]:
        return {"cents": self.cents}

    def __setstate__(self, state: dict[str, int]) -> None:
        self.__init__(**state)  # type: ignore[misc]


class Bag:
    """A mapping that pickle writes pair by pair."""

    def __init__(self) -> None:
        self.pairs: dict[Any, Any] = {}

    def __setitem__(self, name: Any, value: Any) -> None:
        self.pairs[name] = value

    def __reduce__(self) -> Any:
        return Bag, (), None, None, iter(self.pairs.items())


def bag(**pairs: int) -> Bag:
    made = Bag()
    made.pairs.update(pairs)
    return made


class dtype:  # noqa: N801 - as numpy spells it
    """Reduced as numpy's are."""

    def __init__(self, code: str, align: bool = False, copy: bool = True) -> None:
        self.code = code

    def __reduce__(self) -> Any:
        return dtype, (self.code, False, True), (3, "<", None, None, None, -1, -1, 0)

    def __setstate__(self, state: object) -> None: ...


def scalar(kind: dtype, raw: bytes) -> int64:
    return int64(int.from_bytes(raw, "little"))


class int64:  # noqa: N801 - as numpy spells it
    """Reduced as numpy's are: what makes it, its dtype, its bytes."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> Any:
        return scalar, (dtype("i8"), self.number.to_bytes(8, "little"))


class Point(NamedTuple):
    x: int
    y: int


class Node:
    def __init__(self, name: str) -> None:
        self.name, self.others = name, []  # type: ignore[var-annotated]


def ring() -> Node:
    node = Node("a")
    node.others.append(node)
    return node


def woven(depth: int) -> Node:
    """Return objects that are reached on two to the power of ``depth`` ways."""
    node = Node("end")
    for number in range(depth):
        above = Node(str(number))
        above.others += [node, node]
        node = above
    return node


MORNING, EVENING = datetime(2024, 1, 1, 8, tzinfo=timezone.utc), datetime(2024, 1, 1, 20, tzinfo=timezone.utc)

#: name -> two values
PAIRS: dict[str, tuple[Any, Any]] = {
    "a dataclass": (Order("A", 1), Order("A", 2)),
    "a field that == leaves out": (Queued(1, "A"), Queued(1, "B")),
    "a dataclass with slots": (Slotted("A"), Slotted("B")),
    "a class derived from a dataclass": (Rush("A", 1), Rush("A", 2)),
    "a dataclass in a dataclass": (Order("A", Refund("B", 1)), Order("A", Refund("B", 2))),
    "a class of attrs": (Parcel("A", 1), Parcel("A", 2)),
    "a frozen class of attrs": (Letter("A", 1), Letter("A", 2)),
    "a model": (Cart(number="A"), Cart(number="B")),
    "a field that model_dump leaves out": (Cart(number="A", cents=1), Cart(number="A", cents=2)),
    "an extra field of a model": (Cart(number="A", note="x"), Cart(number="A", note="y")),
    "a field that model_dump hides": (Cart(number="A", secret="x"), Cart(number="A", secret="y")),
    "a model in a model": (
        Cart(number="A", lines=[Line(item="x")]),
        Cart(number="A", lines=[Line(item="y")]),
    ),
    "a model whose class has more than its field's": (
        Cart(number="A", lines=[DearLine(item="x", cents=1)]),
        Cart(number="A", lines=[DearLine(item="x", cents=2)]),
    ),
    "an enum": (Kind.CARD, Kind.CASH),
    "flags": (Rights.READ, Rights.WRITE),
    "flags together": (Rights.READ | Rights.WRITE, Rights(0)),
    "a path": (Path("/a/b"), Path("/a/c")),
    "a path of Windows": (PureWindowsPath("c:/a"), PureWindowsPath("c:/b")),
    "a complex number": (1 + 2j, 1 + 3j),
    "a fraction": (Fraction(1, 3), Fraction(1, 4)),
    "a range": (range(3), range(4)),
    "a slice": (slice(1, 3), slice(1, 4)),
    "a duration": (timedelta(1), timedelta(2)),
    "a time zone": (ZoneInfo("Europe/Berlin"), ZoneInfo("Europe/Paris")),
    "an offset": (timezone.utc, timezone(timedelta(hours=1))),
    "a compiled pattern": (re.compile("a"), re.compile("a", re.I)),
    "an address": (IPv4Address("10.0.0.1"), IPv4Address("10.0.0.2")),
    "a network": (IPv4Network("10.0.0.1/32"), IPv4Network("10.0.0.2/32")),
    "an array": (array.array("i", [1]), array.array("i", [2])),
    "a deque": (collections.deque([1, 2]), collections.deque([2, 1])),
    "a deque's length": (collections.deque([1], 2), collections.deque([1], 3)),
    "a decimal pickled with its currency": (amount("5", "EUR"), amount("5", "USD")),
    "text with an owner": (named("a", "x"), named("a", "y")),
    "a mapping with a tag": (tagged("x", a=1), tagged("y", a=1)),
    "a plain object": (Plain(cents=1), Plain(cents=2)),
    "slots": (WithSlots(1, a=1), WithSlots(2, a=1)),
    "attributes beside slots": (WithSlots(3, a=1), WithSlots(3, a=2)),
    "a row": (Row(1), Row(2)),
    "an object with a state of its own": (Told(1), Told(2)),
    "an object written in pairs": (bag(a=1, b=2), bag(a=1, b=3)),
    "a scalar as numpy's": (int64(1), int64(2)),
    "an exception": (ValueError("a"), ValueError("b")),
    "a function": (money, amount),
    "a class": (Order, Refund),
    "a builtin": (len, max),
    "a method of an object": (Parcel("A").__eq__, Parcel("B").__eq__),
    "a function with its first arguments": (functools.partial(money, "5"), functools.partial(money, "6")),
    "a getter": (operator.itemgetter(1), operator.itemgetter(2)),
    "the only one of its kind": (Ellipsis, NotImplemented),
    "a mapping with keys that are no text": ({(1, 2): 1}, {(1, 2): 2}),
    "a mapping with other keys that are no text": ({UUID(int=1): 1}, {UUID(int=2): 1}),
    "a set of sets": ({frozenset({"a", "b", "c", "d"})}, {frozenset({"a", "b", "c", "e"})}),
    "a set of dataclasses": (
        {Queued(1, "a"), Queued(2, "b"), Queued(3, "c")},
        {Queued(1, "a"), Queued(2, "b"), Queued(3, "d")},
    ),
    "an object with a set of text": (Plain(tags={"a", "b", "c", "d"}), Plain(tags={"a", "b", "c", "e"})),
    "a named tuple with a dataclass": (Point(1, Order("A")), Point(1, Order("B"))),  # type: ignore[arg-type]
    "a list with a dataclass": ([1, [Order("A")]], [1, [Order("B")]]),
    "a mapping with a dataclass": ({"a": {"b": Order("A")}}, {"a": {"b": Order("B")}}),
    "a dataclass with dates": (Order("A", [MORNING, date(2024, 1, 1)]), Order("A", [EVENING, date(2024, 1, 1)])),
    "an object reached on many ways": (woven(25), woven(24)),
}

#: What neither pickle nor a copy keeps: only a call within a process has it.
LOST: dict[str, tuple[Any, Any]] = {
    "a path with an owner": (upload("/a", "x"), upload("/a", "y")),
    "a duration with a reason": (delay(1, "x"), delay(1, "y")),
    "a class derived from one of attrs with slots": (Registered("A", "x"), Registered("A", "y")),
    "a class derived from a dataclass with slots": (Marked("A", "x"), Marked("A", "y")),
    "a decimal with a currency": (money("5", "EUR"), money("5", "USD")),
}


def fingerprints() -> list[str]:
    return [fingerprint({"order": value}) for pair in PAIRS.values() for value in pair]


def write() -> None:
    """Print every fingerprint; what pickle reads back must have the same."""
    for pair in PAIRS.values():
        for value in pair:
            assert fingerprint({"order": pickle.loads(pickle.dumps(value))}) == fingerprint({"order": value}), value
    sys.stdout.write("\n".join(fingerprints()))
