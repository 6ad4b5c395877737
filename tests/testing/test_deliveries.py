"""Deliveries that are repeated and cut off, through Celery's own tracer, and leases that stand in for one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from rq import Queue

from celery_idempotent import (
    ConfigurationError,
    CrashLoop,
    LeaseLost,
    MissingKey,
    Store,
    add_hook,
    current_lease,
    idempotent,
    open_store,
    remove_hook,
)
from celery_idempotent import rq as idempotent_rq
from celery_idempotent.events import Event
from celery_idempotent.stores import State
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.testing import crash_at, deliver_twice, inactive, lease_for, override_store, redeliver

POINTS = ["before_effect", "after_effect", "after_settle"]


@pytest.fixture
def store() -> Iterator[MemoryStore]:
    with override_store() as store:
        yield store


@pytest.fixture
def heard() -> Iterator[list[str]]:
    names: list[str] = []

    def hear(event: Event) -> None:
        names.append(type(event).__name__)

    add_hook(hear)
    yield names
    remove_hook(hear)


def test_a_message_that_is_delivered_twice_runs_once(store: MemoryStore, charge: Any, charges: list[Any]) -> None:
    first, second = deliver_twice(charge.s("A", 5))
    assert first.id == second.id
    assert first.get() == second.get() == 5
    assert charges == ["A"]


def test_what_is_delivered_with_the_guards_off_runs_twice(charge: Any, charges: list[Any]) -> None:
    with inactive():
        deliver_twice(charge.s("A"))
    assert charges == ["A", "A"]


def test_a_redelivery_has_what_the_message_had(store: MemoryStore, declare: Callable[..., Any], app: Celery) -> None:
    app.conf.task_always_eager = True
    seen: list[Any] = []

    def note(self: Any, order_id: str, *, cents: int) -> str:
        seen.append((self.request.id, order_id, cents, self.request.headers, self.lease.key))
        return order_id

    def follow(self: Any, result: str) -> None:
        seen.append(result)

    task, next_one = declare(note, {"key": "order_id", "scope": "tenant"}), declare(follow, {})
    sig = task.s("A", cents=5).set(headers={"tenant": "t1"}, link=next_one.s())
    with crash_at("before_effect", of=task) as crash:
        sig.apply_async()
    assert redeliver(crash).get() == "A"
    assert seen == [
        (crash.id, "A", 5, {"tenant": "t1"}, task.key_for("A", cents=5, idempotency_headers={"tenant": "t1"})),
        "A",
    ]


@pytest.mark.parametrize(
    ("point", "ran", "state"),
    [
        ("before_effect", 0, State.IN_PROGRESS),
        ("after_effect", 1, State.IN_PROGRESS),
        ("after_settle", 1, State.COMPLETED),
    ],
)
def test_a_crash_leaves_what_a_dead_worker_leaves(
    store: MemoryStore, charge: Any, charges: list[Any], heard: list[str], point: Any, ran: int, state: State
) -> None:
    with crash_at(point) as crash:
        charge.apply(("A",))
        raise AssertionError("the process is dead")
    [record] = store.scan()
    assert (crash.happened, record.state, record.remaining) == (True, state, 0.0)
    assert len(charges) == ran
    assert heard == ["Acquired", *(["Completed"] if point == "after_settle" else [])]
    assert redeliver(crash).get() == 1
    assert heard[-2:] == (["Completed", "Replayed"] if point == "after_settle" else ["TakenOver", "Completed"])
    assert len(charges) == (1 if point == "after_settle" else ran + 1)


def test_crashes_count_until_the_message_is_given_up(store: MemoryStore, charge: Any, charges: list[Any]) -> None:
    with crash_at("before_effect") as crash:
        charge.apply(("A",))
    for _ in range(charge._binding.policy.max_crashes - 1):
        with crash_at("before_effect"):
            redeliver(crash)
    with pytest.raises(CrashLoop):
        redeliver(crash).get()
    assert charges == []


@pytest.mark.parametrize("point", POINTS)
def test_of_a_task_that_retries_the_attempt_that_died_is_delivered_again(
    store: MemoryStore, declare: Callable[..., Any], point: Any
) -> None:
    attempts: list[int] = []

    def flaky(self: Any, order_id: str) -> str:
        attempts.append(self.request.retries)
        if self.request.retries < 2:
            raise self.retry(countdown=60)
        return order_id

    task = declare(flaky)
    with crash_at("after_effect" if point == "before_effect" else point) as crash:
        task.apply(("A",))
    assert attempts == [0, 1, 2]
    assert redeliver(crash).get() == "A"
    assert attempts == [0, 1, 2, *([] if point == "after_settle" else [2])]


def test_what_holds_the_lease_around_a_call_that_dies_dies_with_it(
    store: MemoryStore, declare: Callable[..., Any], charges: list[Any]
) -> None:
    @idempotent(store="memory://", key="order_id")
    def book(order_id: str) -> None:
        charges.append(order_id)

    def outer(self: Any, order_id: str) -> None:
        book(order_id)

    task = declare(outer)
    with crash_at("after_effect", of=book) as crash:
        task.apply(("A",))
    assert {record.state for record in store.scan()} == {State.IN_PROGRESS}
    assert all(record.remaining == 0 for record in store.scan())
    assert crash.id
    task.apply(("A",))
    assert charges == ["A", "A"]


def test_of_several_deliveries_the_one_that_is_named_dies(
    store: MemoryStore, charge: Any, keyed: Any, charges: list[Any]
) -> None:
    with crash_at("before_effect", of=keyed) as crash:
        charge.apply(("A",))
        keyed.apply(("A",))
    assert charges == ["A"]
    assert redeliver(crash).successful()


def test_crashes_within_one_another_are_left_each_at_its_own_block(store: MemoryStore, charge: Any, keyed: Any) -> None:
    with crash_at("before_effect", of=charge) as outer, crash_at("before_effect", of=keyed) as inner:
        charge.apply(("A",))
    assert outer.happened
    assert not inner.happened


def test_a_block_that_reaches_no_point_fails(store: MemoryStore, charge: Any) -> None:
    charge.apply(("A",))
    nothing = "Expected a delivery to reach after_effect within the block, got none"
    with pytest.raises(AssertionError, match=nothing), crash_at("after_effect"):
        charge.apply(("A",))
    with pytest.raises(AssertionError, match=nothing), crash_at("after_effect"):
        charge("B")
    with pytest.raises(ZeroDivisionError), crash_at("after_effect"):
        raise ZeroDivisionError
    with pytest.raises(ConfigurationError, match=r"got 'after'\. Write crash_at"), crash_at("after"):
        pass


@pytest.mark.parametrize("point", POINTS)
def test_functions_and_coroutines_die_there_too(store: MemoryStore, charges: list[Any], point: Any) -> None:
    @idempotent(store="memory://", key="order_id")
    def book(order_id: str) -> None:
        charges.append(order_id)

    @idempotent(store="memory://", key="order_id")
    async def book_async(order_id: str) -> None:
        charges.append(order_id)

    for call in (lambda: book("A"), lambda: asyncio.run(book_async("B"))):
        charges.clear()
        with crash_at(point):
            call()
        call()
        assert len(charges) == (2 if point == "after_effect" else 1)


def book(order_id: str) -> str:
    booked.append(order_id)
    return order_id


booked: list[str] = []
book = idempotent_rq.idempotent(key="order_id")(book)


@pytest.mark.parametrize("point", POINTS)
def test_jobs_die_there_too(redis_client: Any, point: Any, store: MemoryStore) -> None:
    booked.clear()
    queue = Queue(connection=redis_client, is_async=False)
    with crash_at(point) as crash:
        job = queue.enqueue(book, "A")
    assert crash.id == job.id
    assert redeliver(job).return_value() == "A"
    assert len(booked) == (2 if point == "after_effect" else 1)


@pytest.fixture(params=["sqlite", "redis"])
def real_store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    url = f"sqlite:///{tmp_path}/a.db" if request.param == "sqlite" else request.getfixturevalue("redis_url")
    store = open_store(url)
    yield store
    store.close()


def test_a_lease_in_a_real_store_has_run_out_too(
    app: Celery, charge: Any, charges: list[Any], real_store: Store
) -> None:
    app.conf.idempotency_store = real_store
    with crash_at("before_effect") as crash:
        charge.apply(("A",))
    record = real_store.get(charge.key_for("A"))
    assert record is not None
    assert (record.state, record.remaining) == (State.IN_PROGRESS, 0.0)
    with override_store(real_store), crash_at("after_effect") as crash:
        charge.apply(("B",))
        redeliver(crash)
    assert charges == ["B"]


def test_what_was_not_delivered_here_is_not_delivered_again(charge: Any) -> None:
    with pytest.raises(ConfigurationError, match="under the fixture idempotency_store"):
        redeliver(charge.AsyncResult("elsewhere"))
    with pytest.raises(ConfigurationError, match="which nothing guards"):
        deliver_twice("charge")


def test_a_message_that_cannot_be_delivered_fails_with_the_reason(keyed: Any) -> None:
    for sig in (keyed.s(), keyed):
        with pytest.raises(TypeError, match="order_id"):
            deliver_twice(sig)
    with pytest.raises(MissingKey, match="pass a value that is not empty"):
        deliver_twice(keyed.s(None))


def test_a_call_has_the_lease_that_a_delivery_of_its_arguments_has(keyed: Any, charges: list[Any]) -> None:
    with lease_for(keyed, "A", cents=5) as lease:
        assert keyed("A", cents=5) == 5
        assert current_lease() is lease
        assert "stand-in" in repr(lease)
        assert lease.fence
    assert current_lease() is None
    assert charges == [lease.derived_key("charge")]
    with override_store():
        keyed.apply(("A", 5))
    assert charges == [lease.derived_key("charge")]
    assert lease.key == keyed.key_for("A", 5)


def test_a_stand_in_keeps_what_was_settled_and_is_lost_when_a_test_says_so(declare: Callable[..., Any]) -> None:
    def settle(self: Any, order_id: str) -> None:
        self.lease.check()
        self.lease.settle(order_id, using="default")

    task = declare(settle)
    with lease_for(task, "A") as lease:
        assert lease.settled is None
        task("A")
        assert lease.settled == "A"
        lease.lost = True
        with pytest.raises(LeaseLost):
            task("A")
    once = declare(settle, {"key": "order_id", "result_ttl": 0}, name="once")
    with lease_for(once, "A"), pytest.raises(ConfigurationError, match="result_ttl=0"):
        once("A")
    with pytest.raises(MissingKey), lease_for(task, None):
        pass


def test_functions_and_jobs_have_a_stand_in_too() -> None:
    @idempotent(store="memory://", key="order_id")
    def book_once(order_id: str) -> Any:
        return current_lease()

    for function in (book, book_once):
        with lease_for(function, "A") as lease:
            assert lease.key.endswith(":A")
    with lease_for(book_once, "A") as lease:
        assert book_once.__wrapped__("A") is lease  # type: ignore[attr-defined]
    with pytest.raises(ConfigurationError, match="which nothing guards"), lease_for(print, "A"):
        pass
