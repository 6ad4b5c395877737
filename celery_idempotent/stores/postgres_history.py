"""The history of a key in PostgreSQL: a row beside its record, in a table that a worker can do without."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ..errors import StoreRefused
from ..notes import MOST, Note, Noted
from .noting import grouped, told
from .postgres_errors import NO_SCHEMA
from .postgres_rows import stored, unstored, us
from .postgres_schema import Schema

__all__ = ["Histories"]

logger = logging.getLogger("celery_idempotent.stores")

#: Rows of one key's lines are locked in the order of the keys, so that two that write many wait and do not deadlock.
_NOTE = """
insert into {history} as h (key, at, line, expires)
  select n.key, array_agg({now} - n.ago order by n.place), array_agg(n.line order by n.place), max({now} + n.rest)
  from unnest(%s::text[], %s::bigint[], %s::bigint[], %s::text[]) with ordinality n (key, ago, rest, line, place)
  group by n.key order by n.key collate "C"
on conflict (key) do update set expires = greatest(h.expires, excluded.expires),
  at = (case when h.expires > {now} then h.at else '{}' end || excluded.at)
    [greatest(1, case when h.expires > {now} then cardinality(h.at) else 0 end + cardinality(excluded.at) - {last}):],
  line = (case when h.expires > {now} then h.line else '{}' end || excluded.line)
    [greatest(1, case when h.expires > {now} then cardinality(h.at) else 0 end + cardinality(excluded.at) - {last}):]
returning 1
"""
_TELL = "select {now}, at, line from {history} where key = %s and expires > {now}"
_FORGET = "delete from {history} where key = %s returning 1"
#: The clock is read once, so that the index is not read beyond what has expired.
_PURGE = """
delete from {history} h where h.ctid = any (array(
  select o.ctid from {history} o where o.expires <= (select {now}) order by o.expires limit %s for update skip locked
)) returning 1
"""


class Histories:
    """The histories of one table's keys.

    Arguments:
        schema: Names the table.
        run: Runs a statement and returns its rows.
    """

    def __init__(self, schema: Schema, run: Callable[[str, Sequence[Any]], list[tuple[Any, ...]]]) -> None:
        self._run = run
        self._note, self._tell, self._forget, self._purge = (
            schema.render(statement.replace("{last}", str(MOST - 1))) for statement in (_NOTE, _TELL, _FORGET, _PURGE)
        )

    def note(self, notes: Iterable[Note]) -> None:
        """Add lines.

        Raises:
            StoreRefused: among others, the database has the schema of an older version.
        """
        found = [(key, note) for key, mine in grouped(notes).items() for note in mine]
        if found:
            keys, agos = [stored(key) for key, _ in found], [us(note.ago) for _, note in found]
            rests = [us(note.keep - note.ago) for _, note in found]
            self._run(self._note, (keys, agos, rests, [stored(note.text) for _, note in found]))

    def tell(self, key: str) -> list[Noted]:
        """Return what was noted of a key."""
        rows = self._where_there_is_one(self._tell, (stored(key),))
        return [noted for now, at, line in rows for noted in told(zip(at, map(unstored, line), strict=True), now)]

    def forget(self, key: str) -> None:
        """Delete the history of a key."""
        self._where_there_is_one(self._forget, (stored(key),))

    def purge(self, most: int) -> int:
        """Delete what has expired, and return how much; who may not goes on: the records are purged all the same."""
        try:
            return len(self._where_there_is_one(self._purge, (most,)))
        except StoreRefused as error:
            logger.debug("Expired histories were not removed: %s", error)
            return 0

    def purge_all(self, most: int, batch: int) -> None:
        """Delete what has expired, so many at a time, until a time finds less than a whole batch."""
        while most and self.purge(most) == batch:
            pass

    def _where_there_is_one(self, statement: str, args: Sequence[Any]) -> list[tuple[Any, ...]]:
        """Run a statement, on a database of an older version as on one that has noted nothing."""
        try:
            return self._run(statement, args)
        except StoreRefused as error:
            if isinstance(error.__cause__, NO_SCHEMA):
                return []
            raise
