"""Redis stores that are closed after their test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from celery_idempotent.stores.redis import RedisStore


@pytest.fixture
def opened() -> Iterator[Callable[..., RedisStore]]:
    """A function that opens a store on the Redis at a URL."""
    stores: list[RedisStore] = []

    def open_one(url: str, **options: Any) -> RedisStore:
        stores.append(RedisStore.from_url(url, **options))
        return stores[-1]

    yield open_one
    for store in stores:
        store.close()


@pytest.fixture
def redis_store(redis_url: str, opened: Callable[..., RedisStore]) -> RedisStore:
    """A store on an empty database, which is this test's alone."""
    return opened(redis_url)
