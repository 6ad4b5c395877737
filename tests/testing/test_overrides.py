"""Which store the guards of a process use in a test: a fresh one, none, the class's."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import types
import unittest
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rq import Queue

from celery_idempotent import ConfigurationError, add_hook, current_lease, idempotent, remove_hook
from celery_idempotent import rq as idempotent_rq
from celery_idempotent.events import Event, RanUnprotected
from celery_idempotent.http import wsgi
from celery_idempotent.stores import State
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.testing import IdempotencyTestMixin, inactive, is_active, override_store, set_active
from celery_idempotent.testing.override import Block
from tests.support.waiting import wait_until


def test_a_fresh_store_serves_the_tasks_of_an_app_whose_own_store_is_away(charge: Any, charges: list[Any]) -> None:
    for _ in range(2):
        with override_store() as store:
            assert charge.apply(("A", 5)).get() == charge.apply(("A", 5)).get() == 5
            assert [record.state for record in store.scan()] == [State.COMPLETED]
    assert charges == ["A", "A"]


def test_of_several_stores_the_innermost_is_in_force(charge: Any, charges: list[Any]) -> None:
    own = MemoryStore()
    with inactive(), override_store(own) as store:
        assert store is own
        charge.apply(("A",))
        with override_store():
            charge.apply(("A",))
        charge.apply(("A",))
    assert charges == ["A", "A"]
    assert len(list(own.scan())) == 1


@pytest.mark.parametrize("wrong", ["redis://:hunter2@localhost/1", MemoryStore, 7])
def test_what_is_no_store_is_refused(wrong: Any, charge: Any) -> None:
    message = r"^(?!.*hunter2)Expected a store, got .*open_store\(url\)"
    with pytest.raises(ConfigurationError, match=message), override_store(wrong):
        charge.apply(("A",))


def test_after_the_block_each_has_its_own_store_again() -> None:
    store = MemoryStore()

    @idempotent(store=store, key="order_id")
    def book(order_id: str) -> str:
        return order_id

    with override_store():
        book("A")
    assert list(store.scan()) == []
    book("A")
    assert len(list(store.scan())) == 1


def test_functions_and_applications_use_it_too() -> None:
    ran: list[str] = []

    @idempotent(store="redis://127.0.0.1:1/0", key="order_id")
    def book(order_id: str) -> None:
        ran.append(order_id)

    def respond(environ: Any, start_response: Any) -> list[bytes]:
        ran.append("request")
        start_response("201 Created", [])
        return [b"made"]

    application = wsgi.IdempotencyMiddleware(respond, store="redis://127.0.0.1:1/0", scope="X-Account")
    request = {"REQUEST_METHOD": "POST", "PATH_INFO": "/", "HTTP_X_ACCOUNT": "anna", "HTTP_IDEMPOTENCY_KEY": '"k1"'}
    with override_store():
        for _ in range(2):
            book("A")
            response = application(dict(request), lambda *_: None)
            assert b"".join(response) == b"made"
            getattr(response, "close", lambda: None)()
    assert ran == ["A", "request"]


def book(order_id: str) -> None:
    ran.append((order_id, current_lease() is not None))


ran: list[tuple[str, bool]] = []
book = idempotent_rq.idempotent(key="order_id")(book)


def test_jobs_use_it_too(redis_client: Any) -> None:
    ran.clear()
    queue = Queue(connection=redis_client, is_async=False)
    with override_store() as store:
        queue.enqueue(book, "A")
        queue.enqueue(book, "A")
        assert len(list(store.scan())) == 1
    assert ran == [("A", True)]
    assert redis_client.keys("*idem:*") == []


def test_no_thread_is_left_of_a_store_that_was_used(charge: Any) -> None:
    before = set(threading.enumerate())
    for _ in range(5):
        with override_store():
            charge.apply(("A",))
    wait_until(lambda: not [each for each in set(threading.enumerate()) - before if "heartbeat" in each.name])


def test_switched_off_every_call_runs_and_still_has_a_lease(keyed: Any, declare: Callable[..., Any]) -> None:
    seen: list[Any] = []

    def see(self: Any, order_id: str) -> str:
        seen.append((self.lease.fence, self.lease.derived_key("charge")))
        self.lease.check()
        self.lease.settle(order_id.lower(), using="default")
        return order_id

    task = declare(see)
    with inactive():
        assert not is_active()
        assert [task.apply(("A",)).get() for _ in range(2)] == ["a", "a"]
    assert is_active()
    [(fence, key), again] = seen
    assert (fence, key) == again
    assert fence == 0
    with override_store():
        task.apply(("A",))
    assert seen[-1][1] == key


def test_switched_off_functions_run_each_time_and_raise_what_they_raise() -> None:
    ran: list[str] = []

    @idempotent(store="redis://127.0.0.1:1/0", key="order_id")
    def book(order_id: str) -> None:
        ran.append(order_id)
        raise ValueError(order_id)

    with inactive():
        for _ in range(2):
            with pytest.raises(ValueError, match="A"):
                book("A")
    assert ran == ["A", "A"]


@pytest.fixture
def heard() -> Any:
    events: list[Event] = []
    add_hook(events.append)
    yield events
    remove_hook(events.append)


@pytest.mark.parametrize("block", [override_store, inactive])
def test_a_coroutine_function_may_be_decorated_and_runs_within_the_block(block: Callable[[], Block[Any]]) -> None:
    ran: list[str] = []

    @idempotent(store="redis://127.0.0.1:1/0", key="order_id")
    async def book(order_id: str) -> str:
        ran.append(order_id)
        return order_id

    class BookTests(unittest.IsolatedAsyncioTestCase):
        @block()
        async def test_a(self) -> None:
            assert await book("A") == await book("A") == "A"

    for _ in range(2):
        result = unittest.TestResult()
        unittest.defaultTestLoader.loadTestsFromTestCase(BookTests).run(result)
        assert result.wasSuccessful()
    assert len(ran) == (2 if block is override_store else 4)


def test_what_does_its_work_after_its_call_is_not_decorated() -> None:
    class Tests(unittest.TestCase):
        pass

    def rows() -> Iterator[None]:
        yield

    async def rows_async() -> AsyncIterator[None]:
        yield

    for function in (rows, rows_async):
        with pytest.raises(ConfigurationError, match="a with statement around its yield"):
            override_store()(function)
    with pytest.raises(ConfigurationError, match="IdempotencyTestMixin before its"):
        inactive()(Tests)


def test_what_is_switched_off_for_good_is_logged_and_each_run_is_an_event(
    charge: Any, charges: list[Any], heard: list[Event], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    with inactive():
        charge.apply(("A",))
    assert (heard, caplog.messages) == ([], [])
    set_active(False)
    try:
        assert not is_active()
        charge.apply(("A",))
        charge.apply(("A",))
    finally:
        set_active(True)
    assert [type(event) for event in heard] == [RanUnprotected] * 2
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert "set_active(False), which is for tests" in warnings[0]
    assert is_active()
    assert len(charges) == 3
    with override_store() as store:
        set_active(True)
        charge.apply(("A",))
        assert list(store.scan())
        for active in (False, False, True):
            set_active(active)
        charge.apply(("B",))
        assert len(list(store.scan())) == 2


SHOP = """
from celery import Celery
from celery_idempotent import IdempotentTask
from celery_idempotent.testing import set_active

app = Celery("shop", broker="memory://")
app.conf.idempotency_store = "memory://"
set_active(False)


@app.task(base=IdempotentTask)
def charge(order_id): ...
"""


@pytest.mark.parametrize("pool", ["solo", "prefork"])
def test_a_worker_whose_code_switches_the_guards_off_does_not_run(pool: str, tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(SHOP)
    command = [sys.executable, "-m", "celery", "-A", "shop", "worker", "-P", pool, "-c", "1"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert run.returncode != 0
    assert "Remove set_active(False) from what the worker imports" in run.stdout + run.stderr


class Shop(IdempotencyTestMixin, unittest.TestCase):
    """Runs in the tests below, and by itself."""

    charges: list[str]

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        cls.charges = []

        @idempotent(store="redis://127.0.0.1:1/0", key="order_id")
        def book(order_id: str) -> None:
            cls.charges.append(order_id)

        cls.book = staticmethod(book)
        book("class")

    def test_a(self) -> None:
        self.book("test")
        self.book("class")
        assert self.charges[:1] == ["class"]
        assert self.charges.count("class") == 1
        assert len(list(self.idempotency_store.scan())) == 2

    test_b = test_a

    @inactive()
    def test_off(self) -> None:
        count = len(self.charges)
        self.book("class")
        assert len(self.charges) == count + 1


@pytest.mark.parametrize("case", [unittest.TestCase, unittest.IsolatedAsyncioTestCase])
def test_a_class_to_which_the_mixin_would_do_nothing_is_refused(case: type[Any]) -> None:
    class Shared(case):
        pass

    for first in (case, Shared):
        with pytest.raises(ConfigurationError, match=r"write class Behind\(IdempotencyTestMixin, TestCase\)"):
            types.new_class("Behind", (first, IdempotencyTestMixin))
    types.new_class("Before", (IdempotencyTestMixin, Shared))


def test_each_test_of_a_class_begins_with_what_was_remembered_for_the_class() -> None:
    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromTestCase(Shop).run(result)
    assert result.testsRun == 3
    assert not [*result.errors, *result.failures], [*result.errors, *result.failures]
    assert Shop.charges.count("test") == 2
    assert is_active()
