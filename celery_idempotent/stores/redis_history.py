"""The history of a key in Redis: a list beside its hash, one line an entry."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ..errors import RecordUnreadable
from ..notes import MOST, Note, Noted
from .hashes import ms
from .noting import expiry, grouped, told
from .rules import SECOND

__all__ = ["history_key", "note_calls", "noted"]


def history_key(key: str) -> str:
    """Return the name of the list; it begins as the record's, so that who may write the one may write the other."""
    return f"{key}:history"


def note_calls(notes: Iterable[Note]) -> list[tuple[Any, ...]]:
    """Return for each key its list and the arguments of note.lua."""
    calls = []
    for key, mine in grouped(notes).items():
        pairs = [(round(note.ago * SECOND), note.text) for note in mine]
        keep = max(1, ms(expiry(mine, 0) / SECOND))
        calls.append((history_key(key), MOST, keep, *(word for pair in pairs for word in pair)))
    return calls


def noted(key: str, now: int, entries: Sequence[bytes]) -> list[Noted]:
    """Return what a list holds, seen at the server's time `now` in microseconds.

    Raises:
        RecordUnreadable: it is none of ours.
    """
    try:
        return told([(int(at), text.decode()) for at, _, text in (entry.partition(b" ") for entry in entries)], now)
    except ValueError as error:
        raise RecordUnreadable(
            f"The list {history_key(key)!r} is not the history of {key!r} ({error}). Delete it if it is garbage."
        ) from error
