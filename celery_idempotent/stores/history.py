"""How notes become lines of a key's history: the same in every store that keeps one."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from .records import HISTORY_LIMIT, HistoryEntry, PastEvent
from .rules import SECOND

#: When it happened, in microseconds of the store's clock, and what.
Line = tuple[int, str]


def grouped(entries: Iterable[HistoryEntry]) -> dict[str, list[HistoryEntry]]:
    """Return the notes by key, in their order and sorted by it: the newest of each, and none whose time is over."""
    found: dict[str, list[HistoryEntry]] = defaultdict(list)
    for entry in entries:
        if entry.ago < entry.keep:
            found[entry.key].append(entry)
    return {key: found[key][-HISTORY_LIMIT:] for key in sorted(found)}


def lines(entries: Sequence[HistoryEntry], now: int) -> list[Line]:
    """Return notes as lines, at the store's time in microseconds."""
    return [(now - round(entry.ago * SECOND), entry.text) for entry in entries]


def expiry(entries: Sequence[HistoryEntry], now: int) -> int:
    """Return until when the history is kept to which these notes are added: all of it as long as its newest note."""
    return now + max(round((entry.keep - entry.ago) * SECOND) for entry in entries)


def past_events(found: Iterable[Line], now: int) -> list[PastEvent]:
    """Return lines as they are given back: oldest first, in whatever order they were written, and the newest alone."""
    ordered = sorted(found, key=lambda line: line[0])
    return [PastEvent(text, max(0, now - at) / SECOND) for at, text in ordered[-HISTORY_LIMIT:]]


#: What operators do to a key. These entries outlive the record that they are about.
OPERATORS = frozenset({"ReleasedByOperator", "ForgottenByOperator"})


def text_of_operator(event: str, operator: str, **facts: object) -> str:
    """Return what an operator did as one line of JSON.

    Arguments:
        event: What they did, see `OPERATORS`.
        operator: The person, as user@host.
        facts: More about it; what is empty is left out.
    """
    entry = {"event": event, "operator": operator, **facts}
    return json.dumps(
        {name: value for name, value in entry.items() if value not in ("", 0, None)}, separators=(",", ":")
    )


def is_operators(text: str) -> bool:
    """Return whether a line is about what an operator did."""
    return facts_of(text)["event"] in OPERATORS


def facts_of(text: str) -> dict[str, Any]:
    """Return the facts in a line; of another program's line, its text as ``event``."""
    try:
        facts = json.loads(text)
    except ValueError:
        facts = None
    return facts if isinstance(facts, dict) and isinstance(facts.get("event"), str) else {"event": text}
