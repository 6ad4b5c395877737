"""The tables that the store makes for itself, and their version."""

from __future__ import annotations

import sqlite3
from functools import cache
from importlib import resources

from ...errors import StoreRefused
from .connections import Address
from .records import COLUMNS

VERSION = 1
#: By version, the statements that lead from it to the next one.
UPGRADES: dict[int, str] = {}
_RISE = "UPDATE \"{table}_meta\" SET value = {version} WHERE name = 'version'"


@cache
def _source(name: str) -> str:
    return (resources.files(__package__) / "sql" / f"{name}.sql").read_text(encoding="utf-8")


def _statements(source: str, **names: object) -> list[str]:
    """Return the statements one by one: to execute them as a script would end the transaction."""
    return [statement for statement in source.format(**names).split(";\n") if statement.strip()]


class Schema:
    """The tables of one store in one file.

    Arguments:
        place: The file and the table of records.
    """

    def __init__(self, place: Address) -> None:
        self._table, self._path = place.table, place.path

    def prepare(self, connection: sqlite3.Connection) -> None:
        """Make a new connection ready, and what it needs in the file.

        Raises:
            StoreRefused: as `version`, or the file is where SQLite cannot share a write-ahead log.
        """
        if connection.execute("PRAGMA journal_mode").fetchall() != [("wal",)]:
            self.version(connection)  # what may not be written to stays as it is
            [(mode,)] = connection.execute("PRAGMA journal_mode = wal").fetchall()
            if mode != "wal":
                raise StoreRefused(
                    f"Expected the file system of {self._path} to take a write-ahead log, and it does not: "
                    f"SQLite stays with {mode!r}. Use a disk of this machine."
                )
        self.apply(connection)

    def version(self, connection: sqlite3.Connection) -> int:
        """Return which version the file has, or 0 if it has none of the tables, or the second one is empty.

        Raises:
            StoreRefused: another program's table has the name, or the version is newer than this library.
        """
        meta = f"{self._table}_meta"
        search = "SELECT lower(name) FROM sqlite_master WHERE lower(name) IN (lower(?), lower(?))"
        found = {name for (name,) in connection.execute(search, (self._table, meta)).fetchall()}
        if not found:
            return 0
        try:
            if len(found) != 2:
                raise LookupError(f"there is no {meta}")
            # The name cannot be a parameter; `Address` has seen that it is letters, digits, underscores.
            question = f"SELECT value FROM \"{meta}\" WHERE name = 'version'"  # noqa: S608
            answer = connection.execute(question).fetchall()
            if not answer:  # emptied, or copied without its rows
                connection.execute(f'SELECT {", ".join(COLUMNS)} FROM "{self._table}" LIMIT 0')  # noqa: S608
            version = int(answer[0][0]) if answer else 0
        except (sqlite3.OperationalError, LookupError, ValueError, TypeError) as error:
            if "no such column" not in str(error) and isinstance(error, sqlite3.OperationalError):
                raise
            raise StoreRefused(
                f"Expected the table {self._table!r} in {self._path} to be the one that this library makes, and it is "
                f"another application's ({error}). Name another table with ?table=..."
            ) from None
        if version > VERSION:
            raise StoreRefused(
                f"Expected the table {self._table!r} in {self._path} to have version {VERSION} or less, got {version}: "
                "a newer version of celery_idempotent made it. Upgrade this worker."
            )
        return version

    def apply(self, connection: sqlite3.Connection) -> None:
        """Make the tables, or upgrade them, in one transaction; another process may have done it meanwhile."""
        if not self.due(connection):
            return
        connection.execute("BEGIN IMMEDIATE")
        try:
            for statement in self.due(connection):
                connection.execute(statement)
            connection.execute("COMMIT")
        finally:
            if connection.in_transaction:
                connection.execute("ROLLBACK")

    def pending(self, connection: sqlite3.Connection | None) -> str:
        """Return the statements that are due, as text; "" if there are none.

        Arguments:
            connection: One to the file, or None where there is no file.
        """
        return "".join(f"{statement.strip()};\n" for statement in self.due(connection))

    def due(self, connection: sqlite3.Connection | None) -> list[str]:
        """Return the statements that are due, one by one.

        Arguments:
            connection: One to the file, or None where there is no file.

        Raises:
            StoreRefused: as `version`.
        """
        version = self.version(connection) if connection is not None else 0
        due = [] if version else _statements(_source("schema"), table=self._table, version=VERSION)
        for step in range(version or VERSION, VERSION):
            due += _statements(UPGRADES[step], table=self._table)
            due += _statements(_RISE, table=self._table, version=step + 1)
        # No step of the version: a process of an older release, which knows no history, shares the file as before.
        if connection is None or not self._has_history(connection):
            due += _statements(_source("history"), table=self._table)
        return due

    def _has_history(self, connection: sqlite3.Connection) -> bool:
        search = "SELECT 1 FROM sqlite_master WHERE lower(name) = lower(?)"
        return bool(connection.execute(search, (f"{self._table}_history",)).fetchall())
