"""IdempotentWorker and IdempotentSpawnWorker: they renew and release for their horses."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol
from urllib.parse import urlsplit

import pytest
from rq import Queue, Retry
from rq.command import send_stop_job_command

from celery_idempotent.rq import IdempotentWorker
from celery_idempotent.rq.horse import HorseClaim
from celery_idempotent.stores import Reason, State
from celery_idempotent.stores.history import facts_of
from celery_idempotent.stores.redis import RedisStore
from tests.rq.conftest import StartRq
from tests.support.proxy import Proxy
from tests.support.rq import shop
from tests.support.rq.desk import PATIENCE, Desk
from tests.support.rq.nodes import OURS, OURS_SPAWNED, STOCK, RqNode
from tests.support.rq.workers import ShortOfThreads, SlowlyDying, StoppedAsItAsks
from tests.support.servers import RedisServer, free_port
from tests.support.stores.benches import age, known, take
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.worker, pytest.mark.thorough]

BOTH = pytest.mark.parametrize("kind", [OURS, OURS_SPAWNED], ids=["fork", "spawn"])
#: Seconds of a lease that no test outlasts: what goes on before it ran out did not wait for it.
FOREVER = "3600"


class Start(Protocol):
    """Starts a worker of this class; keywords in capitals are its environment, the others are `RqNode`'s."""

    def __call__(self, kind: str = ..., *options: str, **more: Any) -> RqNode: ...


@pytest.fixture
def start(start_rq: StartRq) -> Start:
    """A function that starts a worker which looks at its horse every second, and whose leases outlast every test."""

    def start(kind: str = OURS, *options: str, **more: Any) -> RqNode:
        env = {"LEASE_TTL": FOREVER} | {name: more.pop(name) for name in list(more) if name.isupper()}
        if more.get("command") != "worker-pool":
            options = ("--job-monitoring-interval", "1", *options)
        return start_rq(worker=kind, options=options, env=env, **more)

    return start


def key_of(function: Callable[..., Any], order: str = "A") -> str:
    return f"idem:{function.__module__}.{function.__qualname__}::{order}"


def hold(desk: Desk, gate: str) -> int:
    """Return the horse that has come to a gate, which was closed before."""
    [horse] = desk.gates[gate].reached(timeout=PATIENCE)
    return horse


def expect_releases(store: RedisStore, key: str, *reasons: str) -> None:
    """Wait until the history of a key has these releases; it is written a while after they happen."""

    def noted() -> list[str]:
        facts = [facts_of(each.text) for each in store.history(key)]
        return [each["reason"] for each in facts if each["event"] == "Released"]

    wait_until(lambda: noted() == list(reasons), message=lambda: f"{reasons} in the history of {key}: {noted()}")


@BOTH
def test_a_job_whose_horse_was_killed_runs_again_without_waiting_for_the_lease(
    desk: Desk, start: Start, kind: str
) -> None:
    worker = start(kind)
    desk.gates.close("after A")
    job = desk.queue.enqueue(shop.charge, "A", retry=Retry(max=1))
    horse = hold(desk, "after A")
    worker.kill_horse(horse)
    desk.gates.open_all()
    assert desk.wait_for(job, "finished").return_value() == "A charged 2"
    assert worker.running
    assert (desk.runs("A"), desk.charges("A")) == (2, 1)
    expect_releases(desk.store, key_of(shop.charge), "crashed")


@BOTH
def test_a_job_that_is_stopped_is_revoked_and_its_crashes_are_not_counted(desk: Desk, start: Start, kind: str) -> None:
    start(kind)
    desk.gates.close("after A")
    job = desk.queue.enqueue(shop.charge, "A")
    hold(desk, "after A")
    send_stop_job_command(desk.connection, job.id)
    desk.wait_for(job, "stopped")
    expect_releases(desk.store, key_of(shop.charge), "revoked")
    record = known(desk.store, key_of(shop.charge))
    assert (record.state, record.reason, record.crashes) == (State.RELEASED, Reason.REVOKED, 0)


def test_a_stop_that_came_too_late_for_its_job_is_no_reason_for_the_next_one(desk: Desk) -> None:
    worker = IdempotentWorker([desk.queue], connection=desk.connection)
    worker._stopped_job_id = "the job before"  # where RQ leaves it if the horse had ended by itself
    assert worker._reason(HorseClaim("idem:a", 60.0, 60.0, None, "", True, "charge", "this job")) is Reason.CRASHED
    assert (
        worker._reason(HorseClaim("idem:a", 60.0, 60.0, None, "", True, "charge", "the job before")) is Reason.REVOKED
    )


@BOTH
def test_a_cold_shutdown_is_announced_and_no_crash(desk: Desk, start: Start, kind: str) -> None:
    worker = start(kind)
    desk.gates.close("after A")
    job = desk.queue.enqueue(shop.charge, "A", retry=Retry(max=1))
    hold(desk, "after A")
    worker.cut_off()
    expect_releases(desk.store, key_of(shop.charge), "shutdown")
    record = known(desk.store, key_of(shop.charge))
    assert (record.state, record.crashes) == (State.RELEASED, 0)
    assert desk.status(job) == "started", "RQ left it to whoever cleans up"


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["SlowlyDying", "SlowlyDyingSpawned"], ids=["fork", "spawn"])
def test_a_look_at_the_horse_that_falls_due_in_a_cold_shutdown_does_not_undo_it(
    desk: Desk, start: Start, kind: str
) -> None:
    worker = start(f"{SlowlyDying.__module__}.{kind}")
    desk.gates.close("after A")
    job = desk.queue.enqueue(shop.charge, "A", retry=Retry(max=1))
    hold(desk, "after A")
    worker.cut_off()
    expect_releases(desk.store, key_of(shop.charge), "shutdown")
    assert desk.status(job) == "started", "RQ left it to whoever cleans up"


def test_a_worker_that_is_stopped_as_it_asks_for_a_job_ends_at_once(desk: Desk, start: Start) -> None:
    """Its last words would wait on the same connection behind that request, for minutes."""
    worker = start(f"{StoppedAsItAsks.__module__}.{StoppedAsItAsks.__name__}", ready=False)
    assert worker.wait() == 0
    assert "warm shut down requested" in worker.logs()
    assert not desk.connection.smembers("rq:workers"), "it has signed off"


@BOTH
def test_a_shutdown_that_is_cut_short_by_a_kill_of_all_is_no_crash(desk: Desk, start: Start, kind: str) -> None:
    worker = start(kind)
    desk.gates.close("after A")
    desk.queue.enqueue(shop.charge, "A")
    hold(desk, "after A")
    key = key_of(shop.charge)
    worker.ask_to_stop()
    wait_until(lambda: known(desk.store, key).reason == Reason.SHUTDOWN, PATIENCE, worker.logs)
    worker.kill_all()
    record = known(desk.store, key)
    assert record.state is State.IN_PROGRESS
    age(desk.store, key, record.remaining + 0.001)
    lease = take(desk.store, key)
    assert (lease.taken_over, lease.crashes) == (True, 0)


def test_a_shutdown_that_cannot_be_announced_is_said_once(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    worker = IdempotentWorker([desk.queue], connection=desk.connection)
    worker._stop_requested = True
    away = HorseClaim("idem:a", 60.0, 60.0, None, f"redis://127.0.0.1:{free_port()}/0", True, "charge", "this job")
    offers: Any = SimpleNamespace(owner="me", held=iter([None, replace(away, store=None), away]).__next__)
    worker._offer = offers
    ended = threading.Event()
    ended.set()
    worker._announce_shutdown(ended)  # asks for nothing of a horse that is gone
    worker._announce_shutdown(threading.Event())
    worker._end_watch()  # of no horse
    assert caplog.text.count("The shutdown could not be announced for the lease on idem:a") == 1


def test_a_worker_that_can_start_no_thread_waits_for_the_horse_that_it_has_forked(desk: Desk, start: Start) -> None:
    worker = start(f"{ShortOfThreads.__module__}.{ShortOfThreads.__name__}")
    desk.wait_for(desk.queue.enqueue(shop.charge, "A"), "finished")
    desk.wait_for(desk.queue.enqueue(shop.charge, "B"), "finished")
    assert "A shutdown would not be announced for" in worker.logs()


def test_horses_that_die_one_after_the_other_end_in_a_crash_loop(desk: Desk, start: Start) -> None:
    start(OURS)
    job = desk.queue.enqueue(shop.charge, "A", ending="die", retry=Retry(max=9))
    desk.wait_for(job, "failed")
    assert desk.runs("A") == 5
    assert "CrashLoop" in desk.error(job)
    expect_releases(desk.store, key_of(shop.charge), *["crashed"] * 5)
    assert desk.again(job).retries_left == 4


def hold_gil_and_meet_a_duplicate(desk: Desk, start: Start, kind: str, *, lease: str, seconds: int) -> None:
    for _ in range(2):
        start(kind, ready=False, LEASE_TTL=lease)
    first = desk.queue.enqueue(shop.hold_gil, "A", seconds)
    desk.journal.wait_for_count(1, "started", "A", timeout=PATIENCE)
    second = desk.queue.enqueue(shop.hold_gil, "A", 0)
    fences = {desk.wait_for(job, "finished").return_value() for job in (first, second)}
    assert len(fences) == 1, "both have the fence of the same run"
    assert desk.journal.count("charged", "A") == 1


@pytest.mark.nightly
def test_a_worker_renews_for_a_horse_that_holds_the_gil(desk: Desk, start: Start) -> None:
    hold_gil_and_meet_a_duplicate(desk, start, OURS, lease="6", seconds=9)
    assert desk.journal.count("started", "A") == 1


@pytest.mark.nightly
def test_a_horse_that_lost_its_lease_holding_the_gil_under_a_stock_worker_is_answered_by_its_heir(
    desk: Desk, start: Start
) -> None:
    hold_gil_and_meet_a_duplicate(desk, start, STOCK, lease="2", seconds=5)
    assert desk.journal.count("started", "A") == 2


@pytest.mark.nightly
def test_no_lease_is_renewed_beyond_max_lease(desk: Desk, start: Start) -> None:
    for _ in range(2):
        start(OURS, ready=False)
    for _ in range(2):
        desk.queue.enqueue(shop.hold_gil_beyond, "A", 60)
    first, second = desk.journal.wait_for_count(2, "started", "A", timeout=PATIENCE)
    assert any(first.pid in node.members() for node in desk.nodes), "it was its lease that ended, and not the horse"
    assert first.pid != second.pid


def test_the_lease_of_another_is_not_renewed_for_a_horse_that_waits_for_it(desk: Desk, start: Start) -> None:
    others = take(desk.store, key_of(shop.charge), owner="another", lease_ttl=3.0)
    start(OURS)
    job = desk.queue.enqueue(shop.charge, "A")
    assert desk.wait_for(job, "finished").return_value() == "A charged 1"
    assert known(desk.store, others.key).fence > others.fence


@pytest.mark.nightly
def test_a_lease_that_the_worker_would_renew_too_late_is_refused_and_no_retry_is_spent(
    desk: Desk, start: Start
) -> None:
    start(OURS)
    job = desk.queue.enqueue(shop.charge_briefly, "A", retry=Retry(max=3))
    desk.wait_for(job, "failed")
    assert desk.runs("A") == 0
    assert desk.again(job).retries_left == 3
    assert (
        "Expected lease_ttl of tests.support.rq.shop.charge_briefly to be at least 2 s, twice the "
        "job_monitoring_interval in which this worker renews leases, got 1.5 s. Give it a longer lease, "
        "or start the worker with --job-monitoring-interval 1; for `rq worker-pool` and django-rq's `rqworker`, "
        "which have no such option, derive a class of workers that has it." in desk.error(job)
    )
    start(STOCK, queues=["stock"], ready=False)  # renews nothing
    job = Queue("stock", connection=desk.connection).enqueue(shop.charge_briefly, "B")
    assert desk.wait_for(job, "finished").return_value() == "B charged 1"


@BOTH
def test_a_store_that_the_policy_names_by_its_url_is_told(
    desk: Desk, start: Start, fresh_redis: Callable[[], str], kind: str
) -> None:
    store_url = fresh_redis()
    worker = start(kind, STORE_URL=store_url)
    desk.gates.close("after A")
    job = desk.queue.enqueue(shop.charge_by_url, "A", retry=Retry(max=1))
    horse = hold(desk, "after A")
    worker.kill_horse(horse)
    desk.gates.open_all()
    assert desk.wait_for(job, "finished").return_value() == "A charged 2"
    store = RedisStore.from_url(store_url)
    expect_releases(store, key_of(shop.charge_by_url), "crashed")
    store.close()


@pytest.mark.nightly
def test_a_store_that_is_an_object_is_out_of_the_workers_reach_which_it_says(
    desk: Desk, start: Start, fresh_redis: Callable[[], str]
) -> None:
    store_url = fresh_redis()
    worker = start(OURS, STORE_URL=store_url, LEASE_TTL="3")
    desk.gates.close("after A")
    job = desk.queue.enqueue(shop.charge_by_object, "A", retry=Retry(max=1))
    horse = hold(desk, "after A")
    wait_until(lambda: "can be neither" in worker.logs(), PATIENCE, worker.logs)
    worker.kill_horse(horse)
    desk.gates.open_all()
    assert desk.wait_for(job, "finished").return_value() == "A charged 2", "once the lease had run out"
    key = key_of(shop.charge_by_object)
    assert (
        f"The lease on {key} can be neither renewed nor released for its horse: the store of "
        "tests.support.rq.shop.charge_by_object is an object, which its worker does not know. "
        "Give the store's URL instead." in worker.logs()
    )
    store = RedisStore.from_url(store_url)
    wait_until(lambda: "TakenOver" in [facts_of(each.text)["event"] for each in store.history(key)])
    store.close()


@pytest.mark.parametrize("function", [shop.charge_parts, shop.charge_parts_guarded], ids=["plain", "guarded"])
def test_jobs_that_a_job_runs_within_itself_are_deliveries_of_their_own(
    desk: Desk, start: Start, function: Any
) -> None:
    start(OURS)
    job = desk.queue.enqueue(function, "A")
    assert desk.wait_for(job, "finished").return_value() == ["A-1 charged 1", "A-2 charged 1"]
    owners = {known(desk.store, key_of(shop.charge, f"A-{number}")).fence for number in (1, 2)}
    assert len(owners) == 2


def test_a_program_that_a_job_starts_is_not_taken_for_its_horse(desk: Desk, start: Start) -> None:
    start(OURS)
    job = desk.queue.enqueue(shop.horse_end_of_a_child, "A")
    assert desk.wait_for(job, "finished").return_value() == ["None"]


def test_a_horse_whose_worker_is_gone_says_so_and_goes_on(desk: Desk, start: Start) -> None:
    worker = start(OURS)
    desk.gates.close("parts")
    job = desk.queue.enqueue(shop.charge_parts, "A")
    hold(desk, "parts")
    worker.kill()
    desk.gates.open_all()
    assert desk.wait_for(job, "finished").return_value() == ["A-1 charged 1", "A-2 charged 1"]
    assert "could not be sent to the worker" not in worker.logs(), "there is no worker to receive it"


@pytest.mark.nightly
@pytest.mark.parametrize(("kind", "count"), [(OURS, 12), (OURS_SPAWNED, 4)], ids=["fork", "spawn"])
def test_a_worker_has_no_more_open_after_many_jobs(desk: Desk, start: Start, kind: str, count: int) -> None:
    worker = start(kind)

    def work_off(order: str, *, crash: bool) -> None:
        job = desk.queue.enqueue(shop.charge, order, ending="die" if crash else "return")
        desk.wait_for(job, "failed" if crash else "finished")

    def descriptors() -> list[str]:
        return os.listdir(f"/proc/{worker.pid}/fd")

    for crash in (False, True):  # what is opened once, for the connection to the store too
        work_off(f"first-{crash}", crash=crash)
    before = descriptors()
    for number in range(count):
        work_off(str(number), crash=number % 3 == 0)
    # One more for the store: its history is written while a lease is released, or it is not.
    wait_until(lambda: len(descriptors()) <= len(before) + 1, message=lambda: f"{before} {descriptors()}")


@pytest.mark.nightly
@BOTH
def test_a_worker_imports_nothing_of_its_jobs(desk: Desk, start: Start, tmp_path: Path, kind: str) -> None:
    imports = tmp_path / "imports"
    imports.mkdir()
    worker = start(kind, IMPORTS=str(imports))
    desk.gates.close("after A")
    job = desk.queue.enqueue(shop.charge, "A", retry=Retry(max=1))
    first = hold(desk, "after A")
    worker.kill_horse(first)
    desk.gates.open_all()
    desk.wait_for(job, "finished")
    second = desk.gates["after A"].arrivals[-1]
    assert {int(mark.name) for mark in imports.iterdir()} == {first, second}
    assert worker.pid not in (first, second)


@pytest.mark.nightly
def test_a_horse_that_is_killed_before_it_hears_of_its_lease_leaves_none(
    desk: Desk, start: Start, fresh_redis: Callable[[], str], proxied: Callable[[int], Proxy]
) -> None:
    url = urlsplit(fresh_redis())
    store, key = RedisStore.from_url(url.geturl()), key_of(shop.charge_by_url)
    take(store, "another")  # the server has the script from now on
    proxy = proxied(url.port or 6379)
    worker = start(OURS, STORE_URL=proxy.url(int(url.path.strip("/"))))
    proxy.swallow_reply(matching=key.encode(), hang=True)
    job = desk.queue.enqueue(shop.charge_by_url, "A", retry=Retry(max=1))
    wait_until(lambda: store.get(key) is not None, PATIENCE, worker.logs)
    [horse] = worker.horses()
    worker.kill_horse(horse)
    assert desk.wait_for(job, "finished").return_value() == "A charged 1"
    expect_releases(store, key, "crashed")
    assert desk.runs("A") == 1
    store.close()


@pytest.mark.nightly
def test_the_alarm_of_the_monitor_does_not_break_off_a_release(
    desk: Desk, start: Start, fresh_redis: Callable[[], str], proxied: Callable[[int], Proxy]
) -> None:
    url = urlsplit(fresh_redis())
    store = RedisStore.from_url(url.geturl())
    proxy = proxied(url.port or 6379)
    worker = start(OURS, STORE_URL=proxy.url(int(url.path.strip("/"))))
    desk.gates.close("after A")
    job = desk.queue.enqueue(shop.charge_by_url, "A", retry=Retry(max=1))
    horse = hold(desk, "after A")
    proxy.delay(0.6)  # there and back: each command takes longer than the second after which the alarm rings
    worker.kill_horse(horse)
    desk.gates.open_all()
    assert desk.wait_for(job, "finished").return_value() == "A charged 2"
    expect_releases(store, key_of(shop.charge_by_url), "crashed")
    store.close()


@pytest.mark.parametrize("kind", [STOCK, OURS], ids=["stock", "ours"])
def test_a_horse_that_slept_past_its_lease_comes_back_for_what_its_heir_has_settled(
    desk: Desk, start: Start, kind: str
) -> None:
    first = start(kind, LEASE_TTL="3")
    desk.gates.close("before A")
    slow = desk.queue.enqueue(shop.charge, "A")
    horse = hold(desk, "before A")
    for pid in (first.pid, horse):
        first.pause(pid)
    second = start(kind, LEASE_TTL="3")
    quick = desk.queue.enqueue(shop.charge, "A")
    desk.gates.close("after A")
    desk.gates["before A"].reached(2, timeout=PATIENCE)
    desk.gates["before A"].open()
    hold(desk, "after A")
    for pid in (first.pid, horse):
        first.resume(pid)
    wait_until(lambda: "LeaseLost key=" in first.logs(), PATIENCE, desk.logs)
    wait_until(lambda: desk.deferrals(slow) == 1, PATIENCE, desk.logs)
    desk.gates.open_all()
    # A stock worker whose alarm rings just when its horse ends takes it for killed, for a while.
    assert [desk.wait_for(job, "finished").return_value() for job in (slow, quick)] == ["A charged 1"] * 2
    assert kind == STOCK or "terminated unexpectedly" not in first.logs()
    assert (desk.runs("A"), desk.charges("A")) == (2, 1)
    assert second.running


def test_a_store_that_is_down_when_a_horse_dies_costs_a_lease_and_no_job(
    desk: Desk, start: Start, own_redis: Callable[..., RedisServer]
) -> None:
    server = own_redis()
    worker = start(OURS, STORE_URL=server.url())
    desk.gates.close("after A")
    job = desk.queue.enqueue(shop.charge_by_url, "A", retry=Retry(max=1))
    horse = hold(desk, "after A")
    server.kill()
    worker.kill_horse(horse)
    desk.gates.open_all()
    wait_until(lambda: "could not be released for its horse" in worker.logs(), PATIENCE, worker.logs)
    server.start()  # without its data, so that there is no lease to wait for
    assert desk.wait_for(job, "finished").return_value() == "A charged 2"


def test_a_worker_has_the_name_that_it_is_given(desk: Desk, start: Start) -> None:
    start(OURS, name="the-first")
    assert [worker.name for worker in IdempotentWorker.all(connection=desk.connection)] == ["the-first"]
    desk.wait_for(desk.queue.enqueue(shop.charge, "A"), "finished")


def test_the_workers_of_a_pool_recover_at_once(desk: Desk, start: Start) -> None:
    pool = start(OURS, "--num-workers", "2", command="worker-pool")
    desk.gates.close("after A")
    job = desk.queue.enqueue(shop.charge, "A", retry=Retry(max=1))
    horse = hold(desk, "after A")
    pool.kill_horse(horse)
    desk.gates.open_all()
    assert desk.wait_for(job, "finished").return_value() == "A charged 2"
    expect_releases(desk.store, key_of(shop.charge), "crashed")
    assert pool.stop() == 0
