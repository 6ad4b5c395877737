"""What happened, as data; what to do about it, as hooks.

Every decision of the guard is one frozen `Event`, handed to every hook of the process. A hook that raises is logged and
never hurts the task. Events carry keys and ids, never argument values.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, fields

__all__ = [
    "Acquired",
    "Completed",
    "Conflicted",
    "CrashLooped",
    "Deferred",
    "Event",
    "Failed",
    "Hook",
    "LeaseMissed",
    "RanUnprotected",
    "Released",
    "Replayed",
    "Reused",
    "SettleFailed",
    "StoreFailed",
    "StoreRecovered",
    "Superseding",
    "TakenOver",
    "add_hook",
    "emit",
    "log",
    "remove_hook",
]

logger = logging.getLogger("celery_idempotent")


@dataclass(frozen=True, slots=True)
class Event:
    """Base of all events; ``task`` is the task's name, ``task_id`` the delivery it speaks of."""

    key: str
    task: str = ""
    task_id: str = ""


@dataclass(frozen=True, slots=True)
class Acquired(Event):
    """A first run begins."""

    fence: int = 0


@dataclass(frozen=True, slots=True)
class TakenOver(Acquired):
    """A run begins because the lease of the one before ran out."""

    crashes: int = 0


@dataclass(frozen=True, slots=True)
class Completed(Event):
    """The result was settled."""

    fence: int = 0


@dataclass(frozen=True, slots=True)
class Failed(Event):
    """A failure was settled as final."""

    error: str = ""


@dataclass(frozen=True, slots=True)
class Released(Event):
    """The lease was given back, so that the next delivery may run."""

    reason: str = ""


@dataclass(frozen=True, slots=True)
class Replayed(Event):
    """A duplicate was answered with the settled outcome."""

    age: float = 0.0


@dataclass(frozen=True, slots=True)
class Conflicted(Event):
    """A duplicate met a live lease, or a retry that is due later."""

    holder: str = ""
    remaining: float = 0.0


@dataclass(frozen=True, slots=True)
class Deferred(Event):
    """A duplicate was published again, to be tried in ``delay`` seconds."""

    delay: float = 0.0
    copy: int = 0


@dataclass(frozen=True, slots=True)
class Superseding(Event):
    """A copy was dropped because a later copy or attempt of the same message had taken its place."""


@dataclass(frozen=True, slots=True)
class Reused(Event):
    """A key came with other arguments."""


@dataclass(frozen=True, slots=True)
class CrashLooped(Event):
    """An operation was refused because its holders keep dying."""

    crashes: int = 0


@dataclass(frozen=True, slots=True)
class LeaseMissed(Event):
    """A holder learned that its lease was taken over; ``ending`` is what it was about to record."""

    ending: str = ""


@dataclass(frozen=True, slots=True)
class SettleFailed(Event):
    """The effect happened, and the store could not be told in time."""

    error: str = ""


@dataclass(frozen=True, slots=True)
class RanUnprotected(Event):
    """A run begins without a lease because the store cannot serve and the policy says so."""

    error: str = ""


@dataclass(frozen=True, slots=True)
class StoreFailed(Event):
    """A store that served before does not any more."""

    error: str = ""


@dataclass(frozen=True, slots=True)
class StoreRecovered(Event):
    """The store serves again."""


Hook = Callable[[Event], None]

_LEVELS: dict[type[Event], int] = {
    Acquired: logging.DEBUG,
    Completed: logging.DEBUG,
    TakenOver: logging.WARNING,
    CrashLooped: logging.ERROR,
    Reused: logging.ERROR,
    SettleFailed: logging.ERROR,
    LeaseMissed: logging.WARNING,
    RanUnprotected: logging.WARNING,
    StoreFailed: logging.ERROR,
    StoreRecovered: logging.WARNING,
}


def log(event: Event) -> None:
    """Write one structured line per event, at the level it deserves; the default hook."""
    level = _LEVELS.get(type(event), logging.INFO)
    if logger.isEnabledFor(level):
        data = {field.name: getattr(event, field.name) for field in fields(event)}
        text = " ".join(f"{name}={value}" for name, value in data.items() if value not in ("", 0))
        logger.log(level, "%s %s", type(event).__name__, text, extra={"event": type(event).__name__, "data": data})


_hooks: list[Hook] = [log]


def add_hook(hook: Hook) -> None:
    """Have ``hook`` called with every event of this process; it must be quick, and safe to call from any thread."""
    _hooks.append(hook)


def remove_hook(hook: Hook) -> None:
    """Stop calling ``hook``.

    Raises:
        ValueError: it was not added.
    """
    _hooks.remove(hook)


def emit(event: Event) -> None:
    """Hand the event to every hook; an error of a hook is logged and goes no further."""
    for hook in tuple(_hooks):
        try:
            hook(event)
        except Exception:
            logger.exception("The hook %r failed on %s", hook, type(event).__name__)
