"""Waiting for what can be seen, with a deadline: no test sleeps to let time pass."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

POLL_SECONDS = 0.02


def seen() -> None:
    """Called once a wait is over; `pytest --slow` pauses here."""


class WaitTimeout(AssertionError):
    """Raised when the deadline passed and the condition never held."""


def wait_until(
    condition: Callable[[], T], timeout: float = 15.0, message: str | Callable[[], str] = "the condition to hold"
) -> T:
    """Poll `condition` until it is true, and return what it returned.

    Args:
        condition: asked every 20 ms; anything truthy ends the wait.
        timeout: seconds.
        message: what is waited for, or a callable that describes what was seen instead.

    Raises:
        WaitTimeout: the condition did not hold within `timeout`.
    """
    deadline = time.monotonic() + timeout
    while not (value := condition()):
        if time.monotonic() >= deadline:
            text = message() if callable(message) else message
            raise WaitTimeout(f"waited {timeout:g} s for {text}")
        time.sleep(POLL_SECONDS)
    seen()
    return value
