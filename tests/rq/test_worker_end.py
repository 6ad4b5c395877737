"""What a worker does with the claim of a horse, which the test itself writes into the worker's pipe."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator

import pytest
from redis import BlockingConnectionPool, Redis
from rq import Queue, Worker

from celery_idempotent import events
from celery_idempotent.core.history import history
from celery_idempotent.core.lease import monotonic
from celery_idempotent.events import Released
from celery_idempotent.rq import IdempotentWorker
from celery_idempotent.rq.horse import WorkerEnd
from celery_idempotent.stores import Claim, Lease, open_store
from celery_idempotent.stores.redis import RedisStore
from tests.support.stores.benches import age, known

KEY = "idem:shop.charge:ORD-1"
CLAIM = {"key": KEY, "lease_ttl": 60.0, "keep_ttl": 600.0, "max_lease": 100.0, "store": "", "history": False}

#: Has a worker receive a claim with these changes, or none.
Receive = Callable[..., IdempotentWorker]


@pytest.fixture
def url(fresh_redis: Callable[[], str]) -> str:
    return fresh_redis()


@pytest.fixture
def store(url: str) -> RedisStore:
    store = open_store(url)
    assert isinstance(store, RedisStore)
    return store


@pytest.fixture
def receive(url: str) -> Iterator[Receive]:
    worker = IdempotentWorker([], connection=Redis.from_url(url), name="shop", prepare_for_work=False)
    worker.queues = [Queue(connection=worker.connection)]

    def received(claim: dict[str, object] | None = None) -> IdempotentWorker:
        worker._offer = end = WorkerEnd(1)
        if claim is not None:
            os.write(end._writer, json.dumps({"task": "charge", "task_id": "a", **claim}).encode() + b"\n")
        return worker

    yield received
    worker._close()
    worker.connection.close()


def hold(store: RedisStore, worker: IdempotentWorker) -> Lease:
    assert worker._offer is not None
    lease = store.acquire(Claim(KEY, worker._offer.owner, 60, 600, task_id="a"))
    assert isinstance(lease, Lease)
    return lease


class OldPool(BlockingConnectionPool):
    """As redis-py 5 and 6 have it."""

    def disconnect(self) -> None:  # type: ignore[override]
        super().disconnect()


def test_a_worker_signs_off_on_a_pool_that_can_close_only_all_of_its_connections(url: str) -> None:
    with Redis(connection_pool=OldPool.from_url(url)) as connection:
        worker = IdempotentWorker([Queue(connection=connection)], connection=connection)
        worker.work(burst=True)
        assert Worker.count(connection=connection) == 0


@pytest.mark.parametrize(("began", "renewed"), [(0.0, True), (200.0, False)], ids=["within", "beyond"])
def test_a_lease_is_renewed_within_its_max_lease(
    receive: Receive, store: RedisStore, began: float, renewed: bool
) -> None:
    worker = receive(CLAIM)
    hold(store, worker)
    worker._began = monotonic() - began
    age(store, KEY, 30)
    worker._act("renewed", worker._renew)
    assert (known(store, KEY).remaining > 45) is renewed


@pytest.mark.parametrize("held", [True, False])
def test_what_a_horse_held_is_released_with_an_event_and_what_it_did_not_hold_without(
    receive: Receive, store: RedisStore, held: bool
) -> None:
    worker, seen = receive({**CLAIM, "history": True}), []
    if held:
        hold(store, worker)
    events.add_hook(seen.append, {Released})
    try:
        worker._act("released", worker._release)
    finally:
        events.remove_hook(seen.append)
    assert [event.reason for event in seen] == ["crashed"] * held
    assert history.flush()
    assert len(store.history(KEY)) == held


def test_a_horse_that_claimed_nothing_is_left_alone(receive: Receive, store: RedisStore) -> None:
    worker = receive()
    worker._act("released", worker._release)
    assert store.get(KEY) is None


def test_a_store_that_is_an_object_is_reported_once(receive: Receive, caplog: pytest.LogCaptureFixture) -> None:
    worker = receive({**CLAIM, "store": None})
    for _ in range(3):
        worker._act("renewed", worker._renew)
    assert [record.getMessage()[:60] for record in caplog.records] == [f"The lease on {KEY} can be neither renewed n"]


@pytest.mark.parametrize(("done", "act"), [("renewed", "_renew"), ("released", "_release")])
def test_a_store_that_cannot_serve_is_logged(
    receive: Receive, caplog: pytest.LogCaptureFixture, done: str, act: str
) -> None:
    worker = receive({**CLAIM, "store": "redis://127.0.0.1:1/0", "max_lease": None})
    worker._act(done, getattr(worker, act))
    assert f"The lease on {KEY} could not be {done} for its horse" in caplog.text
