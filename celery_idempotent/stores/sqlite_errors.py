"""What an error of SQLite means: a file that cannot serve now, one that will not serve us, or no record of ours.

By their texts: Python has their codes since 3.11 only.
"""

from __future__ import annotations

import os
import sqlite3

from ..errors import RecordUnreadable, StoreError, StoreRefused, StoreUnreachable

__all__ = ["locked", "translated"]

_LOCKED = ("is locked", "locking protocol")
_READ_ONLY = ("readonly database", "unable to open database file")
_NOT_OURS = ("no such column", "has no column", "no such table", "constraint failed")


def locked(error: sqlite3.Error) -> bool:
    """Tell whether somebody else was using the file, so that a second try may succeed."""
    return any(words in str(error) for words in _LOCKED)


def translated(error: sqlite3.Error, path: str) -> StoreError:
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
    if any(words in what for words in _NOT_OURS):
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
