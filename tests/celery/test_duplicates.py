"""Duplicates of every kind, on real workers: one run, the same result for everybody."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import pytest
from celery import Celery, chord, group
from celery.result import result_from_tuple

from tests.support.celery.apps import load_app
from tests.support.celery.fixtures import StartWorker
from tests.support.celery.gates import Gates
from tests.support.celery.journal import Journal
from tests.support.celery.values import VALUES

SHOP = "tests.support.celery.shop"


@pytest.fixture
def app(client_app: Callable[..., Celery]) -> Celery:
    return client_app(SHOP)


@pytest.mark.smoke
def test_a_duplicate_after_success_gets_the_result_and_does_not_run(
    app: Celery, start_worker: StartWorker, journal: Journal
) -> None:
    start_worker(SHOP)
    first = app.module.charge.delay("ORD-1", 5)
    assert first.get(timeout=20) == {"order": "ORD-1", "cents": 5}
    again = app.module.charge.delay(order_id="ORD-1", cents=5)
    assert again.get(timeout=20) == {"order": "ORD-1", "cents": 5}
    assert again.id != first.id
    assert journal.count("charged") == 1


@pytest.mark.parametrize("name", sorted(VALUES))
def test_a_falsy_or_nested_result_replays_as_itself(
    app: Celery, start_worker: StartWorker, journal: Journal, name: str
) -> None:
    start_worker(SHOP, concurrency=1)
    results = [app.module.value.delay(name).get(timeout=20) for _ in range(2)]
    assert results == [VALUES[name]] * 2
    assert [type(result) for result in results] == [type(VALUES[name])] * 2
    assert journal.count("returned") == 1


def test_the_results_of_other_tasks_replay_as_the_result_backend_has_them(
    app: Celery, start_worker: StartWorker, journal: Journal
) -> None:
    """Only a worker shows what the backend of a caller reads of the first run."""
    start_worker(SHOP)
    for order, several, expected in (("a", False, "small a"), ("c", True, ["small c", "small b"])):
        first, again = (app.module.dispatch.delay(order, several).get(timeout=20) for _ in range(2))
        assert first == again
        assert result_from_tuple(again, app=app).get(timeout=20) == expected
    assert journal.count("dispatched") == 2


def test_different_keys_and_default_keys_run_each(app: Celery, start_worker: StartWorker, journal: Journal) -> None:
    start_worker(SHOP)
    module = app.module
    results = [module.charge.delay("1"), module.charge.delay(1), module.resize.delay("a"), module.resize.delay("a")]
    for result in results:
        result.get(timeout=20)
    assert journal.count("charged") == 2
    assert journal.count("resized") == 2


def test_the_producers_key_travels_in_the_headers_and_is_not_seen_by_the_body(
    app: Celery, start_worker: StartWorker, journal: Journal
) -> None:
    start_worker(SHOP)
    charge = app.module.charge
    charge.apply_async(("ORD-1",), idempotency_key="req-42").get(timeout=20)
    charge.s("ORD-1").set(idempotency_key="req-42").apply_async().get(timeout=20)
    app.send_task(charge.name, ("ORD-1",), idempotency_key="req-42").get(timeout=20)
    charge.apply_async(("ORD-1",), idempotency_key="req-43").get(timeout=20)
    entries = journal.entries("charged")
    assert len(entries) == 2
    assert [entry.fields["headers"] for entry in entries] == [[], []]


def test_the_same_key_with_other_arguments_fails_and_does_not_run(
    app: Celery, start_worker: StartWorker, journal: Journal
) -> None:
    start_worker(SHOP)
    charge = app.module.charge
    charge.apply_async(("ORD-1", 5), idempotency_key="req-42").get(timeout=20)
    reused = charge.apply_async(("ORD-1", 6), idempotency_key="req-42")
    with pytest.raises(Exception, match="other arguments") as caught:
        reused.get(timeout=20)
    assert type(caught.value).__name__ == "KeyReused"
    assert journal.count("charged") == 1


@pytest.mark.smoke
def test_a_duplicate_while_running_is_deferred_and_then_replays(
    app: Celery, start_worker: StartWorker, journal: Journal, gates: Gates
) -> None:
    gate = gates.close("before ORD-1")
    node = start_worker(SHOP)
    first = app.module.charge.delay("ORD-1")
    gate.reached()
    second = app.module.charge.delay("ORD-1")
    node.wait_for_log("copy=2")
    assert not second.ready()
    gate.open()
    assert first.get(timeout=20) == second.get(timeout=20) == {"order": "ORD-1", "cents": 999}
    assert journal.count("charged") == 1


def test_a_hundred_publishes_from_eight_processes_run_once(
    app: Celery, start_worker: StartWorker, journal: Journal, worker_env: dict[str, str]
) -> None:
    nodes = [start_worker(SHOP, ready=False) for _ in range(2)]
    for node in nodes:
        node.ready()
    context = get_context("forkserver")
    context.set_forkserver_preload([__name__])  # imported once, for all eight
    with ProcessPoolExecutor(8, mp_context=context) as pool:
        ids = [
            task_id for batch in pool.map(publish, [(worker_env, 13)] * 4 + [(worker_env, 12)] * 4) for task_id in batch
        ]
    assert len(set(ids)) == 100
    results = [app.AsyncResult(task_id).get(timeout=60) for task_id in ids]
    assert results == [{"order": "ORD-1", "cents": 999}] * 100
    assert journal.count("charged") == 1


def publish(order: tuple[dict[str, str], int]) -> list[str]:
    """Publish the same operation many times, from a process of its own."""
    env, times = order
    app = load_app(SHOP, env)
    return [app.module.charge.delay("ORD-1").id for _ in range(times)]


def test_a_failure_leaves_the_key_free_for_a_new_publish(
    app: Celery, start_worker: StartWorker, journal: Journal
) -> None:
    start_worker(SHOP)
    with pytest.raises(ValueError, match="no ORD-1"):
        app.module.failing.delay("ORD-1").get(timeout=20)
    # A corrected call after a failure is legitimate: the arguments may differ.
    assert app.module.failing.delay("ORD-1", fail=False).get(timeout=20) == "done ORD-1"
    assert journal.count("tried") == 2


def test_a_remembered_failure_is_raised_again_without_running(
    app: Celery, start_worker: StartWorker, journal: Journal
) -> None:
    start_worker(SHOP)
    for _ in range(2):
        with pytest.raises(Exception, match="card of ORD-1 declined") as caught:
            app.module.decline.delay("ORD-1").get(timeout=20)
        assert type(caught.value).__name__ == "Declined"
    assert journal.count("tried") == 1


def test_a_result_that_cannot_be_serialized_settles_as_done(
    app: Celery, start_worker: StartWorker, journal: Journal
) -> None:
    start_worker(SHOP)
    with pytest.raises(
        Exception, match="not JSON serializable"
    ):  # Celery's own error: the result backend cannot keep it
        app.module.value.delay("object").get(timeout=20)
    with pytest.raises(Exception, match="was not kept") as caught:
        app.module.value.delay("object").get(timeout=20)
    assert type(caught.value).__name__ == "ResultUnavailable"
    app.module.value.apply_async(("object",), ignore_result=True)
    assert app.module.value.delay("none").get(timeout=20) is None
    assert journal.count("returned", "object") == 1


@pytest.mark.nightly
def test_a_result_of_fifty_megabytes_settles_as_done(app: Celery, start_worker: StartWorker, journal: Journal) -> None:
    start_worker(SHOP)
    first = app.module.value.apply_async(("50 MB",), ignore_result=True)
    journal.wait_for_count(1, "returned")
    with pytest.raises(Exception, match="was not kept") as caught:
        app.module.value.delay("50 MB").get(timeout=40)
    assert type(caught.value).__name__ == "ResultUnavailable"
    assert first.id
    assert journal.count("returned") == 1


def test_callbacks_chain_and_chord_of_a_duplicate_get_the_first_runs_value(
    app: Celery, start_worker: StartWorker, journal: Journal
) -> None:
    start_worker(SHOP)
    module: Any = app.module
    module.charge.delay("ORD-1").get(timeout=20)
    module.charge.apply_async(("ORD-1",), link=module.collect.s("link"))
    (module.charge.s("ORD-1") | module.collect.s("chain")).apply_async()
    chord(group(module.charge.s("ORD-1"), module.charge.s("ORD-1")), module.collect.s("chord")).apply_async()
    journal.wait_for_count(3, "collected")
    value = {"order": "ORD-1", "cents": 999}
    collected = {entry.key if entry.key != "-" else "": entry.fields["value"] for entry in journal.entries("collected")}
    assert collected == {"link": value, "chain": value, "chord": [value, value]}
    assert journal.count("charged") == 1


def test_a_duplicate_may_wait_in_its_slot_for_the_holders_result(
    app: Celery, start_worker: StartWorker, journal: Journal, gates: Gates
) -> None:
    gate = gates.close("before ORD-1")
    node = start_worker(SHOP, env={"ON_CONFLICT": "wait"})
    first = app.module.charge.delay("ORD-1")
    gate.reached()
    second = app.module.charge.delay("ORD-1")
    node.wait_for_log("Conflicted")
    gate.open()
    assert first.get(timeout=20) == second.get(timeout=20)
    assert "Deferred" not in node.logs()
    assert journal.count("charged") == 1


def test_a_duplicate_may_fail_at_once(app: Celery, start_worker: StartWorker, journal: Journal, gates: Gates) -> None:
    gate = gates.close("before ORD-1")
    start_worker(SHOP, env={"ON_CONFLICT": "raise", "ON_DUPLICATE": "raise"})
    first = app.module.charge.delay("ORD-1")
    gate.reached()
    with pytest.raises(Exception, match="is being done by") as running:
        app.module.charge.delay("ORD-1").get(timeout=20)
    gate.open()
    assert first.get(timeout=20)["order"] == "ORD-1"
    with pytest.raises(Exception, match="was done") as done:
        app.module.charge.delay("ORD-1").get(timeout=20)
    assert {type(caught.value).__name__ for caught in (running, done)} == {"Conflict"}
    assert journal.count("charged") == 1
