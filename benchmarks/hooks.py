"""What those who listen cost a first run: nobody, the default hooks, and the metrics."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from statistics import median
from time import monotonic
from typing import Any

from celery_idempotent import events
from celery_idempotent.celery import pool
from celery_idempotent.core.history import DeliveryEvents
from celery_idempotent.core.lease import HeldLease
from celery_idempotent.metrics.catalogue import CATALOGUE
from celery_idempotent.metrics.prometheus import DIRECTORY, PrometheusMetrics
from celery_idempotent.stores import Lease

from .figure import Figure
from .sampling import interleave, ratio, timed
from .subject import NoDelivery, Subject

__all__ = ["measure"]

NOBODY, DEFAULT = "no hooks", "default hooks"
#: Part of a first run, in percent, that the default hooks may take.
REACH = 2.0
TIMES = 1000


def measure(subject: Subject, *, blocks: int, calls: int) -> list[Figure]:
    """Time first runs, the guard included, with the logger at INFO, as Celery's workers have it.

    What the default hooks take is less than such a comparison can tell from nothing. So it is timed by itself too: all
    that is done to tell the beginning and the end of a run, which nobody then wants to hear; then with what a child of
    a prefork worker does besides, counting and showing its lease to the main process.
    """
    with _undone(), tempfile.TemporaryDirectory() as folder:
        every = events._Everything()
        lists: dict[str, list[Any]] = {
            NOBODY: [],
            DEFAULT: [(events.log, events._Logged())],
            "Prometheus beside them": [(events.log, events._Logged()), (_prometheus(None), every)],
            "Prometheus in a shared folder": [(events.log, events._Logged()), (_prometheus(folder), every)],
        }
        arms: dict[str, Callable[[], object]] = {name: partial(_run, subject, heard) for name, heard in lists.items()}
        samples = interleave(arms, blocks=blocks, calls=calls)
        events._hooks[:] = lists[DEFAULT]
        told = median(_telling(subject, _told) for _ in range(blocks))
        with _child():
            counted = median(_telling(subject, _told) for _ in range(blocks))
            shown = median(_telling(subject, _shown) for _ in range(blocks))
    figures = []
    for name, seconds in (
        ("telling of a first run, default hooks", told),
        ("the same in a worker's child, which counts", counted),
        ("and which shows its lease to `inspect`", shown),
    ):
        share = 100 * seconds / samples[NOBODY].median
        note = f"{seconds * 1e6:.1f} us of {samples[NOBODY]}"
        figures.append(Figure("hooks", name, share, "%", reach=REACH, note=note))
    for name in list(lists)[1:]:
        value, spread = ratio(samples[name].medians, samples[NOBODY].medians)
        note = f"{samples[name]}; {NOBODY} {samples[NOBODY]}"
        figures.append(Figure("hooks", f"first run, {name} / {NOBODY}", value, "x", spread, note=note))
    return figures


def _run(subject: Subject, heard: list[Any]) -> float:
    events._hooks[:] = heard
    return timed(subject.guarded)


def _telling(subject: Subject, tell: Callable[[NoDelivery, HeldLease], None]) -> float:
    """Return the seconds that it takes to tell that a run began and ended."""
    claim, since = subject.claim(), monotonic()
    delivery = NoDelivery(DeliveryEvents(claim, "shop.charge", "id"))
    holding = HeldLease(subject.store, Lease(claim, 1), since)

    def often() -> None:
        for _ in range(TIMES):
            tell(delivery, holding)

    return timed(often) / TIMES


def _told(delivery: NoDelivery, holding: HeldLease) -> None:
    delivery.emit_start(holding)
    delivery.emit_end(holding, events.Completed, ran=1.0, took=0.1)


def _shown(delivery: NoDelivery, holding: HeldLease) -> None:
    delivery.emit_start(holding)
    pool.begin(holding, "shop.charge", delivery.task_id)
    pool.end(holding)
    delivery.emit_end(holding, events.Completed, ran=1.0, took=0.1)


@contextmanager
def _child() -> Iterator[None]:
    """Let this process count and show its leases as the first child of a prefork worker does."""
    pool.prepare()
    pool.slot = 1
    try:
        yield
    finally:
        pool.slot = 0
        events.remove_counter(pool.count)


def _prometheus(folder: str | None) -> PrometheusMetrics:
    """Return a hook whose numbers are in memory, or in a folder as those of a pool's children."""
    from prometheus_client import CollectorRegistry, values

    if folder is not None:
        os.environ[DIRECTORY] = folder
    known, values.ValueClass = values.ValueClass, values.MutexValue if folder is None else values.MultiProcessValue()
    try:
        made = PrometheusMetrics(CollectorRegistry())
        for metric in CATALOGUE:
            made.write(metric, 0.0, *["shop.charge"] * len(metric.labels))
        return made
    finally:
        values.ValueClass = known


@contextmanager
def _undone() -> Iterator[None]:
    """Put back afterwards who listens, and at which level."""
    before, level, folder = list(events._hooks), events.logger.level, os.environ.get(DIRECTORY)
    events.logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        events._hooks[:] = before
        events.logger.setLevel(level)
        os.environ.pop(DIRECTORY, None)
        if folder is not None:
            os.environ[DIRECTORY] = folder
