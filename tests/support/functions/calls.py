"""Functions to call, and what became of their calls."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from celery_idempotent import current_lease, idempotent
from celery_idempotent.events import Event
from tests.support.faults.run_account import ENDINGS, STARTS

__all__ = ["ENDINGS", "PROMPTLY", "STARTS", "Held", "counted", "names", "told_in_pairs"]

#: Seconds that a test waits for another thread before it fails.
PROMPTLY = 30.0


def counted(store: object, result: Any = None, **options: Any) -> tuple[Callable[..., Any], list[Any]]:
    """Return a guarded function of ``order``, and the list of the orders that its body was run for.

    Arguments:
        store: Its store.
        result: What it returns, or raises, or what is called with the order (default: how often it ran).
        options: Of its policy.
    """
    runs: list[Any] = []

    @idempotent(**{"store": store, "key": "order", "name": "shop.charge", **options})
    def charge(order: Any, cents: int = 999) -> Any:
        runs.append(order)
        if isinstance(result, BaseException):
            raise result
        if callable(result):
            return result(order)
        return len(runs) if result is None else result

    return charge, runs


class Held:
    """A guarded function whose body waits until it may go on, called in a thread."""

    def __init__(self, store: object, **options: Any) -> None:
        self.entered, self.go_on = threading.Event(), threading.Event()
        self.lease: Any = None
        self.call, self.runs = counted(store, self._body, **options)

    def _body(self, order: Any) -> str:
        self.lease = current_lease()
        self.entered.set()
        assert self.go_on.wait(PROMPTLY), "nobody let the body go on"
        return f"held {order}"

    @contextmanager
    def running(self, order: Any = "ORD-1") -> Iterator[Future[Any]]:
        """Have the body run in a thread, for as long as it is not let go on."""
        with ThreadPoolExecutor(1) as thread:
            result = thread.submit(self.call, order)
            try:
                assert self.entered.wait(PROMPTLY), result
                yield result
            finally:
                self.go_on.set()


def names(heard: list[Event]) -> list[str]:
    """Return what was told, by name, without what is told of stores."""
    return [type(event).__name__ for event in heard if event.key]


def told_in_pairs(heard: list[Event]) -> bool:
    """Tell whether each run that was told to begin was told to end, once, and no other."""
    begun = sorted((event.key, event.fence) for event in heard if isinstance(event, STARTS))
    ended = sorted((event.key, event.fence) for event in heard if isinstance(event, ENDINGS))
    return begun == ended and len(set(begun)) == len(begun)
