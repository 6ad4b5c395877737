"""What docs/guides/functions.md shows for brokers that no test has: its code runs on a stand-in for their client."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, NamedTuple

import pytest

from celery_idempotent import Conflict, StoreUnreachable, functions, idempotent
from tests.support.docs.pages import PYTHON, blocks
from tests.support.docs.stage import stage

PAGE = "docs/guides/functions.md"


def code(*texts: str, **changes: str) -> dict[str, Any]:
    """Run the blocks of the page that hold these texts, and return their names."""
    names = vars(stage()) | {"idempotent": idempotent}  # which the page's first block imports
    for block in blocks(PAGE):
        if block.language == PYTHON and any(text in block.text for text in texts):
            text = block.text
            for old, new in changes.items():
                text = text.replace(old.replace("_", ":"), new)
            exec(text, names)
    return names


class Place(NamedTuple):
    topic: str
    partition: int
    offset: int = -1001


class Ended(Exception):
    """The log is at its end, and so is the test."""


@dataclass
class Message:
    at: Place
    body: bytes

    def error(self) -> None:
        return None

    def topic(self) -> str:
        return self.at.topic

    def partition(self) -> int:
        return self.at.partition

    def offset(self) -> int:
        return self.at.offset

    def value(self) -> bytes:
        return self.body


@dataclass
class Consumer:
    """Polls the partitions that it is given, and keeps to the rules of Kafka's."""

    logs: dict[int, list[bytes]]
    positions: dict[int, int] = field(default_factory=dict)
    paused: set[int] = field(default_factory=set)
    committed: dict[int, int] = field(default_factory=dict)
    ends: int = 0

    def poll(self, timeout: float) -> Message | None:
        for number, log in self.logs.items():
            at = self.positions.get(number, 0)
            if number not in self.paused and at < len(log):
                self.positions[number] = at + 1
                return Message(Place("orders", number, at), log[at])
        if not self.paused:
            raise Ended
        return None

    def pause(self, places: list[Place]) -> None:
        self.paused |= {place.partition for place in places}

    def resume(self, places: list[Place]) -> None:
        self.paused -= {place.partition for place in places}

    def seek(self, place: Place) -> None:
        self.positions[place.partition] = place.offset

    def commit(self, message: Message) -> None:
        self.committed[message.partition()] = message.offset() + 1


@pytest.fixture(autouse=True)
def own_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functions, "_stores", {})


@pytest.fixture
def kafka(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("confluent_kafka")
    module.TopicPartition = Place  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "confluent_kafka", module)


@pytest.mark.usefixtures("kafka")
def test_a_partition_whose_message_is_being_handled_elsewhere_waits_and_loses_nothing() -> None:
    consume = code("def consume(")["consume"]
    consumer = Consumer({0: [b"a", b"b"], 1: [b"c"]})
    handled: list[bytes] = []
    busy = [b"a", b"a"]

    def handle(message: Message) -> None:
        if message.body in busy:
            busy.remove(message.body)
            error = Conflict("elsewhere")
            error.remaining = 0.01
            raise error
        handled.append(message.body)

    with pytest.raises(Ended):
        consume(consumer, handle)
    assert handled == [b"c", b"a", b"b"]
    assert consumer.committed == {0: 2, 1: 1}


def test_the_key_of_a_kafka_message_is_its_orders_or_its_place(redis_url: str) -> None:
    names = code("def charge_order(", "def index(", **{"redis_//localhost/1": redis_url})
    order, place = json.dumps({"id": "ORD-1", "cents": 999}).encode(), Place("orders", 0, 7)
    for at in (place, Place("orders", 1, 9)):
        names["handle"](Message(at, order))
    assert len(names["gateway"].calls) == 1
    for at in (place, place, Place("orders", 0, 8)):
        names["handle_document"](Message(at, order))
    assert len(names["database"].calls) == 2


@pytest.mark.parametrize("error", [Conflict("elsewhere"), StoreUnreachable("down")], ids=repr)
def test_a_lambda_has_come_again_what_is_not_done(error: Exception) -> None:
    names = code("def handler(", **{"dynamodb_//idempotency?region=eu-west-1": "memory://"})
    handler, charge = names["handler"], names["gateway"].charge
    records = [
        {"messageId": number, "body": json.dumps({"order_id": order, "cents": 1})}
        for number, order in (("a", "ORD-1"), ("b", "ORD-2"), ("c", "ORD-1"))
    ]
    assert handler({"Records": records}, None) == {"batchItemFailures": []}
    assert len(names["gateway"].calls) == 2

    def fails(order_id: str, cents: int) -> str:
        if order_id == "ORD-4":
            raise error
        return str(charge(order_id, cents))

    names["gateway"].charge = fails
    records = [
        {"messageId": order, "body": json.dumps({"order_id": order, "cents": 1})} for order in ("ORD-3", "ORD-4")
    ]
    assert handler({"Records": records}, None) == {"batchItemFailures": [{"itemIdentifier": "ORD-4"}]}
