"""The scripts that decide on the server, and how many calls of one travel together."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import cache
from importlib import resources
from typing import Any

from redis.exceptions import NoScriptError

__all__ = ["script", "together"]


@cache
def script(verb: str) -> tuple[str, str]:
    """Return the source of a verb's script and its digest, under which the server caches it."""
    source = (resources.files(__package__) / "lua" / f"{verb}.lua").read_text(encoding="utf-8")
    return source, hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()


def together(
    pipeline: Callable[[list[tuple[Any, ...]]], list[Any]],
    verb: str,
    calls: Sequence[tuple[Any, ...]],
    last: tuple[Any, ...] | None = None,
) -> list[Any]:
    """Call a verb for many keys in one round trip, and return the replies; two where the server forgot the script.

    Arguments:
        pipeline: Sends commands and returns their replies, errors among them.
        verb: One that may be asked again.
        calls: For each call its key and the script's arguments.
        last: A command to send behind them all, whose reply is the last.
    """
    source, digest = script(verb)
    tail = [] if last is None else [last]
    replies = pipeline([*(("EVALSHA", digest, 1, *call) for call in calls), *tail])
    if any(isinstance(reply, NoScriptError) for reply in replies):
        rest = (("EVALSHA", digest, 1, *call) for call in calls[1:])
        replies = pipeline([("EVAL", source, 1, *calls[0]), *rest, *tail])
    return replies
