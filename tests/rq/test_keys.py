"""Which jobs are the same operation."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import pytest
from rq import Callback, Repeat, Retry

from celery_idempotent import ConfigurationError
from celery_idempotent.rq import idempotent
from tests.support.rq import shop
from tests.support.rq.desk import Desk
from tests.support.unit import compared

# -- without a key -----------------------------------------------------------------------------------------------------


@pytest.mark.smoke
def test_each_enqueuing_is_an_operation_of_its_own_without_a_key(desk: Desk) -> None:
    for _ in range(2):
        desk.run(shop.report, "monday")
    assert desk.effects("monday") == 2
    assert all(record.key.startswith("idem:tests.support.rq.shop.report:") for record in desk.records())


def test_each_occurrence_of_a_repeat_is_an_operation_of_its_own(desk: Desk) -> None:
    job = desk.run(shop.report, "monday", repeat=Repeat(times=2))
    assert desk.effects("monday") == 3
    assert [result.return_value for result in job.results()][::-1] == [f"monday charged {n}" for n in (1, 2, 3)]


def test_a_job_that_rq_scheduler_enqueues_again_needs_a_key(desk: Desk) -> None:
    """It has the same id, and the same creation, at each occurrence."""
    jobs = []
    for function, order in ((shop.report, "monday"), (shop.charge, "ORD-1")):
        jobs.append(desk.queue.enqueue(function, order, meta={"interval": 60}))
        desk.connection.zadd("rq:scheduler:scheduled_jobs", {jobs[-1].id: 1})
    jobs.append(desk.queue.enqueue(shop.report, "tuesday", meta={"interval": 60}))  # of somebody's own
    desk.burst()
    assert [desk.again(job).get_status() for job in jobs] == ["failed", "finished", "finished"]
    assert "rq-scheduler enqueues one job again and again" in desk.error(jobs[0])
    assert desk.effects("monday") == 0


class Unknown:
    """Is a class that its worker cannot import."""


def test_a_job_whose_meta_cannot_be_read_is_not_taken_for_one_without_a_key(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    meta = {"idempotency_key": "req-1", "trace": Unknown()}
    jobs = [desk.queue.enqueue(function, "A", meta=meta) for function in (shop.report, shop.charge)]
    monkeypatch.delattr(f"{__name__}.Unknown")
    desk.burst()
    assert "can read, since tests.support.rq.shop.report has no key of its arguments" in desk.error(jobs[0])
    assert desk.effects("A") == 1, "the key of the other one is known"


def test_an_occurrence_that_fails_is_tried_again_as_itself(desk: Desk) -> None:
    desk.run(shop.report, "monday", "raise at first", repeat=Repeat(times=1), retry=Retry(max=1))
    assert desk.effects("monday") == 3  # twice the first, and once the second
    assert len(desk.records()) == 2


def test_a_job_id_that_is_used_again_is_a_new_operation(desk: Desk) -> None:
    for _ in range(2):
        desk.run(shop.report, "monday", job_id="nightly")
    assert desk.effects("monday") == 2


def test_a_job_id_that_is_used_again_is_the_same_operation_where_the_key_is(desk: Desk) -> None:
    jobs = [desk.run(shop.charge, "ORD-1", job_id="nightly") for _ in range(2)]
    assert jobs[1].return_value() == "ORD-1 charged 1"
    assert desk.effects("ORD-1") == 1


def test_a_slip_for_the_key_of_a_job_is_reported(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    slips = {"idempotence_key": "x", "Idempotency_Key": "x", "idempotency": "x"}
    desk.run(shop.charge, "ORD-1", meta={**slips, "tenant": "acme"})
    desk.run(shop.charge, "ORD-2", meta={"idempotency_key": "x"})
    desk.run(shop.charge, "ORD-3", meta={"idempotency": {"outcome": "ran"}})  # as of a job that comes again
    errors = [message.partition(": ")[2] for message in caplog.messages if "nothing reads" in message]
    assert errors == [f"nothing reads meta={slip!r}. Did you mean 'idempotency_key'?" for slip in slips]


def test_a_key_among_the_arguments_of_a_job_is_refused_with_where_it_belongs(desk: Desk) -> None:
    job = desk.run(shop.charge, "ORD-1", idempotency_key="x")
    assert job.is_failed
    assert 'Write meta={"idempotency_key": ...}' in str(job.latest_result().exc_string)
    assert desk.effects("ORD-1") == 0


@pytest.mark.smoke
def test_a_failed_job_that_is_requeued_is_the_same_operation(desk: Desk) -> None:
    job = desk.run(shop.report, "monday", "raise at first")
    assert job.get_status() == "failed"
    job.requeue()
    desk.burst()
    assert desk.again(job).return_value() == "monday charged 2"
    assert len(desk.records()) == 1


def test_a_job_that_had_succeeded_when_it_is_run_again_is_replayed(desk: Desk) -> None:
    job = desk.run(shop.report, "monday", on_success=Callback(shop.broken))
    assert job.get_status() == "failed"
    job.requeue()
    desk.burst()
    assert desk.effects("monday") == 1
    assert desk.journal.count("called back") == 2


def test_a_finished_job_that_is_enqueued_again_as_it_is_is_replayed(desk: Desk) -> None:
    job = desk.run(shop.report, "monday")
    desk.queue.enqueue_job(job)
    desk.burst()
    again = desk.again(job)
    # RQ gives it a new creation time; where it does not, it is the same operation.
    assert desk.effects("monday") == (1 if again.created_at == job.created_at else 2)


# -- with one ----------------------------------------------------------------------------------------------------------


def test_a_callable_makes_the_key_of_the_arguments_that_it_names(desk: Desk) -> None:
    jobs = [desk.queue.enqueue(shop.ship, "ORD-1", item, note="") for item in (1, 2, 1)]
    desk.burst()
    assert [desk.again(job).return_value() for job in jobs] == [
        "ORD-1-1 shipped 1",
        "ORD-1-2 shipped 1",
        "ORD-1-1 shipped 1",
    ]


def test_several_names_are_one_key_and_positions_keywords_and_defaults_spell_the_same(desk: Desk) -> None:
    calls: list[tuple[Any, dict[str, Any]]] = [
        (("ORD-1", 1), {}),
        (("ORD-1",), {"item": 1}),
        ((), {"order": "ORD-1", "item": 1, "note": ""}),
    ]
    jobs = [desk.queue.enqueue_call(shop.pack, args, kwargs) for args, kwargs in calls]
    desk.burst()
    assert [desk.again(job).return_value() for job in jobs] == ["ORD-1-1 packed 1"] * 3


@pytest.mark.smoke
def test_the_producer_gives_a_key_in_the_job_s_meta(desk: Desk) -> None:
    jobs = [desk.queue.enqueue(shop.report, "monday", meta={"idempotency_key": key}) for key in ("a", "b", "a")]
    desk.burst()
    assert [desk.again(job).return_value() for job in jobs] == [
        "monday charged 1",
        "monday charged 2",
        "monday charged 1",
    ]


def test_the_producer_s_key_is_stronger_than_the_function_s(desk: Desk) -> None:
    jobs = [desk.run(shop.keyed_elsewhere, "ORD-1", meta={"idempotency_key": key}) for key in ("a", "b")]
    assert [job.return_value() for job in jobs] == [
        f"idem:tests.support.rq.shop.keyed_elsewhere::{key}" for key in ("a", "b")
    ]


def test_names_of_arguments_that_a_decorator_hides_are_refused_when_the_job_is_declared() -> None:
    def charge(session: str, order: str) -> None: ...

    @functools.wraps(charge)
    def with_session(*args: Any, **kwargs: Any) -> None:
        charge("session", *args, **kwargs)

    with pytest.raises(ConfigurationError, match="a decorator hides"):
        idempotent(key="order", fingerprint=False)(with_session)
    assert list(inspect.signature(idempotent()(with_session)).parameters) == ["args", "kwargs"]


def test_an_argument_that_pickle_alone_can_carry_is_compared_by_value(desk: Desk) -> None:
    jobs = [desk.run(shop.answer, "ORD-1", compared.Order("A", cents)) for cents in (1, 1, 99999)]
    assert [desk.status(job) for job in jobs] == ["finished", "finished", "failed"]
    assert "KeyReused" in desk.error(jobs[2])


@pytest.mark.parametrize(
    ("function", "args", "meta"),
    [
        (shop.charge, ("",), None),
        (shop.charge, (None,), None),
        (shop.report, ("monday",), {"idempotency_key": ""}),
        (shop.charge_tenant, ("ORD-1",), None),
        (shop.charge_tenant, ("ORD-1",), {"tenant": ""}),
    ],
    ids=["an empty argument", "None", "an empty entry", "no scope", "an empty scope"],
)
def test_a_job_without_the_key_that_it_must_have_fails_before_it_runs_and_for_good(
    desk: Desk, function: Any, args: Any, meta: Any
) -> None:
    job = desk.run(function, *args, meta=meta, retry=Retry(max=3))
    assert job.get_status() == "failed"
    assert "MissingKey" in desk.error(job)
    assert job.retries_left == 3
    assert desk.meta(job) == {"outcome": "refused", "error": "MissingKey"}
    assert desk.journal.count() == 0
    assert desk.records() == []


def test_the_scope_is_an_entry_of_the_job_s_meta(desk: Desk) -> None:
    jobs = [desk.run(shop.charge_tenant, "ORD-1", meta={"tenant": tenant}) for tenant in ("a", "b", "a")]
    assert [job.return_value() for job in jobs] == ["ORD-1 charged 1", "ORD-1 charged 2", "ORD-1 charged 1"]


def test_a_missing_scope_says_where_to_put_it(desk: Desk) -> None:
    assert "meta" in desk.error(desk.run(shop.charge_tenant, "ORD-1"))


# -- the same key with other arguments ---------------------------------------------------------------------------------


@pytest.mark.smoke
def test_a_key_that_is_used_again_for_other_arguments_fails_the_job_at_once_and_keeps_its_retries(desk: Desk) -> None:
    desk.run(shop.answer, "ORD-1", 1)
    other = desk.run(shop.answer, "ORD-1", 2, retry=Retry(max=3))
    assert other.get_status() == "failed"
    assert "KeyReused" in desk.error(other)
    assert other.retries_left == 3
    assert desk.meta(other) == {
        "outcome": "refused",
        "error": "KeyReused",
        "key": "idem:tests.support.rq.shop.answer::ORD-1",
    }
    assert desk.effects("ORD-1") == 1


def test_arguments_that_the_fingerprint_leaves_out_may_differ(desk: Desk) -> None:
    jobs = [desk.run(shop.charge, "ORD-1", cents) for cents in (1, 2)]
    assert [job.return_value() for job in jobs] == ["ORD-1 charged 1"] * 2


def test_arguments_that_do_not_fit_the_function_fail_as_python_says(desk: Desk) -> None:
    job = desk.run(shop.charge)
    assert job.get_status() == "failed"
    error = desk.error(job)
    assert error.startswith("TypeError: Expected arguments of tests.support.rq.shop.charge(order")
    assert error.endswith("which these do not fit: missing a required argument: 'order'")
