"""Broadcast queues, on real workers: each worker's delivery is an operation of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from celery import Celery
from kombu import Exchange, Queue

from tests.celery.test_rabbitmq import server, vhost
from tests.support.celery.apps import wait_for_commands
from tests.support.celery.fixtures import StartWorker
from tests.support.celery.gates import Gates
from tests.support.celery.journal import Journal
from tests.support.celery.nodes import WorkerNode
from tests.support.servers import open_client
from tests.support.waiting import wait_until

__all__ = ["server", "vhost"]  # fixtures

BROADCAST = "tests.support.celery.broadcast_app"


@pytest.fixture(params=["redis", "rabbitmq"])
def broker_url(request: pytest.FixtureRequest, fresh_redis: Callable[[], str]) -> str:
    """Redis keeps no queues of a fanout exchange, RabbitMQ does."""
    return fresh_redis() if request.param == "redis" else request.getfixturevalue("vhost").url


@pytest.fixture
def app(client_app: Callable[..., Celery]) -> Celery:
    return client_app(BROADCAST)


def publish(task: Any, *args: str) -> None:
    """Publish to all workers; without the declaration kombu takes the exchange for one of a single queue, on Redis."""
    task.apply_async(args, declare=[task.app.amqp.queues["everybody"].exchange])


@pytest.fixture
def nodes(start_worker: StartWorker, broker_url: str) -> list[WorkerNode]:
    nodes = [start_worker(BROADCAST, queues=["everybody"], concurrency=2, ready=False) for _ in range(2)]
    for node in nodes:
        node.ready()
    if broker_url.startswith("amqp"):
        return nodes
    # Redis forgets what it publishes to nobody, and a worker subscribes a moment after it says that it is ready.
    with open_client(broker_url) as client:
        listeners = 2 * len(nodes)  # each listens to remote control, too
        wait_until(lambda: len(client.client_list(_type="pubsub")) == listeners, message="all workers to listen")
    return nodes


def workers(journal: Journal, event: str, key: str) -> list[str]:
    return sorted(entry.fields["worker"] for entry in journal.entries(event, key))


def test_each_worker_runs_what_all_of_them_get_and_replays_what_it_did(
    app: Celery, nodes: list[WorkerNode], journal: Journal
) -> None:
    publish(app.module.reload, "cache")
    publish(app.module.refresh, "prices")
    journal.wait_for_count(2, "started", "cache")
    journal.wait_for_count(2, "refreshed", "prices")
    publish(app.module.refresh, "prices")
    wait_until(lambda: all("Replayed" in node.logs() for node in nodes), message="both to replay")
    assert workers(journal, "started", "cache") == workers(journal, "started", "prices") == ["worker1", "worker2"]


def test_a_worker_defers_and_retries_its_own_delivery_and_no_other_workers(
    app: Celery, nodes: list[WorkerNode], journal: Journal, gates: Gates
) -> None:
    gate = gates.close("worker1 prices")
    publish(app.module.refresh, "prices", "worker1")
    gate.reached()
    wait_until(lambda: workers(journal, "refreshed", "prices") == ["worker2"], message="the other worker to be done")
    publish(app.module.refresh, "prices", "worker1")
    nodes[0].wait_for_log("copy=2")
    gate.open()
    wait_until(lambda: "Replayed" in nodes[0].logs(), 30, "the duplicate to be answered")
    assert workers(journal, "refreshed", "prices") == ["worker1", "worker2"]
    assert [(entry.fields["worker"], entry.fields["retries"]) for entry in journal.entries("started")] in (
        [("worker1", 0), ("worker2", 0), ("worker1", 1)],
        [("worker2", 0), ("worker1", 0), ("worker1", 1)],
    )
    # The other worker has answered the duplicate, and nothing that was worker1's.
    assert nodes[1].logs().count("Replayed") == 1
    assert "Deferred" not in nodes[1].logs()


@pytest.mark.parametrize("broker_url", ["redis"], indirect=True)
def test_copies_and_retries_go_back_by_an_exchange_that_was_added_to_a_running_worker(
    app: Celery, start_worker: StartWorker, journal: Journal, gates: Gates
) -> None:
    """Its children do not know it, and kombu drops what no queue of a direct exchange is bound for."""
    node = start_worker(BROADCAST, queues=["everybody"], concurrency=2)
    wait_for_commands(app)
    answer = {"reply": True, "limit": 1, "timeout": 15}
    added = {"exchange": "more", "exchange_type": "topic", "routing_key": "prices.#"}
    assert app.control.add_consumer("added", **added, **answer)
    options = {"queue": Queue("added", Exchange("more", type="topic"), "prices.#"), "routing_key": "prices.new"}
    gate = gates.close("worker1 prices")
    results = [app.module.refresh.apply_async(("prices", "worker1"), **options)]
    gate.reached()
    results.append(app.module.refresh.apply_async(("prices", "worker1"), **options))
    node.wait_for_log("copy=2")
    gate.open()
    assert [result.get(timeout=30) for result in results] == ["worker1"] * 2
    assert [entry.fields["retries"] for entry in journal.entries("started")] == [0, 1]
