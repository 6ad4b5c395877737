"""Every store keeps the contract."""

from __future__ import annotations

import pytest

from celery_idempotent.stores import Claim, Lease, Store
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.testing import StoreContract
from tests.support.forks import served_after_fork
from tests.support.stores import benches
from tests.support.stores.kinds import Kind


class TestEveryStore(StoreContract):
    @pytest.fixture
    def store(self, any_store: Store) -> Store:
        return any_store

    @pytest.fixture(autouse=True)
    def renew_no_more_than_tell(self, kind: Kind) -> None:
        self.many = kind.many

    def age(self, store: Store, key: str, seconds: float) -> None:
        benches.age(store, key, seconds)


def test_the_clock_of_the_memory_store_can_be_moved() -> None:
    """For those who test their own tasks: everything in the store grows old at once."""
    store = MemoryStore()
    store.acquire(Claim("key", "owner", lease_ttl=60, keep_ttl=600))
    store.offset += 61
    assert isinstance(answer := store.acquire(Claim("key", "other", lease_ttl=60, keep_ttl=600)), Lease)
    assert answer.taken_over
    store.offset += 661
    assert store.purge() == 1


def test_a_child_that_is_forked_while_a_thread_uses_the_memory_store_has_a_copy_that_serves() -> None:
    class Read(MemoryStore):
        def ping(self) -> None:
            assert self.get("key")

    store = Read()
    store.acquire(Claim("key", "owner", lease_ttl=60, keep_ttl=600))
    assert served_after_fork(store, store._lock)
