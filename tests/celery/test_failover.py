"""A store that fails over: a sentinel promotes a replica that was cut off from the main server before that died."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from celery import Celery

from tests.conftest import missing
from tests.support.celery.apps import messages
from tests.support.celery.fixtures import StartWorker
from tests.support.celery.journal import Journal
from tests.support.sentinel import Failover
from tests.support.servers import ServerMissing
from tests.support.waiting import wait_until

APP = "tests.support.celery.sentinel_app"
SECONDS = 60


@pytest.fixture
def failover() -> Iterator[Failover]:
    try:
        redis = Failover()
    except ServerMissing as error:
        raise missing(error) from None
    with redis:
        yield redis


def test_what_no_replica_confirmed_runs_once_after_a_failover(
    failover: Failover,
    start_worker: StartWorker,
    client_app: Callable[..., Celery],
    journal: Journal,
    broker_url: str,
) -> None:
    env = {"SENTINEL_PORT": str(failover.port), "WAIT_REPLICAS": "1"}
    worker = start_worker(APP, concurrency=2, env=env)
    charge = client_app(APP, **env).tasks[f"{APP}.charge"]
    orders = [f"ORD-{number}" for number in range(1, 31)]
    assert charge.delay(orders[0]).get(timeout=SECONDS) == f"charged {orders[0]}"

    failover.cut_replication()
    late = [charge.delay(order) for order in orders[1:]]
    wait_until(lambda: "wait_replicas=1 needs 1" in worker.logs(), SECONDS, "a claim to be refused")
    failover.kill_main()
    failover.wait_for_promotion()

    assert [result.get(timeout=SECONDS) for result in late] == [f"charged {order}" for order in orders[1:]]
    again = [charge.delay(order) for order in orders]
    assert [result.get(timeout=SECONDS) for result in again] == [f"charged {order}" for order in orders]
    assert [journal.count("charged", order) for order in orders] == [1] * len(orders)
    wait_until(lambda: messages(broker_url) == 0, SECONDS, "the broker to be empty")


@pytest.mark.nightly
def test_without_the_option_a_failover_forgets_what_was_not_replicated(
    failover: Failover, start_worker: StartWorker, client_app: Callable[..., Celery], journal: Journal
) -> None:
    env = {"SENTINEL_PORT": str(failover.port)}
    start_worker(APP, concurrency=1, env=env)
    charge = client_app(APP, **env).tasks[f"{APP}.charge"]
    failover.cut_replication()
    assert charge.delay("ORD-1").get(timeout=SECONDS) == "charged ORD-1"
    failover.kill_main()
    failover.wait_for_promotion()
    assert charge.delay("ORD-1").get(timeout=SECONDS) == "charged ORD-1"
    assert journal.count("charged", "ORD-1") == 2
