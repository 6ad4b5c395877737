"""Monitors such as Flower are told what became of a task, by the worker's main process, and only where they listen."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, ClassVar

import celery
import pytest
from billiard.einfo import ExceptionInfo
from celery import Celery
from celery.exceptions import Ignore
from kombu.message import Message

from celery_idempotent import IdempotentTask
from celery_idempotent.celery import monitoring
from celery_idempotent.celery.request import IdempotentRequest
from celery_idempotent.events import Replayed, remove_hook
from celery_idempotent.stores import Reason, Release
from celery_idempotent.stores.redis import RedisStore
from tests.support.celery.fixtures import StartWorker
from tests.support.celery.gates import Gates
from tests.support.celery.journal import Journal
from tests.support.celery.monitor import Monitor
from tests.support.servers import RedisServer
from tests.support.stores.benches import age, take
from tests.support.waiting import wait_until

SHOP = "tests.support.celery.shop"
KEY = f"idem:{SHOP}.charge::ORD-1"
PREFORK = pytest.param("prefork", marks=pytest.mark.smoke)
#: Celery before 5.7 loses events that threads send while it sends others, its own as well as ours.
THREADS = ["threads"] if celery.VERSION >= (5, 7) else []
POOLS = [PREFORK, *THREADS, "solo", "gevent"]
#: What Celery itself tells of a run.
RUN = ["received", "started", "succeeded"]


@pytest.fixture
def app(client_app: Callable[..., Celery]) -> Celery:
    return client_app(SHOP)


@pytest.fixture
def monitor(app: Celery) -> Iterator[Monitor]:
    with Monitor(app) as monitor:
        yield monitor


@pytest.fixture
def store(store_url: str) -> Iterator[RedisStore]:
    store = RedisStore.from_url(store_url)
    yield store
    store.close()


@pytest.mark.parametrize("pool", POOLS)
def test_a_replay_is_told_right_before_the_task_succeeds_and_a_first_run_not_at_all(
    app: Celery, monitor: Monitor, start_worker: StartWorker, pool: str
) -> None:
    start_worker(SHOP, pool=pool, concurrency=1 if pool == "solo" else 2, extra_args=["-E"])
    first = app.module.charge.delay("ORD-1")
    first.get(timeout=20)
    second = app.module.charge.delay("ORD-1")
    second.get(timeout=20)
    for result in (first, second):
        monitor.wait_for(result.id, "succeeded")
    assert monitor.types(first.id) == RUN
    assert monitor.types(second.id) == ["received", "started", "replayed", "succeeded"]
    facts = monitor.facts(second.id, "replayed")
    assert (facts["outcome"], facts["key"], facts["original"]) == ("replayed", KEY, first.id)
    assert monitor.task(second.id).state == "SUCCESS"
    assert monitor.task(second.id).idempotency == facts


@pytest.mark.parametrize("pool", POOLS)
def test_deferred_is_the_state_of_a_duplicate_while_it_waits(
    app: Celery, monitor: Monitor, start_worker: StartWorker, gates: Gates, pool: str
) -> None:
    for _ in range(2 if pool == "solo" else 1):
        start_worker(SHOP, pool=pool, concurrency=1 if pool == "solo" else 2, extra_args=["-E"])
    gate = gates.close("before ORD-1")
    first = app.module.charge.delay("ORD-1")
    gate.reached()
    second = app.module.charge.delay("ORD-1")
    monitor.wait_for(second.id, "deferred")
    wait_until(lambda: monitor.types(second.id).count("received") > 1, 20, "the copy to come")
    assert monitor.task(second.id).state == "DEFERRED"
    assert monitor.task(second.id).idempotency["key"] == KEY
    gate.open()
    assert second.get(timeout=30) == first.get(timeout=30)
    monitor.wait_for(second.id, "succeeded", 30)
    assert monitor.types(second.id)[-2:] == ["replayed", "succeeded"]
    assert monitor.task(second.id).state == "SUCCESS"


@pytest.mark.parametrize("pool", [PREFORK, *THREADS])
def test_a_take_over_is_the_state_of_a_task_while_it_runs(
    app: Celery, monitor: Monitor, start_worker: StartWorker, gates: Gates, store: RedisStore, pool: str
) -> None:
    start_worker(SHOP, pool=pool, extra_args=["-E"])
    take(store, KEY)
    age(store, KEY, 61)  # its holder is taken for dead
    gate = gates.close("before ORD-1")
    result = app.module.charge.delay("ORD-1")
    gate.reached()
    monitor.wait_for(result.id, "taken-over")
    assert monitor.task(result.id).state == "TAKEN-OVER"
    assert monitor.facts(result.id, "taken-over")["crashes"] == 1
    gate.open()
    result.get(timeout=20)
    monitor.wait_for(result.id, "succeeded")
    assert monitor.task(result.id).state == "SUCCESS"


def test_a_deferred_task_that_has_to_run_itself_is_not_deferred_any_more(
    app: Celery, monitor: Monitor, start_worker: StartWorker, gates: Gates, store: RedisStore
) -> None:
    start_worker(SHOP, extra_args=["-E"])
    lease = take(store, KEY)
    gate = gates.close("before ORD-1")
    result = app.module.charge.delay("ORD-1")
    monitor.wait_for(result.id, "deferred")
    store.release(lease, Release(Reason.SHUTDOWN))
    gate.reached(timeout=30)
    monitor.wait_for(result.id, "resumed")
    assert monitor.task(result.id).state == "RESUMED"
    assert monitor.task(result.id).idempotency["copy"] >= 1
    gate.open()
    result.get(timeout=20)


def test_a_key_that_is_used_with_other_arguments_is_told_before_the_task_fails(
    app: Celery, monitor: Monitor, start_worker: StartWorker
) -> None:
    start_worker(SHOP, extra_args=["-E"])
    first = app.module.charge.delay("ORD-1", 1)
    first.get(timeout=20)
    second = app.module.charge.delay("ORD-1", 2)
    monitor.wait_for(second.id, "failed")
    assert monitor.types(second.id) == ["received", "started", "key-reused", "failed"]
    assert monitor.facts(second.id, "key-reused")["original"] == first.id


def test_a_lost_lease_is_told_and_then_what_the_task_was_answered_with(
    app: Celery, monitor: Monitor, start_worker: StartWorker, gates: Gates, store: RedisStore
) -> None:
    start_worker(SHOP, extra_args=["-E"])
    gate = gates.close("before ORD-1")
    result = app.module.charge.delay("ORD-1")
    gate.reached()
    age(store, KEY, 61)
    thief = take(store, KEY, task_id="thief")
    gate.open()
    monitor.wait_for(result.id, "deferred")
    told = [kind for kind in monitor.types(result.id) if kind != "received"]
    assert told[:3] == ["started", "lease-lost", "deferred"]
    store.release(thief, Release(Reason.SHUTDOWN))
    result.get(timeout=30)


@pytest.mark.nightly
def test_where_no_events_are_sent_none_of_ours_are_until_they_are_switched_on(
    app: Celery, monitor: Monitor, start_worker: StartWorker
) -> None:
    node = start_worker(SHOP, quick=False)
    for _ in range(2):
        app.module.charge.delay("ORD-1").get(timeout=20)
    asked = app.control.inspect([node.hostname()], timeout=2)
    wait_until(asked.ping, 30, "the worker to reply")
    app.control.enable_events()
    asked.ping()  # handled after that
    result = app.module.charge.delay("ORD-1")
    monitor.wait_for(result.id, "succeeded")
    assert monitor.types(result.id) == ["received", "started", "replayed", "succeeded"]
    assert {event["uuid"] for event in monitor.events if event["type"].startswith("task-")} == {result.id}


def test_a_task_that_wants_no_events_has_none_of_ours(app: Celery, monitor: Monitor, start_worker: StartWorker) -> None:
    start_worker(SHOP, extra_args=["-E"])
    for _ in range(2):
        app.module.quiet.delay("ORD-1").get(timeout=20)
    result = app.module.charge.delay("ORD-2")
    monitor.wait_for(result.id, "succeeded")
    assert {event["uuid"] for event in monitor.events if event["type"].startswith("task-")} == {result.id}


@pytest.mark.nightly
def test_a_broker_that_hangs_holds_no_body_up_and_fails_none(
    start_worker: StartWorker,
    client_app: Callable[..., Celery],
    journal: Journal,
    own_redis: Callable[..., RedisServer],
) -> None:
    broker, store = own_redis(), own_redis()
    urls = {"broker_url": broker.url(0), "store_url": store.url(0)}
    node = start_worker(SHOP, extra_args=["-E"], **urls)
    app = client_app(SHOP, BROKER_URL=urls["broker_url"])
    records = RedisStore.from_url(store.url(0))
    take(records, KEY)
    age(records, KEY, 61)
    records.close()
    os.kill(store.pid, signal.SIGSTOP)
    try:
        result = app.module.charge.delay("ORD-1")
        node.wait_for_log("StoreFailed", timeout=30)  # so the child has the message, and waits for the store
        os.kill(broker.pid, signal.SIGSTOP)
    finally:
        os.kill(store.pid, signal.SIGCONT)
    try:
        journal.wait_for_count(1, "charged", timeout=30)  # and a take-over was to be told before
    finally:
        os.kill(broker.pid, signal.SIGCONT)
    assert result.get(timeout=60)["order"] == "ORD-1"
    assert journal.count("charged") == 1


class TestThePipe:
    """In one process, which plays a child and its main process."""

    @pytest.fixture(autouse=True)
    def prepared(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        for name in ("_ends", "_main", "_consumer", "_consumes", "_unread"):
            monkeypatch.setattr(monitoring, name, getattr(monitoring, name))
        monitoring._ends, monitoring._main = None, 0
        monitoring.prepare()
        yield
        remove_hook(monitoring.send)
        assert monitoring._ends is not None
        for end in monitoring._ends:
            os.close(end)

    @pytest.fixture
    def sent(self) -> list[tuple[str, dict[str, Any]]]:
        """What the consumer's dispatcher is given."""
        sent: list[tuple[str, dict[str, Any]]] = []

        class Consumer:
            app = Celery("observed", set_as_current=False)
            task_buckets: ClassVar[dict[str, Any]] = {}  # of no rate limits

            class event_dispatcher:  # noqa: N801 - Celery's name
                @staticmethod
                def send(kind: str, **fields: Any) -> None:
                    if fields["uuid"] == "broken":
                        raise OSError("no broker")
                    sent.append((kind, fields))

        self.consumer = Consumer()
        monitoring.attach(self.consumer)
        return sent

    def as_child(self, *told: Replayed) -> None:
        main, monitoring._main = monitoring._main, -1  # another process's
        for event in told:
            monitoring.send(event)
        monitoring._main = main

    def test_what_a_child_tells_is_sent_in_its_order_once(self, sent: list[tuple[str, dict[str, Any]]]) -> None:
        self.as_child(*(Replayed("k", "t", f"id-{number}") for number in range(3)))
        assert sent == []
        monitoring.flush()
        monitoring.flush()
        assert [(kind, fields["uuid"], fields["name"]) for kind, fields in sent] == [
            ("task-replayed", f"id-{number}", "t") for number in range(3)
        ]

    def test_where_there_are_no_children_nothing_is_read(self, sent: list[tuple[str, dict[str, Any]]]) -> None:
        """A read that finds nothing stops a worker of eventlet for good."""
        ends, monitoring._ends, monitoring._main = monitoring._ends, None, 0
        try:
            remove_hook(monitoring.send)
            monitoring.prepare(children=False)
            assert monitoring.reader() is None
            monitoring.send(Replayed("k", "t", "id-1"))
            monitoring.flush()
        finally:
            monitoring._ends = ends
        assert [fields["uuid"] for _, fields in sent] == ["id-1"]

    def test_it_is_sent_before_the_last_event_of_the_task_and_before_a_message_is_acked_without_any(
        self, sent: list[tuple[str, dict[str, Any]]]
    ) -> None:
        app = self.consumer.app

        @app.task(base=IdempotentTask, shared=False, name="observed.charge")
        def charge() -> None: ...

        headers = {"task": charge.name, "id": "id-1"}
        body = ((), {}, {"callbacks": None, "errbacks": None, "chain": None, "chord": None})
        message = Message(body=body, headers=headers, content_type="application/json")
        eventer: Any = SimpleNamespace(enabled=True, send=self.consumer.event_dispatcher.send)
        acked: list[list[str]] = []
        request = IdempotentRequest(
            message, app=app, task=charge, decoded=True, headers=headers, body=body, eventer=eventer
        )
        request.acknowledge = lambda: acked.append([kind for kind, _ in sent])
        self.as_child(Replayed("k", charge.name, "id-1"))
        request.send_event("task-started")
        request.send_event("task-succeeded", result="paid")
        assert [kind for kind, _ in sent] == ["task-started", "task-replayed", "task-succeeded"]
        self.as_child(Replayed("k", charge.name, "id-1"))
        try:
            raise Ignore
        except Ignore:
            request.on_failure(ExceptionInfo(internal=True), return_ok=True)
        assert acked == [["task-started", "task-replayed", "task-succeeded", "task-replayed"]]

    def test_a_pipe_that_nobody_reads_holds_nobody_up(self, sent: list[tuple[str, dict[str, Any]]]) -> None:
        self.as_child(*(Replayed("k" * 400, "t", f"id-{number}") for number in range(1000)))
        monitoring.flush()
        numbers = [int(fields["uuid"].removeprefix("id-")) for _, fields in sent]
        assert 50 < len(numbers) < 1000
        assert numbers == list(range(len(numbers)))

    def test_long_texts_are_cut_and_what_is_longer_than_a_pipe_takes_at_once_is_left_out(
        self, sent: list[tuple[str, dict[str, Any]]]
    ) -> None:
        self.as_child(Replayed("k" * 5000, "t", "long"), Replayed("k", "t" * 5000, "too long"))
        monitoring.flush()
        ((_, fields),) = sent
        assert fields["idempotency"]["key"] == "k" * monitoring.LONGEST_TEXT

    def test_an_event_that_cannot_be_sent_is_logged_and_hurts_no_task(
        self, sent: list[tuple[str, dict[str, Any]]], caplog: pytest.LogCaptureFixture
    ) -> None:
        self.as_child(Replayed("k", "t", "broken"), Replayed("k", "t", "next"))
        monitoring.flush()
        assert "could not be sent to monitors" in caplog.text
        assert [fields["uuid"] for _, fields in sent] == ["next"]

    def test_a_signal_whose_handler_sends_events_may_come_while_they_are_sent(
        self, sent: list[tuple[str, dict[str, Any]]]
    ) -> None:
        """As a cold shutdown does in the main thread, wherever that is: to wait there would be to wait for ever."""
        dispatcher = self.consumer.event_dispatcher
        send = dispatcher.send

        def interrupted(kind: str, **fields: Any) -> None:
            signal.raise_signal(signal.SIGUSR1)
            send(kind, **fields)

        dispatcher.send = staticmethod(interrupted)
        before = signal.signal(signal.SIGUSR1, lambda *_: monitoring.flush())
        try:
            self.as_child(*(Replayed("k", "t", f"id-{number}") for number in range(3)))
            monitoring.flush()
        finally:
            signal.signal(signal.SIGUSR1, before)
        assert [fields["uuid"] for _, fields in sent] == ["id-0", "id-1", "id-2"]

    def test_without_a_consumer_nothing_is_sent_and_nothing_raised(self) -> None:
        monitoring.send(Replayed("k", "t", "i"))
        self.as_child(Replayed("k", "t", "i"))
        monitoring.flush()
