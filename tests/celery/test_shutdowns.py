"""Workers that stop, lose their broker or are killed: what their tasks leave behind."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable

import pytest
from celery import Celery
from celery import __version__ as celery_version

from celery_idempotent.records import State
from tests.celery.aftermath import PARTING, Aftermath
from tests.celery.fixtures import StartWorker
from tests.celery.gates import Gates
from tests.celery.nodes import WorkerNode
from tests.proxy import Proxy
from tests.servers import RedisServer
from tests.waiting import wait_until


def tell(node: WorkerNode, number: int) -> None:
    """Send a signal to the main process."""
    assert node.container.process is not None
    node.container.process.send_signal(number)


def wait_until_ended(node: WorkerNode) -> None:
    wait_until(lambda: not node.running, 30, lambda: f"the worker to end; its log:\n{node.logs()}")


@pytest.mark.ending("warm shutdown")
def test_a_warm_shutdown_lets_the_task_end(
    parting: Celery, start_worker: StartWorker, aftermath: Aftermath, gates: Gates
) -> None:
    gate = gates.close("before ORD-1")
    node = start_worker(PARTING, concurrency=1)
    result = parting.module.part.delay("ORD-1")
    gate.reached()
    tell(node, signal.SIGTERM)
    wait_until(lambda: "Warm shutdown" in node.logs())
    aftermath.expect(result, "PENDING", State.IN_PROGRESS, messages=1, effects=0)
    gate.open()
    wait_until_ended(node)
    aftermath.expect(result, "SUCCESS", State.COMPLETED)


@pytest.mark.ending("soft shutdown")
@pytest.mark.skipif(tuple(map(int, celery_version.split(".")[:2])) < (5, 5), reason="Celery 5.5 brought it")
def test_a_soft_shutdown_lets_end_what_can_and_gives_back_the_rest(
    parting: Celery, start_worker: StartWorker, aftermath: Aftermath, gates: Gates
) -> None:
    short, long = gates.close("before ORD-1"), gates.close("before ORD-2")
    settings = json.dumps({"worker_soft_shutdown_timeout": 2.0})
    node = start_worker(PARTING, concurrency=2, env={"SETTINGS": settings, "LEASE_TTL": "600"})
    results = {order: parting.module.part.delay(order) for order in ("ORD-1", "ORD-2")}
    short.reached()
    long.reached()
    tell(node, signal.SIGQUIT)
    wait_until(lambda: "Initiating Soft Shutdown" in node.logs())
    short.open()
    wait_until_ended(node)
    aftermath.expect(results["ORD-2"], "PENDING", State.RELEASED, "shutdown", order="ORD-2", messages=1, effects=0)
    aftermath.expect(results["ORD-1"], "SUCCESS", State.COMPLETED, messages=1)
    long.open()
    start_worker(PARTING, concurrency=1)
    aftermath.expect(results["ORD-2"], "SUCCESS", State.COMPLETED, order="ORD-2")


@pytest.mark.ending("cold shutdown")
def test_a_cold_shutdown_gives_the_task_back_and_is_no_crash(
    parting: Celery, start_worker: StartWorker, aftermath: Aftermath, gates: Gates
) -> None:
    gate = gates.close("before ORD-1")
    node = start_worker(PARTING, concurrency=1, env={"LEASE_TTL": "600", "MAX_CRASHES": "1"})
    result = parting.module.part.delay("ORD-1")
    gate.reached()
    tell(node, signal.SIGQUIT)
    wait_until_ended(node)
    aftermath.expect(result, "PENDING", State.RELEASED, "shutdown", messages=1, effects=0)
    gate.open()
    start_worker(PARTING, concurrency=1, env={"MAX_CRASHES": "1"})
    aftermath.expect(result, "SUCCESS", State.COMPLETED)


@pytest.mark.ending("worker killed")
def test_a_body_deaf_to_the_shutdown_costs_its_lease_and_one_crash_when_the_worker_is_killed(
    parting: Celery, start_worker: StartWorker, aftermath: Aftermath
) -> None:
    """The main process waits for the child, and whoever started it loses patience: nobody is left to release."""
    options = {"concurrency": 1, "visibility_timeout": 1, "env": {"LEASE_TTL": "2", "MAX_CRASHES": "1"}}
    node = start_worker(PARTING, **options)
    result = parting.module.part.delay("ORD-1", "hold on")
    aftermath.journal.wait_for_count(1, "charged")
    tell(node, signal.SIGQUIT)
    aftermath.journal.wait_for_count(1, "heard")
    node.kill("SIGKILL")
    aftermath.expect(result, "PENDING", State.IN_PROGRESS, messages=1)
    start_worker(PARTING, **options)
    aftermath.expect(result, "FAILURE", State.RELEASED, "crash_loop", crashes=1)


@pytest.fixture
def broker(
    own_redis: Callable[..., RedisServer], proxied: Callable[[int], Proxy], worker_env: dict[str, str]
) -> tuple[RedisServer, Proxy]:
    """A broker behind a proxy, by which the workers reach it and the tests do not."""
    server = own_redis()
    worker_env["BROKER_URL"] = server.url()
    return server, proxied(server.port)


@pytest.mark.ending("broker connection lost")
def test_a_body_whose_worker_loses_the_broker_goes_on_and_its_copies_replay(
    broker: tuple[RedisServer, Proxy],
    parting: Celery,
    start_worker: StartWorker,
    aftermath: Aftermath,
    gates: Gates,
) -> None:
    gate = gates.close("before ORD-1")
    node = start_worker(PARTING, broker_url=broker[1].url(), concurrency=2)
    result = parting.module.part.delay("ORD-1")
    gate.reached()
    broker[1].reset()
    wait_until(lambda: "copy=1" in node.logs(), 30, lambda: f"a copy to be deferred; its log:\n{node.logs()}")
    assert aftermath.of(result)["record"] == "in_progress"
    gate.open()
    aftermath.expect(result, "SUCCESS", State.COMPLETED)
    assert aftermath.journal.count("started") == 1


@pytest.mark.ending("broker connection lost, cancelling")
def test_a_body_that_is_cancelled_with_the_connection_is_no_crash_and_runs_again(
    broker: tuple[RedisServer, Proxy],
    parting: Celery,
    start_worker: StartWorker,
    aftermath: Aftermath,
    gates: Gates,
) -> None:
    gate = gates.close("before ORD-1")
    settings = json.dumps({"worker_cancel_long_running_tasks_on_connection_loss": True})
    env = {"SETTINGS": settings, "LEASE_TTL": "600", "MAX_CRASHES": "1"}
    node = start_worker(PARTING, broker_url=broker[1].url(), concurrency=2, env=env)
    result = parting.module.part.delay("ORD-1")
    gate.reached()
    broker[1].reset()
    gate.reached(2, timeout=30)
    wait_until(lambda: "reason=shutdown" in node.logs(), message="the release to be logged")
    assert aftermath.of(result)["crashes"] == 0
    gate.open()
    aftermath.expect(result, "SUCCESS", State.COMPLETED)
