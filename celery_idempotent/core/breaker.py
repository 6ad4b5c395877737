"""Spare a store that cannot serve: while it is down, one caller a second tries it, the others fail at once."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from time import monotonic
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from ..errors import RecordUnreadable, StoreError, StoreUnreachable
from ..events import StoreFailed, StoreRecovered, emit
from ..stores.base import Store

T = TypeVar("T")
#: Seconds between two probes of a store that is down.
PROBE_EVERY = 1.0


class Breaker:
    """Remember per store of this process whether it served the last caller."""

    def __init__(self) -> None:
        self._open: WeakKeyDictionary[Store, tuple[float, str]] = WeakKeyDictionary()
        self._lock, self._pid = threading.Lock(), os.getpid()

    def call(self, store: Store, verb: Callable[..., T], *args: Any) -> T:
        """Call the verb, or fail at once if the store failed less than a second ago.

        Raises:
            StoreError: what the verb raised, or the same text as the last time.
        """
        if self._open and store in self._open:
            self._admit(store)
        try:
            answer = verb(*args)
        except RecordUnreadable:  # it answered
            self._close(store)
            raise
        except StoreError as error:
            with self._own_lock():
                known = store in self._open
                self._open[store] = (monotonic() + PROBE_EVERY, str(error))
            if not known:
                emit(StoreFailed("", error=str(error), store=type(store).__name__))
            raise
        if self._open:
            self._close(store)
        return answer

    def _admit(self, store: Store) -> None:
        with self._own_lock():
            now, known = monotonic(), self._open.get(store)
            if known is None:  # it has recovered meanwhile
                return
            probe_at, error = known
            if now < probe_at:
                raise StoreUnreachable(f"{error} (not tried again yet)")
            self._open[store] = (now + PROBE_EVERY, error)

    def _own_lock(self) -> threading.Lock:
        """Return a lock of this process; a thread that its parent had may have held the other."""
        if self._pid != os.getpid():
            self._lock, self._pid = threading.Lock(), os.getpid()
        return self._lock

    def _close(self, store: Store) -> None:
        if self._open.pop(store, None) is not None:
            emit(StoreRecovered("", store=type(store).__name__))
