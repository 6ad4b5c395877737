"""Tasks that outlive their lease many times over keep it, in every pool that has threads."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from celery import Celery

from celery_idempotent.stores import Record, State
from celery_idempotent.stores.redis import RedisStore
from tests.support.celery.fixtures import StartWorker
from tests.support.celery.gates import Gates
from tests.support.celery.journal import Journal
from tests.support.waiting import wait_until

SHOP = "tests.support.celery.shop"
LEASE = 1.0


@pytest.fixture
def app(client_app: Callable[..., Celery]) -> Celery:
    return client_app(SHOP)


@pytest.mark.smoke
@pytest.mark.parametrize("pool", ["prefork", "threads", "solo"])
def test_a_long_task_keeps_its_lease(
    app: Celery, start_worker: StartWorker, journal: Journal, gates: Gates, store_url: str, pool: str
) -> None:
    store = RedisStore.from_url(store_url)
    gate = gates.close("before ORD-1")
    start_worker(SHOP, pool=pool, concurrency=1, env={"LEASE_TTL": str(LEASE)})
    first = app.module.charge.delay("ORD-1")
    gate.reached()

    def record() -> Record:
        found = store.get(f"idem:{SHOP}.charge::ORD-1")
        assert found is not None
        assert found.state is State.IN_PROGRESS
        assert found.remaining > 0, "the lease ran out while its holder lived"
        return found

    fence = record().fence
    with store._client as client:  # type: ignore[attr-defined]
        wait_until(lambda: record() and client.time()[0] * 1e6 > fence + 4e6 * LEASE, message="four leases to pass")
    assert record().fence == fence
    gate.open()
    assert first.get(timeout=20) == app.module.charge.delay("ORD-1").get(timeout=20)
    assert journal.count("charged") == 1


@pytest.mark.nightly
def test_a_busy_worker_renews_many_leases_at_once(
    app: Celery, start_worker: StartWorker, journal: Journal, gates: Gates, store_url: str
) -> None:
    store = RedisStore.from_url(store_url)
    gates_of = [gates.close(f"before ORD-{n}") for n in range(8)]
    start_worker(SHOP, pool="threads", concurrency=8, env={"LEASE_TTL": str(LEASE)})
    results = [app.module.charge.delay(f"ORD-{n}") for n in range(8)]
    for gate in gates_of:
        gate.reached()
    with store._client as client:  # type: ignore[attr-defined]
        until = client.time()[0] + 3 * LEASE
        wait_until(lambda: client.time()[0] > until, message="three leases to pass")
    assert [record.remaining > 0 for record in store.scan()] == [True] * 8
    for gate in gates_of:
        gate.open()
    assert [result.get(timeout=20)["order"] for result in results] == [f"ORD-{n}" for n in range(8)]
    assert journal.count("charged") == 8


def test_a_redelivery_of_a_task_that_has_announced_its_result_fires_no_callback_twice(
    app: Celery, start_worker: StartWorker, journal: Journal, store_url: str
) -> None:
    start_worker(SHOP)
    module, store = app.module, RedisStore.from_url(store_url)

    def is_marked() -> bool:
        record = store.get(f"idem:{SHOP}.charge::ORD-1")
        return record is not None and first.id in record.dispatched

    first = module.charge.apply_async(("ORD-1",), link=module.collect.s("once"))
    journal.wait_for_count(1, "collected", "once")
    wait_until(is_marked, 20, "the mark of the callbacks, which follows them")
    again = module.charge.apply_async(("ORD-1",), link=module.collect.s("once"), task_id=first.id)
    assert again.get(timeout=20)["order"] == "ORD-1"
    # Another task id is another caller, whose own callbacks are due.
    module.charge.apply_async(("ORD-1",), link=module.collect.s("another"))
    journal.wait_for_count(1, "collected", "another")
    module.resize.delay("flush").get(timeout=20)
    assert (journal.count("charged"), journal.count("collected", "once")) == (1, 1)
