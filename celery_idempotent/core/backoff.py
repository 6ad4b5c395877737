"""Trying again: growing pauses between tries, and calls that an interruption does not end."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from time import monotonic
from typing import TypeVar

from ..errors import IdempotencyError
from ..events import logger

T = TypeVar("T")

#: Most seconds for which a pause does not see that its process is about to stop.
LOOK_EVERY = 1.0


def never() -> bool:
    """Return False: the process is not about to stop, as far as is known or matters."""
    return False


def sleep(seconds: float, stopping: Callable[[], bool] = never) -> None:
    """Sleep for so many seconds, or until the process is about to stop; every pause does it here."""
    while stopping is not never and seconds > LOOK_EVERY and not stopping():
        time.sleep(LOOK_EVERY)
        seconds -= LOOK_EVERY
    if not stopping():
        time.sleep(seconds)  # looked up at each call, for tests


class Backoff:
    """Sleep longer from try to try, until a time has passed or the process is about to stop.

    Arguments:
        pauses: The first and the longest pause, in seconds; each is shortened by a random part.
        limit: Seconds after which there is no more waiting.
        stopping: Returns whether the process is about to stop.
    """

    def __init__(self, pauses: tuple[float, float], limit: float, stopping: Callable[[], bool]) -> None:
        self.pause, self.longest = pauses
        self.end = monotonic() + limit
        #: seconds that its own pauses leave, also where a test has frozen the clock
        self._left = limit
        self.stopping = stopping

    def next(self) -> float | None:
        """Return the seconds of the next pause, for a caller that sleeps itself; None if there is no time left."""
        left = min(self.end - monotonic(), self._left)
        if left <= 0 or self.stopping():
            return None
        pause = min(left, self.pause * random.uniform(0.5, 1.0))
        self.pause = min(self.longest, self.pause * 2)
        self._left -= pause
        return pause

    def wait(self) -> bool:
        """Sleep for the next pause and return true; return false at once if there is no time left."""
        pause = self.next()
        if pause is None:
            return False
        sleep(pause, self.stopping)
        return True


def retry_if_interrupted(call: Callable[[], T]) -> T:
    """Call, and call again if something other than the call itself raised in it.

    A soft time limit is an exception that a signal raises wherever the process happens to be, and a greenlet is killed,
    or stopped at its time limit, by one that its hub raises where it waits. Within a store call it would leave unknown
    what the store did; every verb may be called again, so this does, and the operation ends as it was about to. A
    process that is to end does so after that. A body that called where Python's recursion was nearly at its limit may
    need less of it than its end.
    """
    try:
        return call()
    except IdempotencyError:
        raise
    except RecursionError:
        return _on_a_stack_of_its_own(call)
    except (KeyboardInterrupt, SystemExit):
        with suppress(Exception):
            call()
        raise
    except BaseException as interruption:  # noqa: BLE001 - see above
        logger.warning("Interrupted by %r while recording an ending; trying again", interruption)
        return call()


def _on_a_stack_of_its_own(call: Callable[[], T]) -> T:
    answers: list[T] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            answers.append(call())
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            errors.append(error)

    thread = threading.Thread(target=work, name="celery-idempotent-ending", daemon=True)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return answers[0]
