"""Workers and horses that are stopped, killed and frozen: stock ones, so that what is recorded is the decorator's."""

from __future__ import annotations

import pytest
from rq import Callback, Retry
from rq.command import send_stop_job_command

from celery_idempotent.stores import State
from tests.rq.conftest import StartRq
from tests.support.rq import shop
from tests.support.rq.desk import Desk
from tests.support.rq.workers import KilledAsItIsScheduled
from tests.support.waiting import wait_until

CHARGE = "idem:tests.support.rq.shop.charge::ORD-1"

# -- a horse is killed -------------------------------------------------------------------------------------------------


@pytest.mark.smoke
def test_after_a_killed_horse_the_retry_waits_for_the_lease_and_runs(desk: Desk, start_rq: StartRq) -> None:
    before = desk.gates.close("before ORD-1")
    node = start_rq()
    job = desk.queue.enqueue(shop.charge, "ORD-1", retry=Retry(max=1))
    [horse] = before.reached()
    node.kill_horse(horse)
    before.open()
    desk.conflict()
    assert (desk.record().state, desk.effects("ORD-1")) == (State.IN_PROGRESS, 0)
    desk.lapse()
    assert desk.wait_for(job, "finished").return_value() == "ORD-1 charged 1"
    assert (desk.record().crashes, desk.again(job).retries_left) == (0, 0)


def test_without_retries_a_killed_horse_fails_its_job_and_a_requeue_runs_it(desk: Desk, start_rq: StartRq) -> None:
    after = desk.gates.close("after ORD-1")
    node = start_rq()
    job = desk.queue.enqueue(shop.charge, "ORD-1")
    node.kill_horse(after.reached()[0])
    after.open()
    desk.wait_for(job, "failed")
    desk.lapse()
    desk.again(job).requeue()
    # The effect and the record of it cannot be one step: this run is what the fence is for.
    assert desk.wait_for(job, "finished").return_value() == "ORD-1 charged 2"
    first, second = (entry.fields["fence"] for entry in desk.journal.entries("charged", "ORD-1"))
    assert first < second


# -- its worker is killed ----------------------------------------------------------------------------------------------


def test_an_orphan_keeps_its_lease_and_settles_and_the_retry_replays(desk: Desk, start_rq: StartRq) -> None:
    after = desk.gates.close("after ORD-1")
    killed = start_rq(env={"LEASE_TTL": "1.5"})  # it would be over long before the orphan is
    job = desk.queue.enqueue(shop.charge, "ORD-1", retry=Retry(max=1))
    [orphan] = after.reached()
    killed.kill()
    held = desk.record()
    desk.clean_up()
    assert desk.status(job) == "queued"
    node = start_rq()
    desk.conflict()
    wait_until(lambda: desk.record().held_for > 2, message="the orphan to have renewed its lease")
    assert (desk.record().owner, desk.record().state) == (held.owner, State.IN_PROGRESS)
    assert orphan in killed.members()
    after.open()
    wait_until(lambda: not killed.members(), message="the orphan to end")
    # The worker may have put the job back just as the orphan ended, and then runs it once more.
    wait_until(lambda: not desk.queue.count and desk.again(job).return_value() == "ORD-1 charged 1")
    node.stop()
    assert desk.wait_for(job, "finished").return_value() == "ORD-1 charged 1"
    assert (desk.record().fence, desk.effects("ORD-1")) == (held.fence, 1)


def test_an_orphan_keeps_its_lease_and_the_retry_is_put_off_where_a_scheduler_runs(
    desk: Desk, start_rq: StartRq
) -> None:
    after = desk.gates.close("after ORD-1")
    killed = start_rq()
    job = desk.queue.enqueue(shop.charge, "ORD-1", retry=Retry(max=1))
    after.reached()
    killed.kill()
    desk.clean_up()
    start_rq(scheduler=True)
    desk.wait_for(job, "scheduled")  # all of it: RQ says so after the job has said that it is put off
    assert desk.meta(job)["outcome"] == "deferred"
    after.open()
    assert desk.wait_for(job, "finished").return_value() == "ORD-1 charged 1"
    assert desk.effects("ORD-1") == 1


def test_a_job_whose_worker_and_horse_are_killed_as_they_put_it_off_is_not_lost(desk: Desk, start_rq: StartRq) -> None:
    release = desk.hold(CHARGE)
    job_class = f"{KilledAsItIsScheduled.__module__}.{KilledAsItIsScheduled.__qualname__}"
    with desk.scheduler() as scheduler:
        node = start_rq(options=("--job-class", job_class))
        job = desk.queue.enqueue(shop.charge, "ORD-1", retry=Retry(max=1))
        wait_until(lambda: not node.running or desk.scheduled(job), 30, "the job to be put off")
        desk.clean_up()
        release()
        desk.bring_back(scheduler)
    start_rq()
    assert desk.wait_for(job, "finished", 20).return_value() == "ORD-1 charged 1"


def test_a_job_whose_worker_and_horse_are_killed_as_they_schedule_its_retry_is_not_lost(
    desk: Desk, start_rq: StartRq
) -> None:
    job_class = f"{KilledAsItIsScheduled.__module__}.{KilledAsItIsScheduled.__qualname__}"
    with desk.scheduler() as scheduler:
        node = start_rq(options=("--job-class", job_class))
        job = desk.queue.enqueue(shop.charge, "ORD-1", ending="raise at first", retry=Retry(max=1, interval=60))
        wait_until(lambda: not node.running or desk.scheduled(job), 30, "the retry to be scheduled")
        desk.clean_up()
        desk.bring_back(scheduler)
    start_rq()
    assert desk.wait_for(job, "finished", 20).return_value() == "ORD-1 charged 2"


def test_after_worker_and_horse_were_killed_the_retry_waits_for_the_lease_and_runs(
    desk: Desk, start_rq: StartRq
) -> None:
    before = desk.gates.close("before ORD-1")
    node = start_rq()
    job = desk.queue.enqueue(shop.charge, "ORD-1", retry=Retry(max=1))
    before.reached()
    node.kill_all()
    before.open()
    desk.clean_up()
    assert desk.status(job) == "queued"
    start_rq()
    desk.conflict()
    desk.lapse()
    assert desk.wait_for(job, "finished").return_value() == "ORD-1 charged 1"


def test_an_abandoned_job_without_retries_fails_and_a_requeue_of_it_replays_what_its_orphan_settled(
    desk: Desk, start_rq: StartRq
) -> None:
    after = desk.gates.close("after ORD-1")
    node = start_rq()
    job = desk.queue.enqueue(shop.report, "ORD-1")
    after.reached()
    node.kill()
    desk.clean_up()
    assert desk.status(job) == "failed"
    after.open()
    wait_until(desk.settled, message="the orphan to settle")
    wait_until(lambda: not node.members(), message="the orphan to end")
    desk.queue.enqueue_job(desk.again(job)) if desk.status(job) == "finished" else desk.again(job).requeue()
    desk.burst()
    assert desk.again(job).return_value() == "ORD-1 charged 1"
    assert desk.effects("ORD-1") == 1


# -- a horse is frozen -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ["return", "raise at first", "retry 5 at first"])
def test_a_horse_that_wakes_after_its_lease_is_answered_with_what_was_settled_meanwhile(
    desk: Desk, start_rq: StartRq, ending: str
) -> None:
    after = desk.gates.close("after ORD-1")
    node = start_rq()
    job = desk.queue.enqueue(shop.charge, "ORD-1", ending=ending)
    [horse] = after.reached()
    node.pause(horse)
    after.open()
    desk.lapse()
    other = desk.run(shop.charge, "ORD-1")
    assert other.return_value() == "ORD-1 charged 2"
    settled = desk.record()
    node.resume(horse)
    assert desk.wait_for(job, "finished").return_value() == "ORD-1 charged 2"
    assert (desk.record().payload, desk.record().fence) == (settled.payload, settled.fence)
    assert desk.effects("ORD-1") == 2


def test_a_horse_that_wakes_after_its_lease_where_nobody_came_has_not_lost_it(desk: Desk, start_rq: StartRq) -> None:
    after = desk.gates.close("after ORD-1")
    node = start_rq()
    job = desk.queue.enqueue(shop.charge, "ORD-1")
    [horse] = after.reached()
    node.pause(horse)
    desk.lapse()
    after.open()
    node.resume(horse)
    assert desk.wait_for(job, "finished").return_value() == "ORD-1 charged 1"
    other = desk.queue.enqueue(shop.charge, "ORD-1")
    assert desk.wait_for(other, "finished").return_value() == "ORD-1 charged 1"


# -- it is told to stop ------------------------------------------------------------------------------------------------


def test_a_stopped_job_is_stopped_and_its_operation_is_free_after_its_lease(desk: Desk, start_rq: StartRq) -> None:
    after = desk.gates.close("after ORD-1")
    start_rq()
    options = {"retry": Retry(max=3), "on_stopped": Callback(shop.stopped)}
    job = desk.queue.enqueue(shop.charge, "ORD-1", **options)
    after.reached()
    send_stop_job_command(desk.connection, job.id)
    assert desk.wait_for(job, "stopped").retries_left == 3
    assert desk.journal.count("stopped", job.id) == 1
    after.open()
    desk.lapse()
    other = desk.queue.enqueue(shop.charge, "ORD-1")
    assert desk.wait_for(other, "finished").return_value() == "ORD-1 charged 2"


def test_a_warm_shutdown_lets_the_job_end(desk: Desk, start_rq: StartRq) -> None:
    after = desk.gates.close("after ORD-1")
    node = start_rq()
    job = desk.queue.enqueue(shop.charge, "ORD-1")
    after.reached()
    node.ask_to_stop()
    wait_until(lambda: desk.connection.hexists(f"rq:worker:{node.name}", "shutdown_requested_date"))
    after.open()
    assert node.wait() == 0
    assert desk.again(job).return_value() == "ORD-1 charged 1"
    assert desk.settled()


def test_a_job_that_is_told_of_an_imminent_shutdown_gives_its_lease_back(desk: Desk, start_rq: StartRq) -> None:
    after = desk.gates.close("after ORD-1")
    node = start_rq(worker="tests.support.rq.shop.HastyWorker")
    job = desk.queue.enqueue(shop.charge, "ORD-1")
    after.reached()
    node.stop()
    assert desk.error(job).startswith("rq.exceptions.ShutDownImminentException")
    assert (desk.record().state, desk.record().reason) == (State.RELEASED, "shutdown")


def test_a_cold_shutdown_kills_the_job_and_its_retry_waits_for_the_lease(desk: Desk, start_rq: StartRq) -> None:
    before = desk.gates.close("before ORD-1")
    node = start_rq()
    job = desk.queue.enqueue(shop.charge, "ORD-1", retry=Retry(max=1))
    before.reached()
    node.cut_off()
    before.open()
    assert desk.record().state is State.IN_PROGRESS
    desk.clean_up()
    desk.lapse()
    desk.burst()
    assert desk.again(job).return_value() == "ORD-1 charged 1"
