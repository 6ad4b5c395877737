"""`/metrics` of a real worker adds up what happened in all its children, also in one that was killed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from celery import Celery

from celery_idempotent.metrics.catalogue import ENDINGS
from celery_idempotent.metrics.prometheus import DIRECTORY
from tests.support.celery.fixtures import StartWorker
from tests.support.celery.gates import Gates
from tests.support.exposition import scrape
from tests.support.servers import free_port
from tests.support.waiting import wait_until

pytest.importorskip("prometheus_client")

MODULE = "tests.support.celery.metrics_app"
CHARGE, FLAKY, SLOW = (f"{MODULE}.{name}" for name in ("charge", "flaky", "slow"))


def value(port: int, name: str, *labels: str) -> float:
    return scrape(port).get((f"celery_idempotent_{name}", *labels), 0.0)


def total(found: dict[tuple[str, ...], float], name: str) -> float:
    return sum(number for (known, *_), number in found.items() if known == name)


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "metrics"
    folder.mkdir()
    return folder


def test_the_numbers_of_all_children_are_added_up_a_killed_one_included(
    client_app: Callable[..., Celery], start_worker: StartWorker, gates: Gates, port: int, folder: Path
) -> None:
    worker = start_worker(MODULE, concurrency=2, env={"METRICS_PORT": str(port), DIRECTORY: str(folder)})
    app = client_app(MODULE)
    gate = gates["ORD-3"].close()
    slow = app.module.slow.delay("ORD-3")
    [child] = gate.reached()
    assert app.module.charge.delay("ORD-1").get(timeout=20) == "charged ORD-1"
    assert [app.module.charge.delay("ORD-1").get(timeout=20) for _ in range(2)] == ["charged ORD-1"] * 2
    assert app.module.flaky.delay("ORD-2").get(timeout=20) == "charged ORD-2"
    # A child answers before it counts: what it counts last is waited for.
    wait_until(lambda: value(port, "completed_total", FLAKY) == 1, message="the retry to be counted")
    assert value(port, "live_leases", SLOW) == 1
    worker.kill_child(child)
    assert slow.get(timeout=30) == "charged ORD-3"
    wait_until(lambda: value(port, "completed_total", SLOW) == 1, message="the second run to be counted")

    found = scrape(port)

    def of(name: str, *labels: str) -> float:
        return found.get((f"celery_idempotent_{name}", *labels), 0.0)

    assert [of("starts_total", task) for task in (CHARGE, FLAKY, SLOW)] == [1, 2, 2]
    assert [of("completed_total", task) for task in (CHARGE, FLAKY, SLOW)] == [1, 1, 1]
    assert of("replayed_total", "completed", CHARGE) == 2
    assert of("wait_seconds_count", CHARGE) == 3
    assert of("released_total", "retry", FLAKY) == 1
    assert of("released_total", "crashed", SLOW) == 1
    assert [of("live_leases", task) for task in (CHARGE, FLAKY, SLOW)] == [0, 0, 0]
    endings = sum(total(found, metric.prometheus) for metric in ENDINGS)
    assert endings == total(found, "celery_idempotent_starts_total") == 5
    assert len(list(folder.glob("counter_*.db"))) >= 3, "both first children, and who counts for the killed one"


@pytest.mark.nightly
def test_a_child_that_has_released_its_lease_itself_is_not_counted_again_by_its_worker(
    client_app: Callable[..., Celery], start_worker: StartWorker, port: int, folder: Path
) -> None:
    start_worker(MODULE, concurrency=1, env={"METRICS_PORT": str(port), DIRECTORY: str(folder)})
    assert client_app(MODULE).module.leaves.delay("ORD-1").get(timeout=30) == "charged ORD-1"
    task = f"{MODULE}.leaves"
    wait_until(lambda: value(port, "completed_total", task) == 1, message="the second run to be counted")
    assert value(port, "starts_total", task) == 2
    assert value(port, "released_total", "crashed", task) == 1


def test_a_worker_that_is_told_to_end_gives_its_port_back(start_worker: StartWorker, port: int, folder: Path) -> None:
    worker = start_worker(MODULE, concurrency=1, env={"METRICS_PORT": str(port), DIRECTORY: str(folder)})
    assert scrape(port) == {}
    assert worker.stop() == 0
    with pytest.raises(OSError, match="refused"):
        scrape(port)
    assert list(folder.glob("gauge_live*")) == []


@pytest.mark.parametrize("pool", ["threads", "solo", "gevent", pytest.param("eventlet", marks=pytest.mark.nightly)])
def test_a_pool_without_children_needs_no_folder(
    client_app: Callable[..., Celery], start_worker: StartWorker, port: int, pool: str
) -> None:
    start_worker(MODULE, pool=pool, env={"METRICS_PORT": str(port)})
    app = client_app(MODULE)
    assert [app.module.charge.delay("ORD-1").get(timeout=20) for _ in range(2)] == ["charged ORD-1"] * 2
    wait_until(lambda: value(port, "replayed_total", "completed", CHARGE) == 1, message="the replay to be counted")
    assert value(port, "starts_total", CHARGE) == value(port, "completed_total", CHARGE) == 1
    assert value(port, "saved_run_seconds_count", CHARGE) == 1


@pytest.mark.nightly
@pytest.mark.parametrize("pool", ["gevent", pytest.param("eventlet", marks=pytest.mark.nightly)])
def test_greenlets_that_run_and_wait_at_the_same_time_are_counted_each(
    client_app: Callable[..., Celery], start_worker: StartWorker, gates: Gates, port: int, pool: str
) -> None:
    start_worker(MODULE, pool=pool, concurrency=20, env={"METRICS_PORT": str(port)})
    slow, orders = client_app(MODULE).module.slow, [f"ORD-{number}" for number in range(8)]
    closed = [gates[order].close() for order in orders]
    results = [slow.delay(order) for order in orders]
    for gate in closed:
        gate.reached()
    wait_until(lambda: value(port, "live_leases", SLOW) == 8, message="the worker to answer while its bodies run")
    results += [slow.delay(order) for order in orders]
    wait_until(lambda: value(port, "conflicts_total", SLOW) >= 8, message="every duplicate to meet its operation")
    wait_until(lambda: value(port, "deferred_total", SLOW) >= 8, message="every duplicate to be deferred")
    for gate in closed:
        gate.open()
    assert [result.get(timeout=60) for result in results] == [f"charged {order}" for order in orders] * 2
    wait_until(lambda: value(port, "replayed_total", "completed", SLOW) == 8, message="the replays to be counted")
    assert value(port, "starts_total", SLOW) == value(port, "completed_total", SLOW) == 8
    assert value(port, "run_seconds_count", SLOW) == value(port, "acquire_seconds_count", SLOW) == 8
    assert value(port, "live_leases", SLOW) == 0
