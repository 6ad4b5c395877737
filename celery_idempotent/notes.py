"""What happened to a key, as lines beside its record: what goes into a store, and what comes out of it again.

Durations cross the contract, points in time do not: a note says how long ago it happened.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import Any

from .events import Event

__all__ = ["MOST", "Note", "Noted", "facts_of", "is_operators", "text_of", "text_of_operator"]

#: Notes of one key that are kept, the newest.
MOST = 50
#: Letters of one word in a note. What an error says can be long, and is in the log.
LONGEST = 200
#: What operators do to a key. These entries outlive the record that they are about.
OPERATORS = frozenset({"ReleasedByOperator", "ForgottenByOperator"})
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
