"""Frozen and travelled time: freezegun's, which stops the monotonic clock too, and time-machine's."""

from __future__ import annotations

import datetime
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import freezegun
import pytest
import time_machine

from celery_idempotent import Conflict, idempotent
from celery_idempotent.core.history import history
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.testing import (
    StoreContract,
    assert_takes_effect_once,
    crash_at,
    override_store,
    redeliver,
)

NOW = datetime.datetime.now(datetime.timezone.utc)
HOUR = datetime.timedelta(hours=1)
Clock = Callable[[datetime.datetime], AbstractContextManager[Any]]
CLOCKS = {"freezegun": freezegun.freeze_time, "time-machine": lambda when: time_machine.travel(when, tick=False)}


@pytest.fixture(params=CLOCKS)
def frozen(request: pytest.FixtureRequest) -> Clock:
    """Freezes time where it is used."""
    clock: Clock = CLOCKS[request.param]
    return clock


def test_what_was_done_is_replayed_until_the_retention_is_over(frozen: Clock, charge: Any, charges: list[Any]) -> None:
    with override_store():
        charge.apply(("A",))
        with frozen(NOW + 23 * HOUR):
            charge.apply(("A",))
        assert charges == ["A"]
        with frozen(NOW + 25 * HOUR):
            charge.apply(("A",))
        assert charges == ["A", "A"]
        charge.apply(("A",))
        assert charges == ["A", "A"]


def test_the_kit_works_while_time_stands_still(frozen: Clock, keyed: Any, charges: list[Any]) -> None:
    with frozen(NOW), override_store() as store:
        assert_takes_effect_once(keyed, ("A",), effects=lambda: len(charges))
        with crash_at("before_effect") as crash:
            keyed.apply(("B",))
        assert redeliver(crash).get() == 1
        keyed.apply(("B",))
        assert history.flush()
        assert store.history(keyed.key_for("B"))
    assert len(charges) == 2


def test_a_lease_runs_out_when_time_is_moved(frozen: Clock, charge: Any, charges: list[Any]) -> None:
    with override_store():
        with crash_at("after_effect"):
            charge.apply(("A",))
        with frozen(NOW + HOUR):
            charge.apply(("A",))
    assert charges == ["A", "A"]


def test_a_wait_for_a_holder_ends_while_time_stands_still(frozen: Clock) -> None:
    begun, end = threading.Event(), threading.Event()

    @idempotent(store="memory://", key="order_id", on_conflict="wait", wait_timeout=0.3)
    def book(order_id: str) -> None:
        begun.set()
        assert end.wait(30)

    with override_store():
        holder = threading.Thread(target=book, args=("A",))
        holder.start()
        assert begun.wait(30)
        try:
            with frozen(NOW), pytest.raises(Conflict):
                book("A")
        finally:
            end.set()
            holder.join()


class FrozenContract(StoreContract):
    """The facts about a store, with a clock that stands still but for `age`."""

    name = ""

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def frozen(cls) -> Iterator[None]:
        with CLOCKS[cls.name](NOW):
            yield

    @pytest.fixture
    def store(self) -> MemoryStore:
        return MemoryStore()

    def age(self, store: Any, key: str, seconds: float) -> None:
        store.offset += seconds


class TestFrozenByFreezegun(FrozenContract):
    name = "freezegun"


class TestFrozenByTimeMachine(FrozenContract):
    name = "time-machine"


del FrozenContract
