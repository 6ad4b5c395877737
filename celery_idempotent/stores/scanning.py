"""Listing: the names of a page by SCAN, then the records of all of them in one round trip."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from ..errors import RecordUnreadable
from ..records import Record
from .hashes import by_name, record_of
from .scripts import together

__all__ = ["pages", "records"]

#: How many names the server looks at for a page. It serves nobody else meanwhile, so that it must not take long.
COUNT = 500


def pages(command: Callable[..., Any], prefix: str) -> Iterator[list[str]]:
    """Yield the names of hashes that begin with a prefix, page by page; some may come twice.

    Arguments:
        command: Sends a command to one server and returns its reply.
        prefix: What the names begin with.
    """
    pattern = "".join(f"\\{letter}" if letter in "*?[]\\^" else letter for letter in prefix) + "*"
    cursor = b"0"
    while True:
        cursor, names = command("SCAN", cursor, "MATCH", pattern, "COUNT", COUNT, "TYPE", "hash")
        yield [name.decode() for name in names if _is_text(name)]  # what is no text is somebody else's
        if cursor in (b"0", 0):
            return


def _is_text(name: bytes) -> bool:
    try:
        name.decode()
    except UnicodeDecodeError:
        return False
    return True


def records(
    pipeline: Callable[[list[tuple[Any, ...]]], list[Any]], get: Callable[[str], Record | None], keys: list[str]
) -> Iterator[Record]:
    """Yield the records of these keys; what is no record of ours, or has gone meanwhile, is passed by.

    Arguments:
        pipeline: Sends commands to the server that has the keys, and returns their replies.
        get: Reads one record, wherever it is: it is asked for those that the server answered with an error.
        keys: Whose records to read.
    """
    replies = together(pipeline, "read", [(key,) for key in keys]) if keys else []
    for key, reply in zip(keys, replies, strict=True):
        try:
            if isinstance(reply, Exception):
                record = get(key)
            else:
                now, found = reply
                record = record_of(key, by_name(found), int(now)) if found else None
        except RecordUnreadable:
            continue
        if record is not None:
            yield record
