"""Coroutine functions: their bodies run in the caller's own task, and threads ask the store."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest

from celery_idempotent import (
    ConfigurationError,
    Conflict,
    KeyReused,
    MissingKey,
    StoreUnreachable,
    current_lease,
    functions,
    idempotent,
)
from celery_idempotent.core import binding, guard, lease
from celery_idempotent.core.binding import heartbeat
from celery_idempotent.core.heartbeat import Heartbeat
from celery_idempotent.events import Event, StoreFailed
from celery_idempotent.functions import THREADS, _beginning, _Threads
from celery_idempotent.stores import State, Store
from celery_idempotent.stores.memory import MemoryStore
from tests.support.functions.calls import PROMPTLY, names, told_in_pairs
from tests.support.servers import RedisServer
from tests.support.stores.benches import age, known, take
from tests.support.stores.sqlite_children import Child
from tests.support.unit.scripted import Door, ScriptedStore
from tests.support.waiting import wait_until

KEY = "idem:shop.charge::ORD-1"
Body = Callable[[Any], Awaitable[Any]]


@pytest.fixture
def memory() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def scripted() -> ScriptedStore:
    return ScriptedStore()


def counted(store: object, body: Body | None = None, **options: Any) -> tuple[Callable[..., Any], list[Any]]:
    """Return a guarded coroutine function of ``order``, and the list of the orders that its body was run for."""
    runs: list[Any] = []

    @idempotent(**{"store": store, "key": "order", "name": "shop.charge", **options})
    async def charge(order: Any, cents: int = 999) -> Any:
        runs.append(order)
        return await body(order) if body else len(runs)

    return charge, runs


async def until(condition: Callable[[], object]) -> None:
    """Wait in this task until something can be seen."""
    deadline = time.monotonic() + PROMPTLY
    while not condition():
        assert time.monotonic() < deadline, "it was never seen"
        await asyncio.sleep(0.005)


def run(main: Coroutine[Any, Any, Any]) -> Any:
    async def bounded() -> Any:
        return await asyncio.wait_for(main, 2 * PROMPTLY)

    return asyncio.run(bounded())


async def both(call: Callable[..., Any]) -> list[Any]:
    return [await call("ORD-1"), await call("ORD-1")]


# -- as functions ------------------------------------------------------------------------------------------------------


def test_a_key_runs_once_and_every_call_gets_its_result(store: Store, heard: list[Event]) -> None:
    charge, runs = counted(store)
    assert run(both(charge)) == [1, 1]
    assert runs == ["ORD-1"]
    assert names(heard) == ["Acquired", "Completed", "Replayed"]
    assert known(store, KEY).state is State.COMPLETED


def test_the_first_call_gets_what_a_duplicate_gets(memory: MemoryStore) -> None:
    async def body(order: str) -> tuple[str, ...]:
        return (order,)

    assert run(both(counted(memory, body)[0])) == [["ORD-1"], ["ORD-1"]]


def test_what_raises_gives_its_lease_back(store: Store, heard: list[Event]) -> None:
    error = ValueError("no")

    async def body(order: str) -> None:
        raise error

    charge, runs = counted(store, body)
    for _ in range(2):
        with pytest.raises(ValueError, match="no") as caught:
            run(charge("ORD-1"))
        assert caught.value is error
    assert len(runs) == 2
    assert names(heard) == ["Acquired", "Released"] * 2


class Order:
    """What can be referred to weakly."""


@pytest.mark.parametrize("kind", ["a function", "a coroutine"])
def test_what_a_body_had_that_raised_is_gone_once_that_was_caught(memory: MemoryStore, kind: str) -> None:
    """A server may catch a thousand errors before Python's collector looks for cycles among old objects."""
    had: list[weakref.ref[Order]] = []

    def fail(order: str) -> None:
        local = Order()
        had.append(weakref.ref(local))
        raise ValueError(order)

    async def fail_later(order: str) -> None:
        fail(order)

    guard = idempotent(key="order", store=memory)
    charge, later = guard(fail), guard(fail_later)

    async def call() -> None:
        with suppress(ValueError):
            await later("ORD-1")

    gc.disable()
    try:
        if kind == "a function":
            with suppress(ValueError):
                charge("ORD-1")
        else:
            run(call())
        wait_until(lambda: [each() for each in had] == [None])
    finally:
        gc.enable()


def test_a_final_failure_is_raised_again_without_a_run(memory: MemoryStore) -> None:
    async def body(order: str) -> None:
        raise ValueError("no", order)

    charge, runs = counted(memory, body, remember_failures=ValueError)
    for _ in range(2):
        with pytest.raises(ValueError, match="no") as caught:
            run(charge("ORD-1"))
        assert caught.value.args == ("no", "ORD-1")
    assert len(runs) == 1


def test_wrong_calls_are_told_as_those_of_functions_are(memory: MemoryStore) -> None:
    charge, runs = counted(memory)
    run(charge("ORD-1"))
    for error, call in ((MissingKey, charge("")), (KeyReused, charge("ORD-1", 1)), (TypeError, charge())):
        with pytest.raises(error):
            run(call)
    assert len(runs) == 1


@pytest.mark.parametrize("on_conflict", ["defer", "raise"])
def test_a_duplicate_of_a_run_is_told_at_once(memory: MemoryStore, on_conflict: str) -> None:
    async def body(order: str) -> str:
        with pytest.raises(Conflict) as caught:
            await charge(order)
        assert 0 < caught.value.remaining <= 60
        return "done"

    charge, _ = counted(memory, body, on_conflict=on_conflict, wait_timeout=3600)
    assert run(charge("ORD-1")) == "done"


@pytest.mark.parametrize("raises", [None, ValueError("late")], ids=["returns", "raises"])
def test_a_run_that_lost_its_lease_answers_with_what_was_settled(
    store: Store, heard: list[Event], raises: Exception | None
) -> None:
    async def body(order: str) -> str:
        if len(runs) == 2:
            return "theirs"
        age(store, KEY, 61)
        await charge(order)
        if raises:
            raise raises
        return "mine"

    charge, runs = counted(store, body)
    assert run(charge("ORD-1")) == "theirs"
    assert names(heard) == ["Acquired", "TakenOver", "Completed", "LeaseLost", "Replayed"]


@pytest.mark.parametrize(("says", "runs_it"), [("wait", False), ("raise", False), ("run", True)])
def test_a_store_that_cannot_serve(own_redis: Callable[..., RedisServer], says: str, runs_it: bool) -> None:
    server = own_redis()
    charge, runs = counted(server.url(0), on_store_error=says, wait_timeout=0.3)
    server.kill()
    if runs_it:
        assert run(both(charge)) == [1, 2]
    else:
        with pytest.raises(StoreUnreachable):
            run(charge("ORD-1"))
        assert runs == []


def test_a_lease_is_kept_for_as_long_as_the_body_runs(store: Store) -> None:
    async def body(order: str) -> str:
        lease = current_lease()
        assert lease is not None
        await until(lambda: lease.renewals >= 4)
        with pytest.raises(Conflict):
            await charge(order)
        return "done"

    charge, _ = counted(store, body, lease_ttl=2)
    assert run(charge("ORD-1")) == "done"


# -- the caller's own task ---------------------------------------------------------------------------------------------


def test_a_body_runs_in_the_task_of_its_caller(memory: MemoryStore) -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")

    async def body(order: str) -> str:
        assert asyncio.current_task() is caller
        assert variable.get() == "by the caller"
        variable.set("by the body")
        return threading.current_thread().name

    async def main() -> None:
        nonlocal caller
        caller = asyncio.current_task()
        variable.set("by the caller")
        assert await charge("ORD-1") == threading.current_thread().name
        assert variable.get() == "by the body"

    caller: object = None
    charge, _ = counted(memory, body)
    run(main())


def test_the_lease_is_that_of_the_code_and_of_what_it_starts(memory: MemoryStore) -> None:
    async def key() -> str | None:
        lease = current_lease()
        return lease.key if lease else None

    async def body(order: str) -> list[Any]:
        mine = await key()
        tasks = await asyncio.gather(key(), asyncio.to_thread(lambda: current_lease() is not None))
        nested = await inner("1") if order == "outer" else None
        loose = threading.Thread(target=lambda: seen.append(current_lease()))
        loose.start()
        loose.join()
        return [mine, *tasks, nested, await key()]

    seen: list[Any] = []
    inner, _ = counted(memory, body, name="inner")
    outer, _ = counted(memory, body, name="outer")
    of_outer, of_inner = "idem:outer::outer", "idem:inner::1"
    nested = [of_inner, of_inner, True, None, of_inner]
    assert run(outer("outer")) == [of_outer, of_outer, True, nested, of_outer]
    assert seen == [None, None]
    assert current_lease() is None


def test_what_a_body_leaves_running_has_its_lease_no_longer_than_the_body(memory: MemoryStore) -> None:
    """As what a web server reads after it, the next request of the connection among it."""

    async def watch() -> None:
        while not over.is_set():
            lease = current_lease()
            seen.append(lease.key if lease else None)
            await asyncio.sleep(0)

    async def body(order: str) -> None:
        tasks.append(asyncio.create_task(watch()))
        await until(lambda: seen)
        if order == "outer":
            await inner("1")
        if order == "fails":
            raise ValueError(order)

    async def main(order: str) -> tuple[Any, set[Any]]:
        with suppress(ValueError):
            await outer(order)
        first, length = seen[0], len(seen)
        await until(lambda: len(seen) > length + 2 * len(tasks))  # each of them in its turn
        over.set()
        await asyncio.gather(*tasks)
        return first, set(seen[length:])

    inner, _ = counted(memory, body, name="inner")
    outer, _ = counted(memory, body, name="outer")
    for order, left in (("alone", 1), ("fails", 1), ("outer", 2)):
        over, tasks, seen = asyncio.Event(), list[Any](), list[Any]()
        assert run(main(order)) == (f"idem:outer::{order}", {None})
        assert len(tasks) == left


def test_what_begins_in_the_context_of_a_body_that_has_ended_keeps_nothing_of_it(memory: MemoryStore) -> None:
    """As each request of a connection in that of the one before."""

    async def body(order: str) -> None:
        contexts.append(contextvars.copy_context())
        slot = contexts[-1][lease._current]
        assert isinstance(slot, lease.LeaseSlot)
        found.append((slot.lease is not None, slot.outer))

    async def main() -> None:
        for number in range(3):
            begin = contexts[-1].run if contexts else contextvars.copy_context().run
            await begin(asyncio.ensure_future, charge(f"ORD-{number}"))

    contexts: list[contextvars.Context] = []
    found: list[tuple[bool, Any]] = []
    charge, _ = counted(memory, body)
    run(main())
    assert found == [(True, None)] * 3


def test_tasks_beside_one_another_have_leases_of_their_own(memory: MemoryStore) -> None:
    async def body(order: str) -> str:
        await barrier()
        lease = current_lease()
        assert lease is not None
        return lease.key

    async def barrier() -> None:
        arrived.append(1)
        await until(lambda: len(arrived) == 50)

    async def main() -> list[str]:
        return list(await asyncio.gather(*(charge(f"ORD-{n}") for n in range(50))))

    arrived: list[int] = []
    charge, _ = counted(memory, body)
    assert run(main()) == [f"idem:shop.charge::ORD-{n}" for n in range(50)]


@pytest.mark.parametrize("how", ["wait_for", "cancel"])
def test_a_cancellation_reaches_the_body_and_gives_its_lease_back(store: Store, heard: list[Event], how: str) -> None:
    said: list[str] = []

    async def body(order: str) -> str:
        if said:
            return "second"
        entered.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            said.append("cancelled")
            raise
        return "never"

    async def main() -> None:
        nonlocal entered
        entered = asyncio.Event()
        task = asyncio.create_task(charge("ORD-1"))
        await entered.wait()
        if how == "wait_for":
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(task, 0.01)
        else:
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert task.cancelled()
        # Once it has been cancelled there is nothing left to wait for.
        assert known(store, KEY).state is State.RELEASED
        assert await charge("ORD-1") == "second"

    entered = asyncio.Event()
    charge, _ = counted(store, body)
    run(main())
    assert names(heard) == ["Acquired", "Released", "Acquired", "Completed"]
    assert heartbeat.holdings() == []


@pytest.mark.skipif(sys.version_info < (3, 11), reason="asyncio.timeout came with Python 3.11")
def test_a_timeout_around_a_call_is_its_callers(memory: MemoryStore) -> None:
    async def body(order: str) -> None:
        await asyncio.Event().wait()

    async def main() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await charge("ORD-1")
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0
        await asyncio.sleep(0)

    charge, _ = counted(memory, body)
    run(main())
    # The caller does not wait for a claim that was under way.
    wait_until(lambda: known(memory, KEY).state is State.RELEASED)


def test_a_body_may_refuse_to_be_cancelled(memory: MemoryStore) -> None:
    async def body(order: str) -> str:
        entered.append(1)
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        return "all the same"

    async def main() -> str:
        task = asyncio.create_task(charge("ORD-1"))
        await until(lambda: entered)
        task.cancel()
        return str(await task)

    entered: list[int] = []
    charge, _ = counted(memory, body)
    assert run(main()) == "all the same"
    assert known(memory, KEY).state is State.COMPLETED


# -- cancelled while the store is asked --------------------------------------------------------------------------------


def test_a_lease_that_is_granted_to_who_was_cancelled_is_given_back(
    scripted: ScriptedStore, heard: list[Event]
) -> None:
    door = scripted.block("acquire")

    async def main() -> None:
        task = asyncio.create_task(charge("ORD-1"))
        await until(door.entered.is_set)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task  # it does not wait for the store
        door.open()
        await until(lambda: scripted.count("release"))
        await until(lambda: known(scripted, KEY).state is State.RELEASED)
        assert runs == []
        assert await charge("ORD-1") == 1

    charge, runs = counted(scripted)
    run(main())
    assert told_in_pairs(heard)
    assert heartbeat.holdings() == []


def test_a_thread_that_cannot_be_started_gives_the_lease_back(
    memory: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def limited(thread: threading.Thread) -> None:
        if "heartbeat" in thread.name:
            raise RuntimeError("can't start new thread")
        start(thread)

    async def main() -> None:
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", limited)
            patched.setattr(binding, "heartbeat", Heartbeat())
            charge, runs = counted(memory)
            with pytest.raises(StoreUnreachable, match="can't start new thread"):
                await charge("ORD-1")
            assert binding.heartbeat.holdings() == runs == []
        assert known(memory, KEY).state is State.RELEASED
        assert await charge("ORD-1") == 1

    run(main())


def test_what_no_thread_could_be_started_for_takes_no_lease_once_one_can_be(
    memory: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pool of threads keeps what it was given when it fails, and would call that with the next."""

    def limited(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async def main() -> None:
        monkeypatch.setattr(functions, "_beginning", _Threads("begin"))
        charge, runs = counted(memory)
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", limited)
            with pytest.raises(StoreUnreachable, match="can't start new thread"):
                await charge("ORD-1")
        other, _ = counted(memory)
        await other("ORD-2")
        assert (memory.get(KEY), runs) == (None, [])
        assert await charge("ORD-1") == 1

    run(main())


def test_what_was_done_is_recorded_where_no_thread_can_be_started(
    memory: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def limited(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    @idempotent(store=memory, key="order_id")
    async def charge(order_id: str) -> int:
        monkeypatch.setattr(threading.Thread, "start", limited)
        return 1

    async def main() -> None:
        monkeypatch.setattr(functions, "_ending", _Threads("end", here=True))
        assert await charge("ORD-1") == 1
        monkeypatch.undo()
        assert [record.state for record in memory.scan()] == [State.COMPLETED]

    run(main())


def test_a_claim_that_fails_after_its_caller_was_cancelled_leaves_nothing_behind(
    scripted: ScriptedStore, heard: list[Event]
) -> None:
    door = Door()

    def go_down() -> None:
        door.pass_through()
        raise StoreUnreachable("down")

    async def main() -> None:
        task = asyncio.create_task(charge("ORD-1"))
        await until(door.entered.is_set)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        door.open()
        await until(lambda: any(isinstance(event, StoreFailed) for event in heard))
        assert scripted.count("acquire") == 1

    scripted.before("acquire", go_down)
    charge, runs = counted(scripted, on_store_error="raise")
    run(main())
    assert runs == []
    assert heartbeat.holdings() == []


def test_a_lease_that_came_just_before_the_cancellation_is_given_back(scripted: ScriptedStore) -> None:
    async def main() -> None:
        task = asyncio.create_task(charge("ORD-1"))
        await asyncio.sleep(0)
        wait_until(heartbeat.holdings)  # granted; and the loop, which is kept busy here, has not heard of it
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: known(scripted, KEY).state is State.RELEASED)

    charge, runs = counted(scripted)
    run(main())
    assert runs == []
    wait_until(lambda: heartbeat.holdings() == [])


@pytest.mark.nightly
@pytest.mark.parametrize("cancelled", ["before the answer", "after it"])
def test_a_lease_that_was_granted_too_late_is_given_back_by_who_is_cancelled_before_it_asks_again(
    scripted: ScriptedStore, monkeypatch: pytest.MonkeyPatch, cancelled: str
) -> None:
    door, lease_ttl = Door(), 2.0

    def answer_late() -> None:
        door.pass_through()
        time.sleep(lease_ttl)

    async def main() -> None:
        task = asyncio.create_task(charge("ORD-1"))
        await until(door.entered.is_set)
        if cancelled == "before the answer":
            task.cancel()
        door.open()
        await asyncio.sleep(lease_ttl + 0.5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: known(scripted, KEY).state is State.RELEASED)
        assert scripted.count("acquire") == 1

    monkeypatch.setattr(guard, "STORE_PAUSE", (60.0, 60.0))
    scripted.after("acquire", answer_late)
    charge, runs = counted(scripted, lease_ttl=lease_ttl)
    run(main())
    assert runs == []


def test_a_lease_is_renewed_while_the_loop_is_too_busy_to_hear_of_it(redis_url: str) -> None:
    async def main() -> Any:
        call = asyncio.create_task(charge("ORD-1"))
        await asyncio.sleep(0)
        [holding] = wait_until(heartbeat.holdings)
        wait_until(lambda: holding.renewals >= 4)  # longer than the lease lasts, and nothing else runs in this loop
        return await call

    charge, _ = counted(redis_url, lease_ttl=2)
    assert run(main()) == 1


def test_a_body_whose_loop_comes_too_late_to_the_answer_of_that_look_does_not_begin_without_another(
    scripted: ScriptedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    look_up, looks = functions._look_up, []

    async def others(order: str) -> str:
        return "theirs"

    def stall(overtaken: bool) -> None:
        scripted.down()
        time.sleep(0.6)
        if overtaken:
            twin, _ = counted(scripted.inner, others)
            with ThreadPoolExecutor(1) as thread:
                assert thread.submit(lambda: asyncio.run(twin("ORD-1"))).result() == "theirs"

    async def main() -> Any:
        loop, call = asyncio.get_running_loop(), asyncio.create_task(charge("ORD-1"))

        def looked_up(*args: Any) -> Any:
            scripted.up()  # not before: a renewal that came first would leave no doubt
            looks.append(look_up(*args))
            if len(looks) == 1:
                loop.call_soon_threadsafe(stall, True)  # before it hears of this thread's answer
            return looks[-1]

        monkeypatch.setattr(functions, "_look_up", looked_up)
        await asyncio.sleep(0)
        wait_until(heartbeat.holdings)
        stall(False)
        return await call

    charge, runs = counted(scripted, lease_ttl=0.5)
    assert run(main()) == "theirs"
    assert (runs, len(looks)) == ([], 2)


def test_a_body_does_not_begin_whose_loop_comes_too_late_to_each_answer(
    scripted: ScriptedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    look_up, looks = functions._look_up, []

    def stall() -> None:
        scripted.down()
        time.sleep(0.6)

    async def main() -> Any:
        loop, call = asyncio.get_running_loop(), asyncio.create_task(charge("ORD-1"))

        def looked_up(*args: Any) -> Any:
            scripted.up()  # not before: a renewal that came first would leave no doubt
            looks.append(args)
            found = look_up(*args)
            loop.call_soon_threadsafe(stall)  # before it hears of this thread's answer
            return found

        monkeypatch.setattr(functions, "_look_up", looked_up)
        await asyncio.sleep(0)
        wait_until(heartbeat.holdings)
        stall()
        return await call

    charge, runs = counted(scripted, lease_ttl=0.5)
    with pytest.raises(StoreUnreachable, match=f"came to .* {lease.LOOKS} times only when its lease of 0.5 s"):
        run(main())
    assert (runs, len(looks)) == ([], lease.LOOKS + 1)


@pytest.mark.parametrize("meanwhile", ["another ran", "nobody ran", "the store is down"])
def test_a_body_whose_loop_comes_to_it_when_its_lease_may_have_run_out_does_not_begin_without_a_look(
    scripted: ScriptedStore, meanwhile: str, heard: list[Event]
) -> None:
    async def main() -> Any:
        call = asyncio.create_task(charge("ORD-1"))
        await asyncio.sleep(0)
        wait_until(heartbeat.holdings)
        scripted.down()
        time.sleep(0.6)  # as when the machine is suspended; the loop has not heard yet that the lease was granted
        if meanwhile == "another ran":
            twin, _ = counted(scripted.inner, others)
            with ThreadPoolExecutor(1) as thread:
                assert thread.submit(lambda: asyncio.run(twin("ORD-1"))).result() == "theirs"
        if meanwhile != "the store is down":
            scripted.up()
        return await call

    async def others(order: str) -> str:
        return "theirs"

    charge, runs = counted(scripted, lease_ttl=0.5)
    if meanwhile == "the store is down":
        with pytest.raises(StoreUnreachable):
            run(main())
    else:
        assert run(main()) == {"another ran": "theirs", "nobody ran": 1}[meanwhile]
    assert len(runs) == (meanwhile == "nobody ran")
    wait_until(lambda: heartbeat.holdings() == [])


def test_who_is_cancelled_before_a_thread_looks_at_its_lease_gives_it_back(scripted: ScriptedStore) -> None:
    door = Door()

    async def main() -> None:
        call = asyncio.create_task(charge("ORD-1"))
        await asyncio.sleep(0)
        wait_until(heartbeat.holdings)
        scripted.down("renew")
        time.sleep(0.6)
        for _ in range(THREADS):
            _beginning.submit(door.pass_through)
        for _ in range(3):
            await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await until(lambda: known(scripted, KEY).state is State.RELEASED)

    charge, runs = counted(scripted, lease_ttl=0.5)
    try:
        run(main())
    finally:
        door.open()
    assert runs == heartbeat.holdings() == []


def test_who_is_cancelled_while_waiting_for_another_run_asks_no_more(scripted: ScriptedStore) -> None:
    take(scripted, KEY, task_id="another")

    async def main() -> None:
        task = asyncio.create_task(charge("ORD-1"))
        await until(lambda: scripted.count("acquire") >= 3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        asked = scripted.count("acquire")
        age(scripted.inner, KEY, 61)
        await asyncio.sleep(0.3)  # nothing comes of it, however long one looks
        assert scripted.count("acquire") <= asked + 1

    charge, runs = counted(scripted, on_conflict="wait", wait_timeout=3600)
    run(main())
    assert runs == []


def test_a_call_that_is_thrown_away_gives_back_what_it_would_hold(scripted: ScriptedStore) -> None:
    """As with a loop that is closed without its tasks being cancelled."""
    door = scripted.block("acquire")
    charge, runs = counted(scripted)
    loop = asyncio.new_event_loop()
    call = charge("ORD-1")

    async def begin() -> None:
        call.send(None)
        await until(door.entered.is_set)

    loop.run_until_complete(begin())
    call.close()
    loop.close()
    door.open()
    wait_until(lambda: scripted.count("release"))
    wait_until(lambda: known(scripted, KEY).state is State.RELEASED)
    assert runs == []


def test_a_body_that_is_thrown_away_gives_its_lease_back(scripted: ScriptedStore) -> None:
    entered: list[int] = []

    async def body(order: str) -> None:
        entered.append(1)
        await asyncio.get_running_loop().create_future()

    charge, _ = counted(scripted, body)
    loop = asyncio.new_event_loop()
    call = charge("ORD-1")

    async def begin() -> None:
        awaited = call.send(None)
        while not entered:
            await asyncio.wait([awaited])
            awaited = call.send(None)

    loop.run_until_complete(begin())
    call.close()
    loop.close()
    wait_until(lambda: known(scripted, KEY).state is State.RELEASED)


# -- while the end is recorded -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("closed", [False, True], ids=["the loop goes on", "the loop is closed"])
def test_an_end_is_recorded_though_its_caller_is_cancelled(
    scripted: ScriptedStore, heard: list[Event], caplog: pytest.LogCaptureFixture, closed: bool
) -> None:
    door = scripted.block("settle")

    async def main() -> None:
        task = asyncio.create_task(charge("ORD-1"))
        await until(door.entered.is_set)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        if not closed:
            door.open()
            await until(lambda: known(scripted, KEY).state is State.COMPLETED)

    charge, runs = counted(scripted)
    run(main())
    door.open()
    wait_until(lambda: known(scripted, KEY).state is State.COMPLETED)
    assert run(charge("ORD-1")) == 1
    assert runs == ["ORD-1"]
    assert names(heard) == ["Acquired", "Completed", "Replayed"]
    assert not [record for record in caplog.records if record.name in ("concurrent.futures", "asyncio")]


def test_a_result_is_recorded_though_the_process_ends_right_after(redis_url: str) -> None:
    """The caller is cancelled in the last moment, and the script is at its end."""
    script = f"""
import asyncio
from celery_idempotent import idempotent, open_store
store = open_store({redis_url!r})
settle = store.settle

def slow(*args, **options):
    import time
    ended.set()
    time.sleep(0.5)
    settle(*args, **options)

store.settle = slow

@idempotent(store=store, key="order", name="shop.charge")
async def charge(order, cents=999):
    return "charged"

async def main():
    global ended
    import threading
    ended = threading.Event()
    task = asyncio.create_task(charge("ORD-1"))
    while not ended.is_set():
        await asyncio.sleep(0.001)
    task.cancel()

asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    charge, runs = counted(redis_url)
    assert run(charge("ORD-1")) == "charged"
    assert runs == []


@pytest.mark.nightly
def test_a_loop_in_a_thread_goes_on_when_the_main_thread_has_ended(redis_url: str) -> None:
    """Pools of threads take no work any more then, and the body has run."""
    script = f"""
import asyncio, threading
from celery_idempotent import idempotent

@idempotent(store={redis_url!r}, key="order", name="shop.charge")
async def charge(order, cents=999):
    while threading.main_thread().is_alive():
        await asyncio.sleep(0.001)
    if order == "ORD-3":
        raise ValueError("declined")
    return "charged"

async def main():
    print([await charge("ORD-1"), await charge("ORD-1"), await charge("ORD-2")])
    try:
        await charge("ORD-3")
    except ValueError as error:
        print(error)

threading.Thread(target=lambda: asyncio.run(main())).start()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "['charged', 'charged', 'charged']\ndeclined\n", "")
    charge, runs = counted(redis_url)
    assert run(charge("ORD-1")) == run(charge("ORD-2")) == "charged"
    assert runs == []


# -- many --------------------------------------------------------------------------------------------------------------


@pytest.mark.nightly
@pytest.mark.thorough
def test_a_thousand_calls_beside_one_another_run_once_each(redis_url: str) -> None:
    async def main() -> None:
        keys = [n % 1000 for n in range(1500)]
        results = await asyncio.gather(*(charge(f"ORD-{n}") for n in keys))
        assert results[:500] == results[1000:]
        assert len(set(results)) == 1000

    async def body(order: str) -> str:
        await asyncio.sleep(0)
        return order

    charge, runs = counted(redis_url, body, on_conflict="wait", wait_timeout=PROMPTLY)
    run(main())
    assert sorted(runs) == sorted(f"ORD-{n}" for n in range(1000))
    ours = [
        thread
        for thread in threading.enumerate()
        if thread.name.startswith(("celery-idempotent-begin", "celery-idempotent-end"))
    ]
    assert 0 < len(ours) <= 2 * THREADS


def test_those_who_wait_keep_nobody_from_beginning_or_ending(store: Store) -> None:
    """The body of what they wait for calls another guarded function: twice as many wait as there are threads."""
    waiting = 2 * THREADS + 5

    async def body(order: str) -> str:
        await until(lambda: conflicts() >= waiting)
        return str(await inner(order))

    async def inner_body(order: str) -> str:
        return f"inner {order}"

    async def main() -> list[Any]:
        return list(await asyncio.gather(*(outer("ORD-1") for _ in range(1 + waiting))))

    def conflicts() -> int:
        return names(heard).count("Conflicted")

    from celery_idempotent import events

    heard: list[Event] = []
    events.add_hook(heard.append)
    try:
        outer, runs = counted(store, body, name="outer", on_conflict="wait", wait_timeout=3600)
        inner, _ = counted(store, inner_body, name="inner")
        assert set(run(main())) == {"inner ORD-1"}
    finally:
        events.remove_hook(heard.append)
    assert runs == ["ORD-1"]


@pytest.mark.nightly
def test_those_who_wait_for_a_store_that_is_down_keep_no_thread(scripted: ScriptedStore) -> None:
    other, _ = counted(MemoryStore(), name="shop.other")
    down, runs = counted(scripted, wait_timeout=3600)
    scripted.down("acquire")

    async def main() -> None:
        tasks = [asyncio.create_task(down(f"ORD-{n}")) for n in range(2 * THREADS)]
        await until(lambda: scripted.count("acquire") >= 1)
        assert await other("ORD-1") == 1
        scripted.up()
        await asyncio.gather(*tasks)

    run(main())
    assert len(runs) == 2 * THREADS


def test_loops_may_follow_one_another_and_run_beside_one_another(memory: MemoryStore) -> None:
    async def many(start: int) -> None:
        await asyncio.gather(*(charge(f"ORD-{n}") for n in range(start, start + 20)))

    charge, runs = counted(memory)
    for start in (0, 10):
        run(many(start))
    with ThreadPoolExecutor(4) as threads:
        for result in [threads.submit(run, many(start)) for start in (100, 200, 300, 400)]:
            result.result(PROMPTLY)
    assert len(runs) == len(set(runs)) == 110


def test_a_child_of_a_process_that_called_may_call(store_url: str, forked: Callable[..., Child]) -> None:
    charge, _ = counted(store_url)
    assert run(charge("ORD-1")) == 1
    child = forked(lambda: run(charge("ORD-1")), lambda: run(charge("ORD-2")))
    assert [child.said(), child.said()] == ["1", "2"]
    child.end()
    assert run(charge("ORD-2")) == 2


def test_without_a_loop_of_asyncio_nothing_is_asked_for(scripted: ScriptedStore) -> None:
    charge, _ = counted(scripted)
    with pytest.raises(ConfigurationError, match=r"asyncio's event loop, got none.*such as Trio.*\. Run it on asyncio"):
        charge("ORD-1").send(None)
    assert scripted.calls == []


def test_what_a_body_leaves_to_be_awaited_is_no_result(memory: MemoryStore) -> None:
    async def work() -> str:
        return "done"

    async def body(order: str) -> Any:
        return work()

    charge, _ = counted(memory, body)
    with pytest.raises(ConfigurationError, match=r"got coroutine.*Decorate the coroutine function"):
        run(charge("ORD-1"))
    assert known(memory, KEY).state is State.RELEASED
