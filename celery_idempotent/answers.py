"""The nouns between the guard and an adapter: a delivery goes in, an answer comes out."""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, TypeAlias

from .errors import LeaseLost, StoreError
from .events import Event
from .holding import Holding
from .hooks import count, emit, is_heard
from .pauses import never
from .records import Claim, Lease, Outcome, Record, Release
from .references import Origin

__all__ = ["Answer", "Busy", "Delivery", "Dropped", "Ending", "Ignored", "Ran", "Replayed"]


@dataclass(frozen=True, slots=True)
class Ran:
    """The body ran here, and ``value`` is what it returned."""

    value: Any


@dataclass(frozen=True, slots=True)
class Replayed:
    """The operation was done before; ``value`` is what it returned then."""

    value: Any
    record: Record


@dataclass(frozen=True, slots=True)
class Ignored:
    """The operation was done before and left no result of its own; ``reference`` may name a task that has it.

    ``nesting`` is how often its message had been replaced before others replaced it, or None if they did not.
    """

    reference: str
    record: Record
    nesting: int | None = None


@dataclass(frozen=True, slots=True)
class Busy:
    """The operation cannot be answered now: try again, at the latest in ``remaining`` seconds.

    Somebody does it, perhaps as ``holder_task_id``; or ``error`` says why the store could not tell. It is ``awaited``
    where nobody does it at the moment, and that task is to go on with it.
    """

    remaining: float
    holder_task_id: str | None = None
    awaited: bool = field(default=False, compare=False)
    error: StoreError | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Dropped:
    """A later copy of this message will be answered; this one needs nothing."""


Answer: TypeAlias = Ran | Replayed | Ignored | Busy | Dropped
Ending: TypeAlias = Release | Outcome


@dataclass(frozen=True, slots=True)
class Delivery:
    """One delivery as an adapter hands it to the guard.

    Arguments:
        claim: What it asks of the store.
        body: Runs the work, given what it holds.
        ending: What an exception of the body means for the record.
        task: The task's name, for events.
        task_id: The message's id, for events.
        wants_result: Whether somebody reads the value: a caller, a callback, a chain, a chord.
        patience: Longest time in seconds that the delivery may be held before the body runs.
        least_wait: Tells for how long in seconds it waits for whoever holds the key, whatever the policy says; asked
            once it meets somebody.
        stopping: Tells whether this process is about to stop, so that nobody should wait.
        lost_error: Which `LeaseLost` the body's holding raises.
        max_lease: Seconds after which its lease is not renewed any more, or None.
        published: Whether the framework will keep the value under ``task_id``, where others can read it.
        tell: What hears of this delivery's events; `events.emit`, or what calls it.
        noted: Kinds of events that it wants even where no hook does.
        came: Monotonic time at which the delivery came.
        recalls: Hears of the record of a failure before that is raised again.
        alone: Whether no other delivery has its task id, so that any may be told that the operation kills its holders.
    """

    claim: Claim
    body: Callable[[Holding], Any]
    ending: Callable[[BaseException], Ending]
    task: str = ""
    task_id: str = ""
    wants_result: bool = True
    patience: float = float("inf")
    least_wait: Callable[[], float] = lambda: 0.0
    stopping: Callable[[], bool] = never
    lost_error: type[LeaseLost] = LeaseLost
    max_lease: float | None = None
    published: bool = False
    tell: Callable[[Event], None] = emit
    noted: Container[type[Event]] = ()
    came: float = field(default_factory=lambda: monotonic())  # looked up anew, for tests
    recalls: Callable[[Record], None] = lambda record: None
    alone: bool = False

    @property
    def waited(self) -> float:
        """Seconds since it came."""
        return monotonic() - self.came

    def origin(self, lease: Lease) -> Origin:
        """Return which run the value is of that the body returns under this lease."""
        return Origin(lease.key, lease.fence, self.task_id, self.published)

    def event(self, kind: type[Event], **data: Any) -> None:
        """Tell of an event about this delivery; one that nobody is to hear is counted, and not made."""
        if kind in self.noted or is_heard(kind):
            self.tell(kind(self.claim.key, self.task, self.task_id, holder=self.claim.holder, **data))
        else:
            count(kind)
