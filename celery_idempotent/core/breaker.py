"""Spare a store that cannot serve: after two failures in a row one caller a second tries it, others fail at once."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from itertools import count
from time import monotonic
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

from ..errors import RecordUnreadable, StoreError, StoreUnreachable
from ..events import StoreFailed, StoreRecovered, emit
from ..stores.base import Store

T = TypeVar("T")
#: Seconds between two probes of a store that is down.
PROBE_EVERY = 1.0


class _Failures(NamedTuple):
    """The failures of a store since it served a caller: the last text, when the first came, when to probe it.

    ``probe_at`` is None until a call fails that began after the first failure: what fails at the same moment, as when a
    server restarts, is one failure, and a store that serves again must not be taken for one that is down.
    """

    error: str
    first: float
    probe_at: float | None


class Breaker:
    """Remember per store of this process whether it served the last callers."""

    def __init__(self) -> None:
        self._failing: WeakKeyDictionary[Store, _Failures] = WeakKeyDictionary()
        self._numbers: WeakKeyDictionary[Store, int] = WeakKeyDictionary()
        self._next_number = count(1)
        # One that its holder can take again: a handler of a signal may call, wherever its thread happens to be.
        self._lock, self._pid = threading.RLock(), os.getpid()

    def call(self, store: Store, verb: Callable[..., T], *args: Any) -> T:
        """Call the verb, or fail at once if the store failed twice in a row, the last time less than a second ago.

        Raises:
            StoreError: what the verb raised, or the same text as the last time.
        """
        began = monotonic()
        if self._failing and store in self._failing:
            self._admit(store, began)
        try:
            answer = verb(*args)
        except RecordUnreadable:  # it answered
            self._close(store)
            raise
        except StoreError as error:
            now = monotonic()
            with self._own_lock():
                known = self._failing.get(store)
                number = self._numbers.get(store) or self._numbers.setdefault(store, next(self._next_number))
                if known is None:
                    self._failing[store] = _Failures(str(error), now, None)
                else:
                    is_second = known.probe_at is not None or began >= known.first
                    self._failing[store] = _Failures(str(error), known.first, now + PROBE_EVERY if is_second else None)
            if known is None:
                emit(StoreFailed("", error=str(error), store=type(store).__name__, number=number))
            raise
        if self._failing:
            self._close(store)
        return answer

    def _admit(self, store: Store, now: float) -> None:
        with self._own_lock():
            known = self._failing.get(store)
            if known is None or known.probe_at is None:  # it has recovered meanwhile, or failed once
                return
            if now < known.probe_at:
                raise StoreUnreachable(f"{known.error} (not tried again yet)")
            self._failing[store] = known._replace(probe_at=now + PROBE_EVERY)

    def _own_lock(self) -> threading.RLock:
        """Return a lock of this process; a thread that its parent had may have held the other.

        What the parent found is forgotten: this process emits an event of what it finds itself.
        """
        if self._pid != os.getpid():
            self._failing.clear()
            self._lock, self._pid = threading.RLock(), os.getpid()
        return self._lock

    def _close(self, store: Store) -> None:
        if self._failing.pop(store, None) is not None:
            emit(StoreRecovered("", store=type(store).__name__, number=self._numbers[store]))
