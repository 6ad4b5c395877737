"""What happened, as data: every decision about a delivery is one frozen `Event`.

A run that was told to begin (`Acquired`, `TakenOver`) is told to end exactly once: by `Completed`, `Failed`,
`Released`, `ReleaseFailed`, `LeaseMissed` or `SettleFailed`. Of a process that was killed nobody tells it, unless the
worker that lost it could release its lease; then that tells `Released`.

Events carry keys and ids, never argument values. `celery_idempotent.hooks` says who hears of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = [
    "Acquired",
    "Completed",
    "Conflicted",
    "CrashLooped",
    "Deferred",
    "Event",
    "Failed",
    "LeaseMissed",
    "RanUnprotected",
    "ReleaseFailed",
    "Released",
    "Replayed",
    "Reused",
    "SettleFailed",
    "StoreFailed",
    "StoreRecovered",
    "Superseding",
    "TakenOver",
]


@dataclass(frozen=True, slots=True)
class Event:
    """Base of all events.

    Arguments:
        key: The operation; empty where the event is about a whole store.
        task: The task's name.
        task_id: The message's id.
        holder: Host and process that tell it.
    """

    key: str
    task: str = ""
    task_id: str = ""
    holder: str = field(default="", compare=False, kw_only=True)


def _seconds() -> float:
    """Return a field for a duration that was measured: two events that differ in it alone say the same."""
    value: float = field(default=0.0, compare=False, kw_only=True)
    return value


@dataclass(frozen=True, slots=True)
class Acquired(Event):
    """A run begins.

    Arguments:
        fence: The fencing token of its lease.
        retries, copy: Which retry and which copy of the message this is; 0 for what its producer sent.
        redelivered: Whether the broker says that it delivered the message before.
        asked: Seconds that the store took to grant the lease.
        waited: Seconds since the delivery came, those included.
    """

    fence: int = 0
    retries: int = 0
    copy: int = 0
    redelivered: bool = False
    asked: float = _seconds()
    waited: float = _seconds()


@dataclass(frozen=True, slots=True)
class TakenOver(Acquired):
    """A run begins because the lease of the one before ran out; ``crashes`` holders in a row have died."""

    crashes: int = 0


@dataclass(frozen=True, slots=True)
class Completed(Event):
    """The result was settled; the body ran for ``ran`` seconds, and to settle took ``took``."""

    fence: int = 0
    ran: float = _seconds()
    took: float = _seconds()


@dataclass(frozen=True, slots=True)
class Failed(Event):
    """A failure was settled as final; ``error`` is the exception's type."""

    error: str = ""
    fence: int = 0
    ran: float = _seconds()
    took: float = _seconds()


@dataclass(frozen=True, slots=True)
class Released(Event):
    """The lease was given back, so that the next delivery may run; ``reason`` is a ``records.Reason``."""

    reason: str = ""
    fence: int = 0
    ran: float = _seconds()


@dataclass(frozen=True, slots=True)
class ReleaseFailed(Event):
    """A run ended unsettled, for ``reason``, and the store could not be told: its lease has to run out."""

    reason: str = ""
    error: str = ""
    fence: int = 0
    ran: float = _seconds()


@dataclass(frozen=True, slots=True)
class Replayed(Event):
    """A duplicate was answered with the settled outcome.

    Arguments:
        age: Seconds since it was settled.
        original: The task id whose run settled it; empty where that is this task id.
        state: ``completed`` or ``failed``.
        waited: Seconds since the delivery came.
    """

    age: float = 0.0
    original: str = ""
    state: str = ""
    waited: float = _seconds()


@dataclass(frozen=True, slots=True)
class Conflicted(Event):
    """A duplicate met a live lease, or a retry that is due later.

    Arguments:
        held_by: Host and process of the holder.
        held_for: The holder's task id; empty where that is this task id.
        remaining: Seconds that its lease still runs unless it is renewed, or until the retry is due.
    """

    held_by: str = ""
    held_for: str = ""
    remaining: float = 0.0


@dataclass(frozen=True, slots=True)
class Deferred(Event):
    """A duplicate was published again as copy number ``copy``, to be tried in ``delay`` seconds."""

    delay: float = 0.0
    copy: int = 0


@dataclass(frozen=True, slots=True)
class Superseding(Event):
    """A copy was dropped because a later copy or attempt of the same message had taken its place."""


@dataclass(frozen=True, slots=True)
class Reused(Event):
    """A key came with other arguments; ``original`` is the task id that used it first."""

    original: str = ""


@dataclass(frozen=True, slots=True)
class CrashLooped(Event):
    """An operation was refused because its holders keep dying."""

    crashes: int = 0


@dataclass(frozen=True, slots=True)
class LeaseMissed(Event):
    """A holder learned that its lease was taken over; ``ending`` is what it was about to record."""

    ending: str = ""
    fence: int = 0
    ran: float = _seconds()


@dataclass(frozen=True, slots=True)
class SettleFailed(Event):
    """The effect happened, and the store could not be told in time."""

    error: str = ""
    fence: int = 0
    ran: float = _seconds()


@dataclass(frozen=True, slots=True)
class RanUnprotected(Event):
    """A run begins without a lease because the store cannot serve and the policy says so."""

    error: str = ""


@dataclass(frozen=True, slots=True)
class StoreFailed(Event):
    """A store that served before does not any more."""

    error: str = ""
    store: str = ""


@dataclass(frozen=True, slots=True)
class StoreRecovered(Event):
    """The store serves again."""

    store: str = ""
