"""A store in this process: for tests, for eager mode, and as the model that the others are held against."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from copy import deepcopy
from functools import cache
from time import time
from urllib.parse import parse_qsl
from weakref import WeakSet

from ..errors import LeaseLost
from . import history as histories
from . import rules, unknown_parameter
from .base import Store
from .records import HISTORY_LIMIT, Claim, HistoryEntry, Lease, Outcome, PastEvent, Record, Refusal, Release, State

__all__ = ["MemoryStore"]

#: Every store of this process, for the fork.
_STORES: WeakSet[MemoryStore] = WeakSet()


class MemoryStore(Store):
    """Keep the records in a dictionary; nothing outlives the process, and no other process sees it."""

    keeps_history = True

    def __init__(self) -> None:
        self._rows: dict[str, rules.Row] = {}
        #: by key: until when its history is kept, and its lines
        self._histories: dict[str, tuple[int, list[histories.Line]]] = {}
        self._lock = threading.RLock()
        self._last_fence = 0
        #: seconds by which this store's clock is ahead; tests age records by moving it
        self.offset = 0.0
        _watch_forks()
        _STORES.add(self)

    @classmethod
    def from_url(cls, url: str) -> MemoryStore:
        """Return a new, empty store, whatever the URL names.

        Raises:
            ConfigurationError: the URL has parameters.
        """
        for name, _ in parse_qsl(url.partition("?")[2], keep_blank_values=True):
            raise unknown_parameter(url, name, (), "There are none.")
        return cls()

    def copy(self) -> MemoryStore:
        """Return another store with the same records; what happens to either is not seen in the other."""
        other = type(self)()
        with self._lock:
            other._rows, other._histories = deepcopy(self._rows), deepcopy(self._histories)
            other._last_fence, other.offset = self._last_fence, self.offset
        return other

    def _now(self) -> int:
        # The clock that tests freeze, and that servers' clocks are too.
        return int((time() + self.offset) * rules.SECOND)

    def _row(self, key: str, now: int) -> rules.Row | None:
        row = self._rows.get(key)
        if row is not None and row.expires <= now:
            del self._rows[key]
            return None
        return row

    def acquire(self, claim: Claim) -> Lease | Refusal:
        with self._lock:
            now = self._now()
            # Two calls may come within one tick of the clock, and a record may be deleted between them.
            answer, row = rules.acquire(claim.key, self._row(claim.key, now), claim, now)
            if isinstance(answer, Lease) and claim.key not in self._rows:
                row.fence = max(row.fence, self._last_fence + 1)
                answer = Lease(claim, row.fence)
            self._rows[claim.key] = row
            self._last_fence = max(self._last_fence, row.fence)
            return answer

    def renew(self, leases: Sequence[Lease]) -> Sequence[Lease]:
        with self._lock:
            now = self._now()
            return [lease for lease in leases if not self._renew(lease, now)]

    def _renew(self, lease: Lease, now: int) -> bool:
        row = rules.renew(self._row(lease.key, now), lease, now)
        if row is not None:
            self._rows[lease.key] = row
        return row is not None

    def settle(self, lease: Lease, outcome: Outcome, *, ttl: float) -> None:
        with self._lock:
            now = self._now()
            row = rules.settle(self._row(lease.key, now), lease, outcome, ttl, now)
            if row is None:
                raise LeaseLost(f"The lease on {lease.key!r} is held by another holder: nothing was settled.")
            self._rows[lease.key] = row

    def release(self, lease: Lease, release: Release) -> bool:
        with self._lock:
            now = self._now()
            return rules.release(self._row(lease.key, now), lease, release, now)

    def mark_shutdown(self, lease: Lease) -> bool:
        with self._lock:
            return rules.mark_shutdown(self._row(lease.key, self._now()), lease)

    def mark_dispatched(self, key: str, task_id: str) -> bool:
        with self._lock:
            return rules.mark_dispatched(self._row(key, self._now()), task_id)

    def get(self, key: str) -> Record | None:
        with self._lock:
            now = self._now()
            row = self._row(key, now)
            return None if row is None else rules.view(key, row, now)

    def delete(self, key: str) -> bool:
        with self._lock:
            known = self._row(key, self._now()) is not None
            self._rows.pop(key, None)
            self._histories.pop(key, None)
            return known

    def append_history(self, entries: Sequence[HistoryEntry]) -> None:
        with self._lock:
            now = self._now()
            for key, mine in histories.grouped(entries).items():
                lines = [*self._lines(key, now), *histories.lines(mine, now)]
                self._histories[key] = (histories.expiry(mine, now), lines[-HISTORY_LIMIT:])

    def history(self, key: str) -> list[PastEvent]:
        with self._lock:
            now = self._now()
            return histories.past_events(self._lines(key, now), now)

    def _lines(self, key: str, now: int) -> list[histories.Line]:
        expires, lines = self._histories.get(key, (0, []))
        return lines if expires > now else []

    def scan(self, *, prefix: str = "", state: State | None = None) -> Iterator[Record]:
        for key in [key for key in list(self._rows) if key.startswith(prefix)]:
            record = self.get(key)
            if record is not None and state in (None, record.state):
                yield record

    def purge(self, limit: int | None = None) -> int:
        with self._lock:
            now = self._now()
            expired = [key for key, row in self._rows.items() if row.expires <= now][:limit]
            for key in expired:
                del self._rows[key]
            for key in [key for key in self._histories if not self._lines(key, now)]:
                del self._histories[key]
            return len(expired)

    def ping(self) -> None:
        return None


@cache
def _watch_forks() -> None:
    """Have each child make locks of its own: a thread that it has not may hold its parent's."""
    if hasattr(os, "register_at_fork"):  # not on Windows
        os.register_at_fork(after_in_child=_renew_locks)


def _renew_locks() -> None:
    for store in list(_STORES):
        store._lock = threading.RLock()
