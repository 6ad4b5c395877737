"""What happened to a key, as lines beside its record: what goes into a store, and what comes out of it again.

Durations cross the contract, points in time do not: a note says how long ago it happened.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import Any

from .events import Event

__all__ = ["MOST", "Note", "Noted", "facts_of", "text_of"]

#: Notes of one key that are kept, the newest.
MOST = 50
#: Letters of one word in a note. What an error says can be long, and is in the log.
LONGEST = 200
#: What the key says already.
_KNOWN = {"key", "task"}


@dataclass(frozen=True, slots=True)
class Note:
    """Something that happened to a key.

    Arguments:
        key: The operation.
        text: What happened; any text that UTF-8 can encode.
        ago: Seconds since it happened.
        keep: Seconds from then on for which it is worth keeping.
    """

    key: str
    text: str
    ago: float
    keep: float


@dataclass(frozen=True, slots=True)
class Noted:
    """A note as a store gives it back: what happened, and ``age`` seconds ago by the store's clock."""

    text: str
    age: float


def text_of(event: Event) -> str:
    """Return an event as one line of JSON, without its key and without what is empty."""
    said: dict[str, Any] = {"event": type(event).__name__}
    for field in fields(event):
        value = getattr(event, field.name)
        if field.name in _KNOWN or value in ("", 0):
            continue
        if field.name == "ending":  # of an exception its type alone: its message may have arguments in it
            value = value.partition(":")[0]
        said[field.name] = round(value, 3) if isinstance(value, float) else value
        if isinstance(value, str):
            said[field.name] = value[:LONGEST]
    return json.dumps(said, separators=(",", ":"))


def facts_of(text: str) -> dict[str, Any]:
    """Return what a line says; of one that is not ours, its text as ``event``."""
    try:
        said = json.loads(text)
    except ValueError:
        said = None
    return said if isinstance(said, dict) and isinstance(said.get("event"), str) else {"event": text}
