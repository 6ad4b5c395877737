"""A job that meets a running one of the same operation."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from datetime import timedelta
from importlib.util import find_spec
from typing import Any

import pytest
from rq import Queue, Retry
from rq.job import Job
from rq.scheduler import RQScheduler
from rq.utils import now

from celery_idempotent import Policy, events
from celery_idempotent.rq import job as jobs
from celery_idempotent.rq.decorator import JobBinding
from celery_idempotent.rq.delivery import RqDelivery
from celery_idempotent.stores.memory import MemoryStore
from tests.rq.conftest import StartRq
from tests.support.proxy import Proxy
from tests.support.rq import shop
from tests.support.rq.desk import Desk, hearing
from tests.support.rq.nodes import burst
from tests.support.waiting import wait_until

CHARGE = "idem:tests.support.rq.shop.charge::ORD-1"


def when_it_conflicts(desk: Desk, do: Callable[[], object]) -> Job:
    """Run a job in this process, and do something once it waits for the holder of its operation."""
    done: list[Future[Any]] = []
    with ThreadPoolExecutor(1) as pool, hearing(events.Conflicted, then=lambda event: done.append(pool.submit(do))):
        job = desk.run(shop.charge, "ORD-1")
        for future in done:
            future.result()
    assert len(done) == 1
    return job


def test_a_job_does_not_go_in_circles_while_a_transaction_is_open_for_longer_than_its_lease() -> None:
    delays = [jobs.deferral_delay(number, 0.0, None) for number in range(12)]
    assert delays[:6] == sorted(delays[:6])
    assert delays[-1] == jobs.LONGEST_DELAY


@pytest.mark.parametrize("scheduler", [True, False])
def test_a_deferral_that_a_decorator_drops_fails_the_job_which_has_not_run(desk: Desk, scheduler: bool) -> None:
    release = desk.hold("idem:tests.support.rq.shop.timed_charge::ORD-1")
    with desk.scheduler() if scheduler else nullcontext():
        job = desk.run(shop.timed_charge, "ORD-1")
    assert (desk.status(job), desk.runs("ORD-1")) == ("failed", 0)
    assert not desk.again(job).number_of_retries
    assert "put @idempotent outermost" in desk.error(job)
    release()
    desk.again(job).requeue()
    desk.burst()
    assert (desk.status(job), desk.runs("ORD-1")) == ("finished", 1)


@pytest.mark.nightly
def test_a_job_whose_deferral_is_dropped_is_retried_as_one_that_fails(desk: Desk) -> None:
    desk.hold("idem:tests.support.rq.shop.timed_charge::ORD-1")
    job = desk.run(shop.timed_charge, "ORD-1", retry=Retry(max=2))
    assert (desk.status(job), desk.runs("ORD-1")) == ("failed", 0)
    assert (desk.again(job).number_of_retries or 0, desk.again(job).retries_left) == (0, 0)


# -- where a scheduler runs --------------------------------------------------------------------------------------------


@pytest.mark.smoke
def test_with_a_scheduler_it_is_put_off_and_takes_no_worker(desk: Desk, start_rq: StartRq) -> None:
    after = desk.gates.close("after ORD-1")
    start_rq(scheduler=True)
    first = desk.queue.enqueue(shop.charge, "ORD-1")
    after.reached()
    start_rq()
    second = desk.queue.enqueue(shop.charge, "ORD-1")
    wait_until(lambda: desk.scheduled(second), 30, "the second job to be scheduled")
    assert desk.meta(second)["outcome"] == "deferred"
    # Its worker goes on with other work.
    other = desk.queue.enqueue(shop.report, "monday")
    assert desk.wait_for(other, "finished").return_value() == "monday charged 1"
    after.open()
    assert desk.wait_for(first, "finished").return_value() == "ORD-1 charged 1"
    assert desk.wait_for(second, "finished").return_value() == "ORD-1 charged 1"
    assert desk.meta(second)["outcome"] == "replayed"


@pytest.mark.smoke
def test_however_often_it_is_put_off_no_retry_of_its_own_is_spent(desk: Desk) -> None:
    release = desk.hold(CHARGE)
    with desk.scheduler() as scheduler:
        job = desk.run(shop.charge, "ORD-1", ending="retry 1 at first", retry=Retry(max=2))
        for number in range(1, 8):
            found = desk.again(job)
            assert desk.scheduled(job)
            assert (found.number_of_retries or 0, found.retries_left) == (0, 2)
            assert desk.meta(job)["deferrals"] == number
            desk.bring_back(scheduler)
            desk.burst()
        release()
        desk.bring_back(scheduler)
        desk.burst()
    # It runs, and its own one retry is still there.
    found = desk.again(job)
    assert found.return_value() == "ORD-1 charged 2"
    assert found.retries_left == 2
    assert desk.effects("ORD-1") == 2


@pytest.mark.smoke
def test_a_job_in_the_midst_of_its_own_retries_is_put_off_and_goes_on_counting_where_it_was(desk: Desk) -> None:
    with desk.scheduler() as scheduler:
        job = desk.run(shop.charge, "ORD-1", ending="retry 3 60", retry=Retry(max=2))
        desk.bring_back(scheduler)
        desk.burst()
        counted = desk.again(job).number_of_retries
        desk.lapse()
        release = desk.hold(CHARGE)
        for _ in range(3):
            desk.bring_back(scheduler)
            desk.burst()
            assert desk.scheduled(job)
            assert desk.again(job).number_of_retries == counted
        release()
    assert desk.effects("ORD-1") == 2


def test_the_pauses_grow_and_end_with_the_lease_in_its_way(desk: Desk) -> None:
    desk.hold(CHARGE)
    with hearing(events.Deferred) as heard, desk.scheduler() as scheduler:
        desk.run(shop.charge, "ORD-1")
        for _ in range(8):
            desk.bring_back(scheduler)
            desk.burst()
    delays = [event.delay for event in heard if isinstance(event, events.Deferred)]
    assert [event.copy for event in heard if isinstance(event, events.Deferred)] == list(range(1, 10))
    assert 1 <= delays[0] <= 2
    assert delays[4] > delays[0]
    assert max(delays) <= 60
    assert all(delay == int(delay) >= 1 for delay in delays)


def test_it_is_put_off_in_the_queue_that_it_came_from(desk: Desk) -> None:
    desk.hold(CHARGE)
    queue = Queue("other", connection=desk.connection)
    desk.queue = queue
    with desk.scheduler():
        job = desk.run(shop.charge, "ORD-1", result_ttl=7, ttl=3600, meta={"mine": 1}, description="a charge")
        assert desk.scheduled(job)
    assert (job.origin, job.result_ttl, job.meta["mine"], job.description) == ("other", 7, 1, "a charge")


@pytest.mark.skipif(find_spec("rq.rate_limit") is None, reason="RQ has rate limits since 3.0")
def test_while_it_is_put_off_others_of_its_rate_limit_run(desk: Desk) -> None:
    from rq.rate_limit import RateLimit, RateLimitRegistry

    one, release = RateLimit("gateway", concurrency=1), desk.hold(CHARGE)
    with desk.scheduler() as scheduler:
        waiting, other = (desk.queue.enqueue(shop.charge, order, rate_limit=one) for order in ("ORD-1", "ORD-2"))
        desk.burst()
        assert (desk.status(waiting), desk.status(other)) == ("scheduled", "finished")
        release()
        desk.bring_back(scheduler)
        desk.burst()
    assert [desk.again(job).return_value() for job in (waiting, other)] == ["ORD-1 charged 1", "ORD-2 charged 1"]
    limit = RateLimitRegistry.from_job(desk.again(other))
    assert (limit.get_allowed_job_ids(), desk.connection.zcard(limit.rate_limited_key)) == ([], 0)


def test_an_async_job_is_put_off_too(desk: Desk) -> None:
    release = desk.hold("idem:tests.support.rq.shop.charge_slowly::ORD-1")
    with desk.scheduler() as scheduler:
        job = desk.run(shop.charge_slowly, "ORD-1")
        assert desk.scheduled(job)
        release()
        desk.bring_back(scheduler)
        desk.burst()
    assert desk.again(job).return_value() == "ORD-1 charged 1"


# -- where none runs ---------------------------------------------------------------------------------------------------


@pytest.mark.smoke
def test_without_a_scheduler_it_waits_until_it_can_run(desk: Desk) -> None:
    release = desk.hold(CHARGE)
    job = when_it_conflicts(desk, release)
    assert job.return_value() == "ORD-1 charged 1"


def test_without_a_scheduler_it_waits_until_it_is_answered(desk: Desk, start_rq: StartRq) -> None:
    after = desk.gates.close("after ORD-1")
    start_rq()
    first = desk.queue.enqueue(shop.charge, "ORD-1")
    after.reached()
    second = when_it_conflicts(desk, after.open)
    assert desk.wait_for(first, "finished").return_value() == "ORD-1 charged 1"
    assert second.return_value() == "ORD-1 charged 1"
    assert desk.effects("ORD-1") == 1


@pytest.mark.parametrize("withdraw", [Job.cancel, Job.delete], ids=["cancelled", "deleted"])
def test_a_job_that_is_withdrawn_while_it_waits_does_not_come_back(desk: Desk, withdraw: Callable[[Job], Any]) -> None:
    release = desk.hold(CHARGE)
    job = desk.queue.enqueue(shop.charge, "ORD-1", retry=Retry(max=2))
    with hearing(events.Conflicted, then=lambda event: withdraw(job)) as heard:
        desk.burst()
    release()
    desk.burst()
    assert len(heard) == 1
    assert desk.effects("ORD-1") == 0
    assert "was cancelled or deleted while it waited" in str(job.latest_result().exc_string)


@pytest.mark.smoke
def test_without_a_scheduler_it_waits_a_second_and_goes_behind_the_others_and_spends_no_retry(desk: Desk) -> None:
    release = desk.hold(CHARGE)
    job = desk.queue.enqueue(shop.charge, "ORD-1", ending="retry 1 at first", job_timeout=5, retry=Retry(max=2))
    for number in range(1, 5):
        other = desk.queue.enqueue(shop.report, f"day {number}")
        with hearing(events.Deferred) as heard:
            desk.burst(jobs=1)
        assert [(event.delay, event.copy) for event in heard if isinstance(event, events.Deferred)] == [(0, number)]
        found = desk.again(job)
        assert desk.queue.get_job_ids() == [other.id, job.id]
        assert (found.number_of_retries or 0, found.retries_left) == (0, 2)
        assert (desk.meta(job)["outcome"], desk.meta(job)["deferrals"]) == ("deferred", number)
        desk.burst(jobs=1)
        assert desk.status(other) == "finished"
    release()
    desk.burst()
    # It runs, and its own one retry is still there.
    found = desk.again(job)
    assert (found.return_value(), found.retries_left) == ("ORD-1 charged 2", 2)
    assert desk.effects("ORD-1") == 2


@pytest.mark.nightly
def test_without_a_scheduler_a_job_that_may_take_less_than_a_lease_outlives_the_one_in_its_way(desk: Desk) -> None:
    """As that of its own killed horse: RQ alone would run it again at once."""
    desk.hold(CHARGE)
    job = desk.queue.enqueue(shop.charge, "ORD-1", job_timeout=1)
    for _ in range(3):
        desk.burst(jobs=1)
        assert desk.status(job) == "queued"
    desk.lapse()
    desk.burst()
    assert desk.again(job).return_value() == "ORD-1 charged 1"


@pytest.mark.nightly
def test_without_a_scheduler_a_job_whose_record_cannot_be_read_goes_round_no_faster_either(desk: Desk) -> None:
    desk.connection.set(CHARGE, "somebody's")
    job = desk.queue.enqueue(shop.charge, "ORD-1")
    began = time.monotonic()
    for _ in range(2):
        desk.burst(jobs=1)
        assert desk.status(job) == "queued"
    assert time.monotonic() - began >= 1.9
    desk.connection.delete(CHARGE)
    desk.burst()
    assert desk.again(job).return_value() == "ORD-1 charged 1"


def test_a_scheduler_that_has_died_and_left_its_lock_is_none(desk: Desk) -> None:
    desk.hold(CHARGE)
    with desk.scheduler():
        lock = RQScheduler.get_locking_key(desk.queue.name)
        assert desk.connection.ttl(lock) > jobs.LOCK_TTL - 5, "which it has just taken"
        desk.connection.expire(lock, jobs.LOCK_TTL - 10)  # seconds after Redis was restarted, which ends RQ's
        job = desk.queue.enqueue(shop.charge, "ORD-1")
        desk.burst(jobs=1)
        assert desk.status(job) == "queued"
        assert not desk.scheduled(job)


@pytest.mark.nightly
def test_a_scheduler_that_lives_renews_its_lock_long_before_it_is_taken_for_dead(desk: Desk, start_rq: StartRq) -> None:
    start_rq(scheduler=True)
    lock = RQScheduler.get_locking_key(desk.queue.name)
    wait_until(lambda: desk.connection.ttl(lock) > 0, 30, "the scheduler to take its lock")
    left = []
    for _ in range(30):
        left.append(desk.connection.ttl(lock))
        time.sleep(0.1)
    assert min(left) > jobs.LOCK_TTL - jobs.SILENCE / 2


@pytest.mark.nightly
def test_a_worker_in_burst_mode_waits_for_what_it_was_asked_to_do(desk: Desk, start_rq: StartRq) -> None:
    """Its scheduler is none: it holds no lock while the worker performs a job."""
    release = desk.hold(CHARGE)
    job = desk.queue.enqueue(shop.charge, "ORD-1")
    worker = start_rq(scheduler=True, options=["--burst"], ready=False)
    wait_until(lambda: desk.deferrals(job) >= 2, 30, "the job to come back")
    assert worker.running
    release()
    assert worker.wait() == 0
    assert desk.again(job).return_value() == "ORD-1 charged 1"


def test_its_time_began_before_its_module_was_imported(desk: Desk) -> None:
    """As RQ counts: what it waits for is over before RQ's limit, however long the import took."""
    job = Job.create(shop.charge, ("ORD-1",), connection=desk.connection, timeout=180)
    assert jobs.seconds_running(job) == 0
    job.started_at = now() - timedelta(seconds=100)
    binding = JobBinding(
        shop.charge.__wrapped__, Policy(), name=None, namespace="idem", store=MemoryStore, serializer="json"
    )
    delivery = RqDelivery(binding, job, shop.charge, ("ORD-1",), {})
    delivery._prepare()
    assert 0 < delivery.patience <= 0.8 * 180 - 100
    assert delivery.min_wait() == 1


# -- where it is enqueued ----------------------------------------------------------------------------------------------


@pytest.mark.smoke
def test_where_it_is_enqueued_it_fails_and_says_how_to_wait(desk: Desk) -> None:
    desk.hold("idem:tests.support.rq.shop.charge_or_wait::ORD-1")
    queue = Queue(is_async=False, connection=desk.connection)
    with desk.scheduler():
        job = queue.enqueue(shop.charge_or_wait, "ORD-1")
    assert desk.status(job) == "failed"
    assert "wait_timeout" in desk.error(job)
    assert not desk.scheduled(job)


def test_where_it_is_enqueued_it_does_not_wait_unless_it_is_told_to(desk: Desk) -> None:
    desk.hold(CHARGE)
    queue = Queue(is_async=False, connection=desk.connection)
    with hearing(events.Conflicted) as heard:
        job = queue.enqueue(shop.charge, "ORD-1")
    assert len(heard) == 1
    assert "Conflict" in desk.error(job)


def test_a_worker_that_is_called_as_rq_calls_none_is_one_all_the_same(desk: Desk) -> None:
    release = desk.hold(CHARGE)
    job = desk.queue.enqueue(shop.charge, "ORD-1")
    burst(desk.queue, name="sync", jobs=1)
    assert desk.status(job) == "queued"
    release()
    desk.burst()
    assert desk.again(job).return_value() == "ORD-1 charged 1"


# -- as the policy says ------------------------------------------------------------------------------------------------


def test_who_wants_an_error_gets_one(desk: Desk) -> None:
    desk.hold("idem:tests.support.rq.shop.charge_or_raise::ORD-1")
    with desk.scheduler():
        job = desk.run(shop.charge_or_raise, "ORD-1")
    assert job.get_status() == "failed"
    assert "Conflict" in desk.error(job)
    key = "idem:tests.support.rq.shop.charge_or_raise::ORD-1"
    assert desk.meta(job) == {"outcome": "refused", "error": "Conflict", "key": key}


def test_who_waits_a_while_is_put_off_after_it(desk: Desk) -> None:
    desk.hold("idem:tests.support.rq.shop.charge_or_wait::ORD-1")
    with desk.scheduler():
        job = desk.run(shop.charge_or_wait, "ORD-1")
        assert desk.scheduled(job)
    assert desk.meta(job)["outcome"] == "deferred"


# -- where the store cannot be reached ---------------------------------------------------------------------------------


def away(proxy: Proxy) -> None:
    proxy.refuse()
    proxy.reset()


@pytest.mark.nightly
def test_with_a_scheduler_a_job_without_its_store_is_put_off_within_its_time(desk: Desk, through: Proxy) -> None:
    away(through)
    with desk.scheduler() as scheduler:
        job = desk.run("tests.support.rq.shop.charge_through", "ORD-1", job_timeout=5, retry=Retry(max=1))
        assert desk.scheduled(job)
        assert (job.retries_left, desk.effects("ORD-1")) == (1, 0)
        through.heal()
        desk.bring_back(scheduler)
        desk.burst()
    assert desk.again(job).return_value() == "ORD-1 charged 1"


@pytest.mark.nightly
def test_without_one_it_goes_behind_the_others_within_its_time(desk: Desk, through: Proxy) -> None:
    away(through)
    job = desk.queue.enqueue("tests.support.rq.shop.charge_through", "ORD-1", job_timeout=5, retry=Retry(max=1))
    desk.burst(jobs=1)
    assert (desk.status(job), desk.again(job).retries_left, desk.effects("ORD-1")) == ("queued", 1, 0)
    through.heal()
    desk.burst()
    assert desk.again(job).return_value() == "ORD-1 charged 1"


def test_where_it_is_enqueued_nobody_waits_long_for_a_store(desk: Desk, through: Proxy) -> None:
    away(through)
    queue = Queue(is_async=False, connection=desk.connection)
    job = queue.enqueue("tests.support.rq.shop.charge_through", "ORD-1")  # may take three minutes
    assert desk.error(job).startswith("celery_idempotent.errors.StoreUnreachable")
    assert desk.effects("ORD-1") == 0
