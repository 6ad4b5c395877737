"""IdempotentWorker and IdempotentSpawnWorker: they renew and release for their horses."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol
from urllib.parse import urlsplit

import pytest
from rq import Queue, Retry
from rq.command import send_stop_job_command
from rq.job import Job, JobStatus

from celery_idempotent.rq import IdempotentWorker
from celery_idempotent.rq.horse import HorseClaim
from celery_idempotent.stores import Reason, State
from celery_idempotent.stores.history import facts_of
from celery_idempotent.stores.redis import RedisStore
from tests.support.celery.fixtures import JOURNAL, NODES
from tests.support.proxy import Proxy
from tests.support.rq import horses
from tests.support.rq.workers import OURS, OURS_SPAWNED, PATIENCE, STOCK, Shop, is_alive, kill_horse
from tests.support.servers import RedisServer, free_port
from tests.support.stores.benches import age, take
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.worker, pytest.mark.thorough]

BOTH = pytest.mark.parametrize("kind", [OURS, OURS_SPAWNED], ids=["fork", "spawn"])
#: Seconds of a lease that no test outlasts: what goes on before it ran out did not wait for it.
FOREVER = "3600"


class OpenShop(Protocol):
    """Opens the shop of a test, whose workers get this environment."""

    def __call__(self, **env: str) -> Shop: ...


@pytest.fixture
def open_shop(request: pytest.FixtureRequest, fresh_redis: Callable[[], str], tmp_path: Path) -> Iterator[OpenShop]:
    shops: list[Shop] = []

    def open_shop(**env: str) -> Shop:
        shop = Shop(fresh_redis(), tmp_path, **{"LEASE_TTL": FOREVER, **env})
        request.node.stash[JOURNAL] = shop.journal
        request.node.stash[NODES] = shop.workers
        shops.append(shop)
        return shop

    yield open_shop
    for shop in shops:
        shop.__exit__(None, None, None)


@pytest.fixture
def shop(open_shop: OpenShop) -> Shop:
    """A shop whose leases outlast every test."""
    return open_shop()


def key_of(function: Callable[..., Any], order_id: str = "A") -> str:
    return f"idem:{function.__module__}.{function.__qualname__}::{order_id}"


def said(job: Job) -> str:
    """Return the traceback of a job that failed."""
    result = job.latest_result()
    assert result is not None
    return str(result.exc_string)


def retries_left(job: Job) -> int | None:
    return Job.fetch(job.id, job.connection).retries_left


def expect_releases(store: RedisStore, key: str, *reasons: str) -> None:
    """Wait until the history of a key has these releases; it is written a while after they happen."""

    def noted() -> list[str]:
        facts = [facts_of(each.text) for each in store.history(key)]
        return [each["reason"] for each in facts if each["event"] == "Released"]

    wait_until(lambda: noted() == list(reasons), message=lambda: f"{reasons} in the history of {key}: {noted()}")


@BOTH
def test_a_job_whose_horse_was_killed_runs_again_without_waiting_for_the_lease(shop: Shop, kind: str) -> None:
    worker = shop.start(kind)
    shop.gates.close("charged")
    job = shop.queue.enqueue(horses.charge, "A", retry=Retry(max=1))
    [horse] = shop.gates["charged"].reached(timeout=PATIENCE)
    kill_horse(horse)
    shop.gates.open_all()
    assert shop.finished(job) == "A is charged"
    assert worker.running
    assert shop.journal.count("ran", "A") == 2
    assert horses.taken(shop.journal, "A") == 1
    expect_releases(shop.store, key_of(horses.charge), "crashed")


@BOTH
def test_a_job_that_is_stopped_is_revoked_and_its_crashes_are_not_counted(shop: Shop, kind: str) -> None:
    shop.start(kind)
    shop.gates.close("charged")
    job = shop.queue.enqueue(horses.charge, "A")
    shop.gates["charged"].reached(timeout=PATIENCE)
    send_stop_job_command(shop.client, job.id)
    shop.ended(job, JobStatus.STOPPED)
    expect_releases(shop.store, key_of(horses.charge), "revoked")
    record = shop.record(key_of(horses.charge))
    assert (record.state, record.reason, record.crashes) == (State.RELEASED, Reason.REVOKED, 0)


def test_a_stop_that_came_too_late_for_its_job_is_no_reason_for_the_next_one(shop: Shop) -> None:
    worker = IdempotentWorker([shop.queue], connection=shop.client)
    worker._stopped_job_id = "the job before"  # where RQ leaves it if the horse had ended by itself
    assert worker._reason(HorseClaim("idem:a", 60.0, 60.0, None, "", True, "charge", "this job")) is Reason.CRASHED
    assert (
        worker._reason(HorseClaim("idem:a", 60.0, 60.0, None, "", True, "charge", "the job before")) is Reason.REVOKED
    )


@BOTH
def test_a_cold_shutdown_is_announced_and_no_crash(shop: Shop, kind: str) -> None:
    worker = shop.start(kind)
    shop.gates.close("charged")
    job = shop.queue.enqueue(horses.charge, "A", retry=Retry(max=1))
    shop.gates["charged"].reached(timeout=PATIENCE)

    def ended() -> bool:  # RQ does not hear a second signal that comes within a second, and a third breaks anything off
        if worker.running and "cold shut down" not in worker.logs():
            os.kill(worker.pid, signal.SIGTERM)
        return not worker.running

    wait_until(ended, PATIENCE, worker.logs)
    expect_releases(shop.store, key_of(horses.charge), "shutdown")
    record = shop.record(key_of(horses.charge))
    assert (record.state, record.crashes) == (State.RELEASED, 0)
    assert job.get_status(refresh=True) == JobStatus.STARTED, "RQ left it to whoever cleans up"


@BOTH
def test_a_shutdown_that_is_cut_short_by_a_kill_of_all_is_no_crash(shop: Shop, kind: str) -> None:
    worker = shop.start(kind)
    shop.gates.close("charged")
    shop.queue.enqueue(horses.charge, "A")
    shop.gates["charged"].reached(timeout=PATIENCE)
    key = key_of(horses.charge)
    os.kill(worker.pid, signal.SIGTERM)
    wait_until(lambda: shop.record(key).reason == Reason.SHUTDOWN, PATIENCE, worker.logs)
    [horse] = shop.gates["charged"].reached(timeout=PATIENCE)
    worker.kill()
    kill_horse(horse)
    record = shop.record(key)
    assert record.state is State.IN_PROGRESS
    age(shop.store, key, record.remaining + 0.001)
    lease = take(shop.store, key)
    assert (lease.taken_over, lease.crashes) == (True, 0)


def test_a_shutdown_that_cannot_be_announced_is_said_once(shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
    worker = IdempotentWorker([shop.queue], connection=shop.client)
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


def test_horses_that_die_one_after_the_other_end_in_a_crash_loop(shop: Shop) -> None:
    shop.start(OURS)
    job = shop.queue.enqueue(horses.die, "A", retry=Retry(max=9))
    shop.ended(job, JobStatus.FAILED)
    assert shop.journal.count("ran", "A") == 2
    assert "CrashLoop" in said(job)
    expect_releases(shop.store, key_of(horses.die), "crashed", "crashed")
    assert retries_left(job) == 7


def hold_gil_and_meet_a_duplicate(shop: Shop, kind: str, seconds: int) -> None:
    for _ in range(2):
        shop.start(kind, ready=False)
    first = shop.queue.enqueue(horses.hold_gil, "A", seconds)
    shop.journal.wait_for_count(1, "started", "A", timeout=PATIENCE)
    second = shop.queue.enqueue(horses.hold_gil, "A", 0)
    assert shop.finished(first) == shop.finished(second), "both have the fence of the same run"
    assert shop.journal.count("charged", "A") == 1


def test_a_worker_renews_for_a_horse_that_holds_the_gil(open_shop: OpenShop) -> None:
    shop = open_shop(LEASE_TTL="6")
    hold_gil_and_meet_a_duplicate(shop, OURS, 9)
    assert shop.journal.count("started", "A") == 1


def test_a_horse_that_lost_its_lease_holding_the_gil_under_a_stock_worker_is_answered_by_its_heir(
    open_shop: OpenShop,
) -> None:
    shop = open_shop(LEASE_TTL="2")
    hold_gil_and_meet_a_duplicate(shop, STOCK, 5)
    assert shop.journal.count("started", "A") == 2


def test_no_lease_is_renewed_beyond_max_lease(open_shop: OpenShop) -> None:
    shop = open_shop()
    for _ in range(2):
        shop.start(OURS, ready=False)
    for _ in range(2):
        shop.queue.enqueue(horses.hold_gil_beyond, "A", 60)
    first, second = shop.journal.wait_for_count(2, "started", "A", timeout=PATIENCE)
    assert is_alive(first.pid), "it was its lease that ended, and not the horse"
    assert first.pid != second.pid


def test_the_lease_of_another_is_not_renewed_for_a_horse_that_waits_for_it(shop: Shop) -> None:
    others = take(shop.store, key_of(horses.charge), owner="another", lease_ttl=3.0)
    shop.start(OURS)
    job = shop.queue.enqueue(horses.charge, "A")
    assert shop.finished(job) == "A is charged"
    assert shop.record(others.key).fence > others.fence


def test_a_lease_that_the_worker_would_renew_too_late_is_refused_and_no_retry_is_spent(shop: Shop) -> None:
    shop.start(OURS)
    job = shop.queue.enqueue(horses.brief, "A", retry=Retry(max=3))
    shop.ended(job, JobStatus.FAILED)
    assert shop.journal.count() == 0
    assert retries_left(job) == 3
    assert (
        "Expected lease_ttl of tests.support.rq.horses.brief to be at least 2 s, twice the job_monitoring_interval in "
        "which this worker renews leases, got 1.5 s. Give it a longer lease, or start the worker with "
        "--job-monitoring-interval 1." in said(job)
    )
    assert shop.finished(enqueue_elsewhere(shop, horses.brief)) is None


def enqueue_elsewhere(shop: Shop, function: Callable[..., Any]) -> Job:
    """Enqueue for a stock worker, which renews nothing."""
    shop.start(STOCK, queues=["stock"], ready=False)
    return Queue("stock", connection=shop.client).enqueue(function, "B")


@BOTH
def test_a_store_that_the_policy_names_by_its_url_is_told(
    open_shop: OpenShop, fresh_redis: Callable[[], str], kind: str
) -> None:
    shop = open_shop(STORE_URL=fresh_redis())
    shop.start(kind)
    shop.gates.close("charged")
    job = shop.queue.enqueue(horses.by_url, "A", retry=Retry(max=1))
    [horse] = shop.gates["charged"].reached(timeout=PATIENCE)
    kill_horse(horse)
    shop.gates.open_all()
    assert shop.finished(job) == "A is charged"
    store = RedisStore.from_url(shop.env["STORE_URL"])
    expect_releases(store, key_of(horses.by_url), "crashed")
    store.close()


def test_a_store_that_is_an_object_is_out_of_the_workers_reach_which_it_says(
    open_shop: OpenShop, fresh_redis: Callable[[], str]
) -> None:
    shop = open_shop(STORE_URL=fresh_redis(), LEASE_TTL="3")
    worker = shop.start(OURS)
    shop.gates.close("charged")
    job = shop.queue.enqueue(horses.by_object, "A", retry=Retry(max=1))
    [horse] = shop.gates["charged"].reached(timeout=PATIENCE)
    wait_until(lambda: "can be neither" in worker.logs(), PATIENCE, worker.logs)
    kill_horse(horse)
    shop.gates.open_all()
    assert shop.finished(job) == "A is charged", "once the lease had run out"
    key = key_of(horses.by_object)
    assert (
        f"The lease on {key} can be neither renewed nor released for its horse: the store of "
        "tests.support.rq.horses.by_object is an object, which its worker does not know. Give the store's URL instead."
        in worker.logs()
    )
    store = RedisStore.from_url(shop.env["STORE_URL"])
    wait_until(lambda: "TakenOver" in [facts_of(each.text)["event"] for each in store.history(key)])
    store.close()


@pytest.mark.parametrize("function", [horses.outer, horses.outer_guarded], ids=["plain", "guarded"])
def test_jobs_that_a_job_runs_within_itself_are_deliveries_of_their_own(shop: Shop, function: Any) -> None:
    shop.start(OURS)
    job = shop.queue.enqueue(function, "A")
    assert shop.finished(job) == ["A-1 is charged", "A-2 is charged"]
    owners = {shop.record(key_of(horses.charge, f"A-{number}")).fence for number in (1, 2)}
    assert len(owners) == 2


def test_a_program_that_a_job_starts_is_not_taken_for_its_horse(shop: Shop) -> None:
    shop.start(OURS)
    assert shop.finished(shop.queue.enqueue(horses.environment, "A")) == ["None"]


def test_a_horse_whose_worker_is_gone_says_so_and_goes_on(shop: Shop) -> None:
    worker = shop.start(OURS)
    shop.gates.close("asked")
    job = shop.queue.enqueue(horses.orphaned, "A")
    shop.gates["asked"].reached(timeout=PATIENCE)
    worker.kill()
    shop.gates.open_all()
    assert shop.finished(job) == ["A-1 is charged", "A-2 is charged"]
    assert "could not be sent to the worker" not in worker.logs(), "there is no worker to receive it"


@pytest.mark.parametrize(("kind", "count"), [(OURS, 12), (OURS_SPAWNED, 4)], ids=["fork", "spawn"])
def test_a_worker_has_no_more_open_after_many_jobs(shop: Shop, kind: str, count: int) -> None:
    worker = shop.start(kind)
    for crash in (False, True):  # what is opened once, for the connection to the store too
        work_off(shop, f"first-{crash}", crash=crash)
    before = worker.descriptors()
    for number in range(count):
        work_off(shop, str(number), crash=number % 3 == 0)
    # One more for the store: its history is written while a lease is released, or it is not.
    wait_until(lambda: len(worker.descriptors()) <= len(before) + 1, message=lambda: f"{before} {worker.descriptors()}")


def work_off(shop: Shop, order_id: str, *, crash: bool) -> None:
    if crash:
        shop.ended(shop.queue.enqueue(horses.die, order_id), JobStatus.FAILED)
    else:
        shop.finished(shop.queue.enqueue(horses.charge, order_id))


@BOTH
def test_a_worker_imports_nothing_of_its_jobs(open_shop: OpenShop, tmp_path: Path, kind: str) -> None:
    imports = tmp_path / "imports"
    imports.mkdir()
    shop = open_shop(IMPORTS=str(imports))
    worker = shop.start(kind)
    shop.gates.close("charged")
    job = shop.queue.enqueue(horses.charge, "A", retry=Retry(max=1))
    [first] = shop.gates["charged"].reached(timeout=PATIENCE)
    kill_horse(first)
    shop.gates.open_all()
    shop.finished(job)
    second = shop.gates["charged"].arrivals[-1]
    assert {int(mark.name) for mark in imports.iterdir()} == {first, second}
    assert worker.pid not in (first, second)


def test_a_horse_that_is_killed_before_it_hears_of_its_lease_leaves_none(
    open_shop: OpenShop, fresh_redis: Callable[[], str], proxied: Callable[[int], Proxy]
) -> None:
    url = urlsplit(fresh_redis())
    store, key = RedisStore.from_url(url.geturl()), key_of(horses.by_url)
    take(store, "another")  # the server has the script from now on
    proxy = proxied(url.port or 6379)
    shop = open_shop(STORE_URL=proxy.url(int(url.path.strip("/"))))
    worker = shop.start(OURS)
    proxy.swallow_reply(matching=key.encode(), hang=True)
    job = shop.queue.enqueue(horses.by_url, "A", retry=Retry(max=1))
    wait_until(lambda: store.get(key) is not None, PATIENCE, worker.logs)
    [horse] = worker.horses()
    kill_horse(horse)
    assert shop.finished(job) == "A is charged"
    expect_releases(store, key, "crashed")
    assert shop.journal.count("ran", "A") == 1
    store.close()


def test_the_alarm_of_the_monitor_does_not_break_off_a_release(
    open_shop: OpenShop, fresh_redis: Callable[[], str], proxied: Callable[[int], Proxy]
) -> None:
    url = urlsplit(fresh_redis())
    store = RedisStore.from_url(url.geturl())
    proxy = proxied(url.port or 6379)
    shop = open_shop(STORE_URL=proxy.url(int(url.path.strip("/"))))
    shop.start(OURS)
    shop.gates.close("charged")
    job = shop.queue.enqueue(horses.by_url, "A", retry=Retry(max=1))
    [horse] = shop.gates["charged"].reached(timeout=PATIENCE)
    proxy.delay(0.6)  # there and back: each command takes longer than the second after which the alarm rings
    kill_horse(horse)
    shop.gates.open_all()
    assert shop.finished(job) == "A is charged"
    expect_releases(store, key_of(horses.by_url), "crashed")
    store.close()


@pytest.mark.parametrize("kind", [STOCK, OURS], ids=["stock", "ours"])
def test_a_horse_that_slept_past_its_lease_comes_back_for_what_its_heir_has_settled(
    open_shop: OpenShop, kind: str
) -> None:
    shop = open_shop(LEASE_TTL="3")
    first = shop.start(kind)
    shop.gates.close("ran")
    slow = shop.queue.enqueue(horses.charge, "A")
    [horse] = shop.gates["ran"].reached(timeout=PATIENCE)
    for pid in (first.pid, horse):
        os.kill(pid, signal.SIGSTOP)
    second = shop.start(kind)
    quick = shop.queue.enqueue(horses.charge, "A")
    shop.gates.close("charged")
    shop.gates["ran"].reached(2, timeout=PATIENCE)
    shop.gates["ran"].open()
    shop.gates["charged"].reached(timeout=PATIENCE)
    for pid in (first.pid, horse):
        os.kill(pid, signal.SIGCONT)
    wait_until(lambda: "LeaseLost key=" in first.logs(), PATIENCE, shop.logs)
    wait_until(lambda: slow.get_meta(refresh=True)["idempotency"]["outcome"] == "deferred", PATIENCE, shop.logs)
    shop.gates.open_all()
    # A stock worker whose alarm rings just when its horse ends takes it for killed, for a while.
    shop.ended(slow, JobStatus.FINISHED)
    assert slow.return_value(refresh=True) == shop.finished(quick) == "A is charged"
    assert kind == STOCK or "terminated unexpectedly" not in first.logs()
    assert (shop.journal.count("ran", "A"), horses.taken(shop.journal, "A")) == (2, 1)
    assert second.running


def test_a_store_that_is_down_when_a_horse_dies_costs_a_lease_and_no_job(
    open_shop: OpenShop, own_redis: Callable[..., RedisServer]
) -> None:
    server = own_redis()
    shop = open_shop(STORE_URL=server.url())
    worker = shop.start(OURS)
    shop.gates.close("charged")
    job = shop.queue.enqueue(horses.by_url, "A", retry=Retry(max=1))
    [horse] = shop.gates["charged"].reached(timeout=PATIENCE)
    server.kill()
    kill_horse(horse)
    shop.gates.open_all()
    wait_until(lambda: "could not be released for its horse" in worker.logs(), PATIENCE, worker.logs)
    server.start()  # without its data, so that there is no lease to wait for
    assert shop.finished(job) == "A is charged"


def test_a_worker_has_the_name_that_it_is_given(shop: Shop) -> None:
    shop.start(OURS, "--name", "the-first")
    assert [worker.name for worker in IdempotentWorker.all(connection=shop.client)] == ["the-first"]
    assert shop.finished(shop.queue.enqueue(horses.charge, "A")) == "A is charged"


def test_the_workers_of_a_pool_recover_at_once(shop: Shop) -> None:
    pool = shop.start(OURS, "--num-workers", "2", command="worker-pool")
    shop.gates.close("charged")
    job = shop.queue.enqueue(horses.charge, "A", retry=Retry(max=1))
    [horse] = shop.gates["charged"].reached(timeout=PATIENCE)
    kill_horse(horse)
    shop.gates.open_all()
    assert shop.finished(job) == "A is charged"
    expect_releases(shop.store, key_of(horses.charge), "crashed")
    assert pool.stop() == 0
