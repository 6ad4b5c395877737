"""Connections to one SQLite file, each lent to one thread at a time, and none of them open while the process forks.

SQLite's locks are a process's, and it remembers in the process's memory which of them it holds. A child would inherit
that memory without the locks: even a connection that the child opens itself would then believe to be protected from
processes that clean up behind the last user of the file. So every connection is closed before a fork, and opened again
on either side when it is needed (sqlite.org/howtocorrupt.html, 2.6).

A verb that finds the file locked waits in Python, not in SQLite: other greenlets run meanwhile, and a soft time limit
can cut it short.
"""

from __future__ import annotations

import logging
import math
import os
import random
import re
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import cache
from time import monotonic
from typing import TypeAlias, TypeVar
from urllib.parse import parse_qsl, unquote
from weakref import WeakSet, finalize

from ...errors import ConfigurationError, RecordUnreadable, StoreError, StoreRefused, StoreUnreachable
from .. import hide_password, unknown_parameter

T = TypeVar("T")
logger = logging.getLogger("celery_idempotent.stores")
#: The devices and numbers of a database, its log, and the index of that.
Files: TypeAlias = tuple[tuple[int, int], ...]
#: Connections that are kept open while they are idle.
KEPT = 8
#: Seconds SQLite itself waits for a lock, and the first and the longest pause between two tries of the store.
BUSY = 0.01
PAUSES = (0.001, 0.01)
#: Seconds a fork waits for connections in use, beyond what a verb may take.
GRACE = 3.0
#: How many signals may disturb what is done before a fork, or after it.
SIGNALS = 100

#: Every pool of this process, for the fork.
_POOLS: WeakSet[Connections] = WeakSet()
#: The threads that fork just now, each with what other threads still use when it waits no longer. No other lends.
_FORKING: dict[int, list[Connection]] = {}
#: What a thread of the parent used when this process, or one before it, was forked: neither used nor closed, and its
#: file is not opened here.
_KEPT: list[Connection] = []
#: What came through a fork outside of Python's `os.fork`: neither used nor closed, as both would harm the parent's.
_INHERITED: list[sqlite3.Connection] = []
#: The files that something else in this process had open at a fork, and those of which that was logged.
_OPEN_ELSEWHERE: set[str] = set()
_WARNED: set[str] = set()


class Connection(sqlite3.Connection):
    """A connection that knows which files it has open; their paths may lead to others by now."""

    files: Files = ()
    #: of the call that it was lent to last
    turn: object = None
    #: whether it was closed
    ended = False

    def end(self) -> None:
        """Close it."""
        self.close()
        self.ended = True

    def has_another_log(self, files: Files) -> bool:
        """Return whether it has the same file open, with a log or an index that is no longer there."""
        return self.files[:1] == files[:1] and self.files != files


class Connections:
    """Execute work, each on a connection that no other thread is using.

    Arguments:
        path: The file; it is created when it is needed.
        timeout: Seconds to wait for other writers.
        synchronous: What a commit that must outlive a power failure waits for.
        prepare: Makes a new connection ready.
    """

    def __init__(
        self, path: str, timeout: float, synchronous: str, prepare: Callable[[sqlite3.Connection], None]
    ) -> None:
        self.path, self.timeout, self._prepare = path, timeout, prepare
        #: what a commit waits for, and what one that must last waits for
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
        #: all that are open, or were: what an interruption has lost is open as long as its error is looked at
        self._opened: WeakSet[Connection] = WeakSet()
        self._generation = 0
        self._pid[0] = os.getpid()  # last, as in `Heartbeat`

    def read(self, work: Callable[[sqlite3.Cursor], T]) -> T:
        """Do what changes nothing: each of its statements sees what was committed last, and waits for no writer."""
        return self._patiently(work)

    def write(self, work: Callable[[sqlite3.Cursor], T], *, lasting: bool = False) -> T:
        """Do work in a transaction that no other can come between; it may be done again from its beginning.

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
        """Do work on a connection that nothing has been prepared for; no fork comes between."""
        try:
            with self._lock:
                self._wait_for_forks()
                with closing(sqlite3.connect(self.path, timeout=self.timeout, isolation_level=None)) as opened:
                    return work(opened)
        except sqlite3.Error as error:
            raise translate_error(error, self.path) from error

    def _patiently(self, work: Callable[[sqlite3.Cursor], T]) -> T:
        end = monotonic() + self.timeout
        pause, longest = PAUSES
        while True:
            try:
                return self._once(work)
            except sqlite3.Error as error:
                if not locked(error) or monotonic() + pause > end:
                    raise translate_error(error, self.path) from error
            time.sleep(pause * random.uniform(0.5, 1.5))
            pause = min(pause * 1.5, longest)

    def _once(self, work: Callable[[sqlite3.Cursor], T]) -> T:
        connection, turn = self._lend()
        failed = False
        try:
            cursor = connection.cursor()
            try:
                return work(cursor)
            finally:
                # Else the traceback of an error has its statement, and SQLite closes no connection before that is gone.
                # Not by `closing`, which is code in Python: a time limit may ring there.
                cursor.close()
        except sqlite3.Error as error:
            failed = not locked(error)
            raise
        finally:
            try:
                self._give_back(connection, turn, failed=failed)
            except BaseException:  # a time limit has rung there, and a fork would wait for what is not given back
                self._give_back(connection, turn, failed=True)
                raise

    @property
    def _forking(self) -> bool:
        """Whether another thread forks just now; this one calls from a signal's handler if it does."""
        me = threading.get_ident()
        return any(thread != me for thread in _FORKING.copy())

    def _wait_for_forks(self) -> None:
        while self._forking:
            self._turns.wait()

    def _in_use(self) -> list[Connection]:
        return [each for each in _members(self._opened) if not (each.ended or each in self._idle)]

    def _lend(self) -> tuple[Connection, list[int]]:
        if self._pid[0] != os.getpid():
            self.after_fork_in_child()
        with self._lock:
            self._wait_for_forks()
            files = _identities(self.path)
            if any(each.files[:1] in (files[:1], ()) for each in _KEPT):  # the latter: it was lost while it was opened
                raise StoreUnreachable(
                    f"This process was forked while its parent was using the idempotency store {self.path}, and may "
                    "not open it: restart it."
                )
            connection = self._unused(files)
            if connection is None:
                # SQLite would give it the old index to the new log, also where another store has that.
                if any(each._keeps_another_log(self.path) for each in _members(_POOLS)):
                    raise StoreUnreachable(
                        f"The log of the idempotency store {self.path} was removed while this process was using it. "
                        "Remove or replace its files only while nothing uses them."
                    )
                connection = self._open()
            turn = connection.turn = [self._generation]
            return connection, turn

    def _unused(self, files: Files) -> Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.files == files:
                return connection
            connection.end()  # its file or its log was removed or replaced: no other process sees it
        return None

    def _keeps_another_log(self, path: str) -> bool:
        """Close what is idle and has another log to the file of a path; return whether such a one is in use."""
        idle, in_use = self._idle.copy(), self._in_use()
        files = _identities(path)  # afterwards: the log may have been made with one of these
        for connection in idle:
            if connection.has_another_log(files):
                with suppress(ValueError):  # its own store was faster
                    self._idle.remove(connection)
                    connection.end()
        return any(each.has_another_log(files) for each in in_use)

    def _open(self) -> Connection:
        connection = sqlite3.connect(
            self.path, timeout=BUSY, isolation_level=None, check_same_thread=False, factory=Connection
        )
        try:
            self._opened.add(connection)  # before it opens the file, which SQLite does when it is first used
            self._prepare(connection)
            connection.files = _identities(self.path)
        except BaseException:
            connection.end()
            raise
        return connection

    def _give_back(self, connection: Connection, turn: list[int], *, failed: bool) -> None:
        with self._lock:
            if connection.turn is not turn or connection in self._idle:  # it was given back
                return
            # One that has read a damaged page keeps it, and would fail for ever, whatever the file has become.
            unfit = failed or connection.in_transaction or turn != [self._generation]
            if unfit or len(self._idle) >= KEPT or _FORKING:
                connection.end()
            else:
                self._idle.append(connection)
            self._turns.notify_all()

    def close(self) -> None:
        """Close every connection, those in use as soon as they are given back; the next call opens a new one."""
        if self._pid[0] == os.getpid():
            with self._lock:
                self._generation += 1
                _close_all(self._idle, self._pid)

    def before_fork(self) -> list[Connection]:
        """Close what is idle, wait for what is lent, and return what is still used then."""
        end = monotonic() + self.timeout + GRACE
        with self._lock:
            _close_all(self._idle, self._pid)
            while self._in_use() and monotonic() < end:
                self._turns.wait(0.1)
            return self._in_use()

    def after_fork_in_parent(self) -> None:
        """Lend again."""
        with self._lock:
            self._turns.notify_all()

    def after_fork_in_child(self) -> None:
        """Begin with no connections."""
        _INHERITED.extend(self._idle)
        self._idle.clear()
        self._reset()


def _identities(path: str) -> Files:
    real = _real(path)
    return tuple(_identity(f"{real}{end}") for end in ("", "-wal", "-shm"))


def _real(path: str) -> str:
    """Return the path beside which SQLite keeps the log."""
    return os.path.realpath(path) if os.path.islink(path) else path


def _identity(path: str) -> tuple[int, int]:
    try:
        found = os.stat(path)
    except OSError:
        return (0, 0)
    return found.st_dev, found.st_ino


def _close_all(idle: list[Connection], pid: list[int]) -> None:
    """Close what is idle, in the process that opened it."""
    while idle and pid[0] == os.getpid():
        idle.pop().end()


def _members(shared: Iterable[T]) -> list[T]:
    """Return the members of a set that other threads may be changing."""
    while True:
        try:
            return list(shared)
        except RuntimeError:  # it changed in size just then
            continue


@cache
def _watch_forks() -> None:
    """Have Python close the connections of every pool before each fork, from the first pool on."""
    if hasattr(os, "register_at_fork"):  # not on Windows
        os.register_at_fork(
            before=lambda: _undisturbed(_before_fork),
            after_in_parent=lambda: _undisturbed(_after_fork_in_parent),
            after_in_child=_after_fork_in_child,
        )


def _undisturbed(step: Callable[[], None]) -> None:
    """Do a step, again if a signal's handler raises in it, and raise that afterwards: Python forks all the same."""
    raised: list[BaseException] = []
    while len(raised) < SIGNALS:
        try:
            step()
            break
        except BaseException as error:  # noqa: BLE001 - raised below
            raised.append(error)
    if raised:
        raise raised.pop()


def _before_fork() -> None:
    me = threading.get_ident()
    _FORKING[me] = []  # from here on nothing is lent, also by a pool that is made meanwhile
    for pool in _members(_POOLS):
        _FORKING[me] += pool.before_fork()
    if not (_FORKING[me] or _KEPT or _INHERITED):  # else what is open is a store's
        paths = {_identity(pool.path): pool.path for pool in _members(_POOLS)}
        _OPEN_ELSEWHERE.update(paths[found] for found in paths.keys() & _open_files())


def _after_fork_in_parent() -> None:
    _FORKING.pop(threading.get_ident(), None)
    for pool in _members(_POOLS):
        pool.after_fork_in_parent()
    for path in _OPEN_ELSEWHERE - _WARNED:
        _WARNED.add(path)
        logger.warning(
            "This process was forked while something else in it had the file of the idempotency store %s open, such as "
            "a connection of sqlite3, SQLAlchemy or Django. The child may damage the file: close it before a fork.",
            path,
        )


def _after_fork_in_child() -> None:
    _KEPT.extend(_FORKING.get(threading.get_ident(), ()))
    _FORKING.clear()
    for pool in _members(_POOLS):
        pool.after_fork_in_child()


def _open_files() -> set[tuple[int, int]]:
    for folder in ("/proc/self/fd", "/dev/fd"):
        with suppress(OSError):
            found = set()
            for number in os.listdir(folder):
                with suppress(OSError):
                    status = os.fstat(int(number))
                    found.add((status.st_dev, status.st_ino))
            return found
    return set()


# What an error of SQLite means: a file that cannot serve now, one that refuses, or another program's content.
#
# By their texts: Python has their codes since 3.11 only.


_LOCKED = ("is locked", "locking protocol")
_READ_ONLY = ("readonly database", "unable to open database file")
_FOREIGN = ("no such column", "has no column", "no such table", "constraint failed")


def locked(error: sqlite3.Error) -> bool:
    """Return whether another connection was using the file, so that a second try may succeed."""
    return any(words in str(error) for words in _LOCKED)


def translate_error(error: sqlite3.Error, path: str) -> StoreError:
    """Return the store's error that an error of SQLite means.

    Arguments:
        error: What sqlite3 raised.
        path: The store's file.
    """
    what = str(error)
    if locked(error):
        return StoreUnreachable(
            f"The idempotency store {path} is locked: another transaction that writes to it is open for too long, or "
            f"has written since this one began to read ({what}). Keep transactions that write short, and begin them "
            "with BEGIN IMMEDIATE."
        )
    if "not a database" in what or "malformed" in what:
        return StoreRefused(
            f"Expected {path} to be a SQLite database, and it is none, is encrypted or is damaged ({what}). "
            "Name another file, or restore this one."
        )
    if any(words in what for words in _READ_ONLY):
        return _closed_to_us(what, path)
    if "decode to UTF-8" in what:
        return RecordUnreadable(f"A record in the idempotency store {path} is damaged ({what}). Delete it.")
    if any(words in what for words in _FOREIGN):
        return StoreRefused(
            f"Expected the table of the idempotency store in {path} as this library makes it, and it is another one "
            f"({what}). Name another table with ?table=..."
        )
    return StoreUnreachable(f"The idempotency store {path} cannot serve ({what}). Is its disk full or gone?")


def _closed_to_us(what: str, path: str) -> StoreError:
    folder = os.path.dirname(path)
    if not os.path.isdir(folder):
        return StoreRefused(f"The idempotency store {path} cannot be opened: there is no folder {folder}. Create it.")
    if not os.access(folder, os.W_OK | os.X_OK) or (os.path.exists(path) and not os.access(path, os.W_OK)):
        return StoreRefused(
            f"Expected to be allowed to write to the idempotency store {path}, and this process is not ({what}). "
            "It needs the right to write to the file and to its folder, where SQLite keeps its log."
        )
    if os.path.isdir(path):
        return StoreRefused(f"Expected {path} to be a SQLite database, and it is a folder. Name a file.")
    return StoreUnreachable(
        f"The idempotency store {path} cannot be opened ({what}). Has this process too many files open?"
    )


TABLE = "celery_idempotency"
#: Seconds a verb waits for other writers. A lease call must answer or fail long before a lease ends.
TIMEOUT = 2.0
SYNCHRONOUS = ("full", "normal", "extra", "off")
OPTIONS = ("table", "timeout", "synchronous")
_NAME = re.compile(r"(?!sqlite_)[A-Za-z_][A-Za-z0-9_]{0,62}", re.IGNORECASE)


@dataclass(frozen=True)
class Address:
    """Where a store keeps its records, and how.

    Arguments:
        path: The file; what is relative is looked for in the folder that is current now.
        table: The table in it, which the store makes; a second one is ``<table>_meta``.
        timeout: Seconds a verb waits for other writers.
        synchronous: What a commit waits for, as in SQLite's pragma of this name.

    Raises:
        ConfigurationError: one of these is nothing that SQLite takes.
    """

    path: str
    table: str = TABLE
    timeout: float = TIMEOUT
    synchronous: str = SYNCHRONOUS[0]

    def __post_init__(self) -> None:
        if not self.path or ":memory:" in self.path:
            raise ConfigurationError(
                f"Expected the path of a file, as in sqlite:///idempotency.db, got {self.path!r}. "
                "For a store in the memory of one process use memory://."
            )
        if not _NAME.fullmatch(self.table):
            raise ConfigurationError(
                f"Expected table to be letters, digits and underscores, 63 at most, got {self.table!r}. "
                f"The default is {TABLE}."
            )
        if not (math.isfinite(self.timeout) and self.timeout >= 0):
            raise ConfigurationError(f"Expected timeout to be seconds, 0 or more, got {self.timeout!r}.")
        if self.synchronous not in SYNCHRONOUS:
            raise ConfigurationError(f"Expected synchronous to be one of {SYNCHRONOUS}, got {self.synchronous!r}.")
        # A worker that becomes a daemon changes its folder, and its children would use another file.
        object.__setattr__(self, "path", os.path.abspath(self.path))

    def usage(self) -> dict[str, int]:
        """Return the size of the file with its log, of all that is in it."""
        real = _real(self.path)
        files = [path for path in (real, f"{real}-wal") if os.path.exists(path)]
        return {"file_bytes": sum(map(os.path.getsize, files))}

    @classmethod
    def of(cls, url: str) -> Address:
        """Return what a URL names: ``sqlite:///relative/path`` or ``sqlite:////absolute/path``, as SQLAlchemy's.

        Raises:
            ConfigurationError: it names no file, or has an option that is wrong.
        """
        rest, _, query = url.partition("://")[2].partition("?")
        host, _, path = rest.partition("/")
        if host:
            shown = hide_password(rest)
            raise ConfigurationError(
                f"Expected three slashes before a relative path and four before an absolute one, got sqlite://{shown}. "
                f"Write sqlite:///{shown}."
            )
        options = dict(parse_qsl(query, keep_blank_values=True))
        for name in options:
            if name not in OPTIONS:
                raise unknown_parameter(url, name, OPTIONS, f"There are {', '.join(OPTIONS)}.")
        try:
            timeout = float(options.get("timeout", TIMEOUT))
        except ValueError:
            raise ConfigurationError(
                f"Expected timeout to be seconds, 0 or more, got {options['timeout']!r}."
            ) from None
        synchronous = options.get("synchronous", SYNCHRONOUS[0]).lower()
        return cls(unquote(path), options.get("table", TABLE), timeout, synchronous)
