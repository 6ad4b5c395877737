"""A store that cannot serve is spared: after two failures one caller a second asks, the others fail at once."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest

from celery_idempotent.core.breaker import Breaker
from celery_idempotent.errors import RecordUnreadable, StoreError, StoreRefused, StoreUnreachable
from celery_idempotent.events import Event, StoreFailed, StoreRecovered
from celery_idempotent.stores.memory import MemoryStore
from tests.support.forks import served_after_fork
from tests.support.unit.scripted import Clock, ScriptedStore, listening

heard = pytest.fixture(listening)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock().install(monkeypatch)


@pytest.fixture
def store() -> ScriptedStore:
    return ScriptedStore()


@pytest.fixture
def breaker(clock: Clock) -> Breaker:
    return Breaker()


def fails(breaker: Breaker, store: ScriptedStore) -> str:
    """Call, and return with what it failed."""
    with pytest.raises(StoreError) as caught:
        breaker.call(store, store.ping)
    return str(caught.value)


def is_down(breaker: Breaker, store: ScriptedStore) -> None:
    """Have the next two calls fail, after which the breaker takes the store for one that is down."""
    store.fail("ping", times=2)
    for _ in range(2):
        fails(breaker, store)


def test_a_store_that_serves_is_called_with_the_arguments_and_answers(breaker: Breaker, store: ScriptedStore) -> None:
    store.answer("get", "the record")
    assert breaker.call(store, store.get, "key") == "the record"
    assert store.calls == [("get", ("key",))]


@pytest.mark.parametrize("error", [StoreUnreachable("timed out"), StoreRefused("wrong password")])
def test_a_store_that_fails_is_not_asked_again_for_a_second(
    breaker: Breaker, store: ScriptedStore, clock: Clock, error: StoreError
) -> None:
    store.down("ping", error=error)
    for _ in range(2):
        with pytest.raises(StoreError) as caught:
            breaker.call(store, store.ping)
        assert caught.value is error
    clock.advance(0.999)
    with pytest.raises(StoreUnreachable) as spared:
        breaker.call(store, store.ping)
    assert str(spared.value) == f"{error} (not tried again yet)"
    assert store.count("ping") == 2


def test_a_store_that_fails_once_and_serves_the_next_caller_is_called_by_all(
    breaker: Breaker, store: ScriptedStore
) -> None:
    for _ in range(3):
        store.fail("ping")
        fails(breaker, store)
        breaker.call(store, store.ping)
    assert store.count("ping") == 6


def test_calls_that_fail_at_the_same_moment_are_one_failure(
    breaker: Breaker, store: ScriptedStore, clock: Clock
) -> None:
    """A server that restarts breaks the connections of all threads at once, and serves the next of them."""

    def another_thread_fails_first() -> None:
        clock.advance(0.5)
        fails(breaker, store)
        raise StoreUnreachable("the connection was reset")

    store.before("ping", another_thread_fails_first)
    store.fail("ping")
    assert fails(breaker, store) == "the connection was reset"
    breaker.call(store, store.ping)
    assert store.count("ping") == 3


@pytest.mark.parametrize("between", [0.0, 0.001, 60.0])
def test_a_call_that_begins_after_another_has_failed_makes_it_the_second_failure(
    breaker: Breaker, store: ScriptedStore, clock: Clock, between: float
) -> None:
    store.down("ping")
    fails(breaker, store)
    clock.advance(between)
    fails(breaker, store)
    assert "not tried again yet" in fails(breaker, store)
    assert store.count("ping") == 2


def test_a_store_that_is_down_is_probed_once_a_second(breaker: Breaker, store: ScriptedStore, clock: Clock) -> None:
    store.down("ping")
    fails(breaker, store)
    for _ in range(100):
        fails(breaker, store)
        clock.advance(0.1)
    assert store.count("ping") == 1 + 10


def test_while_one_caller_probes_the_others_fail_at_once(breaker: Breaker, store: ScriptedStore, clock: Clock) -> None:
    is_down(breaker, store)
    clock.advance(1.0)
    others: list[str] = []
    store.before("ping", lambda: others.append(fails(breaker, store)))
    breaker.call(store, store.ping)
    assert others == ["no ping (not tried again yet)"]


def test_a_probe_that_fails_starts_another_second(breaker: Breaker, store: ScriptedStore, clock: Clock) -> None:
    is_down(breaker, store)
    clock.advance(1.0)
    store.before("ping", lambda: clock.advance(5.0))
    store.down("ping", error=StoreUnreachable("second"))
    assert fails(breaker, store) == "second"
    clock.advance(0.9)
    assert fails(breaker, store) == "second (not tried again yet)"
    assert store.count("ping") == 3


def test_a_second_is_counted_from_when_the_store_failed(breaker: Breaker, store: ScriptedStore, clock: Clock) -> None:
    def slowly() -> None:
        clock.advance(3.0)
        raise StoreUnreachable("timed out")

    store.fail("ping")
    fails(breaker, store)
    store.before("ping", slowly)
    fails(breaker, store)
    clock.advance(0.9)
    assert fails(breaker, store) == "timed out (not tried again yet)"
    clock.advance(0.1)
    breaker.call(store, store.ping)


def test_failing_and_serving_again_are_told_once(
    breaker: Breaker, store: ScriptedStore, clock: Clock, heard: list[Event]
) -> None:
    store.fail("ping", times=3)
    fails(breaker, store)
    assert heard == [StoreFailed("", error="no ping", store="ScriptedStore")]
    fails(breaker, store)
    clock.advance(1.0)
    fails(breaker, store)
    clock.advance(1.0)
    breaker.call(store, store.ping)
    breaker.call(store, store.ping)
    assert heard == [StoreFailed("", error="no ping", store="ScriptedStore"), StoreRecovered("", store="ScriptedStore")]


def test_stores_of_one_class_are_told_apart(
    breaker: Breaker, store: ScriptedStore, clock: Clock, heard: list[Any]
) -> None:
    other = ScriptedStore()
    for each in (store, other):
        each.fail("ping")
        fails(breaker, each)
    for each in (other, store):
        breaker.call(each, each.ping)
    assert [event.number for event in heard] == [1, 2, 2, 1]


def test_a_store_that_serves_again_is_not_spared_any_more(breaker: Breaker, store: ScriptedStore, clock: Clock) -> None:
    is_down(breaker, store)
    clock.advance(1.0)
    for _ in range(3):
        breaker.call(store, store.ping)
    assert store.count("ping") == 5


def test_stores_are_spared_one_by_one(breaker: Breaker, store: ScriptedStore) -> None:
    store.down()
    for _ in range(2):
        fails(breaker, store)
    other = ScriptedStore()
    breaker.call(other, other.ping)
    assert other.count("ping") == 1
    assert fails(breaker, store) == "the store is down (not tried again yet)"


def test_a_record_that_cannot_be_read_is_no_fault_of_the_store(
    breaker: Breaker, store: ScriptedStore, heard: list[Event]
) -> None:
    store.fail("ping", RecordUnreadable("garbage"))
    with pytest.raises(RecordUnreadable):
        breaker.call(store, store.ping)
    breaker.call(store, store.ping)
    assert heard == []


def test_a_store_that_answers_with_an_unreadable_record_serves_again(
    breaker: Breaker, store: ScriptedStore, clock: Clock, heard: list[Event]
) -> None:
    store.fail("ping", StoreUnreachable("down"), StoreUnreachable("down"), RecordUnreadable("garbage"))
    for _ in range(2):
        fails(breaker, store)
    clock.advance(1.0)
    assert fails(breaker, store) == "garbage"
    breaker.call(store, store.ping)
    assert heard == [StoreFailed("", error="down", store="ScriptedStore"), StoreRecovered("", store="ScriptedStore")]


def test_what_is_no_store_error_passes_and_changes_nothing(
    breaker: Breaker, store: ScriptedStore, heard: list[Event]
) -> None:
    store.fail("ping", RuntimeError("interrupted"))
    with pytest.raises(RuntimeError):
        breaker.call(store, store.ping)
    breaker.call(store, store.ping)
    assert heard == []


def test_a_store_that_nobody_uses_any_more_is_forgotten(breaker: Breaker) -> None:
    store = ScriptedStore()
    store.down()
    fails(breaker, store)
    del store
    gc.collect()
    assert len(breaker._failing) == 0


# -- several callers at once -------------------------------------------------------------------------------------------


def meanwhile(breaker: Breaker, store: ScriptedStore, clock: Clock) -> Callable[[], Any]:
    def another_caller_probes() -> None:
        clock.advance(1.0)
        breaker.call(store, store.ping)

    return another_caller_probes


def test_two_probes_that_succeed_at_once_recover_the_store_once(
    breaker: Breaker, store: ScriptedStore, clock: Clock, heard: list[Event]
) -> None:
    is_down(breaker, store)
    clock.advance(1.0)
    store.after("ping", meanwhile(breaker, store, clock))
    breaker.call(store, store.ping)
    assert heard[1:] == [StoreRecovered("", store="ScriptedStore")]


def test_a_store_that_recovers_while_a_caller_is_asked_to_wait_stays_recovered(
    breaker: Breaker, store: ScriptedStore, clock: Clock, heard: list[Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    real, recover = breaker._lock, [meanwhile(breaker, store, clock)]

    class Lock:
        def __enter__(self) -> None:
            while recover:
                recover.pop()()
            real.acquire()

        def __exit__(self, *_: object) -> None:
            real.release()

    is_down(breaker, store)
    monkeypatch.setattr(breaker, "_lock", Lock())
    store.after("ping", lambda: None)
    store.before("ping", lambda: breaker.call(store, store.ping))  # a third caller, who must not be turned away
    breaker.call(store, store.ping)
    assert heard[1:] == [StoreRecovered("", store="ScriptedStore")]


def test_a_signals_handler_may_call_wherever_its_thread_is(
    breaker: Breaker, store: ScriptedStore, heard: list[Event]
) -> None:
    class Interrupted(StoreUnreachable):
        def __str__(self) -> str:  # called while the failure is noted, where a signal may come, too
            if not calls:
                calls.append("")
                calls.append(fails(breaker, store))
            return "timed out"

    calls: list[str] = []
    store.fail("ping", Interrupted(), StoreUnreachable("no ping"))
    thread = threading.Thread(target=fails, args=(breaker, store), daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()
    assert calls[1:] == ["no ping"]
    assert {event.number for event in heard if isinstance(event, StoreFailed)} == {1}


def test_a_child_that_is_forked_while_a_thread_asks_is_spared_too() -> None:
    class Down(MemoryStore):
        def ping(self) -> None:
            with pytest.raises(StoreUnreachable):
                breaker.call(self, self.fail)

        def fail(self) -> None:
            raise StoreUnreachable("down")

    breaker = Breaker()
    assert served_after_fork(Down(), breaker._lock)


@pytest.mark.parametrize("parent", [-1, 1])
def test_a_child_tells_what_it_finds_itself_and_not_what_its_parent_found(
    breaker: Breaker, store: ScriptedStore, clock: Clock, heard: list[Event], parent: int
) -> None:
    is_down(breaker, store)
    heard.clear()
    breaker._pid += parent  # as if forked; the numbers of processes begin again
    breaker.call(store, store.ping)
    assert heard == []
    store.fail("ping")
    fails(breaker, store)
    breaker.call(store, store.ping)
    assert heard == [StoreFailed("", error="no ping", store="ScriptedStore"), StoreRecovered("", store="ScriptedStore")]
