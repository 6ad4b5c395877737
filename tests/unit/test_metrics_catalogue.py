"""Every event is counted somewhere, runs add up, and no label is as many as there are operations."""

from __future__ import annotations

import os
from collections import Counter
from contextlib import suppress
from typing import Any

import pytest

from celery_idempotent import events
from celery_idempotent.events import Event
from celery_idempotent.metrics import catalogue
from celery_idempotent.metrics.catalogue import CATALOGUE, ENDINGS, Kind, Measures, Metric
from celery_idempotent.stores import State
from tests.support.unit.scripted import listening
from tests.unit.test_guard import Bench, Declined, bench, clock, heard

__all__ = ["bench", "clock", "heard"]


class Written(Measures):
    """Remembers what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.sums: Counter[tuple[str, ...]] = Counter()
        self.values: dict[str, list[float]] = {}

    def write(self, metric: Metric, value: float, *labels: str) -> None:
        assert len(labels) == len(metric.labels), metric
        if metric.kind is Kind.HISTOGRAM:
            self.values.setdefault(metric.name, []).append(value)
        else:
            self.sums[(metric.name, *labels)] += value  # type: ignore[assignment]

    def total(self, *metrics: Metric) -> int:
        wanted = {metric.name for metric in metrics}
        return sum(value for (name, *_), value in self.sums.items() if name in wanted)


@pytest.fixture
def written(bench: Bench) -> Any:
    written = Written()
    events.add_hook(written)
    yield written
    events.remove_hook(written)


def kinds() -> list[type[Event]]:
    found = [getattr(events, name) for name in events.__all__]
    return [kind for kind in found if issubclass(kind, Event) and kind is not Event]


@pytest.mark.parametrize("kind", kinds(), ids=lambda kind: kind.__name__)
def test_every_event_is_counted(kind: type[Event]) -> None:
    measures = Written()
    measures(kind("k", "t"))
    assert any(measures.sums.values())


def test_a_metric_is_told_apart_by_words_and_never_by_keys_or_ids() -> None:
    assert {label for metric in CATALOGUE for label in metric.labels} == {"task", "state", "reason", "store"}


@pytest.mark.parametrize("metric", CATALOGUE, ids=lambda metric: metric.name)
def test_a_name_says_what_prometheus_wants_it_to_say(metric: Metric) -> None:
    assert metric.prometheus.startswith("celery_idempotent_")
    assert metric.prometheus.endswith("_total") is (metric.kind is Kind.COUNTER)
    assert metric.prometheus.endswith("_seconds") is (metric.unit == "s")
    assert bool(metric.buckets) is (metric.kind is Kind.HISTOGRAM)
    assert list(metric.buckets) == sorted(metric.buckets)


def test_runs_add_up(bench: Bench, written: Written) -> None:
    live: list[int] = []

    def body(holding: Any) -> None:
        live.append(written.total(catalogue.LIVE_LEASES))

    def fresh(name: str) -> Any:
        return bench.claim(key=f"idem:t:{name}")

    bench.deliver(body, fresh("completes"))
    for error in (ValueError("no"), Declined("no funds"), SystemExit(1)):
        with suppress(Exception, SystemExit):
            bench.deliver(error, fresh(str(error)))
    bench.deliver(lambda holding: bench.overtake("b"), bench.claim())
    bench.deliver(lambda holding: bench.store.down("settle"), fresh("is not settled"))
    bench.store.down("release")
    with suppress(ValueError):
        bench.deliver(ValueError("no"), fresh("is not released"))
    assert live == [1]
    assert written.total(catalogue.LIVE_LEASES) == 0
    assert written.total(catalogue.STARTS) == written.total(*ENDINGS) == 7
    assert {metric.name: written.total(metric) for metric in ENDINGS} == {
        "completed": 1,
        "failed": 1,
        "released": 2,
        "release_failures": 1,
        "lost": 1,
        "settle_failures": 1,
    }


def test_what_the_main_process_releases_for_a_child_that_is_gone_takes_no_lease_of_its_own_away() -> None:
    measures = Written()
    measures(events.Released("k", "t", "i", fence=7, reason="crashed"))
    assert {place: value for place, value in measures.sums.items() if value} == {("released", "t", "crashed"): 1}


def test_what_is_rare_is_shown_as_nothing_from_the_first_sight_of_a_task() -> None:
    measures = Written()
    for event in (events.Acquired("k", "t"), events.Acquired("l", "t"), events.StoreFailed("", store="S")):
        measures(event)
    assert {name for (name, *labels), value in measures.sums.items() if not value and labels == ["t"]} == {
        metric.name for metric in catalogue.RARE
    }
    assert not any(labels == [""] for _, *labels in measures.sums)


def test_times_are_measured_where_events_have_them() -> None:
    measures = Written()
    measures(events.TakenOver("k", "t", fence=1, asked=0.5, waited=2.0))
    measures(events.Completed("k", "t", fence=1, ran=4.0, took=0.25))
    assert measures.values == {"acquire": [0.5], "wait": [2.0], "run": [4.0], "settle": [0.25]}
    assert measures.sums[("take_overs", "t")] == measures.sums[("starts", "t")] == 1


def test_a_replay_saves_the_mean_run_of_its_task_where_one_was_seen() -> None:
    measures = Written()
    replay = events.Replayed("k", "t", state=State.COMPLETED.value, waited=0.1)
    measures(replay)
    assert "saved_run" not in measures.values
    measures(events.Completed("k", "t", ran=1.0))
    measures(events.Completed("k", "t", ran=3.0))
    measures(events.Completed("k", "other", ran=100.0))
    measures(replay)
    assert measures.values["saved_run"] == [2.0]
    assert measures.sums[("replayed", "t", "completed")] == 2


def test_a_store_is_down_once_however_often_it_fails() -> None:
    measures = Written()
    for event in (events.StoreRecovered("", store="S"), *[events.StoreFailed("", store="S")] * 2):
        measures(event)
    assert measures.sums[("stores_down", "S")] == 1
    measures(events.StoreRecovered("", store="S"))
    assert measures.sums[("stores_down", "S")] == 0


def test_a_process_is_counted_until_all_its_stores_of_a_kind_serve_again() -> None:
    measures, down = Written(), []
    for event in (
        events.StoreFailed("", store="S", number=1),
        events.StoreFailed("", store="S", number=2),
        events.StoreRecovered("", store="S", number=1),
        events.StoreRecovered("", store="S", number=1),
        events.StoreRecovered("", store="S", number=2),
    ):
        measures(event)
        down.append(measures.sums[("stores_down", "S")])
    assert down == [1, 1, 1, 1, 0]


@pytest.mark.parametrize("copied", [True, False])
def test_a_forked_child_counts_what_it_finds_itself(copied: bool) -> None:
    """Where its numbers begin with those of its parent, and where they begin at 0."""
    measures = Written()
    measures.copied = copied
    measures(events.StoreFailed("", store="S", number=1))
    measures(events.StoreFailed("", store="other", number=2))
    measures(events.StoreRecovered("", store="other", number=2))
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        begin = 0 if copied else measures.sums[("stores_down", "S")]
        found = []
        for event in (
            events.Acquired("k"),
            events.StoreRecovered("", store="S", number=1),
            events.StoreFailed("", store="S", number=1),
            events.StoreRecovered("", store="S", number=1),
        ):
            measures(event)
            found.append(int(measures.sums[("stores_down", "S")] - begin))
        os.write(writing, repr((found, int(measures.sums[("stores_down", "other")]))).encode())
        os._exit(0)
    os.close(writing)
    with open(reading) as pipe:
        assert pipe.read() == "([0, 0, 1, 0], 0)"
    os.waitpid(pid, 0)


def test_the_listener_of_these_tests_hears_everything() -> None:
    told = listening()
    heard_here = next(told)
    events.emit(events.Acquired("k"))
    assert heard_here == [events.Acquired("k")]
    next(told, None)
