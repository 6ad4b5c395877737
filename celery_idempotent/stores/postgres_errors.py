"""What an error of psycopg means: a server that cannot serve, or one that will not serve us."""

from __future__ import annotations

import psycopg
from psycopg import errors

from ..errors import StoreError, StoreRefused, StoreUnreachable

__all__ = ["NO_SCHEMA", "REPEATABLE", "refusal", "translated"]

#: What our statements meet where `apply_schema` was never called, or by an older version.
NO_SCHEMA = (errors.UndefinedTable, errors.UndefinedFunction, errors.InvalidSchemaName, errors.UndefinedObject)
#: What is over when the statement is sent again.
REPEATABLE = (errors.SerializationFailure, errors.DeadlockDetected)
#: Error classes by which a server refuses: authorization, a database that does not exist, rights.
_REFUSED = ("28", "3D", "42501")
#: The same said while connecting, where libpq does not tell the code of the error.
_WORDS = (
    "password authentication failed",
    "authentication failed",
    "no password supplied",
    "no pg_hba.conf entry",
    "permission denied",
    "is not permitted",
    "no such database",
    "no such user",
)


def translated(error: psycopg.Error, shown: str) -> StoreError:
    """Return the store's error that an error of psycopg means.

    Arguments:
        error: What psycopg raised.
        shown: What to call the server; no password in it.
    """
    what = f"{type(error).__name__}: {str(error).strip()}"
    refused = refusal(error, shown)
    if refused is not None:
        return refused
    if isinstance(error, errors.LockNotAvailable):
        return StoreUnreachable(
            f"A record of the idempotency store {shown} is held by an open transaction ({what}). "
            "Is there one that settles a task and is not committed?"
        )
    return StoreUnreachable(
        f"The idempotency store {shown} cannot serve ({what}). Is it running, and may it be written?"
    )


def refusal(error: psycopg.Error, shown: str) -> StoreRefused | None:
    """Return what to say if the server will not serve us as we and it are set up, else None."""
    text = str(error).strip()
    what = f"{type(error).__name__}: {text}"
    if isinstance(error, NO_SCHEMA):
        return StoreRefused(
            f"The idempotency store {shown} has no table and functions for this version ({what}). "
            "Make or upgrade them with: celery-idempotent --store URL schema --apply"
        )
    state = error.sqlstate or ""
    unknown = "does not exist" in text and ("FATAL" in text or not state)
    if state.startswith(_REFUSED) or (not state and (unknown or any(words in text for words in _WORDS))):
        return StoreRefused(
            f"The idempotency store {shown} refused us ({what}). "
            "Check the user, the password, the database and the rights on the table and its functions."
        )
    if isinstance(error, psycopg.DataError):
        return StoreRefused(
            f"The idempotency store {shown} cannot keep such a record ({what}). "
            "Keys, task ids and names must be text that the database can hold: no NUL character, and no more than "
            "2,700 bytes of key."
        )
    return None
