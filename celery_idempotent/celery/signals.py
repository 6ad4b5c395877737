"""Celery signals for the library's events: one for each kind, sent in the process that emits the event.

``sender`` is the task, or None for the two about a store. Every receiver gets ``event`` (the event itself),
``key`` and ``task_id``; like every receiver of Celery's it takes ``**kwargs``, and one that raises is logged and does
no harm. A signal without receivers costs nothing.
"""

from __future__ import annotations

from typing import Any

from celery import current_app
from celery._state import get_current_task
from celery.utils.dispatch import Signal

from .. import events
from ..events import Event
from . import monitoring

__all__ = [
    "EventSignal",
    "store_failed",
    "store_recovered",
    "task_acquired",
    "task_completed",
    "task_conflicted",
    "task_crash_looped",
    "task_deferred",
    "task_failed",
    "task_key_reused",
    "task_lease_lost",
    "task_publish_repeated",
    "task_publish_replaced",
    "task_publish_skipped",
    "task_ran_unprotected",
    "task_release_failed",
    "task_released",
    "task_replayed",
    "task_settle_failed",
    "task_superseded",
    "task_taken_over",
]


_signals: dict[type[Event], EventSignal] = {}
#: The kinds whose signals have receivers.
_received: set[type[Event]] = set()


class EventSignal(Signal):
    """A Celery signal that is sent with each event of one kind.

    Arguments:
        kind: The class of the events.
    """

    def __init__(self, kind: type[Event]) -> None:
        prefix = "" if kind.name.startswith("store_") else "task_"
        super().__init__(name=f"{prefix}{kind.name}", providing_args={"event", "key", "task_id"})
        self.kind = kind
        _signals[kind] = self

    def connect(self, *args: Any, **kwargs: Any) -> Any:
        """Connect a receiver, directly or as a decorator, as with any of Celery's signals."""
        _received.add(self.kind)
        return super().connect(*args, **kwargs)

    def disconnect(self, *args: Any, **kwargs: Any) -> Any:
        """Disconnect a receiver."""
        found = super().disconnect(*args, **kwargs)
        if not self.receivers:
            _received.discard(self.kind)
        return found


def _send(event: Event) -> None:
    task = monitoring.published.get() or get_current_task()
    app = current_app if task is None else task.app  # in other threads than that which made it, the first is none
    sender: Any = app.tasks.get(event.task) if event.task else None
    answers = _signals[type(event)].send(sender=sender, event=event, key=event.key, task_id=event.task_id)
    for _, answer in answers:
        if isinstance(answer, Exception) and events.is_time_limit(answer):  # which rings once; Celery has logged it
            raise answer


#: A run begins (`Acquired`).
task_acquired = EventSignal(events.Acquired)
#: A run begins because the lease of the one before ran out (`TakenOver`).
task_taken_over = EventSignal(events.TakenOver)
#: The result was settled (`Completed`).
task_completed = EventSignal(events.Completed)
#: A failure was settled as final (`Failed`).
task_failed = EventSignal(events.Failed)
#: The lease was given back, so that the next delivery may run (`Released`).
task_released = EventSignal(events.Released)
#: A duplicate was answered with the settled outcome (`Replayed`).
task_replayed = EventSignal(events.Replayed)
#: A duplicate met a live lease, or a retry that is due later (`Conflicted`).
task_conflicted = EventSignal(events.Conflicted)
#: A duplicate was published again, to be tried later (`Deferred`).
task_deferred = EventSignal(events.Deferred)
#: A copy was dropped because a later one has taken its place (`Superseded`).
task_superseded = EventSignal(events.Superseded)
#: A key came with other arguments (`KeyReused`).
task_key_reused = EventSignal(events.KeyReused)
#: An operation was refused because its holders keep dying (`CrashLooped`).
task_crash_looped = EventSignal(events.CrashLooped)
#: A holder learned that its lease was taken over (`LeaseLost`).
task_lease_lost = EventSignal(events.LeaseLost)
#: The effect happened, and the store could not record it in time (`SettleFailed`).
task_settle_failed = EventSignal(events.SettleFailed)
#: A run ended unsettled, and its lease could not be given back (`ReleaseFailed`).
task_release_failed = EventSignal(events.ReleaseFailed)
#: A run begins without a lease, because the policy allows it (`RanUnprotected`).
task_ran_unprotected = EventSignal(events.RanUnprotected)
#: A call was not published, since a message waits that will do its work (`PublishSkipped`).
task_publish_skipped = EventSignal(events.PublishSkipped)
#: A call was published, and takes the place of a message that waits (`PublishReplaced`).
task_publish_replaced = EventSignal(events.PublishReplaced)
#: A call was published although a message waits (`PublishRepeated`).
task_publish_repeated = EventSignal(events.PublishRepeated)
#: A store that served before does not any more (`StoreFailed`).
store_failed = EventSignal(events.StoreFailed)
#: The store serves again (`StoreRecovered`).
store_recovered = EventSignal(events.StoreRecovered)

events.add_hook(_send, _received)
