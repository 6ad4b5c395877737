"""Prometheus: what is exposed, by one process and by several."""

from __future__ import annotations

import builtins
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from celery_idempotent import events
from celery_idempotent.errors import ConfigurationError
from celery_idempotent.metrics import prometheus
from celery_idempotent.metrics.catalogue import CATALOGUE, Kind
from celery_idempotent.metrics.prometheus import Endpoint, PrometheusMetrics
from tests.support.exposition import samples, scrape
from tests.support.servers import free_port

prometheus_client = pytest.importorskip("prometheus_client")


ROOT = Path(__file__).parents[2]


@pytest.fixture
def exposed() -> tuple[PrometheusMetrics, Callable[[], dict[tuple[str, ...], float]]]:
    registry = prometheus_client.CollectorRegistry()
    metrics = PrometheusMetrics(registry)
    return metrics, lambda: samples(prometheus_client.generate_latest(registry).decode())


def test_a_run_is_exposed_under_the_names_of_the_catalogue(exposed: Any) -> None:
    metrics, read = exposed
    metrics(events.Acquired("k", "shop.charge", fence=1, asked=0.003, waited=0.02))
    assert read()[("celery_idempotent_live_leases", "shop.charge")] == 1
    metrics(events.Completed("k", "shop.charge", fence=1, ran=2.0, took=0.001))
    found = read()
    assert found[("celery_idempotent_starts_total", "shop.charge")] == 1
    assert found[("celery_idempotent_completed_total", "shop.charge")] == 1
    assert found[("celery_idempotent_live_leases", "shop.charge")] == 0
    assert found[("celery_idempotent_run_seconds_sum", "shop.charge")] == 2.0
    assert found[("celery_idempotent_acquire_seconds_bucket", "0.005", "shop.charge")] == 1
    assert found[("celery_idempotent_acquire_seconds_bucket", "0.0025", "shop.charge")] == 0


def test_every_metric_of_the_catalogue_is_exposed_with_its_help(exposed: Any) -> None:
    registry = prometheus_client.CollectorRegistry()
    PrometheusMetrics(registry)
    text = prometheus_client.generate_latest(registry).decode()
    for metric in CATALOGUE:
        assert f"# HELP {metric.prometheus} {metric.help}" in text
        assert f"# TYPE {metric.prometheus} {metric.kind.value}" in text


def test_a_second_hook_in_the_same_registry_is_refused() -> None:
    registry = prometheus_client.CollectorRegistry()
    PrometheusMetrics(registry)
    with pytest.raises(ValueError, match="Duplicated timeseries"):
        PrometheusMetrics(registry)


def test_without_the_driver_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def absent(name: str, *args: Any, **options: Any) -> Any:
        if name.startswith("prometheus_client"):
            raise ImportError(name)
        return real(name, *args, **options)

    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(ConfigurationError, match=r'pip install "celery-idempotent\[prometheus\]"'):
        PrometheusMetrics()


def test_one_process_exposes_its_own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(prometheus.DIRECTORY, raising=False)
    assert prometheus.registry() is prometheus_client.REGISTRY
    prometheus._end_child(os.getpid())  # nothing to mark


def test_installing_adds_the_hook_and_makes_the_folder_that_processes_share(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(events, "_hooks", list(events._hooks))
    monkeypatch.setattr(prometheus_client, "REGISTRY", prometheus_client.CollectorRegistry())
    monkeypatch.setenv(prometheus.DIRECTORY, str(tmp_path / "run" / "worker"))
    metrics = prometheus.install()
    assert (tmp_path / "run" / "worker").is_dir()
    events.remove_hook(metrics)
    with pytest.raises(ValueError, match="Duplicated timeseries"):
        prometheus.install(port=9540)


@pytest.mark.parametrize(("options", "address"), [({}, "127.0.0.1"), ({"address": "0.0.0.0"}, "0.0.0.0")])
def test_a_worker_serves_its_metrics_on_loopback_unless_it_is_given_another_address(
    options: dict[str, str], address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(prometheus.DIRECTORY, raising=False)
    monkeypatch.setattr(events, "_hooks", list(events._hooks))
    monkeypatch.setattr(prometheus_client, "REGISTRY", prometheus_client.CollectorRegistry())
    made: list[Endpoint] = []
    monkeypatch.setattr(Endpoint, "connect", lambda endpoint: made.append(endpoint))
    prometheus.install(port=free_port(), **options)
    [endpoint] = made
    endpoint.open()
    try:
        assert endpoint._server.socket.getsockname() == (address, endpoint.port)
    finally:
        endpoint.close()


FAMILY = """
import os, signal, sys
from celery_idempotent import events
from celery_idempotent.metrics import prometheus
import prometheus_client

metrics = prometheus.PrometheusMetrics()
pids = []
for end in ("clean", "killed", "live"):
    ready, done = os.pipe()
    pid = os.fork()
    if not pid:
        metrics(events.Acquired("k", "t", fence=1))
        if end == "clean":
            metrics(events.Completed("k", "t", fence=1, ran=2.0))
            prometheus._end_child(pid=os.getpid())
        os.write(done, b"x")
        if end == "clean":
            os._exit(0)
        signal.pause()
    os.read(ready, 1)
    pids.append(pid)
os.waitpid(pids[0], 0)
print(prometheus_client.generate_latest(prometheus.registry()).decode(), "=====")
os.kill(pids[1], signal.SIGKILL)
os.waitpid(pids[1], 0)
metrics(events.Released("k", "t", fence=1, reason="crashed"))
print(prometheus_client.generate_latest(prometheus.registry()).decode())
os.kill(pids[2], signal.SIGKILL)
"""


def test_processes_that_share_a_folder_are_added_up_and_a_dead_one_holds_nothing(tmp_path: Path) -> None:
    env = {**os.environ, prometheus.DIRECTORY: str(tmp_path)}
    run = subprocess.run([sys.executable, "-c", FAMILY], env=env, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    before, after = (samples(text) for text in run.stdout.split("====="))
    assert before[("celery_idempotent_starts_total", "t")] == 3
    assert before[("celery_idempotent_live_leases", "t")] == 2
    assert after[("celery_idempotent_starts_total", "t")] == 3
    assert after[("celery_idempotent_live_leases", "t")] == 1
    assert after[("celery_idempotent_released_total", "crashed", "t")] == 1


FORKED_WHILE_DOWN = """
import os
from celery_idempotent import events
from celery_idempotent.metrics import prometheus
import prometheus_client

events.add_hook(prometheus.PrometheusMetrics())
events.emit(events.StoreFailed("", store="RedisStore", number=1))
ready, told = os.pipe()
go, gone = os.pipe()
for _ in range(4):
    if not os.fork():
        events.emit(events.StoreRecovered("", store="RedisStore", number=1))
        os.write(told, b"x")
        os.read(go, 1)
        os._exit(0)
    os.read(ready, 1)
print(prometheus_client.generate_latest(prometheus.registry()).decode())
os.write(gone, b"1234")
"""


def test_children_that_are_forked_while_the_store_is_down_do_not_make_up_for_their_parent(tmp_path: Path) -> None:
    env = {**os.environ, prometheus.DIRECTORY: str(tmp_path)}
    code = [sys.executable, "-c", FORKED_WHILE_DOWN]
    run = subprocess.run(code, env=env, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    assert samples(run.stdout)[("celery_idempotent_stores_down", "RedisStore")] == 1


def test_a_folder_that_is_gone_is_said_and_hurts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(pid: int) -> None:
        raise PermissionError("read-only")

    monkeypatch.setenv(prometheus.DIRECTORY, str(tmp_path))
    monkeypatch.setattr("prometheus_client.multiprocess.mark_process_dead", refuse)
    prometheus._end_child()
    assert "could not be marked as those of a dead one: read-only" in caplog.text


def test_gauges_are_summed_over_living_processes_alone() -> None:
    registry = prometheus_client.CollectorRegistry()
    made = PrometheusMetrics(registry)._metrics
    gauges = [made[metric.name] for metric in CATALOGUE if metric.kind is Kind.GAUGE]
    assert {gauge._multiprocess_mode for gauge in gauges} == {"livesum"}


def test_another_users_process_is_alive() -> None:
    assert prometheus._is_alive(os.getpid())
    assert prometheus._is_alive(1)


# -- a worker's endpoint -----------------------------------------------------------------------------------------------


class Consumer:
    """What Celery says is ready."""

    def __init__(self, pool: object = None) -> None:
        self.pool = pool


def test_a_worker_answers_from_when_it_is_ready_until_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(prometheus.DIRECTORY, raising=False)
    endpoint = Endpoint(free_port(), "127.0.0.1")
    endpoint.open(sender=Consumer())
    assert scrape(endpoint.port)
    endpoint.close()
    endpoint.close()
    with pytest.raises(OSError, match="refused"):
        scrape(endpoint.port)


def test_a_port_that_is_taken_is_said_and_the_worker_works(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        endpoint = Endpoint(taken.getsockname()[1], "127.0.0.1")
        endpoint.open(sender=Consumer())
        endpoint.close()
    assert f"/metrics cannot be served at 127.0.0.1:{endpoint.port}" in caplog.text


@pytest.mark.parametrize("derive", [False, True])
def test_a_pool_of_processes_without_a_folder_to_share_is_told_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, derive: bool
) -> None:
    from celery.concurrency.prefork import TaskPool

    pool = type("OwnPool", (TaskPool,), {}) if derive else TaskPool
    monkeypatch.delenv(prometheus.DIRECTORY, raising=False)
    endpoint = Endpoint(free_port(), "127.0.0.1")
    endpoint.open(sender=Consumer(pool(1)))
    endpoint.close()
    assert "Set PROMETHEUS_MULTIPROC_DIR to an empty folder" in caplog.text


def test_a_child_lets_go_of_the_port_that_it_inherits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(prometheus.DIRECTORY, raising=False)
    endpoint = Endpoint(free_port(), "127.0.0.1")
    endpoint.leave()
    endpoint.open(sender=Consumer())
    parents = endpoint._server
    child = os.fork()
    if not child:
        endpoint.leave()
        os._exit(0 if parents.socket.fileno() == -1 and endpoint._server is None else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert scrape(endpoint.port)
    endpoint.close()
