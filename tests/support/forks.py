"""A child of this process that is forked while a thread of ours stands where no child should find it."""

from __future__ import annotations

import os
import signal
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager

from celery_idempotent.stores import Store

__all__ = ["served_after_fork"]

#: What a child says whose ping was answered.
SERVED = b"served"


def served_after_fork(store: Store, lock: AbstractContextManager[object]) -> bool:
    """Fork while a thread holds the lock, and tell whether the store serves the child.

    Raises:
        AssertionError: the child says why it was not served, or nothing within half a minute.
    """
    held, forked = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            forked.wait(60)

    reading, writing = os.pipe()
    with ThreadPoolExecutor(1) as thread:
        thread.submit(hold)
        assert held.wait(15)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # of forking while other threads run
                child = os.fork()
            if child == 0:
                _ping_and_end(store, writing)
        finally:
            forked.set()
    os.close(writing)
    with open(reading, "rb") as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    assert said == SERVED, said
    return True


def _ping_and_end(store: Store, writing: int) -> None:
    """End this process, which is a copy of pytest and must not go on as one."""
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(30)  # a child that hangs says nothing
        store.ping()
        os.write(writing, SERVED)
    except BaseException as error:  # noqa: BLE001 - see above
        os.write(writing, repr(error).encode())
    finally:
        os._exit(0)
