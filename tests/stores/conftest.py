"""Redis stores that are closed after their test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from celery_idempotent.stores import Store, open_store
from celery_idempotent.stores.redis import RedisStore
from tests.stores.kinds import KINDS, Kind
from tests.stores.postgres import fresh_postgres, own_postgres, postgres_server, postgres_url

__all__ = ["fresh_postgres", "own_postgres", "postgres_server", "postgres_url"]


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


@pytest.fixture
def memory_url() -> str:
    """The URL of a store in this process."""
    return "memory://"


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    """Every kind of store in turn."""
    return KINDS[request.param]


@pytest.fixture
def kind_url(request: pytest.FixtureRequest, kind: Kind) -> str:
    """The URL of an empty place for this kind of store, which is this test's alone."""
    url: str = request.getfixturevalue(kind.fixture)
    return url


@pytest.fixture
def any_store(kind_url: str) -> Iterator[Store]:
    """An empty store of every kind in turn."""
    store = open_store(kind_url)
    yield store
    store.close()
