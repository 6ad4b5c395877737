"""From events to metrics: what each kind of event adds to which."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from .. import events
from ..events import Event
from . import catalogue
from .catalogue import Metric

__all__ = ["Measures"]


class Measures(ABC):
    """A hook that counts; what keeps the numbers says how one is written."""

    def __init__(self) -> None:
        self._live: set[tuple[str, int]] = set()
        self._down: set[str] = set()
        self._known: set[str] = set()
        self._runs: dict[str, tuple[int, float]] = {}  # by task: how many, and their seconds

    @abstractmethod
    def write(self, metric: Metric, value: float, *labels: str) -> None:
        """Add to a counter or a gauge, or put a value into a histogram."""

    def __call__(self, event: Event) -> None:
        """Count the event."""
        if event.task not in self._known:
            self._introduce(event.task)
        _MEASURES[type(event)](self, event)

    def _introduce(self, task: str) -> None:
        """Show what is rare as 0 from the first sight of a task: who looks for an increase misses one from nothing."""
        self._known.add(task)
        for metric in catalogue.RARE if task else ():
            self.write(metric, 0.0, task)

    def _begins(self, event: Any) -> None:
        task = event.task
        self.write(catalogue.STARTS, 1.0, task)
        if isinstance(event, events.TakenOver):
            self.write(catalogue.TAKE_OVERS, 1.0, task)
        self.write(catalogue.ACQUIRE, event.asked, task)
        self.write(catalogue.WAIT, event.waited, task)
        self.write(catalogue.LIVE_LEASES, 1.0, task)
        self._live.add((event.key, event.fence))

    def _ends(self, event: Any, metric: Metric, *labels: str) -> None:
        self.write(metric, 1.0, event.task, *labels)
        held = (event.key, event.fence)
        if held in self._live:  # else it is told by the worker's main process, for a child that is gone
            self._live.discard(held)
            self.write(catalogue.LIVE_LEASES, -1.0, event.task)

    def _settles(self, event: Any, metric: Metric) -> None:
        self._ends(event, metric)
        self.write(catalogue.SETTLE, event.took, event.task)
        self.write(catalogue.RUN, event.ran, event.task)

    def _completes(self, event: events.Completed) -> None:
        self._settles(event, catalogue.COMPLETED)
        runs, seconds = self._runs.get(event.task, (0, 0.0))
        self._runs[event.task] = (runs + 1, seconds + event.ran)

    def _replays(self, event: events.Replayed) -> None:
        self.write(catalogue.REPLAYED, 1.0, event.task, event.state)
        self.write(catalogue.WAIT, event.waited, event.task)
        runs, seconds = self._runs.get(event.task, (0, 0.0))
        if runs:
            self.write(catalogue.SAVED_RUN, seconds / runs, event.task)

    def _store_fails(self, event: events.StoreFailed) -> None:
        self.write(catalogue.STORE_FAILURES, 1.0, event.store)
        if event.store not in self._down:
            self._down.add(event.store)
            self.write(catalogue.STORES_DOWN, 1.0, event.store)

    def _store_recovers(self, event: events.StoreRecovered) -> None:
        self.write(catalogue.STORE_RECOVERIES, 1.0, event.store)
        if event.store in self._down:
            self._down.discard(event.store)
            self.write(catalogue.STORES_DOWN, -1.0, event.store)


def _one(metric: Metric) -> Callable[[Measures, Any], None]:
    return lambda measures, event: measures.write(metric, 1.0, event.task)


def _end(metric: Metric) -> Callable[[Measures, Any], None]:
    return lambda measures, event: measures._ends(event, metric)


_MEASURES: dict[type[Event], Callable[[Measures, Any], None]] = {
    events.Acquired: Measures._begins,
    events.TakenOver: Measures._begins,
    events.Completed: Measures._completes,
    events.Failed: lambda measures, event: measures._settles(event, catalogue.FAILED),
    events.Released: lambda measures, event: measures._ends(event, catalogue.RELEASED, event.reason),
    events.ReleaseFailed: _end(catalogue.RELEASE_FAILURES),
    events.LeaseMissed: _end(catalogue.LOST),
    events.SettleFailed: _end(catalogue.SETTLE_FAILURES),
    events.Replayed: Measures._replays,
    events.Conflicted: _one(catalogue.CONFLICTS),
    events.Deferred: _one(catalogue.DEFERRED),
    events.Superseding: _one(catalogue.SUPERSEDED),
    events.Reused: _one(catalogue.KEYS_REUSED),
    events.CrashLooped: _one(catalogue.CRASH_LOOPS),
    events.RanUnprotected: _one(catalogue.UNPROTECTED),
    events.StoreFailed: Measures._store_fails,
    events.StoreRecovered: Measures._store_recovers,
}
