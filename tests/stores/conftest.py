"""Redis stores that are closed after their test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from celery_idempotent.stores import Store, cached, open_store
from celery_idempotent.stores.dynamodb import connections as dynamodb_connections
from celery_idempotent.stores.postgres.connections import TimedConnection
from celery_idempotent.stores.redis import ClusterStore, RedisStore
from celery_idempotent.stores.redis import store as redis_store_module
from tests.support.stores.kinds import BEHIND_CACHE, KINDS, Kind

#: In the names of files whose tests are of how long a store waits for its server, or for its cache.
TIMED = ("cached", "connections", "outages", "sentinel", "urls")


@pytest.fixture(autouse=True)
def patient(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have stores wait for a minute instead of 2 s: some of these tests do nothing else, and a machine may pause."""
    if not any(part in request.path.stem for part in TIMED):
        monkeypatch.setattr(redis_store_module, "TIMEOUT", 60.0)
        monkeypatch.setattr(cached, "TIMEOUT", 60.0)
        monkeypatch.setattr(dynamodb_connections, "TIMEOUT", 60.0)
        monkeypatch.setattr(TimedConnection, "seconds", 60.0)


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
def opened_cluster() -> Iterator[Callable[..., ClusterStore]]:
    """A function that opens a store on the Redis Cluster at a URL."""
    stores: list[ClusterStore] = []

    def open_one(url: str, **options: Any) -> ClusterStore:
        stores.append(ClusterStore.from_url(url, **options))
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


@pytest.fixture
def cached_url(request: pytest.FixtureRequest, fresh_redis: Callable[[], str]) -> str:
    """The URL of an empty store behind an empty cache."""
    durable: str = request.getfixturevalue(KINDS[BEHIND_CACHE].fixture)
    return f"cached+{durable}{'&' if '?' in durable else '?'}cache={fresh_redis()}"


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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give facts about more than a thousand records their time: each is a request or three to DynamoDB."""
    for item in items:
        if "[dynamodb" in item.name and ("_many_" in item.name or "more_records" in item.name):
            item.add_marker(pytest.mark.timeout(600))
