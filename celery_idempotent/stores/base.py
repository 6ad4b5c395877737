"""The contract of a store: the server, file or memory that keeps the records."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigurationError
from .records import Claim, HistoryEntry, Lease, Outcome, PastEvent, Record, Refusal, Release, State

__all__ = ["Store"]

#: Called with the key of each record that a scan passes by, since it cannot be read; see `unreadable_reported_to`.
_report: ContextVar[Callable[[str], object] | None] = ContextVar("celery_idempotent_unreadable", default=None)


@contextmanager
def unreadable_reported_to(report: Callable[[str], object]) -> Iterator[None]:
    """Have scans in this context call ``report`` with the key of each record that they pass by."""
    token = _report.set(report)
    try:
        yield
    finally:
        _report.reset(token)


def pass_by_unreadable(key: str) -> None:
    """Report to the caller of this scan that the record under a key cannot be read, and is passed by."""
    report = _report.get()
    if report is not None:
        report(key)


@dataclass(slots=True)
class Unreadable:
    """The records that a scan passed by, since they are damaged or of a newer version: how many, and the first."""

    count: int = 0
    first: str = ""

    def add(self, key: str) -> None:
        """Count one more."""
        self.count += 1
        self.first = self.first or key


class Store(ABC):
    """Keep one record for each operation, and decide who holds the lease on it.

    `celery_idempotent.testing.StoreContract` checks these promises for every store:

    1. If several callers acquire a key at the same time, one of them gets the lease.
    2. The store refuses every write of a holder whose lease was taken over, settled, or deleted and acquired again. It
       accepts the write if the record is missing and the key was not acquired since, or if it is older than the lease
       and its own lease is over: an operation must not run again because a server lost its data. (A renewal that is
       not to revive a record is refused.)
    3. acquire, renew, settle and release are idempotent for the same owner, so that a caller may repeat a request
       whose reply was lost.
    4. The fences of a key only rise, also after the record was deleted. A store documents where it is weaker.
    5. A settled record is never settled with another outcome. The store keeps it for its ttl, and no longer.
    6. The store's clock decides what has expired. A worker whose clock is wrong takes no lease early.
    7. Several threads may use a store, and a process may use it after a fork.

    Every method raises `StoreUnreachable` if the store cannot serve now, `StoreRefused` if the server rejects the
    client, and `RecordUnreadable` if the key holds something else than a record. `celery_idempotent.stores.rules` has
    the decisions of each method in Python; the tests compare every store with it.
    """

    #: Whether the store keeps histories. A store that does overrides `append_history` and `history`.
    keeps_history = False
    #: Whether `scan` finds what is in progress without reading the other records.
    seeks_in_progress = False

    @abstractmethod
    def acquire(self, claim: Claim) -> Lease | Refusal:
        """Take the lease on ``claim.key`` in one atomic step, or return why not, with the record that is in the way."""

    @abstractmethod
    def renew(self, leases: Sequence[Lease]) -> Sequence[Lease]:
        """Extend each lease by its ttl from now on, in one round trip, and return those that are lost.

        The ttl may be another one than that with which the lease was taken. A record that is gone is restored, unless
        the claim is not to ``revive`` it: then the lease is lost.
        """

    def shard(self, key: str) -> str:
        """Return the name of the part of the store that has a key (default: one part, "").

        Leases are renewed one shard at a time, so that none expires because another shard is down. The method contacts
        no server and never raises.
        """
        return ""

    @abstractmethod
    def settle(self, lease: Lease, outcome: Outcome, *, ttl: float) -> None:
        """Record how the operation ended, to be kept for ``ttl`` seconds.

        Raises:
            errors.LeaseLost: the caller no longer holds the lease; nothing was written.
        """

    def settle_within(self, lease: Lease, outcome: Outcome, *, ttl: float, using: Any) -> None:
        """Record how the operation ended within the caller's own open transaction, which commits it or does not.

        Arguments:
            lease: The lease.
            outcome: How the operation ended.
            ttl: Seconds for which the record is kept.
            using: The transaction, or an object that leads to it; each store documents the kinds that it takes.

        Raises:
            errors.LeaseLost: the caller no longer holds the lease; nothing was written. Roll the transaction back.
            ConfigurationError: the store cannot write there, or no transaction is open.
        """
        raise ConfigurationError(
            f"Expected a store that keeps its records where the task's transaction is, got a {type(self).__name__}. "
            "Use a postgresql:// or sqlite:// store in the same database as the task's own rows."
        )

    @abstractmethod
    def release(self, lease: Lease, release: Release) -> bool:
        """Give the lease back unsettled, and return whether the owner still held it.

        The store compares ``lease.key`` and ``lease.owner`` alone, so that a process that does not know the fence, and
        gives 0, can release the lease of a process that died. A record with a lower fence is older than the lease:
        if its own lease is over, the key is free already, as where the record is missing.

        If the owner did not hold it, and the reason is one for which its task has ended, the store forgets the attempt
        and the copies of that task, unless a later one goes on: what is sent again under its id is no copy of it.
        """

    def mark_shutdown(self, lease: Lease) -> bool:
        """Record that the worker of the holder is about to end, and return whether the owner still holds the lease.

        A lease that expires afterwards counts as a shutdown and not as a crash. It expires no earlier. The store
        compares ``lease.key`` and ``lease.owner`` alone. By default nothing is recorded, and a crash is counted.
        """
        return False

    @abstractmethod
    def mark_dispatched(self, key: str, task_id: str) -> bool:
        """Record that the callbacks of ``task_id`` were dispatched; return False if the record is not settled."""

    @abstractmethod
    def get(self, key: str) -> Record | None:
        """Return the record, or None if there is none."""

    def peek(self, key: str) -> Record | None:
        """Return what decides of a claim in the record, without marks and payload, or None if there is none.

        It is `get` at less cost, where a store has that. What remains of a lease may be short by what the call takes.
        """
        return self.get(key)

    @abstractmethod
    def delete(self, key: str) -> bool:
        """Delete the record of a key in any state, with its history, and return whether there was one."""

    @abstractmethod
    def scan(self, *, prefix: str = "", state: State | None = None) -> Iterator[Record]:
        """Iterate over the records whose keys begin with ``prefix``, in any order, without blocking the store.

        What cannot be read is passed by, with ``stores.base.pass_by_unreadable(key)``, for the commands to count.
        """

    def append_history(self, entries: Sequence[HistoryEntry]) -> None:  # noqa: B027 - a store need not keep them
        """Append to the histories of keys; each history keeps its newest ``records.HISTORY_LIMIT`` entries.

        No promise depends on histories. The method changes no record, need not be atomic, and may write an entry twice
        if a reply was lost. A history is kept for the time of its newest entry; `scan` never returns it.
        """

    def history(self, key: str) -> Sequence[PastEvent]:
        """Return the history of a key, oldest entry first, whether there is a record or not."""
        return ()

    def purge(self, limit: int | None = None) -> int:
        """Delete expired records and return their number; 0 where the server deletes them by itself.

        The store deletes in batches that hold no lock for long, so that workers need not stop meanwhile.

        Arguments:
            limit: About how many to delete at most (default: all).
        """
        return 0

    def pending_schema(self) -> str:
        """Return what `apply_schema` would do as text for people, or "" if there is nothing to do."""
        return ""

    def apply_schema(self) -> None:  # noqa: B027 - most stores need none
        """Create or upgrade what the store needs on its server; several processes may call it at the same time."""

    def usage(self, sample: Sequence[str] = ()) -> dict[str, int]:
        """Return how much space the records take, as far as the server reports it at little cost.

        The keys of the dict name the unit, as in ``memory_bytes``; each store documents its own. The dict is empty if
        the server reports nothing.

        Arguments:
            sample: Some keys of the store, for a server that can measure single records.
        """
        return {}

    def warnings(self) -> list[str]:
        """Return, for people, how the server is set up to forget records before their time; [] if nothing is known."""
        return []

    @abstractmethod
    def ping(self) -> None:
        """Return if the store can serve; else raise what `acquire` would raise."""

    def bounded(self, seconds: float) -> Store | None:
        """Return a store of the same records whose requests take at most so long each, or None: there is none.

        It is for callers that must not wait for this store's own time-outs. It is made once, and closed with this one.
        """
        return None

    def close(self) -> None:  # noqa: B027 - most stores have nothing to close
        """Close the connections of this process. The store opens new ones when it is used again."""
