"""`celery inspect stats` says what has happened in a worker, in its main process and all its children together."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
from billiard.process import current_process
from celery import Celery

from celery_idempotent import events
from celery_idempotent.celery import pool as counts
from celery_idempotent.events import Acquired, Event, Replayed
from tests.support.celery.fixtures import StartWorker
from tests.support.celery.gates import Gates
from tests.support.celery.journal import Journal
from tests.support.celery.nodes import WorkerNode
from tests.support.waiting import wait_until

SHOP = "tests.support.celery.shop"
POOLS = ["prefork", "threads", "solo", "gevent"]


@pytest.fixture
def app(client_app: Callable[..., Celery]) -> Celery:
    return client_app(SHOP)


def section(app: Celery, node: WorkerNode) -> dict[str, int]:
    """Return what the worker says in its statistics."""
    answers = wait_until(lambda: app.control.inspect([node.hostname()], timeout=5).stats(), 20, "the worker to reply")
    return dict(answers[node.hostname()]["idempotency"])


@pytest.mark.parametrize("pool", [pytest.param("prefork", marks=pytest.mark.smoke), *POOLS[1:]])
def test_a_worker_says_how_often_each_kind_of_thing_happened(app: Celery, start_worker: StartWorker, pool: str) -> None:
    node = start_worker(SHOP, pool=pool, concurrency=1 if pool == "solo" else 2)
    assert section(app, node) == {"leases": 0}
    for _ in range(3):
        app.module.charge.delay("ORD-1").get(timeout=20)
    with pytest.raises(ValueError, match="no ORD-2"):
        app.module.failing.delay("ORD-2").get(timeout=20)
    expected = {"leases": 0, "acquired": 2, "completed": 1, "released": 1, "replayed": 2}
    wait_until(lambda: section(app, node) == expected, 20, lambda: f"{expected}, not {section(app, node)}")


@pytest.mark.nightly
def test_what_each_child_and_the_main_process_count_is_added_up(
    app: Celery, start_worker: StartWorker, gates: Gates, journal: Journal
) -> None:
    node = start_worker(SHOP, concurrency=2)
    gate = gates.close("before ORD-1")
    first = app.module.charge.delay("ORD-1")
    (holder,) = gate.reached()
    for number in range(2, 6):  # in the other child
        app.module.charge.delay(f"ORD-{number}").get(timeout=20)
    assert {entry.pid for entry in journal.entries("charged")} == set(node.children()) - {holder}
    assert section(app, node) == {"leases": 1, "acquired": 5, "completed": 4}
    node.kill_child(holder)  # its lease is released by the main process; what it has counted stays
    gate.open()
    first.get(timeout=30)
    expected = {"leases": 0, "acquired": 6, "completed": 5, "released": 1}
    wait_until(lambda: section(app, node) == expected, 20, lambda: f"{expected}, not {section(app, node)}")


@pytest.mark.nightly
def test_children_that_replace_others_go_on_where_those_left_off(app: Celery, start_worker: StartWorker) -> None:
    node = start_worker(SHOP, concurrency=1, extra_args=["--max-tasks-per-child=1"])
    before = set(node.children())
    for number in range(4):
        app.module.charge.delay(f"ORD-{number}").get(timeout=30)
    wait_until(lambda: section(app, node) == {"leases": 0, "acquired": 4, "completed": 4}, 20, "four runs")
    assert not before & set(node.children())


class TestInOneProcess:
    @pytest.fixture(autouse=True)
    def prepared(self, monkeypatch: pytest.MonkeyPatch) -> Any:
        for name in ("_memory", "_cells", "slot"):
            monkeypatch.setattr(counts, name, getattr(counts, name))
        counts.prepare()
        yield
        events.remove_counter(counts.count)

    def test_an_event_is_counted_though_nobody_hears_it(self) -> None:
        assert not events.receivers(Acquired)
        events.emit(Replayed("k"))
        events.emit(Replayed("k"))
        assert counts.counts() == {"acquired": 1, "replayed": 2}

    def test_a_process_that_is_no_worker_counts_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(counts, "_cells", None)
        events.receivers(Acquired)
        assert counts.counts() == {}

    def test_a_shutdown_that_comes_a_little_later_than_its_signal_is_waited_for(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        announced = threading.Timer(0.1, counts.announce_stop)
        announced.start()
        assert counts.stops_soon()
        announced.join()
        counts._memory[counts._STOPPING] = 0
        monkeypatch.setattr(counts, "STOP_LAG", 0.05)
        assert not counts.stops_soon()

    def test_threads_of_a_process_lose_no_count(self) -> None:
        threads = [threading.Thread(target=lambda: [counts.count(Acquired) for _ in range(20_000)]) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert counts.counts() == {"acquired": 80_000}

    def test_a_kind_of_somebody_elses_is_not_counted(self) -> None:
        class Audited(Event):
            pass

        events.emit(Audited("k"))
        assert counts.counts() == {}

    def test_processes_that_a_task_forks_write_to_no_slot_and_are_not_held_by_a_lock(self) -> None:
        with counts.lock:  # as another thread may at that moment
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # of forking while other threads run
                child = os.fork()
            if not child:
                counts.count(Acquired)
                os._exit(0 if counts.slot is None and not counts.lock.locked() else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert counts.counts() == {}

    def test_children_of_the_pool_have_each_their_own_slot(self, monkeypatch: pytest.MonkeyPatch) -> None:
        taken = []
        for index in (0, 1, counts.SLOTS - 2, counts.SLOTS - 1):  # there is no slot for the last
            monkeypatch.setattr(counts, "slot", None)
            monkeypatch.setattr(current_process(), "index", index, raising=False)
            counts._take_slot()
            taken.append(counts.slot)
            counts.count(Acquired)
        assert taken == [1, 2, counts.SLOTS - 1, None]
        assert counts.counts() == {"acquired": 3}
        assert counts.children() == dict.fromkeys(taken[:3], os.getpid())

    def test_a_counter_that_raises_is_logged_and_hurts_nobody(self, caplog: pytest.LogCaptureFixture) -> None:
        def broken(kind: type[Event]) -> None:
            raise RuntimeError("no such metric")

        events.add_counter(broken)
        events.add_counter(broken)  # the same as once
        try:
            events.receivers(Acquired)
        finally:
            events.remove_counter(broken)
        assert caplog.text.count("The counter") == 1
        with pytest.raises(ValueError, match="not in list"):
            events.remove_counter(broken)
