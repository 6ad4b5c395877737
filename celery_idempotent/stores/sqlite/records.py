"""One record <-> one row of the table."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from sqlite3 import Cursor
from typing import Any

from ...errors import RecordUnreadable
from ..records import State
from ..rules import Row

#: The columns of a row, without its key, in the order of the table.
Raw = tuple[Any, ...]
COLUMNS = (
    *("state", "fence", "owner", "task", "holder", "lease_end", "not_before", "crashes", "reason", "fingerprint"),
    *("payload", "ended", "expires", "waiting", "attempts", "announced"),
)
FENCE = COLUMNS.index("fence")
TYPES = (str, int, str, str, str, int, int, int, str, str, bytes, int, int)
#: The largest integer that SQLite keeps; a ttl may be meant as "for ever".
LARGEST = 2**63 - 1


def clock() -> int:
    """Return microseconds since 1970; from the system, where a test that freezes Python's clocks freezes no leases."""
    if hasattr(time, "clock_gettime_ns"):
        return time.clock_gettime_ns(time.CLOCK_REALTIME) // 1000
    return time.time_ns() // 1000  # on Windows, where such a test freezes them


def row_of(key: str, raw: Raw) -> Row:
    """Return the record that the columns hold.

    Raises:
        RecordUnreadable: they hold none.
    """
    try:
        if not all(isinstance(value, kind) for value, kind in zip(raw, TYPES, strict=False)):
            raise TypeError("a column of another type")
        row = Row(State(raw[0]), *raw[1:13])
        waiting, attempts, announced = raw[13:]
        if waiting:
            row.waiting = {task: (int(mark[0]), int(mark[1]), mark[2]) for task, mark in json.loads(waiting).items()}
        if attempts:
            row.attempts = {task: int(least) for task, least in json.loads(attempts).items()}
        if announced:
            row.dispatched = list(json.loads(announced))
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise RecordUnreadable(
            f"The record {key!r} is damaged or was written by a newer version of celery_idempotent ({error}). "
            "Upgrade this worker, or delete the key if it is garbage."
        ) from error
    return row


def alive(key: str, raw: Raw | None, now: int) -> Row | None:
    """Return the record that the columns hold, if there are any and it has not expired.

    Raises:
        RecordUnreadable: they hold none.
    """
    if raw is None:
        return None
    row = row_of(key, raw)
    return row if row.expires > now else None


def raw_of(row: Row) -> Raw:
    """Return the columns of a record."""
    return (
        row.state.value,
        row.fence,
        row.owner,
        row.task_id,
        row.holder,
        min(row.lease_end, LARGEST),
        min(row.not_before, LARGEST),
        row.crashes,
        row.reason,
        row.fingerprint,
        row.payload,
        row.ended,
        min(row.expires, LARGEST),
        json.dumps(row.waiting, separators=(",", ":")) if row.waiting else None,
        json.dumps(row.attempts, separators=(",", ":")) if row.attempts else None,
        json.dumps(row.dispatched, separators=(",", ":")) if row.dispatched else None,
    )


class Rows:
    """The statements of one table; each method is one or two of them on a cursor.

    Every answer is fetched to its end: a statement that is not would hold its view of the file open, and the log could
    not be worked off.
    """

    def __init__(self, table: str) -> None:
        columns = ", ".join(COLUMNS)
        places = ", ".join("?" * (len(COLUMNS) + 1))
        # Not a temporary table of this name, which a caller's connection may have, and no other would see.
        meta = f'main."{table}_meta"'
        name = f'main."{table}"'
        # The name of a table cannot be a parameter; `Address` has seen that this one is letters, digits, underscores.
        self._read = f"SELECT {columns} FROM {name} WHERE key = ?"  # noqa: S608
        self._terms = f"SELECT CAST(fence AS INTEGER), CAST(expires AS INTEGER) FROM {name} WHERE key = ?"  # noqa: S608
        self._write = f"INSERT OR REPLACE INTO {name} (key, {columns}) VALUES ({places})"  # noqa: S608
        self._delete = f"DELETE FROM {name} WHERE key = ?"  # noqa: S608
        self._page = f"SELECT key, {columns} FROM {name} WHERE key > ? ORDER BY key LIMIT ?"  # noqa: S608
        self._first_page = self._page.replace("key > ?", "key >= ?")
        self._expired = f"SELECT key, CAST(fence AS INTEGER) FROM {name} WHERE expires <= ? ORDER BY expires LIMIT ?"  # noqa: S608
        # Its row may be gone, as where tests empty all tables.
        self._last_fence = f"SELECT coalesce(max(value), 0) FROM {meta} WHERE name = 'last_fence'"  # noqa: S608
        self._raise_fence = (
            f"INSERT OR REPLACE INTO {meta} (name, value) SELECT 'last_fence', max(?, ({self._last_fence}))"
        )

    def read(self, cursor: Cursor, key: str) -> Raw | None:
        """Return the columns of a key."""
        found = cursor.execute(self._read, (key,)).fetchall()
        return tuple(found[0]) if found else None

    def terms(self, cursor: Cursor, key: str) -> tuple[int, int] | None:
        """Return fence and expiry of a key."""
        found = cursor.execute(self._terms, (key,)).fetchall()
        return found[0] if found else None

    def keep(self, cursor: Cursor, key: str, row: Row, before: Raw | None) -> None:
        """Store a record in the place of what was there, unless that is the same."""
        after = raw_of(row)
        if after != before:
            cursor.execute(self._write, (key, *after))

    def delete(self, cursor: Cursor, key: str, fence: int) -> None:
        """Remove a row, and remember its fence: the next lease of the key must have a higher one."""
        cursor.execute(self._delete, (key,))
        cursor.execute(self._raise_fence, (fence,))

    def last_fence(self, cursor: Cursor) -> int:
        """Return the highest fence of what was removed."""
        return int(cursor.execute(self._last_fence).fetchall()[0][0])

    def expired(self, cursor: Cursor, now: int, most: int) -> list[tuple[str, int]]:
        """Return keys and fences of what has expired, the oldest first."""
        return cursor.execute(self._expired, (now, most)).fetchall()

    def page(self, cursor: Cursor, after: str | None, prefix: str, size: int) -> Sequence[tuple[Any, ...]]:
        """Return rows in the order of their keys: those after one, or from the first that may have the prefix."""
        if after is None:
            return cursor.execute(self._first_page, (prefix, size)).fetchall()
        return cursor.execute(self._page, (after, size)).fetchall()
