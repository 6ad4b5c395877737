"""What a Redis server tells of its memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["asked", "room"]


def asked(sample: Sequence[str]) -> list[tuple[Any, ...]]:
    """Return the commands that ask one server, each answered in about the time of a GET.

    Arguments:
        sample: Keys of which to measure those that the server has.
    """
    return [("INFO", "memory"), *(("MEMORY", "USAGE", key) for key in sample)]


def room(replies: Sequence[Sequence[Any]]) -> dict[str, int]:
    """Return the memory of all servers, of all that is in them, and the mean of the records that were measured.

    What a server did not answer, for want of a right say, is left out.

    Arguments:
        replies: For each server its replies to what was `asked`, errors among them.
    """
    found: dict[str, int] = {}
    used = [_used_memory(info) for info, *_ in replies if isinstance(info, bytes)]
    if used:
        found["memory_bytes"] = sum(used)
    sizes = [size for _, *measured in replies for size in measured if isinstance(size, int)]
    if sizes:
        found["record_bytes"] = round(sum(sizes) / len(sizes))
    return found


def _used_memory(info: bytes) -> int:
    lines = dict(line.partition(b":")[::2] for line in info.splitlines())
    return int(lines.get(b"used_memory", b"0"))
