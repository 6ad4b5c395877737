"""Workers that stop, lose their broker or are killed: what their tasks leave behind."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from time import monotonic, sleep
from types import SimpleNamespace

import pytest
from celery import Celery
from celery import __version__ as celery_version
from celery.contrib.testing.worker import start_worker as start_thread
from celery.result import AsyncResult
from celery.worker.request import Request

from celery_idempotent import IdempotentTask, StoreUnreachable
from celery_idempotent.celery import pool as celery_pool
from celery_idempotent.celery import worker as worker_module
from celery_idempotent.celery.request import IdempotentRequest, cut_off
from celery_idempotent.celery.worker import ShutdownMarks, keep_watch, watch_in_child
from celery_idempotent.core.binding import heartbeat
from celery_idempotent.core.lease import HeldLease
from celery_idempotent.errors import RecordUnreadable
from celery_idempotent.stores import Claim, Lease, Reason, Release, State
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.stores.records import new_owner
from tests.support.celery.aftermath import PARTING, Aftermath
from tests.support.celery.fixtures import StartWorker
from tests.support.celery.gates import Gate, Gates
from tests.support.celery.nodes import STOP_SECONDS, WorkerNode
from tests.support.proxy import Proxy
from tests.support.servers import RedisServer
from tests.support.stores.benches import known
from tests.support.waiting import wait_until


def tell(node: WorkerNode, number: int) -> None:
    """Send a signal to the main process."""
    assert node.container.process is not None
    node.container.process.send_signal(number)


def wait_until_ended(node: WorkerNode) -> None:
    wait_until(lambda: not node.running, STOP_SECONDS, lambda: f"the worker to end; its log:\n{node.logs()}")


@pytest.mark.ending("warm shutdown")
def test_a_warm_shutdown_lets_the_task_end(
    parting: Celery, start_worker: StartWorker, aftermath: Aftermath, gates: Gates
) -> None:
    gate = gates.close("before ORD-1")
    node = start_worker(PARTING, concurrency=1)
    result = parting.module.part.delay("ORD-1")
    gate.reached()
    tell(node, signal.SIGTERM)
    wait_until(lambda: "Warm shutdown" in node.logs())
    aftermath.expect(result, "PENDING", State.IN_PROGRESS, Reason.SHUTDOWN, messages=1, effects=0)
    gate.open()
    wait_until_ended(node)
    aftermath.expect(result, "SUCCESS", State.COMPLETED)


@pytest.mark.ending("soft shutdown")
@pytest.mark.skipif(tuple(map(int, celery_version.split(".")[:2])) < (5, 5), reason="Celery 5.5 brought it")
def test_a_soft_shutdown_lets_end_what_can_and_gives_back_the_rest(
    parting: Celery, start_worker: StartWorker, aftermath: Aftermath, gates: Gates
) -> None:
    short, long = gates.close("before ORD-1"), gates.close("before ORD-2")
    settings = json.dumps({"worker_soft_shutdown_timeout": 2.0})
    node = start_worker(PARTING, concurrency=2, env={"SETTINGS": settings, "LEASE_TTL": "600"})
    results = {order: parting.module.part.delay(order) for order in ("ORD-1", "ORD-2")}
    short.reached()
    long.reached()
    tell(node, signal.SIGQUIT)
    wait_until(lambda: "Initiating Soft Shutdown" in node.logs())
    short.open()
    wait_until_ended(node)
    aftermath.expect(results["ORD-2"], "PENDING", State.RELEASED, "shutdown", order="ORD-2", messages=1, effects=0)
    aftermath.expect(results["ORD-1"], "SUCCESS", State.COMPLETED, messages=1)
    long.open()
    start_worker(PARTING, concurrency=1)
    aftermath.expect(results["ORD-2"], "SUCCESS", State.COMPLETED, order="ORD-2")


@pytest.mark.ending("cold shutdown")
def test_a_cold_shutdown_gives_the_task_back_and_is_no_crash(
    parting: Celery, start_worker: StartWorker, aftermath: Aftermath, gates: Gates
) -> None:
    gate = gates.close("before ORD-1")
    node = start_worker(PARTING, concurrency=1, env={"LEASE_TTL": "600", "MAX_CRASHES": "1"})
    result = parting.module.part.delay("ORD-1")
    gate.reached()
    tell(node, signal.SIGQUIT)
    wait_until_ended(node)
    aftermath.expect(result, "PENDING", State.RELEASED, "shutdown", messages=1, effects=0)
    gate.open()
    start_worker(PARTING, concurrency=1, env={"MAX_CRASHES": "1"})
    aftermath.expect(result, "SUCCESS", State.COMPLETED)


def at_the_gate(parting: Celery, start_worker: StartWorker, gates: Gates) -> tuple[Gate, WorkerNode, AsyncResult]:
    """Return a worker whose body stands at a gate, and for whose task one crash is too many."""
    gate = gates.close("before ORD-1")
    node = start_worker(PARTING, concurrency=1, env={"LEASE_TTL": "600", "MAX_CRASHES": "1"})
    result = parting.module.part.delay("ORD-1")
    gate.reached()
    return gate, node, result


@pytest.mark.parametrize("lag", [0, 0.3])
def test_a_shutdown_by_a_signal_that_comes_to_the_children_too_is_no_crash(
    parting: Celery, start_worker: StartWorker, aftermath: Aftermath, gates: Gates, lag: float
) -> None:
    """As of a process manager: it ends the body at once, perhaps before the main process knows of a shutdown."""
    gate, node, result = at_the_gate(parting, start_worker, gates)
    [child] = node.children()
    os.kill(child, signal.SIGTERM)
    sleep(lag)
    tell(node, signal.SIGTERM)
    wait_until_ended(node)
    aftermath.expect(result, "PENDING", State.RELEASED, "shutdown", messages=1, effects=0)
    gate.open()
    start_worker(PARTING, concurrency=1, env={"MAX_CRASHES": "1"})
    aftermath.expect(result, "SUCCESS", State.COMPLETED)


@pytest.mark.nightly
def test_a_signal_to_a_child_alone_is_a_crash(
    parting: Celery, start_worker: StartWorker, aftermath: Aftermath, gates: Gates
) -> None:
    """As where something on the machine frees memory."""
    _, node, result = at_the_gate(parting, start_worker, gates)
    [child] = node.children()
    os.kill(child, signal.SIGTERM)
    aftermath.expect(result, "FAILURE", State.RELEASED, "crash_loop", crashes=1, effects=0)


@pytest.mark.ending("worker killed")
@pytest.mark.parametrize(("number", "soft"), [(signal.SIGTERM, 0), (signal.SIGQUIT, 0), (signal.SIGQUIT, 60)])
def test_what_outlasts_the_grace_of_a_shutdown_costs_its_lease_and_is_no_crash(
    parting: Celery, start_worker: StartWorker, aftermath: Aftermath, number: signal.Signals, soft: int
) -> None:
    """The main process waits for the child, and whoever started it loses patience: nobody is left to release."""
    settings = json.dumps({"worker_soft_shutdown_timeout": soft})
    env = {"LEASE_TTL": "2", "MAX_CRASHES": "1", "SETTINGS": settings}
    options = {"concurrency": 1, "visibility_timeout": 1, "env": env}
    node = start_worker(PARTING, **options)
    result = parting.module.part.delay("ORD-1", "hold on at first")
    aftermath.journal.wait_for_count(1, "deaf")
    tell(node, number)
    if number == signal.SIGQUIT and not soft:
        aftermath.journal.wait_for_count(1, "heard")
    aftermath.expect(result, "PENDING", State.IN_PROGRESS, "shutdown", messages=1)
    node.kill("SIGKILL")
    aftermath.expect(result, "PENDING", State.IN_PROGRESS, "shutdown", messages=1)
    start_worker(PARTING, **options)
    aftermath.expect(result, "SUCCESS", State.COMPLETED, effects=2)


# Only a child of a real worker knows what a body holds in it; a pool of threads has it in the main process.
@pytest.mark.nightly
@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_a_lease_that_a_body_takes_itself_is_no_crash_either_if_the_shutdown_cuts_it_off(
    parting: Celery, start_worker: StartWorker, aftermath: Aftermath, pool: str
) -> None:
    options = {"pool": pool, "visibility_timeout": 1, "env": {"LEASE_TTL": "2", "MAX_CRASHES": "1"}}
    node = start_worker(PARTING, **options)
    result = parting.module.call.delay("ORD-1")
    aftermath.journal.wait_for_count(1, "charged")
    keys = sorted(record.key for record in aftermath.store.scan())  # the delivery's, and that of the call in its body
    tell(node, signal.SIGTERM)
    wait_until(
        lambda: all(known(aftermath.store, key).reason == Reason.SHUTDOWN for key in keys), message="the store to know"
    )
    node.kill("SIGKILL")
    start_worker(PARTING, **options)
    assert result.get(timeout=30) == "ORD-1 charged again"
    assert [known(aftermath.store, key).crashes for key in keys] == [0, 0]


@pytest.mark.ending("child killed")
def test_a_child_that_dies_by_itself_while_its_worker_shuts_down_is_a_crash(
    parting: Celery, start_worker: StartWorker, aftermath: Aftermath
) -> None:
    node = start_worker(PARTING, concurrency=1, env={"LEASE_TTL": "600"})
    result = parting.module.part.delay("ORD-1", "hold on at first")
    aftermath.journal.wait_for_count(1, "charged")
    tell(node, signal.SIGTERM)
    aftermath.expect(result, "PENDING", State.IN_PROGRESS, "shutdown", messages=1)
    [child] = node.children()
    node.kill_child(child)
    aftermath.expect(result, "PENDING", State.RELEASED, "crashed", crashes=1, messages=1)
    wait_until_ended(node)


@pytest.fixture
def broker(
    own_redis: Callable[..., RedisServer], proxied: Callable[[int], Proxy], worker_env: dict[str, str]
) -> tuple[RedisServer, Proxy]:
    """A broker behind a proxy, by which the workers reach it and the tests do not."""
    server = own_redis()
    worker_env["BROKER_URL"] = server.url()
    return server, proxied(server.port)


@pytest.mark.ending("broker connection lost")
def test_a_body_whose_worker_loses_the_broker_goes_on_and_its_copies_replay(
    broker: tuple[RedisServer, Proxy],
    parting: Celery,
    start_worker: StartWorker,
    aftermath: Aftermath,
    gates: Gates,
) -> None:
    gate = gates.close("before ORD-1")
    node = start_worker(PARTING, broker_url=broker[1].url(), concurrency=2)
    result = parting.module.part.delay("ORD-1")
    gate.reached()
    broker[1].reset()
    wait_until(lambda: "copy=1" in node.logs(), 30, lambda: f"a copy to be deferred; its log:\n{node.logs()}")
    assert aftermath.of(result)["record"] == "in_progress"
    gate.open()
    aftermath.expect(result, "SUCCESS", State.COMPLETED)
    assert aftermath.journal.count("started") == 1


@pytest.mark.ending("broker connection lost, cancelling")
def test_a_body_that_is_cancelled_with_the_connection_is_no_crash_and_runs_again(
    broker: tuple[RedisServer, Proxy],
    parting: Celery,
    start_worker: StartWorker,
    aftermath: Aftermath,
    gates: Gates,
) -> None:
    gate = gates.close("before ORD-1")
    settings = json.dumps({"worker_cancel_long_running_tasks_on_connection_loss": True})
    env = {"SETTINGS": settings, "LEASE_TTL": "600", "MAX_CRASHES": "1"}
    node = start_worker(PARTING, broker_url=broker[1].url(), concurrency=2, env=env)
    result = parting.module.part.delay("ORD-1")
    gate.reached()
    broker[1].reset()
    gate.reached(2, timeout=30)
    wait_until(lambda: "reason=shutdown" in node.logs(), message="the release to be logged")
    assert aftermath.of(result)["crashes"] == 0
    gate.open()
    aftermath.expect(result, "SUCCESS", State.COMPLETED)


class TestWhatStoresAreTold:
    """In one process: the main process's look at its requests."""

    @pytest.fixture
    def marks(self, main_store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> ShutdownMarks:
        monkeypatch.setattr(celery_pool, "is_stopping", lambda: True)
        return ShutdownMarks(main_store)

    @pytest.fixture
    def asked(self, main_store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        """The owners of which the store was told."""
        owners: list[str] = []
        mark = main_store.mark_shutdown
        monkeypatch.setattr(main_store, "mark_shutdown", lambda lease: (owners.append(lease.owner), mark(lease))[1])
        return owners

    def test_a_delivery_that_runs_is_told_of_once_and_one_that_waits_until_it_runs(
        self,
        main_store: MemoryStore,
        marks: ShutdownMarks,
        asked: list[str],
        request_of: Callable[..., IdempotentRequest],
    ) -> None:
        request = request_of()
        marks.look()
        assert main_store.get(request.claim().key) is None
        main_store.acquire(request.claim())
        for _ in range(3):
            marks.look()
        assert known(main_store, request.claim().key).reason == Reason.SHUTDOWN
        assert len(asked) == 2

    def test_a_delivery_that_is_granted_its_lease_after_it_was_cut_off_is_marked_as_long_as_the_worker_stops(
        self,
        main_store: MemoryStore,
        marks: ShutdownMarks,
        asked: list[str],
        request_of: Callable[..., IdempotentRequest],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """Its child may be deep within a call as the signal comes; one that only lost its connection goes on."""
        request, stopping = request_of(), [True]
        monkeypatch.setattr(worker_module, "copied", lambda _: [])
        monkeypatch.setattr(celery_pool, "is_stopping", lambda: stopping[0])
        cut_off.append(request)
        marks.look()
        main_store.acquire(request.claim())
        marks.look()
        assert known(main_store, request.claim().key).reason == Reason.SHUTDOWN
        assert not cut_off
        main_store.delete(request.claim().key)
        cut_off.append(request)
        stopping[0] = False
        marks.look()
        assert not cut_off
        assert len(asked) == 3

    def test_a_task_of_celerys_own_is_none_of_the_stores(
        self,
        own_request_of_celery: IdempotentRequest,
        main_store: MemoryStore,
        marks: ShutdownMarks,
        asked: list[str],
        request_of: Callable[..., IdempotentRequest],
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        """It holds no lease, and nothing need remember what it does."""
        request = request_of()
        main_store.acquire(request.claim())
        monkeypatch.setattr(Request, "cancel", lambda self, pool, signal=None, **options: None)
        own_request_of_celery.cancel(SimpleNamespace(is_green=False))
        own_request_of_celery._release(Reason.CRASHED)
        # Where it comes first, it must not keep the others from being marked.
        monkeypatch.setattr(worker_module, "copied", lambda _: [own_request_of_celery, request])
        marks.look()
        assert asked == [request._owner]
        assert not cut_off
        assert caplog.text == ""
        monkeypatch.setattr(Request, "_success_was_stored", lambda self: {"status": "SUCCESS"}, raising=False)
        assert own_request_of_celery._success_was_stored()  # no redelivery of it would replay

    def test_nothing_is_told_before_the_worker_stops(
        self,
        main_store: MemoryStore,
        marks: ShutdownMarks,
        asked: list[str],
        request_of: Callable[..., IdempotentRequest],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        main_store.acquire(request_of().claim())
        monkeypatch.setattr(celery_pool, "is_stopping", lambda: False)
        marks.look()
        assert asked == []

    def test_each_store_is_told_of_its_own(
        self, main_store: MemoryStore, asked: list[str], request_of: Callable[..., IdempotentRequest]
    ) -> None:
        request = request_of()
        main_store.acquire(request.claim())
        other = ShutdownMarks(MemoryStore())
        other.mark_running()
        cut_off.append(request)
        other.mark_cut_off()
        assert asked == []
        assert list(cut_off) == [request]
        ShutdownMarks(main_store).mark_cut_off()
        assert asked == [request.claim().owner]
        assert not cut_off

    def test_of_what_a_body_holds_each_store_is_told_once_and_a_delivery_is_told_of_as_such(
        self, main_store: MemoryStore, asked: list[str], request_of: Callable[..., IdempotentRequest]
    ) -> None:
        request, claim = request_of(), Claim("inner", new_owner(), 60, 60)
        leases = [main_store.acquire(each) for each in (request.claim(), claim)]
        holdings = [heartbeat.watch(HeldLease(main_store, lease, monotonic())) for lease in leases]
        try:
            ShutdownMarks(MemoryStore()).mark_held()
            assert asked == []
            marks = ShutdownMarks(main_store)
            for _ in range(2):
                marks.mark_held()
            assert asked == [claim.owner]
        finally:
            for holding in holdings:
                heartbeat.forget(holding)
        main_store.release(leases[1], Release(Reason.FAILED))
        main_store.acquire(replace(claim, owner="next"))
        marks.mark_held()
        assert asked == [claim.owner]

    def test_a_store_that_no_task_has_is_told_once_a_body_holds_something_in_it(
        self, main_store: MemoryStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(celery_pool, "is_stopping", lambda: True)
        ended = threading.Event()
        lease = main_store.acquire(Claim("inner", new_owner(), 60, 60))
        watch = threading.Thread(target=keep_watch, args=(set(), ended.is_set))
        watch.start()
        holding = heartbeat.watch(HeldLease(main_store, lease, monotonic()))
        try:
            wait_until(lambda: known(main_store, "inner").reason == Reason.SHUTDOWN, message="the store to be told")
        finally:
            heartbeat.forget(holding)
            ended.set()
            watch.join()

    @pytest.mark.parametrize("error", [StoreUnreachable("away"), ZeroDivisionError()])
    def test_a_store_that_does_not_answer_is_told_again_and_the_log_once(
        self,
        main_store: MemoryStore,
        marks: ShutdownMarks,
        request_of: Callable[..., IdempotentRequest],
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
        error: Exception,
    ) -> None:
        request = request_of()
        main_store.acquire(request.claim())
        if isinstance(error, StoreUnreachable):
            cut_off.append(request)
        with monkeypatch.context() as patched:

            def fail(lease: Lease) -> bool:
                raise error

            patched.setattr(main_store, "mark_shutdown", fail)
            marks.look()
            marks.look()
        assert caplog.text.count("could not be announced") == 1
        marks.look()
        assert known(main_store, request.claim().key).reason == Reason.SHUTDOWN
        assert not cut_off

    def test_a_record_that_cannot_be_read_and_a_task_without_a_key_keep_no_other_from_being_told_of(
        self,
        main_store: MemoryStore,
        marks: ShutdownMarks,
        request_of: Callable[..., IdempotentRequest],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        keyless, unreadable, sound = (request_of() for _ in range(3))
        keyless._args = ("ORD-1", "one too many")
        told: list[str] = []

        def mark(lease: Lease) -> bool:
            told.append(lease.owner)
            if lease.owner == unreadable._owner:
                raise RecordUnreadable("garbage")
            return True

        monkeypatch.setattr(main_store, "mark_shutdown", mark)
        for _ in range(2):
            marks.look()
        assert sorted(told) == sorted([unreadable._owner, sound._owner])


def test_a_worker_that_is_stopped_without_a_signal_lets_its_bodies_know_and_is_forgotten_when_it_has_stopped(
    inside: Celery,
) -> None:
    """As in a test, whose process goes on: what it calls later is to wait as ever."""
    begun = threading.Event()

    @inside.task(base=IdempotentTask, shared=False, idempotency={"key": "order_id"})
    def charge(order_id: str) -> None:
        begun.set()
        wait_until(celery_pool.is_stopping, message="the body to know that its worker stops")

    with start_thread(inside, pool="threads", concurrency=1, perform_ping_check=False) as running:
        result = charge.delay("ORD-1")
        assert begun.wait(30)
        assert not celery_pool.is_stopping()
        running.stop()
        result.get(timeout=30)
    assert not celery_pool.is_stopping()


def test_a_process_that_is_no_pools_child_is_not_watched_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool solo announces its process when it is made; a worker that did not start may have left who hears that."""
    monkeypatch.setattr(celery_pool, "slot", None)
    before = set(threading.enumerate())
    watch_in_child()
    assert set(threading.enumerate()) <= before


@pytest.mark.nightly
@pytest.mark.parametrize("pool", ["threads", "solo"])
def test_no_thread_of_a_worker_that_has_stopped_looks_on(inside: Celery, pool: str) -> None:
    """The pool solo announces its one process as a child; what its watch marked later would be another worker's."""
    before = set(threading.enumerate())

    @inside.task(base=IdempotentTask, shared=False, idempotency={"key": "order_id"})
    def charge(order_id: str) -> None:
        """Be there."""

    def looking() -> list[threading.Thread]:
        return [each for each in set(threading.enumerate()) - before if each.name == "celery-idempotent-shutdown"]

    with start_thread(inside, pool=pool, concurrency=1, perform_ping_check=False):
        assert looking()
    wait_until(lambda: not looking(), message="the watch to end")
