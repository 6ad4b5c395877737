"""A lease while its work runs, the lease of the current run, and leases that a parent keeps for its child.

A lease is trusted until a deadline on this process's monotonic clock, counted from *before* the last request that the
store granted, less a margin: the store cannot have let it run out by then, however long the reply travelled. Past the
deadline the lease is in doubt, not lost: the store's next answer decides (the idea of river's leader election and of
Gray and Cheriton, "Leases", SOSP 1989).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import replace
from time import monotonic
from typing import Any

from ..errors import LeaseLost, StoreUnreachable
from ..stores.base import Store
from ..stores.records import Claim, Lease, Outcome, Reason, Record, Release, State

RENEWALS_PER_TTL = 3
#: Part of a ttl by which trust ends before the lease does, for clocks that tick at different speeds.
MARGIN = 0.1


class HeldLease:
    """A lease while its work runs: what a task sees as ``self.lease``.

    Arguments:
        store: Where the lease was acquired.
        lease: The lease.
        since: Monotonic time before the request that was granted.
        max_lease: Seconds after which it is not renewed any more, or None.
        lost_error: Which `LeaseLost` the methods raise.
        encode: Makes the outcome of a result, for `settle`; or None where nothing can be settled.
        result_ttl: Seconds that a result which `settle` recorded is kept.
    """

    __slots__ = (
        "asked",
        "began",
        "deadline",
        "due",
        "encode",
        "given_up",
        "lease",
        "lost",
        "lost_error",
        "open",
        "renewals",
        "result_ttl",
        "store",
        "until",
        "within",
    )

    def __init__(
        self,
        store: Store,
        lease: Lease,
        since: float,
        *,
        max_lease: float | None = None,
        lost_error: type[LeaseLost] = LeaseLost,
        encode: Callable[[object], Outcome] | None = None,
        result_ttl: float = 0.0,
    ) -> None:
        self.began = monotonic()
        #: seconds that the store took to grant it
        self.asked = self.began - since
        self.store = store
        self.lease = lease
        self.lost = False
        #: whether the body gave it up, while it goes on, to a message that carries the operation on
        self.given_up = False
        #: whether it was told that a run began under it, and not yet how that ended
        self.open = False
        self.lost_error = lost_error
        self.encode = encode
        self.result_ttl = result_ttl
        #: what `settle` wrote within the task's own transaction, in a tuple; None if nothing
        self.within: tuple[Any] | None = None
        self.until = since + max_lease if max_lease is not None else float("inf")
        #: how often the store has granted it anew
        self.renewals = -1  # the first grant is none
        self.trust(since)

    @property
    def ran(self) -> float:
        """Seconds since the lease was granted."""
        return monotonic() - self.began

    @property
    def doubtful(self) -> bool:
        """Whether the lease may have run out by now."""
        return monotonic() >= self.deadline

    @property
    def key(self) -> str:
        """The key of the operation."""
        return self.lease.key

    @property
    def fence(self) -> int:
        """The fencing token: rises with every lease of the key; 0 if the task runs unprotected."""
        return self.lease.fence

    def trust(self, since: float) -> None:
        """Trust the lease for its ttl from ``since`` on."""
        ttl = self.lease.claim.lease_ttl
        self.deadline = since + ttl * (1 - MARGIN)
        self.due = since + ttl / RENEWALS_PER_TTL
        self.renewals += 1

    def check(self) -> None:
        """Return if the lease is ours; ask the store where that is in doubt.

        Raises:
            errors.LeaseLost: somebody else may run the operation now, or has.
            StoreUnreachable: it is in doubt, and the store does not answer.
        """
        if not self.lost and self.fence and self.doubtful:
            self._ask()
        if self.lost:
            raise self._lost()

    def settle(self, result: Any, *, using: Any) -> None:
        """Record the task's result within its own open transaction, so that effect and record commit together.

        The store must keep its records in that transaction's database. Call it last: in SQL stores the record stays
        out of others' reach until the transaction ends. Whatever the body returns after the commit, ``result`` is the
        task's result; a body that raises after it has succeeded.

        Arguments:
            result: What the task returns, to this caller and to every duplicate.
            using: A connection of the store's driver, a SQLAlchemy ``Connection`` or ``Session``, or the alias of a
                Django database; on DynamoDB the list of items that you will pass to ``TransactWriteItems``.

        Raises:
            errors.LeaseLost: somebody else may run the operation now, or has; nothing was written. Let it roll your
                transaction back.
            ConfigurationError: the store cannot write there, or no transaction is open.
            StoreUnreachable: this run has no lease to settle (``on_store_error="run"``).
        """
        if self.lost:
            raise self._lost()
        if not self.fence or self.encode is None:
            raise StoreUnreachable(
                f"Expected a lease on {self.key!r} to settle, and this run is unprotected: the store did not answer "
                'when it began, and the task says on_store_error="run". Say "wait" where effects must happen once.'
            )
        try:
            self.store.settle_within(self.lease, self.encode(result), ttl=self.result_ttl, using=using)
        except LeaseLost:
            self.lost = True
            raise self._lost() from None
        self.within = (result,)

    def _lost(self) -> LeaseLost:
        if self.given_up:
            return self.lost_error(
                f"The lease on {self.key!r} (fence {self.fence}) was given up when this run published its retry. Stop "
                "here; the retry goes on in its place."
            )
        return self.lost_error(
            f"The lease on {self.key!r} (fence {self.fence}) was lost: its time ran out and another delivery may "
            "have taken over. Stop here; what this run does from now on is a duplicate's work."
        )

    def _ask(self) -> None:
        since = monotonic()
        if since < self.until:  # else to ask must not prolong what was to end
            if not self.store.renew([self.lease]):
                self.trust(since)
                return
            if self.within is None:
                self.lost = True
                return
        record = self.store.get(self.key)
        # A record that is gone is nobody else's. What the answer says holds for now alone.
        self.lost = record is not None and not self._ours(record)

    def _ours(self, record: Record) -> bool:
        if self.within is not None and record.state is State.COMPLETED:
            return record.fence == self.fence  # the transaction in which we settled was committed
        return record.state is State.IN_PROGRESS and record.owner == self.lease.owner

    def derived_key(self, name: str) -> str:
        """Return a key for another system (a payment gateway, say), the same on every run of this operation.

        Arguments:
            name: Tells several calls of one task apart.

        Returns:
            32 hexadecimal digits.
        """
        return hashlib.sha256(f"{self.key}\n{name}".encode("utf-8", "surrogatepass")).hexdigest()[:32]


_current: ContextVar[HeldLease | None] = ContextVar("celery_idempotent_lease", default=None)


def current_lease() -> HeldLease | None:
    """Return what the guarded function holds that is running here, or None: there is none.

    It has ``key``, ``fence``, ``lost``, ``check()``, ``settle(result, using=...)`` and ``derived_key(name)``, see
    `HeldLease`. It follows its code into coroutines, asyncio's tasks and ``asyncio.to_thread``, and not into threads
    that the code starts otherwise.
    """
    return _current.get()


@contextmanager
def running(holding: HeldLease) -> Iterator[None]:
    """Let `current_lease` return ``holding``."""
    token = _current.set(holding)
    try:
        yield
    finally:
        with suppress(ValueError):  # a coroutine that is thrown away ends in another context
            _current.reset(token)


# Speaking for a process that cannot: its parent renews and releases the lease that it took.
#
# The proof is the owner that the parent gave the delivery. A parent asks the store whether its child holds the key,
# since a delivery that waits for its turn holds nothing.


def renew(store: Store, claim: Claim) -> bool:
    """Let the lease last that the claim's owner holds, and tell whether there is one.

    Raises:
        StoreError: the store does not answer.
    """
    record = store.get(claim.key)
    if record is None or not _holds(record, claim):  # to renew would bring a record back that is gone
        return False
    known = replace(claim, holder=record.holder, task_id=record.task_id, fingerprint=record.fingerprint)
    return not store.renew([Lease(known, record.fence)])


def release(store: Store, claim: Claim, reason: Reason) -> Record | None:
    """Release the lease of a child that is gone; return what the record said, or None if it held nothing any more.

    Raises:
        StoreError: the store does not answer.
    """
    record = store.get(claim.key)
    # What the child has released itself, or never held, can be released as well, and is nobody's news.
    released = store.release(Lease(claim, 0), Release(reason))
    return record if released and record is not None and _holds(record, claim) else None


def _holds(record: Record, claim: Claim) -> bool:
    return record.state is State.IN_PROGRESS and record.owner == claim.owner
