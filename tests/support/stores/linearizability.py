"""Whether what concurrent clients saw of one key could have happened in some order, one thing at a time.

The search is that of Wing and Gong (1993) with the memory of Lowe (2017): take any operation that was invoked before
all those not yet taken had answered, do it to the state, go on if its answer is the one that was seen, and never try
the same operations with the same state twice. The state machine is `celery_idempotent.stores.rules`.

What a client heard no answer to may have taken effect at any time after it was sent, or not at all. A client that sends
again by itself what it heard no answer to has sent it twice: give such an operation `echoes`.

Time stands still in a history: no lease ends and nothing expires, unless an operation `age` says so. Fences are what
the store says they are, if they rise.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from celery_idempotent.stores import Claim, Lease, Outcome, Record, Refusal, State, rules

__all__ = ["LOST", "NEVER", "UNKNOWN", "Machine", "Operation", "Undecided", "explanation", "linearization"]

NOW, NEVER = 1, float("inf")
#: How many states are looked at before the search gives up.
STATES = 20_000


class Undecided(Exception):
    """Raised when too much was not heard of for the search to end."""


class Answer:
    """An answer that is no value of the store's."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return self.name


#: Nobody knows what was answered, or whether anything was done.
UNKNOWN = Answer("?")
#: What settle answers to a holder that lost its lease.
LOST = Answer("LeaseLost")
#: The fence of a lease whose grant nobody heard of: it is above those that were.
UNHEARD = 1 << 62


@dataclass(frozen=True)
class Operation:
    """What one client asked, and what it was told; `began` and `ended` by one clock.

    Arguments:
        verb: The store's verb, or `age`.
        subject: The claim of an acquire, the lease of a renew, settle or release; nothing otherwise.
        details: The outcome, the release, the task id, or the seconds, as the verb needs.
        answer: What the verb returned; for renew whether the lease is lost.
        echoes: How often the same may have been done besides, unheard of.
    """

    client: str
    verb: str
    subject: Any
    details: Any
    answer: Any
    began: float
    ended: float
    echoes: int = 0

    def __str__(self) -> str:
        what = [str(part) for part in (short(self.subject), short(self.details)) if part]
        more = f" (sent up to {1 + self.echoes} times)" if self.echoes else ""
        return f"{self.client:>8}  {self.verb}({', '.join(what)}) -> {short(self.answer)}{more}"


def short(value: Any) -> Any:
    """Return a value as few words as tell it apart."""
    match value:
        case Claim():
            sender = f" from {value.sender[:4]}" if value.sender else ""
            copy = f"copy {value.copy}{value.token}{' redelivered' if value.redelivered else ''}"
            limits = f"fingerprint {value.fingerprint!r} crashes {value.max_crashes}"
            return f"{value.task_id} attempt {value.attempt} {copy} {limits} by {value.owner[:4]}{sender}"
        case Lease():
            return f"lease {value.owner[:4]} fence {value.fence}"
        case Refusal():
            return f"{value.verdict}: {short(value.record)}"
        case Record():
            return f"{value.state} {value.owner[:4] or value.payload!r} fence {value.fence}"
        case Outcome():
            return f"{value.state} {value.payload!r}"
    return value


@dataclass
class Machine:
    """The sequential store of one key.

    Arguments:
        key: The key.
        row: What is remembered of it.
        floor: The highest fence that anybody heard of.
        fences_fall: Whether a fence may be lower than those before the record was deleted.
    """

    key: str
    row: rules.Row | None = None
    floor: int = 0
    fences_fall: bool = False

    def do(self, operation: Operation) -> Any:
        """Do it, and return what a store would have answered."""
        if self.row is not None and self.row.expires <= NOW:
            self.row = None
        answer: Any = getattr(self, operation.verb)(operation)
        return answer

    def acquire(self, operation: Operation) -> Any:
        before = self.row.fence if self.row is not None else 0
        again = (
            self.row is not None and self.row.state is State.IN_PROGRESS and self.row.owner == operation.subject.owner
        )
        answer, self.row = rules.acquire(self.key, self.row, operation.subject, NOW)
        if isinstance(answer, Lease):
            self.row.fence = before if again else UNHEARD
            return replace(answer, fence=self.row.fence)
        return answer

    def renew(self, operation: Operation) -> Any:
        row = rules.renew(self.row, operation.subject, NOW)
        self.row = row or self.row
        return row is None

    def settle(self, operation: Operation) -> Any:
        row = rules.settle(self.row, operation.subject, operation.details, 500.0, NOW)
        self.row = row or self.row
        return LOST if row is None else None

    def release(self, operation: Operation) -> Any:
        return rules.release(self.row, operation.subject, operation.details, NOW)

    def mark_dispatched(self, operation: Operation) -> Any:
        return rules.mark_dispatched(self.row, operation.details)

    def get(self, operation: Operation) -> Any:
        return None if self.row is None else rules.view(self.key, self.row, NOW)

    def delete(self, operation: Operation) -> Any:
        known, self.row = self.row is not None, None
        if self.fences_fall:
            self.floor = 0
        return known

    def age(self, operation: Operation) -> Any:
        if self.row is not None:
            by = round(operation.details * rules.SECOND)
            self.row.lease_end -= by
            self.row.not_before -= by
            self.row.expires -= by

    def hears(self, ours: Any, theirs: Any) -> bool:
        """Tell whether an answer is the one that was seen, and learn the fence from it."""
        if isinstance(ours, Refusal) and isinstance(theirs, Refusal):
            return ours.verdict is theirs.verdict and self.hears(ours.record, theirs.record)
        if isinstance(ours, Lease) and isinstance(theirs, Lease):
            said = (theirs.claim, theirs.taken_over, theirs.crashes) == (ours.claim, ours.taken_over, ours.crashes)
            return said and self._learn(ours.fence, theirs.fence)
        if isinstance(ours, Record) and isinstance(theirs, Record):
            return timeless(ours) == timeless(theirs) and self._learn(ours.fence, theirs.fence)
        return bool(ours == theirs)

    def _learn(self, ours: int, theirs: int) -> bool:
        if ours != UNHEARD:
            return ours == theirs
        if theirs <= self.floor or self.row is None:
            return False
        self.row.fence = self.floor = theirs
        return True

    def restored(self, operation: Operation) -> None:
        """Count the fence that a holder brings back to a store that forgot it."""
        if self.row is not None and self.row.fence != UNHEARD:
            self.floor = max(self.floor, self.row.fence)

    def copy(self) -> Machine:
        """Return a machine that goes its own way from here."""
        row = self.row
        if row is not None:
            marks = {"waiting": dict(row.waiting), "attempts": dict(row.attempts), "dispatched": list(row.dispatched)}
            row = replace(row, **marks)
        return Machine(self.key, row, self.floor, self.fences_fall)

    def form(self) -> Hashable:
        """Return what makes two machines the same."""
        if self.row is None:
            return self.floor
        row = self.row
        flat = (row.state, row.fence, row.owner, row.task_id, row.holder, row.crashes, row.reason, row.fingerprint)
        times = (row.payload, row.lease_end, row.not_before, row.expires)
        marks = (frozenset(row.waiting.items()), frozenset(row.attempts.items()), tuple(row.dispatched))
        return (self.floor, *flat, *times, *marks)


def timeless(record: Record) -> Record:
    """Return a record without its times and its fence."""
    return replace(record, remaining=0.0, age=0.0, retention=0.0, fence=0)


@dataclass
class Search:
    """A walk through the orders that real time allows."""

    operations: list[Operation]
    seen: set[tuple[int, Hashable]] = field(default_factory=set)
    longest: list[Operation] = field(default_factory=list)

    def run(self, machine: Machine) -> list[Operation] | None:
        """Return an order in which everything could have happened, or None."""
        heard = sum(1 << place for place, one in enumerate(self.operations) if one.answer is not UNKNOWN)
        path: list[Operation] = []
        stack = [(0, machine, self._next(0, machine))]
        while True:
            taken, machine, candidates = stack[-1]
            if taken & heard == heard:
                return path
            found = next(candidates, None)
            if found is None:
                stack.pop()
                if not stack:
                    return None
                path.pop()
                continue
            place, after = found
            state = (taken | 1 << place, after.form())
            if state not in self.seen:
                if len(self.seen) >= STATES:
                    raise Undecided(f"{len(self.operations)} operations, {STATES} states")
                self.seen.add(state)
                path.append(self.operations[place])
                if len(path) > len(self.longest):
                    self.longest = list(path)
                stack.append((state[0], after, self._next(state[0], after)))

    def _next(self, taken: int, machine: Machine) -> Any:
        """Yield what may come next, and the machine after it."""
        left = [place for place in range(len(self.operations)) if not taken >> place & 1]
        first_end = min((self.operations[place].ended for place in left), default=NEVER)
        for place in left:
            operation = self.operations[place]
            if operation.began > first_end:
                continue
            after = machine.copy()
            answer = after.do(operation)
            if operation.answer is UNKNOWN:
                if after.form() == machine.form():
                    continue  # it makes no difference when, or whether
            elif not after.hears(answer, operation.answer):
                continue
            after.restored(operation)
            yield place, after


def linearization(
    key: str, history: Iterable[Operation], *, fences_fall: bool = False
) -> tuple[list[Operation] | None, list[Operation]]:
    """Return an order in which all this could have happened to one key, or None; and the longest that was found.

    Arguments:
        key: The key.
        history: What was asked and answered.
        fences_fall: Whether the store says that a fence may be lower than those before the record was deleted.

    Raises:
        Undecided: too much was not heard of.
    """
    operations: list[Operation] = []
    for one in history:
        operations.append(one if one.answer is not UNKNOWN else replace(one, ended=NEVER))
        echo = replace(one, answer=UNKNOWN, ended=NEVER, echoes=0)
        operations += [echo] * one.echoes
    operations.sort(key=lambda one: (one.ended, one.began))
    search = Search(operations)
    return search.run(Machine(key, fences_fall=fences_fall)), search.longest


def explanation(history: Iterable[Operation], longest: list[Operation], note: Callable[[], str] = str) -> str:
    """Return for people what was seen, and how far any order went."""
    lines = [f"{one.began:.6f} {one.ended:.6f} {one}" for one in sorted(history, key=lambda one: one.began)]
    return "\n".join(
        [f"No order explains what was seen {note()}:", *lines, "The longest that does:", *map(str, longest)]
    )
