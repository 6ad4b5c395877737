"""What is recorded for each way in which the body of a job may end, and what RQ does then."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from rq import Callback, Queue, Retry
from rq.exceptions import ShutDownImminentException
from rq.job import Job
from rq.timeouts import JobTimeoutException

from celery_idempotent import events
from celery_idempotent.core.guard import Delivery, Guard
from celery_idempotent.core.heartbeat import Heartbeat
from celery_idempotent.events import Acquired, Event, add_hook, remove_hook
from celery_idempotent.rq.job import occurrence
from celery_idempotent.stores import State
from tests.support.proxy import Proxy
from tests.support.rq import shop
from tests.support.rq.desk import Desk, hearing
from tests.support.waiting import wait_until

# -- it returns --------------------------------------------------------------------------------------------------------


def test_a_return_is_settled(desk: Desk) -> None:
    with hearing(events.Acquired, events.Completed) as heard:
        job = desk.run(shop.charge, "ORD-1")
    record = desk.record()
    assert (record.state, record.task_id, record.fence) == (State.COMPLETED, occurrence(job), desk.fence("ORD-1"))
    assert [type(event) for event in heard] == [events.Acquired, events.Completed]


def test_a_result_that_cannot_be_written_is_settled_and_the_effect_is_not_repeated(desk: Desk) -> None:
    first = desk.queue.enqueue(shop.unwritable, "ORD-1")
    second = desk.queue.enqueue(shop.unwritable, "ORD-1", retry=Retry(max=2))
    desk.burst()
    assert desk.record().state is State.COMPLETED
    assert desk.effects("ORD-1") == 1
    assert desk.status(first) in ("finished", "failed")  # as RQ's version has it
    assert "ResultUnavailable" in desk.error(second)
    assert desk.again(second).retries_left == 2


def test_where_no_result_is_kept_a_duplicate_that_would_be_read_fails(desk: Desk) -> None:
    desk.run(shop.forget, "ORD-1")
    assert "ResultUnavailable" in desk.error(desk.run(shop.forget, "ORD-1"))
    assert desk.effects("ORD-1") == 1


def test_where_no_result_is_kept_a_duplicate_that_nobody_reads_succeeds(desk: Desk) -> None:
    desk.run(shop.forget, "ORD-1")
    desk.queue.enqueue(shop.forget, "ORD-1", result_ttl=0)
    with hearing(events.Replayed) as heard:
        desk.burst()
    assert len(heard) == 1
    assert desk.effects("ORD-1") == 1


def test_a_success_callback_reads_the_result_also_of_a_job_whose_result_is_not_kept(desk: Desk) -> None:
    desk.run(shop.forget, "ORD-1")
    job = desk.queue.enqueue(shop.forget, "ORD-1", result_ttl=0, on_success=Callback(shop.succeeded))
    desk.burst()
    assert "ResultUnavailable" in desk.error(job)
    assert desk.journal.count("succeeded") == 0


# -- it raises ---------------------------------------------------------------------------------------------------------


def test_without_retries_left_a_failure_is_released_and_the_next_job_runs(desk: Desk) -> None:
    failed = desk.run(shop.charge, "ORD-1", ending="raise at first")
    assert failed.get_status() == "failed"
    assert desk.error(failed) == "ValueError: no ORD-1"
    assert (desk.record().state, desk.record().reason) == (State.RELEASED, "failed")
    assert desk.run(shop.charge, "ORD-1").return_value() == "ORD-1 charged 2"


@pytest.mark.smoke
def test_with_retries_left_the_retry_runs(desk: Desk) -> None:
    job = desk.run(shop.charge, "ORD-1", ending="raise at first", retry=Retry(max=2))
    assert job.return_value() == "ORD-1 charged 2"
    assert job.retries_left == 1


def test_while_a_retry_is_due_other_jobs_with_its_key_wait_for_it(desk: Desk) -> None:
    with desk.scheduler() as scheduler:
        job = desk.run(shop.charge, "ORD-1", ending="raise at first", retry=Retry(max=1, interval=60))
        assert desk.scheduled(job)
        assert (desk.record().state, desk.record().reason) == (State.RELEASED, "retry")
        assert 50 < desk.record().remaining <= 60
        others = [desk.run(shop.charge, "ORD-1") for _ in range(3)]
        assert desk.effects("ORD-1") == 1
        desk.bring_back(scheduler)
        desk.burst()
        desk.bring_back(scheduler)
        desk.burst()
    assert [desk.again(one).return_value() for one in (job, *others)] == ["ORD-1 charged 2"] * 4


def test_when_its_last_retry_fails_the_operation_is_free(desk: Desk) -> None:
    job = desk.run(shop.charge, "ORD-1", ending="raise", retry=Retry(max=2))
    assert (job.get_status(), job.retries_left) == ("failed", 0)
    assert desk.effects("ORD-1") == 3
    assert (desk.record().state, desk.record().reason, desk.record().remaining) == (State.RELEASED, "failed", 0)


@pytest.mark.smoke
def test_a_final_failure_is_raised_for_every_job_of_its_key_and_no_retry_is_spent_on_it(desk: Desk) -> None:
    first = desk.run(shop.charge, "ORD-1", ending="decline", retry=Retry(max=3))
    second = desk.run(shop.charge, "ORD-1", retry=Retry(max=3, interval=60))
    for job in (first, second):
        assert (job.get_status(), job.retries_left) == ("failed", 3)
        assert "Declined: no ORD-1" in desk.error(job)
    assert desk.meta(first)["outcome"] == "ran"
    key = "idem:tests.support.rq.shop.charge::ORD-1"
    assert desk.meta(second) == {"outcome": "replayed", "error": "Declined", "key": key}
    assert desk.record().state is State.FAILED
    assert desk.effects("ORD-1") == 1


def test_a_failure_s_retries_are_there_once_it_is_requeued(desk: Desk) -> None:
    options: Any = {"retry": Retry(max=2), "meta": {"idempotency_key": ""}}
    job = desk.run(shop.report, "monday", "raise at first", **options)
    assert (job.get_status(), job.retries_left) == ("failed", 2)
    job.meta.pop("idempotency_key")
    job.save_meta()
    job.requeue()
    desk.burst()
    again = desk.again(job)
    assert (again.return_value(), again.retries_left) == ("monday charged 2", 1)


def test_an_operation_whose_runs_keep_dying_fails_its_job_for_good(desk: Desk) -> None:
    job = desk.queue.enqueue(shop.charge_once, "ORD-1", retry=Retry(max=3))
    desk.hold("idem:tests.support.rq.shop.charge_once::ORD-1", task_id=occurrence(job))
    desk.lapse()
    with hearing(events.CrashLooped) as heard:
        desk.burst()
    job = desk.again(job)
    assert (job.get_status(), job.retries_left) == ("failed", 3)
    assert "CrashLoop" in desk.error(job)
    assert len(heard) == 1
    assert desk.effects("ORD-1") == 0


# -- it returns a Retry ------------------------------------------------------------------------------------------------


@pytest.mark.smoke
def test_a_returned_retry_is_no_result_and_the_job_runs_again(desk: Desk) -> None:
    with hearing(events.Released, events.Completed) as heard:
        job = desk.run(shop.charge, "ORD-1", ending="retry 2 at first")
    assert job.return_value() == "ORD-1 charged 2"
    assert job.number_of_retries == 1
    assert [type(event) for event in heard] == [events.Released, events.Completed]
    assert desk.run(shop.charge, "ORD-1").return_value() == "ORD-1 charged 2"


def test_a_returned_retry_with_an_interval_is_waited_for(desk: Desk) -> None:
    with desk.scheduler() as scheduler:
        job = desk.run(shop.charge, "ORD-1", ending="retry 2 60 at first")
        assert desk.scheduled(job)
        assert (desk.record().state, desk.record().reason) == (State.RELEASED, "retry")
        assert 50 < desk.record().remaining <= 60
        other = desk.run(shop.charge, "ORD-1")
        assert desk.scheduled(other)
        desk.bring_back(scheduler)
        desk.burst()
        desk.bring_back(scheduler)
        desk.burst()
    assert [desk.again(one).return_value() for one in (job, other)] == ["ORD-1 charged 2"] * 2


def test_a_returned_retry_that_exceeds_its_most_fails_and_frees_the_operation(desk: Desk) -> None:
    job = desk.run(shop.charge, "ORD-1", ending="retry 2")
    assert job.get_status() == "failed"
    assert desk.effects("ORD-1") == 3
    assert (desk.record().state, desk.record().reason) == (State.RELEASED, "failed")
    assert desk.run(shop.charge, "ORD-1").return_value() == "ORD-1 charged 4"


def test_a_retry_is_no_result_of_an_async_function_either(desk: Desk) -> None:
    job = desk.run(shop.charge_slowly, "ORD-1", ending="retry 2 at first")
    assert job.return_value() == "ORD-1 charged 2"


# -- its time is up ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ["sleep at first", "spin at first"])
def test_a_job_that_takes_too_long_gives_its_lease_back_and_its_retry_runs(desk: Desk, ending: str) -> None:
    job = desk.run(shop.charge, "ORD-1", ending=ending, job_timeout=1, retry=Retry(max=1))
    assert job.return_value() == "ORD-1 charged 2"


def test_an_async_job_that_takes_too_long_gives_its_lease_back(desk: Desk) -> None:
    job = desk.run(shop.charge_slowly, "ORD-1", ending="sleep", job_timeout=1)
    assert desk.error(job).startswith("rq.timeouts.JobTimeoutException")
    assert (desk.record().state, desk.record().reason) == (State.RELEASED, "failed")


def settling(desk: Desk, interfere: Callable[[], object]) -> Job:
    """Run a job that is interfered with before it settles, and whose time is up meanwhile."""
    gate = desk.gates.close("after ORD-1")

    def at_the_gate() -> None:
        gate.reached()
        interfere()
        gate.open()

    job = desk.queue.enqueue("tests.support.rq.shop.charge_through", "ORD-1", job_timeout=1, retry=Retry(max=2))
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(at_the_gate)
        desk.burst()
        done.result()
    return desk.again(job)


@pytest.mark.smoke
def test_a_job_whose_time_is_up_while_the_store_answers_its_settle_is_settled_and_not_repeated(
    desk: Desk, through: Proxy
) -> None:
    job = settling(desk, lambda: through.swallow_reply(matching=b"completed", hang=True))
    assert through.swallowed == 1
    assert desk.settled()
    assert desk.effects("ORD-1") == 1
    assert job.return_value() == "ORD-1 charged 1"


def test_a_job_whose_time_is_up_while_the_store_cannot_be_reached_is_settled_once_it_can(
    desk: Desk, through: Proxy
) -> None:
    healing = []

    def partition() -> None:
        through.partition()
        accepted = through.accepted

        def heal() -> None:
            wait_until(lambda: through.accepted > accepted, message="the store to be asked again")
            through.heal()

        healing.append(threading.Thread(target=heal))
        healing[0].start()

    job = settling(desk, partition)
    healing[0].join()
    assert desk.settled()
    assert desk.effects("ORD-1") == 1
    assert job.return_value() == "ORD-1 charged 1"


def test_a_job_whose_time_is_up_while_it_claims_leaves_no_lease_behind(desk: Desk, through: Proxy) -> None:
    desk.hold("other")()  # so that the server knows the script: a reply that it does not grants nothing
    desk.connection.flushdb()
    through.swallow_reply(matching=b"charge_through", hang=True)
    job = desk.queue.enqueue("tests.support.rq.shop.charge_through", "ORD-1", job_timeout=1)
    desk.burst()
    assert desk.error(job).startswith("rq.timeouts.JobTimeoutException")
    assert desk.record().state is State.RELEASED
    assert desk.effects("ORD-1") == 0


def test_a_job_whose_time_is_up_in_a_hook_fails_and_leaves_no_lease_behind(desk: Desk) -> None:
    gate = desk.gates.close("acquired")

    def slow(event: Event) -> None:
        gate.wait()

    add_hook(slow, {Acquired})
    try:
        job = desk.run(shop.charge, "ORD-1", job_timeout=1)
    finally:
        remove_hook(slow)
    assert desk.error(job).startswith("rq.timeouts.JobTimeoutException")
    assert (desk.record().state, desk.record().reason) == (State.RELEASED, "failed")
    assert desk.effects("ORD-1") == 0


@pytest.mark.parametrize(
    ("error", "reason"),
    [(JobTimeoutException("the alarm rang"), "failed"), (ShutDownImminentException("the alarm rang", {}), "shutdown")],
    ids=["time is up", "shutdown is imminent"],
)
@pytest.mark.parametrize(
    "where",
    [(Guard, "_hold"), (Guard, "acquire_now"), (Heartbeat, "watch"), (Heartbeat, "forget")],
    ids=["granted", "taken", "renewed", "over"],
)
def test_a_job_that_rq_ends_between_two_steps_of_its_guard_leaves_no_lease_behind(
    desk: Desk, where: tuple[type[Any], str], error: BaseException, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once its lease is granted, once the guard has it, once it is renewed, and once the body is over."""
    owner, name = where
    done, rung = getattr(owner, name), []

    def ring(*args: Any) -> Any:
        found = done(*args)
        if not rung:
            rung.append(found)
            raise error
        return found

    monkeypatch.setattr(owner, name, ring)
    job = desk.run(shop.charge, "ORD-1", ending="raise at first")
    assert "the alarm rang" in str(job.latest_result().exc_string)
    assert len(rung) == 1
    assert (desk.record().state, desk.record().reason) == (State.RELEASED, reason)
    assert desk.run(shop.charge, "ORD-1", ending="return", retry=Retry(max=1)).get_status() == "finished"


def test_a_job_whose_time_is_up_before_its_body_leaves_no_lease_also_where_that_would_be_final(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    acquire_now = Guard.acquire_now

    def ring(guard: Guard, delivery: Delivery) -> None:
        acquire_now(guard, delivery)
        raise JobTimeoutException

    with monkeypatch.context() as patched:
        patched.setattr(Guard, "acquire_now", ring)
        desk.run(shop.charge_in_time, "ORD-1")
    assert (desk.record().state, desk.record().reason) == (State.RELEASED, "failed")
    assert desk.run(shop.charge_in_time, "ORD-1").return_value() == "ORD-1 charged 1"


# -- what RQ does after it ---------------------------------------------------------------------------------------------


def test_a_success_callback_that_fails_has_the_job_run_again_and_not_the_function(desk: Desk) -> None:
    job = desk.run(shop.charge, "ORD-1", on_success=Callback(shop.broken_at_first), retry=Retry(max=2))
    assert job.return_value() == "ORD-1 charged 1"
    assert desk.journal.count("called back") == 2
    assert desk.effects("ORD-1") == 1


def test_a_success_callback_that_always_fails_runs_the_function_once(desk: Desk) -> None:
    job = desk.run(shop.report, "monday", on_success=Callback(shop.broken), retry=Retry(max=2))
    assert job.get_status() == "failed"
    assert desk.journal.count("called back") == 3
    assert desk.effects("monday") == 1


def test_where_it_is_enqueued_a_body_that_raises_releases(desk: Desk) -> None:
    queue = Queue(is_async=False, connection=desk.connection)
    job = queue.enqueue(shop.charge, "ORD-1", ending="raise at first")
    assert desk.status(job) == "failed"
    assert queue.enqueue(shop.charge, "ORD-1").return_value() == "ORD-1 charged 2"


@pytest.mark.parametrize("ending", ["raise at first", "retry 3 600 at first"])
def test_where_it_is_enqueued_nothing_waits_for_a_retry_that_rq_does_not_make(desk: Desk, ending: str) -> None:
    queue = Queue(is_async=False, connection=desk.connection)
    queue.enqueue(shop.charge, "ORD-1", ending=ending, retry=Retry(max=3, interval=600))
    assert queue.enqueue(shop.charge, "ORD-1").return_value() == "ORD-1 charged 2"
