"""A store in one SQLite file, for all processes of a machine.

Every verb is a short transaction that no other can come between, and decides by `rules`, in this process, over the row.
What changes nothing is answered from a plain read, which waits for no writer. The clock is the machine's own, which its
processes share.
"""

from __future__ import annotations

import json
import logging
import os
import random
import sqlite3
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from sqlite3 import Cursor
from time import monotonic
from typing import Any

from ...errors import ConfigurationError, LeaseLost, RecordUnreadable, StoreError
from .. import rules
from ..base import Store, pass_by_unreadable
from ..history import Line, expiry, grouped, lines, past_events
from ..records import HISTORY_LIMIT, Claim, HistoryEntry, Lease, Outcome, PastEvent, Record, Refusal, Release, State
from ..transactions import driver_connection, no_transaction, unwrapped
from .connections import SYNCHRONOUS, TABLE, TIMEOUT, Address, Connections, translate_error
from .records import FENCE, LARGEST, Rows, alive, clock, raw_of
from .schema import Schema

logger = logging.getLogger("celery_idempotent.stores")

#: Rows that one transaction touches at most, so that no other waits long for it.
RENEWED, PURGED, PAGE = 200, 50, 50
#: Seconds after which a purging transaction ends with what it has, and the least pause before the next one.
PURGING, PURGE_PAUSE = 0.02, 0.005


class SqliteStore(Store):
    """Keep the records in a table of a SQLite file; the file and the table are made at first use.

    Arguments:
        path: The file, on a disk of this machine.
        table: The table in it; two more are ``<table>_meta`` and ``<table>_history``.
        timeout: Seconds a verb waits for other writers before it raises `StoreUnreachable`.
        synchronous: What the commit of an outcome waits for, as in SQLite's pragma of this name: "full" loses
            nothing that was settled when the machine loses its power, "normal" the last moments, and neither anything
            when a process is killed.

    Raises:
        ConfigurationError: one of these is wrong.
    """

    keeps_history = True
    #: One lease of so many is followed by the removal of a few expired records; 0 leaves that to ``purge``.
    purge_every = 25

    def __init__(
        self, path: str, *, table: str = TABLE, timeout: float = TIMEOUT, synchronous: str = SYNCHRONOUS[0]
    ) -> None:
        self._place = Address(path, table, timeout, synchronous)
        self._rows, self._histories = Rows(table), Histories(table)
        self._schema = Schema(self._place)
        self._connections = Connections(self._place.path, timeout, synchronous, self._schema.prepare)

    @classmethod
    def from_url(cls, url: str) -> SqliteStore:
        """Return a store in the file that ``url`` names; nothing is opened yet.

        Arguments:
            url: ``sqlite:///relative/path`` or ``sqlite:////absolute/path``; its query may give ``table``, ``timeout``
                and ``synchronous``.

        Raises:
            ConfigurationError: it names no file, or has an option that is wrong.
        """
        place = Address.of(url)
        return cls(place.path, table=place.table, timeout=place.timeout, synchronous=place.synchronous)

    def acquire(self, claim: Claim) -> Lease | Refusal:
        answer = self._connections.read(lambda cursor: self._refused(cursor, claim))
        if answer is not None:
            return answer
        granted = self._connections.write(lambda cursor: self._acquired(cursor, claim))
        if isinstance(granted, Lease) and random.random() * self.purge_every < bool(self.purge_every):
            self._tidy()
        return granted

    def _refused(self, cursor: sqlite3.Cursor, claim: Claim) -> Refusal | None:
        """Answer a claim that changes nothing, or return None: what is done is replayed without a write."""
        raw = self._rows.read(cursor, claim.key)
        row = alive(claim.key, raw, now := clock())
        if row is None:
            return None
        answer, row = rules.acquire(claim.key, row, claim, now)
        return answer if isinstance(answer, Refusal) and raw_of(row) == raw else None

    def _acquired(self, cursor: sqlite3.Cursor, claim: Claim) -> Lease | Refusal:
        raw = self._rows.read(cursor, claim.key)
        known = alive(claim.key, raw, now := clock())
        answer, row = rules.acquire(claim.key, known, claim, now)
        if known is None and isinstance(answer, Lease):
            # What was removed, or is about to be replaced, may have a fence that the clock has not reached again.
            row.fence = max(row.fence, (raw[FENCE] if raw else self._rows.last_fence(cursor)) + 1)
            answer = Lease(claim, row.fence)
        self._rows.keep(cursor, claim.key, row, raw)
        return answer

    def renew(self, leases: Sequence[Lease]) -> Sequence[Lease]:
        lost: list[Lease] = []
        failed: list[RecordUnreadable] = []
        for start in range(0, len(leases), RENEWED):
            batch = leases[start : start + RENEWED]
            more, unreadable = self._connections.write(partial(self._renewed, leases=batch))
            lost += more
            failed += unreadable
        if failed:  # the leases on the others need not run out for it
            raise failed[0]
        return lost

    def _renewed(self, cursor: sqlite3.Cursor, leases: Sequence[Lease]) -> tuple[list[Lease], list[RecordUnreadable]]:
        lost: list[Lease] = []
        failed: list[RecordUnreadable] = []
        now = clock()
        for lease in leases:
            raw = self._rows.read(cursor, lease.key)
            try:
                row = rules.renew(alive(lease.key, raw, now), lease, now)
            except RecordUnreadable as error:
                failed.append(error)
                continue
            if row is None:
                lost.append(lease)
            else:
                self._rows.keep(cursor, lease.key, row, raw)
        return lost, failed

    def settle(self, lease: Lease, outcome: Outcome, *, ttl: float) -> None:
        self._connections.write(lambda cursor: self._settled(cursor, lease, outcome, ttl), lasting=True)

    def settle_within(self, lease: Lease, outcome: Outcome, *, ttl: float, using: Any) -> None:
        with within(using, self._place.path) as cursor:
            self._settled(cursor, lease, outcome, ttl)

    def _settled(self, cursor: sqlite3.Cursor, lease: Lease, outcome: Outcome, ttl: float) -> None:
        raw = self._rows.read(cursor, lease.key)
        row = rules.settle(alive(lease.key, raw, now := clock()), lease, outcome, ttl, now)
        if row is None:
            raise LeaseLost(f"The lease on {lease.key!r} is held by another holder: nothing was settled.")
        self._rows.keep(cursor, lease.key, row, raw)

    def release(self, lease: Lease, release: Release) -> bool:
        def work(cursor: sqlite3.Cursor) -> bool:
            raw = self._rows.read(cursor, lease.key)
            row = alive(lease.key, raw, now := clock())
            held = rules.release(row, lease, release, now)
            if row is not None:
                self._rows.keep(cursor, lease.key, row, raw)
            return held

        return self._connections.write(work)

    def mark_shutdown(self, lease: Lease) -> bool:
        def work(cursor: sqlite3.Cursor) -> bool:
            raw = self._rows.read(cursor, lease.key)
            row = alive(lease.key, raw, clock())
            held = rules.mark_shutdown(row, lease)
            if row is not None:
                self._rows.keep(cursor, lease.key, row, raw)
            return held

        return self._connections.write(work)

    def mark_dispatched(self, key: str, task_id: str) -> bool:
        def work(cursor: sqlite3.Cursor) -> bool:
            raw = self._rows.read(cursor, key)
            row = alive(key, raw, clock())
            settled = rules.mark_dispatched(row, task_id)
            if row is not None:
                self._rows.keep(cursor, key, row, raw)
            return settled

        return self._connections.write(work, lasting=True)

    def get(self, key: str) -> Record | None:
        raw = self._connections.read(lambda cursor: self._rows.read(cursor, key))
        row = alive(key, raw, now := clock())
        return None if row is None else rules.view(key, row, now)

    def delete(self, key: str) -> bool:
        def work(cursor: sqlite3.Cursor) -> bool:
            found = self._rows.terms(cursor, key)  # no more: what is damaged can be deleted too
            if found is not None:
                self._rows.delete(cursor, key, found[0])
            self._histories.forget(cursor, key)
            return found is not None and found[1] > clock()

        return self._connections.write(work, lasting=True)

    def append_history(self, entries: Sequence[HistoryEntry]) -> None:
        self._connections.write(lambda cursor: self._histories.append(cursor, entries))

    def history(self, key: str) -> list[PastEvent]:
        return self._connections.read(lambda cursor: self._histories.read(cursor, key))

    def scan(self, *, prefix: str = "", state: State | None = None) -> Iterator[Record]:
        after: str | None = None
        while True:
            page = self._connections.read(partial(self._rows.page, after=after, prefix=prefix, size=PAGE))
            for after, *columns in page:
                if not after.startswith(prefix):  # by the order of the keys none that follows does
                    return
                try:
                    row = alive(after, tuple(columns), now := clock())
                except RecordUnreadable:
                    pass_by_unreadable(after)
                    continue
                if row is not None and state in (None, row.state):
                    yield rules.view(after, row, now)
            if len(page) < PAGE:
                return

    def purge(self, limit: int | None = None) -> int:
        removed = 0
        while limit is None or removed < limit:
            most = PURGED if limit is None else min(PURGED, limit - removed)
            since = monotonic()
            batch = self._connections.write(partial(self._purged, most=most))
            removed += batch
            if not batch:
                break
            time.sleep(max(PURGE_PAUSE, monotonic() - since))  # as long as we held them up, the others may write
        return removed

    def _purged(self, cursor: sqlite3.Cursor, most: int) -> int:
        end = monotonic() + PURGING  # large payloads take longer to remove than small ones
        removed = 0
        for key, fence in self._rows.expired(cursor, clock(), most):
            self._rows.delete(cursor, key, fence)
            removed += 1
            if monotonic() > end:
                break
        self._histories.purge(cursor, most)
        return removed

    def _tidy(self) -> None:
        try:
            self._connections.write(partial(self._purged, most=PURGED))
        except StoreError as error:  # the lease is granted, and others will tidy up
            logger.debug("Expired records were not removed: %s", error)

    def pending_schema(self) -> str:
        """Return the statements that the next verb would execute first; the store makes its tables by itself."""
        return self._connections.look(self._schema.pending) if self.has_file() else self._schema.pending(None)

    def has_file(self) -> bool:
        """Return whether its file is there; the first verb makes it."""
        return os.path.exists(self._place.path)

    def apply_schema(self) -> None:
        """Make or upgrade the tables now and not at the first verb."""
        self._connections.read(lambda cursor: None)

    def usage(self, sample: Sequence[str] = ()) -> dict[str, int]:
        return self._place.usage()

    def ping(self) -> None:
        self._connections.write(lambda cursor: None)

    def close(self) -> None:
        self._connections.close()


@contextmanager
def within(using: Any, path: str) -> Iterator[sqlite3.Cursor]:
    """Give a cursor in the caller's transaction, whatever the caller's connection makes of rows and texts.

    Arguments:
        using: A connection of sqlite3, a SQLAlchemy Connection or Session, or the alias of a Django database.
        path: The store's file.

    Raises:
        ConfigurationError: it is none of these, has another file open, or is in no transaction.
        StoreError: what an error of SQLite means.
    """
    connection = driver_connection(using, sqlite3.Connection)
    factory = connection.text_factory
    try:
        # Not connection.cursor(), which hands on the caller's row_factory. The caller may close the connection while an
        # error is looked at, as in `Connections`.
        with closing(sqlite3.Cursor(connection)) as cursor:
            connection.text_factory = str
            _see_the_file(cursor, path)
            if not connection.in_transaction:
                _begin(cursor, using)
            yield cursor
    except sqlite3.ProgrammingError as error:  # it is closed, or another thread's
        raise no_transaction(f"it is not to be used here: {error}") from error
    except sqlite3.Error as error:
        if "readonly database" in str(error):
            raise ConfigurationError(
                f"settle: expected using= to be a connection that may write, got one that may not ({error}): it was "
                "opened with mode=ro, or PRAGMA query_only is on. Hand in the one that writes the task's own rows."
            ) from error
        raise translate_error(error, path) from error
    finally:
        connection.text_factory = factory


def _begin(cursor: sqlite3.Cursor, using: Any) -> None:
    """Begin the transaction that SQLAlchemy promised to commit: sqlite3 waits with that for the first write."""
    if unwrapped(using, sqlite3.Connection) is cursor.connection:
        raise no_transaction(
            "this connection has begun none: sqlite3 begins one with the first INSERT, UPDATE or DELETE, and with "
            "autocommit=True or isolation_level=None only by a statement. Write the task's own rows first, or execute "
            "BEGIN IMMEDIATE"
        )
    autocommit = getattr(cursor.connection, "autocommit", None)  # new in Python 3.12
    if autocommit is True or cursor.connection.isolation_level is None:
        raise no_transaction(
            "its connection commits every statement by itself (AUTOCOMMIT, autocommit=True, or isolation_level=None)"
        )
    cursor.execute("BEGIN IMMEDIATE")


def _see_the_file(cursor: sqlite3.Cursor, path: str) -> None:
    files = {name: file for _, name, file in cursor.execute("PRAGMA database_list").fetchall()}
    if _same(files["main"], path):
        return
    why = "Use a connection to the store's file, or put the store into the database of the task's own rows."
    if any(_same(file, path) for file in files.values()):
        why = "SQLite commits a main and an attached file one after the other, and a crash may come between. " + why
    raise ConfigurationError(
        f"settle: expected using= to have the store's file {path} open as its main database, "
        f"got {files['main'] or 'a database in memory'}. {why}"
    )


def _same(file: str, path: str) -> bool:
    return bool(file) and os.path.realpath(file) == os.path.realpath(path)


class Histories:
    """The statements of one table of histories; each method is one or two of them on a cursor.

    Arguments:
        table: The table of the records that they belong to.
    """

    def __init__(self, table: str) -> None:
        name = f'"{table}_history"'  # letters, digits, underscores: see `Rows`
        self._read = f"SELECT lines FROM {name} WHERE key = ? AND expires > ?"  # noqa: S608
        self._write = f"INSERT OR REPLACE INTO {name} (key, lines, expires) VALUES (?, ?, ?)"  # noqa: S608
        self._forget = f"DELETE FROM {name} WHERE key = ?"  # noqa: S608
        self._purge = f"DELETE FROM {name} WHERE key IN (SELECT key FROM {name} WHERE expires <= ? LIMIT ?)"  # noqa: S608

    def append(self, cursor: Cursor, entries: Iterable[HistoryEntry]) -> None:
        """Add lines; content of another program is replaced."""
        now = clock()
        for key, mine in grouped(entries).items():
            try:
                known = self._lines(cursor, key, now)
            except RecordUnreadable:
                known = []
            text = json.dumps([*known, *lines(mine, now)][-HISTORY_LIMIT:], separators=(",", ":"))
            cursor.execute(self._write, (key, text, min(expiry(mine, now), LARGEST)))

    def read(self, cursor: Cursor, key: str) -> list[PastEvent]:
        """Return what was noted of a key.

        Raises:
            RecordUnreadable: it was not written by celery_idempotent.
        """
        now = clock()
        return past_events(self._lines(cursor, key, now), now)

    def _lines(self, cursor: Cursor, key: str, now: int) -> list[Line]:
        found = cursor.execute(self._read, (key, now)).fetchall()
        try:
            return [(int(at), str(text)) for at, text in json.loads(found[0][0])] if found else []
        except (ValueError, TypeError) as error:
            raise RecordUnreadable(f"The history of {key!r} is damaged ({error}). Delete the key's history.") from error

    def forget(self, cursor: Cursor, key: str) -> None:
        """Delete the history of a key."""
        cursor.execute(self._forget, (key,))

    def purge(self, cursor: Cursor, most: int) -> None:
        """Delete some of what has expired."""
        cursor.execute(self._purge, (clock(), most))
