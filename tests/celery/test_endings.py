"""How a task can end by itself, on real workers: what is recorded, what is acked, what takes effect."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from celery import Celery, chain, chord

from celery_idempotent.stores import State
from tests.support.celery.aftermath import PARTING, Aftermath
from tests.support.celery.fixtures import StartWorker
from tests.support.celery.gates import Gates
from tests.support.celery.journal import Journal
from tests.support.waiting import wait_until

SHOP = "tests.support.celery.shop"


@pytest.fixture
def app(client_app: Callable[..., Celery], start_worker: StartWorker) -> Celery:
    start_worker(SHOP)
    return client_app(SHOP)


@pytest.mark.smoke
@pytest.mark.ending("returns")
def test_a_task_that_returns_is_done_and_its_duplicate_gets_the_same_result(
    parting: Celery, start_worker: StartWorker, aftermath: Aftermath
) -> None:
    start_worker(PARTING)
    for _ in range(2):
        result = parting.module.part.delay("ORD-1")
        aftermath.expect(result, "SUCCESS", State.COMPLETED)
        assert result.get() == "ORD-1 charged"


@pytest.mark.ending("raises")
def test_a_task_that_raises_frees_the_key_and_the_next_delivery_runs(
    parting: Celery, start_worker: StartWorker, aftermath: Aftermath
) -> None:
    start_worker(PARTING)
    for runs in (1, 2):
        result = parting.module.part.delay("ORD-1", "raise")
        aftermath.expect(result, "FAILURE", State.RELEASED, "failed", effects=runs)
    # A corrected call after a failure is legitimate: the arguments may differ.
    corrected = parting.module.part.delay("ORD-1", "return")
    aftermath.expect(corrected, "SUCCESS", State.COMPLETED, effects=3)


@pytest.mark.ending("raises what is remembered")
def test_a_remembered_failure_is_raised_again_and_nothing_runs(
    parting: Celery, start_worker: StartWorker, aftermath: Aftermath
) -> None:
    start_worker(PARTING)
    for _ in range(2):
        result = parting.module.part.delay("ORD-1", "decline")
        aftermath.expect(result, "FAILURE", State.FAILED)
        assert type(result.result).__name__ == "Declined"


@pytest.mark.ending("retries")
def test_a_retry_keeps_the_key_for_its_message_until_it_is_due(
    parting: Celery, start_worker: StartWorker, aftermath: Aftermath
) -> None:
    start_worker(PARTING)
    result = parting.module.part.delay("ORD-1", "retry")
    aftermath.expect(result, "RETRY", State.RELEASED, "retry", attempt=1, messages=1)
    aftermath.expect(result, "SUCCESS", State.COMPLETED, effects=2)


@pytest.mark.smoke
@pytest.mark.ending("retries")
@pytest.mark.parametrize("task", ["flaky", "shaky"])
def test_all_attempts_of_a_retried_task_run_and_the_last_one_settles(app: Celery, journal: Journal, task: str) -> None:
    for _ in range(2):
        assert app.tasks[f"{SHOP}.{task}"].delay("ORD-1").get(timeout=20) == "ORD-1 after 2"
    assert [entry.fields["retries"] for entry in journal.entries("tried")] == [0, 1, 2]
    assert journal.count("charged") == 1


@pytest.mark.ending("retries are used up")
def test_retries_that_are_used_up_fail_and_free_the_key(
    parting: Celery, start_worker: StartWorker, aftermath: Aftermath
) -> None:
    start_worker(PARTING)
    result = parting.module.part.delay("ORD-1", "retry for ever")
    aftermath.expect(result, "FAILURE", State.RELEASED, "failed", effects=2)
    assert isinstance(result.result, ValueError)
    aftermath.expect(parting.module.part.delay("ORD-1"), "SUCCESS", State.COMPLETED, effects=3)


@pytest.mark.ending("retries and goes on (`throw=False`)")
@pytest.mark.parametrize("then", ["return", "raise"])
def test_a_task_that_goes_on_after_its_retry_was_published_has_given_the_operation_up_to_it(
    parting: Celery, start_worker: StartWorker, aftermath: Aftermath, gates: Gates, then: str
) -> None:
    node = start_worker(PARTING, concurrency=2)
    gate = gates.close("retried ORD-1")
    result = parting.module.part.delay("ORD-1", f"retry, and {then}")
    gate.reached()
    other = parting.module.part.delay("ORD-1", f"retry, and {then}")
    gate.open()
    aftermath.expect(result, "SUCCESS", State.COMPLETED, effects=2)
    aftermath.expect(other, "SUCCESS", State.COMPLETED, effects=2)
    assert result.get() == other.get() == "ORD-1 charged again"
    assert aftermath.journal.count("started") == 2
    assert ("ValueError: no ORD-1" in node.logs()) == (then == "raise")


def test_a_duplicate_waits_for_a_retry_that_is_due_later(app: Celery, journal: Journal, gates: Gates) -> None:
    gate = gates.close("before ORD-1")
    first = app.module.flaky.delay("ORD-1", failures=1, countdown=2)
    gate.reached()
    gate.open()
    wait_until(lambda: first.state == "RETRY")
    others = [app.module.flaky.delay("ORD-1", failures=1, countdown=2) for _ in range(5)]
    assert {other.get(timeout=30) for other in others} == {"ORD-1 after 1"}
    assert [entry.fields["retries"] for entry in journal.entries("tried")] == [0, 1]


@pytest.mark.ending("raises Ignore")
def test_a_task_that_ignores_itself_is_not_run_again_and_its_duplicate_does_not_hang(
    parting: Celery, start_worker: StartWorker, aftermath: Aftermath
) -> None:
    start_worker(PARTING)
    first = parting.module.part.delay("ORD-1", "ignore")
    aftermath.expect(first, "PENDING", State.COMPLETED)  # Celery stores nothing
    other = parting.module.part.delay("ORD-1", "ignore")
    aftermath.expect(other, "FAILURE", State.COMPLETED)
    assert type(other.result).__name__ == "ResultUnavailable"


@pytest.mark.ending("raises Reject")
def test_a_rejected_task_is_dropped_and_frees_the_key(
    parting: Celery, start_worker: StartWorker, aftermath: Aftermath
) -> None:
    start_worker(PARTING)
    # Celery stores FAILURE since 5.7, and nothing before.
    outcome = "FAILURE" if celery_stores_rejected(parting) else "PENDING"
    for runs in (1, 2):
        result = parting.module.part.delay("ORD-1", "reject")
        aftermath.expect(result, outcome, State.RELEASED, "rejected", effects=runs)


def celery_stores_rejected(app: Celery) -> bool:
    return hasattr(app.Task, "acks_on_timeout")


@pytest.mark.ending("raises Reject, to be requeued")
def test_a_task_rejected_into_its_queue_runs_again(
    parting: Celery, start_worker: StartWorker, aftermath: Aftermath, gates: Gates
) -> None:
    start_worker(PARTING, concurrency=1)
    first, busy = gates.close("before ORD-1"), gates.close("before ORD-2")
    result = parting.module.part.delay("ORD-1", "requeue at first")
    first.reached()
    parting.module.part.delay("ORD-2")
    first.open()
    busy.reached()  # what was put back is behind it
    aftermath.expect(result, "PENDING", State.RELEASED, "requeued", messages=2)
    busy.open()
    aftermath.expect(result, "SUCCESS", State.COMPLETED, effects=2)


@pytest.mark.ending("is replaced by another task")
def test_a_task_replaced_by_another_gives_its_duplicates_the_others_result(
    parting: Celery, start_worker: StartWorker, aftermath: Aftermath, journal: Journal
) -> None:
    start_worker(PARTING)
    for _ in range(2):
        result = parting.module.part.delay("ORD-1", "replace")
        aftermath.expect(result, "SUCCESS", State.COMPLETED)
        assert result.get() == "ORD-1 charged elsewhere"
    assert journal.count("charged elsewhere") == 1


@pytest.mark.ending("is replaced by itself")
def test_a_task_replaced_by_itself_runs_on_under_its_key(
    parting: Celery, start_worker: StartWorker, aftermath: Aftermath, journal: Journal
) -> None:
    start_worker(PARTING)
    for _ in range(2):
        result = parting.module.part.delay("ORD-1", "replace itself")
        aftermath.expect(result, "SUCCESS", State.COMPLETED, effects=2)
    assert [entry.fields["nesting"] for entry in journal.entries("started")] == [0, 1]


@pytest.mark.ending("is replaced by another task", "is replaced by itself")
def test_a_task_may_be_replaced_within_a_chain_and_within_a_chord(
    parting: Celery, start_worker: StartWorker, aftermath: Aftermath, journal: Journal
) -> None:
    start_worker(PARTING)
    part, collect = parting.module.part, parting.module.collect
    endings = {"ORD-1": "replace", "ORD-2": "replace itself"}
    chained = {order: chain(part.si(order, how), collect.s(order)).apply_async() for order, how in endings.items()}
    for order, value in {"ORD-1": "ORD-1 charged elsewhere", "ORD-2": "ORD-2 charged again"}.items():
        assert chained[order].get(timeout=20) == value
        effects = 1 if order == "ORD-1" else 2
        aftermath.expect(chained[order].parent, "SUCCESS", State.COMPLETED, order=order, effects=effects)
    endings = {"ORD-3": "replace", "ORD-4": "replace itself", "ORD-5": "return"}
    joined = chord([part.si(order, how) for order, how in endings.items()], collect.s("all")).apply_async()
    assert joined.get(timeout=20) == ["ORD-3 charged elsewhere", "ORD-4 charged again", "ORD-5 charged"]
    aftermath.expect(joined, "SUCCESS", State.COMPLETED, order="ORD-4", effects=2)
    assert sorted(entry.key for entry in journal.entries("collected")) == ["ORD-1", "ORD-2", "all"]


@pytest.mark.ending("raises SystemExit or KeyboardInterrupt")
def test_a_body_that_exits_is_run_again_as_a_lost_child_is_and_not_for_ever(
    parting: Celery, start_worker: StartWorker, aftermath: Aftermath
) -> None:
    start_worker(PARTING, env={"MAX_CRASHES": "2"})
    results = {"ORD-1": parting.module.part.delay("ORD-1", "exit")}
    results["ORD-2"] = parting.module.part.delay("ORD-2", "interrupt")
    for order, result in results.items():
        aftermath.expect(result, "FAILURE", State.RELEASED, "crash_loop", order=order, crashes=2, effects=2)
        assert type(result.result).__name__ == "CrashLoop"


@pytest.mark.ending("raises another BaseException")
def test_an_exception_that_is_no_exception_fails_the_task_and_frees_the_key(
    parting: Celery, start_worker: StartWorker, aftermath: Aftermath
) -> None:
    start_worker(PARTING)
    for runs in (1, 2):
        result = parting.module.part.delay("ORD-1", "abandon")
        aftermath.expect(result, "FAILURE", State.RELEASED, "failed", effects=runs)


def test_derived_keys_are_equal_on_every_run_and_fences_rise(app: Celery, journal: Journal) -> None:
    app.module.endings.delay("ORD-1", "requeue").get(timeout=20)
    first, second = (entry.fields for entry in journal.entries("tried"))
    assert first["derived"] == second["derived"]
    assert first["fence"] < second["fence"]


def test_an_expired_copy_is_not_run(app: Celery, journal: Journal, gates: Gates) -> None:
    gate = gates.close("before ORD-1")
    first = app.module.failing.delay("ORD-1", fail=False)
    gate.reached()
    duplicate = app.module.failing.apply_async(("ORD-1", False), expires=1)
    wait_until(lambda: duplicate.state == "REVOKED", 30, lambda: f"the duplicate to expire, it is {duplicate.state}")
    gate.open()
    assert first.get(timeout=20) == "done ORD-1"
    assert journal.count("tried") == 1


@pytest.mark.ending("eager apply()")
def test_a_call_of_apply_is_guarded_like_a_delivery(
    parting: Celery, aftermath: Aftermath, worker_env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    in_place(worker_env, monkeypatch)
    results = [parting.module.part.apply(("ORD-1",)) for _ in range(2)]
    assert [result.get() for result in results] == ["ORD-1 charged"] * 2
    aftermath.expect(results[0], "SUCCESS", State.COMPLETED)
    failed = parting.module.part.apply(("ORD-2", "raise"))
    aftermath.expect(failed, "FAILURE", State.RELEASED, "failed", order="ORD-2")


@pytest.mark.ending("direct call")
def test_a_direct_call_leaves_no_record(
    parting: Celery, aftermath: Aftermath, worker_env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    in_place(worker_env, monkeypatch)
    for runs in (1, 2):
        assert parting.module.other("ORD-1") == "ORD-1 charged elsewhere"
        assert aftermath.journal.count("charged elsewhere") == runs
    assert list(aftermath.store.scan()) == []


def in_place(worker_env: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let bodies run in this process, with the environment that workers have."""
    for name, value in worker_env.items():
        monkeypatch.setenv(name, value)
