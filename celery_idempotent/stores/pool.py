"""A pool of connections that threads and greenlets share, each served in its turn."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from time import monotonic
from typing import Any, Generic, TypeVar
from weakref import WeakSet

T = TypeVar("T")

#: Seconds without any call being served after which a call that waits opens one more than there should be, if there are
#: not twice as many already.
PATIENCE = 2.0
#: Seconds after which a call that waits opens one more, however many there are: a lease lasts longer.
LONGEST = 10.0
#: Most seconds between two looks of a call that waits. It is woken when its turn comes, unless that was interrupted.
LOOK_EVERY = 0.05
#: Seconds after which a call that has not looked is gone, by an interruption, and delays no other.
GONE = 1.0


class Pool(Generic[T]):
    """Lend each connection to one call at a time, in the order in which calls come.

    To lend is `idle.pop()` while there are some and `line` is empty, else `take`; what was lent comes back by
    `give_back`. On a busy machine a hundred greenlets that settle together wait for seconds, though each is soon
    served: none of them opens a connection more for it.

    Arguments:
        make: Opens one.
        most: How many there should be.
    """

    def __init__(self, make: Callable[[], T], most: int) -> None:
        self._make, self.most = make, most
        self.idle: list[T] = []
        #: these, and those in use; not those that an interruption has lost
        self.made: WeakSet[Any] = WeakSet()
        self.line: deque[_Turn] = deque()
        self._making: WeakSet[_Turn] = WeakSet()
        self._counting = threading.Lock()
        self._served = monotonic()

    def take(self, *, urgent: bool = False) -> T:
        """Return a connection that was given back, or a new one.

        One is opened at a time: when a thousand greenlets start at once, those that wait find what the first of them
        have given back.

        Arguments:
            urgent: Come before those that wait (default: after them).
        """
        turn, line = _Turn(monotonic()), self.line
        try:
            if urgent:
                line.appendleft(turn)
            else:
                line.append(turn)
            while True:
                with suppress(IndexError):
                    if turn.passed or line[0] is turn:
                        item = self.idle.pop()
                        self._served = monotonic()
                        return item
                if self._may_make(turn):
                    break
                turn.wait()
                self._pass_who_is_gone(turn)
        finally:
            with suppress(ValueError):
                line.remove(turn)
            if self.idle:
                self.wake()
        return self._open(turn)

    def give_back(self, item: T) -> None:
        """Lend it to the next."""
        self.idle.append(item)
        if self.line:
            self.wake()

    def wake(self) -> None:
        """Wake the first in the line, for which there may be one."""
        with suppress(IndexError):
            self.line[0].wake()

    def _may_make(self, turn: _Turn) -> bool:
        turn.looked = now = monotonic()
        waited = now - turn.began
        with self._counting:
            number = len(self.made) + len(self._making)
            if number < self.most:
                allowed = not self._making or waited >= PATIENCE
            elif number < 2 * self.most:
                allowed = now - max(turn.began, self._served) >= PATIENCE
            else:
                allowed = waited >= LONGEST
            if allowed:
                self._making.add(turn)
        return allowed

    def _open(self, turn: _Turn) -> T:
        try:
            item = self._make()
            self.made.add(item)
            return item
        finally:
            self._making.discard(turn)
            self.wake()  # who may open the next

    def _pass_who_is_gone(self, turn: _Turn) -> None:
        """Take the first out of the line if it was not seen to look for long, while `turn` was."""
        with suppress(IndexError):
            first = self.line[0]
            if turn.looked - first.looked > GONE:
                first.passed = True
                with suppress(ValueError):
                    self.line.remove(first)


class _Turn:
    """A place in the line.

    Arguments:
        now: When it came.
    """

    def __init__(self, now: float) -> None:
        self.began = self.looked = now
        #: whether it was taken for gone, and may take what there is though it is not in the line
        self.passed = False
        self._woken = threading.Lock()
        self._woken.acquire()

    def wake(self) -> None:
        with suppress(RuntimeError):  # it was woken already
            self._woken.release()

    def wait(self) -> None:
        self._woken.acquire(timeout=LOOK_EVERY)
