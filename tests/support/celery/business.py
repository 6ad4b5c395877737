"""The database of a shop, where its store keeps its records too: charges, written in transactions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import parse_qsl, urlsplit

__all__ = ["Business"]


class Business:
    """The shop's own rows.

    Arguments:
        url: Of the idempotency store, ``postgresql://...`` or ``sqlite:///...``; of its options the schema counts.
    """

    def __init__(self, url: str) -> None:
        self.url, _, query = url.partition("?")
        self._schema = dict(parse_qsl(query)).get("schema", "public")
        self._sqlite = self.url.startswith("sqlite:")

    def connect(self) -> Any:
        """Return a connection of the driver."""
        if self._sqlite:
            import sqlite3

            return sqlite3.connect(urlsplit(self.url).path.removeprefix("/"), timeout=30)
        import psycopg

        return psycopg.connect(self.url, options=f"-c search_path={self._schema}")

    @contextmanager
    def transaction(self) -> Iterator[Any]:
        """A connection in a transaction, which is committed unless the block raises."""
        connection = self.connect()
        try:
            yield connection
            connection.commit()
        finally:  # which rolls back what is open
            connection.close()

    def create(self) -> None:
        """Make the table; it lets an order be charged twice, so that a test can see it."""
        with self.transaction() as connection:
            connection.execute("CREATE TABLE charges (order_id text NOT NULL, charge text NOT NULL)")

    def charge(self, connection: Any, order_id: str, charge: str) -> None:
        """Write one charge."""
        mark = "?" if self._sqlite else "%s"
        connection.execute(f"INSERT INTO charges VALUES ({mark}, {mark})", (order_id, charge))

    def charges(self) -> list[tuple[str, str]]:
        """Return all charges, as (order, charge)."""
        with self.transaction() as connection:
            rows: list[tuple[str, str]] = connection.execute("SELECT order_id, charge FROM charges").fetchall()
        return rows
