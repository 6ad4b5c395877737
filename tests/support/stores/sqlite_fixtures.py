"""SQLite stores in files of their test, closed after it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from celery_idempotent.stores.sqlite import SqliteStore
from tests.support.stores.sqlite_children import Child, fork

__all__ = ["forked", "open_sqlite", "sqlite_path", "sqlite_store", "sqlite_url"]


@pytest.fixture
def sqlite_path(tmp_path: Path) -> Path:
    """Where a file may be made, which is this test's alone."""
    return tmp_path / "idempotency.db"


@pytest.fixture
def sqlite_url(sqlite_path: Path) -> str:
    """The URL of a file that does not exist yet; on a loaded machine fifty threads may have to wait for their turns."""
    return f"sqlite:///{sqlite_path}?timeout=30"


@pytest.fixture
def open_sqlite(sqlite_path: Path) -> Iterator[Callable[..., SqliteStore]]:
    """A function that opens a store in this test's file, or in another one."""
    stores: list[SqliteStore] = []

    def open_one(path: Path = sqlite_path, **options: Any) -> SqliteStore:
        stores.append(SqliteStore(str(path), **options))
        return stores[-1]

    yield open_one
    for store in stores:
        store.close()


@pytest.fixture
def sqlite_store(open_sqlite: Callable[..., SqliteStore]) -> SqliteStore:
    """An empty store."""
    return open_sqlite()


@pytest.fixture
def forked() -> Iterator[Callable[..., Child]]:
    """A function that forks a child, see `fork`; at the end of the test it ends."""
    children: list[Child] = []

    def start(*steps: Callable[[], object], **options: Any) -> Child:
        children.append(fork(*steps, **options))
        return children[-1]

    yield start
    for child in children:
        child.end()
