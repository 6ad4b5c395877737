"""Events: one frozen `Event` for every decision about a delivery, and the hooks that receive them.

Each run emits one event when it begins (`Acquired`, `TakenOver`) and exactly one when it ends: `Completed`, `Failed`,
`Released`, `ReleaseFailed`, `LeaseLost` or `SettleFailed`. A process that is killed emits no end; the main process of
its worker emits `Released` if it could release the lease.

Events contain keys and ids, never the values of arguments.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable, Collection, Container, Iterable
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from .errors import ConfigurationError
from .units import clean

__all__ = [
    "Acquired",
    "Completed",
    "Conflicted",
    "CrashLooped",
    "Deferred",
    "Event",
    "Failed",
    "KeyReused",
    "LeaseLost",
    "PublishRepeated",
    "PublishReplaced",
    "PublishSkipped",
    "RanUnprotected",
    "ReleaseFailed",
    "Released",
    "Replayed",
    "SettleFailed",
    "StoreFailed",
    "StoreRecovered",
    "Superseded",
    "TakenOver",
]


@dataclass(frozen=True, slots=True)
class Event:
    """Base of all events.

    Arguments:
        key: The operation; empty where the event is about a whole store.
        task: The task's name.
        task_id: The message's id.
        holder: Host and process that emit it.

    Each class has a ``name`` for metrics, signals and monitors, the ``level`` at which it is logged, and whether it is
    ``monitored``: sent to Celery's monitors.
    """

    name: ClassVar[str] = ""
    level: ClassVar[int] = logging.INFO
    monitored: ClassVar[bool] = False

    key: str
    task: str = ""
    task_id: str = ""
    holder: str = field(default="", compare=False, kw_only=True)


def _seconds() -> float:
    """Return a field for a measured duration, by which events are not compared."""
    value: float = field(default=0.0, compare=False, kw_only=True)
    return value


@dataclass(frozen=True, slots=True)
class Acquired(Event):
    """A run begins.

    Arguments:
        fence: The fencing token of its lease.
        retries, copy: Which retry and which copy of the message this is; 0 for what its producer sent.
        redelivered: Whether the broker reports that it delivered the message before.
        asked: Seconds that the store took to grant the lease.
        waited: Seconds since the delivery arrived, including ``asked``.
    """

    name: ClassVar = "acquired"
    level: ClassVar = logging.DEBUG
    fence: int = 0
    retries: int = 0
    copy: int = 0
    redelivered: bool = False
    asked: float = _seconds()
    waited: float = _seconds()


@dataclass(frozen=True, slots=True)
class TakenOver(Acquired):
    """A run begins because the lease of the run before expired; ``crashes`` holders in a row have died."""

    name: ClassVar = "taken_over"
    level: ClassVar = logging.WARNING
    monitored: ClassVar = True
    crashes: int = 0


@dataclass(frozen=True, slots=True)
class Completed(Event):
    """The body succeeded, and its result was settled, unless the task has ``result_ttl=0``.

    The body ran for ``ran`` seconds, and settling took ``took`` seconds.
    """

    name: ClassVar = "completed"
    level: ClassVar = logging.DEBUG
    fence: int = 0
    ran: float = _seconds()
    took: float = _seconds()


@dataclass(frozen=True, slots=True)
class Failed(Event):
    """A failure was settled as final; ``error`` is the exception's type."""

    name: ClassVar = "failed"
    error: str = ""
    fence: int = 0
    ran: float = _seconds()
    took: float = _seconds()


@dataclass(frozen=True, slots=True)
class Released(Event):
    """The lease was given back, so that the next delivery may run; ``reason`` is a ``records.Reason``."""

    name: ClassVar = "released"
    reason: str = ""
    fence: int = 0
    ran: float = _seconds()


@dataclass(frozen=True, slots=True)
class ReleaseFailed(Event):
    """A run ended unsettled, for ``reason``, and the store did not reply; its lease has to expire."""

    name: ClassVar = "release_failed"
    level: ClassVar = logging.ERROR
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
        waited: Seconds since the delivery arrived.
    """

    name: ClassVar = "replayed"
    monitored: ClassVar = True
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
        remaining: Seconds until its lease expires unless it is renewed, or until the retry is due.
    """

    name: ClassVar = "conflicted"
    held_by: str = ""
    held_for: str = ""
    remaining: float = 0.0


@dataclass(frozen=True, slots=True)
class Deferred(Event):
    """A duplicate was published again as copy number ``copy``, which is due in ``delay`` seconds."""

    name: ClassVar = "deferred"
    monitored: ClassVar = True
    delay: float = 0.0
    copy: int = 0


@dataclass(frozen=True, slots=True)
class Superseded(Event):
    """A copy was dropped because a later copy or attempt of the same message had taken its place."""

    name: ClassVar = "superseded"
    monitored: ClassVar = True


@dataclass(frozen=True, slots=True)
class KeyReused(Event):
    """A key came with other arguments; ``original`` is the task id that used it first."""

    name: ClassVar = "key_reused"
    level: ClassVar = logging.ERROR
    monitored: ClassVar = True
    original: str = ""


@dataclass(frozen=True, slots=True)
class CrashLooped(Event):
    """An operation was refused because its holders keep dying."""

    name: ClassVar = "crash_looped"
    level: ClassVar = logging.ERROR
    monitored: ClassVar = True
    crashes: int = 0


@dataclass(frozen=True, slots=True)
class LeaseLost(Event):
    """A holder learned that its lease was taken over; ``ending`` is the end that it could not record."""

    name: ClassVar = "lease_lost"
    level: ClassVar = logging.WARNING
    monitored: ClassVar = True
    ending: str = ""
    fence: int = 0
    ran: float = _seconds()


@dataclass(frozen=True, slots=True)
class SettleFailed(Event):
    """The body ran, and the store did not record its result in time."""

    name: ClassVar = "settle_failed"
    level: ClassVar = logging.ERROR
    monitored: ClassVar = True
    error: str = ""
    fence: int = 0
    ran: float = _seconds()


@dataclass(frozen=True, slots=True)
class RanUnprotected(Event):
    """A run begins without a lease: the store cannot serve and ``on_store_error`` is ``"run"``, or it was switched off.

    `celery_idempotent.testing.set_active` does that, which is for tests.
    """

    name: ClassVar = "ran_unprotected"
    level: ClassVar = logging.WARNING
    monitored: ClassVar = True
    error: str = ""


@dataclass(frozen=True, slots=True)
class PublishSkipped(Event):
    """A call was not published, since the message ``task_id`` waits; ``age`` seconds ago that one was published."""

    name: ClassVar = "publish_skipped"
    age: float = _seconds()


@dataclass(frozen=True, slots=True)
class PublishReplaced(Event):
    """A call was published as ``task_id``, and takes the place of the message ``replaced``, which will not run."""

    name: ClassVar = "publish_replaced"
    replaced: str = ""


@dataclass(frozen=True, slots=True)
class PublishRepeated(Event):
    """A call was published although another message may do its work.

    Arguments:
        reason: Why that one does not do: ``unconfirmed``, ``due later``, ``expires sooner``, ``own message``,
            ``open transaction``, ``store``, ``late``, ``result backend``, ``unreadable``, ``max_wait is over``,
            ``period is over``, ``gathers calls``, or the state that the result backend has of it.
        waiting: Its task id, where it is known.
        error: The store's, where it did not answer.
    """

    name: ClassVar = "publish_repeated"
    reason: str = ""
    waiting: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True)
class StoreFailed(Event):
    """A store that served before no longer does.

    Arguments:
        error: What it answered, or why it did not.
        store: Its class.
        number: Which of the stores of this process it is: 1 for the first of them that failed.
    """

    name: ClassVar = "store_failed"
    level: ClassVar = logging.ERROR
    error: str = ""
    store: str = ""
    number: int = field(default=0, compare=False, kw_only=True)


@dataclass(frozen=True, slots=True)
class StoreRecovered(Event):
    """The store serves again; ``store`` and ``number`` are those of its `StoreFailed`."""

    name: ClassVar = "store_recovered"
    level: ClassVar = logging.WARNING
    store: str = ""
    number: int = field(default=0, compare=False, kw_only=True)


#: All kinds, in the order in which an operation may meet them.
KINDS: tuple[type[Event], ...] = (
    Acquired,
    TakenOver,
    Completed,
    Failed,
    Released,
    Replayed,
    Conflicted,
    Deferred,
    Superseded,
    KeyReused,
    CrashLooped,
    LeaseLost,
    SettleFailed,
    ReleaseFailed,
    RanUnprotected,
    PublishSkipped,
    PublishReplaced,
    PublishRepeated,
    StoreFailed,
    StoreRecovered,
)


# What to do about events: each event of a process is handed to every hook that receives its kind.
#
# A hook that raises is logged and never hurts the task. A time limit that rings while it runs is not its error: it
# rings once, so that the task would go on without it, and is raised when all hooks have the event.


logger = logging.getLogger("celery_idempotent")

Hook = Callable[[Event], None]
Counter = Callable[[type[Event]], None]


class _Logged:
    """The kinds of events that the logger lets through."""

    def __contains__(self, kind: object) -> bool:
        return logger.isEnabledFor(getattr(kind, "level", logging.INFO))


def log(event: Event) -> None:
    """Write one structured line per event, at the level it deserves; the default hook.

    The record carries the event's name as ``event`` and its fields, in a mapping, as ``data``.
    """
    data = {field.name: getattr(event, field.name) for field in fields(event)}
    text = " ".join(f"{name}={_text(value)}" for name, value in data.items() if value not in ("", 0))
    name = type(event).__name__
    line = f"{name} %s"  # what collects errors makes one issue of all lines that differ in their arguments alone
    logger.log(event.level, line, text, extra={"event": name, "data": data})


def _text(value: object) -> str:
    return f"{value:.6f}".rstrip("0").rstrip(".") if isinstance(value, float) else clean(str(value))


class _Everything:
    def __contains__(self, kind: object) -> bool:
        return True


_hooks: list[tuple[Hook, Container[type[Event]]]] = [(log, _Logged())]


def add_hook(hook: Hook, kinds: Container[type[Event]] | None = None) -> None:
    """Have ``hook`` called with the events of this process; it must be quick, and safe to call from any thread.

    Arguments:
        hook: A function of one ``Event``.
        kinds: The classes of events that it receives, as a set or anything else that supports ``in``, which is called
            each time (default: all). An event without receivers is not made.

    Raises:
        ConfigurationError: the hook is no function, or an ``async`` one; or the kinds are others.
    """
    call: Any = getattr(hook, "__call__", None)  # noqa: B004 - of an object, what may be async
    if call is None or inspect.iscoroutinefunction(hook) or inspect.iscoroutinefunction(call):
        raise ConfigurationError(f"Expected a hook to be a function of one event, without async, got {hook!r}.")
    if kinds is None:
        kinds = _Logged() if hook is log else _Everything()
    wrong = [kind for kind in kinds if not _is_kind(kind)] if isinstance(kinds, Collection) else []
    if wrong or not isinstance(kinds, Container):
        raise ConfigurationError(
            f"Expected kinds to be a set of classes of events, as {{events.LeaseLost}}, got {kinds!r}. "
            "Name each class itself: neither its name nor its base class does; leave kinds out for all."
        )
    _hooks.append((hook, kinds))


def _is_kind(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, Event) and kind is not Event


def remove_hook(hook: Hook) -> None:
    """Stop calling ``hook``.

    Raises:
        ValueError: it was not added.
    """
    _hooks.remove(next((entry for entry in _hooks if entry[0] == hook), (hook, ())))


_counters: list[Counter] = []


def add_counter(counter: Counter) -> None:
    """Have ``counter`` called with the class of every event of this process; twice is the same as once.

    It is called also for an event that has no receivers and is not made, so it costs a first run next to nothing;
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


def receivers(kind: type[Event]) -> list[Hook]:
    """Count such an event, and return the hooks that receive it; one that nothing receives need not be made."""
    for counter in _counters:
        try:
            counter(kind)
        except Exception as error:  # noqa: BLE001 - it is logged
            _report(error, "counter", counter, kind)
    found = []
    for hook, kinds in tuple(_hooks):
        try:
            if kind in kinds:
                found.append(hook)
        except Exception as error:  # noqa: BLE001 - it is logged
            _report(error, "hook", hook, kind)
    return found


def send(event: Event, hooks: Iterable[Hook]) -> None:
    """Hand an event to hooks; an error of a hook is logged and goes no further.

    Raises:
        Exception: the time limit of the task rang in a hook; the others have the event.
    """
    rest = iter(hooks)
    for hook in rest:
        try:
            hook(event)
        except Exception as error:  # noqa: BLE001 - it is logged
            if is_time_limit(error):
                send(event, rest)
            _report(error, "hook", hook, type(event))


def _report(error: Exception, what: str, whose: object, kind: type[Event]) -> None:
    """Log the error of a hook or a counter; raise it if it is the time limit of the task."""
    if is_time_limit(error):
        raise error
    logger.error("The %s %r failed on %s", what, whose, kind.__name__, exc_info=error)


def in_words(error: BaseException) -> str:
    """Return an error's class and its text, as a log is to have them: the repr of redis-py 8 lacks the text."""
    return f"{type(error).__name__}: {error}"


#: What Celery's and RQ's workers raise from a signal's handler: the module, and the class.
_TIME_LIMITS = (("billiard.exceptions", "SoftTimeLimitExceeded"), ("rq.timeouts", "BaseTimeoutException"))


def is_time_limit(error: Exception) -> bool:
    """Return whether this is the time limit of the task or job that is running, which rings wherever that is."""
    known = (getattr(sys.modules.get(module), name, None) for module, name in _TIME_LIMITS)
    return any(isinstance(error, limit) for limit in known if limit is not None)


def emit(event: Event) -> None:
    """Count the event, and hand it to every hook that receives it."""
    send(event, receivers(type(event)))
