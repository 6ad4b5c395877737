"""How notes become lines of a key's history: the same in every store that keeps one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from ..notes import MOST, Note, Noted
from .rules import SECOND

__all__ = ["Line", "expiry", "grouped", "lines", "told"]

#: When it happened, in microseconds of the store's clock, and what.
Line = tuple[int, str]


def grouped(notes: Iterable[Note]) -> dict[str, list[Note]]:
    """Return the notes by key, in their order and sorted by it: the newest of each, and none whose time is over."""
    found: dict[str, list[Note]] = defaultdict(list)
    for note in notes:
        if note.ago < note.keep:
            found[note.key].append(note)
    return {key: found[key][-MOST:] for key in sorted(found)}


def lines(notes: Sequence[Note], now: int) -> list[Line]:
    """Return notes as lines, at the store's time in microseconds."""
    return [(now - round(note.ago * SECOND), note.text) for note in notes]


def expiry(notes: Sequence[Note], now: int) -> int:
    """Return until when the history is kept to which these notes are added: all of it as long as its newest note."""
    return now + max(round((note.keep - note.ago) * SECOND) for note in notes)


def told(found: Iterable[Line], now: int) -> list[Noted]:
    """Return lines as they are given back: oldest first, whoever was first to write them, and the newest alone."""
    ordered = sorted(found, key=lambda line: line[0])
    return [Noted(text, max(0, now - at) / SECOND) for at, text in ordered[-MOST:]]
