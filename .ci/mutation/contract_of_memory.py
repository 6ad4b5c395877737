"""The contract over the store in memory, which decides by `stores/rules.py`, with few imports: it begins soon."""

from __future__ import annotations

import pytest

from celery_idempotent.stores import Store
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.testing import StoreContract


class TestMemory(StoreContract):
    @pytest.fixture
    def store(self) -> Store:
        return MemoryStore()

    def age(self, store: Store, key: str, seconds: float) -> None:
        assert isinstance(store, MemoryStore)
        store.offset += seconds
