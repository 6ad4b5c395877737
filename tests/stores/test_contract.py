"""Every store keeps the contract."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from celery_idempotent.records import Claim, Lease
from celery_idempotent.stores import Store, open_store
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.testing import StoreContract
from tests.stores import benches


class Aged(StoreContract):
    def age(self, store: Store, key: str, seconds: float) -> None:
        benches.age(store, key, seconds)


class TestMemory(Aged):
    @pytest.fixture
    def store(self) -> Store:
        return open_store("memory://")

    def test_the_clock_of_the_store_can_be_moved(self) -> None:
        """For those who test their own tasks: everything in the store grows old at once."""
        store = MemoryStore()
        store.acquire(Claim("key", "owner", lease_ttl=60, keep_ttl=600))
        store.offset += 61
        assert isinstance(answer := store.acquire(Claim("key", "other", lease_ttl=60, keep_ttl=600)), Lease)
        assert answer.taken_over
        store.offset += 661
        assert store.purge() == 1


class TestRedis(Aged):
    @pytest.fixture
    def store(self, redis_url: str) -> Iterator[Store]:
        store = open_store(redis_url)
        yield store
        store.close()
