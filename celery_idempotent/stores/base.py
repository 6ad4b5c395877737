"""The contract between the algorithm and whatever remembers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

from ..errors import ConfigurationError
from .records import Claim, HistoryEntry, Lease, Outcome, PastEvent, Record, Refusal, Release, State

__all__ = ["Store"]


class Store(ABC):
    """Remember which operations are done, and which are being done.

    Promises, checked for every store by `celery_idempotent.testing.StoreContract`:

    1. Of all callers that acquire a key at once, one gets the lease.
    2. Every write by a holder is refused once the lease was taken over, settled, or purged and made anew. A record that
       is gone and not made anew does not refuse: what the holder did must not be done again because a server forgot.
    3. acquire, renew, settle and release are idempotent for the same owner: a reply that was lost may be asked for
       again.
    4. The fences of one key only rise, also across deletion of the record (a store says where it is weaker).
    5. A settled record is never settled again with another outcome, and is forgotten after its ttl, not before.
    6. Expiry is decided by the store's clock; a worker whose clock is wrong takes nothing early.
    7. A store may be used from several threads, and after a fork.

    Every verb raises `StoreUnreachable` if the store cannot serve now, `StoreRefused` if it will not serve us, and
    `RecordUnreadable` if what it holds under the key is no record of ours. What each verb decides is in
    `celery_idempotent.stores.rules`, in Python; a store that decides on its server is held against it by the tests.
    """

    #: Whether the store keeps what is noted; those that do override `append_history` and `history`.
    keeps_history = False

    @abstractmethod
    def acquire(self, claim: Claim) -> Lease | Refusal:
        """Take the lease on ``claim.key``, or answer why not with the record in the way; atomic."""

    @abstractmethod
    def renew(self, leases: Sequence[Lease]) -> Sequence[Lease]:
        """Let each lease last its ttl from now on, and return those that are lost; one round trip for all."""

    def shard(self, key: str) -> str:
        """Return which part of the store has a key, where parts can fail apart; asks nobody and never raises.

        What is renewed together is of one part, so that leases do not run out because another part is down.
        """
        return ""

    @abstractmethod
    def settle(self, lease: Lease, outcome: Outcome, *, ttl: float) -> None:
        """Record how the operation ended, to be kept for ``ttl`` seconds.

        Raises:
            errors.LeaseLost: the lease is not ours any more; nothing was written.
        """

    def settle_within(self, lease: Lease, outcome: Outcome, *, ttl: float, using: Any) -> None:
        """Record how the operation ended in the caller's own open transaction: it counts when that commits.

        Arguments:
            lease: The lease.
            outcome: How the operation ended.
            ttl: Seconds the record is kept.
            using: What the caller has of the transaction; which kinds are taken is the store's to say.

        Raises:
            errors.LeaseLost: the lease is not ours any more; nothing was written, and the caller should roll back.
            ConfigurationError: the store cannot write there, or there is no transaction open.
        """
        raise ConfigurationError(
            f"Expected a store that keeps its records where the task's transaction is, got a {type(self).__name__}. "
            "Use a postgresql:// or sqlite:// store in the same database as the task's own rows."
        )

    @abstractmethod
    def release(self, lease: Lease, release: Release) -> bool:
        """Give the lease back unsettled, and tell whether it was still ours.

        Only ``lease.key`` and ``lease.owner`` are looked at, so that a process that never saw the fence can release for
        a dead one.
        """

    def mark_shutdown(self, lease: Lease) -> bool:
        """Note that the holder's worker is about to end, and tell whether the lease is still the holder's.

        A lease that runs out after that was cut off by the shutdown, which is no crash. It ends when it would have
        ended anyway. Only ``lease.key`` and ``lease.owner`` are looked at. Where a store does not do it (this default),
        a crash is counted.
        """
        return False

    @abstractmethod
    def mark_dispatched(self, key: str, task_id: str) -> bool:
        """Remember that what ``task_id`` sets off was dispatched; false if the record is not a settled one."""

    @abstractmethod
    def get(self, key: str) -> Record | None:
        """Return the record, or None if the store knows nothing of the key."""

    @abstractmethod
    def delete(self, key: str) -> bool:
        """Forget a key whatever its state, and tell whether there was a record to forget; for operators.

        Its history is forgotten too.
        """

    @abstractmethod
    def scan(self, *, prefix: str = "", state: State | None = None) -> Iterator[Record]:
        """Iterate over the records whose key begins with ``prefix``, in no order, without blocking the store."""

    def append_history(self, entries: Sequence[HistoryEntry]) -> None:  # noqa: B027 - a store need not keep them
        """Add to the histories of keys what happened to them; each keeps its newest ``records.HISTORY_LIMIT`` entries.

        No promise hangs on it. It touches no record, need not be atomic, and may write an entry twice if its reply was
        lost. A history is kept for as long as its newest note is to be kept; `scan` never shows it.
        """

    def history(self, key: str) -> Sequence[PastEvent]:
        """Return what was noted of a key, oldest first; its record may be there or not."""
        return ()

    def purge(self, limit: int | None = None) -> int:
        """Remove what has expired and return how much; 0 where the server expires by itself.

        Works in batches that hold no lock for long, so that it may run beside everything else.

        Arguments:
            limit: Remove about so many and no more (default: all).
        """
        return 0

    def pending_schema(self) -> str:
        """Return what `apply_schema` would do, as text for people; "" if there is nothing to do."""
        return ""

    def apply_schema(self) -> None:  # noqa: B027 - most stores need none
        """Create what the store needs on its server, or upgrade it; safe to repeat, also at the same time."""

    def usage(self, sample: Sequence[str] = ()) -> dict[str, int]:
        """Return what the server tells of the room that the records take, asked cheaply; empty if it tells nothing.

        The names say the unit, as in ``memory_bytes``; which there are is the store's to say.

        Arguments:
            sample: Some of the store's keys, for a server that can measure single records.
        """
        return {}

    @abstractmethod
    def ping(self) -> None:
        """Return if the store can serve; raise what an acquire would raise if not."""

    def close(self) -> None:  # noqa: B027 - most stores have nothing to close
        """Close the connections of this process; the store opens new ones if it is used again."""
