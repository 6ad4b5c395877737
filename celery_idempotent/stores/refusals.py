"""What an error of redis-py means: a server that cannot serve, one that will not serve us, or no record of ours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from redis.exceptions import AskError, AuthenticationError, AuthorizationError, NoPermissionError, ResponseError

from ..errors import RecordUnreadable, StoreError, StoreRefused, StoreUnreachable

__all__ = ["REFUSALS", "translated"]

REFUSALS = (AuthenticationError, AuthorizationError, NoPermissionError)
#: The same said from inside a script (Redis 6 and 7.0, then later), to whoever sends much and is nobody, and of a
#: database that does not exist.
_REFUSED = (
    "The user executing the script can't",
    "ACL failure in script",
    "Protocol error: unauthenticated",
    "DB index is out of range",
)


def translated(error: Exception, command: Sequence[Any], url: str) -> StoreError:
    """Return the store's error that an error of redis-py means.

    Arguments:
        error: What redis-py raised.
        command: What was sent.
        url: What to call the server; no password in it.
    """
    if isinstance(error, StoreError):
        return error
    what = f"{type(error).__name__}: {error}"
    if isinstance(error, AskError) or str(error).startswith(("MOVED ", "ASK ")):
        return StoreRefused(f"The idempotency store {url} is a node of a Cluster ({what}). Name it redis+cluster://.")
    if "cluster support disabled" in what:
        return StoreRefused(
            f"The idempotency store {url} is no Cluster ({what}). Name it redis://, or the right nodes."
        )
    if isinstance(error, ResponseError) and str(error).lower().startswith("unknown command"):
        return StoreRefused(
            f"The idempotency store {url} lacks a command ({what}). Expected a Redis or Valkey with its Lua scripts, "
            'and none of its commands renamed; of fakeredis, install "fakeredis[lua]".'
        )
    if isinstance(error, REFUSALS) or any(words in str(error) for words in _REFUSED):
        return StoreRefused(
            f"The idempotency store {url} refused us ({what}). "
            "Check the password, the user and its rights, and the number of the database."
        )
    if isinstance(error, ResponseError) and "WRONGTYPE" in str(error):
        return RecordUnreadable(
            f"{command[3]!r} in the idempotency store {url} is no record of ours ({what}). "
            f"Does something else use this database? Delete the key, or set idempotency_namespace."
        )
    return StoreUnreachable(
        f"The idempotency store {url} cannot serve ({what}). Is it running, and has it memory left?"
    )
