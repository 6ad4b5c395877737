"""Forget every record whose key begins with something, one at a time, so that nobody waits for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

from ..errors import RecordUnreadable, StoreError
from ..notes import Note, is_operators
from ..records import Record, State
from .base import Store

__all__ = ["Matches", "Trace", "count", "erase", "forget", "is_held"]

#: Keys that are read ahead of what is deleted.
BATCH = 100


@dataclass(frozen=True, slots=True)
class Matches:
    """How many records there are, by state, and how many of them a live lease holds."""

    by_state: dict[State, int]
    held: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return sum(self.by_state.values())


def is_held(record: Record) -> bool:
    """Tell whether somebody holds a live lease on the key, and may be running the operation."""
    return record.state is State.IN_PROGRESS and record.remaining > 0


def count(store: Store, prefix: str, state: State | None = None) -> Matches:
    """Return how many records have a key that begins with ``prefix``; reads all of the store's."""
    states: Counter[State] = Counter()
    held = 0
    for record in store.scan(prefix=prefix, state=state):
        states[record.state] += 1
        held += is_held(record)
    return Matches(dict(states), held)


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
    deleted, since a scan may tell what was true a while ago.

    Arguments:
        store: The store.
        prefix: How the keys begin, namespace included.
        state: Only records in this state (default: any).
        held_too: Also those that a live lease holds. A living holder writes its record again with its next renewal,
            unless another delivery has taken the key by then: both run.
        trace: Makes the entry of a key's history that says who forgot it (default: none is written).

    Raises:
        StoreError: the store cannot serve; what was forgotten before stays forgotten.
    """
    found = iter(store.scan(prefix=prefix, state=state))
    while keys := [record.key for record in islice(found, BATCH)]:
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
        trace: Who deletes it (default: nobody who leaves one).

    Raises:
        StoreError: the store cannot serve.
    """
    if trace is None:
        return store.delete(key)
    try:
        earlier = [noted for noted in store.history(key) if is_operators(noted.text)]
    except StoreError:  # there is none, or it cannot be read: the record can be deleted all the same
        earlier = []
    known = store.delete(key)
    trace.leave(store, *(Note(key, noted.text, noted.age, trace.note.keep) for noted in earlier))
    return known


@dataclass(frozen=True, slots=True)
class Trace:
    """The entry that an operator leaves in the history of a key.

    Arguments:
        note: The entry.
        failed: Called with the error of a store that does not take it; what was done stays done.
    """

    note: Note
    failed: Callable[[StoreError], object]

    def leave(self, store: Store, *earlier: Note) -> None:
        """Write the entry, behind those that are to be kept."""
        try:
            store.note([*earlier, self.note])
        except StoreError as error:
            self.failed(error)
