"""Deliveries whose bodies are coroutines: run in the caller's own task, while threads ask the store."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import os
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

from .answers import Answer, Delivery, Ran
from .beginning import Beginning
from .current import running
from .guard import Guard
from .holding import Holding

__all__ = ["run_guarded"]

T = TypeVar("T")

#: Threads that ask stores for coroutines, at most: so many in which calls begin, and as many in which they end, for
#: which those that begin must not keep anybody waiting.
THREADS = 32


class _Threads:
    """Threads of this process that ask stores; made when they are needed, and anew after a fork."""

    def __init__(self, name: str) -> None:
        self._name, self._pid = name, 0

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Call in a thread, in the caller's context."""
        if self._pid != os.getpid():
            self._pool, self._pid = ThreadPoolExecutor(THREADS, thread_name_prefix=self._name), os.getpid()
        call = functools.partial(contextvars.copy_context().run, call)
        try:
            return self._pool.submit(call)
        except RuntimeError:  # the main thread has ended, and pools with it; the loops of other threads go on
            return _in_thread_of_its_own(call, self._name)


_beginning, _ending = _Threads("celery-idempotent-begin"), _Threads("celery-idempotent-end")


def _in_thread_of_its_own(call: Callable[[], T], name: str) -> Future[T]:
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001 - whoever waits for it raises it
            future.set_exception(error)

    future.set_running_or_notify_cancel()
    threading.Thread(target=run, name=name).start()
    return future


async def run_guarded(
    guard: Guard, delivery: Delivery, body: Callable[[], Awaitable[Any]], conclude: Callable[[Answer], T]
) -> T:
    """Run a coroutine in the caller's task under a lease, or answer it without.

    A caller that is cancelled gives back what it would hold; the end of a body is recorded whatever becomes of its
    caller.

    Arguments:
        guard: The guard.
        delivery: The delivery, whose own body is not called.
        body: Makes the coroutine.
        conclude: Makes the caller's result of the guard's answer, or raises; it may be called in any thread.

    Raises:
        BaseException: what `Guard.run` raises, and ``conclude``.
    """
    found = await _begun(guard, delivery)
    if not isinstance(found, Holding):
        return conclude(found)
    if not found.fence:
        with running(found):
            value = await body()
        return conclude(Ran(value))
    value, error = None, None
    try:
        with running(found):
            value = await body()
    except BaseException as raised:  # noqa: BLE001 - every ending is recorded, and raised again
        error = raised
    ended = _ending.submit(lambda: conclude(guard.end(delivery, found, value, error)))
    if isinstance(error, GeneratorExit):  # a coroutine that is closed must not wait
        raise error
    await _done(ended)
    return ended.result()


async def _begun(guard: Guard, delivery: Delivery) -> Holding | Answer:
    beginning = guard.beginning(delivery)
    while True:
        asked = _beginning.submit(functools.partial(_step, guard, delivery, beginning))
        try:
            await _done(asked)
        except (asyncio.CancelledError, GeneratorExit):
            asked.cancel()
            # The store may grant, or have granted, what nobody waits for any more.
            asked.add_done_callback(functools.partial(_give_back, guard, delivery))
            raise
        found = asked.result()
        if not isinstance(found, float):
            return found
        await asyncio.sleep(found)


def _step(guard: Guard, delivery: Delivery, beginning: Beginning) -> Holding | Answer | float:
    found = beginning.step()
    if isinstance(found, Holding) and found.fence:
        guard.hold(delivery, found)  # here: a loop that is busy may come to it when the lease has run out
    return found


def _give_back(guard: Guard, delivery: Delivery, asked: Future[Holding | Answer | float]) -> None:
    if asked.cancelled() or asked.exception():
        return
    found = asked.result()
    if isinstance(found, Holding) and found.fence:
        _ending.submit(lambda: guard.end(delivery, found, None, asyncio.CancelledError()))


async def _done(asked: Future[Any]) -> None:
    """Wait until a thread is done, whose work goes on if this is cancelled."""
    loop, done = asyncio.get_running_loop(), asyncio.Event()

    def tell(asked: Future[Any]) -> None:
        with suppress(RuntimeError):  # the loop may be closed by now
            loop.call_soon_threadsafe(done.set)

    asked.add_done_callback(tell)
    await done.wait()
