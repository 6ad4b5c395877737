"""Bodies that exit, children that are told to end, retries that overtake, a broker that refuses copies."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest
from celery import Celery

from tests.celery.apps import messages
from tests.celery.fixtures import StartWorker
from tests.celery.gates import Gates
from tests.celery.journal import Journal
from tests.servers import RedisServer
from tests.waiting import wait_until

CORNERS = "tests.celery.corners"


@pytest.fixture
def app(client_app: Callable[..., Celery]) -> Celery:
    return client_app(CORNERS)


def test_a_body_that_exits_every_time_is_refused_in_the_end(
    app: Celery, start_worker: StartWorker, journal: Journal
) -> None:
    start_worker(CORNERS, concurrency=1)
    result = app.module.leave.delay("ORD-1")
    with pytest.raises(Exception, match="in a row"):
        result.get(timeout=20)
    assert journal.count("charged") == 3


def test_a_retry_that_overtakes_its_publisher_leaves_no_copy_of_the_attempt_before(
    app: Celery, start_worker: StartWorker, journal: Journal
) -> None:
    for _ in range(2):
        start_worker(CORNERS)
    result = app.module.hasty.delay("ORD-1")
    with pytest.raises(ValueError, match="no ORD-1"):
        result.get(timeout=20)
    wait_until(lambda: not messages(app.conf.broker_url), 30, "every copy to be worked off")
    assert [entry.fields["retries"] for entry in journal.entries("tried")] == [0, 1]


def test_a_copy_that_the_broker_has_no_room_for_is_neither_acked_nor_failed(
    client_app: Callable[..., Celery],
    start_worker: StartWorker,
    journal: Journal,
    gates: Gates,
    own_redis: Callable[..., RedisServer],
) -> None:
    server = own_redis()
    app = client_app(CORNERS, BROKER_URL=server.url(0))
    gate = gates.close("before ORD-1")
    node = start_worker(CORNERS, broker_url=server.url(0))
    first = app.module.charge.delay("ORD-1")
    gate.reached()
    second = app.module.charge.delay("ORD-1")
    node.wait_for_log("copy=1")
    with server.client() as client:
        client.config_set("maxmemory", 1)
    node.wait_for_log("cannot be published again", timeout=30)
    with server.client() as client:
        client.config_set("maxmemory", 0)
    state = second.state
    gate.open()
    assert first.get(timeout=20) == "charged ORD-1"
    assert state == "PENDING"
    assert second.get(timeout=40) == "charged ORD-1"
    assert node.running


def test_a_class_without_a_name_of_its_own_can_be_registered() -> None:
    from celery_idempotent import IdempotentTask

    app = Celery("unnamed", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.idempotency_store = "memory://"

    class Pay(IdempotentTask):
        def __init__(self, gateway: str) -> None:
            self.gateway = gateway

        def run(self, order_id: str) -> str:
            return f"{order_id} by {self.gateway}"

    assert app.register_task(Pay("bank")).apply(("ORD-1",)).get() == "ORD-1 by bank"


def test_a_child_that_is_told_to_end_leaves_its_task_to_another(
    app: Celery, start_worker: StartWorker, journal: Journal, gates: Gates
) -> None:
    gate = gates.close("before ORD-1")
    start_worker(CORNERS, concurrency=1)
    result = app.module.charge.delay("ORD-1")
    [pid] = gate.reached()
    os.kill(pid, signal.SIGTERM)
    gate.reached(2)
    gate.open()
    assert result.get(timeout=20) == "charged ORD-1"
