"""A record settled in the caller's own transaction, by one statement on the caller's own connection."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import psycopg
from psycopg import pq
from psycopg.rows import tuple_row

from ..errors import ConfigurationError
from .postgres_errors import NO_SCHEMA, refusal
from .transactions import driver_connection, no_transaction

__all__ = ["answer_within", "caller_connection"]


def caller_connection(using: Any) -> psycopg.Connection[Any]:
    """Return the connection on which the caller's transaction is open.

    One without autocommit begins its transaction with its first statement, which may be ours.

    Raises:
        ConfigurationError: it is no connection of psycopg 3, or in no transaction.
    """
    connection: psycopg.Connection[Any] = driver_connection(using, psycopg.Connection)
    if connection.closed:
        raise no_transaction("the connection is closed")
    if connection.autocommit and connection.pgconn.pipeline_status != pq.PipelineStatus.OFF:
        with connection.pipeline():  # which waits for what was sent: until then nobody knows whether there was a BEGIN
            pass
    status = connection.info.transaction_status
    if status == pq.TransactionStatus.INERROR:
        raise no_transaction("a statement before this one has failed: roll it back")
    if status == pq.TransactionStatus.IDLE and connection.autocommit:
        raise no_transaction("the connection is in autocommit mode: use `with connection.transaction():`")
    return connection


def answer_within(
    connection: psycopg.Connection[Any], statement: str, args: Sequence[Any], *, shown: str, table: str
) -> str:
    """Run settle.sql on the caller's connection and return its answer; what the server raises there breaks the
    transaction, and is raised as psycopg raises it unless we have something to say.

    Raises:
        ConfigurationError: there is no such store in the caller's database.
        StoreRefused: the caller's user may not write the table.
    """  # fmt: skip
    try:
        # A cursor of psycopg's own: the caller's may have another row factory, or bind and fetch in another way.
        with psycopg.Cursor(connection, row_factory=tuple_row) as cursor:
            row = cursor.execute(statement, args, prepare=False).fetchone()
    except NO_SCHEMA as error:
        raise elsewhere(connection, shown, table) from error
    except psycopg.Error as error:
        refused = refusal(error, shown)
        if refused is None:
            raise
        raise refused from error
    assert row is not None
    return row[0].decode() if isinstance(row[0], bytes) else str(row[0])  # bytes where the encoding is SQL_ASCII


def elsewhere(connection: psycopg.Connection[Any], shown: str, table: str) -> ConfigurationError:
    """Return the error for a transaction in another database than the store's."""
    info = connection.info
    return ConfigurationError(
        f"settle: expected using= to lead to the database of the idempotency store, {shown} with the table {table}, "
        f"got the database {info.dbname!r} on {info.host or 'the default host'}:{info.port}, which is another one. "
        "Two databases cannot commit together: keep the store in the database of the task's own rows."
    )
