"""A few connections to one file, each lent to one thread at a time, and none of them open while the process forks.

SQLite's locks are a process's, and it remembers in the process's memory which of them it holds. A child would inherit
that memory without the locks: even a connection that the child opens itself would then believe to be protected from
processes that clean up behind the last user of the file. So every connection is closed before a fork, and opened anew
on either side when it is needed (sqlite.org/howtocorrupt.html, 2.6).

Who finds the file locked waits in Python, not in SQLite: other greenlets run meanwhile, and a soft time limit can cut
it short.
"""

from __future__ import annotations

import os
import random
import sqlite3
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from functools import cache
from time import monotonic
from typing import TypeVar
from weakref import WeakSet, finalize

from ..errors import StoreUnreachable
from .sqlite_errors import locked, translated

__all__ = ["Connection", "Connections"]

T = TypeVar("T")
#: Connections that are kept open while nobody uses them.
KEPT = 8
#: Seconds SQLite itself waits for a lock, and the first and the longest pause between two tries of ours.
BUSY = 0.01
PAUSES = (0.001, 0.01)
#: Seconds a fork waits for connections in use, beyond what a verb may take.
GRACE = 3.0

#: Every pool of this process, for the fork.
_POOLS: WeakSet[Connections] = WeakSet()
#: What came through a fork that Python was not told of: neither used nor closed, for both would be our parent's harm.
_INHERITED: list[sqlite3.Connection] = []


class Connection(sqlite3.Connection):
    """A connection that knows which file it has open; the path may lead to another one by now."""

    file: tuple[int, int] = (0, 0)


class Connections:
    """Execute work, each on a connection that nobody else is using.

    Arguments:
        path: The file; it is created when it is needed.
        timeout: Seconds to wait for other writers.
        synchronous: What a commit that shall outlive a power failure waits for.
        prepare: Makes a new connection ready.
    """

    def __init__(
        self, path: str, timeout: float, synchronous: str, prepare: Callable[[sqlite3.Connection], None]
    ) -> None:
        self.path, self.timeout, self._prepare = path, timeout, prepare
        #: what a commit waits for, and one that shall last
        self._synchronous = (synchronous if synchronous == "off" else "normal", synchronous)
        self._idle: list[Connection] = []
        self._pid = [os.getpid()]
        self._reset()
        finalize(self, _close_all, self._idle, self._pid)
        _watch_forks()
        _POOLS.add(self)

    def _reset(self) -> None:
        self._lock = threading.RLock()  # taken by itself, as in `Heartbeat`
        self._turns = threading.Condition(self._lock)
        self._lent: WeakSet[Connection] = WeakSet()  # not those that an interruption has lost
        self._generation = 0
        self._forking = False
        self._kept: list[Connection] = []
        self._pid[0] = os.getpid()  # last, as in `Heartbeat`

    def read(self, work: Callable[[sqlite3.Cursor], T]) -> T:
        """Do what changes nothing: each of its statements sees what was committed last, and waits for no writer."""
        return self._patiently(work)

    def write(self, work: Callable[[sqlite3.Cursor], T], *, lasting: bool = False) -> T:
        """Do work in a transaction that nobody else's can come between; it may be done again from its beginning.

        Arguments:
            work: What to do.
            lasting: Whether it must outlive a power failure. A lease need not: neither does its holder.
        """

        def transaction(cursor: sqlite3.Cursor) -> T:
            cursor.execute(f"PRAGMA synchronous = {self._synchronous[lasting]}")
            cursor.execute("BEGIN IMMEDIATE")
            try:
                answer = work(cursor)
                cursor.execute("COMMIT")
                return answer
            finally:
                if cursor.connection.in_transaction:
                    with suppress(sqlite3.Error):  # what is still open when it is given back is closed
                        cursor.execute("ROLLBACK")

        return self._patiently(transaction)

    def look(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Do work on a connection that nothing has been prepared for."""
        try:
            with closing(sqlite3.connect(self.path, timeout=self.timeout, isolation_level=None)) as connection:
                return work(connection)
        except sqlite3.Error as error:
            raise translated(error, self.path) from error

    def _patiently(self, work: Callable[[sqlite3.Cursor], T]) -> T:
        end = monotonic() + self.timeout
        pause, longest = PAUSES
        while True:
            try:
                return self._once(work)
            except sqlite3.Error as error:
                if not locked(error) or monotonic() + pause > end:
                    raise translated(error, self.path) from error
            time.sleep(pause * random.uniform(0.5, 1.5))
            pause = min(pause * 1.5, longest)

    def _once(self, work: Callable[[sqlite3.Cursor], T]) -> T:
        connection, generation = self._lend()
        try:
            return work(connection.cursor())
        finally:
            self._give_back(connection, generation)

    def _lend(self) -> tuple[Connection, int]:
        if self._pid[0] != os.getpid():
            _INHERITED.extend(self._idle)
            self._idle.clear()
            self._reset()
        with self._lock:
            while self._forking:
                self._turns.wait()
            if self._kept:
                raise StoreUnreachable(
                    f"This process was forked while its parent was using the idempotency store {self.path}, and may "
                    "not open it: restart it."
                )
            file = _identity(self.path)
            connection = self._unused(file)
            if connection is None:
                connection = self._open()
            self._lent.add(connection)
            return connection, self._generation

    def _unused(self, file: tuple[int, int]) -> Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.file == file:
                return connection
            connection.close()  # its file was removed or replaced: nobody else sees it
        return None

    def _open(self) -> Connection:
        connection = sqlite3.connect(
            self.path, timeout=BUSY, isolation_level=None, check_same_thread=False, factory=Connection
        )
        try:
            self._prepare(connection)
            connection.file = _identity(self.path)
        except BaseException:
            connection.close()
            raise
        return connection

    def _give_back(self, connection: Connection, generation: int) -> None:
        with self._lock:
            self._lent.discard(connection)
            if connection.in_transaction or generation != self._generation or len(self._idle) >= KEPT:
                connection.close()
            else:
                self._idle.append(connection)
            self._turns.notify_all()

    def close(self) -> None:
        """Close every connection, those in use as soon as they are given back; whoever calls next opens a new one."""
        if self._pid[0] == os.getpid():
            with self._lock:
                self._generation += 1
                _close_all(self._idle, self._pid)

    def before_fork(self) -> None:
        """Lend nothing any more, wait for what is lent, and close it all."""
        self._lock.acquire()
        self._forking = True
        end = monotonic() + self.timeout + GRACE
        while self._lent and monotonic() < end:
            self._turns.wait(0.1)
        # Should there be a thread that hangs: the child keeps what that one uses, lest it be closed there.
        self._kept = list(self._lent)
        _close_all(self._idle, self._pid)

    def after_fork_in_parent(self) -> None:
        """Lend again."""
        self._kept = []
        self._forking = False
        self._turns.notify_all()
        self._lock.release()

    def after_fork_in_child(self) -> None:
        """Begin anew, unless a connection of the parent is open in this process."""
        kept = self._kept
        self._reset()
        self._kept = kept


def _identity(path: str) -> tuple[int, int]:
    try:
        found = os.stat(path)
    except OSError:
        return (0, 0)
    return found.st_dev, found.st_ino


def _close_all(idle: list[Connection], pid: list[int]) -> None:
    """Close what nobody uses, in the process that opened it."""
    while idle and pid[0] == os.getpid():
        idle.pop().close()


@cache
def _watch_forks() -> None:
    """Have Python close the connections of every pool before each fork, from the first pool on."""
    stopped: list[Connections] = []

    def before() -> None:
        stopped[:] = _POOLS
        for pool in stopped:
            pool.before_fork()

    def after_in_parent() -> None:
        while stopped:
            stopped.pop().after_fork_in_parent()

    def after_in_child() -> None:
        while stopped:
            stopped.pop().after_fork_in_child()

    os.register_at_fork(before=before, after_in_parent=after_in_parent, after_in_child=after_in_child)
