"""What `format_task` makes of Flower's copy of a task."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from celery.events.state import State, Task

from celery_idempotent.celery.flower import format_task
from celery_idempotent.celery.monitoring import MONITORED

KEY = "idem:shop.charge::ORD-1"


def told(*kinds: str, result: str | None = None, **facts: Any) -> Any:
    """Return Flower's copy of a task that had these events."""
    state = State()
    for number, kind in enumerate(kinds):
        fields: dict[str, Any] = {"result": result} if kind == "succeeded" else {}
        if kind not in ("received", "started", "succeeded", "failed"):
            fields["idempotency"] = {"outcome": kind.replace("-", "_"), "key": KEY, **facts}
        clock = {"clock": number, "timestamp": number, "local_received": number}
        state.event({"type": f"task-{kind}", "uuid": "id-2", "hostname": "celery@a", "pid": 1, **clock, **fields})
    return copy.copy(state.tasks["id-2"])


def test_a_replayed_task_shows_its_outcome_its_key_and_the_original_task() -> None:
    task = format_task(
        told("received", "started", "replayed", "succeeded", result="'paid'", original="id-1", age=61.04)
    )
    assert task.state == "REPLAYED"
    assert task.result.splitlines() == [
        "'paid'",
        "",
        "replayed: answered with the outcome of an earlier run",
        f"key: {KEY}",
        "original task: id-1",
        "seconds since it was done: 61",
    ]


def test_a_deferred_task_shows_when_it_is_tried_again() -> None:
    task = format_task(told("received", "started", "deferred", "received", delay=0.5, copy=2))
    assert task.state == "DEFERRED"
    assert task.result.splitlines()[1:] == [f"key: {KEY}", "seconds until it is tried again: 0.5", "copy: 2"]


def test_a_replayed_failure_remains_a_failure() -> None:
    task = format_task(told("received", "replayed", "failed", original="id-1"))
    assert task.state == "FAILURE"
    assert "original task: id-1" in task.result


@pytest.mark.parametrize("kind", [*sorted(kind.name for kind in MONITORED), "resumed"])
def test_everything_that_monitors_are_told_has_its_words(kind: str) -> None:
    task = format_task(told(kind.replace("_", "-")))
    assert kind.replace("_", " ").split()[-1][:4] in task.result.lower()
    assert f"key: {KEY}" in task.result


def test_what_is_shown_is_not_shown_twice() -> None:
    assert format_task(told("replayed", "succeeded", result="1")).as_dict()["idempotency"] is None


@pytest.mark.parametrize("task", [told("received", "succeeded", result="'paid'"), Task("id"), None, object(), 3])
def test_a_first_run_and_whatever_else_comes_is_left_as_it_is(task: Any) -> None:
    before = copy.copy(task)
    assert format_task(task) is task
    if isinstance(task, Task):
        assert task.as_dict() == before.as_dict()


@pytest.mark.parametrize(
    "facts", [{"outcome": "later"}, {"outcome": []}, {}, "text", None, {"outcome": "deferred", "delay": {}}]
)
def test_facts_that_it_does_not_understand_harm_nobody(facts: Any) -> None:
    task = told("received", "started")
    task.idempotency = facts
    assert format_task(task) is task
    assert task.state == "STARTED"


def test_a_state_that_was_saved_before_can_still_be_read() -> None:
    task = told("replayed", "succeeded", result="1")
    rebuild, (kind, fields) = task.__reduce__()
    assert rebuild(kind, {name: value for name, value in fields.items() if name != "idempotency"}).idempotency is None
