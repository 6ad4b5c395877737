"""The gauntlet: what an operation is, and what its duplicates are given."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timezone
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest
from celery import Celery, chord

from celery_idempotent.stores import State
from celery_idempotent.stores.redis import RedisStore
from tests.gauntlet.conftest import key_of
from tests.support.celery.values import VALUES
from tests.support.gauntlet.consumer import Consumer
from tests.support.stores.benches import known

RETURNED: dict[str, Any] = {
    **VALUES,
    "tuple": (1, (2, 3)),
    "decimal": Decimal("9.99"),
    "time": datetime(2024, 2, 29, 12, tzinfo=timezone.utc),
    "id": UUID(int=7),
}


@pytest.mark.fault(9)
def test_a_duplicate_gets_the_value_and_the_type_that_the_first_runs_consumers_got(
    declare: Callable[..., Any], app: Celery, consumer: Consumer
) -> None:
    runs: list[str] = []

    def charge(self: Any, order_id: str) -> Any:
        runs.append(order_id)
        return RETURNED[order_id]

    task = declare(charge)
    for name in RETURNED:
        first, duplicate = task.delay(name), task.delay(name)
        consumer.work()
        values = [result.get(timeout=10) for result in (first, duplicate)]
        assert values[0] == values[1], name
        assert type(values[0]) is type(values[1]), name
        assert name == "tuple" or values[0] == RETURNED[name]
    assert runs == list(RETURNED)


@pytest.mark.fault(10)
def test_a_result_that_cannot_be_serialized_leaves_the_operation_done(
    declare: Callable[..., Any], app: Celery, consumer: Consumer, store: RedisStore
) -> None:
    runs: list[str] = []

    def charge(self: Any, order_id: str) -> object:
        runs.append(order_id)
        return object()

    task = declare(charge)
    task.delay("A")
    consumer.work()
    assert known(store, key_of("A")).state is State.COMPLETED
    duplicate = task.delay("A")
    consumer.work()
    assert runs == ["A"]
    assert app.backend.get_task_meta(duplicate.id)["status"] == "FAILURE"


@pytest.mark.fault(14)
def test_equal_calls_share_a_key_however_they_are_spelled_and_others_do_not(declare: Callable[..., Any]) -> None:
    runs: list[tuple[Any, int]] = []

    def charge(self: Any, order: Any, cents: int = 999) -> None:
        runs.append((order, cents))

    task = declare(charge, key=["order", "cents"])
    for args, kwargs in [((1,), {}), ((1, 999), {}), ((1,), {"cents": 999}), ((), {"cents": 999, "order": 1})]:
        task.apply(args, kwargs).get()
    assert runs == [(1, 999)]
    others = [{"x": 1}, {"x": "1"}, {"x": True}, {"x": None}, "1", True, 1.0]
    for order in others:
        task.apply((order,)).get()
    assert len(runs) == 1 + len(others)


@pytest.mark.fault(15)
@pytest.mark.parametrize("order_id", [None, ""])
def test_a_call_without_a_key_fails_and_does_not_run(declare: Callable[..., Any], order_id: str | None) -> None:
    runs: list[Any] = []

    def charge(self: Any, order_id: Any) -> None:
        runs.append(order_id)

    result = declare(charge).apply((order_id,))
    assert (result.state, type(result.result).__name__) == ("FAILURE", "MissingKey")
    assert runs == []


@pytest.mark.fault(17)
def test_nobody_who_waits_for_a_duplicate_gets_none_or_waits_for_ever(
    declare: Callable[..., Any], app: Celery, consumer: Consumer
) -> None:
    runs: list[str] = []
    collected: list[Any] = []

    def charge(self: Any, order_id: str) -> str:
        runs.append(order_id)
        return f"charged {order_id}"

    @app.task(shared=False, name="collect")
    def collect(value: Any) -> Any:
        collected.append(value)
        return value

    def charge_and_forget(self: Any, order_id: str) -> str:
        return f"charged {order_id}"

    task = declare(charge)
    waiting = [
        task.delay("A"),
        task.delay("A"),
        task.apply_async(("A",), link=collect.s()),
        (task.s("A") | collect.s()).apply_async(),
        chord([task.s("A"), task.s("A")], collect.s()).apply_async(),
    ]
    consumer.work()
    value = "charged A"
    assert [result.ready() for result in waiting] == [True] * 5
    assert [result.get(timeout=10) for result in waiting] == [value, value, value, value, [value, value]]
    assert collected == [value, value, [value, value]]
    assert runs == ["A"]
    # Where no value was kept there is none to give, and none is made up.
    forgetful = declare(charge_and_forget, store_result=False)
    first, duplicate = forgetful.delay("A"), forgetful.delay("A")
    consumer.work()
    assert first.get(timeout=10) == value
    found = app.backend.get_task_meta(duplicate.id)
    assert (found["status"], type(found["result"]).__name__) == ("FAILURE", "ResultUnavailable")
