"""What a task has of its own transaction -> a cursor in it, by which the record can be settled."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..errors import ConfigurationError
from .sqlite_errors import translated
from .transactions import driver_connection, no_transaction

__all__ = ["within"]


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
        cursor = sqlite3.Cursor(connection)  # not connection.cursor(), which hands on the caller's row_factory
        connection.text_factory = str
        _see_the_file(cursor, path)
        if not connection.in_transaction:
            _begin(cursor, using)
        yield cursor
    except sqlite3.ProgrammingError as error:  # it is closed, or another thread's
        raise no_transaction(f"it is not to be used here: {error}") from error
    except sqlite3.Error as error:
        raise translated(error, path) from error
    finally:
        connection.text_factory = factory


def _begin(cursor: sqlite3.Cursor, using: Any) -> None:
    """Begin the transaction that SQLAlchemy promised to commit: sqlite3 waits with that for the first write."""
    if using is cursor.connection:
        raise no_transaction(
            "this connection has begun none: sqlite3 begins one with the first INSERT, UPDATE or DELETE, and with "
            "autocommit=True or isolation_level=None only when told to. Write the task's own rows first, or execute "
            "BEGIN IMMEDIATE"
        )
    if cursor.connection.isolation_level is None:
        raise no_transaction("its connection commits every statement by itself (AUTOCOMMIT, or isolation_level=None)")
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
