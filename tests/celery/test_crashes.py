"""Children, workers and machines that die or stall: nothing is lost, nothing takes effect twice."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from celery import Celery

from celery_idempotent.stores import State
from celery_idempotent.stores.redis import RedisStore
from tests.support.celery.apps import messages, wait_for_no_reader
from tests.support.celery.fixtures import StartWorker
from tests.support.celery.gates import Gates
from tests.support.celery.journal import Journal
from tests.support.servers import RedisServer
from tests.support.waiting import wait_until

SHOP = "tests.support.celery.shop"


@pytest.fixture
def app(client_app: Callable[..., Celery]) -> Celery:
    return client_app(SHOP)


@pytest.fixture
def store(store_url: str) -> RedisStore:
    return RedisStore.from_url(store_url)


def key(task: str, operation: str) -> str:
    return f"idem:{SHOP}.{task}::{operation}"


@pytest.mark.smoke
@pytest.mark.ending("child killed")
def test_after_the_kill_of_a_child_the_next_delivery_does_not_wait_for_the_lease(
    app: Celery, start_worker: StartWorker, journal: Journal, gates: Gates, store: RedisStore
) -> None:
    gate = gates.close("before ORD-1")
    node = start_worker(SHOP, env={"LEASE_TTL": "600"})
    result = app.module.charge.delay("ORD-1")
    [pid] = gate.reached()
    node.kill_child(pid)
    gate.reached(2)
    record = store.get(key("charge", "ORD-1"))
    assert record is not None
    assert record.crashes == 1
    gate.open()
    assert result.get(timeout=20) == {"order": "ORD-1", "cents": 999}
    assert journal.count("started") == 2
    assert journal.count("charged") == 1


@pytest.mark.ending("worker killed")
def test_after_the_kill_of_a_whole_worker_the_task_is_taken_over_when_the_lease_ends(
    app: Celery, start_worker: StartWorker, journal: Journal, gates: Gates, store: RedisStore
) -> None:
    gate = gates.close("before ORD-1")
    options = {"visibility_timeout": 1, "env": {"LEASE_TTL": "3"}}
    first = start_worker(SHOP, **options)
    result = app.module.charge.delay("ORD-1")
    gate.reached()
    held = store.get(key("charge", "ORD-1"))
    assert held is not None
    first.kill("SIGKILL")
    second = start_worker(SHOP, **options)
    gate.reached(2, timeout=30)
    second.assert_log_exists("TakenOver")
    record = store.get(key("charge", "ORD-1"))
    assert record is not None
    assert record.crashes == 1
    assert record.fence > held.fence + 3_000_000  # microseconds: not before the lease was over
    gate.open()
    assert result.get(timeout=20) == {"order": "ORD-1", "cents": 999}
    assert journal.count("charged") == 1
    wait_until(lambda: messages(app.conf.broker_url) == 0, 30, "every copy to be worked off")
    assert _state(store, "charge") is State.COMPLETED


def test_a_duplicate_that_waited_runs_when_the_holder_is_killed(
    app: Celery, start_worker: StartWorker, journal: Journal, gates: Gates
) -> None:
    gate = gates.close("before ORD-1")
    options = {"prefetch": 1, "env": {"LEASE_TTL": "3"}}
    first = start_worker(SHOP, concurrency=1, **options)
    app.module.charge.delay("ORD-1")
    gate.reached()
    second = start_worker(SHOP, concurrency=1, **options)
    duplicate = app.module.charge.delay("ORD-1")
    second.wait_for_log("copy=1")
    first.kill("SIGKILL")
    gate.open()
    assert duplicate.get(timeout=30) == {"order": "ORD-1", "cents": 999}
    assert journal.count("charged") == 1


def test_a_visibility_timeout_that_passes_while_the_task_runs_does_not_run_it_twice(
    app: Celery, start_worker: StartWorker, journal: Journal, gates: Gates
) -> None:
    gate = gates.close("after ORD-1")
    options = {"visibility_timeout": 1, "concurrency": 2, "env": {"VISIBILITY_REFRESH": "0"}}
    nodes = [start_worker(SHOP, ready=False, **options) for _ in range(2)]
    for node in nodes:
        node.ready()
    result = app.module.charge.delay("ORD-1")
    gate.reached()
    wait_until(lambda: sum(node.logs().count("Deferred") for node in nodes) >= 3, 30, "three copies to be deferred")
    gate.open()
    assert result.get(timeout=20) == {"order": "ORD-1", "cents": 999}
    wait_until(
        lambda: messages(app.conf.broker_url) == 0,
        60,
        lambda: f"{messages(app.conf.broker_url)} messages to be worked off",
    )
    assert journal.count("started") == 1
    assert journal.count("charged") == 1


def test_a_holder_that_wakes_and_fails_after_its_heir_has_failed_too_adds_no_failure_of_its_own(
    app: Celery, start_worker: StartWorker, journal: Journal, gates: Gates, store: RedisStore
) -> None:
    gate = gates.close("after ORD-1")
    options = {"visibility_timeout": 1, "concurrency": 1, "env": {"LEASE_TTL": "2"}}
    zombie = start_worker(SHOP, **options)
    result = app.module.endings.delay("ORD-1", "raise")
    gate.reached()
    zombie.pause()
    wait_for_no_reader(app.conf.broker_url)
    gate.open()
    start_worker(SHOP, **options)
    with pytest.raises(ValueError, match="no ORD-1"):
        result.get(timeout=20)
    wait_until(lambda: _state(store) is State.RELEASED)
    zombie.resume()
    # Nothing is settled that it could replay, so it stands aside, and a copy of its message runs once more; so may one
    # that the broker had restored into its worker before it slept.
    journal.wait_for_count(3, "tried", timeout=30)
    wait_until(lambda: "LeaseLost key=" in zombie.logs(), 30, lambda: f"the zombie to learn of it:\n{zombie.logs()}")
    wait_until(
        lambda: messages(app.conf.broker_url) == 0,
        60,
        lambda: f"{messages(app.conf.broker_url)} messages to be worked off",
    )
    assert journal.count("tried") <= 4
    assert _state(store) is State.RELEASED
    fences = [entry.fields["fence"] for entry in journal.entries("tried")]
    assert fences == sorted(set(fences))


def _state(store: RedisStore, task: str = "endings") -> State | None:
    record = store.get(key(task, "ORD-1"))
    return record.state if record else None


def test_a_task_that_keeps_killing_its_worker_is_refused_and_others_may_try(
    app: Celery, start_worker: StartWorker, journal: Journal, gates: Gates
) -> None:
    gate = gates.close("before ORD-1")
    node = start_worker(SHOP, concurrency=1, env={"MAX_CRASHES": "3"})
    result = app.module.charge.delay("ORD-1")
    for death in range(1, 4):
        node.kill_child(gate.reached(death, timeout=30)[-1])
    with pytest.raises(Exception, match="lost its worker 3 times") as caught:
        result.get(timeout=30)
    assert type(caught.value).__name__ == "CrashLoop"
    gate.open()
    assert app.module.charge.delay("ORD-1").get(timeout=20) == {"order": "ORD-1", "cents": 999}
    assert journal.count("charged") == 1


def test_copies_of_one_duplicate_do_not_multiply(
    app: Celery, start_worker: StartWorker, journal: Journal, gates: Gates
) -> None:
    """A simple design gave 470 deliveries in a minute: each restored copy published successors of its own."""
    gate = gates.close("before ORD-1")
    busy = [gates.close(f"before busy-{n}") for n in range(3)]
    options = {"visibility_timeout": 3, "concurrency": 2, "prefetch": 4, "env": {"VISIBILITY_REFRESH": "0"}}
    nodes = [start_worker(SHOP, ready=False, **options) for _ in range(3)]
    for node in nodes:
        node.ready()
    for n in range(3):
        app.module.resize.delay(f"busy-{n}")
    for other in busy:
        other.reached(timeout=30)
    app.module.charge.delay("ORD-1")
    gate.reached()
    duplicate = app.module.charge.delay("ORD-1")
    seen: list[int] = []

    def five_rounds() -> bool:
        seen.append(messages(app.conf.broker_url))
        return sum(node.logs().count("Deferred") for node in nodes) >= 20

    wait_until(five_rounds, 60, lambda: f"twenty deferrals; messages in the broker so far: {seen[-20:]}")
    # Three busy tasks, the holder, and at any time at most five copies of holder and duplicate.
    assert max(seen) <= 4 + 5
    for other in busy:
        other.open()
    gate.open()
    assert duplicate.get(timeout=30) == {"order": "ORD-1", "cents": 999}
    assert journal.count("started", "ORD-1") == 1


@pytest.mark.nightly
def test_a_child_that_dies_while_the_store_is_down_costs_one_lease(
    client_app: Callable[..., Celery],
    start_worker: StartWorker,
    own_redis: Callable[..., RedisServer],
    journal: Journal,
    gates: Gates,
) -> None:
    server = own_redis(appendonly="yes", appendfsync="always")
    app = client_app(SHOP)
    gate = gates.close("before ORD-1")
    node = start_worker(SHOP, store_url=server.url(), env={"LEASE_TTL": "3"})
    result = app.module.charge.delay("ORD-1")
    [pid] = gate.reached()
    server.kill()
    node.kill_child(pid)
    node.wait_for_log("runs out by itself", timeout=30)
    server.start()
    gate.open()
    assert result.get(timeout=40) == {"order": "ORD-1", "cents": 999}
    assert journal.count("charged") == 1
