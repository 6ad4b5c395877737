"""The loops that remove what has expired, and what begins with a prefix: bounded, and never in others' way."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from celery_idempotent.errors import RecordUnreadable
from celery_idempotent.stores import Claim, Lease, Outcome, Record, State, maintenance
from celery_idempotent.stores.maintenance import DELETE_BATCH as BATCH
from celery_idempotent.stores.maintenance import (
    MatchCounts,
    NamedStore,
    count,
    forget,
    is_held,
    purge,
    purge_in_batches,
)
from celery_idempotent.stores.memory import MemoryStore


class Expiring(MemoryStore):
    """Removes what it is told to, batch after batch."""

    def __init__(self, *answers: int) -> None:
        super().__init__()
        self.answers = list(answers)
        self.asked: list[int | None] = []

    def purge(self, limit: int | None = None) -> int:
        self.asked.append(limit)
        return self.answers.pop(0)


@pytest.fixture(autouse=True)
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses that were made; none takes time."""
    made: list[float] = []
    monkeypatch.setattr(maintenance.time, "sleep", made.append)
    return made


def test_full_batches_go_on_with_a_pause_between_them(pauses: list[float]) -> None:
    store = Expiring(1000, 1000, 3)
    assert purge(store) == 2003
    assert store.asked == [1000] * 3
    assert pauses == [maintenance.PAUSE] * 2


def test_a_batch_of_which_others_hold_some_rows_is_not_taken_for_the_end() -> None:
    assert purge(Expiring(1000, 800, 10)) == 1810


def test_the_last_records_are_not_chased_while_more_expire() -> None:
    store = Expiring(*[499] * 100)
    assert purge(store) == 499
    assert len(store.asked) == 1


def test_a_limit_is_what_all_batches_have_together(pauses: list[float]) -> None:
    store = Expiring(1000, 1000, 500)
    assert purge(store, 2500) == 2500
    assert store.asked == [1000, 1000, 500]
    assert len(pauses) == 2


def test_a_store_that_removes_more_than_asked_ends_it_too() -> None:
    assert purge(Expiring(12), 10) == 12


def test_a_limit_of_nothing_asks_nothing() -> None:
    assert purge(Expiring(), 0) == 0


def test_a_server_that_expires_by_itself_is_asked_but_once(pauses: list[float]) -> None:
    assert (purge(Expiring(0)), pauses) == (0, [])


def test_the_size_of_a_batch_and_the_pause_can_be_chosen(pauses: list[float]) -> None:
    assert list(purge_in_batches(Expiring(10, 2), batch=10, pause=3)) == [10, 2]
    assert pauses == [3]


def hold(store: MemoryStore, key: str) -> Lease:
    lease = store.acquire(Claim(key, f"owner of {key}", 60, 600))
    assert isinstance(lease, Lease)
    return lease


def settle(store: MemoryStore, key: str) -> None:
    store.settle(hold(store, key), Outcome(State.COMPLETED, b"json:1"), ttl=600)


class Unasked(MemoryStore):
    """Must not be asked."""

    def get(self, key: str) -> Record | None:
        raise AssertionError(key)

    def scan(self, *, prefix: str = "", state: State | None = None) -> Iterator[Record]:
        raise AssertionError(prefix)


def test_who_typed_the_namespace_meant_what_was_typed() -> None:
    used = NamedStore("here", Unasked(), ("idem",))
    assert used.meant_key("idem:1") is None
    assert used.meant_prefix("idem:shop.") is None


def test_matches_are_counted_by_state() -> None:
    store = MemoryStore()
    settle(store, "a:1")
    hold(store, "a:2")
    settle(store, "b:1")
    assert count(store, "a:") == MatchCounts({State.COMPLETED: 1, State.IN_PROGRESS: 1}, held=1)
    assert count(store, "a:", State.COMPLETED).total == 1
    assert count(store, "c:") == MatchCounts({})


def test_a_lease_that_ran_out_is_not_held() -> None:
    store = MemoryStore()
    hold(store, "a")
    assert [is_held(record) for record in store.scan()] == [True]
    store.offset += 61
    assert [is_held(record) for record in store.scan()] == [False]


class Scanning(MemoryStore):
    """Counts how far a scan was read, and may say something that has changed since."""

    read = 0
    late: Record | None = None

    def scan(self, *, prefix: str = "", state: State | None = None) -> Iterator[Record]:
        for record in super().scan(prefix=prefix, state=state):
            self.read += 1
            yield record
        if self.late:
            yield self.late

    def get(self, key: str) -> Record | None:
        if key == "unreadable":
            raise RecordUnreadable("no record")
        return super().get(key)


def test_keys_are_read_ahead_by_a_bounded_number() -> None:
    store = Scanning()
    for number in range(3 * BATCH):
        settle(store, f"a:{number}")
    store.read = 0
    steps = forget(store, "a:")
    for _ in range(BATCH):
        assert next(steps)
    assert store.read <= BATCH
    assert sum(steps) == 2 * BATCH
    assert list(store._rows) == []


def test_a_record_that_was_claimed_since_the_scan_is_left_alone() -> None:
    store = Scanning()
    store.late = Record("a", State.COMPLETED)
    hold(store, "a")
    assert list(forget(store, "a", State.COMPLETED)) == []
    assert set(forget(store, "a")) == {False}
    assert store.get("a") is not None
    assert True in set(forget(store, "a", held_too=True))
    assert store.get("a") is None


def test_a_record_that_is_gone_since_the_scan_is_not_counted() -> None:
    store = Scanning()
    store.late = Record("a", State.COMPLETED)
    assert list(forget(store, "a")) == []


def test_what_cannot_be_read_is_left_alone() -> None:
    store = Scanning()
    store.late = Record("unreadable", State.COMPLETED)
    assert list(forget(store, "unreadable")) == [False]
