"""The history of a key in SQLite: a row beside its record, in a table of its own."""

from __future__ import annotations

import json
from collections.abc import Iterable
from sqlite3 import Cursor

from ..errors import RecordUnreadable
from ..notes import MOST, Note, Noted
from .noting import Line, expiry, grouped, lines, told
from .sqlite_rows import LARGEST, clock

__all__ = ["Histories"]


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

    def note(self, cursor: Cursor, notes: Iterable[Note]) -> None:
        """Add lines; what was there and is none of ours is replaced."""
        now = clock()
        for key, mine in grouped(notes).items():
            try:
                known = self._lines(cursor, key, now)
            except RecordUnreadable:
                known = []
            text = json.dumps([*known, *lines(mine, now)][-MOST:], separators=(",", ":"))
            cursor.execute(self._write, (key, text, min(expiry(mine, now), LARGEST)))

    def tell(self, cursor: Cursor, key: str) -> list[Noted]:
        """Return what was noted of a key.

        Raises:
            RecordUnreadable: what is there is none of ours.
        """
        now = clock()
        return told(self._lines(cursor, key, now), now)

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
