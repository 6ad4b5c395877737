"""What to do about events: each event of a process is handed to every hook that wants to hear of its kind.

A hook that raises is logged and never hurts the task.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container
from dataclasses import fields

from .events import (
    Acquired,
    Completed,
    CrashLooped,
    Event,
    LeaseMissed,
    RanUnprotected,
    ReleaseFailed,
    Reused,
    SettleFailed,
    StoreFailed,
    StoreRecovered,
    TakenOver,
)

__all__ = [
    "Counter",
    "Hook",
    "add_counter",
    "add_hook",
    "count",
    "emit",
    "is_heard",
    "log",
    "remove_counter",
    "remove_hook",
]

logger = logging.getLogger("celery_idempotent")

Hook = Callable[[Event], None]
Counter = Callable[[type[Event]], None]

_LEVELS: dict[type[Event], int] = {
    Acquired: logging.DEBUG,
    Completed: logging.DEBUG,
    TakenOver: logging.WARNING,
    CrashLooped: logging.ERROR,
    Reused: logging.ERROR,
    SettleFailed: logging.ERROR,
    ReleaseFailed: logging.ERROR,
    LeaseMissed: logging.WARNING,
    RanUnprotected: logging.WARNING,
    StoreFailed: logging.ERROR,
    StoreRecovered: logging.WARNING,
}


class _Logged:
    """The kinds of events that the logger lets through."""

    def __contains__(self, kind: object) -> bool:
        return logger.isEnabledFor(_LEVELS.get(kind, logging.INFO))  # type: ignore[call-overload]


def log(event: Event) -> None:
    """Write one structured line per event, at the level it deserves; the default hook.

    The record carries the event's name as ``event`` and its fields, in a mapping, as ``data``.
    """
    data = {field.name: getattr(event, field.name) for field in fields(event)}
    text = " ".join(f"{name}={_text(value)}" for name, value in data.items() if value not in ("", 0))
    name = type(event).__name__
    logger.log(_LEVELS.get(type(event), logging.INFO), "%s %s", name, text, extra={"event": name, "data": data})


def _text(value: object) -> str:
    return f"{value:.6f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


class _Everything:
    def __contains__(self, kind: object) -> bool:
        return True


_hooks: list[tuple[Hook, Container[type[Event]]]] = [(log, _Logged())]


def add_hook(hook: Hook, kinds: Container[type[Event]] | None = None) -> None:
    """Have ``hook`` called with the events of this process; it must be quick, and safe to call from any thread.

    Arguments:
        hook: A function of one ``Event``.
        kinds: Which classes of events it is to hear, as a set or anything else that knows ``in``, which is asked each
            time (default: all). An event that nobody is to hear is not made.
    """
    if kinds is None:
        kinds = _Logged() if hook is log else _Everything()
    _hooks.append((hook, kinds))


def remove_hook(hook: Hook) -> None:
    """Stop calling ``hook``.

    Raises:
        ValueError: it was not added.
    """
    _hooks.remove(next((entry for entry in _hooks if entry[0] == hook), (hook, ())))


_counters: list[Counter] = []


def add_counter(counter: Counter) -> None:
    """Have ``counter`` called with the class of every event of this process; twice is the same as once.

    It is called also for an event that nobody is to hear and that is not made, so it costs a first run next to nothing;
    it must be quick, and safe to call from any thread.
    """
    if counter not in _counters:
        _counters.append(counter)


def remove_counter(counter: Counter) -> None:
    """Stop calling ``counter``.

    Raises:
        ValueError: it was not added.
    """
    _counters.remove(counter)


def count(kind: type[Event]) -> None:
    """Tell the counters of an event; `emit` does it for those that are made."""
    for counter in _counters:
        try:
            counter(kind)
        except Exception:
            logger.exception("The counter %r failed on %s", counter, kind.__name__)


def is_heard(kind: type[Event]) -> bool:
    """Tell whether any hook is to hear such an event; where none is, it need not be made."""
    for _, kinds in _hooks:  # noqa: SIM110 - asked for every first run, and half as long as any()
        if kind in kinds:
            return True
    return False


def emit(event: Event) -> None:
    """Count the event, hand it to every hook that is to hear it; an error of a hook is logged and goes no further."""
    kind = type(event)
    count(kind)
    for hook, kinds in tuple(_hooks):
        try:
            if kind in kinds:
                hook(event)
        except Exception:
            logger.exception("The hook %r failed on %s", hook, kind.__name__)
