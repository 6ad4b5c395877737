"""How a row is written down as an item, and read again; the words are the project's own."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import RecordUnreadable
from ..records import Outcome, State, new_owner
from .dynamodb_clock import Clock
from .rules import SECOND, Row

__all__ = ["Item", "Kept", "fitting", "item_of", "kept_of", "named", "number", "text"]

logger = logging.getLogger("celery_idempotent.stores")

Item = dict[str, Any]
#: Bytes of a payload. An item may have 400 KB with everything, and the marks of who was announced come later.
LARGEST_PAYLOAD = 390_000
#: As `celery_idempotent.results` begins the payload of a value that was not kept.
UNAVAILABLE = b"!unavailable:"


@dataclass(slots=True)
class Kept:
    """A row, and what its item says of the watch over it.

    Arguments:
        row: The row; its ``lease_end`` is what this machine knows of it.
        version: A random word that is another one after every write of the item.
        beat: One that is another one whenever the lease starts anew.
        lease: How long the lease lasts, in microseconds.
        watch: By machine, when it first saw this beat, in its own ticks.
    """

    row: Row
    version: str = field(default_factory=new_owner)
    beat: str = field(default_factory=new_owner)
    lease: int = 0
    watch: dict[str, int] = field(default_factory=dict)


def text(value: str) -> Item:
    """Return a string as DynamoDB writes it."""
    return {"S": value}


def number(value: int) -> Item:
    """Return a whole number as DynamoDB writes it."""
    return {"N": str(value)}


def named(task_id: str) -> str:
    """Return a task id as a name in a map, which must not be empty."""
    return f"t:{task_id}"


def item_of(key: str, kept: Kept) -> Item:
    """Return the item that keeps a row; what is empty is left out, but for the maps that are written into."""
    row = kept.row
    item: Item = {"key": text(key), "version": text(kept.version), "state": text(row.state.value)}
    item |= {"fence": number(row.fence), "expires": number(-(-row.expires // SECOND))}
    for name, word in {
        "owner": row.owner,
        "task": row.task_id,
        "holder": row.holder,
        "reason": row.reason,
        "fingerprint": row.fingerprint,
    }.items():
        if word:
            item[name] = text(word)
    for name, count in {"crashes": row.crashes, "not_before": row.not_before, "ended": row.ended}.items():
        if count:
            item[name] = number(count)
    if row.payload:
        item["payload"] = {"B": row.payload}
    if row.announced:
        item["announcers"] = {"L": [text(task_id) for task_id in row.announced]}
    if row.state in (State.IN_PROGRESS, State.RELEASED):
        item |= {"beat": text(kept.beat), "lease": number(kept.lease)}
        item["watch"] = {"M": {machine: number(ticks) for machine, ticks in kept.watch.items()}}
        item["waiting"] = {"M": {named(task_id): mark_of(mark) for task_id, mark in row.waiting.items()}}
        if row.attempts:
            item["attempts"] = {"M": {named(task_id): number(least) for task_id, least in row.attempts.items()}}
    return item


def mark_of(mark: tuple[int, int, str]) -> Item:
    """Return which copy of a message arrived last as DynamoDB writes it."""
    attempt, copy, token = mark
    return text(f"{attempt}.{copy}.{token}")


def kept_of(item: Item, clock: Clock) -> Kept:
    """Return the row that an item keeps, as this machine sees it now.

    A lease ends when this machine has seen its beat for as long as the lease lasts: what it never saw before has all of
    its time before it.

    Raises:
        RecordUnreadable: the item is no record of this version.
    """
    try:
        if "format" in item:
            raise ValueError("a format that this version does not know")
        kept = _read(item)
    except (KeyError, ValueError) as error:
        raise RecordUnreadable(
            f"The record {item.get('key', {}).get('S')!r} is damaged or was written by a newer version of "
            f"celery_idempotent (its attributes: {', '.join(sorted(item))}). "
            "Upgrade this worker, or delete the key if it is garbage."
        ) from error
    ticks = clock.ticks()
    if kept.watch.get(clock.machine, ticks) > ticks:  # of a clock that is not ours after all
        del kept.watch[clock.machine]
    kept.row.lease_end = clock.now() + kept.lease - (ticks - kept.watch.get(clock.machine, ticks))
    return kept


def _read(item: Item) -> Kept:
    def word(name: str) -> str:
        return str(item[name]["S"]) if name in item else ""

    def count(name: str) -> int:
        return int(item[name]["N"]) if name in item else 0

    row = Row(
        state=State(item["state"]["S"]),
        fence=int(item["fence"]["N"]),
        owner=word("owner"),
        task_id=word("task"),
        holder=word("holder"),
        not_before=count("not_before"),
        crashes=count("crashes"),
        reason=word("reason"),
        fingerprint=word("fingerprint"),
        payload=bytes(item["payload"]["B"]) if "payload" in item else b"",
        ended=count("ended"),
        expires=int(item["expires"]["N"]) * SECOND,
        waiting={name[2:]: _mark(mark["S"]) for name, mark in _map(item, "waiting").items()},
        attempts={name[2:]: int(least["N"]) for name, least in _map(item, "attempts").items()},
        announced=[
            *sorted(name[2:] for name in item.get("announced", {}).get("SS", ())),  # a set, in the first version
            *(one["S"] for one in item.get("announcers", {}).get("L", ())),
        ],
    )
    watch = {machine: int(ticks["N"]) for machine, ticks in _map(item, "watch").items()}
    return Kept(row, item["version"]["S"], word("beat"), count("lease"), watch)


def _map(item: Item, name: str) -> Mapping[str, Item]:
    found: Mapping[str, Item] = item[name]["M"] if name in item else {}
    return found


def _mark(said: str) -> tuple[int, int, str]:
    attempt, copy, token = said.split(".", 2)
    return int(attempt), int(copy), token


def fitting(key: str, outcome: Outcome) -> Outcome:
    """Return the outcome if an item has room for it, else that it was not kept: what is done is done."""
    size = len(outcome.payload)
    if size <= LARGEST_PAYLOAD:
        return outcome
    why = f"it has {size} bytes, and an item of DynamoDB has room for {LARGEST_PAYLOAD}"
    logger.error("The result of %s was not kept: %s. Set result_max_bytes below that, or return a reference.", key, why)
    return Outcome(outcome.state, UNAVAILABLE + f"the result was not kept: {why}".encode())
