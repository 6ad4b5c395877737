"""What docs/guides/other-queues.md shows: a conflict brings the message back, and an occurrence has one key."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from celery_idempotent import Conflict, idempotent
from tests.support.docs.pages import PYTHON, blocks
from tests.support.docs.stage import stage

PAGE = "docs/guides/other-queues.md"


def code(text: str, redis_url: str) -> dict[str, Any]:
    """Run the block of the page that holds a text, and return its names."""
    names = vars(stage()) | {"idempotent": idempotent}  # which the page's first block imports
    [block] = [block for block in blocks(PAGE) if block.language == PYTHON and text in block.text]
    exec(block.text.replace("redis://localhost/1", redis_url), names)
    return names


class Channel:
    """A channel of pika's, which writes down what is done with it."""

    def __init__(self) -> None:
        self.done: list[Any] = []

    def basic_publish(self, exchange: str, routing_key: str, body: bytes, properties: Any) -> None:
        self.done.append((exchange, routing_key, body, int(properties.expiration)))

    def basic_ack(self, delivery_tag: int) -> None:
        self.done.append(delivery_tag)


@pytest.mark.parametrize(("remaining", "waits"), [(60.0, 5100), (0.0, 100)])
def test_a_message_of_rabbitmq_that_meets_a_running_call_is_published_to_the_queue_that_delays(
    redis_url: str, remaining: float, waits: int
) -> None:
    names, channel, body = (
        code("def on_message(", redis_url),
        Channel(),
        json.dumps({"order_id": "1", "cents": 2}).encode(),
    )
    charge = names["charge_order"]

    def busy(**_: object) -> None:
        error = Conflict("another call runs it")
        error.remaining = remaining
        raise error

    for called in (busy, charge, charge):
        names["charge_order"] = called
        names["on_message"](channel, SimpleNamespace(delivery_tag=7), SimpleNamespace(), body)
    assert channel.done == [("", "orders.later", body, waits), 7, 7, 7]
    assert len(names["gateway"].calls) == 1


def test_a_message_of_rabbitmq_whose_work_fails_is_not_acknowledged(redis_url: str) -> None:
    names, channel = code("def on_message(", redis_url), Channel()
    names["charge_order"] = lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        names["on_message"](channel, SimpleNamespace(delivery_tag=7), SimpleNamespace(), b"{}")
    assert not channel.done


def test_an_actor_of_dramatiq_whose_operation_runs_elsewhere_runs_once_that_has_ended(redis_url: str) -> None:
    dramatiq = pytest.importorskip("dramatiq")
    from dramatiq.brokers.stub import StubBroker

    again = code("def again(", redis_url)["again"]
    broker = StubBroker()
    broker.emit_after("process_boot")
    tries: list[str] = []

    @dramatiq.actor(broker=broker, retry_when=again, min_backoff=1, max_backoff=1)
    def charge(order_id: str) -> None:
        tries.append(order_id)
        if order_id == "fails" or len(tries) < 9:
            raise ZeroDivisionError if order_id == "fails" else Conflict("another call runs it")

    worker = dramatiq.Worker(broker, worker_timeout=10)
    worker.start()
    try:
        for order_id, expected in (("ORD-1", 9), ("fails", 6)):
            tries.clear()
            charge.send(order_id)
            broker.join(charge.queue_name, timeout=30_000, fail_fast=False)
            worker.join()
            assert len(tries) == expected
    finally:
        worker.stop()
        broker.close()


def test_schedulers_whose_timers_ring_a_little_early_and_late_name_the_same_occurrence(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = code("def occurrence(", redis_url)
    for now in (7200 - 0.003, 7200.0, 7201.5, 10800 - 0.003):
        monkeypatch.setattr(names["time"], "time", lambda now=now: now)
        names["report"]()
    assert len(names["database"].calls) == 2
