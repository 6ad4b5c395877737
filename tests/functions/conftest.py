"""Stores for functions, closed after their test, and what is told of calls."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from celery_idempotent import functions
from celery_idempotent.core.history import history
from celery_idempotent.stores import Store, open_store
from tests.support.unit.scripted import listening

heard = pytest.fixture(listening)


@pytest.fixture(autouse=True)
def own_stores(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Stores that a test's functions name by URL are its own, and closed after it; so are the functions' names."""
    opened: dict[str, Store] = {}
    monkeypatch.setattr(functions, "_declared", {})
    monkeypatch.setattr(functions, "_stores", opened)
    yield
    history.flush(10.0)
    for store in opened.values():
        store.close()


@pytest.fixture(params=["redis_url", "sqlite_url", pytest.param("postgres_url", marks=pytest.mark.thorough)])
def store_url(request: pytest.FixtureRequest) -> str:
    """The URL of an empty store of every kind that a consumer would use."""
    url: str = request.getfixturevalue(request.param)
    return url


@pytest.fixture
def store(store_url: str) -> Iterator[Store]:
    """An empty store of every such kind."""
    made = open_store(store_url)
    yield made
    history.flush(10.0)
    made.close()
