"""The proof that a task takes effect once: what is safe passes, and what is not fails in the window that is open."""

from __future__ import annotations

import asyncio
import re
import sqlite3
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from celery import Celery, signals
from rq import Queue

from celery_idempotent import ConfigurationError, current_lease, idempotent, open_store
from celery_idempotent import rq as idempotent_rq
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.testing import assert_takes_effect_once, inactive, override_store


def failure_of(*args: Any, **options: Any) -> str:
    with pytest.raises(AssertionError) as failed:
        assert_takes_effect_once(*args, **options)
    return str(failed.value)


def test_a_task_that_charges_under_a_derived_key_passes(keyed: Any, charges: list[Any]) -> None:
    assert_takes_effect_once(keyed, ("ORD-1", 999), effects=lambda: charges)
    assert_takes_effect_once(keyed.s("ORD-2", 999), effects=lambda: len(charges))
    assert_takes_effect_once(keyed, kwargs={"order_id": "ORD-3"}, effects=lambda: charges)


def test_a_task_that_charges_without_a_key_fails_after_its_effect_and_learns_what_to_do(
    charge: Any, charges: list[Any]
) -> None:
    text = failure_of(charge, ("ORD-1", 999), effects=lambda: charges)
    assert text.count("does not take effect once") == 1
    assert "if its worker dies after_effect: its body has returned" in text
    assert "effects() before:                []" in text
    assert "when the worker died:            ['ORD-1']" in text
    assert "after the message came again:    ['ORD-1', 'ORD-1']" in text
    assert 'self.lease.derived_key("charge")' in text
    assert "self.lease.settle(result, using=...)" in text


def test_what_effects_returned_does_not_change_with_what_the_task_does_next(
    declare: Callable[..., Any], charges: list[Any]
) -> None:
    def charge(self: Any, order_id: str) -> None:
        charges.append(order_id)

    assert "after_effect" in failure_of(declare(charge), ("A",), effects=lambda: {"charges": charges})


def test_a_key_of_one_message_is_no_key_of_the_operation(declare: Callable[..., Any], charges: list[Any]) -> None:
    """The producer may publish twice, and the second message come before the first one comes again."""

    def charge(self: Any, order_id: str) -> None:
        if self.request.id not in charges:
            charges.append(self.request.id)

    text = failure_of(declare(charge), ("A",), effects=lambda: len(charges))
    assert text.count("does not take effect once") == 1
    assert "if its worker dies after_effect" in text
    assert "when the worker died:            4" in text
    assert "after it was published again:    5" in text


@pytest.mark.parametrize("part", ["fence", "retries"])
def test_a_key_that_differs_between_deliveries_is_no_key(
    declare: Callable[..., Any], charges: list[Any], part: str
) -> None:
    def charge(self: Any, order_id: str) -> None:
        key = f"{order_id}-{self.lease.fence}" if part == "fence" else f"{order_id}-{self.request.retries}"
        if key not in charges:
            charges.append(key)

    if part == "fence":
        assert "after_effect" in failure_of(declare(charge), ("A",), effects=lambda: charges)
    else:
        assert_takes_effect_once(declare(charge), ("A",), effects=lambda: charges)


def test_a_task_that_settles_in_its_transaction_passes_on_a_store_in_memory(
    declare: Callable[..., Any], charges: list[Any]
) -> None:
    def charge(self: Any, order_id: str) -> str:
        charges.append(order_id)
        self.lease.settle(order_id, using="default")
        return order_id

    assert_takes_effect_once(declare(charge), ("A",), effects=lambda: len(charges))


def test_a_body_that_raises_after_it_settled_is_taken_to_have_rolled_back(
    declare: Callable[..., Any], charges: list[Any]
) -> None:
    def charge(self: Any, order_id: str) -> str:
        self.lease.settle(order_id, using="default")
        if not charges:
            charges.append(order_id)
            raise ValueError(order_id)
        return order_id

    task = declare(charge)
    with override_store() as store:
        with pytest.raises(ValueError, match="A"):
            task.apply(("A",)).get()
        assert task.apply(("A",)).get() == "A"
        assert [record.state.value for record in store.scan()] == ["completed"]


@pytest.mark.parametrize("settles", [True, False])
def test_a_task_with_a_database_is_tried_on_that_database(
    declare: Callable[..., Any], tmp_path: Path, settles: bool
) -> None:
    path = tmp_path / "shop.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("create table payments (order_id text)")

    def charge(self: Any, order_id: str) -> None:
        with closing(sqlite3.connect(path)) as connection, connection:
            connection.execute("insert into payments values (?)", (order_id,))
            if settles:
                self.lease.settle(None, using=connection)

    def payments() -> Any:
        with closing(sqlite3.connect(path)) as connection:
            return connection.execute("select count(*) from payments").fetchone()

    task, store = declare(charge), open_store(f"sqlite:///{path}")
    with closing(store), override_store(store):
        if settles:
            assert_takes_effect_once(task, ("A",), effects=payments)
        else:
            assert "after_effect" in failure_of(task, ("A",), effects=payments)


def test_an_effect_before_the_body_fails_before_it(keyed: Any, charges: list[Any]) -> None:
    def announce(**_: Any) -> None:
        charges.append("begins")

    signals.task_prerun.connect(announce)
    try:
        text = failure_of(keyed, ("A",), effects=lambda: len(charges))
    finally:
        signals.task_prerun.disconnect(announce)
    assert "if its worker dies before_effect: its lease is taken" in text
    assert "What has an effect before it is not guarded" in text


def test_an_effect_beside_the_body_fails_after_the_record(declare: Callable[..., Any], charges: list[Any]) -> None:
    def charge(self: Any, order_id: str) -> None:
        if self.lease.key not in charges:
            charges.append(self.lease.key)

    def on_success(self: Any, *_: Any) -> None:
        charges.append("mailed")

    text = failure_of(declare(charge, on_success=on_success), ("A",), effects=lambda: len(charges))
    assert "if its worker dies after_settle: its result is recorded" in text
    assert "What has an effect beside it is not guarded: on_success" in text


def test_a_task_that_remembers_nothing_fails_and_says_so(declare: Callable[..., Any], charges: list[Any]) -> None:
    def charge(self: Any, order_id: str) -> None:
        charges.append(order_id)

    text = failure_of(declare(charge, {"key": "order_id", "result_ttl": 0}), ("A",), effects=lambda: len(charges))
    assert "The task has result_ttl=0" in text


def test_a_task_without_a_key_of_its_own_is_delivered_again_and_not_published_again(
    declare: Callable[..., Any], charges: list[Any]
) -> None:
    def charge(self: Any, order_id: str) -> None:
        key = self.lease.derived_key("charge")
        if key not in charges:
            charges.append(key)

    assert_takes_effect_once(declare(charge, {}), ("A",), effects=lambda: charges)


def test_a_task_that_raises_for_duplicates_passes(declare: Callable[..., Any], charges: list[Any]) -> None:
    def charge(self: Any, order_id: str) -> None:
        if order_id not in charges:
            charges.append(order_id)

    task = declare(charge, {"key": "order_id", "on_duplicate": "raise"})
    assert_takes_effect_once(task, ("A",), effects=lambda: charges)


@pytest.mark.parametrize("safe", [True, False])
def test_a_task_that_retries_is_tried_to_its_end(
    declare: Callable[..., Any], app: Celery, charges: list[Any], safe: bool
) -> None:
    app.conf.task_eager_propagates = True

    def charge(self: Any, order_id: str) -> None:
        if self.request.retries < 2:
            raise self.retry(countdown=60)
        key = self.lease.derived_key("charge")
        if not safe or key not in charges:
            charges.append(key)

    task = declare(charge)
    if safe:
        assert_takes_effect_once(task, ("A",), effects=lambda: len(charges))
    else:
        assert "after_effect" in failure_of(task, ("A",), effects=lambda: len(charges))


def test_a_task_that_raises_raises_that(declare: Callable[..., Any]) -> None:
    def charge(self: Any, order_id: str) -> None:
        raise LookupError(order_id)

    with pytest.raises(LookupError):
        assert_takes_effect_once(declare(charge), ("A",), effects=lambda: 0)


def test_effects_that_do_not_change_prove_nothing(keyed: Any) -> None:
    assert "effects() was 0 before it ran and after that" in failure_of(keyed, ("A",), effects=lambda: 0)


def test_nothing_is_proved_with_the_guards_off_or_of_what_has_none(keyed: Any) -> None:
    with inactive(), pytest.raises(ConfigurationError, match="switched off"):
        assert_takes_effect_once(keyed, ("A",), effects=lambda: 0)
    with pytest.raises(ConfigurationError, match="which nothing guards"):
        assert_takes_effect_once(print, ("A",), effects=lambda: 0)


def test_arguments_of_another_type_are_refused(keyed: Any, charges: list[Any]) -> None:
    with pytest.raises(ConfigurationError, match=r"got 3\. Write effects=lambda"):
        assert_takes_effect_once(keyed, ("A",), effects=3)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"in a tuple, got 'AB'\. Write \('AB',\)\."):
        assert_takes_effect_once(keyed, "AB", effects=lambda: len(charges))
    assert charges == []


@pytest.mark.parametrize("safe", [True, False])
def test_functions_and_coroutines_are_tried_too(charges: list[Any], safe: bool) -> None:
    def act(order_id: str) -> None:
        lease = current_lease()
        assert lease is not None
        key = lease.derived_key("charge")
        if not safe or key not in charges:
            charges.append(key)

    @idempotent(store="memory://", key="order_id")
    def book(order_id: str) -> None:
        act(order_id)

    @idempotent(store="memory://", key="order_id")
    async def book_async(order_id: str) -> None:
        act(order_id)

    for function in (book, book_async):
        if safe:
            assert_takes_effect_once(function, ("A",), effects=lambda: len(charges))
        else:
            assert "after_effect" in failure_of(function, ("A",), effects=lambda: len(charges))


@pytest.mark.filterwarnings("error")
def test_a_coroutine_function_in_a_running_loop_is_refused_and_runs_in_a_thread(charges: list[Any]) -> None:
    @idempotent(store="memory://", key="order_id")
    async def book(order_id: str) -> None:
        if order_id not in charges:
            charges.append(order_id)

    async def prove() -> None:
        with pytest.raises(ConfigurationError, match=r"Expected no loop of asyncio.* write await asyncio\.to_thread\("):
            assert_takes_effect_once(book, ("A",), effects=lambda: len(charges))
        assert charges == []
        await asyncio.to_thread(assert_takes_effect_once, book, ("A",), effects=lambda: len(charges))

    asyncio.run(prove())
    assert charges == ["A"]


@pytest.mark.parametrize("kind", ["task", "function", "coroutine function"])
def test_a_key_that_changes_with_each_delivery_is_named(
    declare: Callable[..., Any], charges: list[Any], kind: str
) -> None:
    number = count()

    def charge(order_id: str) -> None:
        lease = current_lease()
        assert lease is not None
        charges.append(lease.derived_key("charge"))

    async def charge_async(order_id: str) -> None:
        charge(order_id)

    def charge_as_task(self: Any, order_id: str) -> None:
        charge(order_id)

    options: dict[str, Any] = {"key": lambda order_id: f"{order_id}-{next(number)}"}
    make: dict[str, Callable[[], Any]] = {
        "task": lambda: declare(charge_as_task, options),
        "function": lambda: idempotent(store="memory://", **options)(charge),
        "coroutine function": lambda: idempotent(store="memory://", **options)(charge_async),
    }
    text = failure_of(make[kind](), ("A",), effects=lambda: len(charges))
    assert re.search(r"Expected deliveries of .*charge.* key, got 'idem:.*::A-\d' and then 'idem:.*::A-\d'", text)
    assert "Make the key of the arguments alone" in text
    assert "does not take effect once" not in text


def test_a_guarded_call_within_the_body_has_a_key_of_its_own(charges: list[Any]) -> None:
    @idempotent(store="memory://", key="number")
    def countdown(number: int) -> None:
        charges.append(number)
        if number:
            countdown(number - 1)

    assert "after_effect" in failure_of(countdown, (1,), effects=lambda: len(charges))


def test_each_delivery_has_arguments_of_its_own(declare: Callable[..., Any], charges: list[Any]) -> None:
    """A body that empties its list is right: a broker delivers the list as it was published."""

    def ship(order_id: str, items: list[str], *, more: dict[str, list[str]]) -> None:
        lease = current_lease()
        assert lease is not None
        for item in (items.pop(), more["items"].pop()):
            if lease.derived_key(item) not in charges:
                charges.append(lease.derived_key(item))

    def ship_as_task(self: Any, order_id: str, items: list[str], *, more: dict[str, list[str]]) -> None:
        ship(order_id, items, more=more)

    items, more = ["a"], {"items": ["b"]}
    for target in (declare(ship_as_task), idempotent(store="memory://", key="order_id")(ship)):
        assert_takes_effect_once(target, ("A", items), {"more": more}, effects=lambda: len(charges))
    assert_takes_effect_once(declare(ship_as_task).s("B", items, more=more), effects=lambda: len(charges))
    assert (items, more) == (["a"], {"items": ["b"]})


def test_an_object_that_is_an_argument_is_the_callers() -> None:
    @idempotent(store="memory://", key="order_id", fingerprint=["till"])
    def charge(order_id: str, till: Counter[str]) -> None:
        till[order_id] = 1

    till: Counter[str] = Counter()
    assert_takes_effect_once(charge, ("A", till), effects=lambda: dict(till))


safely: list[str] = []


def book(order_id: str) -> None:
    safely.append(order_id)


def book_once(order_id: str) -> None:
    if order_id not in safely:
        safely.append(order_id)


def book_all(order_id: str, items: list[str]) -> None:
    book_once(items.pop())


def fail(order_id: str) -> None:
    raise LookupError(order_id)


book = idempotent_rq.idempotent(key="order_id")(book)
book_once = idempotent_rq.idempotent(key="order_id")(book_once)
book_all = idempotent_rq.idempotent(key="order_id")(book_all)
fail = idempotent_rq.idempotent(key="order_id")(fail)


def test_jobs_are_tried_too(redis_client: Any) -> None:
    safely.clear()
    queue = Queue(connection=redis_client, is_async=False)
    assert_takes_effect_once(book_once, ("A",), effects=lambda: len(safely), queue=queue)
    assert_takes_effect_once(book_all, ("A", ["B"]), effects=lambda: len(safely), queue=queue)
    assert "after_effect" in failure_of(book, ("A",), effects=lambda: len(safely), queue=queue)
    assert "LookupError: A" in failure_of(fail, ("A",), effects=lambda: len(safely), queue=queue)
    with pytest.raises(ConfigurationError, match="Expected the queue"):
        assert_takes_effect_once(book, ("A",), effects=lambda: len(safely))


def test_the_store_is_left_as_it_was(keyed: Any, charges: list[Any]) -> None:
    with override_store() as store:
        keyed.apply(("other",))
        assert_takes_effect_once(keyed, ("A",), effects=lambda: len(charges))
        assert isinstance(store, MemoryStore)
        assert [record.key for record in store.scan()] == [keyed.key_for("other")]
