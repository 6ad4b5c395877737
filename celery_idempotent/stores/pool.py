"""A pool of connections that threads and greenlets share, each served in its turn.

It has no lock of its own: whatever interrupts a thread, a signal handler that calls the store again or raises at any
place, others go on. What several threads change is a list or a deque, of which each operation is atomic.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from time import monotonic
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary, WeakSet, ref

T = TypeVar("T")

#: Seconds without any call being served after which a call that waits opens one more than there should be, if there are
#: not twice as many already.
PATIENCE = 2.0
#: The same, however many there are: a lease lasts longer.
LONGEST = 10.0
#: Seconds without any call being served after which a call that waits fails, since as many failed as there are
#: connections: each has been tried.
HOPELESS = 1.0
#: Most seconds between two looks of the first two in the line, and of those behind them. They are woken when their turn
#: comes, unless that was interrupted or a connection was lost; each look is work, and there may be thousands.
LOOK_EVERY, LOOK_BEHIND = 0.05, 0.5
#: Seconds without use after which a connection is replaced: a load balancer, a firewall or a NAT on the way may have
#: forgotten it by then, and some swallow what comes over it without a word.
STALE = 60.0
#: Seconds after which a call that has not looked is gone, by an interruption, and delays no other.
GONE = 1.0
#: Seconds by which a look is so late that the whole process has stood still, and not the server; how many times that is
#: left out of account, for one that always stands still must not wait for ever.
LATE, STANDSTILLS = 0.5, 3


class Pool(Generic[T]):
    """Lend each connection to one call at a time, in the order in which calls come.

    To lend is `idle.pop()` while there are some and `line` is empty, else `take`; what was lent comes back by
    `give_back`. On a busy machine a hundred greenlets that settle together wait for seconds, though each is soon
    served: none of them opens a connection more for it.

    Arguments:
        make: Opens one.
        most: How many there should be.
        limit: How many there may be until no call was served for `LONGEST` (default: twice as many).
        unanswered: Errors that mean the server did not answer, and that others will meet too (default: none).
    """

    def __init__(
        self, make: Callable[[], T], most: int, limit: int = 0, unanswered: tuple[type[Exception], ...] = ()
    ) -> None:
        self._make, self.most, self.limit, self._unanswered = make, most, limit or 2 * most, unanswered
        self.idle: list[T] = []
        #: these, and those in use; not those that an interruption has lost
        self.made: WeakSet[Any] = WeakSet()
        self.line: deque[_Turn] = deque()
        self._given_back: WeakKeyDictionary[Any, float] = WeakKeyDictionary()
        self._making: list[ref[_Turn]] = []
        self._served = monotonic()
        #: since a call was last served: when each failed, and with what
        self._failures: list[tuple[float, type[Exception], tuple[Any, ...]]] = []

    def take(self, *, urgent: bool = False) -> T:
        """Return a connection that was given back, or a new one.

        One is opened at a time: when a thousand greenlets start at once, those that wait find what the first of them
        have given back.

        Arguments:
            urgent: Come before those that wait (default: after them).

        Raises:
            Exception: one could not be opened, or nothing is served while calls on all connections fail with this.
        """
        turn, line = _Turn(monotonic()), self.line
        try:
            if urgent:
                line.appendleft(turn)
            else:
                line.append(turn)
            while True:
                if turn.passed:  # it was taken for gone
                    turn.passed = False
                    line.appendleft(turn)
                place = _place(turn, line)
                if place == 0:
                    with suppress(IndexError):
                        return self.idle.pop()
                turn.look()
                self._give_up(turn)
                if self._may_make(turn):
                    break
                turn.wait(LOOK_EVERY if place < 2 else LOOK_BEHIND)
                self._pass_who_is_gone(turn)
        finally:
            with suppress(ValueError):
                while True:  # where it was taken for gone it may be there twice
                    line.remove(turn)
            if self.idle:
                self.wake()
        return self._open(turn)

    def give_back(self, item: T, error: BaseException | None = None) -> None:
        """Lend it to the next.

        Arguments:
            item: What was lent.
            error: What the call failed with, or was interrupted by (default: it was served).
        """
        self._given_back[item] = now = monotonic()
        if error is None:
            self._served = now
            if self._failures:
                self._failures.clear()
        elif isinstance(error, self._unanswered):
            self._fail(error)
        self.idle.append(item)
        if self.line:
            self.wake()

    def is_stale(self, item: T) -> bool:
        """Return whether what was lent has not been used for so long that it is to be replaced."""
        since = self._given_back.get(item)
        return since is not None and monotonic() - since > STALE

    def wake(self) -> None:
        """Wake the first in the line, for which there may be one."""
        first = _first(self.line)
        if first is not None:
            first.wake()

    def _give_up(self, turn: _Turn) -> None:
        failures = self._failures.copy()
        if failures and len(failures) >= min(len(self.made), self.limit):
            when, kind, args = failures[0]
            if turn.looked - max(turn.began, self._served, when) >= HOPELESS:
                raise kind(*args)

    def _fail(self, error: Exception) -> None:
        if len(self._failures) >= self.limit:
            return
        with suppress(Exception):  # of what cannot be made again; itself, it would keep alive what it came through
            type(error)(*error.args)
            self._failures.append((monotonic(), type(error), error.args))

    def _may_make(self, turn: _Turn) -> bool:
        if not self._is_allowed(turn, self._making.copy()):
            return False
        allowed = False
        try:
            self._making.append(turn.mark)
            marks = self._making.copy()
            allowed = self._is_allowed(turn, marks[: marks.index(turn.mark)])  # of two, the first
        finally:
            if not allowed:
                self._made(turn)
        return allowed

    def _made(self, turn: _Turn) -> None:
        for mark in self._making.copy():
            if mark() in (turn, None):  # or one that an interruption has left
                with suppress(ValueError):
                    self._making.remove(mark)

    def _is_allowed(self, turn: _Turn, marks: list[ref[_Turn]]) -> bool:
        """Return whether a turn may open one, beside those whose marks these are."""
        making = sum(mark() is not None for mark in marks)
        number = making + len(self.made)  # after that: one that was just opened is in both for a moment
        stalled = turn.looked - max(turn.began, self._served)
        if number < self.most:
            return not making or turn.looked - turn.began >= PATIENCE
        return stalled >= LONGEST or (number < self.limit and stalled >= PATIENCE)

    def _open(self, turn: _Turn) -> T:
        try:
            item = self._make()
            self.made.add(item)
            return item
        except self._unanswered as error:
            self._fail(error)
            raise
        finally:
            self._made(turn)
            self.wake()  # who may open the next

    def _pass_who_is_gone(self, turn: _Turn) -> None:
        """Take the first out of the line if it was not seen to look for long, while `turn` was."""
        first = _first(self.line)
        if first is not None and turn.looked - first.looked > GONE:
            first.passed = True
            with suppress(ValueError):
                self.line.remove(first)


def _place(turn: _Turn, line: deque[_Turn]) -> int:
    """Return 0 for the first, 1 for the second, and 2 for others."""
    with suppress(IndexError):
        return 0 if line[0] is turn else 1 if line[1] is turn else 2
    return 2


def _first(line: deque[_Turn]) -> _Turn | None:
    try:
        return line[0]
    except IndexError:
        return None


class _Turn:
    """A place in the line.

    Arguments:
        now: When it came.
    """

    def __init__(self, now: float) -> None:
        #: since when it waits; later, where the whole process stood still meanwhile
        self.began = self.looked = now
        #: whether it was taken for gone, and out of the line
        self.passed = False
        self.mark = ref(self)
        self._standstills = 0
        self._woken = threading.Lock()
        self._woken.acquire()

    def look(self) -> None:
        """Note that it is still there."""
        self.looked = monotonic()

    def wake(self) -> None:
        with suppress(RuntimeError):  # it was woken already
            self._woken.release()

    def wait(self, seconds: float) -> None:
        """Wait until it is woken, for so long at most."""
        self._woken.acquire(timeout=seconds)
        late = monotonic() - self.looked - seconds
        if late > LATE and self._standstills < STANDSTILLS:
            self._standstills += 1
            self.began += late
