"""Brokers for tests and for small things, and what is sent to those that no test can have."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from celery.app.task import Context
from celery.contrib.testing.worker import start_worker as start_thread
from kombu import Connection, Exchange, Queue

from celery_idempotent import IdempotentTask, add_hook, remove_hook
from celery_idempotent.celery import message as brokers
from celery_idempotent.celery.message import DELIVERY_ENTRY, META_HEADER, MOST, MessageHeaders
from celery_idempotent.events import Deferred
from tests.support.celery.fixtures import StartWorker
from tests.support.celery.gates import Gates
from tests.support.celery.journal import Journal
from tests.support.waiting import wait_until

FOLDER = "tests.support.celery.folder"


@pytest.fixture
def broker_url() -> str:
    return "filesystem://"


@pytest.fixture
def folder(tmp_path: Path, worker_env: dict[str, str]) -> Path:
    folder = tmp_path / "broker"
    (folder / "messages").mkdir(parents=True)
    worker_env["FOLDER"] = str(folder)
    return folder


@pytest.mark.nightly
def test_a_folder_as_the_broker_defers_duplicates(
    client_app: Callable[..., Celery], start_worker: StartWorker, folder: Path, journal: Journal, gates: Gates
) -> None:
    gate = gates.close("before ORD-1")
    app = client_app(FOLDER)
    node = start_worker(FOLDER)
    first = app.module.charge.delay("ORD-1")
    gate.reached(timeout=30)
    second = app.module.charge.delay("ORD-1")
    node.wait_for_log("copy=2", timeout=30)
    gate.open()
    assert [result.get(timeout=30) for result in (first, second)] == ["charged ORD-1"] * 2
    deliveries = 2 + node.logs().count("Deferred")
    journal.wait_for_count(deliveries, "acked")
    node.stop()
    # A message is a file as long as it waits, and goes back to be one when a worker ends that has not acked it.
    assert [path.name for path in (folder / "messages").glob("*.celery.msg")] == []
    assert (journal.count("started"), journal.count("charged")) == (1, 1)


@pytest.mark.nightly
def test_the_broker_in_memory_defers_duplicates(inside: Celery) -> None:
    runs: list[str] = []
    begun, go_on, deferred = threading.Event(), threading.Event(), threading.Event()

    @inside.task(base=IdempotentTask, shared=False, idempotency={"key": "order_id"})
    def charge(order_id: str) -> str:
        runs.append(order_id)
        begun.set()
        assert go_on.wait(30)
        return f"charged {order_id}"

    deferred = threading.Event()

    def listen(event: Any) -> None:
        if isinstance(event, Deferred):
            deferred.set()

    add_hook(listen)
    try:
        with start_thread(inside, pool="threads", concurrency=2, perform_ping_check=False):
            first = charge.delay("ORD-1")
            assert begun.wait(30)
            second = charge.delay("ORD-1")
            assert deferred.wait(30)
            go_on.set()
            assert [result.get(timeout=30) for result in (first, second)] == ["charged ORD-1"] * 2
    finally:
        go_on.set()
        remove_hook(listen)
    assert runs == ["ORD-1"]


def test_a_copy_stays_in_its_message_group_and_is_neither_a_duplicate_to_sqs_nor_delayed_by_it(inside: Celery) -> None:
    """Within five minutes a FIFO queue drops what has the MessageDeduplicationId of an earlier message."""

    @inside.task(base=IdempotentTask, shared=False)
    def charge(order_id: str) -> None: ...

    properties = {"MessageGroupId": "customer-7", "MessageDeduplicationId": "ORD-1"}
    delays = {"DelaySeconds": 300, "delay_seconds": 300}  # the latter is kombu's own, since 5.7
    charge.apply_async(("ORD-1",), **properties, **delays)
    with inside.connection_for_read() as connection:
        published = received(connection)
        assert {name: published.properties[name] for name in properties} == properties
        request = Context(
            {
                **published.headers,
                "args": published.payload[0],
                "kwargs": published.payload[1],
                "properties": published.properties,
                "delivery_info": published.delivery_info,
            }
        )
        brokers.publish_copy(charge, request, MessageHeaders("owner"), 1.0)
        copy = received(connection)
    assert copy.headers["id"] == published.headers["id"]
    assert copy.properties["MessageGroupId"] == "customer-7"
    assert not {"MessageDeduplicationId", *delays} & copy.properties.keys()


def received(connection: Connection) -> Any:
    """Return the next message, acked."""
    with connection.SimpleQueue("celery") as queue:
        message = wait_until(lambda: queue.get(timeout=10), message="a message")
        message.ack()
        return message


def test_a_consumer_of_a_fanout_exchange_is_known_by_its_queue_or_on_redis_by_its_worker() -> None:
    found = {}
    for broker in ("memory://", "redis://localhost"):
        app = Celery("fanned", broker=broker, set_as_current=False)
        everybody, audit = Exchange("everybody", type="fanout"), Exchange("audit", type="fanout")
        app.conf.task_queues = [
            Queue("mine", everybody),
            Queue("one", audit),
            Queue("another", audit),
            Queue("orders", Exchange("orders", type="direct")),
        ]
        exchanges = ("everybody", "audit", "orders", "", None, "unknown")
        found[broker] = [brokers.place_of(app, name, "celery@host") for name in exchanges]
    assert found["memory://"] == ["mine", "another,one", "", "", "", ""]
    assert found["redis://localhost"] == ["celery@host", "celery@host", "", "", "", ""]


def test_what_goes_on_with_a_fanned_out_delivery_says_with_whose_unless_that_is_not_known() -> None:
    mine = MessageHeaders("owner", place="mine")
    assert mine.headers()[META_HEADER]["place"] == "mine"
    assert "place" not in MessageHeaders("owner", place="another,one").headers()[META_HEADER]
    assert "place" not in MessageHeaders("owner").headers()[META_HEADER]
    others = [("mine", "mine", False), ("mine", "yours", True), ("another,one", "yours", False), ("mine", "", False)]
    assert [MessageHeaders("owner", place=at, meant_for=to).is_anothers for at, to, _ in others] == [
        it for _, _, it in others
    ]


def test_what_is_retried_into_the_queue_of_one_worker_keeps_the_key_of_its_delivery() -> None:
    sent = Context({"id": "T1", "headers": {}, META_HEADER: {"place": "mine"}})
    identity = MessageHeaders.take(sent)
    assert (identity.place, identity.is_anothers) == ("mine", False)


@pytest.mark.parametrize("number", [True, -1, 10**30, 1.5, "3", [1]], ids=repr)
def test_a_count_that_this_library_has_not_written_is_a_number_that_every_store_can_keep(number: object) -> None:
    context = Context({"headers": {META_HEADER: {"copy": number, "nesting": number}}})
    identity = MessageHeaders.take(context)
    assert {type(identity.copy), type(identity.nesting)} == {int}  # PostgreSQL has no function that takes True
    assert 0 <= identity.copy == identity.nesting <= MOST


def test_the_owner_is_the_one_that_the_workers_main_process_gave_whatever_the_message_has() -> None:
    forged = {DELIVERY_ENTRY: {"owner": "forged"}, META_HEADER: {"copy": 1}}
    sent = Context({"id": "T1", "headers": forged, DELIVERY_ENTRY: {"owner": "given"}})
    identity = MessageHeaders.take(sent)
    assert (identity.owner, identity.copy, sent.headers) == ("given", 1, None)
