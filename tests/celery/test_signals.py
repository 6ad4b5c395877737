"""The library's events as Celery signals."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from celery import Celery

from celery_idempotent import IdempotentTask, events
from celery_idempotent.celery import signals
from celery_idempotent.events import KINDS, Event, emit, receivers
from tests.support.celery.fixtures import StartWorker
from tests.support.celery.gates import Gates
from tests.support.celery.journal import Journal
from tests.support.waiting import wait_until

SHOP = "tests.support.celery.signalled"
SIGNALS = {name: getattr(signals, name) for name in signals.__all__ if name.islower()}


@pytest.fixture
def app() -> Iterator[Celery]:
    app = Celery("signals", broker="memory://", backend="cache+memory://")
    app.conf.idempotency_store = "memory://"
    yield app
    app.close()


def test_every_kind_of_event_has_its_signal() -> None:
    kinds = {getattr(events, name) for name in events.__all__} - {Event}
    assert {signal.kind for signal in SIGNALS.values()} == kinds == set(KINDS)
    assert {name: signal.name for name, signal in SIGNALS.items()} == {name: name for name in SIGNALS}
    assert len({kind.name for kind in KINDS}) == len(KINDS)


def test_a_receiver_is_sent_the_event_with_its_task_as_the_sender(app: Celery) -> None:
    heard: list[dict[str, Any]] = []

    @app.task(base=IdempotentTask, idempotency={"key": "order_id"})
    def charge(order_id: str) -> str:
        return order_id

    def receive(**kwargs: Any) -> None:
        heard.append(kwargs)

    signals.task_replayed.connect(receive, sender=charge)
    try:
        first, second = (charge.apply(("ORD-1",)) for _ in range(2))
    finally:
        signals.task_replayed.disconnect(receive, sender=charge)
    (sent,) = heard
    assert sent["sender"] is app.tasks[charge.name]
    assert isinstance(sent["event"], events.Replayed)
    assert (sent["event"].original, sent["task_id"]) == (first.id, second.id)
    assert sent["key"] == sent["event"].key
    charge.apply(("ORD-1",))
    assert len(heard) == 1


def test_the_sender_is_the_task_of_the_app_that_publishes_or_runs_it_in_every_thread(
    broker_url: str, store_url: str
) -> None:
    """As of a web server: the current app of its threads is none of these, and that of this thread is the last one."""
    heard: list[Any] = []

    def receive(sender: Any, **_: Any) -> None:
        heard.append(sender)

    def charge(order_id: str) -> str:
        return order_id

    apps = [Celery(name, broker=broker_url, backend="cache+memory://") for name in ("one", "other")]
    signals.task_publish_skipped.connect(receive)
    signals.task_acquired.connect(receive)
    try:
        for app in apps:
            app.conf.idempotency_store = store_url
            task = app.task(base=IdempotentTask, name="charge", unique="order_id")(charge)

            def call(order_id: str, task: Any = task) -> None:
                task.delay(order_id)
                task.delay(order_id)
                task.apply((order_id,))

            with ThreadPoolExecutor(1) as thread:
                thread.submit(call, f"threaded {app.main}").result(timeout=20)
        call("here other")
    finally:
        signals.task_publish_skipped.disconnect(receive)
        signals.task_acquired.disconnect(receive)
        for app in apps:
            app.close()
    assert [sender and (sender.app, sender.name) for sender in heard] == [
        (app, "charge") for app in (*apps, apps[1]) for _ in range(2)
    ]


def test_receivers_of_one_task_do_not_hear_of_another(app: Celery) -> None:
    heard: list[str] = []

    @app.task(base=IdempotentTask)
    def wanted() -> None: ...

    @app.task(base=IdempotentTask)
    def other() -> None: ...

    def receive(sender: Any, **_: Any) -> None:
        heard.append(sender.name)

    signals.task_completed.connect(receive, sender=wanted)
    try:
        wanted.apply()
        other.apply()
    finally:
        signals.task_completed.disconnect(receive, sender=wanted)
    assert heard == [wanted.name]


def test_an_event_is_made_only_while_its_signal_has_receivers(monkeypatch: pytest.MonkeyPatch) -> None:
    # The log hears it too, at the level that a test before this one may have set.
    monkeypatch.setattr(events, "_hooks", [each for each in events._hooks if each[0] is signals._send])
    assert len(events._hooks) == 1

    def receive(**_: Any) -> None: ...

    def other(**_: Any) -> None: ...

    assert not receivers(events.Acquired)
    signals.task_acquired.connect(receive)
    signals.task_acquired.connect(other)
    assert receivers(events.Acquired)
    assert not receivers(events.Completed)
    assert signals.task_acquired.disconnect(receive)
    assert receivers(events.Acquired)
    signals.task_acquired.disconnect(other)
    assert not receivers(events.Acquired)


def test_a_store_has_no_task_so_the_sender_is_none() -> None:
    heard: list[tuple[Any, Event]] = []

    def receive(sender: Any, event: Event, **_: Any) -> None:
        heard.append((sender, event))

    signals.store_failed.connect(receive)
    try:
        emit(events.StoreFailed("", error="away", store="RedisStore"))
    finally:
        signals.store_failed.disconnect(receive)
    assert heard == [(None, events.StoreFailed("", error="away", store="RedisStore"))]


def test_a_receiver_that_raises_is_logged_and_hurts_nobody(app: Celery, caplog: pytest.LogCaptureFixture) -> None:
    @app.task(base=IdempotentTask)
    def charge() -> str:
        return "charged"

    def receive(**_: Any) -> None:
        raise RuntimeError("no such table")

    signals.task_completed.connect(receive)
    try:
        assert charge.apply().get() == "charged"
    finally:
        signals.task_completed.disconnect(receive)
    assert "no such table" in caplog.text


@pytest.mark.parametrize("pool", [pytest.param("prefork", marks=pytest.mark.smoke), "threads", "solo"])
def test_receivers_hear_of_what_happens_in_a_workers_processes(
    client_app: Callable[..., Celery], start_worker: StartWorker, journal: Journal, gates: Gates, pool: str
) -> None:
    node = start_worker(SHOP, pool=pool, concurrency=1)
    charge = client_app("tests.support.celery.shop").module.charge
    first, second = (charge.delay("ORD-1") for _ in range(2))
    assert first.get(timeout=20) == second.get(timeout=20)
    noted = [entry for entry in journal.entries() if entry.event.startswith("task_")]
    assert [(entry.event, entry.fields["kind"]) for entry in noted] == [
        ("task_acquired", "Acquired"),
        ("task_completed", "Completed"),
        ("task_replayed", "Replayed"),
    ]
    assert {entry.fields["sender"] for entry in noted} == {charge.name}
    assert [entry.fields["task_id"] for entry in noted] == [first.id, first.id, second.id]
    wait_until(lambda: "a receiver that raises" in node.logs(), message="the receiver's error to be logged")


@pytest.mark.nightly
def test_the_main_process_tells_of_what_a_killed_child_gave_back(
    client_app: Callable[..., Celery], start_worker: StartWorker, journal: Journal, gates: Gates
) -> None:
    node = start_worker(SHOP, concurrency=1)
    gate = gates.close("before ORD-1")
    result = client_app("tests.support.celery.shop").module.charge.delay("ORD-1")
    (child,) = gate.reached()
    node.kill_child(child)
    (entry,) = [entry for entry in journal.wait_for_count(1, "task_released") if entry.event == "task_released"]
    assert entry.pid == node.pid
    gate.open()
    result.get(timeout=30)
