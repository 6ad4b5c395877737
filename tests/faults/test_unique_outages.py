"""Unique publishing while the store is away, restarted or slow: every call is published, and no change is missed."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from celery import Celery

from celery_idempotent import events
from celery_idempotent.celery import unique
from celery_idempotent.celery.unique import Reservation
from celery_idempotent.core import binding, reservations
from celery_idempotent.core.binding import confirmations
from celery_idempotent.core.reservations import Token
from celery_idempotent.errors import StoreError
from celery_idempotent.events import Event, PublishRepeated, PublishSkipped
from celery_idempotent.stores.records import Lease, State, new_owner
from celery_idempotent.stores.redis import RedisStore
from tests.support.celery.apps import messages
from tests.support.celery.fixtures import StartWorker
from tests.support.celery.gates import Gates
from tests.support.celery.journal import Journal
from tests.support.proxy import Proxy
from tests.support.waiting import wait_until

UNIQUE = "tests.support.celery.unique_app"


@pytest.fixture
def app(client_app: Callable[..., Celery], way_through: str) -> Celery:
    return client_app(UNIQUE, STORE_URL=way_through)


@pytest.fixture
def heard() -> Iterator[list[Event]]:
    seen: list[Event] = []
    events.add_hook(seen.append, {PublishSkipped, PublishRepeated})
    yield seen
    events.remove_hook(seen.append)


def test_while_the_store_is_away_every_call_is_published_and_soon(
    app: Celery, proxy: Proxy, broker_url: str, heard: list[Event]
) -> None:
    index = app.module.index
    index.delay(6)
    proxy.refuse()
    proxy.reset()
    took = []
    for _ in range(20):
        began = time.monotonic()
        index.delay(7)
        took.append(time.monotonic() - began)
    assert messages(broker_url) == 21
    assert {event.reason for event in heard} == {"store"}  # type: ignore[attr-defined]
    assert max(took) < 2.0
    assert sorted(took)[10] < 0.2  # the breaker spares the store
    proxy.heal()
    wait_until(lambda: not binding.breaker._failing or index.delay(8))
    wait_until(lambda: index.delay(8).id == index.delay(8).id)


def test_a_store_that_hangs_holds_up_a_call_for_half_a_second(app: Celery, proxy: Proxy, broker_url: str) -> None:
    index = app.module.index
    index.delay(6)
    proxy.partition()
    gc.collect()
    gc.disable()  # a collection of all that the test process has takes 0.2 s of a processor, and 1.6 s beside others
    began = time.monotonic()
    index.delay(7)
    took = time.monotonic() - began
    gc.enable()
    assert took < 1.5  # 0.5 s, and what the machine takes
    assert messages(broker_url) == 2
    proxy.heal()


def test_a_reply_that_was_lost_leaves_nothing_for_which_a_later_call_is_skipped_for_ever(
    app: Celery, proxy: Proxy, start_worker: StartWorker, journal: Journal
) -> None:
    """The store has granted the slot; the publisher does not know; its message gives it back all the same."""
    index = app.module.index
    index.delay(6)
    proxy.swallow_each(1, matching=b"~unique")
    first = index.delay(7)
    proxy.heal()
    start_worker(UNIQUE, concurrency=1)
    assert first.get(timeout=20) == 7
    store = RedisStore.from_url(app.conf.idempotency_store)
    assert not [record for record in store.scan(prefix="idem:~unique:") if record.remaining]


def test_a_store_that_is_wiped_between_the_reservation_and_its_confirmation_has_none(
    app: Celery, start_worker: StartWorker, store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = RedisStore.from_url(store_url)
    index = app.module.index
    send = app.amqp.send_task_message

    def wiping(*args: Any, **options: Any) -> Any:
        sent = send(*args, **options)
        for record in list(store.scan(prefix="idem:~unique:")):
            store.delete(record.key)
        return sent

    with monkeypatch.context() as patched:
        patched.setattr(app.amqp, "send_task_message", wiping)
        first = index.delay(7)
        confirmations.close()
    assert list(store.scan(prefix="idem:~unique:")) == []
    assert index.delay(7).id != first.id


def test_a_message_that_cannot_be_confirmed_is_published_and_stands_for_none(
    app: Celery, proxy: Proxy, monkeypatch: pytest.MonkeyPatch, heard: list[Event]
) -> None:
    """The store goes away while the broker takes the message."""
    newest = app.module.newest
    newest.delay(6, 0)
    send = app.amqp.send_task_message

    def refusing(*args: Any, **options: Any) -> Any:
        proxy.refuse()
        proxy.reset()
        return send(*args, **options)

    with monkeypatch.context() as patched:
        patched.setattr(app.amqp, "send_task_message", refusing)
        newest.delay(7, 0)
    proxy.heal()
    wait_until(lambda: not binding.breaker._failing or newest.delay(8))
    store = RedisStore.from_url(app.conf.idempotency_store)
    [record] = store.scan(prefix="idem:~unique:tests.support.celery.unique_app.newest::~7")
    assert not reservations.is_confirmed(record)


class TestBegin:
    """What a worker does that cannot note the start of a body."""

    @pytest.fixture
    def reservation(self, proxy: Proxy, way_through: str) -> Reservation:
        store = RedisStore.from_url(way_through)
        token = Token("idem:~unique:shop.index::~7", new_owner(), hold=60.0)
        lease = store.acquire(token.claim(60.0, note="7"))
        assert isinstance(lease, Lease)
        proxy.refuse()
        proxy.reset()
        return Reservation(Token(token.slot, token.owner, lease.fence, hold=60.0), store)

    def test_it_fails_or_waits_or_runs_as_the_policy_has_it(self, reservation: Reservation) -> None:
        for on_store_error in ("raise", "wait"):
            with pytest.raises(StoreError):
                reservation.begin(on_store_error, 0.2, lambda: False)
        assert isinstance(reservation.begin("run", 0.0, lambda: False), StoreError)
        assert not reservation.over

    def test_a_message_of_which_the_store_cannot_say_that_it_was_replaced_runs(self, reservation: Reservation) -> None:
        newest = Reservation(replace(reservation.token, newest=True), reservation.store)
        assert newest.replaced_by() is None

    def test_one_that_was_given_back_is_not_asked_for_again(self, reservation: Reservation, proxy: Proxy) -> None:
        proxy.heal()
        reservation.end()
        proxy.refuse()
        proxy.reset()
        reservation.defer(60.0)
        reservation.end()
        proxy.heal()
        record = reservation.store.get(reservation.token.slot)
        assert record is not None
        assert record.state is State.RELEASED

    def test_once_the_store_answers_one_more_message_is_published(self, reservation: Reservation, proxy: Proxy) -> None:
        published = threading.Event()
        reservation.begin_later(lambda token: published.set())
        assert not published.wait(0.5)
        proxy.heal()
        assert published.wait(30)
        assert reservation.over

    def test_one_that_ended_by_itself_meanwhile_is_no_longer_waited_for(self, reservation: Reservation) -> None:
        before = set(threading.enumerate())
        published = threading.Event()
        Reservation(replace(reservation.token, hold=0.3), reservation.store).begin_later(lambda token: published.set())
        wait_until(lambda: not set(threading.enumerate()) - before, 30)
        assert not published.is_set()


@pytest.mark.parametrize("on_store_error", ["wait", "run"])
def test_a_body_whose_start_the_store_cannot_note_misses_no_change(
    client_app: Callable[..., Celery],
    start_worker: StartWorker,
    proxy: Proxy,
    way_through: str,
    store_url: str,
    journal: Journal,
    gates: Gates,
    on_store_error: str,
) -> None:
    """Either it does not begin, or one more message follows it."""
    env = {"ON_STORE_ERROR": on_store_error}
    gate = gates["in 9"].close()
    start_worker(UNIQUE, concurrency=1, store_url=way_through, env=env)
    app = client_app(UNIQUE, STORE_URL=store_url)
    blocking = app.module.other.delay(9)
    gate.reached()
    first = app.module.emptied.delay(7, ["a"])
    proxy.refuse()
    proxy.reset()
    gate.open()
    if on_store_error == "run":
        journal.wait_for_count(1, "end", 7, timeout=40)
        skipped = app.module.emptied.delay(7, ["a"])  # the reservation stands, though its body has run
        assert skipped.id == first.id or first.state == "SUCCESS"
    proxy.heal()
    assert blocking.get(timeout=30) == 9
    assert first.get(timeout=30) == 7
    if on_store_error == "run":
        runs = 2 if skipped.id == first.id else 3
        journal.wait_for_count(runs, "end", 7, timeout=30)
        begun = [entry.fields["parts"] for entry in journal.entries("begin", 7)]
        # A message that was published beside the first may begin before the store is back, and is followed by one, too.
        assert begun == runs * [["a"]] or (skipped.id != first.id and begun == 4 * [["a"]])
    else:
        assert journal.count("begin", 7) == 1
    wait_until(lambda: app.module.emptied.apply_async((7, ["a"]), countdown=600).id != first.id)


@pytest.mark.nightly
def test_a_child_that_ends_before_the_store_answers_leaves_the_reservation_to_a_message(
    client_app: Callable[..., Celery],
    start_worker: StartWorker,
    proxy: Proxy,
    way_through: str,
    store_url: str,
    broker_url: str,
    journal: Journal,
    gates: Gates,
) -> None:
    """Else calls would be skipped for its body, which has run, until the reservation ends by itself."""
    gate = gates["in 9"].close()
    node = start_worker(UNIQUE, concurrency=1, store_url=way_through, env={"ON_STORE_ERROR": "run"})
    app = client_app(UNIQUE, STORE_URL=store_url)
    app.module.other.delay(9)
    gate.reached()
    first = app.module.index.apply_async((7,), ignore_result=True)
    proxy.refuse()
    proxy.reset()
    gate.open()
    journal.wait_for_count(1, "end", 7, timeout=40)
    node.stop()
    assert app.module.index.apply_async((7,), ignore_result=True).id == first.id
    assert messages(broker_url) == 1
    proxy.heal()
    start_worker(UNIQUE, concurrency=1)
    journal.wait_for_count(2, "end", 7, timeout=30)
    assert app.module.index.apply_async((7,), countdown=600, ignore_result=True).id != first.id


def test_the_message_that_follows_has_the_key_of_the_operation(
    app: Celery, start_worker: StartWorker, journal: Journal
) -> None:
    """Calls that were skipped had it too: what is done is not done again for them."""
    node = start_worker("tests.support.faults.late_release", concurrency=1, env={"ON_STORE_ERROR": "run"})
    first = app.module.index.apply_async((7,), idempotency_key="order-7")
    assert first.get(timeout=20) == 7
    node.wait_for_log("Replayed key=idem:tests.support.celery.unique_app.index::order-7", timeout=20)
    assert journal.count("begin", 7) == 1


def test_a_result_backend_that_is_slow_has_no_store_taken_for_one_that_is_down(
    client_app: Callable[..., Celery], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a publisher asks beside the store takes of its time, and is no failure of the store's."""
    (tmp_path / "results").mkdir()
    app = client_app(UNIQUE, STORE_URL=f"sqlite:///{tmp_path}/store.db", RESULT_URL=f"file://{tmp_path}/results")
    index = app.module.index
    first = index.delay(7)
    confirmations.close()
    backend = type(index.backend)
    look = backend.get_task_meta

    def slow(*args: Any, **options: Any) -> Any:
        time.sleep(1.2 * reservations.BUDGET)
        return look(*args, **options)

    monkeypatch.setattr(backend, "get_task_meta", slow)  # each thread has one
    assert index.delay(7).id != first.id
    assert index._binding.guard.store not in binding.breaker._failing


def test_a_killed_body_is_run_again_and_misses_no_change(
    app: Celery, start_worker: StartWorker, journal: Journal, gates: Gates, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unique, "BUDGET", 10.0)  # a server on a busy machine may answer late
    gate = gates["in 7"].close()
    node = start_worker(UNIQUE, concurrency=1, visibility_timeout=3)
    first = app.module.index.delay(7)
    (pid,) = gate.reached()
    second = app.module.index.delay(7)
    assert second.id != first.id
    node.kill_child(pid)
    gate.open()
    assert [first.get(timeout=30), second.get(timeout=30)] == [7, 7]


@pytest.mark.nightly
def test_until_it_is_done_a_killed_body_keeps_what_it_has(
    app: Celery, start_worker: StartWorker, journal: Journal, gates: Gates
) -> None:
    gate = gates["in 7"].close()
    node = start_worker(UNIQUE, concurrency=1, visibility_timeout=3)
    first = app.module.rebuild.delay(7)
    (pid,) = gate.reached()
    node.kill_child(pid)
    assert app.module.rebuild.delay(7).id == first.id
    gate.open()
    assert first.get(timeout=30) == 7
    assert app.module.rebuild.delay(7).get(timeout=30) == 7
