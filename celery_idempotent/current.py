"""The lease of the run that this code is part of."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar

from .holding import Holding

__all__ = ["current_lease", "running"]

_current: ContextVar[Holding | None] = ContextVar("celery_idempotent_lease", default=None)


def current_lease() -> Holding | None:
    """Return what the guarded function holds that is running here, or None: there is none.

    It has ``key``, ``fence``, ``lost``, ``check()``, ``settle(result, using=...)`` and ``derived_key(name)``, see
    `Holding`. It follows its code into coroutines, asyncio's tasks and ``asyncio.to_thread``, and not into threads that
    the code starts otherwise.
    """
    return _current.get()


@contextmanager
def running(holding: Holding) -> Iterator[None]:
    """Let `current_lease` return ``holding``."""
    token = _current.set(holding)
    try:
        yield
    finally:
        with suppress(ValueError):  # a coroutine that is thrown away ends in another context
            _current.reset(token)
