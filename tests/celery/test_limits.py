"""Time limits and expiry: what waits is not killed, what runs keeps its lease, what expired says so."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from celery import Celery

from tests.celery.fixtures import StartWorker
from tests.celery.gates import Gates
from tests.celery.journal import Journal
from tests.servers import RedisServer
from tests.waiting import wait_until

CORNERS = "tests.celery.corners"


@pytest.fixture
def app(client_app: Callable[..., Celery]) -> Celery:
    return client_app(CORNERS)


def test_what_waits_for_the_store_does_not_run_into_the_time_limit_of_the_app(
    app: Celery, start_worker: StartWorker, journal: Journal, own_redis: Callable[..., RedisServer]
) -> None:
    server = own_redis()
    node = start_worker(CORNERS, store_url=server.url(0), extra_args=["--time-limit=3"])
    server.kill()
    result = app.module.charge.delay("ORD-1")
    node.wait_for_log("copy=2", timeout=30)  # it has waited twice for as long as the limit lets it
    server.start()
    assert result.get(timeout=30) == "charged ORD-1"


def test_an_expired_copy_of_a_task_whose_holder_died_tells_its_caller(
    app: Celery, start_worker: StartWorker, journal: Journal, gates: Gates
) -> None:
    gate = gates.close("before ORD-1")
    env = {"LEASE_TTL": "3", "VISIBILITY_REFRESH": "0"}
    options: dict[str, Any] = {"concurrency": 1, "visibility_timeout": 1, "env": env}
    first = start_worker(CORNERS, **options)
    published = time.time()
    result = app.module.charge.apply_async(("ORD-1",), expires=5)
    gate.reached()
    second = start_worker(CORNERS, **options)
    second.wait_for_log("copy=")
    wait_until(lambda: time.time() > published + 5, 30, "the message to expire")
    first.kill("SIGKILL")
    gate.open()
    wait_until(lambda: result.state == "REVOKED", 20, lambda: f"it is {result.state}")
    assert journal.count("charged") == 0


def test_a_pool_that_cannot_end_a_body_at_its_limit_keeps_its_lease(
    app: Celery, start_worker: StartWorker, journal: Journal, gates: Gates
) -> None:
    gate = gates.close("before ORD-1")
    env = {"LEASE_TTL": "1", "GRACE": "1"}
    node = start_worker(CORNERS, pool="threads", concurrency=2, env=env)
    results = [app.module.limited.delay("ORD-1") for _ in range(2)]
    gate.reached()
    node.wait_for_log("copy=7", timeout=60)  # more than limit, grace and lease together
    assert journal.count("started") == 1
    gate.open()
    assert [result.get(timeout=20) for result in results] == ["charged ORD-1"] * 2


def test_a_limit_that_the_producer_gives_is_the_one_that_counts(
    app: Celery, start_worker: StartWorker, journal: Journal, gates: Gates
) -> None:
    gate = gates.close("before ORD-1")
    node = start_worker(CORNERS, concurrency=2, env={"LEASE_TTL": "1", "GRACE": "1"})
    results = [app.module.limited.apply_async(("ORD-1",), time_limit=60) for _ in range(2)]
    gate.reached()
    node.wait_for_log("copy=7", timeout=60)  # more than limit, grace and lease together
    assert journal.count("started") == 1
    gate.open()
    assert [result.get(timeout=20) for result in results] == ["charged ORD-1"] * 2
