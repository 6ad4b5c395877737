"""Fixtures for pytest, which finds them by itself; they import the library when a test first uses one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from ..stores.memory import MemoryStore


@pytest.fixture
def idempotency_store() -> Iterator[MemoryStore]:
    """An empty store in memory, which every task, function, job and application of this process uses for this test."""
    from .override import override_store

    with override_store() as store:
        yield store


@pytest.fixture
def idempotency_off() -> Iterator[None]:
    """Every task, function, job and application of this process is unguarded for this test."""
    from .override import inactive

    with inactive():
        yield
