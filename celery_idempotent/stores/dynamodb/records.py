"""Records as items of DynamoDB, the clocks that they are dated by, and the expressions that change them."""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

from ...errors import RecordUnreadable
from ..records import Outcome, State, new_owner
from ..rules import SECOND, Row

logger = logging.getLogger("celery_idempotent.stores")

Item = dict[str, Any]
#: Bytes of a payload. An item may have 400 KB with everything, and the marks of dispatched callbacks come later.
LARGEST_PAYLOAD = 390_000
#: As `celery_idempotent.core.results` begins the payload of a value that was not kept.
UNAVAILABLE = b"!unavailable:"


@dataclass(slots=True)
class StoredRow:
    """A row, and the watch over it that its item holds.

    Arguments:
        row: The row; its ``lease_end`` is what this machine knows of it.
        version: A random word that is another one after every write of the item.
        beat: A random word that changes whenever the lease begins again.
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


def item_of(key: str, kept: StoredRow) -> Item:
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
    if row.dispatched:
        item["announcers"] = {"L": [text(task_id) for task_id in row.dispatched]}
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


def kept_of(item: Item, clock: Clock) -> StoredRow:
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
    if kept.watch.get(clock.machine, ticks) > ticks:  # of another machine's clock after all
        del kept.watch[clock.machine]
    kept.row.lease_end = clock.now() + kept.lease - (ticks - kept.watch.get(clock.machine, ticks))
    return kept


def _read(item: Item) -> StoredRow:
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
        dispatched=[
            *sorted(name[2:] for name in item.get("announced", {}).get("SS", ())),  # a set, in the first version
            *(one["S"] for one in item.get("announcers", {}).get("L", ())),
        ],
    )
    watch = {machine: int(ticks["N"]) for machine, ticks in _map(item, "watch").items()}
    return StoredRow(row, item["version"]["S"], word("beat"), count("lease"), watch)


def _map(item: Item, name: str) -> Mapping[str, Item]:
    found: Mapping[str, Item] = item[name]["M"] if name in item else {}
    return found


def _mark(text: str) -> tuple[int, int, str]:
    attempt, copy, token = text.split(".", 2)
    return int(attempt), int(copy), token


def fitting(key: str, outcome: Outcome) -> Outcome:
    """Return the outcome if an item has room for it, else that it was not kept: what is done is done."""
    size = len(outcome.payload)
    if size <= LARGEST_PAYLOAD:
        return outcome
    why = f"it has {size} bytes, and an item of DynamoDB has room for {LARGEST_PAYLOAD}"
    logger.error("The result of %s was not kept: %s. Set result_max_bytes below that, or return a reference.", key, why)
    return Outcome(outcome.state, UNAVAILABLE + f"the result was not kept: {why}".encode())


# Two clocks, neither of which compares the wall clocks of two workers.
#
# DynamoDB has no clock that a condition could read. What it has is the ``Date`` of its replies: to a second, it is the
# same for all clients, and decides when a record expires and when a retry is due. It does not decide which client holds
# a lease: that a lease ran out is seen by watching it for its whole length on the clock of one machine.


_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_TIME_NAMESPACE = Path("/proc/self/ns/time")


class Clock:
    """The time of the server, and that of this machine."""

    def __init__(self) -> None:
        #: whose monotonic clock `ticks` reads; all processes of one machine have the same
        self.machine = _machine()
        #: by how many seconds the server's clock is ahead of the monotonic one, at least; None before the first reply
        self._ahead: float | None = None

    @property
    def is_set(self) -> bool:
        """Whether the server's time is known."""
        return self._ahead is not None

    def ticks(self) -> int:
        """Return microseconds of a clock that is never set, and that only processes of this machine share."""
        return int(time.monotonic() * SECOND)

    def now(self) -> int:
        """Return microseconds since 1970 by the server's clock, late by a second at most; `receive` comes first."""
        assert self._ahead is not None
        return int((time.monotonic() + self._ahead) * SECOND)

    def receive(self, date: str | None, sent: float) -> None:
        """Learn from the date of a reply.

        Each reply bounds from both sides how far the clocks are apart: the date is cut to whole seconds, and was
        written between sending and now. What is known already is moved into these bounds and no further, so that the
        time gets better and does not jump.

        Arguments:
            date: The reply's header; without one, which is not AWS then, this process's wall clock is believed.
            sent: Monotonic time before the request.
        """
        received = time.monotonic()
        try:
            date_time = parsedate_to_datetime(date or "").timestamp()
        except (TypeError, ValueError):
            date_time = time.time()
        least, most = date_time - received, date_time + 1 - sent
        self._ahead = least if self._ahead is None else min(max(self._ahead, least), most)


def _machine() -> str:
    """Return a name for the clock that this process shares with its neighbours.

    They share it if one kernel has counted since one boot for both. The host's name is in it too: it keeps containers
    apart, and machines that were started from one snapshot. In AWS Lambda it does not: there machines have the same
    name, and may be copies of one that had booted.
    """
    if "AWS_LAMBDA_FUNCTION_NAME" in os.environ:
        return new_owner()
    try:
        boot = _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return new_owner()  # a clock of this process alone
    try:
        space = os.readlink(_TIME_NAMESPACE)
    except OSError:  # a kernel that has no such namespaces
        space = ""
    return hashlib.sha256(f"{platform.node()}\n{boot}\n{space}".encode()).hexdigest()[:16]


# Conditions and updates of one item, spelled as DynamoDB's expressions.
#
# Half of our words are reserved ones there, and a task id may hold anything, so that every name and every value stands
# behind a placeholder.


class Condition:
    """What must hold of an item for a write to be done; each call adds a term, and all must hold."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}
        self._values: dict[str, Item] = {}
        self._terms: list[str] = []
        self._alternative = ""

    def path(self, *words: str) -> str:
        """Return the placeholder of an attribute, or of one inside a map."""
        return ".".join(self._names.setdefault(word, f"#{len(self._names)}") for word in words)

    def value(self, value: Item) -> str:
        """Return the placeholder of a value."""
        name = f":{len(self._values)}"
        self._values[name] = value
        return name

    def given(self, value: Item, *words: str, relation: str = "=") -> None:
        """Require that an attribute has this value, or another relation to it."""
        self._terms.append(f"{self.path(*words)} {relation} {self.value(value)}")

    def absent(self, *words: str) -> None:
        """Require that an attribute is not there; of the key, that the item is not."""
        self._terms.append(f"attribute_not_exists({self.path(*words)})")

    def room(self, most: int, *words: str) -> None:
        """Require that a list has fewer elements than so many, or is not there."""
        path = self.path(*words)
        size = self.value({"N": str(most)})
        self._terms.append(f"(attribute_not_exists({path}) OR size({path}) < {size})")

    def lacks(self, value: Item, *words: str) -> None:
        """Require that a list or a set does not have this element."""
        self._terms.append(f"NOT contains({self.path(*words)}, {self.value(value)})")

    def or_gone(self) -> None:
        """Let the write be done also where there is no item."""
        self._alternative = f"attribute_not_exists({self.path('key')}) OR "

    def request(self) -> dict[str, Any]:
        """Return this as part of a request."""
        request: dict[str, Any] = {
            "ConditionExpression": f"{self._alternative}({' AND '.join(self._terms)})",
            "ExpressionAttributeNames": {placeholder: word for word, placeholder in self._names.items()},
        }
        return {**request, "ExpressionAttributeValues": self._values} if self._values else request


class Update(Condition):
    """What is changed of an item, and under which condition; its version always is."""

    def __init__(self) -> None:
        super().__init__()
        self._clauses: dict[str, list[str]] = {"SET": [], "REMOVE": []}
        self.version = new_owner()
        self.set(text(self.version), "version")

    @property
    def empty(self) -> bool:
        """Whether nothing but the version would change."""
        return sum(map(len, self._clauses.values())) == 1

    def set(self, value: Item, *words: str) -> None:
        """Give an attribute this value."""
        self._clauses["SET"].append(f"{self.path(*words)} = {self.value(value)}")

    def remove(self, *words: str) -> None:
        """Remove an attribute."""
        self._clauses["REMOVE"].append(self.path(*words))

    def append(self, value: Item, *words: str) -> None:
        """Add to the end of a list, which need not be there."""
        path, none, one = self.path(*words), self.value({"L": []}), self.value({"L": [value]})
        self._clauses["SET"].append(f"{path} = list_append(if_not_exists({path}, {none}), {one})")

    def request(self) -> dict[str, Any]:
        """Return this as part of a request."""
        expression = " ".join(f"{verb} {', '.join(parts)}" for verb, parts in self._clauses.items() if parts)
        return {"UpdateExpression": expression, **super().request()}
