"""The metrics: names, labels and meanings, the same for every system, and what each kind of event adds to which.

Labels are tasks and words. Keys and task ids are as many as there are operations, and are in the log lines instead.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from .. import events
from ..events import Event

PREFIX = "celery_idempotent"


class Kind(Enum):
    """How the values of a metric add up."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric.

    Arguments:
        name: Its name, without what belongs to one system.
        kind: How its values add up.
        help: What it counts.
        labels: The labels of its series.
        unit: ``s``, or a word in braces for what is counted.
        buckets: Upper bounds, for a histogram.
    """

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ("task",)
    unit: str = "{run}"
    buckets: tuple[float, ...] = ()

    @property
    def prometheus(self) -> str:
        """Its name in Prometheus: ``celery_idempotent_starts_total``."""
        unit = "_seconds" if self.unit == "s" else ""
        return f"{PREFIX}_{self.name}{unit}{'_total' if self.kind is Kind.COUNTER else ''}"

    @property
    def opentelemetry(self) -> str:
        """Its name in OpenTelemetry: ``celery_idempotent.starts``."""
        return f"{PREFIX}.{self.name}"


#: Of a store that answers in less than a millisecond, or not for seconds.
_STORE = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0)
#: Of tasks that take milliseconds, or hours.
_WORK = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0, 3600.0, 14400.0)


def _counter(name: str, text: str, *labels: str, unit: str = "{run}") -> Metric:
    return Metric(name, Kind.COUNTER, text, labels or ("task",), unit)


def _seconds(name: str, text: str, buckets: tuple[float, ...]) -> Metric:
    return Metric(name, Kind.HISTOGRAM, text, unit="s", buckets=buckets)


STARTS = _counter("starts", "Runs that began under a lease.")
TAKE_OVERS = _counter("take_overs", "Runs, of those, that began because the lease of the run before had run out.")
COMPLETED = _counter("completed", "Runs whose result was settled.")
FAILED = _counter("failed", "Runs whose failure was settled as final.")
RELEASED = _counter("released", "Runs that ended unsettled, so that the next delivery may run.", "task", "reason")
RELEASE_FAILURES = _counter("release_failures", "Runs that ended unsettled, which the store could not record.")
LOST = _counter("lost", "Runs that found their lease taken over.")
SETTLE_FAILURES = _counter("settle_failures", "Runs that took effect, which the store could not record.")
REPLAYED = _counter(
    "replayed", "Duplicates that were answered with the settled outcome.", "task", "state", unit="{delivery}"
)
CONFLICTS = _counter("conflicts", "Duplicates that met a live lease, or a retry due later.", unit="{delivery}")
DEFERRED = _counter("deferred", "Copies of duplicates that were published to try again later.", unit="{delivery}")
SUPERSEDED = _counter("superseded", "Copies that were dropped for a later one of the same message.", unit="{delivery}")
KEYS_REUSED = _counter("keys_reused", "Deliveries refused: their key had other arguments.", unit="{delivery}")
CRASH_LOOPS = _counter("crash_loops", "Deliveries refused: their holders keep dying.", unit="{delivery}")
UNPROTECTED = _counter("unprotected", "Runs without a lease, since the store could not serve.")
SKIPPED = _counter("publish_skipped", "Calls that were not published, since a message waits.", unit="{call}")
REPLACED = _counter("publish_replaced", "Calls that took the place of a message that waits.", unit="{call}")
REPEATED = _counter(
    "publish_repeated", "Calls that were published although a message waits.", "task", "reason", unit="{call}"
)
STORE_FAILURES = _counter("store_failures", "Times that a process found the store down.", "store", unit="{time}")
STORE_RECOVERIES = _counter(
    "store_recoveries", "Times that a process found the store serving again.", "store", unit="{time}"
)
LIVE_LEASES = Metric("live_leases", Kind.GAUGE, "Leases whose work is running.", unit="{lease}")
STORES_DOWN = Metric(
    "stores_down", Kind.GAUGE, "Processes whose last call found the store down.", ("store",), "{process}"
)
ACQUIRE = _seconds("acquire", "How long the store took to grant a lease.", _STORE)
SETTLE = _seconds("settle", "How long it took to settle an outcome.", _STORE)
WAIT = _seconds("wait", "From the arrival of a delivery until it ran or was replayed.", _WORK)
RUN = _seconds("run", "How long a run that was settled took.", _WORK)
SAVED_RUN = _seconds("saved_run", "Estimate: run time that a replay saved, by the mean of runs here.", _WORK)

#: What is rare, and matters the first time.
RARE = (TAKE_OVERS, RELEASE_FAILURES, LOST, SETTLE_FAILURES, KEYS_REUSED, CRASH_LOOPS, UNPROTECTED)
CATALOGUE: tuple[Metric, ...] = tuple(value for value in list(vars().values()) if isinstance(value, Metric))
#: A run that began ends in one of these; the end of a killed process is not counted.
ENDINGS = (COMPLETED, FAILED, RELEASED, RELEASE_FAILURES, LOST, SETTLE_FAILURES)


class Measures(ABC):
    """A hook that counts; derived classes write the numbers.

    A forked child has counted nothing yet; where its numbers begin with those of its parent (`copied`), what they say
    of the parent at the moment is taken back.
    """

    copied: bool = True

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._live: set[tuple[str, int]] = set()
        self._down: dict[str, set[int]] = {}  # by class of stores: the numbers of those that are down
        self._known: set[str] = set()
        self._runs: dict[str, tuple[int, float]] = {}  # by task: how many, and their seconds

    @abstractmethod
    def write(self, metric: Metric, value: float, *labels: str) -> None:
        """Add to a counter or a gauge, or put a value into a histogram."""

    def __call__(self, event: Event) -> None:
        """Count the event."""
        if self._pid != os.getpid():
            self._after_fork()
        if event.task not in self._known:
            self._introduce(event.task)
        _MEASURES[type(event)](self, event)

    def _after_fork(self) -> None:
        self._pid, inherited, self._down = os.getpid(), self._down, {}
        for store, numbers in inherited.items():
            if numbers and self.copied:
                self.write(STORES_DOWN, -1.0, store)

    def _introduce(self, task: str) -> None:
        """Show what is rare as 0 from the first sight of a task: an increase from nothing would not be seen."""
        self._known.add(task)
        for metric in RARE if task else ():
            self.write(metric, 0.0, task)

    def _begins(self, event: Any) -> None:
        task = event.task
        self.write(STARTS, 1.0, task)
        if isinstance(event, events.TakenOver):
            self.write(TAKE_OVERS, 1.0, task)
        self.write(ACQUIRE, event.asked, task)
        self.write(WAIT, event.waited, task)
        self.write(LIVE_LEASES, 1.0, task)
        self._live.add((event.key, event.fence))

    def _ends(self, event: Any, metric: Metric, *labels: str) -> None:
        self.write(metric, 1.0, event.task, *labels)
        held = (event.key, event.fence)
        if held in self._live:  # else it is an event of the worker's main process, for a child that is gone
            self._live.discard(held)
            self.write(LIVE_LEASES, -1.0, event.task)

    def _settles(self, event: Any, metric: Metric) -> None:
        self._ends(event, metric)
        self.write(SETTLE, event.took, event.task)
        self.write(RUN, event.ran, event.task)

    def _completes(self, event: events.Completed) -> None:
        self._settles(event, COMPLETED)
        runs, seconds = self._runs.get(event.task, (0, 0.0))
        self._runs[event.task] = (runs + 1, seconds + event.ran)

    def _replays(self, event: events.Replayed) -> None:
        self.write(REPLAYED, 1.0, event.task, event.state)
        self.write(WAIT, event.waited, event.task)
        runs, seconds = self._runs.get(event.task, (0, 0.0))
        if runs:
            self.write(SAVED_RUN, seconds / runs, event.task)

    def _store_fails(self, event: events.StoreFailed) -> None:
        self.write(STORE_FAILURES, 1.0, event.store)
        down = self._down.setdefault(event.store, set())
        if not down:
            self.write(STORES_DOWN, 1.0, event.store)
        down.add(event.number)

    def _store_recovers(self, event: events.StoreRecovered) -> None:
        self.write(STORE_RECOVERIES, 1.0, event.store)
        down = self._down.get(event.store, set())
        if event.number in down:
            down.discard(event.number)
            if not down:
                self.write(STORES_DOWN, -1.0, event.store)


def _one(metric: Metric) -> Callable[[Measures, Any], None]:
    return lambda measures, event: measures.write(metric, 1.0, event.task)


def _end(metric: Metric) -> Callable[[Measures, Any], None]:
    return lambda measures, event: measures._ends(event, metric)


_MEASURES: dict[type[Event], Callable[[Measures, Any], None]] = {
    events.Acquired: Measures._begins,
    events.TakenOver: Measures._begins,
    events.Completed: Measures._completes,
    events.Failed: lambda measures, event: measures._settles(event, FAILED),
    events.Released: lambda measures, event: measures._ends(event, RELEASED, event.reason),
    events.ReleaseFailed: _end(RELEASE_FAILURES),
    events.LeaseLost: _end(LOST),
    events.SettleFailed: _end(SETTLE_FAILURES),
    events.Replayed: Measures._replays,
    events.Conflicted: _one(CONFLICTS),
    events.Deferred: _one(DEFERRED),
    events.Superseded: _one(SUPERSEDED),
    events.KeyReused: _one(KEYS_REUSED),
    events.CrashLooped: _one(CRASH_LOOPS),
    events.RanUnprotected: _one(UNPROTECTED),
    events.PublishSkipped: _one(SKIPPED),
    events.PublishReplaced: _one(REPLACED),
    events.PublishRepeated: lambda measures, event: measures.write(REPEATED, 1.0, event.task, event.reason),
    events.StoreFailed: Measures._store_fails,
    events.StoreRecovered: Measures._store_recovers,
}
