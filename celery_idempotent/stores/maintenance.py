"""Maintenance of a store: delete by prefix, purge and copy, a batch after another so that no caller waits for it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice

from ..errors import ConfigurationError, RecordUnreadable, StoreError
from .base import Store, Unreadable, unreadable_reported_to
from .history import is_operators
from .records import (
    NO_CRASH_LOOP,
    Claim,
    HistoryEntry,
    Lease,
    Outcome,
    Record,
    Refusal,
    State,
    is_reservation,
    new_owner,
)

#: Keys that are read ahead of what is deleted.
DELETE_BATCH = 100


@dataclass(frozen=True, slots=True)
class MatchCounts:
    """How many records there are, by state, how many of them a live lease holds, and how many more cannot be read."""

    by_state: dict[State, int]
    held: int = 0
    unreadable: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return sum(self.by_state.values())


def is_held(record: Record) -> bool:
    """Return whether a live lease is on the key: its holder may be running the operation."""
    return record.state is State.IN_PROGRESS and record.remaining > 0


def is_settled(record: Record) -> bool:
    """Return whether the operation has ended for good."""
    return record.state in (State.COMPLETED, State.FAILED)


def count(store: Store, prefix: str, state: State | None = None) -> MatchCounts:
    """Return how many records have a key that begins with ``prefix``; reads all of the store's."""
    states: Counter[State] = Counter()
    held, unreadable = 0, Unreadable()
    with unreadable_reported_to(unreadable.add):
        for record in store.scan(prefix=prefix, state=state):
            states[record.state] += 1
            held += is_held(record)
    return MatchCounts(dict(states), held, unreadable.count)


def forget(
    store: Store,
    prefix: str,
    state: State | None = None,
    *,
    held_too: bool = False,
    trace: Callable[[Record], Trace] | None = None,
) -> Iterator[bool]:
    """Forget the records whose key begins with ``prefix``; yield for each whether it was forgotten or left alone.

    Left alone is what a live lease holds, and what cannot be read. Each record is looked at again right before it is
    deleted, since a scan may return what was true a while ago.

    Arguments:
        store: The store.
        prefix: How the keys begin, namespace included.
        state: Only records in this state (default: any).
        held_too: Also those that a live lease holds. A living holder writes its record again with its next renewal,
            unless another delivery has taken the key by then: both run.
        trace: Makes the entry of a key's history that names the operator (default: none is written).

    Raises:
        StoreError: the store cannot serve; what was forgotten before stays forgotten.
    """
    found = iter(store.scan(prefix=prefix, state=state))
    while keys := [record.key for record in islice(found, DELETE_BATCH)]:
        for key in keys:
            try:
                record = store.get(key)
            except RecordUnreadable:
                yield False
                continue
            if record is not None and state in (None, record.state):
                yield (held_too or not is_held(record)) and erase(store, key, trace and trace(record))


def erase(store: Store, key: str, trace: Trace | None = None) -> bool:
    """Delete a record and what deliveries did to it, and return whether there was one.

    With a trace, the history keeps what operators did, and has one more entry.

    Arguments:
        store: The store.
        key: The record's.
        trace: The operator's entry for its history (default: none is written).

    Raises:
        StoreError: the store cannot serve.
    """
    if trace is None:
        return store.delete(key)
    earlier = _by_operators(store, key, trace.entry.keep)
    known = store.delete(key)
    trace.leave(store, *earlier)
    return known


def erase_leftovers(store: Store, key: str, keep: float) -> None:
    """Delete what is left of a key without a record, as in a cache, but for what operators did to it.

    Arguments:
        store: The store.
        key: The key.
        keep: Seconds for which to keep what operators did, counted from when they did it.

    Raises:
        StoreError: the store cannot serve.
    """
    earlier = _by_operators(store, key, keep)
    store.delete(key)
    if earlier:
        store.append_history(earlier)


def _by_operators(store: Store, key: str, keep: float) -> list[HistoryEntry]:
    try:
        return [HistoryEntry(key, past.text, past.age, keep) for past in store.history(key) if is_operators(past.text)]
    except StoreError:  # there is none, or it cannot be read: the record can be deleted all the same
        return []


@dataclass(frozen=True, slots=True)
class Trace:
    """The entry that an operator leaves in the history of a key.

    Arguments:
        entry: The entry.
        failed: Called with the error of a store that does not take it; what was done stays done.
    """

    entry: HistoryEntry
    failed: Callable[[StoreError], object]

    def leave(self, store: Store, *earlier: HistoryEntry) -> None:
        """Write the entry, behind those that are to be kept."""
        try:
            store.append_history([*earlier, self.entry])
        except StoreError as error:
            self.failed(error)


#: Records in one batch.
BATCH = 1000
#: Seconds between two batches, in which others are served.
PAUSE = 0.05


def purge(store: Store, limit: int | None = None, *, batch: int = BATCH, pause: float = PAUSE) -> int:
    """Remove what has expired from a store, and return how much.

    Arguments:
        store: The store; one whose server expires by itself answers 0.
        limit: Remove about so many and no more (default: all).
        batch: How many to request from the store at a time.
        pause: Seconds to rest between two batches.

    Raises:
        StoreError: the store cannot serve; what was removed before stays removed.
    """
    return sum(purge_in_batches(store, limit, batch=batch, pause=pause))


def purge_in_batches(
    store: Store, limit: int | None = None, *, batch: int = BATCH, pause: float = PAUSE
) -> Iterator[int]:
    """Do as `purge` does, and yield how much each batch removed."""
    left = limit
    while left is None or left > 0:
        wanted = batch if left is None else min(batch, left)
        removed = store.purge(wanted)
        yield removed
        left = None if left is None else left - removed
        # A batch may come back short because others hold some of its rows. Nor is the last record to be chased: while
        # this goes on, more expire, and on a busy store that would never end.
        if removed < wanted / 2 or left == 0:
            return
        time.sleep(pause)


#: Seconds for which a record is claimed that is about to be written.
COPYING = 10.0


@dataclass(frozen=True, slots=True)
class CopyCounts:
    """What `copy` has done.

    Arguments:
        copied: Records that were written.
        known: Those that the target has as done already, with this outcome or another one.
        held: Operations that a live lease holds, in either store, and that are not copied: they are being done, or
            their holder was killed, or a copy was. Copy again until there is none.
        unreadable: Records that cannot be read, in either store, and those for which the source reports no retention.
    """

    copied: int = 0
    known: int = 0
    held: int = 0
    unreadable: int = 0


def copy(
    source: Store,
    target: Store,
    prefix: str,
    *,
    rename: Callable[[str], str | None] | None = None,
    max_age: float | None = None,
) -> CopyCounts:
    """Copy what is done, records of completed and of remembered failed operations, to another store or other keys.

    Each is kept there for as long as it would have been here. It may be repeated: what is known there stays as it is.
    Histories, counts of crashes, reservations and what is in progress are not copied.

    Arguments:
        source: The store that has them.
        target: The store that gets them; with ``rename`` it may be the same one.
        prefix: How the keys begin, namespace included.
        rename: Returns the key in the target, or None to leave a record out (default: the same key).
        max_age: Only what has ended within so many seconds (default: all), as since an earlier copy began.

    Raises:
        ConfigurationError: within one store, a new key begins with the prefix too: it would be renamed again.
        StoreError: one of the stores cannot serve; what was copied before stays copied.
    """
    copied = known = held = 0
    unreadable = Unreadable()
    one = True if source is target else None  # not known yet: one store may have been opened twice
    with unreadable_reported_to(unreadable.add):
        for record in source.scan(prefix=prefix):
            if not is_settled(record):
                held += is_held(record) and not is_reservation(record.key)
                continue
            key = rename(record.key) if rename else record.key
            if key is None or (max_age is not None and record.age > max_age):
                continue
            if one is None and key != record.key and key.startswith(prefix):
                one = _is_one(source, target, key)
            if one and key.startswith(prefix):
                raise ConfigurationError(
                    f"Expected rename to return a key that does not begin with {prefix!r}, got {key!r} of "
                    f"{record.key!r}: within one store it would be copied again. Give a longer prefix, as of one task."
                )
            if not record.retention:
                unreadable.add(record.key)
                continue
            try:
                refusal = _write(record, target, key)
            except RecordUnreadable:
                unreadable.add(key)
                continue
            copied += refusal is None
            known += refusal is not None and is_settled(refusal.record)
            held += refusal is not None and not is_settled(refusal.record)
    return CopyCounts(copied, known, held, unreadable.count)


def _write(record: Record, target: Store, key: str) -> Refusal | None:
    """Settle a key as a record has it, or return why that was refused."""
    claim = Claim(
        key=key,
        owner=new_owner(),
        lease_ttl=COPYING,
        keep_ttl=COPYING,
        task_id=record.task_id,
        fingerprint=record.fingerprint,
        max_crashes=NO_CRASH_LOOP,  # what has crashed before is done all the same
    )
    answer = target.acquire(claim)
    there: frozenset[str] = frozenset()
    if isinstance(answer, Lease):
        target.settle(answer, Outcome(record.state, record.payload), ttl=record.retention)
    elif (answer.record.state, answer.record.payload) != (record.state, record.payload):
        return answer
    else:  # perhaps of an earlier copy, since which more were dispatched
        there = answer.record.dispatched
    for task_id in sorted(record.dispatched - there, key=lambda each: (each != record.task_id, each)):
        target.mark_dispatched(key, task_id)
    return answer if isinstance(answer, Refusal) else None


def _is_one(source: Store, target: Store, key: str) -> bool:
    """Return whether what is written to one store is in the other."""
    probe = f"{key}:~copy"
    try:
        target.acquire(Claim(key=probe, owner=new_owner(), lease_ttl=COPYING, keep_ttl=COPYING))
        return source.get(probe) is not None
    finally:
        target.delete(probe)


#: The beginning of keys, the default of `idempotency_namespace`.
NAMESPACE = "idem"


@dataclass(frozen=True, slots=True)
class NamedStore:
    """A store that an app or a command line uses.

    Arguments:
        name: What to call it; no password in it.
        store: The store.
        namespaces: How the keys of its user begin there, without the colon.
        lease_ttls: Seconds a lease lasts, by the name of the task; of the tasks that are known.
        keep_ttls: Seconds for which a history is kept, alike.
    """

    name: str
    store: Store
    namespaces: tuple[str, ...] = (NAMESPACE,)
    lease_ttls: Mapping[str, float] = field(default_factory=dict, compare=False)
    keep_ttls: Mapping[str, float] = field(default_factory=dict, compare=False)

    @contextmanager
    def unreadable_reported_to(self) -> Iterator[Unreadable]:
        """Count what scans pass by meanwhile; of a database that others use too, what may be a record by its key."""
        found, begins = Unreadable(), tuple(f"{name}:" for name in self.namespaces)
        with unreadable_reported_to(lambda key: found.add(key) if key.startswith(begins) else None):
            yield found

    def meant_key(self, typed: str) -> str | None:
        """Return the key that was typed without its namespace or its empty scope, if there is such a key.

        Raises:
            StoreError: the store could not be read.
        """
        whole = [typed, *self._whole(typed)]
        unscoped = ["::".join(key.rsplit(":", 1)) for key in whole if key.count(":") == 2]
        return next((key for key in [*whole[1:], *unscoped] if self.store.get(key) is not None), None)

    def meant_prefix(self, typed: str) -> str | None:
        """Return the prefix that was typed without its namespace, if there are such keys.

        Raises:
            StoreError: the store could not be read.
        """
        return next(
            (prefix for prefix in self._whole(typed) if any(True for _ in self.store.scan(prefix=prefix))), None
        )

    def _whole(self, typed: str) -> list[str]:
        return [f"{name}:{typed}" for name in self.namespaces if not typed.startswith(f"{name}:")]
