"""What RQ does around a job is as it was: for jobs that ran, and for those that were answered without a run."""

from __future__ import annotations

import os
import re
import sys
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
from rq import Callback, Queue, Retry
from rq.cron import CronJob
from rq.job import Dependency
from rq.registry import FailedJobRegistry, FinishedJobRegistry, StartedJobRegistry

from celery_idempotent import events
from celery_idempotent.rq.job import id_of
from tests.support import processes
from tests.support.rq import shop
from tests.support.rq.desk import Desk, hearing
from tests.support.rq.nodes import ROOT
from tests.support.waiting import wait_until

# -- dependencies ------------------------------------------------------------------------------------------------------


@pytest.mark.smoke
def test_what_depends_on_a_replayed_job_runs_and_reads_its_result(desk: Desk) -> None:
    desk.run(shop.charge, "ORD-1")
    replayed = desk.queue.enqueue(shop.charge, "ORD-1")
    follower = desk.queue.enqueue(shop.follow, "next", depends_on=replayed)
    desk.burst()
    assert desk.again(follower).return_value() == ["ORD-1 charged 1"]
    assert desk.effects("ORD-1") == 1


def test_a_chain_of_guarded_jobs_runs_in_its_order_and_once(desk: Desk) -> None:
    for _ in range(2):
        job: Any = None
        for order in ("ORD-1", "ORD-2", "ORD-3"):
            job = desk.queue.enqueue(shop.charge, order, depends_on=job)
        last = desk.queue.enqueue(shop.follow, "end", depends_on=[job])
        desk.burst()
        assert desk.again(last).return_value() == ["ORD-3 charged 1"]
    assert [entry.key for entry in desk.journal.entries("charged")] == ["ORD-1", "ORD-2", "ORD-3"]


def test_what_depends_on_a_job_that_was_put_off_waits_for_it(desk: Desk) -> None:
    release = desk.hold("idem:tests.support.rq.shop.charge::ORD-1")
    with desk.scheduler() as scheduler:
        job = desk.queue.enqueue(shop.charge, "ORD-1")
        follower = desk.queue.enqueue(shop.follow, "next", depends_on=job)
        desk.burst()
        assert desk.status(follower) == "deferred"
        release()
        desk.bring_back(scheduler)
        desk.burst()
    assert desk.again(follower).return_value() == ["ORD-1 charged 1"]


@pytest.mark.parametrize("allowed", [True, False], ids=["allowed", "not allowed"])
def test_what_depends_on_a_remembered_failure_runs_only_where_failures_are_allowed(desk: Desk, allowed: bool) -> None:
    desk.run(shop.charge, "ORD-1", ending="decline")
    job = desk.queue.enqueue(shop.charge, "ORD-1")
    follower = desk.queue.enqueue(shop.follow, "next", depends_on=Dependency(jobs=[job], allow_failure=allowed))
    desk.burst()
    assert desk.status(job) == "failed"
    assert desk.status(follower) == ("finished" if allowed else "deferred")
    assert desk.effects("ORD-1") == 1


def test_what_depends_on_a_job_that_is_retried_runs_after_it(desk: Desk) -> None:
    job = desk.queue.enqueue(shop.charge, "ORD-1", ending="raise at first", retry=Retry(max=1))
    follower = desk.queue.enqueue(shop.follow, "next", depends_on=job)
    desk.burst()
    assert desk.again(follower).return_value() == ["ORD-1 charged 2"]
    assert desk.journal.count("followed") == 1


# -- callbacks ---------------------------------------------------------------------------------------------------------

CALLBACKS: Any = {"on_success": Callback(shop.succeeded), "on_failure": Callback(shop.failed)}


@pytest.mark.smoke
def test_a_replay_calls_back_with_the_result(desk: Desk) -> None:
    jobs = [desk.run(shop.charge, "ORD-1", **CALLBACKS) for _ in range(2)]
    called = [(entry.key, entry.fields["result"]) for entry in desk.journal.entries("succeeded")]
    assert called == [(job.id, "ORD-1 charged 1") for job in jobs]
    assert desk.journal.count("failed") == 0


def test_a_failure_calls_back_with_the_body_s_error(desk: Desk) -> None:
    job = desk.run(shop.charge, "ORD-1", ending="raise", **CALLBACKS)
    assert [(entry.key, entry.fields["error"]) for entry in desk.journal.entries("failed")] == [(job.id, "ValueError")]


def test_a_remembered_failure_calls_back_as_the_first_did(desk: Desk) -> None:
    jobs = [desk.run(shop.charge, "ORD-1", ending="decline", **CALLBACKS) for _ in range(2)]
    called = [(entry.key, entry.fields["error"]) for entry in desk.journal.entries("failed")]
    assert called == [(job.id, "Declined") for job in jobs]


def test_a_job_that_was_put_off_calls_nobody_back_until_it_is_answered(desk: Desk) -> None:
    release = desk.hold("idem:tests.support.rq.shop.charge::ORD-1")
    with desk.scheduler() as scheduler:
        job = desk.run(shop.charge, "ORD-1", **CALLBACKS)
        assert desk.journal.count() == 0
        release()
        desk.bring_back(scheduler)
        desk.burst()
    assert [entry.key for entry in desk.journal.entries("succeeded")] == [job.id]
    assert desk.journal.count("failed") == 0


# -- results -----------------------------------------------------------------------------------------------------------


@pytest.mark.smoke
def test_a_replay_has_results_as_any_job(desk: Desk) -> None:
    jobs = [desk.run(shop.charge, "ORD-1") for _ in range(2)]
    for job in jobs:
        latest = job.latest_result()
        assert latest is not None
        assert latest.type is latest.Type.SUCCESSFUL
        assert [result.return_value for result in job.results()] == ["ORD-1 charged 1"]
    assert set(FinishedJobRegistry(queue=desk.queue).get_job_ids()) == {job.id for job in jobs}
    assert StartedJobRegistry(queue=desk.queue).get_job_ids() == []


def test_a_job_that_was_put_off_has_one_result_in_the_end(desk: Desk) -> None:
    release = desk.hold("idem:tests.support.rq.shop.charge::ORD-1")
    with desk.scheduler() as scheduler:
        job = desk.run(shop.charge, "ORD-1")
        assert job.return_value() is None
        release()
        desk.bring_back(scheduler)
        desk.burst()
    job = desk.again(job)
    assert job.return_value() == "ORD-1 charged 1"
    assert [result.return_value for result in job.results() if result.type is result.Type.SUCCESSFUL] == [
        "ORD-1 charged 1"
    ]
    assert len(FailedJobRegistry(queue=desk.queue)) == 0


@pytest.mark.parametrize("function", [shop.charge, shop.forget], ids=["a result", "no result"])
def test_jobs_that_are_not_kept_leave_nothing_behind(desk: Desk, function: Any) -> None:
    for _ in range(2):
        desk.queue.enqueue(function, "ORD-1", result_ttl=0)
        desk.burst()
    assert desk.effects("ORD-1") == 1
    left = [key for key in desk.connection.keys("rq:job*") if desk.connection.ttl(key) == -1]
    assert left == []
    assert desk.connection.keys("rq:results*") == []


def test_a_job_whose_result_is_kept_for_ever_is(desk: Desk) -> None:
    job = desk.run(shop.charge, "ORD-1", result_ttl=-1)
    assert desk.connection.ttl(job.key) == -1


def test_an_id_that_the_user_gave_is_kept(desk: Desk) -> None:
    job = desk.run(shop.charge, "ORD-1", job_id="my-id")
    assert (job.id, id_of(desk.record().task_id)) == ("my-id", "my-id")


# -- limits and retries ------------------------------------------------------------------------------------------------


def test_a_lease_is_not_renewed_long_after_the_job_s_time_is_up(desk: Desk) -> None:
    with hearing(events.Acquired):
        job = desk.run(shop.limits, "ORD-1", job_timeout=30)
        unlimited = desk.run(shop.limits, "ORD-2", job_timeout=-1)
    assert 30 < job.return_value() < 300
    assert unlimited.return_value() == float("inf")


def test_retries_with_intervals_are_scheduled_one_after_the_other(desk: Desk) -> None:
    with desk.scheduler() as scheduler:
        job = desk.run(shop.charge, "ORD-1", ending="raise", retry=Retry(max=2, interval=[50, 100]))
        first = desk.record().remaining
        desk.bring_back(scheduler)
        desk.burst()
        second = desk.record().remaining
        desk.bring_back(scheduler)
        desk.burst()
    assert 40 < first <= 50
    assert 90 < second <= 100
    assert (desk.again(job).get_status(), desk.effects("ORD-1")) == ("failed", 3)


def test_a_cancelled_job_claims_nothing(desk: Desk) -> None:
    job = desk.queue.enqueue(shop.charge, "ORD-1")
    job.cancel()
    desk.burst()
    assert desk.records() == []


# -- meta --------------------------------------------------------------------------------------------------------------


@pytest.mark.smoke
def test_the_outcome_of_a_run_is_in_the_job_s_meta(desk: Desk) -> None:
    job = desk.run(shop.charge, "ORD-1", meta={"mine": [1]})
    key = "idem:tests.support.rq.shop.charge::ORD-1"
    assert job.meta == {"mine": [1], "idempotency": {"outcome": "ran", "key": key, "fence": desk.fence("ORD-1")}}


def test_the_outcome_of_a_replay_says_which_job_ran(desk: Desk) -> None:
    first, second = (desk.run(shop.charge, "ORD-1") for _ in range(2))
    said = desk.meta(second)
    assert (said["outcome"], said["original"], said["fence"]) == ("replayed", first.id, desk.fence("ORD-1"))


def test_a_replay_of_the_job_itself_names_no_other(desk: Desk) -> None:
    job = desk.run(shop.charge, "ORD-1", on_success=Callback(shop.broken_at_first), retry=Retry(max=1))
    assert desk.meta(job)["outcome"] == "replayed"
    assert "original" not in desk.meta(job)


def test_the_outcome_of_a_job_that_was_put_off_says_how_often(desk: Desk) -> None:
    release = desk.hold("idem:tests.support.rq.shop.charge::ORD-1")
    with desk.scheduler() as scheduler:
        job = desk.run(shop.charge, "ORD-1")
        assert (desk.meta(job)["outcome"], desk.meta(job)["deferrals"]) == ("deferred", 1)
        release()
        desk.bring_back(scheduler)
        desk.burst()
    assert (desk.meta(job)["outcome"], desk.meta(job)["deferrals"]) == ("ran", 1)


def test_a_body_that_writes_the_job_s_meta_finds_the_outcome_and_both_stay(desk: Desk) -> None:
    job = desk.run(shop.annotate, "ORD-1")
    assert job.return_value()["outcome"] == "ran"
    assert job.meta["progress"] == 1
    assert desk.meta(job)["outcome"] == "ran"


def test_what_others_wrote_to_the_meta_while_the_job_waited_stays(desk: Desk) -> None:
    release = desk.hold("idem:tests.support.rq.shop.charge::ORD-1")

    def write(event: events.Event) -> None:
        other = desk.again(job)
        other.meta["please"] = "stop"
        other.save_meta()
        release()

    job = desk.queue.enqueue(shop.charge, "ORD-1", meta={"mine": 1})
    with hearing(events.Conflicted, then=write):
        desk.burst()
    job = desk.again(job)
    assert (job.get_status(), job.meta["mine"], job.meta["please"]) == ("finished", 1, "stop")
    assert desk.meta(job)["outcome"] == "ran"


def test_a_meta_entry_of_the_user_s_own_under_our_name_is_replaced_and_harms_nothing(desk: Desk) -> None:
    for order, mine in (("ORD-1", "mine"), ("ORD-2", {"deferrals": "mine"})):
        job = desk.run(shop.charge, order, meta={"idempotency": mine})
        assert desk.meta(job)["outcome"] == "ran"


def test_a_meta_that_cannot_be_read_is_left_as_it_is_and_the_job_runs(desk: Desk) -> None:
    job = desk.queue.enqueue(shop.charge, "ORD-1")
    unreadable = b"\x80\x04cof_another_release\nMeta\n."
    desk.connection.hset(job.key, "meta", unreadable)
    desk.burst()
    assert desk.effects("ORD-1") == 1
    assert desk.connection.hget(job.key, "meta") == unreadable


def test_a_job_that_runs_where_it_is_enqueued_says_its_outcome_too(desk: Desk) -> None:
    queue = Queue(is_async=False, connection=desk.connection)
    job = queue.enqueue(shop.charge, "ORD-1")
    assert desk.meta(job)["outcome"] == "ran"


# -- cron --------------------------------------------------------------------------------------------------------------


@pytest.mark.nightly
def test_what_two_cron_schedulers_enqueue_twice_runs_once_with_a_key_that_names_the_occurrence(
    desk: Desk, tmp_path: Path
) -> None:
    config = tmp_path / "crontab.py"
    config.write_text(
        "from rq import cron\n"
        "from tests.support.rq import shop\n"
        'cron.register(shop.charge, queue_name="default", args=("today",), interval=1)\n'
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))}
    command = [sys.executable, "-m", "rq.cli", "cron", "--url", desk.url, str(config)]
    with (tmp_path / "cron.log").open("ab") as log:
        crons = [processes.spawn(command, env=env, stdout=log, stderr=log) for _ in range(2)]
    try:
        wait_until(lambda: len(desk.queue) >= 5, 60, lambda: (tmp_path / "cron.log").read_text())
    finally:
        for cron in crons:
            processes.end(cron)
    jobs = desk.queue.get_jobs()
    desk.burst()
    assert {desk.again(job).return_value() for job in jobs} == {"today charged 1"}
    assert desk.effects("today") == 1


@pytest.mark.skipif(not hasattr(CronJob, "get_next_enqueue_time"), reason="this RQ tells no time in advance")
@pytest.mark.parametrize(
    ("zone", "before"),
    [("Europe/London", "2026-03-27"), ("Europe/Berlin", "2026-10-23"), ("America/New_York", "2026-03-06")],
)
def test_the_key_of_the_guide_s_nightly_job_is_another_one_each_night(
    zone: str, before: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    [form] = re.findall(r"created_at:(.*?)}", (ROOT / "docs" / "guides" / "rq.md").read_text())
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    try:
        for hour in range(24):
            job, keys = CronJob("default", func=shop.charge, cron=f"0 {hour} * * *"), []
            job.latest_enqueue_time = datetime.fromisoformat(before).replace(tzinfo=timezone.utc)
            for _ in range(4):
                job.latest_enqueue_time = job.get_next_enqueue_time()
                keys.append(f"{job.latest_enqueue_time:{form}}")
            assert len({*keys}) == 4, (hour, keys)
    finally:
        monkeypatch.undo()
        time.tzset()
