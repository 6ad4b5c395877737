"""Children that are killed, tasks that are revoked, retries that overtake, a broker that refuses copies."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
from celery import Celery
from celery.result import AsyncResult
from celery.worker import state as worker_state

from celery_idempotent.celery.request import IdempotentRequest
from celery_idempotent.stores import State
from tests.support.celery.aftermath import PARTING, Aftermath
from tests.support.celery.apps import messages
from tests.support.celery.fixtures import StartWorker
from tests.support.celery.gates import Gates
from tests.support.celery.journal import Journal
from tests.support.servers import RedisServer
from tests.support.waiting import wait_until

CORNERS = "tests.support.celery.corners"


@pytest.fixture
def app(client_app: Callable[..., Celery]) -> Celery:
    return client_app(CORNERS)


@pytest.mark.nightly
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


@pytest.mark.nightly
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
        # The next copy has come, and what it is a copy of was acked, which a full server would not take.
        received = node.logs().count("] received")
        wait_until(lambda: node.logs().count("] received") > received and client.hlen("unacked") == 2)
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


@pytest.mark.ending("child killed")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_child_that_somebody_kills_counts_as_a_crash_and_its_task_runs_again(
    parting: Celery, start_worker: StartWorker, aftermath: Aftermath, gates: Gates, number: int
) -> None:
    gate = gates.close("before ORD-1")
    start_worker(PARTING, concurrency=1, env={"LEASE_TTL": "600"})
    result = parting.module.part.delay("ORD-1")
    [pid] = gate.reached()
    os.kill(pid, number)
    gate.reached(2)
    aftermath.expect(result, "PENDING", State.IN_PROGRESS, crashes=1, messages=1, effects=0)
    gate.open()
    aftermath.expect(result, "SUCCESS", State.COMPLETED)


@pytest.mark.ending("out of memory")
def test_a_body_that_gets_no_memory_ends_its_worker_and_not_one_worker_after_the_other(
    parting: Celery, start_worker: StartWorker, aftermath: Aftermath
) -> None:
    """Celery's main process raises a child's MemoryError anew, and ends; the message is not acked."""
    first = start_worker(PARTING, env={"MAX_CRASHES": "1"})
    result = parting.module.part.delay("ORD-1", "memory")
    wait_until(lambda: not first.running, 30, "the worker to end")
    aftermath.expect(result, "FAILURE", State.RELEASED, "crashed", crashes=1, messages=1)
    second = start_worker(PARTING, env={"MAX_CRASHES": "1"})
    aftermath.expect(result, "FAILURE", State.RELEASED, "crash_loop", crashes=1)
    assert type(parting.AsyncResult(result.id).result).__name__ == "CrashLoop"
    assert second.running


@pytest.mark.ending("revoked before it starts")
@pytest.mark.parametrize("how", ["id", "stamp"])
def test_what_is_revoked_before_it_starts_leaves_no_record(
    parting: Celery, start_worker: StartWorker, aftermath: Aftermath, gates: Gates, how: str
) -> None:
    busy = gates.close("before ORD-2")
    node = start_worker(PARTING, concurrency=1)
    parting.module.part.delay("ORD-2")
    busy.reached()
    result = stamped(parting, "ORD-1")
    wait_until(lambda: f"[{result.id}] received" in node.logs(), message="the worker to hold it")
    assert revoke(parting, result, how, reply=True, destination=[node.hostname()], timeout=20)
    busy.open()
    aftermath.expect(result, "REVOKED", None, effects=0)
    aftermath.expect(parting.module.part.delay("ORD-1"), "SUCCESS", State.COMPLETED)


@pytest.mark.ending("revoked while it runs")
@pytest.mark.parametrize(("how", "name"), [("id", "SIGTERM"), ("id", "SIGKILL"), ("stamp", "SIGTERM")])
def test_what_is_revoked_while_it_runs_frees_the_key_and_is_no_crash(
    parting: Celery, start_worker: StartWorker, aftermath: Aftermath, gates: Gates, how: str, name: str
) -> None:
    gate = gates.close("before ORD-1")
    start_worker(PARTING, env={"LEASE_TTL": "600", "MAX_CRASHES": "1"})
    result = stamped(parting, "ORD-1")
    gate.reached()
    revoke(parting, result, how, terminate=True, signal=name)
    aftermath.expect(result, "REVOKED", State.RELEASED, "revoked", effects=0)
    gate.open()
    aftermath.expect(parting.module.part.delay("ORD-1"), "SUCCESS", State.COMPLETED)


@pytest.mark.nightly
@pytest.mark.parametrize("concurrency", [1, 2])
def test_what_is_revoked_while_it_runs_is_found_also_beside_and_after_copies_of_its_message(
    parting: Celery, start_worker: StartWorker, aftermath: Aftermath, gates: Gates, concurrency: int
) -> None:
    """Celery knows one delivery of each task id, the last that came, and none once that has ended."""
    gate = gates.close("before ORD-1")
    node = start_worker(PARTING, concurrency=concurrency, env={"LEASE_TTL": "600", "MAX_CRASHES": "1"})
    result = stamped(parting, "ORD-1")
    gate.reached()
    parting.module.part.apply_async(("ORD-1",), task_id=result.id)
    if concurrency == 1:  # the second one waits for the child
        wait_until(lambda: node.logs().count(f"[{result.id}] received") == 2, message="the worker to hold both")
    else:
        node.wait_for_log("copy=2")
    revoke(parting, result, "id", terminate=True)
    aftermath.expect(result, "REVOKED", State.RELEASED, "revoked", effects=0)
    gate.open()


def stamped(app: Celery, order: str) -> AsyncResult:
    """Publish an order with a stamp."""
    signature = app.module.part.si(order)
    signature.stamp(tenant="blue")
    return signature.apply_async()


def revoke(app: Celery, result: AsyncResult, how: str, **options: Any) -> Any:
    """Revoke a task by its id or by its stamp."""
    if how == "id":
        return app.control.revoke(result.id, **options)
    return app.control.revoke_by_stamped_headers({"tenant": ["blue"]}, **options)


def test_a_copy_of_a_message_keeps_none_of_those_before_it(request_of: Callable[..., IdempotentRequest]) -> None:
    """Each comes while the one before it is still answered: a day of waiting must not fill the worker's memory."""
    copies: list[IdempotentRequest] = []
    for _ in range(4):
        copies.append(request_of())
        for over in copies[:-1]:
            worker_state.task_ready(over)
        worker_state.task_reserved(copies[-1])
    worker_state.task_ready(copies[-1])
    assert not [copy for copy in gc.get_referents(copies[-1], vars(copies[-1])) if isinstance(copy, IdempotentRequest)]


@pytest.mark.ending("expires before it starts")
def test_what_expires_before_it_starts_leaves_no_record(
    parting: Celery, start_worker: StartWorker, aftermath: Aftermath
) -> None:
    published = time.time()
    result = parting.module.part.apply_async(("ORD-1",), expires=0.2)
    wait_until(lambda: time.time() > published + 1, message="the message to expire")
    start_worker(PARTING, concurrency=1)
    aftermath.expect(result, "REVOKED", None, effects=0)
    aftermath.expect(parting.module.part.delay("ORD-1"), "SUCCESS", State.COMPLETED)
