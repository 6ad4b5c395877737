"""The store that docs/guides/writing-a-store.md writes passes what it tells its readers to pass."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from celery import Celery

from celery_idempotent import IdempotentTask
from celery_idempotent.errors import RecordUnreadable, StoreUnreachable
from celery_idempotent.stores import State, Store, rules
from celery_idempotent.testing import StoreContract
from examples import folder_store
from examples.folder_store import FolderStore
from tests.support.stores.benches import DONE, KEY, claim, known, take
from tests.support.stores.histories import CLIENTS, Place, Seat, check, record

pytestmark = pytest.mark.nightly


def age(store: Store, key: str, seconds: float) -> None:
    assert isinstance(store, FolderStore)
    by = round(seconds * rules.SECOND)
    with store.turn() as now:
        _, row = store.read(store.path(key), now)
        if row is not None:
            row.lease_end -= by
            row.not_before -= by
            row.ended -= by if row.ended else 0
            row.expires -= by
            store.write(key, row)


@pytest.fixture
def store(tmp_path: Path) -> FolderStore:
    return FolderStore(tmp_path / "records")


class TestFolderStore(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> FolderStore:
        return FolderStore(tmp_path / "records")

    def age(self, store: Store, key: str, seconds: float) -> None:
        age(store, key, seconds)


def test_what_many_clients_see_of_it_can_have_happened(store: FolderStore) -> None:
    place = Place([Seat(FolderStore(store.folder)) for _ in range(CLIENTS[1])], store, age)
    with ThreadPoolExecutor(CLIENTS[1]) as threads:
        for seed in range(30):
            assert not check(record(place, seed, threads), seed)


def test_a_store_object_is_what_an_app_uses(store: FolderStore) -> None:
    app = Celery("shop", broker="memory://", backend="cache+memory://")
    app.conf.idempotency_store = store
    runs = []

    @app.task(base=IdempotentTask, idempotency={"key": "order_id"})
    def charge(order_id: str) -> int:
        runs.append(order_id)
        return len(runs)

    assert [charge.apply(("ORD-1",)).get() for _ in range(3)] == [1, 1, 1]
    assert [found.state for found in store.scan()] == [State.COMPLETED]
    app.close()


def test_garbage_is_said_to_be_garbage_and_can_be_deleted(store: FolderStore) -> None:
    take(store, "another")
    store.path(KEY).write_text("[]")
    with pytest.raises(RecordUnreadable, match="no record of it"):
        store.acquire(claim())
    assert [found.key for found in store.scan()] == ["another"]
    assert store.purge() == 0
    assert store.delete(KEY)
    take(store)


def test_a_disk_that_is_gone_is_unreachable(store: FolderStore) -> None:
    store.folder.write_text("a file is in the way")
    with pytest.raises(StoreUnreachable):
        store.ping()


@pytest.fixture
def taken(store: FolderStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(folder_store, "PATIENCE", 0.05)
    with FolderStore(store.folder).turn():
        yield


def test_a_turn_that_never_comes_is_unreachable(store: FolderStore, taken: None) -> None:
    with pytest.raises(StoreUnreachable):
        store.settle(take(store), DONE, ttl=60)


def test_a_new_process_finds_what_was_left(store: FolderStore) -> None:
    store.settle(take(store), DONE, ttl=60)
    assert known(FolderStore(str(store.folder))).payload == DONE.payload
