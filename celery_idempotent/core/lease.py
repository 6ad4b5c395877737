"""Leases of this process: the lease of the current run, and those that a parent renews and releases for its child.

A run that publishes tasks derives their ids from its operation, so that the next run of it publishes the same.

A holder trusts its lease until a deadline on its own monotonic clock: one ttl less a margin, counted from *before* the
last request that the store granted. The store cannot have let the lease expire by then, however long its reply took.
Past the deadline the lease is in doubt, and the store's next reply decides (Gray and Cheriton, "Leases", SOSP 1989;
river's leader election).
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from copy import copy
from dataclasses import replace
from time import monotonic
from typing import Any
from uuid import UUID

from ..errors import ConfigurationError, LeaseLost, StoreError, StoreUnreachable
from ..stores.base import Store
from ..stores.records import Claim, Lease, Outcome, Reason, Record, Release, State
from ..stores.transactions import AsyncTransaction, OpenTransaction, in_greenlet_of
from .keys import find_address

RENEWALS_PER_TTL = 3
#: Part of a ttl by which trust ends before the lease does, for clocks that tick at different speeds.
MARGIN = 0.1
#: How often the store is asked whether a lease holds whose answers come too late to be trusted.
LOOKS = 3


class HeldLease:
    """The lease of a run: ``self.lease`` in a task.

    Arguments:
        store: The store that granted the lease.
        lease: The lease.
        since: Monotonic time before the request that was granted.
        max_lease: Seconds after which the lease is no longer renewed, or None.
        lost_error: The class of `LeaseLost` that the methods raise.
        encode: A function that turns a result into an outcome, for `settle`; None where nothing can be settled.
        result_ttl: Seconds for which a result that `settle` recorded is kept.
        task_ids: Derives the ids of the tasks that the run publishes; None where they are random.
    """

    __slots__ = (
        "asked",
        "began",
        "deadline",
        "due",
        "encode",
        "fence",
        "given_back",
        "given_up",
        "key",
        "lease",
        "lost",
        "lost_error",
        "open",
        "passed_over",
        "pid",
        "renewals",
        "renewed",
        "result_ttl",
        "settled_at",
        "store",
        "task_ids",
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
        task_ids: TaskIds | None = None,
    ) -> None:
        self.began = monotonic()
        #: seconds that the store took to grant it
        self.asked = self.began - since
        self.store = store
        self.lease = lease
        #: the key of the operation
        self.key = lease.claim.key
        #: the fencing token, which rises with every lease on the key; 0 if the task runs unprotected
        self.fence = lease.fence
        self.lost = False
        #: whether the body gave it up, while it goes on, to a message that carries the operation on
        self.given_up = False
        #: whether its run has ended without a record, so that another delivery may run
        self.given_back = False
        #: whether a run began under it, and has not ended
        self.open = False
        #: the process that holds it: a child that its body forks does not
        self.pid = os.getpid()
        self.lost_error = lost_error
        self.encode = encode
        self.result_ttl = result_ttl
        self.task_ids = task_ids
        #: the results that were settled within the task's own transactions, by their payloads; None if none was
        self.within: dict[bytes, Any] | None = None
        #: whether renewals may pass the record over, since it is being settled in an open transaction
        self.passed_over = False
        #: monotonic time of the last of them
        self.settled_at = since
        self.until = since + max_lease if max_lease is not None else float("inf")
        #: how often the store has renewed it
        self.renewals = -1  # the first grant is none
        self.trust(since)

    @property
    def doubtful(self) -> bool:
        """Whether the lease may have expired."""
        return monotonic() >= self.deadline

    def result(self, returned: object) -> Any:
        """Return the result of a body that ``returned``: what it settled itself last, if it did."""
        return list(self.within.values())[-1] if self.within else returned

    def keep(self, recorded: bytes) -> None:
        """Of the results that the body settled, let the recorded one count."""
        if self.within and recorded in self.within:
            self.within = {recorded: self.within[recorded]}

    @property
    def outlived_result(self) -> bool:
        """Whether a record that is gone was the result's, since the lease's would be there for longer."""
        claim = self.lease.claim
        leased = self.renewed + claim.lease_ttl * (1 - MARGIN) + claim.keep_ttl
        return self.settled_at + self.result_ttl <= monotonic() < leased

    def trust(self, since: float) -> None:
        """Trust the lease for its ttl from ``since`` on."""
        ttl = self.lease.claim.lease_ttl
        self.renewed = since
        if not self.passed_over:
            self.deadline = since + ttl * (1 - MARGIN)
        self.due = since + ttl / RENEWALS_PER_TTL
        self.renewals += 1

    def check(self) -> None:
        """Return if this run still holds the lease; send a request to the store if that is in doubt.

        Raises:
            errors.LeaseLost: another delivery may run the operation now, or has run it.
            StoreUnreachable: the lease is in doubt, and the store does not reply, or too late each time.
        """
        if not (self.lost or self.given_back) and self.fence and self.doubtful:
            self._look_up_in_time()
        if self.lost or self.given_back:
            raise self._lost()

    def settle(self, result: object, *, using: OpenTransaction | str | list[Any]) -> None:
        """Record the task's result within its own open transaction, so that effect and record commit together.

        The store must keep its records in the database of that transaction. Call this last: a SQL store locks the
        record until the transaction ends. After the commit the task has succeeded with ``result``, whatever its body
        returns or raises.

        Arguments:
            result: The result of the task, for this caller and for every duplicate.
            using: A connection of the store's driver, a SQLAlchemy ``Connection`` or ``Session``, or a connection of
                Django or its alias; on DynamoDB the list of items that you will pass to ``TransactWriteItems``.

        Raises:
            errors.LeaseLost: another delivery may run the operation now, or has run it, or an earlier transaction of
                this run has settled it and was committed. Let the error roll your transaction back.
            ConfigurationError: the store cannot write there, no transaction is open, or the task has ``result_ttl=0``.
            StoreUnreachable: this run has no lease to settle (``on_store_error="run"``).
        """
        outcome = self._outcome(result)
        self.passed_over = True  # first: a renewal may come between the request and its reply
        try:
            self.store.settle_within(self.lease, outcome, ttl=self.result_ttl, using=using)
        except LeaseLost:
            raise self._refused() from None
        if self.within is not None:
            self._check_earlier()
        self._note_within(outcome, result)

    async def asettle(self, result: object, *, using: AsyncTransaction) -> None:
        """Record the result within a coroutine's own open transaction; otherwise as `settle`.

        Arguments:
            result: As for `settle`.
            using: An ``AsyncSession`` or ``AsyncConnection`` of SQLAlchemy, over psycopg or asyncpg, for a store in
                PostgreSQL.

        Raises:
            errors.LeaseLost: as from `settle`, and so are the others.
        """
        import asyncio  # which a process without coroutines need not load

        outcome = await asyncio.to_thread(self._outcome, result)  # which may be put into a file
        self.passed_over = True
        try:
            await in_greenlet_of(
                using,
                lambda opened: self.store.settle_within(self.lease, outcome, ttl=self.result_ttl, using=opened),
            )
        except LeaseLost:
            raise await asyncio.to_thread(self._refused) from None
        if self.within is not None:
            await asyncio.to_thread(self._check_earlier)
        self._note_within(outcome, result)

    def _outcome(self, result: object) -> Outcome:
        """Return what to record, where this run may settle."""
        if self.lost:
            raise self._lost()
        if self.encode is None:
            raise StoreUnreachable(
                f"Expected a lease on {self.key!r} to settle, and this run is unprotected: the store did not answer "
                'when it began, and the task has on_store_error="run". Set "wait" where effects must happen once.'
            )
        if not self.result_ttl:
            raise ConfigurationError(
                f"Expected a result to be remembered where it is settled, and {self.key!r} has result_ttl=0: a "
                'redelivery would repeat what the transaction does. Write result_ttl="24h".'
            )
        return self.encode(result)

    def _refused(self) -> ConfigurationError | LeaseLost:
        """Return the error for a transaction in which the store knew no lease of this run."""
        if self._holds_in_the_store():
            return ConfigurationError(
                f"settle: expected using= to be in a transaction that began after this run of {self.key!r}, got "
                "one that sees the record as it was before, as an earlier task may have left it open. Roll it "
                "back, and begin one in the body."
            )
        self.lost = True
        return self._lost()

    def _check_earlier(self) -> None:
        """Raise if an earlier transaction that settled was committed, though the reply to that may have been lost.

        The present one is open: what others see is an earlier one's.
        """
        record = self.store.get(self.key)
        if record is not None and record.state is State.COMPLETED and self._is_owner(record):
            raise self.lost_error(
                f"{self.key!r} was settled by an earlier transaction of this run, which was committed after all. "
                "Have this error roll the present one back: the task has succeeded with what was settled first."
            )

    def _note_within(self, outcome: Outcome, result: object) -> None:
        self.within, self.settled_at = {**(self.within or {}), outcome.payload: result}, monotonic()
        # A renewal must not put the lease in the place of a result that has expired.
        self.lease = replace(self.lease, claim=replace(self.lease.claim, revive=False))

    def _lost(self) -> LeaseLost:
        if self.given_up:
            return self.lost_error(
                f"The lease on {self.key!r} (fence {self.fence}) was given up when this run published its retry. Stop "
                "here; the retry goes on in its place."
            )
        if self.given_back:
            return self.lost_error(
                f"The lease on {self.key!r} (fence {self.fence}) was given back when its run ended. Stop here; another "
                "delivery may run."
            )
        return self.lost_error(
            f"The lease on {self.key!r} (fence {self.fence}) was lost: its time ran out and another delivery may "
            "have taken over. Stop here; what this run does from now on is a duplicate's work."
        )

    def _look_up_in_time(self) -> None:
        """Ask the store, and again where its answer is out of date: this process may be stopped as that comes."""
        for _ in range(LOOKS):
            since = monotonic()
            self._look_up()
            if self.lost or monotonic() < since + self.lease.claim.lease_ttl * (1 - MARGIN):
                return
        raise StoreUnreachable(f"The store's answers whether the lease on {self.key!r} holds came too late to count.")

    def _look_up(self) -> None:
        since = monotonic()
        if since < self.until:  # else the question must not prolong what was to end
            if not self.store.renew([self.lease]):
                self.trust(since)
                return
            if self.within is None:
                self.lost = True
                return
        record = self.store.get(self.key)
        # A record that is gone is no other holder's. The answer holds for now alone.
        self.lost = record is not None and not self._is_owner(record)

    def _holds_in_the_store(self) -> bool:
        """Return whether the store itself knows the lease to be this run's."""
        try:
            record = self.store.get(self.key)
        except StoreError:
            return False  # it is not known
        return record is not None and record.state is State.IN_PROGRESS and record.owner == self.lease.owner

    def _is_owner(self, record: Record) -> bool:
        if self.within is not None and record.state is State.COMPLETED:
            return record.fence == self.fence  # the transaction in which we settled was committed
        return record.state is State.IN_PROGRESS and record.owner == self.lease.owner

    def derived_key(self, name: str) -> str:
        """Return a key for another system, such as a payment gateway: the same on every run of this operation.

        Arguments:
            name: A name for the call, if the task makes several.

        Returns:
            32 hexadecimal digits.

        Raises:
            ConfigurationError: the name is None, or the address of an object, which is another one on the next run.
        """
        given: object = name  # which need not be the text that it should be
        text = f"{given}"
        if given is None or find_address(text):
            raise ConfigurationError(
                f"derived_key: expected a name that each run of {self.key!r} gives the same call and no other, got "
                f"{text}: write the name of what is called, or the id of what it is called for"
            )
        return _digest(f"{self.key}\n{text}")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


class TaskIds:
    """The ids of the tasks that a run publishes: the same on every run of its operation.

    Of equal calls, the n-th has the n-th id. Safe to use from several threads.

    Arguments:
        key: What names the operation.
        keep: Seconds for which the operation is remembered.
        note: Called with the name and the id of what was published.
    """

    def __init__(self, key: str, keep: float, note: Callable[[str, str], None]) -> None:
        self.keep, self.note = keep, note
        self._path: tuple[str, ...] = (key,)
        self._lock = threading.Lock()
        #: by call: how many numbers were given out, and which of them came back
        self._given: Counter[tuple[str, ...]] = Counter()
        self._free: defaultdict[tuple[str, ...], set[int]] = defaultdict(set)

    def within(self, key: str) -> TaskIds:
        """Return the ids of another operation that is run within this one, and need not be run again with it."""
        inner = copy(self)
        inner._path = (*self._path, key)
        return inner

    @contextmanager
    def next(self, *call: str) -> Iterator[str]:
        """Yield the id for a call; if publishing raises, the next of its kind gets that id.

        Arguments:
            call: What equal calls share.
        """
        kind = (*self._path, *call)
        with self._lock:
            number = min(self._free.get(kind, ()), default=self._given[kind] + 1)
            if number > self._given[kind]:
                self._given[kind] = number
            else:
                self._free[kind].remove(number)
        try:
            yield self.derive(*call, str(number))
        except BaseException:
            with self._lock:
                self._free[kind].add(number)
            raise

    def derive(self, *parts: str) -> str:
        """Return an id, in the form of a UUID, that follows from the operation and these parts."""
        return str(UUID(_digest(json.dumps([*self._path, *parts]))))


class LeaseSlot:
    """The place of a lease that a run takes once it has begun, in whichever of its threads and contexts.

    Arguments:
        outer: What `current_lease` goes by while there is none in it (default: there is none then).
    """

    __slots__ = ("ended", "lease", "outer")

    def __init__(self, outer: HeldLease | LeaseSlot | None = None) -> None:
        self.lease: HeldLease | None = None
        self.outer = outer
        #: whether there will be none in it any more
        self.ended = False

    def end(self) -> None:
        """Take the lease out for good."""
        self.lease, self.ended = None, True


_current: ContextVar[HeldLease | LeaseSlot | None] = ContextVar("celery_idempotent_lease", default=None)


def current_lease() -> HeldLease | None:
    """Return the lease of the guarded function that is running here, or None if there is none.

    `HeldLease` has ``key``, ``fence``, ``lost``, ``check()``, ``settle(result, using=...)``, ``asettle`` for
    coroutines, and ``derived_key(name)``.
    The lease is also found in coroutines, in asyncio's tasks and in ``asyncio.to_thread``, but not in threads that the
    function starts otherwise. What a coroutine function leaves running finds none once the function has ended.
    """
    found = _current.get()
    while isinstance(found, LeaseSlot):
        found = found.outer if found.lease is None else found.lease
    return found


def slot_within() -> LeaseSlot:
    """Return the place of a lease for which there is, before it and after it, the one that is current here."""
    outer = _current.get()
    while isinstance(outer, LeaseSlot) and outer.ended:  # else each request of a connection would keep the one before
        outer = outer.outer
    return LeaseSlot(outer)


class running:  # noqa: N801 - a function in its use, and a class for what contextlib's generators cost
    """Have `current_lease` return ``holding`` meanwhile, or what is in it by then."""

    __slots__ = ("_holding", "_token")

    def __init__(self, holding: HeldLease | LeaseSlot) -> None:
        self._holding = holding

    def __enter__(self) -> None:
        holding, outer = self._holding, None if _current.get() is None else current_lease()
        ids = None if outer is None else outer.task_ids
        if ids is not None and isinstance(holding, HeldLease) and holding.task_ids is None:
            holding.task_ids = ids.within(holding.key)
        self._token = _current.set(holding)

    def __exit__(self, *error: object) -> None:
        try:
            _current.reset(self._token)
        except ValueError:  # a coroutine that is thrown away ends in another context
            pass


# A parent renews and releases the lease of a child that cannot.
#
# The proof is the owner id that the parent gave the delivery. The parent first reads whether the child holds the key,
# since a delivery that waits for its turn holds nothing.


def renew(store: Store, claim: Claim) -> bool:
    """Renew the lease that the owner of the claim holds, and return whether it holds one.

    Raises:
        StoreError: the store does not reply.
    """
    record = store.get(claim.key)
    if record is None or not _holds(record, claim):  # to renew would bring a record back that is gone
        return False
    known = replace(claim, holder=record.holder, task_id=record.task_id, fingerprint=record.fingerprint)
    return not store.renew([Lease(known, record.fence)])


def release(store: Store, claim: Claim, reason: Reason) -> Record | None:
    """Release the lease of a dead child; return its record as it was, or None if the child held nothing.

    Raises:
        StoreError: the store does not reply.
    """
    record = store.get(claim.key)
    # What the child has released itself, or never held, can be released as well, and makes no event.
    released = store.release(Lease(claim, 0), Release(reason))
    return record if released and record is not None and _holds(record, claim) else None


def _holds(record: Record, claim: Claim) -> bool:
    return record.state is State.IN_PROGRESS and record.owner == claim.owner
