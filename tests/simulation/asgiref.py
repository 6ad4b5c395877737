"""The threads of asgiref: processes of the simulation, of which each has what a thread has for itself."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent import futures
from contextlib import nullcontext
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import pytest
from asgiref import current_thread_executor, local, sync
from greenlet import GreenletExit, getcurrent

from . import celery
from .celery import INFINITE, PATCHES, Thread

_numbers = count(1)
_idents: WeakKeyDictionary[Any, int] = WeakKeyDictionary()


def thread() -> Any:
    """Return what stands for the thread that runs, the same for all that a pool of one thread does."""
    process = getcurrent()
    return getattr(process, "thread", None) or process


def get_ident() -> int:
    """Return the number of the thread that runs."""
    running = thread()
    if running not in _idents:
        _idents[running] = next(_numbers)
    return _idents[running]


class Local:
    """What each thread has for itself."""

    def __init__(self) -> None:
        object.__setattr__(self, "_of", WeakKeyDictionary())

    def __getattr__(self, name: str) -> Any:
        try:
            return self._of[thread()][name]
        except KeyError:
            raise AttributeError(name) from None

    def __setattr__(self, name: str, value: Any) -> None:
        self._of.setdefault(thread(), {})[name] = value

    def __delattr__(self, name: str) -> None:
        del self._of[thread()][name]


class Executor(futures.Executor):
    """A pool of one thread, or of as many as there is work for."""

    def __init__(self, max_workers: int | None = None) -> None:
        self._alone, self._down = max_workers == 1, False
        self._work: deque[tuple[futures.Future[Any], Callable[[], Any]]] = deque()
        self._running = 0
        self._waiting: Any = None

    def submit(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> futures.Future[Any]:
        if self._down:
            raise RuntimeError("cannot schedule new futures after shutdown")
        future: futures.Future[Any] = futures.Future()
        self._work.append((future, partial(call, *args, **kwargs)))
        if not (self._alone and self._running):
            self._running += 1
            asking = getcurrent()
            process = celery.current.world.start(asking.host, f"{asking.host.name} thread", self._run)
            process.works, process.works_for = True, celery.current.law.working_for(asking)
            process.thread = self if self._alone else None
        return future

    def _run(self) -> None:
        while self._work:
            future, call = self._work.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                found = call()
            except GreenletExit:
                raise
            except BaseException as error:  # noqa: BLE001 - raised where it is awaited
                future.set_exception(error)
            else:
                future.set_result(found)
            del future, call
        self._running -= 1
        if self._waiting is not None:
            self._waiting.wakes = celery.current.world.now

    def shutdown(self, wait: bool = True, **_: Any) -> None:
        """Take no more work, and wait for the end of what there is."""
        self._down = True
        loop = asyncio._get_running_loop()  # which this holds up
        asyncio._set_running_loop(None)
        try:
            while wait and self._running:
                self._waiting = getcurrent()
                celery.current.world.sleep(INFINITE)
        finally:
            self._waiting = None
            asyncio._set_running_loop(loop)


class Condition:
    """A condition on which one thread waits."""

    def __init__(self, lock: Any) -> None:
        self._waiting: Any = None

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...

    def wait(self) -> None:
        self._waiting = getcurrent()
        celery.current.world.sleep(INFINITE)
        self._waiting = None

    def notify(self) -> None:
        if self._waiting is not None:
            self._waiting.wakes = celery.current.world.now


def _run(main: Coroutine[Any, Any, Any]) -> Any:
    from .coroutines import Loop

    loop = Loop(celery.current.world)
    loop.process = getcurrent()
    try:
        return loop.run_until_complete(main)
    finally:
        loop.close()


def _patch(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sync, "ThreadPoolExecutor", Executor)
    patch.setattr(sync, "threading", SimpleNamespace(Thread=Thread, local=threading.local))
    patch.setattr(sync, "asyncio", SimpleNamespace(**{**vars(asyncio), "run": _run}))
    patch.setattr(sync.SyncToAsync, "threadlocal", Local())
    patch.setattr(local, "threading", SimpleNamespace(get_ident=get_ident, RLock=threading.RLock, local=Local))
    threads = SimpleNamespace(current_thread=thread, Condition=Condition, Lock=nullcontext)
    patch.setattr(current_thread_executor, "threading", threads)


PATCHES.append(_patch)
