"""Exceptions that a signal handler raises wherever the main thread happens to be, as time limits do."""

from __future__ import annotations

import gc
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic
from types import SimpleNamespace
from typing import Any, cast

import pytest

from celery_idempotent.core.heartbeat import Heartbeat
from celery_idempotent.core.history import SignalSafeEvent
from celery_idempotent.core.lease import HeldLease
from celery_idempotent.stores import Claim, Lease
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.stores.sqlite import SqliteStore

pytestmark = [
    pytest.mark.thorough,
    # An alarm would ring within coverage's own lock as well, and leave that one taken; or while something is collected,
    # where nothing can be raised.
    pytest.mark.unmeasured,
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

#: There a signal may ring between a lock that ``with`` takes and what releases it, whoever takes it.
leaves_locks = pytest.mark.skipif(
    sys.version_info[:2] == (3, 14), reason="python/cpython#148874, which docs/guides/pools.md tells of"
)

#: How often each is tried. Where a lock is taken by Python code, a few hundred leave one locked.
TRIES = 4000
STEP, LONGEST = 0.2e-6, 60e-6
PROMPTLY = 10.0


class Rings(Exception):
    """A time limit."""


@pytest.fixture(autouse=True)
def alarm() -> Iterator[None]:
    def ring(*_: object) -> None:
        raise Rings

    before = signal.signal(signal.SIGALRM, ring)
    yield
    signal.signal(signal.SIGALRM, before)


def interrupt(work: Callable[[], object]) -> int:
    """Do the work many times, with an alarm at another moment of it each time; return how often it rang within."""
    rang = 0
    for number in range(TRIES):
        try:
            signal.setitimer(signal.ITIMER_REAL, max(1e-6, number * STEP % LONGEST))
            work()
            signal.setitimer(signal.ITIMER_REAL, 0)
        except Rings:
            rang += 1
    return rang


def is_free(lock: threading.Lock | threading.RLock) -> bool:
    """Tell whether another thread gets the lock."""
    got: list[bool] = []

    def take() -> None:
        got.append(lock.acquire(timeout=PROMPTLY))
        if got[0]:
            lock.release()

    thread = threading.Thread(target=take)
    thread.start()
    thread.join()
    return got == [True]


@leaves_locks
def test_a_flag_can_be_raised_after_any_interruption() -> None:
    flag = SignalSafeEvent()

    def work() -> None:
        flag.set()
        flag.wait(0.001)
        flag.clear()

    assert interrupt(work)
    assert is_free(flag._lock)


def test_a_flag_wakes_who_waits_for_it_and_tells_who_waited_in_vain() -> None:
    flag, woken = SignalSafeEvent(), []
    assert (flag.is_set(), flag.wait(0.001)) == (False, False)
    thread = threading.Thread(target=lambda: woken.append(flag.wait(PROMPTLY)))
    thread.start()
    flag.set()
    thread.join()
    assert (woken, flag.is_set(), flag.wait()) == ([True], True, True)
    flag.clear()
    assert not flag.wait(0)


@leaves_locks
def test_leases_are_renewed_after_any_interruption() -> None:
    heart, store = Heartbeat(), MemoryStore()
    holding = HeldLease(store, Lease(Claim("k", "me", 3000.0, 60.0), 1), monotonic())

    heart.watch(HeldLease(store, Lease(Claim("other", "me", 3000.0, 60.0), 1), monotonic()))  # a thread is running
    [server] = heart._servers.values()
    server.thread = cast(Any, SimpleNamespace(is_alive=lambda: True))  # Thread.is_alive itself bears no interruption

    def work() -> None:
        server.step = 5000.0  # so that the thread is woken for a shorter one
        heart.watch(holding)
        heart.forget(holding)

    assert interrupt(work)
    assert is_free(heart._lock)


@leaves_locks
def test_a_file_of_records_is_open_to_other_threads_after_any_interruption(tmp_path: Path) -> None:
    store = SqliteStore(str(tmp_path / "records.db"))
    store.get("k")
    with warnings.catch_warnings():  # a connection that is lost by an interruption is closed when it is collected
        warnings.simplefilter("ignore", ResourceWarning)
        assert interrupt(lambda: store.get("k"))
        gc.collect()
    assert is_free(store._connections._lock)
    store.close()
