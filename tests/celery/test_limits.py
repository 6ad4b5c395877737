"""Time limits and expiry: what waits is not killed, what runs keeps its lease, what expired says so."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from celery import Celery, Task

from celery_idempotent.stores import State
from tests.support.celery.aftermath import PARTING, Aftermath
from tests.support.celery.apps import messages, wait_for_commands
from tests.support.celery.fixtures import StartWorker
from tests.support.celery.gates import Gates
from tests.support.celery.journal import Journal
from tests.support.proxy import Proxy
from tests.support.servers import RedisServer
from tests.support.waiting import wait_until

CORNERS = "tests.support.celery.corners"


@pytest.fixture
def app(client_app: Callable[..., Celery]) -> Celery:
    return client_app(CORNERS)


@pytest.mark.nightly
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


@pytest.mark.nightly
def test_an_expired_copy_of_a_task_whose_holder_died_tells_its_caller(
    app: Celery, start_worker: StartWorker, journal: Journal, gates: Gates
) -> None:
    gate = gates.close("before ORD-1")
    # With room for one message each, so that the holder does not take what is published again.
    options: dict[str, Any] = {"concurrency": 1, "prefetch": 1, "env": {"LEASE_TTL": "3"}}
    nodes = [start_worker(CORNERS, ready=False, **options) for _ in range(2)]
    for node in nodes:
        node.ready()
    published = time.time()
    result = app.module.charge.apply_async(("ORD-1",), expires=5)
    [pid] = gate.reached()
    app.module.charge.apply_async(("ORD-1",), expires=5, task_id=result.id)
    first, second = sorted(nodes, key=lambda node: pid not in node.children())
    wait_until(lambda: "copy=" in second.logs(), 30, "the message to be deferred")
    wait_until(lambda: time.time() > published + 5, 30, "the message to expire")
    first.kill("SIGKILL")
    gate.open()
    wait_until(lambda: result.state == "REVOKED", 30, lambda: f"it is {result.state}")
    assert journal.count("charged") == 0


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_an_expired_message_is_revoked_unless_its_own_operation_runs_or_is_done(
    app: Celery, start_worker: StartWorker, journal: Journal, gates: Gates, pool: str
) -> None:
    """A second publish under the same id stands for the broker's redelivery, which would take its time to come."""
    gate = gates.close("before ORD-1")
    node = start_worker(CORNERS, pool=pool)
    charge, past = app.module.charge, datetime.now(timezone.utc) - timedelta(minutes=1)
    result = charge.delay("ORD-1")
    gate.reached()
    charge.apply_async(("ORD-1",), task_id=result.id, expires=past)
    node.wait_for_log("copy=2")
    assert result.state == "PENDING"
    other = charge.apply_async(("ORD-1",), expires=past)
    wait_until(lambda: other.state == "REVOKED", message=lambda: f"it is {other.state}")
    gate.open()
    assert result.get(timeout=20) == "charged ORD-1"
    charge.apply_async(("ORD-1",), task_id=result.id, expires=past)
    wait_until(lambda: not messages(app.conf.broker_url), message="every message to be answered")
    assert app.AsyncResult(result.id).state == "SUCCESS"
    assert "Discarding revoked task" in node.logs()
    # What is revoked would be discarded for ever after.
    charge.apply_async(("ORD-1",), task_id=other.id)
    wait_until(lambda: app.AsyncResult(other.id).state == "SUCCESS", message="the duplicate's id to be answered")
    assert journal.count("charged") == 1


@pytest.mark.nightly
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


@pytest.mark.nightly
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


@pytest.mark.nightly
def test_a_limit_that_remote_control_sets_and_celery_does_not_apply_ends_no_lease(
    app: Celery, start_worker: StartWorker, journal: Journal, gates: Gates
) -> None:
    """Celery goes by the limits that it has read when it connected; children that are forked later have the others."""
    gate = gates.close("before ORD-1")
    node = start_worker(CORNERS, concurrency=2, env={"LEASE_TTL": "1", "GRACE": "1"})
    wait_for_commands(app)
    [answer] = app.control.time_limit(app.module.charge.name, hard=1, reply=True, timeout=10, limit=1)
    assert "ok" in next(iter(answer.values()))
    before = set(node.children())
    for child in before:
        os.kill(child, signal.SIGKILL)
    wait_until(lambda: len(set(node.children()) - before) == 2, 30, "new children")
    results = [app.module.charge.delay("ORD-1") for _ in range(2)]
    gate.reached()
    node.wait_for_log("copy=7", timeout=60)  # more than limit, grace and lease together
    assert journal.count("started") == 1
    gate.open()
    assert [result.get(timeout=20) for result in results] == ["charged ORD-1"] * 2


@pytest.mark.ending("soft time limit")
def test_a_soft_limit_fails_the_task_and_frees_the_key(
    parting: Celery, start_worker: StartWorker, aftermath: Aftermath, gates: Gates
) -> None:
    gate = gates.close("before ORD-1")
    start_worker(PARTING, concurrency=1)
    result = parting.module.part.apply_async(("ORD-1",), soft_time_limit=1)
    aftermath.expect(result, "FAILURE", State.RELEASED, "failed", effects=0)
    assert type(result.result).__name__ == "SoftTimeLimitExceeded"
    gate.open()
    aftermath.expect(parting.module.part.delay("ORD-1"), "SUCCESS", State.COMPLETED)


@pytest.mark.nightly
@pytest.mark.parametrize("receiver", ["hook", "signal"])
def test_a_soft_limit_that_rings_in_a_hook_before_the_body_fails_the_task_which_does_not_run(
    parting: Celery, start_worker: StartWorker, aftermath: Aftermath, gates: Gates, receiver: str
) -> None:
    gate = gates.close("acquired")
    start_worker(PARTING, concurrency=1, env={"EVENTS": receiver})
    result = parting.module.part.apply_async(("ORD-1",), soft_time_limit=1)
    aftermath.expect(result, "FAILURE", State.RELEASED, "failed", effects=0)
    assert type(result.result).__name__ == "SoftTimeLimitExceeded"
    assert not aftermath.journal.count("started")
    gate.open()
    aftermath.expect(parting.module.part.delay("ORD-1"), "SUCCESS", State.COMPLETED)


def test_a_soft_limit_that_rings_in_a_hook_after_the_body_does_not_change_its_ending(
    parting: Celery, start_worker: StartWorker, aftermath: Aftermath, gates: Gates
) -> None:
    gate = gates.close("completed")
    node = start_worker(PARTING, concurrency=1, env={"EVENTS": "hook"})
    result = parting.module.part.delay("ORD-1")
    [pid] = gate.reached()
    os.kill(pid, signal.SIGUSR1)  # what billiard sends at a soft limit
    aftermath.expect(result, "SUCCESS", State.COMPLETED)
    assert "Interrupted by SoftTimeLimitExceeded" in node.logs()


@pytest.fixture
def behind_proxy(
    parting: Celery,
    journal: Journal,
    worker_env: dict[str, str],
    own_redis: Callable[..., RedisServer],
    proxied: Callable[[int], Proxy],
) -> tuple[Proxy, Aftermath]:
    """A store that workers reach through a proxy, and what their tasks leave in it."""
    server = own_redis()
    proxy = proxied(server.port)
    worker_env["STORE_URL"] = proxy.url()
    return proxy, Aftermath(parting, server.url(), journal)


@pytest.mark.ending("soft time limit while settling", "soft time limit while releasing")
@pytest.mark.parametrize(
    ("ending", "outcome", "record", "reason"),
    [("return", "SUCCESS", State.COMPLETED, ""), ("raise", "FAILURE", State.RELEASED, "failed")],
)
def test_a_soft_limit_within_the_store_call_that_records_the_ending_does_not_change_it(
    behind_proxy: tuple[Proxy, Aftermath],
    parting: Celery,
    start_worker: StartWorker,
    gates: Gates,
    ending: str,
    outcome: str,
    record: State,
    reason: str,
) -> None:
    proxy, aftermath = behind_proxy
    gate = gates.close("after ORD-1")
    node = start_worker(PARTING, concurrency=1)
    result = parting.module.part.delay("ORD-1", ending)
    [pid] = gate.reached()
    proxy.swallow_reply(hang=True)  # the store has done it, and the child waits to hear of it
    gate.open()
    wait_until(lambda: proxy.swallowed == 1, message="the ending to be recorded")
    os.kill(pid, signal.SIGUSR1)  # what billiard sends at a soft limit
    aftermath.expect(result, outcome, record, reason)
    assert "Interrupted by SoftTimeLimitExceeded" in node.logs()
    assert aftermath.journal.count("started") == 1


@pytest.mark.ending("soft time limit while acquiring")
def test_a_soft_limit_within_the_store_call_that_acquires_leaves_no_lease(
    behind_proxy: tuple[Proxy, Aftermath], parting: Celery, start_worker: StartWorker
) -> None:
    proxy, aftermath = behind_proxy
    start_worker(PARTING, concurrency=1, env={"LEASE_TTL": "600"})
    parting.module.part.delay("ORD-2").get(timeout=20)
    [charged] = aftermath.journal.entries("charged")
    proxy.swallow_reply(matching=b"ORD-1", hang=True)
    result = parting.module.part.delay("ORD-1")
    wait_until(lambda: proxy.swallowed == 1, message="the lease to be granted")
    os.kill(charged.pid, signal.SIGUSR1)
    aftermath.expect(result, "FAILURE", State.RELEASED, "failed", effects=0)
    aftermath.expect(parting.module.part.delay("ORD-1"), "SUCCESS", State.COMPLETED)


@pytest.mark.ending("hard time limit")
def test_a_hard_limit_fails_the_task_and_frees_the_key_and_is_no_crash(
    parting: Celery, start_worker: StartWorker, aftermath: Aftermath, gates: Gates
) -> None:
    gate = gates.close("before ORD-1")
    start_worker(PARTING, env={"LEASE_TTL": "600", "MAX_CRASHES": "1"})
    result = parting.module.part.apply_async(("ORD-1",), time_limit=1)
    aftermath.expect(result, "FAILURE", State.RELEASED, "failed", effects=0)
    assert type(result.result).__name__ == "TimeLimitExceeded"
    gate.open()
    aftermath.expect(parting.module.part.delay("ORD-1"), "SUCCESS", State.COMPLETED)


@pytest.mark.ending("hard time limit, to be requeued")
@pytest.mark.skipif(not hasattr(Task, "acks_on_timeout"), reason="Celery before 5.7 drops the message")
def test_a_task_that_goes_back_to_its_queue_at_its_hard_limit_does_not_do_so_for_ever(
    parting: Celery, start_worker: StartWorker, aftermath: Aftermath, gates: Gates
) -> None:
    gates.close("before ORD-1")
    env = {"LEASE_TTL": "600", "MAX_CRASHES": "2", "SETTINGS": json.dumps({"task_acks_on_timeout": False})}
    start_worker(PARTING, env=env)
    result = parting.module.part.apply_async(("ORD-1",), time_limit=1)
    aftermath.expect(result, "FAILURE", State.RELEASED, "crash_loop", crashes=2, effects=0)
    assert aftermath.journal.count("started") == 2
    assert type(parting.AsyncResult(result.id).result).__name__ == "CrashLoop"
