"""How the adapter translates between Celery and the guard, seen in one process with a store in memory."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from amqp.exceptions import FrameSyntaxError
from billiard.einfo import ExceptionInfo
from botocore.exceptions import ClientError, EndpointConnectionError
from celery import Celery, Signature, chain, chord, group, signals, states
from celery.app.task import Context, Task
from celery.app.trace import build_tracer, trace_task
from celery.backends.base import BaseKeyValueStoreBackend, DisabledBackend
from celery.exceptions import Ignore, Reject, Retry, SoftTimeLimitExceeded, TimeLimitExceeded, WorkerLostError
from celery.result import AsyncResult, EagerResult, GroupResult
from celery.worker.request import Request
from kombu import Connection, Exchange, Producer, Queue, binding
from kombu.exceptions import OperationalError

from celery_idempotent import (
    Conflict,
    IdempotentTask,
    KeyReused,
    MissingKey,
    ResultUnavailable,
    StoreUnreachable,
    current_lease,
    events,
)
from celery_idempotent.celery import app as bindings
from celery_idempotent.celery import canvas as fanout
from celery_idempotent.celery import delivery, pool, request, unique
from celery_idempotent.celery import message as copies
from celery_idempotent.celery import task as listening
from celery_idempotent.celery.delivery import CeleryDelivery, Expired, takes_no_writes
from celery_idempotent.celery.message import DeliveryState
from celery_idempotent.core import reservations
from celery_idempotent.core.guard import Busy, Delivery, Guard, Ignored
from celery_idempotent.core.lease import HeldLease
from celery_idempotent.core.reservations import Reserved, Token, WaitingMessage
from celery_idempotent.stores import Claim, Lease, Outcome, Reason, Record, Refusal, Release, State, Verdict
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.stores.records import attempt_number, new_owner
from tests.support.waiting import wait_until


class FailingStore(MemoryStore):
    """A store in memory of which some verbs fail when they are told to."""

    failing: frozenset[str] = frozenset()

    def renew(self, leases: Any) -> Any:
        self._may("renew")
        return super().renew(leases)

    def acquire(self, claim: Claim) -> Any:
        self._may("acquire")
        return super().acquire(claim)

    def get(self, key: str) -> Any:
        self._may("get")
        return super().get(key)

    def mark_dispatched(self, key: str, task_id: str) -> bool:
        self._may("mark_dispatched")
        return super().mark_dispatched(key, task_id)

    def _may(self, verb: str) -> None:
        if verb in self.failing:
            raise StoreUnreachable(f"{verb} fails")


@pytest.fixture
def store() -> FailingStore:
    return FailingStore()


@pytest.fixture
def app(store: FailingStore) -> Iterator[Celery]:
    app = Celery("inside", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.update(idempotency_store=store, task_eager_propagates=True, result_serializer="json")
    yield app
    app.close()


def declare(app: Celery, fun: Callable[..., Any], **options: Any) -> Any:
    options.setdefault("idempotency", {"key": "order_id"})
    task = app.task(base=IdempotentTask, bind=True, shared=False, **options)(fun)
    app.finalize()
    return task


def raising(error: BaseException) -> Callable[..., Any]:
    def end(self: Any, order_id: str) -> None:
        raise error

    return end


def returning(self: Any, order_id: str) -> str:
    return order_id


def test_a_run_that_is_interrupted_from_the_keyboard_frees_the_key(app: Celery, store: FailingStore) -> None:
    with pytest.raises(KeyboardInterrupt):
        declare(app, raising(KeyboardInterrupt())).apply(("A",))
    [record] = store.scan()
    assert (record.state, record.reason) == (State.RELEASED, "shutdown")


@pytest.mark.parametrize("backend", ["cache+memory://", None])
@pytest.mark.parametrize(
    "make",
    [
        lambda app: AsyncResult("T1", app=app),
        lambda app: AsyncResult("T1", app=app, parent=AsyncResult("T0", app=app)),
        lambda app: GroupResult("G1", [AsyncResult("T1", app=app), AsyncResult("T2", app=app)]),
        lambda app: EagerResult("T1", 5, "SUCCESS"),
    ],
)
def test_the_result_of_another_task_is_kept_as_the_result_backend_would_keep_it(
    store: FailingStore, make: Callable[[Celery], Any], backend: str | None
) -> None:
    app = Celery("inside", broker="memory://", backend=backend, set_as_current=False)
    app.conf.update(idempotency_store=store, task_eager_propagates=True)
    results = []

    def dispatch(self: Any, order_id: str) -> Any:
        results.append(make(app))
        return results[-1]

    task = declare(app, dispatch)
    assert task.apply(("A",)).get() is results[0]
    assert task.apply(("A",)).get() == json.loads(json.dumps(results[0].as_tuple()))
    assert len(results) == 1
    app.close()


def test_a_body_that_gets_no_memory_fails_where_it_is_run_in_place(app: Celery, store: FailingStore) -> None:
    with pytest.raises(MemoryError):
        declare(app, raising(MemoryError())).apply(("A",))
    [record] = store.scan()
    assert (record.state, record.reason) == (State.RELEASED, "failed")


@pytest.fixture
def shared_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The memory that a worker shares with its children."""
    for name in ("_memory", "_cells", "slot", "pid", "_stopped"):
        monkeypatch.setattr(pool, name, getattr(pool, name))
    pool.prepare()
    yield
    events.remove_counter(pool.count)


def test_an_exit_reason_is_that_of_one_delivery(shared_memory: None) -> None:
    for reason in Reason:
        owner = new_owner()
        pool.set_exit_reason(owner, reason)
        assert pool.exit_reason(owner) is reason
        assert pool.exit_reason(new_owner()) is None


def test_an_exit_reason_that_another_overwrote_is_lost_and_not_mistaken(
    shared_memory: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "OWNERS", 1)
    first, second = new_owner(), new_owner()
    pool.set_exit_reason(first, Reason.REVOKED)
    pool.set_exit_reason(second, Reason.SHUTDOWN)
    assert (pool.exit_reason(first), pool.exit_reason(second)) == (None, Reason.SHUTDOWN)


def test_a_delivery_says_that_its_body_did_not_run_and_no_other_one_does(shared_memory: None) -> None:
    owner = new_owner()
    assert not pool.was_unrun(owner)
    pool.end_run(owner, begun=False)
    assert pool.was_unrun(owner)
    assert not pool.runs(owner)
    assert not pool.was_unrun(new_owner())


def test_a_delivery_says_while_its_body_runs_that_it_does(app: Celery, shared_memory: None) -> None:
    def look(self: Any, order_id: str) -> tuple[str, bool]:
        owner = self.lease.lease.owner
        return owner, pool.runs(owner) and not pool.was_unrun(owner)

    owner, ran = declare(app, look).apply(("A",)).get()
    assert ran
    assert not pool.runs(owner)
    assert not pool.was_unrun(owner)


def test_without_a_worker_there_is_no_exit_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "_memory", None)
    owner = new_owner()
    pool.begin_run(owner)
    assert not pool.runs(owner)
    pool.end_run(owner, begun=False)
    assert not pool.was_unrun(owner)
    pool.set_exit_reason(owner, Reason.REVOKED)
    assert pool.exit_reason(owner) is None


def test_the_same_task_that_ignored_itself_ignores_itself_again(app: Celery) -> None:
    task = declare(app, raising(Ignore()))
    states = [task.apply(("A",), task_id="T1").state for _ in range(2)]
    assert states == ["IGNORED", "IGNORED"]


def test_a_duplicate_of_what_left_its_failure_in_the_result_backend_fails_alike(app: Celery) -> None:
    task = declare(app, raising(Ignore()))
    task.apply(("A",), task_id="T1")
    app.backend.mark_as_failure("T1", ValueError("no A"))
    with pytest.raises(ValueError, match="no A"):
        task.apply(("A",), task_id="T2")


def test_a_call_of_apply_cannot_be_deferred(app: Celery, store: FailingStore) -> None:
    task = declare(app, raising(AssertionError("it ran")))
    key = f"idem:{task.name}::A"
    assert isinstance(store.acquire(Claim(key, "other", 60, 60, task_id="T1")), Lease)
    with pytest.raises(Conflict, match="cannot be deferred"):
        task.apply(("A",))


def test_a_call_of_apply_says_that_the_store_is_down_and_not_that_another_does_its_work(
    app: Celery, store: FailingStore
) -> None:
    store.failing = frozenset({"acquire"})
    task = declare(app, raising(AssertionError("it ran")), idempotency={"key": "order_id", "wait_timeout": 0.01})
    with pytest.raises(StoreUnreachable, match="acquire fails"):
        task.apply(("A",))


def test_a_call_of_apply_keeps_its_lease_beyond_the_hard_limit_which_nothing_enforces_there(app: Celery) -> None:
    def charge(self: Any, order_id: str) -> str:
        lease = current_lease()
        endless.append(lease is not None and lease.until == float("inf"))
        return "done"

    endless: list[bool] = []
    declare(app, charge, time_limit=1).apply(("A",))
    delivered(declare(app, charge, name="delivered", time_limit=1), "T1").answer()
    assert endless == [True, False]


@pytest.mark.parametrize("failure_ttl", [7200, 3600])
def test_a_failure_of_before_it_was_replaced_does_not_free_an_operation(
    app: Celery, store: FailingStore, monkeypatch: pytest.MonkeyPatch, failure_ttl: int
) -> None:
    """Of an earlier run under the same id; one of after it means that its end will not come.

    Of a short wait the end is waited for: it may be that of a retry, which another delivery of its id does not end.
    """

    def charge(self: Any, order_id: str) -> str:
        return "done"

    task = declare(app, charge, idempotency={"key": "order_id", "failure_ttl": failure_ttl, "wait_timeout": 0.1})
    lease = store.acquire(Claim(f"idem:{task.name}::A", "other", 60, 60, task_id="T1"))
    assert isinstance(lease, Lease)
    assert store.release(lease, Release(Reason.RETRY, failure_ttl, attempt_number(1, 0)))
    before = (datetime.now(timezone.utc) - timedelta(seconds=10)).isoformat()
    with monkeypatch.context() as patched:
        patched.setattr(app.backend, "get_task_meta", lambda *_, **__: {"status": "FAILURE", "date_done": before})
        with pytest.raises(Conflict, match="cannot be deferred"):
            task.apply(("A",))
    app.backend.mark_as_failure("T1", ValueError("no A"))
    if failure_ttl == 7200:
        assert task.apply(("A",)).get() == "done"
    else:
        with pytest.raises(Conflict, match="cannot be deferred"):
            task.apply(("A",))


@pytest.mark.parametrize("last", ["charge", "mail"])
@pytest.mark.parametrize("ignored", [False, True])
def test_a_task_that_is_replaced_is_no_longer_what_an_earlier_run_of_its_id_was(
    app: Celery, store: FailingStore, deliver: Callable[[Any], Any], ignored: bool, last: str
) -> None:
    """Not every store has fences that are times, by which a failure of after it was replaced is known.

    And a duplicate that met its record would have that failure, and not what replaced the task.
    """
    mail = app.task(returning, name="mail", bind=True, shared=False)

    def charge(self: Any, order_id: str) -> str:
        raise self.replace(chain(self.si("B"), self.si("A") if last == "charge" else mail.si("A")))

    task = declare(app, charge)
    app.backend.mark_as_failure("replaced", ValueError("no A"))
    task.apply_async(("A",), task_id="replaced", ignore_result=ignored)
    deliver(task)
    assert app.backend.get_task_meta("replaced", cache=False)["status"] == "PENDING"


def test_nothing_begins_anew_once_the_retry_of_what_was_replaced_by_itself_is_due(
    app: Celery, deliver: Callable[[Any], Any]
) -> None:
    """Another message of the task's id may come before its retry, and would repeat what was done before that."""

    def charge(self: Any, order_id: str) -> str:
        begun.append((self.request.replaced_task_nesting or 0, self.request.retries))
        if not self.request.replaced_task_nesting:
            raise self.replace(self.si(order_id))
        if not self.request.retries:
            raise self.retry(countdown=0)
        return "done"

    begun: list[tuple[int, int]] = []
    task = declare(app, charge)
    task.apply_async(("A",), task_id="replaced twice")
    deliver(task)
    task.apply_async(("A",), task_id="replaced twice")  # as by a publisher that has not heard of the first
    for _ in range(4):  # what replaces it, the second message, the retry, the copy of the second message
        deliver(task)
    assert begun == [(0, 0), (1, 0), (1, 1)]
    assert app.backend.get_task_meta("replaced twice", cache=False)["result"] == "done"


@pytest.mark.parametrize(
    ("options", "since", "waits"),
    [
        ({}, 599.0, True),
        ({}, 601.0, False),
        ({"result_ttl": 60}, 29.0, True),
        ({"result_ttl": 60}, 31.0, False),
        ({"on_conflict": "raise"}, 0.0, False),
    ],
)
def test_a_duplicate_waits_for_the_result_of_what_replaced_its_task_but_not_for_ever(
    app: Celery,
    store: FailingStore,
    received: Callable[[Any], request.IdempotentRequest],
    deliver: Callable[[Any], Any],
    options: dict[str, Any],
    since: float,
    *,
    waits: bool,
) -> None:
    """What is replaced may leave no result, or end unseen; and after its record's end a copy would run."""
    begun: list[str] = []

    @app.task(shared=False, name="other")
    def other() -> None: ...

    def charge(self: Any, order_id: str) -> None:
        begun.append(self.request.id)
        raise self.replace(other.si())

    task = declare(app, charge, idempotency={"key": "order_id", **options})
    first, second = f"first {options} {since}", f"second {options} {since}"
    task.apply_async(("A",), task_id=first)
    deliver(task)
    received(other)  # which runs elsewhere
    store.offset += since
    task.apply_async(("A",), task_id=second)
    deliver(task)
    assert app.backend.get_task_meta(second, cache=False)["status"] == ("PENDING" if waits else "FAILURE")
    if waits:
        app.backend.mark_as_done(first, "done")
        deliver(task)
        assert app.backend.get_task_meta(second, cache=False)["result"] == "done"
    assert begun == [first]


def test_a_duplicate_is_answered_at_once_where_it_needs_no_result_of_what_replaced_its_task_or_none_can_come(
    app: Celery, received: Callable[[Any], request.IdempotentRequest], deliver: Callable[[Any], Any]
) -> None:
    @app.task(shared=False, name="other")
    def other() -> None: ...

    def charge(self: Any, order_id: str) -> None:
        if order_id == "A":
            raise self.replace(other.si())
        raise Ignore("no result")

    def copies_after(order_id: str = "A", **options: Any) -> int:
        task.apply_async((order_id,), **options)
        deliver(task)
        left: int = app.connection_for_write().default_channel.queue_purge("celery")
        return left

    task = declare(app, charge)
    assert copies_after(task_id="replaced") == 1  # by the other
    assert copies_after(task_id="replaced") == 0
    assert copies_after(task_id="unread", ignore_result=True) == 0
    assert copies_after("B") == copies_after("B", task_id="of what was ignored") == 0
    assert app.backend.get_task_meta("of what was ignored", cache=False)["status"] == "FAILURE"


@pytest.mark.parametrize(("age", "retention", "left"), [(20.0, 0.0, 10.0), (31.0, 0.0, 0.0), (20.0, 60.0, 20.0)])
def test_a_duplicate_waits_for_half_of_the_life_of_its_record_also_where_its_store_does_not_report_that(
    app: Celery, age: float, retention: float, left: float
) -> None:
    found = delivered(declare(app, returning, idempotency={"key": "order_id", "result_ttl": 60}), "T2")
    found._prepare()
    record = Record("idem:charge::A", State.COMPLETED, task_id="half", age=age, retention=retention)
    assert found.due(Ignored("half", record, 0)) == left


def test_a_duplicate_with_callbacks_waits_for_no_result_where_none_is_kept(app: Celery) -> None:
    found = delivered(declare(app, returning), "T2")
    found.task.backend, found.request.callbacks = DisabledBackend(app), [found.task.si("B")]
    found._prepare()
    assert found.wants_result
    assert found.due(Ignored("T1", Record("idem:charge::A", State.COMPLETED, task_id="T1"), 0)) == 0.0


def test_a_duplicate_waits_for_a_result_backend_that_does_not_answer(
    app: Celery,
    received: Callable[[Any], request.IdempotentRequest],
    deliver: Callable[[Any], Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The result of what replaced its task may be there."""

    @app.task(shared=False, name="other")
    def other() -> None: ...

    def charge(self: Any, order_id: str) -> None:
        raise self.replace(other.si())

    task = declare(app, charge)
    task.apply_async(("A",), task_id="before the outage")
    deliver(task)
    received(other)
    task.apply_async(("A",), task_id="in the outage")
    with monkeypatch.context() as patched:
        patched.setattr(app.backend, "get_task_meta", Mock(side_effect=ConnectionError("refused")))
        deliver(task)
    assert app.backend.get_task_meta("in the outage", cache=False)["status"] == "PENDING"
    app.backend.mark_as_done("before the outage", "done")
    deliver(task)
    assert app.backend.get_task_meta("in the outage", cache=False)["result"] == "done"


def test_a_soft_limit_that_rings_as_a_task_is_replaced_is_the_tasks(
    app: Celery, deliver: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def rings(*_: Any, **__: Any) -> None:
        raise SoftTimeLimitExceeded

    seen: list[str] = []

    def charge(self: Any, order_id: str) -> str:
        try:
            self.replace(self.si(order_id))
        except SoftTimeLimitExceeded:
            seen.append("over")
        return "done"

    task = declare(app, charge)
    task.apply_async(("A",), task_id="rings")
    with monkeypatch.context() as patched:
        patched.setattr(app.backend, "get_task_meta", rings)
        deliver(task)
    assert seen == ["over"]


def test_a_task_is_replaced_by_itself_also_where_the_result_backend_takes_nothing(
    app: Celery, deliver: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise ConnectionError("no backend")

    def charge(self: Any, order_id: str) -> str:
        if not self.request.replaced_task_nesting:
            raise self.replace(self.si(order_id))
        return "done"

    task = declare(app, charge)
    task.apply_async(("A",), task_id="replaced unseen")
    with monkeypatch.context() as patched:
        patched.setattr(app.backend, "get_task_meta", refuse)
        deliver(task)
    assert "no backend" in caplog.text
    deliver(task)
    assert app.backend.get_task_meta("replaced unseen", cache=False)["result"] == "done"


def test_a_redelivery_of_what_was_not_kept_succeeds_where_no_result_backend_takes_results() -> None:
    app = Celery("inside", broker="memory://", set_as_current=False)
    app.conf.idempotency_store = "memory://"
    ran: list[str] = []

    def charge(self: Any, order_id: str) -> object:
        ran.append(order_id)
        return object()

    task = declare(app, charge)
    delivered(task, "T1").answer()
    assert delivered(task, "T1").answer() is None
    assert ran == ["A"]


class Argument(dict[str, str]):
    """An argument that can be referred to weakly."""


def test_what_a_delivery_had_is_gone_when_it_has_ended(app: Celery) -> None:
    """A worker may handle many large messages before Python's collector looks for cycles among old objects."""

    def charge(self: Any, order_id: str) -> str:
        return "done"

    task = declare(app, charge, idempotency={"key": None})

    def kept() -> int:
        return sum(isinstance(each, (CeleryDelivery, DeliveryState, HeldLease)) for each in gc.get_objects())

    order, weak = Argument(), []
    gc.collect()
    gc.disable()
    before = kept()
    try:
        weak.append(weakref.ref(order))
        trace_task(task, "ended", (order,), {}, {"id": "ended", "task": task.name, "is_eager": False}, app=app)
        del order
        assert [each() for each in weak] == [None]
        wait_until(lambda: kept() == before)  # the thread that renews leases may be looking at this one
    finally:
        gc.enable()


def delivered(task: Any, task_id: str) -> CeleryDelivery:
    """A delivery of a message."""
    sent = {"id": task_id, "args": ["A"], "kwargs": {}, "delivery_info": {}, "called_directly": False}
    return CeleryDelivery(task, Context(sent), task.run, ("A",), {})


def test_a_delivery_waits_for_the_store_for_less_than_the_limit_that_rings_first(
    app: Celery, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A limit that rings as it waits would end a task that has not run."""

    def patience(sent: object, own: tuple[Any, Any], pools: tuple[Any, Any]) -> float:
        monkeypatch.setattr(pool, "limits", pools)
        task.time_limit, task.soft_time_limit = own
        found = delivered(task, "T1")
        found.request.timelimit = sent
        found._prepare()
        return found.patience

    task = declare(app, raising(AssertionError("it ran")))
    none = (None, None)
    assert patience(None, none, none) == patience([None, None], none, none) == float("inf")
    assert patience([10, None], (20, None), (30, None)) == 8.0
    assert patience([None, 10], (None, 20), (None, 30)) == 8.0
    assert patience(None, (20, None), (30, None)) == patience(None, (None, 20), (None, 30)) == 16.0
    assert patience(None, none, (30, None)) == patience(None, none, (None, 30)) == 24.0
    assert patience([30, 20], none, none) == patience([20, 30], none, none) == 16.0


class UnnotedStart(unique.Reservation):
    """A reservation whose store cannot note that the body starts."""

    def begin(self, on_store_error: str, patience: float, stopping: Callable[[], bool]) -> StoreUnreachable:
        if on_store_error != "run":
            raise StoreUnreachable("it is away")
        return StoreUnreachable("it is away")

    def begin_later(self, publish_again: Callable[[Token | None], object]) -> None:
        self.publish_again = publish_again


@pytest.mark.parametrize(
    ("policy", "ends_with"),
    [
        ({"on_store_error": "wait"}, Reject),
        ({"on_store_error": "raise"}, StoreUnreachable),
        ({"on_store_error": "wait", "allow_early_ack": True}, StoreUnreachable),
    ],
)
def test_a_message_whose_start_the_store_cannot_note_goes_back_to_its_queue_if_it_can(
    app: Celery, store: FailingStore, monkeypatch: pytest.MonkeyPatch, policy: dict[str, Any], ends_with: Any
) -> None:
    monkeypatch.setattr(delivery._requeue_pauses, "wait", lambda: None)
    monkeypatch.setattr(unique, "reservation_of", lambda *_: UnnotedStart(Token("idem:~unique:index::~A", "me"), store))
    early = "allow_early_ack" in policy
    task = declare(app, raising(AssertionError("it ran")), idempotency=policy, acks_late=not early)
    with pytest.raises(ends_with) as ended:
        delivered(task, "T1").answer()
    assert getattr(ended.value, "requeue", True)


def test_the_message_that_follows_a_start_which_was_not_noted_is_as_the_first_was_sent(
    app: Celery, store: FailingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls were skipped for it, whatever its body has made of the arguments."""
    published: list[tuple[Any, Any, dict[str, Any]]] = []

    def charge(self: Any, parts: list[str], *, tip: dict[str, int]) -> None:
        parts.clear()
        tip.clear()

    reservation = UnnotedStart(Token("idem:~unique:index::~A", "me"), store)
    monkeypatch.setattr(unique, "reservation_of", lambda *_: reservation)
    task = declare(app, charge, idempotency={"key": None, "on_store_error": "run"})
    args, kwargs, info = (["a"],), {"tip": {"b": 1}}, {"exchange": "", "routing_key": "urgent", "priority": 5}
    sent = {"id": "T1", "args": args, "kwargs": kwargs, "delivery_info": info, "headers": {"tenant": "acme"}}
    CeleryDelivery(task, Context({**sent, "called_directly": False}), task.run, args, kwargs).answer()
    assert (args, kwargs) == (([],), {"tip": {}})
    monkeypatch.setattr(Task, "apply_async", lambda _, *given, **options: published.append((*given, options)))
    for token in (None, reservation.token):
        reservation.publish_again(token)
    alone, instead = [options.pop("headers") for _, _, options in published]
    assert alone == {"tenant": "acme"}
    assert unique.token_in(instead) == reservation.token
    assert instead["tenant"] == "acme"
    options = {"idempotency_key": None, "routing_key": "urgent", "priority": 5}
    assert published == [((["a"],), {"tip": {"b": 1}}, options)] * 2


def expired(task: Any, task_id: str, expires: str = "2001-01-01T00:00:00+00:00", **more: Any) -> CeleryDelivery:
    """A delivery of a message whose expiry has passed."""
    sent = {"id": task_id, "args": ["A"], "kwargs": {}, "delivery_info": {}, "expires": expires, **more}
    return CeleryDelivery(task, Context({**sent, "called_directly": False}), lambda order_id: "ran", ("A",), {})


def test_an_expired_message_of_what_was_never_begun_leaves_no_record(app: Celery, store: FailingStore) -> None:
    with pytest.raises(Expired):
        expired(declare(app, raising(AssertionError("it ran"))), "T1").answer()
    assert list(store.scan()) == []


def test_a_message_that_is_yet_to_expire_runs(app: Celery) -> None:
    tomorrow = datetime.now(timezone.utc) + timedelta(days=1)
    assert expired(declare(app, raising(AssertionError("not this"))), "T1", tomorrow.isoformat()).answer() == "ran"


def test_an_expired_message_of_what_its_id_has_done_gets_the_result_and_another_does_not(app: Celery) -> None:
    def charge(self: Any, order_id: str) -> str:
        return "done"

    task = declare(app, charge)
    task.apply(("A",), task_id="T1")
    assert expired(task, "T1").answer() == "done"
    with pytest.raises(Expired):
        expired(task, "T2").answer()


@pytest.mark.parametrize("task_id", ["T1", "T2"])
def test_an_expired_message_of_what_was_given_up_does_not_run(app: Celery, store: FailingStore, task_id: str) -> None:
    task = declare(app, raising(ValueError("no A")))
    with pytest.raises(ValueError, match="no A"):
        task.apply(("A",), task_id="T1")
    with pytest.raises(Expired):
        expired(task, task_id).answer()
    [record] = store.scan()
    assert record.state is State.RELEASED


def test_a_store_that_cannot_say_whether_an_expired_message_runs_is_asked_again(
    app: Celery, store: FailingStore
) -> None:
    store.failing = frozenset({"get"})
    with pytest.raises(Expired):
        expired(declare(app, raising(AssertionError("it ran"))), "T1").answer()
    store.failing = frozenset()
    [record] = store.scan()
    assert (record.state, record.reason) == (State.RELEASED, "revoked")


def waits_again(store: FailingStore, waiting: Claim) -> bool:
    """Whether a message that is sent again under its id waits for its turn, and is not dropped for a later copy.

    The broker has delivered it twice before it asks.
    """
    again = replace(waiting, owner=new_owner(), nesting=0, retries=0, copy=0, token="", redelivered=True)
    found = store.acquire(again)
    assert isinstance(found, Refusal)
    return found.verdict is Verdict.CONFLICT


@pytest.mark.parametrize("message", [{"copy": 1, "token": "x"}, {"nesting": 1}], ids=["a copy", "what replaced itself"])
def test_a_message_that_expires_while_it_waits_leaves_no_marks_of_its_copies(
    app: Celery, store: FailingStore, message: dict[str, Any]
) -> None:
    task = declare(app, raising(AssertionError("it ran")), idempotency={"key": "order_id"})
    own = {"headers": {copies.META_HEADER: message}}
    key, _ = task._binding.operation(None, "T2", ("A",), {}, None)
    waiting = task._binding.claim(key, new_owner(), task_id="T2", **message)
    assert isinstance(store.acquire(replace(waiting, owner=new_owner(), task_id="T1")), Lease)
    assert isinstance(store.acquire(waiting), Refusal)
    with pytest.raises(Expired):
        expired(task, "T2", **own).answer()
    assert waits_again(store, waiting)


@pytest.fixture
def deferring(app: Celery) -> CeleryDelivery:
    """A delivery that is about to stand aside."""
    task = declare(app, raising(AssertionError("it ran")))
    message = Context({"id": "T1", "args": ["A"], "kwargs": {}, "delivery_info": {}, "called_directly": False})
    delivery = CeleryDelivery(task, message, task.run, ("A",), {})
    delivery._prepare()
    return delivery


def test_a_soft_limit_that_hits_while_a_copy_is_published_does_not_have_the_message_acked_without_one(
    deferring: CeleryDelivery, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[bool] = []

    def publish(*_: Any, **__: Any) -> int:
        tries.append(True)
        if len(tries) == 1:
            raise SoftTimeLimitExceeded
        return 7

    monkeypatch.setattr(copies, "publish_copy", publish)
    with pytest.raises(Ignore, match="copy 7 of this message"):
        deferring._stand_aside(Busy(1.0))
    assert len(tries) == 2


def test_a_soft_limit_that_rings_between_the_grant_and_the_body_gives_the_lease_back(
    app: Celery, store: FailingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    acquire_now = Guard.acquire_now

    def rings(guard: Guard, delivery: Delivery) -> None:
        acquire_now(guard, delivery)
        raise SoftTimeLimitExceeded

    monkeypatch.setattr(Guard, "acquire_now", rings)
    with pytest.raises(SoftTimeLimitExceeded):
        delivered(declare(app, raising(AssertionError("it ran"))), "T1").answer()
    [record] = store.scan()
    assert (record.state, record.reason) == (State.RELEASED, "failed")


def test_a_soft_limit_that_hits_time_and_again_is_the_tasks(
    deferring: CeleryDelivery, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copies, "publish_copy", lambda *_, **__: (_ for _ in ()).throw(SoftTimeLimitExceeded()))
    with pytest.raises(SoftTimeLimitExceeded):
        deferring._stand_aside(Busy(1.0))


def test_a_broker_that_is_away_gets_the_message_back_after_a_pause(
    deferring: CeleryDelivery, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[bool] = []
    monkeypatch.setattr(delivery._requeue_pauses, "wait", lambda: waits.append(True))
    monkeypatch.setattr(copies, "publish_copy", lambda *_, **__: (_ for _ in ()).throw(OperationalError("away")))
    with pytest.raises(Reject) as caught:
        deferring._stand_aside(Busy(1.0))
    assert caught.value.requeue
    assert waits == [True]


def test_a_copy_on_a_channel_that_kombu_had_closed_itself_puts_the_message_back(
    deferring: CeleryDelivery, broker_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the connection to Redis breaks while kombu declares the queue; Celery drops a retry for it."""
    monkeypatch.setattr(delivery._requeue_pauses, "wait", lambda: None)
    with Connection(broker_url) as connection:
        channel = connection.channel()
        channel.close()
        monkeypatch.setattr(copies, "publish_copy", lambda *_, **__: Producer(channel).publish({}, routing_key="x"))
        with pytest.raises(Reject) as caught:
            deferring._stand_aside(Busy(1.0))
    assert caught.value.requeue


def test_that_no_copy_of_a_message_can_be_published_is_logged_once(
    deferring: CeleryDelivery, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(time, "sleep", lambda _: None)
    monkeypatch.setattr(copies, "publish_copy", lambda *_, **__: {}.no_such_name)  # type: ignore[attr-defined]
    for _ in range(3):
        deferring._stand_aside(Busy(1.0))
    assert [line.levelname for line in caplog.records if "it waits in its slot" in line.message] == ["ERROR"]


def test_that_the_broker_takes_no_retry_is_logged_once(
    app: Celery, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    publish, refusals = Task.retry, [OperationalError("OOM command not allowed")] * 3

    def refused(task: Any, *args: Any, **options: Any) -> Any:
        if refusals:
            raise Reject(refusals.pop(), requeue=False)
        return publish(task, *args, **options)

    monkeypatch.setattr(Task, "retry", refused)
    monkeypatch.setattr(listening, "sleep", lambda _: None)

    def flaky(self: Any, order_id: str) -> str:
        raise self.retry(countdown=0)

    with pytest.raises(Retry):
        declare(app, flaky).apply(("A",))
    assert [line.levelname for line in caplog.records if "waits in its slot" in line.message] == ["ERROR"]


def test_a_retry_goes_on_where_the_store_cannot_say_whether_the_lease_holds(app: Celery, store: FailingStore) -> None:
    def shaky(self: Any, order_id: str) -> int:
        if not self.request.retries:
            self.lease.deadline = 0.0
            store.failing = frozenset({"renew"})
            raise self.retry(countdown=0)
        return int(self.request.retries)

    assert declare(app, shaky).apply(("A",), throw=False).get() == 1


@pytest.mark.parametrize("refused", [ValueError("not JSON"), FrameSyntaxError("no UUID in a header")])
def test_a_retry_that_cannot_be_encoded_is_rejected_as_celery_does(
    app: Celery, monkeypatch: pytest.MonkeyPatch, refused: Exception
) -> None:
    """What AMQP has no form for would have none in the next run either; kombu takes it for a connection's end."""

    def rejecting(self: Any, **_: Any) -> None:
        raise Reject(refused, requeue=False)

    app.conf.broker_write_url = "amqp://localhost"
    monkeypatch.setattr(Task, "retry", rejecting)
    task = declare(app, retry_at_once)
    result = task.apply(("A",))
    assert (result.state, result.result.requeue) == ("REJECTED", False)


def retry_at_once(self: Any, order_id: str) -> None:
    raise self.retry()


@pytest.fixture
def received(app: Celery) -> Callable[[Any], request.IdempotentRequest]:
    """A function that returns the next message, as the worker's main process reads it."""

    def received(task: Any) -> request.IdempotentRequest:
        with app.connection_for_read() as connection, connection.SimpleQueue("celery") as queue:
            message = wait_until(lambda: queue.get(timeout=10), message="a message")
            message.ack()
        return request.IdempotentRequest(message, app=app, task=task)

    return received


def test_a_message_that_fails_before_its_task_is_called_gives_its_reservation_back(
    app: Celery,
    store: FailingStore,
    received: Callable[[Any], request.IdempotentRequest],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As where the result backend is away, in which Celery notes first that the task starts; the message is acked."""
    task, token = declare(app, returning, track_started=True, unique="order_id"), Token("idem:~unique:index::~A", "me")
    lease = store.acquire(token.claim(70.0))
    assert isinstance(lease, Lease)
    headers = {copies.META_HEADER: {copies.RESERVATION: replace(token, fence=lease.fence).header()}}
    app.send_task(task.name, ("A",), headers=headers)
    message = received(task)

    def refuse(*_: Any, **__: Any) -> None:
        raise ConnectionError("no result backend")

    monkeypatch.setattr(task.backend, "store_result", refuse)
    with pytest.warns(RuntimeWarning, match="no result backend"):
        error, *_ = trace_task(task, message.id, message.args, message.kwargs, message._request_dict, app=app)
    message.on_success((1, error, 0.0))
    assert message.acknowledged

    def is_free() -> bool:
        record = store.get(token.slot)
        return record is not None and record.state is State.RELEASED

    wait_until(is_free, 5)


@pytest.mark.parametrize("error", [WorkerLostError("of another task"), TimeLimitExceeded(30)], ids=["lost", "late"])
def test_a_body_that_raises_what_celery_has_for_the_end_of_a_child_fails_as_any_other(
    app: Celery, received: Callable[[Any], request.IdempotentRequest], error: Exception
) -> None:
    """As `get()` does for a task whose child was lost. Put back, the message would come at once, and for ever."""
    keeps = {"key": "order_id", "remember_failures": (type(error),)}
    task, answers = declare(app, raising(error), idempotency=keeps, acks_on_timeout=False), []
    for _ in range(2):  # the second replays
        task.delay("A")
        message = received(task)
        message._on_ack = lambda *_: answers.append("acked")
        message._on_reject = lambda *_: answers.append("rejected")
        message.send_event = lambda name, **fields: answers.append((name, fields.get("exception")))
        found, *_ = trace_task(task, message.id, message.args, message.kwargs, message._request_dict, app=app)
        message.on_success((1, found, 0.0))
    assert answers == ["acked", ("task-failed", repr(error))] * 2


@pytest.fixture
def deliver(app: Celery, received: Callable[[Any], request.IdempotentRequest]) -> Callable[[Any], Any]:
    """A function that has the next message delivered, as a worker does, and returns what the tracer says of it."""

    def deliver(task: Any) -> Any:
        sent = received(task)
        return trace_task(task, sent.id, sent.args, sent.kwargs, {**sent.request_dict, "is_eager": False}, app=app)

    return deliver


@pytest.mark.parametrize(
    ("error", "freed"),
    [
        (ValueError(), True),
        (Ignore(), True),
        (Reject(requeue=False), True),
        (Reject(requeue=True), False),
        (Retry(), False),
    ],
)
def test_an_error_before_the_task_is_called_frees_what_the_message_reserves_unless_it_goes_on(
    app: Celery, store: FailingStore, error: Exception, freed: bool
) -> None:
    task, token = declare(app, returning, unique="order_id"), Token("idem:~unique:index::~A", "me")
    lease = store.acquire(token.claim(70.0))
    assert isinstance(lease, Lease)
    task.push_request(**{copies.META_HEADER: {copies.RESERVATION: replace(token, fence=lease.fence).header()}})
    unique.end_unrun(task, error)
    record = store.peek(token.slot)
    assert record is not None
    assert (record.state is State.RELEASED) is freed


def test_a_duplicate_that_comes_when_a_retry_is_due_leaves_the_turn_to_it(
    app: Celery, deliver: Callable[[Any], Any]
) -> None:
    """Its own first attempt would be one more; and by the clock of another machine it comes sooner."""
    runs: list[tuple[str, int]] = []

    def flaky(self: Any, order_id: str) -> None:
        runs.append((self.request.id, self.request.retries))
        if not self.request.retries:
            raise self.retry(countdown=0)

    task = declare(app, flaky)
    for name in ("first", "duplicate"):
        app.send_task(task.name, ("A",), task_id=name)
    for _ in ("first", "duplicate", "retry of the first"):
        deliver(task)
    assert runs == [("first", 0), ("first", 1)]


def test_a_body_renews_nothing_any_more_that_its_retry_reserves(
    app: Celery, store: FailingStore, deliver: Callable[[Any], Any]
) -> None:
    """It would shorten it to what it has itself, and the retry may be due much later."""
    held: list[bool] = []

    def charge(self: Any, order_id: str) -> None:
        for _ in range(2):
            held.append(token.slot in {each.key for each in bindings.heartbeat.holdings()})
            self.retry(countdown=7200, throw=False)

    task, token = declare(app, charge, unique="order_id"), Token("idem:~unique:index::~A", "me", until="done")
    lease = store.acquire(token.claim(70.0))
    assert isinstance(lease, Lease)
    headers = {copies.META_HEADER: {copies.RESERVATION: replace(token, fence=lease.fence).header()}}
    app.send_task(task.name, ("A",), headers=headers)
    deliver(task)
    assert held == [True, False]


@pytest.mark.parametrize("until", ["start", "done"])
def test_calls_are_skipped_for_a_deferred_message_for_as_long_as_for_a_new_one(
    app: Celery, store: FailingStore, deliver: Callable[[Any], Any], until: str
) -> None:
    """It may be deferred again and again, for longer than a message is expected to wait."""
    task, token = declare(app, returning, unique="order_id"), Token("idem:~unique:index::~A", "me", until=until)
    assert isinstance(store.acquire(Claim(f"idem:{task.name}::A", "other", 60, 60, task_id="T1")), Lease)
    lease = store.acquire(token.claim(10.0))
    assert isinstance(lease, Lease)
    headers = {copies.META_HEADER: {copies.RESERVATION: replace(token, fence=lease.fence).header()}}
    app.send_task(task.name, ("A",), headers=headers)
    deliver(task)
    record = store.peek(token.slot)
    assert record is not None
    assert record.remaining > token.hold


if hasattr(Request, "_success_was_stored"):  # since Celery 5.7

    def test_a_success_of_an_earlier_run_under_its_id_has_no_message_of_a_lost_child_acked(
        app: Celery, received: Callable[[Any], request.IdempotentRequest]
    ) -> None:
        task = declare(app, raising(AssertionError("it ran")))
        for task_id in ("again", "new"):
            if task_id == "again":
                app.backend.mark_as_done(task_id, "of before")
            task.apply_async(("A",), task_id=task_id)
            message = received(task)
            app.backend.mark_as_done(task_id, "its own")
            assert bool(message._success_was_stored()) is (task_id == "new")


@pytest.mark.parametrize(
    ("done", "since"),
    [
        ("2026-11-26T12:00:00+00:00", True),
        ("2026-11-26T14:00:00+02:00", True),
        ("2026-11-26T11:59:59.9", False),
        (datetime(2026, 11, 26, 12), True),
        (datetime(2026, 11, 26, 11, tzinfo=timezone.utc), False),
        ("noon", False),
        (None, False),
    ],
)
def test_whether_a_result_was_stored_since_a_moment(app: Celery, done: object, since: bool) -> None:
    noon = datetime(2026, 11, 26, 12, tzinfo=timezone.utc).timestamp()
    assert bindings.is_done_since(app.backend, {"date_done": done}, noon) is since


@pytest.mark.nightly
@pytest.mark.thorough  # Celery before 5.7 has the time of its import as that of each result
@pytest.mark.parametrize("zone", ["UTC", "America/New_York", "Asia/Tokyo"])
def test_postgresql_has_the_time_of_a_result_in_the_zone_of_its_session(
    app: Celery, postgres_url: str, monkeypatch: pytest.MonkeyPatch, zone: str
) -> None:
    """As Celery writes it, with a zone into a column without one."""
    backend_url = f"db+{postgres_url.partition('?')[0].replace('postgresql:', 'postgresql+psycopg:')}"
    schema = postgres_url.rpartition("schema=")[2]
    options = {"connect_args": {"options": f"-c TimeZone={zone} -c search_path={schema}"}}
    app.conf.update(result_backend=backend_url, database_engine_options=options)
    backend, task_id, now = app._get_backend(), new_owner(), datetime.now(timezone.utc).timestamp()
    backend.mark_as_done(task_id, "done")
    meta = backend.get_task_meta(task_id)
    assert meta["date_done"].tzinfo is None
    assert [bindings.is_done_since(backend, meta, now + seconds) for seconds in (-60, 60)] == [True, False]
    monkeypatch.setattr(backend, "ResultSession", Mock(side_effect=OSError("the database is gone")))
    assert not bindings.is_done_since(backend, meta, now - 60)


@pytest.mark.parametrize("zone", ["UTC", "America/New_York", "Asia/Tokyo"])
def test_other_databases_have_the_time_of_a_result_in_the_apps_zone(app: Celery, tmp_path: Path, zone: str) -> None:
    """As Celery (>= 5.5) writes it, with a zone into a column without one."""
    from celery.backends.database.session import ResultModelBase

    app.conf.update(result_backend=f"db+sqlite:///{tmp_path}/results.sqlite", timezone=zone)
    backend, now = app._get_backend(), datetime.now(timezone.utc).timestamp()
    with backend.ResultSession() as session:  # Celery 5.4 makes the tables of the first database of a process alone
        ResultModelBase.metadata.create_all(session.get_bind())
    backend.mark_as_done("T1", "done")
    meta = backend.get_task_meta("T1")
    assert meta["date_done"].tzinfo is None
    assert [bindings.is_done_since(backend, meta, now + seconds) for seconds in (-60, 60)] == [True, False]


@pytest.fixture
def keeping(app: Celery, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The result backend, as a worker has it."""
    backend = app.backend
    monkeypatch.setattr(type(backend), "store_result", type(backend).store_result)
    for _ in range(2):
        bindings.keep_ended(backend)
    return backend


def test_a_redelivery_of_a_task_that_was_replaced_keeps_the_end_of_what_replaced_it(app: Celery, keeping: Any) -> None:
    """With `task_track_started`, Celery stores that it starts before the guard knows that it is done."""

    def replace(self: Any, order_id: str) -> None:
        raise self.replace(self.app.signature("other", args=(order_id,)))

    task, task_id = declare(app, replace, track_started=True), new_owner()
    sent = {"id": task_id, "task": task.name, "args": ("A",), "kwargs": {}, "delivery_info": {}}
    build_tracer(task.name, task, app=app)(task_id, ("A",), {}, sent)
    keeping.mark_as_failure(task_id, ValueError("of what replaced it"))
    sent["delivery_info"] = {"redelivered": True}
    build_tracer(task.name, task, app=app)(task_id, ("A",), {}, sent)
    assert task.AsyncResult(task_id).state == "FAILURE"


@pytest.mark.parametrize(
    ("before", "sent", "after"),
    [
        ("SUCCESS", {}, "SUCCESS"),
        ("FAILURE", {}, "STARTED"),
        ("FAILURE", {"delivery_info": {"redelivered": True}}, "FAILURE"),
        ("REVOKED", {"idempotency": {"copy": 1}}, "REVOKED"),
        ("RETRY", {"delivery_info": {"redelivered": True}}, "STARTED"),
        ("FAILURE", {"delivery_info": {"redelivered": True}, "task": "plain"}, "STARTED"),
    ],
)
def test_that_a_task_starts_is_stored_over_what_does_not_end_its_operation(
    app: Celery, keeping: Any, before: str, sent: dict[str, Any], after: str
) -> None:
    task, task_id = declare(app, returning), new_owner()
    app.task(name="plain", shared=False)(returning)
    keeping.store_result(task_id, ValueError() if before == "FAILURE" else None, before)
    keeping.store_result(task_id, {}, "STARTED", request=Context({"task": task.name, **sent}))
    assert keeping.get_task_meta(task_id, cache=False)["status"] == after


@pytest.mark.parametrize("error", [OSError("away"), SoftTimeLimitExceeded()])
def test_that_a_task_starts_is_stored_where_it_is_not_known_what_was_before(
    app: Celery, keeping: Any, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    task, stored, sent = declare(app, returning), Mock(), {"delivery_info": {"redelivered": True}}
    monkeypatch.setattr(keeping, "get_task_meta", raiser(error))
    monkeypatch.setattr(keeping, "_store_result", stored)
    with pytest.raises(SoftTimeLimitExceeded) if isinstance(error, SoftTimeLimitExceeded) else nullcontext():
        keeping.store_result(new_owner(), {}, "STARTED", request=Context({"task": task.name, **sent}))
    assert stored.called is isinstance(error, OSError)


def going_on(end: Callable[[Any], Any]) -> Callable[..., Any]:
    """Return a body that publishes its retry and does not leave with it."""

    def body(self: Any, order_id: str) -> Any:
        if self.request.retries:
            return "the retry"
        self.retry(countdown=0, throw=False)
        return end(self)

    return body


def fails(task: Any) -> Any:
    raise ValueError("too late")


@pytest.mark.parametrize(
    "end",
    [
        lambda task: "too late",
        fails,
        lambda task: task.lease.check(),
        lambda task: task.retry(throw=False),
        lambda task: task.replace(task.si("B")),
    ],
    ids=["returns", "fails", "asks whether it holds the lease", "retries again", "is replaced"],
)
def test_whatever_a_body_does_after_it_published_its_retry_the_retry_is_the_operation(
    app: Celery, store: FailingStore, deliver: Callable[[Any], Any], end: Callable[[Any], Any]
) -> None:
    task = declare(app, going_on(end))
    result = task.delay("A")
    assert deliver(task).info.state == "IGNORED"
    [record] = store.scan()
    assert (record.state, record.reason) == (State.RELEASED, "retry")
    assert result.state == "PENDING"
    assert deliver(task).retval == result.get() == "the retry"
    [record] = store.scan()
    assert record.state is State.COMPLETED
    with app.connection_for_read() as connection, connection.SimpleQueue("celery") as queue:
        assert queue.qsize() == 0


@pytest.mark.parametrize(
    ("leave", "state"),
    [
        (lambda task: task.retry(countdown=0), "RETRY"),
        (lambda task: task.replace(task.si("A")), "IGNORED"),
    ],
    ids=["retries", "is replaced"],
)
def test_what_a_body_publishes_to_go_on_is_the_operation_although_the_body_catches_what_that_raises(
    app: Celery, store: FailingStore, deliver: Callable[[Any], Any], leave: Callable[[Any], Any], state: str
) -> None:
    runs: list[str] = []

    def body(self: Any, order_id: str) -> Any:
        runs.append(order_id)
        if len(runs) == 1:
            try:
                leave(self)
            except Exception as error:  # noqa: BLE001 - it is this that must not count
                return f"logged {error}"
        return "done"

    task = declare(app, body)
    result = task.delay("A")
    assert deliver(task).info.state == state
    assert deliver(task).retval == result.get() == "done"
    [record] = store.scan()
    assert (len(runs), record.state) == (2, State.COMPLETED)


def test_the_copy_of_a_run_that_lost_its_lease_has_the_arguments_that_were_sent(
    app: Celery, store: FailingStore, deliver: Callable[[Any], Any]
) -> None:
    runs: list[list[str]] = []

    def body(self: Any, order_id: str, items: list[str]) -> int:
        runs.append(list(items))
        if len(runs) == 1:
            store.delete(self.lease.key)
            other = store.acquire(Claim(self.lease.key, new_owner(), 60.0, 60.0))
            assert isinstance(other, Lease)
            items.clear()
            store.release(other, Release(Reason.FAILED))
        return len(items)

    task = declare(app, body)
    task.delay("A", ["pen", "ink"])
    assert deliver(task).info.state == "IGNORED"
    assert deliver(task).retval == 2
    assert runs == [["pen", "ink"]] * 2


def test_a_call_in_place_leaves_its_arguments_alone(app: Celery) -> None:
    """To write them may have an effect, as of a query that is evaluated."""

    evaluated: list[object] = []

    class Query:
        def __reduce__(self) -> Any:
            evaluated.append(self)
            return Query, ()

    def body(self: Any, order_id: str, query: Query) -> str:
        return order_id

    task = declare(app, body, idempotency={"key": "order_id", "fingerprint": False})
    assert (task.apply(("A", Query())).get(), evaluated) == ("A", [])


def test_arguments_that_cannot_be_kept_are_those_of_the_copy(app: Celery) -> None:
    class Ringing:
        def __init__(self, error: Exception) -> None:
            self.error = error

        def __reduce__(self) -> Any:
            raise self.error

    assert delivery._kept((Ringing(ValueError()),), {}) is None
    with pytest.raises(SoftTimeLimitExceeded):
        delivery._kept((Ringing(SoftTimeLimitExceeded()),), {})


def test_a_retry_that_was_published_before_the_body_and_caught_there_is_not_its_end(
    app: Celery, store: FailingStore, deliver: Callable[[Any], Any]
) -> None:
    class Hasty(IdempotentTask):
        abstract = True

        def before_start(self, task_id: str, args: Any, kwargs: Any) -> None:
            for _ in range(2):  # by the second the delivery is known
                with suppress(Retry):
                    self.retry(countdown=0)

    runs: list[str] = []

    def body(order_id: str) -> str:
        runs.append(order_id)
        return "charged"

    task = app.task(base=Hasty, shared=False, max_retries=1, idempotency={"key": "order_id"})(body)
    app.finalize()
    task.delay("A")
    assert deliver(task).retval == "charged"
    assert runs == ["A"]
    [record] = store.scan()
    assert record.state is State.COMPLETED


@pytest.mark.parametrize(
    ("idempotency", "publish", "warned"),
    [
        ({"key": "order_id"}, lambda task: task.delay("A"), True),
        ({"key": "order_id"}, lambda task: task.si("A").apply_async(), True),
        ({}, lambda task: task.apply_async(("A",), task_id=task.request.id), True),
        ({"key": "order_id"}, lambda task: task.delay("B"), False),
        ({"key": "order_id"}, lambda task: task.delay(), False),
        ({"key": "order_id"}, lambda task: task.apply_async(("A",), idempotency_key="next"), False),
        ({"key": "order_id", "result_ttl": 0}, lambda task: task.delay("A"), False),
        ({"key": "order_id"}, lambda task: task.retry(throw=False), False),
        ({"key": "order_id"}, lambda task: task.replace(task.si("A")), False),
        ({}, lambda task: task.delay("A"), False),
    ],
    ids=[
        "again",
        "by a signature",
        "under its id",
        "another",
        "arguments that do not fit",
        "under a key",
        "one at a time",
        "a retry",
        "replaced",
        "without a key",
    ],
)
def test_a_body_that_publishes_its_own_operation_is_told_once_that_it_does_not_run(
    app: Celery,
    deliver: Callable[[Any], Any],
    caplog: pytest.LogCaptureFixture,
    idempotency: dict[str, object],
    publish: Callable[[Any], Any],
    warned: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(listening, "_repeating", set())

    def body(self: Any, order_id: str) -> None:
        for _ in range(2):
            with suppress(TypeError):
                publish(self)

    task = declare(app, body, idempotency=idempotency)
    task.delay("A")
    deliver(task)
    assert caplog.text.count("publishes itself under the key that it runs") == warned


def test_a_process_that_is_to_end_after_its_retry_was_published_ends(
    app: Celery, store: FailingStore, deliver: Callable[[Any], Any]
) -> None:
    def leave(task: Any) -> None:
        raise SystemExit

    task = declare(app, going_on(leave))
    task.delay("A")
    with pytest.raises(SystemExit):
        deliver(task)
    assert deliver(task).retval == "the retry"


def test_a_retry_that_is_raised_to_the_caller_of_apply_keeps_no_key(app: Celery, store: FailingStore) -> None:
    """Nobody carries it out: to wait for it, three minutes by default, is to wait for nothing."""
    task = declare(app, retry_at_once)
    for _ in range(2):
        with pytest.raises(Retry):
            task.apply(("A",))


def test_a_retry_that_goes_on_in_place_is_that_of_the_caller_of_apply(app: Celery, store: FailingStore) -> None:
    """Celery runs it once the body returns it, and publishes nothing."""

    def body(self: Any, order_id: str) -> Any:
        return "the retry" if self.request.retries else self.retry(countdown=0, throw=False)

    assert declare(app, body).apply(("A",), throw=False).get() == "the retry"
    [record] = store.scan()
    assert record.state is State.COMPLETED


@pytest.mark.parametrize(
    "reads",
    [lambda task: task.signature_from_request(), lambda task: task.retry(throw=False, countdown=60)],
    ids=["signature", "retry"],
)
def test_what_reads_the_request_before_the_body_does_not_take_the_guard_away(
    app: Celery, store: FailingStore, reads: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Audited(IdempotentTask):
        abstract = True

        def before_start(self, task_id: str, args: Any, kwargs: Any) -> None:
            reads(self)

    monkeypatch.setattr("celery.canvas.Signature.apply_async", lambda *args, **options: None)
    monkeypatch.setattr("celery.canvas.Signature.apply", lambda *args, **options: None)
    runs: list[str] = []

    def body(order_id: str) -> str:
        runs.append(order_id)
        return "charged"

    task = app.task(base=Audited, shared=False, idempotency={"key": "order_id"})(body)
    app.finalize()
    assert [task.apply(("A",)).get() for _ in range(2)] == ["charged"] * 2
    assert (runs, [record.state for record in store.scan()]) == (["A"], [State.COMPLETED])


def test_the_other_name_for_the_signature_of_a_request_goes_on_with_the_operation(app: Celery) -> None:
    def body(self: Any, order_id: str) -> list[Any]:
        made = (self.signature_from_request(), self.subtask_from_request())
        return [each.options["headers"][copies.KEY_HEADER] for each in made]

    task = declare(app, body)
    assert task.apply(("A",), idempotency_key="req-1").get() == ["req-1", "req-1"]


def test_a_direct_call_retries_and_makes_signatures_as_any_task(app: Celery) -> None:
    task = declare(app, retry_at_once)
    with pytest.raises(Retry):
        task("A")
    signature = task.signature_from_request(Context({"id": "T1", "args": ["A"], "kwargs": {}}))
    assert "idempotency" not in (signature.options.get("headers") or {})


def test_a_replacement_outside_of_any_delivery_is_celerys_own(app: Celery) -> None:
    published: list[bool] = []

    class Replacement:
        def delay(self) -> None:
            published.append(True)

    with pytest.raises(Ignore):
        declare(app, retry_at_once).on_replace(Replacement())
    assert published == [True]


def test_callbacks_are_dispatched_also_where_the_store_cannot_be_told(app: Celery, store: FailingStore) -> None:
    store.failing = frozenset({"mark_dispatched"})
    seen: list[Any] = []

    @app.task(shared=False)
    def collect(value: Any) -> None:
        seen.append(value)

    def charge(self: Any, order_id: str) -> str:
        return order_id

    app.conf.task_always_eager = True
    assert declare(app, charge).apply_async(("A",), link=collect.s()).get() == "A"
    assert seen == ["A"]


@pytest.mark.parametrize("key", ["order_id", None])
def test_callbacks_that_were_dispatched_are_not_dispatched_by_a_redelivery(
    app: Celery, store: FailingStore, key: str | None
) -> None:
    """Also where the key is the task id, so that no task id is told to the store apart from it."""
    seen: list[Any] = []

    @app.task(shared=False)
    def collect(value: Any) -> None:
        seen.append(value)

    @app.task(base=IdempotentTask, shared=False, idempotency={"key": key})
    def charge(order_id: str) -> str:
        return order_id

    app.conf.task_always_eager = True
    for _ in range(2):
        assert charge.apply_async(("A",), task_id="T1", link=collect.s()).get() == "A"
    assert seen == ["A"]


def reserved(task: Any) -> Token:
    """The token of a message that is published, where only the newest counts."""
    slot = task._binding.slot(task._binding.unique.key, ("A",), {}, None, ("any",))
    store, token = task._binding.guard.store, Token(slot, new_owner(), newest=True)
    found = reservations.reserve(store, token, WaitingMessage("T1"), lambda *_: "", time.monotonic() + 60)
    assert isinstance(found, Reserved)
    return replace(token, fence=found.lease.fence)


def test_an_older_message_does_not_run_after_a_newer_one_whose_retry_was_not_published(
    app: Celery, store: FailingStore
) -> None:
    task = declare(app, returning, unique={"key": "order_id", "on_duplicate": "replace"})
    older, newer = reserved(task), reserved(task)
    reservations.release(store, newer, Reason.STARTED)
    with pytest.raises(OSError, match="no broker"):
        unique.publish_next(task, newer, ("A",), {}, {"task_id": "T2"}, {}, Mock(side_effect=OSError("no broker")))
    record = store.get(older.slot)
    assert record is not None
    assert record.state is State.IN_PROGRESS, "the retry has it"
    assert reservations.replaced_by(store, older) == ""


def test_callbacks_of_what_ends_with_anothers_result_are_not_dispatched_by_a_redelivery(
    app: Celery, published: list[str]
) -> None:
    @app.task(shared=False)
    def collect(value: Any) -> None: ...

    task = declare(app, raising(Ignore()))
    task.apply(("A",), task_id="ends ignored")
    app.backend.store_result("ends ignored", "A", "SUCCESS")
    for _ in range(2):
        assert task.apply(("A",), task_id="its duplicate", link=collect.s()).get() == "A"
    assert len(published) == 1


def test_callbacks_that_the_body_took_away_are_not_dispatched_by_a_redelivery(app: Celery) -> None:
    seen: list[Any] = []

    @app.task(shared=False)
    def collect(value: Any) -> None:
        seen.append(value)

    def charge(self: Any, order_id: str) -> str:
        self.request.callbacks = None
        return order_id

    app.conf.task_always_eager = True
    task = declare(app, charge)
    for _ in range(2):
        assert task.apply_async(("A",), task_id="T1", link=collect.s()).get() == "A"
    assert seen == []


def test_callbacks_that_could_not_be_published_are_not_said_to_be_out(app: Celery, store: FailingStore) -> None:
    @app.task(shared=False)
    def collect(value: Any) -> None: ...

    def charge(self: Any, order_id: str) -> str:
        return order_id

    task = declare(app, charge)
    with pytest.raises(Exception, match="nope"):
        task.apply(("A",), task_id="T1", link=collect.s().set(serializer="nope"))
    [record] = store.scan()
    assert (record.state, record.dispatched) == (State.COMPLETED, frozenset())
    assert task.apply(("A",), task_id="T1", link=collect.s()).get() == "A"
    [record] = store.scan()
    assert record.dispatched == {"T1"}


def retry_with_other_arguments(self: Any, order_id: str, cents: int) -> int:
    if self.request.retries < 2:
        raise self.retry(args=(order_id, cents + 1), countdown=0)
    return cents


def test_the_arguments_that_are_compared_are_those_of_the_first_attempt(app: Celery, store: FailingStore) -> None:
    """Of a task that retries itself with others; what its producers send again are the first ones."""
    app.conf.task_eager_propagates = False  # or the first retry ends the call
    task = declare(app, retry_with_other_arguments)
    assert task.apply(("A", 1), task_id="T1").get() == 3
    [record] = store.scan()
    assert (record.state, record.task_id) == (State.COMPLETED, "T1")
    assert task.apply(("A", 1), task_id="T2").get() == 3
    for cents in (2, 3):
        with pytest.raises(KeyReused):
            task.apply(("A", cents), task_id="T3").get()


@pytest.mark.parametrize("further", [0, 1])
def test_a_retry_whose_arguments_give_another_key_goes_on_in_its_operation(
    app: Celery, store: FailingStore, further: int
) -> None:
    """As where the failed rest of a batch is tried again: what succeeded before must not be done for a duplicate."""
    app.conf.task_eager_propagates = False
    bodies: list[Any] = []

    def charge(self: Any, orders: list[str]) -> list[str]:
        bodies.append(orders)
        if len(orders) > 1:
            raise self.retry(args=(orders[1:],), countdown=0)
        if self.request.retries < 1 + further:
            raise self.retry(countdown=0)
        return orders

    task = declare(app, charge, idempotency={"key": "orders"})
    assert task.apply((["A", "B"],), task_id="T1").get() == ["B"]
    [record] = store.scan()
    assert (record.state, record.task_id) == (State.COMPLETED, "T1")
    assert task.apply((["A", "B"],), task_id="T2").get() == ["B"]
    assert bodies == [["A", "B"], *[["B"]] * (1 + further)]


def test_a_retry_with_another_key_goes_on_in_its_operation(app: Celery, store: FailingStore) -> None:
    app.conf.task_eager_propagates = False

    def charge(self: Any, order_id: str) -> str:
        if not self.request.retries:
            raise self.retry(idempotency_key="another", countdown=0)
        return order_id

    task = declare(app, charge)
    assert task.apply(("A",), task_id="T1").get() == "A"
    assert [(record.key, record.state) for record in store.scan()] == [(task.key_for("A"), State.COMPLETED)]


@pytest.mark.parametrize(("written", "number", "word"), [(2**63, 999_999, str(2**63)), (-1, 0, "-1"), ("a\0", 0, "")])
def test_the_header_of_a_message_is_read_such_that_every_store_can_keep_it(
    written: object, number: int, word: str
) -> None:
    """PostgreSQL would refuse to claim it, and the message wait for ever."""
    token = {"slot": "s", "owner": written, "until": "start"}
    header = {"copy": written, "nesting": written, "from": written, "within": [written], "unique": token}
    identity = copies.MessageHeaders.take(Context(headers={"idempotency": header}))
    assert (identity.copy, identity.nesting, identity.sender, identity.within) == (number, number, word, (word,))
    assert identity.reservation is None


@pytest.mark.parametrize(
    ("said", "takes_none"),
    [
        ("BUSY Redis is busy running a script.", True),
        ("Command # 1 (LLEN celery) of pipeline caused error: MISCONF Redis is configured to save", True),
        ("You can't write against a read only replica.", True),
        ("Link with MASTER is down and replica-serve-stale-data is set to 'no'.", True),
        ("this user has no permissions to run the 'lpush' command", True),
        ("WRONGTYPE Operation against a key holding the wrong kind of value", False),
    ],
)
def test_a_redis_that_takes_no_writes_for_now_is_told_from_one_that_refuses(said: str, takes_none: bool) -> None:
    assert takes_no_writes(OperationalError(said)) is takes_none


@pytest.mark.parametrize(
    ("code", "takes_none"),
    [
        ("RequestThrottled", True),
        ("ServiceUnavailable", True),
        ("ExpiredTokenException", True),
        ("AWS.SimpleQueueService.NonExistentQueue", True),
        ("InvalidParameterValue", False),
        ("AWS.SimpleQueueService.UnsupportedOperation", False),
    ],
)
def test_an_sqs_that_refuses_for_now_is_told_from_one_that_never_takes_a_message(code: str, takes_none: bool) -> None:
    """Celery rejects the message whose retry was refused, and kombu then deletes it."""
    assert takes_no_writes(ClientError({"Error": {"Code": code}}, "SendMessage")) is takes_none


def test_an_error_of_the_connection_to_sqs_is_no_answer_of_it() -> None:
    assert not takes_no_writes(EndpointConnectionError(endpoint_url="https://sqs"))


@pytest.mark.parametrize(
    ("written", "expires"), [("soon", None), (5, None), ("2027-01-01T00:00:00", "2027-01-01T00:00:00")]
)
def test_an_expiry_that_is_no_date_is_none(written: object, expires: str | None) -> None:
    request = Context(headers={"idempotency": {"expires": written}})
    copies.MessageHeaders.take(request)
    assert request.expires == expires


def test_a_key_of_a_type_that_only_its_producer_knows_is_said_to_be_one(app: Celery, store: FailingStore) -> None:
    task = declare(app, returning)
    for written in ('{"__type__": "money", "__value__": "9.99 EUR"}', "{"):
        with pytest.raises(MissingKey, match="Register its type with kombu's JSON here too"):
            task.apply(("A",), headers={"idempotency_key": {"json": written}})
    assert not list(store.scan())


def test_a_retry_with_other_arguments_meets_a_duplicate_of_its_first_attempt(app: Celery, store: FailingStore) -> None:
    """Which ran in its place: the retry is answered with its result, as any delivery of the operation."""
    published: list[Any] = []

    def charge(self: Any, order_id: str, cents: int) -> int:
        if self.request.id == "T1":
            published.append(self.signature_from_request(args=(order_id, 2), retries=1))
            raise ValueError
        return cents

    task = declare(app, charge)
    with pytest.raises(ValueError):
        task.apply(("A", 1), task_id="T1")
    assert task.apply(("A", 1), task_id="T2").get() == 1
    assert published[0].apply().get() == 1


def test_who_does_not_compare_arguments_does_not_compare_those_of_a_message_either(
    app: Celery, store: FailingStore
) -> None:
    app.conf.task_eager_propagates = False
    task = declare(app, retry_with_other_arguments)
    key = task.key_for("A", 1)
    message = {"fingerprint": "of an app that still compared them", "fingerprint_of": key}
    task.apply(("A", 1), task_id="T1", headers={"idempotency": message})
    [record] = store.scan()
    assert record.fingerprint == message["fingerprint"]
    store.delete(record.key)
    task.idempotency = {"key": "order_id", "fingerprint": False}
    task.__dict__.pop("_binding")
    task.apply(("A", 1), task_id="T1", headers={"idempotency": message})
    [record] = store.scan()
    assert (record.state, record.fingerprint) == (State.COMPLETED, "")


def test_a_result_backend_that_is_away_claims_no_chord(app: Celery) -> None:
    class Away:
        _chord_claim_extend_script = None

        def get_key_for_group(self, group_id: str, suffix: str) -> str:
            raise ConnectionError

    task = declare(app, retry_at_once)
    task.backend = Away()
    member = Context({"id": "T1", "group": "G1", "chord": {"task": "body"}})
    record = Record("K", State.COMPLETED)
    assert fanout.chord_claim(task, member, record) == 0
    assert fanout.chord_claim(task, Context({"id": "T1"}), record) == 0


@pytest.fixture
def bodies(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the bodies of chords are published with."""
    published: list[Any] = []
    monkeypatch.setattr(Signature, "delay", lambda self, value: published.append(value))
    return published


@pytest.fixture
def member(app: Celery) -> Iterator[Any]:
    """A task, of which T1 and T2 are the members of chord G1 on a backend that counts parts by number."""

    def charge(self: Any, order_id: str) -> str:
        return order_id

    task = declare(app, charge)
    app.conf.result_chord_join_timeout = 0.0
    task.backend.apply_chord(("G1", [app.AsyncResult("T1"), app.AsyncResult("T2")]), None)
    yield task
    task.backend.client.cache.clear()


class Died(BaseException):
    """Stands for the death of the process, in a place where only a debugger could stop it."""


BODY = {"task": "tests.body", "args": [], "kwargs": {}, "options": {"task_id": "B1"}, "chord_size": 2}


def deliver_member(task: Any, number: int) -> None:
    """Deliver the message of a member as a worker does."""
    request = {
        "id": f"T{number}",
        "group": "G1",
        "chord": {**BODY},
        "task": task.name,
        "args": (f"ORD-{number}",),
        "kwargs": {},
    }
    trace = build_tracer(task.name, task, app=task.app)
    trace(f"T{number}", (f"ORD-{number}",), {}, {**request, "delivery_info": {}})


def raiser(error: BaseException) -> Callable[..., Any]:
    """Return a function that raises the error, whatever it is called with."""

    def call(*args: Any, **kwargs: Any) -> None:
        raise error

    return call


def test_a_part_that_is_counted_is_returned_once_however_often_its_member_is_delivered(
    member: Any, bodies: list[Any]
) -> None:
    for number in (1, 1, 1, 2, 1, 2):
        deliver_member(member, number)
    assert bodies == [["ORD-1", "ORD-2"]]
    assert member.AsyncResult("B1").state == "PENDING"  # and no error


def failing(self: Any, order_id: str) -> str:
    if order_id == "ORD-1":
        raise ValueError(order_id)
    return order_id


def failing_at_first(self: Any, order_id: str) -> str:
    if not self.backend.get("seen"):
        self.backend.set("seen", b"1")
        raise ValueError(order_id)
    return order_id


MEMBERS_THAT_FAIL: dict[str, tuple[Callable[..., str], dict[str, Any], list[Any]]] = {
    "each time": (failing, {}, ["failed"]),
    "for good": (failing, {"remember_failures": (ValueError,)}, ["failed"]),
    "once": (failing_at_first, {}, [["ORD-1", "ORD-2"]]),
}


@pytest.fixture
def counted(app: Celery, bodies: list[Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """A function that declares a task whose chord's errors are noted beside the bodies."""

    def declare_member(fun: Callable[..., str], **options: Any) -> Any:
        policy = {"key": "order_id", **options}
        task = app.task(base=IdempotentTask, bind=True, shared=False, idempotency=policy, name="member")(fun)
        app.finalize()
        backend = task.backend
        backend.apply_chord(("G1", [app.AsyncResult("T1"), app.AsyncResult("T2")]), None)
        monkeypatch.setattr(type(backend), "chord_error_from_stack", lambda *_, **__: bodies.append("failed"))
        return task

    app.conf.result_chord_join_timeout = 0.0
    # As in a process that has had no delivery yet.
    monkeypatch.setattr(type(app.backend), "on_chord_part_return", BaseKeyValueStoreBackend.on_chord_part_return)
    yield declare_member
    app.backend.client.cache.clear()


@pytest.mark.parametrize("kind", MEMBERS_THAT_FAIL)
def test_a_member_that_fails_returns_its_part_once_however_often_it_is_delivered(
    counted: Callable[..., Any], bodies: list[Any], kind: str
) -> None:
    fun, options, expected = MEMBERS_THAT_FAIL[kind]
    task = counted(fun, **options)
    for number in (1, 1, 1, 2, 1, 2):
        deliver_member(task, number)
    assert bodies == expected


def test_a_member_whose_part_was_returned_as_a_failed_chains_end_returns_none_of_its_own(
    counted: Callable[..., Any], bodies: list[Any]
) -> None:
    task = counted(failing_at_first)
    last = task.si("ORD-1").set(task_id="T1", group_id="G1", chord={**BODY})
    for _ in range(2):  # a failure, for which Celery returns the part of the chain's last task; and a success
        trace = build_tracer(task.name, task, app=task.app)
        trace("T0", ("ORD-0",), {}, {"id": "T0", "chain": [dict(last)], "delivery_info": {}})
    deliver_member(task, 1)
    assert not bodies
    deliver_member(task, 2)
    assert bodies == [["ORD-1", "ORD-2"]]


def test_a_member_at_its_hard_limit_returns_its_part_once_however_often_it_is_delivered(
    counted: Callable[..., Any], received: Callable[[Any], request.IdempotentRequest], bodies: list[Any]
) -> None:
    task = counted(returning)
    for _ in range(2):
        task.apply_async(("ORD-1",), task_id="T1", group_id="G1", chord={**BODY})
        received(task).on_timeout(soft=False, timeout=1.0)
    assert not bodies
    deliver_member(task, 1)
    assert not bodies
    deliver_member(task, 2)
    assert bodies == [["ORD-1", "ORD-2"]]


def test_a_backend_that_can_neither_read_nor_note_what_it_has_counted_gets_the_parts(
    member: Any, bodies: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = member.backend

    def away_for_notes(verb: Callable[..., Any]) -> Callable[..., Any]:
        def call(key: bytes, *args: Any) -> Any:
            if b".part." in key:
                raise ConnectionError
            return verb(key, *args)

        return call

    for verb in ("get", "set"):
        monkeypatch.setattr(backend, verb, away_for_notes(getattr(backend, verb)))
    for number in (1, 2):
        deliver_member(member, number)
    assert bodies == [["ORD-1", "ORD-2"]]


def test_a_part_of_an_unguarded_member_is_counted_as_celery_does(app: Celery, member: Any, bodies: list[Any]) -> None:
    @app.task(shared=False)
    def plain(order_id: str) -> str:
        return order_id

    deliver_member(member, 1)
    deliver_member(plain, 2)
    assert bodies == [["ORD-1", "ORD-2"]]
    assert member.backend.get(member.backend.get_key_for_chord("G1", ".part.T1"))
    assert not member.backend.get(member.backend.get_key_for_chord("G1", ".part.T2"))


def test_a_part_that_a_dead_process_did_not_return_is_returned_by_the_next_delivery(
    member: Any, bodies: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as dying:
        dying.setattr(member.backend, "incr", raiser(Died()))
        with pytest.raises(Died):
            deliver_member(member, 1)
    monkeypatch.setattr(fanout, "RETURNING", -1.0)
    for number in (1, 1, 2):
        deliver_member(member, number)
    assert bodies == [["ORD-1", "ORD-2"]]


def test_a_chord_that_is_over_does_not_fail_for_a_member_whose_process_died_before_that_was_noted(
    member: Any, bodies: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    keep = member.backend.set

    def dies_noting(key: bytes, value: bytes) -> None:
        if b".part." in key:
            raise Died
        keep(key, value)

    deliver_member(member, 1)
    with monkeypatch.context() as dying:
        dying.setattr(member.backend, "set", dies_noting)
        with pytest.raises(Died):
            deliver_member(member, 2)
    monkeypatch.setattr(fanout, "RETURNING", -1.0)
    deliver_member(member, 2)
    assert bodies == [["ORD-1", "ORD-2"]]
    assert member.AsyncResult("B1").state == "PENDING"  # and no error


def test_a_part_that_a_living_process_may_be_returning_is_left_to_it(member: Any) -> None:
    message = Context({"id": "T1", "group": "G1", "chord": {"task": "body"}})
    settled = Record("K", State.COMPLETED, task_id="T1", age=0.5)
    assert fanout.chord_claim(member, message, settled) == pytest.approx(1.5)
    assert fanout.chord_claim(member, message, replace(settled, age=2.5)) == 0
    assert fanout.chord_claim(member, message, replace(settled, dispatched=frozenset({"T1"}))) == 0
    assert fanout.chord_claim(member, message, replace(settled, task_id="T0")) == 0, "a duplicate has its own part"


def test_of_several_deliveries_that_come_later_one_returns_a_part_at_a_time(
    app: Celery, member: Any, store: FailingStore
) -> None:
    message = Context({"id": "T1", "task": member.name, "group": "G1", "chord": {**BODY}})
    settled = Record("idem:member::ORD-1", State.COMPLETED, task_id="T1", age=60.0)
    claims = [fanout.chord_claim(member, message, settled) for _ in range(3)]
    assert claims[0] == 0.0
    assert all(claim > 1.9 for claim in claims[1:])
    store.failing = frozenset({"acquire"})  # the task is done, and must not fail for that
    assert fanout.chord_claim(member, message, settled) > 0
    store.failing = frozenset()
    assert fanout.chord_claim(member, Context({**vars(message), "id": "T2"}), replace(settled, task_id="T2")) == 0.0


def test_a_backend_that_cannot_read_the_group_of_a_chord_is_given_the_part(member: Any) -> None:
    message = Context({"id": "T1", "group": "G1", "chord": {"task": "body"}})
    assert not fanout.chord_is_over(member, message)
    member.backend.client.cache.clear()
    assert fanout.chord_is_over(member, message)
    member.backend.client.get = raiser(ConnectionError())
    assert not fanout.chord_is_over(member, message)


def test_what_was_dispatched_is_recorded_before_the_tasks_own_on_success_and_once(
    app: Celery, store: FailingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    happened: list[str] = []

    class Announcing(IdempotentTask):
        abstract = True

        def on_success(self, *args: Any) -> None:
            happened.append("on_success")

    class Inheriting(Announcing):
        abstract = True

        def on_success(self, *args: Any) -> None:
            super().on_success(*args)

    class Static(IdempotentTask):  # recorded after it, as where a task has none
        abstract = True

        @staticmethod
        def on_success(*args: Any) -> None:
            happened.append("on_success")

    def announce(key: str, task_id: str) -> bool:
        happened.append("recorded")
        return True

    def charge(order_id: str) -> None: ...

    monkeypatch.setattr(store, "mark_dispatched", announce)
    app.conf.task_always_eager = True
    for base in (Announcing, Inheriting, Static):
        task = app.task(base=base, shared=False, name=base.__name__)(charge)
        task.apply(("A",), link=app.signature("celery.accumulate"))
    assert happened == ["recorded", "on_success"] * 2 + ["on_success", "recorded"]


def test_a_key_of_none_is_no_key() -> None:
    headers: dict[str, Any] = {}
    listening.move_key_into_headers(headers=headers, properties={"idempotency_key": None})
    listening.move_key_into_headers(headers=headers, properties={})
    assert headers == {}


def test_a_key_for_a_plain_task_is_warned_of_once(
    app: Celery, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listening, "current_app", app)
    for name, base in (("plain", Task), ("guarded", IdempotentTask)):
        app.task(name=name, shared=False, base=base)(returning)
    app.finalize()
    for name in ("plain", "guarded", "of another app") * 2:
        app.send_task(name, ("A",), idempotency_key="req-1")
    [warning] = [message for message in caplog.messages if "idempotency_key" in message]
    assert warning.startswith("idempotency_key= changes nothing for plain, which is no idempotent task")


def test_what_is_dispatched_again_carries_the_same_ids(app: Celery) -> None:
    @app.task(shared=False)
    def step(*_: Any) -> None: ...

    def ids() -> list[Any]:
        message = Context(
            {
                "id": "T1",
                "callbacks": [
                    step.s(),
                    group(step.s(), step.s()),
                    step.s() | step.s(),
                    chord([step.s(), step.s()], step.s()),
                ],
            }
        )
        fanout.assign_callback_ids(message, app, 7)
        return [found for callback in message.callbacks for found in _ids(callback)]

    assert ids() == ids()
    assert len(ids()) == len(set(ids())) == 1 + 3 + 3 + 4


SHAPES: dict[str, tuple[Callable[[Any], Any], object]] = {
    "itself": (lambda s: s(1), [1]),
    "a chain": (lambda s: chain(s(1), s(2, then="the middle"), s(3)), [[[1], "middle"], 3]),
    "the middle": (lambda s: chain(s(1), s("middle")), [[1], "middle"]),
    "a body": (lambda s: chord([s(1), s(2)], s(3)), [[[1], [2]], 3]),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("key", [None, "order"])
def test_a_task_run_in_place_may_be_replaced_by_what_contains_it(app: Celery, shape: str, key: str | None) -> None:
    @app.task(base=IdempotentTask, bind=True, shared=False, idempotency={"key": key})
    def same(self: Any, *values: Any, order: str, then: str = "") -> Any:
        if not then:
            return list(values)
        return self.replace(SHAPES[then][0](lambda *args, **options: same.s(*args, order=order, **options)))

    assert same.apply(kwargs={"order": "A", "then": shape}).get() == SHAPES[shape][1]


AS_A_WHOLE: dict[str, Callable[[Any], Any]] = {
    "an id": lambda whole: whole.apply(task_id="same"),
    "an id that was set": lambda whole: whole.set(task_id="same").apply(),
    "a key": lambda whole: whole.apply(idempotency_key="K-1"),
    "a key in its headers": lambda whole: whole.apply(headers={"idempotency_key": "K-1", "tenant": "A"}),
}


@pytest.mark.parametrize("given", AS_A_WHOLE)
def test_what_a_chain_run_in_place_is_given_names_one_of_its_steps(app: Celery, given: str) -> None:
    runs: list[tuple[int, bool]] = []

    @app.task(base=IdempotentTask, bind=True, shared=False)
    def add(self: Any, x: int, y: int) -> int:
        runs.append((x, self.lease.key.endswith("K-1")))
        return x + y

    result = AS_A_WHOLE[given](chain(chain(add.s(1, 1), add.s(1)), add.s(1)))
    assert result.get() == 4
    keyed = "key" in given
    assert runs == [(1, keyed), (2, False), (3, False)]
    assert (result.id == "same") is not keyed


def test_a_task_run_in_place_that_is_replaced_by_itself_fails_as_that_does(app: Celery) -> None:
    @app.task(base=IdempotentTask, bind=True, shared=False)
    def same(self: Any, *, then: str = "") -> Any:
        if then:
            return self.replace(same.s())
        raise ValueError("no A")

    with pytest.raises(ValueError, match="no A"):
        same.apply(kwargs={"then": "fail"})


@pytest.fixture
def published() -> Iterator[list[str]]:
    """The task ids of the messages that were published."""
    ids: list[str] = []

    def publishing(headers: Any = None, **_: Any) -> None:
        ids.append(headers["id"])

    signals.before_task_publish.connect(publishing)
    yield ids
    signals.before_task_publish.disconnect(publishing)


def test_callbacks_have_the_same_ids_in_every_replay_of_a_run_and_new_ones_in_another_run_of_the_same_task_id(
    app: Celery, store: FailingStore, published: list[str]
) -> None:
    """A task with a fixed id, which beat publishes every night, has its callbacks run every night."""

    @app.task(base=IdempotentTask, shared=False)
    def notify(*_: Any) -> None: ...

    task = declare(app, returning)
    store.failing = frozenset({"mark_dispatched"})  # else a replay sets off nothing
    for _ in range(3):
        task.apply(("A",), task_id="nightly", link=notify.s())
    assert len(published) == 3
    assert len(set(published)) == 1
    [record] = store.scan()
    store.delete(record.key)
    for _ in range(2):
        task.apply(("A",), task_id="nightly", link=notify.s())
    assert published[3] == published[4] != published[0]


def test_an_unprotected_run_has_a_lease_with_the_fence_0(app: Celery, store: FailingStore) -> None:
    """A body that reads it must not fail for want of a store."""

    def reading(self: Any, order_id: str) -> Any:
        self.lease.check()
        return self.lease.fence, len(self.lease.derived_key("gateway"))

    app.conf.idempotency = {"on_store_error": "run"}
    task = declare(app, reading)
    store.failing = frozenset({"acquire", "get"})
    assert task.apply(("A",)).get() == (0, 32)


def test_callbacks_of_an_unprotected_run_have_ids_of_their_own(
    app: Celery, store: FailingStore, published: list[str]
) -> None:
    """Nothing tells one such run from another, so that no callback may be taken for that of another run."""

    @app.task(base=IdempotentTask, shared=False)
    def notify(*_: Any) -> None: ...

    app.conf.idempotency = {"on_store_error": "run"}
    task = declare(app, returning)
    store.failing = frozenset({"acquire"})
    for _ in range(2):
        task.apply(("A",), task_id="nightly", link=notify.s())
    assert len(set(published)) == 2


@pytest.mark.parametrize("message", [{"headers": {"idempotency": {"sending": "x"}}}, {}], ids=["by us", "by name"])
def test_the_errbacks_of_a_remembered_failure_run_once_for_each_message(app: Celery, message: dict[str, Any]) -> None:
    told: list[str] = []

    @app.task(shared=False, name="told")
    def by_id(task_id: str) -> None:
        told.append(task_id)

    @app.task(shared=False, name="told in place")
    def in_place(request: Any, error: Any, traceback: Any) -> None:
        told.append(request.id)

    app.conf.idempotency = {"remember_failures": (ValueError,)}
    task = declare(app, raising(ValueError("no A")))
    for task_id in ("first", "first", "second", "first", "second"):
        errbacks = [by_id.s(), in_place.s()]
        assert task.apply(("A",), task_id=task_id, link_error=errbacks, throw=False, **message).state == "FAILURE"
    assert told == ["first"] * 2 + ["second"] * 2


def test_the_errbacks_of_a_failure_that_is_not_remembered_run_with_each_run(app: Celery) -> None:
    told: list[str] = []

    @app.task(shared=False, name="told in place")
    def in_place(request: Any, error: Any, traceback: Any) -> None:
        told.append(request.id)

    task = declare(app, raising(ValueError("no A")))
    for _ in range(2):
        task.apply(("A",), task_id="first", link_error=[in_place.s()], throw=False)
    assert told == ["first"] * 2


@pytest.mark.parametrize("backend", ["cache+memory://", "disabled://"])
def test_a_duplicate_of_what_was_ignored_succeeds_if_nobody_reads_its_result_and_else_says_that_there_is_none(
    app: Celery, backend: str
) -> None:
    app.conf.result_backend = backend
    task = declare(app, raising(Ignore()))
    task.apply(("A",), ignore_result=True)
    assert task.apply(("A",), ignore_result=True).state == "SUCCESS"
    with pytest.raises(ResultUnavailable, match="ended without a result of its own"):
        task.apply(("A",))


def _ids(signature: Any) -> list[Any]:
    found = [signature.options["task_id"]]
    for name in ("tasks", "header"):
        for member in signature.kwargs.get(name) or []:
            found += _ids(member)
    body = signature.kwargs.get("body")
    return found + (_ids(body) if body is not None else [])


@pytest.mark.parametrize("overtaken", [False, True])
def test_the_lease_of_a_child_that_hit_its_hard_limit_is_released_once_the_child_is_gone(
    app: Celery,
    store: FailingStore,
    received: Callable[[Any], request.IdempotentRequest],
    monkeypatch: pytest.MonkeyPatch,
    *,
    overtaken: bool,
) -> None:
    """billiard says that it kills the child, and does it afterwards: until then its body goes on.

    Or it may be granted what it waits for, whose message has been put back, since another delivery had the operation.
    """
    looks: list[bool] = []
    lives = request.shared.is_alive
    monkeypatch.setattr(request.shared, "enforces_limits", True)
    monkeypatch.setattr(request.shared, "is_alive", lambda pid: looks.append(lives(pid)) or looks[-1])
    task = declare(app, raising(AssertionError("it ran")))
    task.delay("A")
    sent = received(task)
    heir = store.acquire(replace(sent.claim(), owner=new_owner())) if overtaken else None
    if not overtaken:
        assert isinstance(store.acquire(sent.claim()), Lease)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        sent.worker_pid = child.pid
        sent.on_timeout(soft=False, timeout=1.0)
        if isinstance(heir, Lease):
            store.release(heir, Release(Reason.FAILED))
            assert isinstance(store.acquire(sent.claim()), Lease)
        wait_until(lambda: looks.count(True) >= 3, message="the child to be looked at")
        [record] = store.scan()
        assert record.state is State.IN_PROGRESS
        child.kill()
        child.wait()
    wait_until(lambda: [record.state for record in store.scan()] == [State.RELEASED], message="the release")
    [record] = store.scan()
    assert record.reason == ("requeued" if overtaken else "failed")


@pytest.mark.parametrize("message", [{"copy": 1, "token": "x"}, {"nesting": 1}], ids=["a copy", "what replaced itself"])
def test_a_child_that_hits_its_hard_limit_while_it_waits_leaves_no_marks_of_its_copies(
    app: Celery,
    store: FailingStore,
    received: Callable[[Any], request.IdempotentRequest],
    monkeypatch: pytest.MonkeyPatch,
    message: dict[str, Any],
) -> None:
    monkeypatch.setattr(request.shared, "enforces_limits", True)
    task = declare(app, raising(AssertionError("it ran")), idempotency={"key": "order_id"})
    task.apply_async(("A",), headers={copies.META_HEADER: message})
    sent = received(task)
    claim = replace(sent.claim(), task_id=sent.id, **message)
    holder = store.acquire(replace(claim, owner=new_owner(), task_id="T1"))
    assert isinstance(holder, Lease)
    assert isinstance(store.acquire(claim), Refusal)
    assert store.release(holder, Release(Reason.RETRY, 60.0, 1))  # for which it waits as well
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        child.wait()
        sent.worker_pid = child.pid
        sent.on_timeout(soft=False, timeout=1.0)
    wait_until(lambda: not [each for each in threading.enumerate() if each.name == "celery-idempotent-release"])
    assert waits_again(store, claim)


@pytest.fixture
def end_at_limit(
    app: Celery, received: Callable[[Any], request.IdempotentRequest], monkeypatch: pytest.MonkeyPatch
) -> Callable[[Callable[[Any, str], object]], AsyncResult]:
    """A function that has a task hit its hard limit, and its child do this before it is killed; returns the result."""
    monkeypatch.setattr(request.shared, "enforces_limits", True)
    task, released = declare(app, raising(AssertionError("it ran"))), threading.Event()

    def end(last: Callable[[Any, str], object]) -> AsyncResult:
        result, sent = task.delay("A"), received(task)
        monkeypatch.setattr(sent, "_release", lambda reason: released.set())
        with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
            sent.worker_pid = child.pid
            sent.on_timeout(soft=False, timeout=7.0)
            last(task.backend, result.id)
            child.kill()
            child.wait()
        assert released.wait(20)
        wait_until(lambda: not [each for each in threading.enumerate() if each.name == "celery-idempotent-release"])
        return result

    return end


@pytest.mark.parametrize(("stored", "expected"), [(states.PENDING, states.FAILURE), (states.SUCCESS, states.SUCCESS)])
def test_a_child_that_has_its_failure_forgotten_as_it_is_killed_at_its_hard_limit_has_failed_all_the_same(
    end_at_limit: Callable[..., AsyncResult], stored: str, expected: str
) -> None:
    """As one that is about to be replaced by itself does. It may also have been replaced, and have ended since."""

    def last(backend: Any, task_id: str) -> None:
        assert backend.get_state(task_id) == states.FAILURE
        backend.store_result(task_id, "done", stored)

    result = end_at_limit(last)
    assert result.state == expected
    assert expected == states.SUCCESS or repr(result.result) == "TimeLimitExceeded(7.0)"


def test_a_child_that_hits_its_hard_limit_as_its_worker_ends_has_no_failure_but_celerys(
    end_at_limit: Callable[..., AsyncResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Celery stores none there, but before 5.6: the message comes again."""
    monkeypatch.setattr(request.worker_state, "should_terminate", 1)
    left: list[str] = []
    assert [end_at_limit(lambda backend, task_id: left.append(backend.get_state(task_id))).state] == left


@pytest.mark.parametrize("heir", ["runs", "has done it", "has failed", "is not known", "is itself", "is wanted"])
def test_a_child_that_hits_its_hard_limit_after_another_delivery_took_over_does_not_end_its_message(
    app: Celery,
    store: FailingStore,
    received: Callable[[Any], request.IdempotentRequest],
    shared_memory: None,
    heir: str,
) -> None:
    """As one that was stopped, with its worker, for longer than its lease; on Redis the message is the other's too.

    But not where it hangs after its own end, or the policy lets others run before its limit: that could go on for ever.
    """
    options = {"max_lease": 60} if heir == "is wanted" else {}
    task = declare(app, returning, idempotency={"key": "order_id", **options}, time_limit=90)
    result, sent = task.delay("A"), received(task)
    pool.begin_run(sent._owner)
    sent._on_ack, sent._on_reject = Mock(), Mock()
    lease = store.acquire(replace(sent.claim(), owner=new_owner()))
    assert isinstance(lease, Lease)
    if heir == "has failed":
        store.release(lease, Release(Reason.FAILED))
    if heir in ("has done it", "is itself"):
        store.settle(lease, Outcome(State.COMPLETED, b""), ttl=60)
    if heir == "is itself":
        pool.end_run(sent._owner, begun=True)
    store.failing = frozenset(["get"] if heir == "is not known" else [])
    try:
        raise TimeLimitExceeded(1.0)
    except TimeLimitExceeded:
        sent.on_failure(ExceptionInfo())  # in this order, as billiard tells it
    sent.on_timeout(soft=False, timeout=1.0)
    if heir in ("runs", "has done it"):
        assert (result.state, sent._on_ack.mock_calls) == ("PENDING", [])
        assert [call.args[-1] for call in sent._on_reject.mock_calls] == [True]
    else:
        assert (result.state, len(sent._on_ack.mock_calls)) == ("FAILURE", 1)


def test_where_no_thread_can_be_started_the_message_of_a_killed_child_is_put_back_all_the_same(
    app: Celery,
    received: Callable[[Any], request.IdempotentRequest],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Else its worker would have it for as long as it lives."""

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    task = declare(app, returning, idempotency={"key": "order_id"})
    task.delay("A")
    sent = received(task)
    sent._on_ack, sent._on_reject = Mock(), Mock()
    monkeypatch.setattr(threading.Thread, "start", start)
    try:
        raise WorkerLostError("signal 9")
    except WorkerLostError:
        sent.on_failure(ExceptionInfo())
    assert [call.args[-1] for call in sent._on_reject.mock_calls] == [True]
    assert "its child's lease runs out by itself: can't start new thread" in caplog.text


def test_a_killed_child_is_gone_or_still_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request, "KILL_TIMEOUT", 0.05)
    assert not request._is_gone(os.getpid())
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
    assert request._is_gone(child)


def test_a_pid_that_somebody_elses_process_has_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(pid: int, number: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "kill", denied)
    assert request._is_gone(1)


def test_native_delays_are_whole_seconds() -> None:
    pytest.importorskip("celery.utils.quorum_queues", reason="Celery before 5.5 has no native delays")
    app = Celery("quorum", broker="amqp://", set_as_current=False)
    app.conf.task_default_queue_type = "quorum"
    assert copies.copy_delay(app, 0, 3600) == 1
    assert isinstance(copies.copy_delay(app, 2, 3600), int)


def test_a_chord_whose_header_is_a_group_is_made_of_its_members_and_its_body(app: Celery) -> None:
    def charge(self: Any, order_id: str) -> str:
        return order_id

    task = declare(app, charge)
    canvas = chord([task.s("A")], task.s("B"))
    canvas.kwargs["header"] = group(task.s("A"), task.s("C"))  # as freezing leaves it
    assert [part.args for part in fanout.parts_of(canvas)] == [("A",), ("C",), ("B",)]


BITS = "0." * 27 + "1."


@pytest.mark.parametrize(
    ("exchange", "key", "queue"),
    [
        ("", "plain", "plain"),
        ("", "default", "default"),
        ("plain", "k", "plain"),
        ("feeds", "feed.import", "feeds"),
        ("celery_delayed_delivery", f"{BITS}k", "plain"),
        ("celery_delayed_delivery", f"{BITS}feed.import", "feeds"),
        ("east_celery_delayed_delivery", f"{BITS}feed.import", "feeds"),
        ("second", "x", "several"),
        ("all", "", "everybody"),
    ],
)
def test_a_message_that_is_published_again_stays_in_its_queue_or_is_known_to_leave_it(
    app: Celery, exchange: str, key: str, queue: str
) -> None:
    bindings = [binding(Exchange("first"), routing_key="x"), binding(Exchange("second"), routing_key="x")]
    app.conf.task_queues = [
        Queue("plain", Exchange("plain"), routing_key="k"),
        Queue("same key", Exchange("another"), routing_key="k2"),
        Queue("feeds", Exchange("feeds", "topic"), routing_key="feed.#"),
        Queue("mails", Exchange("feeds", "topic"), routing_key="mail.*"),
        Queue("several", bindings=bindings),
        Queue("everybody", Exchange("all", "fanout")),
    ]
    came = {
        name
        for name in [*app.amqp.queues, "default", "unknown"]
        if copies.came_from(app, {"exchange": exchange, "routing_key": key}, name)
    }
    assert came == {queue}


@pytest.mark.parametrize(
    ("options", "moved"),
    [
        ({}, False),
        ({"queue": "plain"}, False),
        ({"queue": "other"}, True),
        ({"routing_key": "k", "exchange": "plain"}, False),
        ({"routing_key": "k2"}, True),
        ({"exchange": "another"}, True),
    ],
)
def test_a_retry_that_leaves_its_queue_is_known_by_its_options(
    app: Celery, options: dict[str, Any], moved: bool
) -> None:
    app.conf.task_queues = [Queue("plain", Exchange("plain"), routing_key="k"), Queue("other", routing_key="k")]
    task = declare(app, returning)
    task.push_request(delivery_info={"exchange": "plain", "routing_key": "k"})
    try:
        assert unique._is_moved(task, options) is moved
    finally:
        task.pop_request()


@pytest.mark.thorough  # Celery before 5.5 has no native delays
@pytest.mark.parametrize("exchange", ["celery_delayed_delivery", "celery_delayed_0", "celery_delayed_27"])
def test_a_retry_that_the_broker_delays_again_stays_in_its_queue(app: Celery, exchange: str) -> None:
    """A delay of even seconds ends in a level of the delay, and the retry goes back by what all of them end in."""
    app.conf.update(broker_url="amqp://", task_default_queue_type="quorum")
    task = declare(app, returning)
    came = {"exchange": exchange, "routing_key": f"{BITS}k"}
    task.push_request(delivery_info=came)
    try:
        options = copies.destination(app, came)
        assert options["exchange"] == "celery_delayed_delivery"
        assert not unique._is_moved(task, options)
        assert unique._is_moved(task, {**options, "routing_key": "k2"})
    finally:
        task.pop_request()
