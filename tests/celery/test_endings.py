"""How a task can end, on real workers: what is recorded, what is acked, what runs again."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from celery import Celery

from celery_idempotent.records import State
from celery_idempotent.stores.redis import RedisStore
from tests.celery.fixtures import StartWorker
from tests.celery.gates import Gates
from tests.celery.journal import Journal
from tests.waiting import wait_until

SHOP = "tests.celery.shop"


@pytest.fixture
def app(client_app: Callable[..., Celery], start_worker: StartWorker) -> Celery:
    start_worker(SHOP)
    return client_app(SHOP)


@pytest.fixture
def state_of(store_url: str) -> Callable[[str, str], State | None]:
    store = RedisStore.from_url(store_url)

    def state_of(task: str, operation: str) -> State | None:
        record = store.get(f"idem:{SHOP}.{task}::{operation}")
        return record.state if record else None

    return state_of


@pytest.mark.smoke
@pytest.mark.parametrize("task", ["flaky", "shaky"])
def test_all_attempts_of_a_retried_task_run_and_the_last_one_settles(
    app: Celery, journal: Journal, state_of: Callable[[str, str], State | None], task: str
) -> None:
    result = app.tasks[f"{SHOP}.{task}"].delay("ORD-1")
    assert result.get(timeout=20) == "ORD-1 after 2"
    assert [entry.fields["retries"] for entry in journal.entries("tried")] == [0, 1, 2]
    assert state_of(task, "ORD-1") is State.COMPLETED
    assert app.tasks[f"{SHOP}.{task}"].delay("ORD-1").get(timeout=20) == "ORD-1 after 2"
    assert journal.count("charged") == 1


def test_retries_that_are_used_up_fail_and_free_the_key(
    app: Celery, journal: Journal, state_of: Callable[[str, str], State | None]
) -> None:
    with pytest.raises(OSError, match="not yet"):
        app.module.shaky.delay("ORD-1", failures=9).get(timeout=20)
    assert journal.count("tried") == 4
    assert state_of("shaky", "ORD-1") is State.RELEASED
    assert app.module.shaky.delay("ORD-1", failures=0).get(timeout=20) == "ORD-1 after 0"


def test_a_duplicate_waits_for_a_retry_that_is_due_later(app: Celery, journal: Journal, gates: Gates) -> None:
    gate = gates.close("before ORD-1")
    first = app.module.flaky.delay("ORD-1", failures=1, countdown=2)
    gate.reached()
    gate.open()
    wait_until(lambda: first.state == "RETRY")
    others = [app.module.flaky.delay("ORD-1", failures=1, countdown=2) for _ in range(5)]
    assert {other.get(timeout=30) for other in others} == {"ORD-1 after 1"}
    assert [entry.fields["retries"] for entry in journal.entries("tried")] == [0, 1]


def test_a_task_that_ignores_itself_is_not_run_again_and_its_duplicate_does_not_hang(
    app: Celery, journal: Journal, state_of: Callable[[str, str], State | None]
) -> None:
    app.module.endings.delay("ORD-1", "ignore")
    wait_until(lambda: state_of("endings", "ORD-1") is State.COMPLETED)
    with pytest.raises(Exception, match="without a result of its own") as caught:
        app.module.endings.delay("ORD-1", "ignore").get(timeout=20)
    assert type(caught.value).__name__ == "ResultUnavailable"
    assert journal.count("tried") == 1


def test_a_rejected_task_frees_the_key(
    app: Celery, journal: Journal, state_of: Callable[[str, str], State | None]
) -> None:
    app.module.endings.delay("ORD-1", "reject")
    wait_until(lambda: state_of("endings", "ORD-1") is State.RELEASED)
    app.module.endings.delay("ORD-1", "reject")
    journal.wait_for_count(2, "tried")


def test_a_task_rejected_into_its_queue_runs_again(app: Celery, journal: Journal) -> None:
    assert app.module.endings.delay("ORD-1", "requeue").get(timeout=20) == "ORD-1 done"
    assert journal.count("tried") == 2


def test_a_task_replaced_by_another_gives_its_duplicates_the_others_result(app: Celery, journal: Journal) -> None:
    value = {"order": "ORD-1", "cents": 999}
    assert app.module.endings.delay("ORD-1", "replace").get(timeout=20) == value
    assert app.module.endings.delay("ORD-1", "replace").get(timeout=20) == value
    assert (journal.count("tried"), journal.count("charged")) == (1, 1)


def test_a_task_replaced_by_itself_runs_on_under_its_key(
    app: Celery, journal: Journal, state_of: Callable[[str, str], State | None]
) -> None:
    assert app.module.endings.delay("ORD-1", "replace itself").get(timeout=20) == "ORD-1 done"
    assert journal.count("tried") == 2
    assert state_of("endings", "ORD-1") is State.COMPLETED


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
