"""Children that cannot renew: the main process does it for them, where it is asked to."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

import pytest
from celery import Celery
from celery.worker import state as worker_state

from celery_idempotent import StoreUnreachable
from celery_idempotent.celery import worker as worker_module
from celery_idempotent.celery.request import IdempotentRequest
from celery_idempotent.celery.worker import MainRenewal
from celery_idempotent.events import logger
from celery_idempotent.stores import Lease
from celery_idempotent.stores.base import Store
from celery_idempotent.stores.memory import MemoryStore
from tests.support.celery.apps import messages
from tests.support.celery.fixtures import StartWorker
from tests.support.celery.journal import Journal
from tests.support.stores.benches import DONE, age, claim, known
from tests.support.waiting import wait_until

APP = "tests.support.celery.gil_app"
LEASE = 0.5
SECONDS = 30


@pytest.mark.nightly
def test_a_child_that_holds_the_gil_for_ten_leases_keeps_its_own(
    start_worker: StartWorker, client_app: Callable[..., Celery], journal: Journal, broker_url: str
) -> None:
    env = {"LEASE_TTL": str(LEASE), "RENEW_FROM_MAIN": "1"}
    worker = start_worker(APP, concurrency=2, env=env)
    charge = client_app(APP, **env).tasks[f"{APP}.charge"]
    first = charge.delay("ORD-1", int(10 * LEASE))
    journal.wait_for_count(1, "started")
    second = charge.delay("ORD-1", int(10 * LEASE))
    assert first.get(timeout=SECONDS) == second.get(timeout=SECONDS)
    wait_until(lambda: messages(broker_url) == 0, SECONDS, "the broker to be empty")
    assert (journal.count("started"), journal.count("charged")) == (1, 1)
    assert worker.stop() == 0


def test_without_the_option_such_a_child_is_taken_for_dead(
    start_worker: StartWorker, client_app: Callable[..., Celery], journal: Journal
) -> None:
    env = {"LEASE_TTL": str(LEASE)}
    start_worker(APP, concurrency=2, env=env)
    charge = client_app(APP, **env).tasks[f"{APP}.charge"]
    charge.delay("ORD-1", int(10 * LEASE))
    journal.wait_for_count(1, "started")
    charge.delay("ORD-1", int(10 * LEASE))
    journal.wait_for_count(2, "started")
    assert journal.count("charged") == 0


class TestWhatIsRenewed:
    """In one process: the main process's look at its requests, with the clock that it is told."""

    @pytest.fixture
    def store(self, main_store: MemoryStore) -> MemoryStore:
        return main_store

    def held(self, store: MemoryStore, request: IdempotentRequest) -> Lease:
        assert request.task._binding.guard.store is store
        assert request.task._binding.policy.lease_ttl == 30
        lease = store.acquire(replace(request.claim(), holder="host:1", task_id="id"))
        assert isinstance(lease, Lease)
        return lease

    def test_a_lease_is_renewed_every_third_of_its_ttl_and_not_at_first_sight(
        self, store: MemoryStore, request_of: Callable[..., IdempotentRequest]
    ) -> None:
        request, renewal = request_of(), MainRenewal(10.0, [store])
        lease = self.held(store, request)
        age(store, lease.key, 25)
        for now, remaining in ((100.0, 5), (109.0, 5), (110.0, 30)):
            renewal.beat(store, now)
            assert known(store, lease.key).remaining == pytest.approx(remaining, abs=1)
        age(store, lease.key, 25)
        for now, remaining in ((119.0, 5), (120.0, 30)):
            renewal.beat(store, now)
            assert known(store, lease.key).remaining == pytest.approx(remaining, abs=1)
        assert (known(store, lease.key).owner, known(store, lease.key).fence) == (lease.owner, lease.fence)

    def test_a_lease_that_lasted_as_long_as_it_may_is_not_renewed(
        self, store: MemoryStore, request_of: Callable[..., IdempotentRequest]
    ) -> None:
        request, renewal = request_of(max_lease=45), MainRenewal(10.0, [store])
        lease = self.held(store, request)
        renewal.beat(store, 100.0)
        age(store, lease.key, 25)
        renewal.beat(store, 136.0)
        assert known(store, lease.key).remaining == pytest.approx(5, abs=1)

    def test_a_delivery_that_waits_for_its_turn_renews_nothing(
        self, store: MemoryStore, request_of: Callable[..., IdempotentRequest]
    ) -> None:
        request, renewal = request_of(), MainRenewal(10.0, [store])
        key = request.claim().key
        renewal.beat(store, 100.0)
        renewal.beat(store, 110.0)
        assert store.get(key) is None
        store.acquire(claim(key, lease_ttl=30.0))
        age(store, key, 25)
        renewal.beat(store, 120.0)
        assert known(store, key).remaining == pytest.approx(5, abs=1)

    def test_a_task_of_celerys_own_holds_up_no_renewal(
        self,
        own_request_of_celery: IdempotentRequest,
        store: MemoryStore,
        request_of: Callable[..., IdempotentRequest],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        request, renewal = request_of(), MainRenewal(10.0, [store])
        lease = self.held(store, request)
        monkeypatch.setattr(worker_module, "copied", lambda _: [own_request_of_celery, request])
        renewal.beat(store, 100.0)
        age(store, lease.key, 25)
        renewal.beat(store, 110.0)
        assert known(store, lease.key).remaining == pytest.approx(30, abs=1)

    def test_what_is_settled_is_left_alone(
        self, store: MemoryStore, request_of: Callable[..., IdempotentRequest]
    ) -> None:
        request, renewal = request_of(), MainRenewal(10.0, [store])
        lease = self.held(store, request)
        store.settle(lease, DONE, ttl=60)
        renewal.beat(store, 100.0)
        renewal.beat(store, 110.0)
        assert known(store, lease.key).payload == DONE.payload

    def test_a_store_that_does_not_answer_is_asked_again(
        self,
        store: MemoryStore,
        request_of: Callable[..., IdempotentRequest],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        request, renewal = request_of(), MainRenewal(10.0, [store])
        lease = self.held(store, request)
        renewal.beat(store, 100.0)
        age(store, lease.key, 15)
        asked, said = [], []
        with monkeypatch.context() as patched:

            def fail(key: str) -> None:
                asked.append(key)
                raise StoreUnreachable("away")

            patched.setattr(store, "get", fail)
            patched.setattr(logger, "warning", lambda line, *words: said.append(line % words))
            renewal.beat(store, 110.0)
        assert (list(worker_state.active_requests), asked) == ([request], [lease.key])
        assert said == ["main.charge[id]: its lease was not renewed for it: away"]
        renewal.beat(store, 120.0)
        assert known(store, lease.key).remaining == pytest.approx(30, abs=1)

    def test_a_store_that_hangs_keeps_no_lease_in_another_from_renewal(self) -> None:
        hung, sound = MemoryStore(), MemoryStore()
        renewal, looked = MainRenewal(0.01, [hung, sound]), threading.Event()
        door = threading.Event()
        renewal.beat = lambda store, now: door.wait() if store is hung else looked.set()  # type: ignore[method-assign]
        renewal.start()
        try:
            assert looked.wait(10)
        finally:
            renewal.beat = lambda store, now: threading.Event().wait()  # type: ignore[method-assign]
            door.set()

    def test_its_thread_outlives_an_error(self, caplog: pytest.LogCaptureFixture) -> None:
        renewal = MainRenewal(0.01, [MemoryStore()])
        beats: list[float] = []

        def beat(store: Store, now: float) -> None:
            beats.append(now)
            if len(beats) > 2:
                threading.Event().wait()  # for ever: it ends with the process
            raise ZeroDivisionError

        renewal.beat = beat  # type: ignore[method-assign]
        renewal.start()
        wait_until(lambda: len(beats) > 2, message="the thread to go on")
        assert caplog.text.count("could not be renewed") == 2
