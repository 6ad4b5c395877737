"""How notes become lines of a key's history: the same in every store that keeps one."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from .records import MOST, Note, Noted
from .rules import SECOND

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


#: What operators do to a key. These entries outlive the record that they are about.
OPERATORS = frozenset({"ReleasedByOperator", "ForgottenByOperator"})


def text_of_operator(event: str, operator: str, **facts: object) -> str:
    """Return what an operator did as one line of JSON.

    Arguments:
        event: What they did, see `OPERATORS`.
        operator: Who did it, as user@host.
        facts: More about it; what is empty is left out.
    """
    said = {"event": event, "operator": operator, **facts}
    return json.dumps(
        {name: value for name, value in said.items() if value not in ("", 0, None)}, separators=(",", ":")
    )


def is_operators(text: str) -> bool:
    """Return whether a line is about what an operator did."""
    return facts_of(text)["event"] in OPERATORS


def facts_of(text: str) -> dict[str, Any]:
    """Return what a line says; of one that is not ours, its text as ``event``."""
    try:
        said = json.loads(text)
    except ValueError:
        said = None
    return said if isinstance(said, dict) and isinstance(said.get("event"), str) else {"event": text}
