"""What has expired is removed: in small pieces, beside everything else, and mostly by itself."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from celery_idempotent.stores import Lease, State
from celery_idempotent.stores.rules import Row
from celery_idempotent.stores.sqlite import SqliteStore
from celery_idempotent.stores.sqlite import store as sqlite
from celery_idempotent.stores.sqlite.store import PURGED
from tests.support.stores.benches import DONE, KEY, age, claim, known, take

OpenSqlite = Callable[..., SqliteStore]

#: Before the tests set it to 0.
PURGE_EVERY = SqliteStore.purge_every


@pytest.fixture
def store(sqlite_store: SqliteStore) -> SqliteStore:
    """A store that removes what it is told to, and nothing by itself."""
    sqlite_store.purge_every = 0
    return sqlite_store


def expire(store: SqliteStore, count: int) -> None:
    """Have so many records that are too old to be remembered."""

    def work(cursor: sqlite3.Cursor) -> None:
        for number in range(count):
            row = Row(State.COMPLETED, fence=1, payload=DONE.payload, ended=1, expires=2)
            store._rows.keep(cursor, f"old-{number}", row, None)

    store._connections.write(work)


def rows(path: Path) -> int:
    with closing(sqlite3.connect(path)) as connection:
        return int(connection.execute("SELECT count(*) FROM celery_idempotency").fetchall()[0][0])


def test_a_purge_removes_all_that_has_expired(store: SqliteStore, sqlite_path: Path) -> None:
    expire(store, 2 * PURGED + 7)
    take(store, "new")
    assert rows(sqlite_path) == 2 * PURGED + 8
    assert store.purge() == 2 * PURGED + 7
    assert rows(sqlite_path) == 1
    assert known(store, "new")


@pytest.mark.parametrize("limit", [0, 1, PURGED + 3, 10 * PURGED])
def test_a_purge_removes_no_more_than_it_may(store: SqliteStore, sqlite_path: Path, limit: int) -> None:
    expire(store, PURGED + 10)
    assert store.purge(limit) == min(limit, PURGED + 10)
    assert rows(sqlite_path) == PURGED + 10 - min(limit, PURGED + 10)


def test_a_lease_that_ran_out_is_no_reason_to_remove_its_record(store: SqliteStore) -> None:
    """The crash must still be known when the broker delivers again."""
    take(store)
    age(store, KEY, 61)
    assert store.purge() == 0
    assert take(store, task_id="b").taken_over


def test_a_purge_removes_the_oldest_first(store: SqliteStore) -> None:
    for key, seconds in (("newer", 61), ("oldest", 600), ("older", 120)):
        store.settle(take(store, key), DONE, ttl=60)
        age(store, key, seconds)
    store.purge(2)
    keys = store._connections.read(lambda cursor: cursor.execute("SELECT key FROM celery_idempotency").fetchall())
    assert keys == [("newer",)]


def test_a_purge_is_many_short_transactions_and_others_write_between_them(
    store: SqliteStore, open_sqlite: OpenSqlite, monkeypatch: pytest.MonkeyPatch
) -> None:
    expire(store, 4 * PURGED)
    other = open_sqlite(timeout=30)
    other.purge_every = 0
    other.ping()
    touched: list[int] = []
    purged = SqliteStore._purged

    def work(self: SqliteStore, cursor: sqlite3.Cursor, most: int) -> int:
        touched.append(purged(self, cursor, most))
        return touched[-1]

    paused = time.sleep
    between: list[object] = []

    def pause(seconds: float) -> None:
        if threading.current_thread() is threading.main_thread() and len(between) < len(touched):
            between.append(other.acquire(claim(f"between-{len(between)}")))
        paused(seconds)

    monkeypatch.setattr(SqliteStore, "_purged", work)
    monkeypatch.setattr(sqlite.time, "sleep", pause)
    assert store.purge() == 4 * PURGED
    assert sum(touched) == 4 * PURGED
    assert max(touched) <= PURGED
    assert len(between) >= 4
    assert all(isinstance(answer, Lease) for answer in between)


def test_a_transaction_that_has_taken_long_ends_with_what_it_has(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with large payloads, or on a slow disk."""
    expire(store, 5)
    monkeypatch.setattr(sqlite, "PURGING", -1.0)
    assert store._connections.write(lambda cursor: store._purged(cursor, PURGED)) == 1
    assert store.purge() == 4


def test_two_who_purge_at_once_remove_each_record_once(store: SqliteStore, open_sqlite: OpenSqlite) -> None:
    expire(store, 6 * PURGED)
    stores = [store, open_sqlite(timeout=30), open_sqlite(timeout=30)]
    with ThreadPoolExecutor(3) as threads:
        assert sum(threads.map(SqliteStore.purge, stores)) == 6 * PURGED


def test_the_fences_of_a_key_rise_though_its_record_was_purged_and_the_clock_set_back(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    fences = []
    now = sqlite.clock()
    for turn in range(8):
        monkeypatch.setattr(sqlite, "clock", lambda turn=turn: now - turn * 3_600_000_000)
        lease = take(store)
        fences.append(lease.fence)
        store.settle(lease, DONE, ttl=60)
        age(store, KEY, 10 * 86400)  # it must not come back to life when the clock is set back
        if turn % 4 == 0:
            assert store.purge() == 1
            expire(store, 1)  # of a key whose fence is lower
            assert store.purge() == 1
        elif turn % 4 == 1:
            assert not store.delete(KEY)
        elif turn % 4 == 2:
            store.settle(take(store), DONE, ttl=60)
            assert store.delete(KEY)
        # else it is replaced where it is
    assert fences == sorted(set(fences))


def test_the_store_removes_by_itself_what_has_expired(store: SqliteStore, sqlite_path: Path) -> None:
    expire(store, 10)
    take(store, "first")
    assert rows(sqlite_path) == 11
    store.purge_every = 1
    take(store, "second")
    assert rows(sqlite_path) == 2


def test_the_store_removes_more_than_is_added(store: SqliteStore, sqlite_path: Path) -> None:
    """One lease of many is followed by the removal of as many as twice that."""
    assert PURGE_EVERY * 2 <= PURGED
    store.purge_every = PURGE_EVERY
    expire(store, 500)
    for number in range(1000):
        take(store, f"new-{number}")
        if rows(sqlite_path) == number + 1:
            return
    raise AssertionError(f"{rows(sqlite_path) - 1000} are left")


def test_a_lease_is_granted_although_nothing_can_be_removed(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(cursor: sqlite3.Cursor, most: int) -> int:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(store, "_purged", full)
    store.purge_every = 1
    assert isinstance(store.acquire(claim()), Lease)


def test_a_replay_removes_nothing(store: SqliteStore, sqlite_path: Path) -> None:
    store.settle(take(store), DONE, ttl=60)
    expire(store, 3)
    store.purge_every = 1
    store.acquire(claim())
    assert rows(sqlite_path) == 4
