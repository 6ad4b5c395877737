"""The nouns a store speaks in: what a delivery asks for, and what the store remembers.

Everything here is immutable and crosses thread and process boundaries freely. Durations are seconds; points in time
stay inside the store, whose clock alone decides what has expired.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from enum import Enum

#: An attempt is (nesting, retries), ordered. One integer carries both, so that every store can compare it.
RETRIES_LIMIT = 1_000_000


class Word(str, Enum):
    """A string enum that prints as its word on every Python."""

    def __str__(self) -> str:
        return str(self.value)


class State(Word):
    """What a record says of its operation; no record at all means never seen, or forgotten."""

    IN_PROGRESS = "in_progress"
    COMPLETED = "completed"
    FAILED = "failed"
    RELEASED = "released"


class Verdict(Word):
    """Why an acquire was answered with the record in the way and not with a lease."""

    COMPLETED = "completed"
    FAILED = "failed"
    CONFLICT = "conflict"
    SUPERSEDED = "superseded"
    KEY_REUSED = "key_reused"
    CRASH_LOOP = "crash_loop"


class Reason(Word):
    """Why a lease was given back unsettled.

    ``crashed`` adds to the crash count; ``shutdown`` and ``revoked`` leave it, since somebody meant it; every other
    reason was recorded by a living holder and resets it.
    """

    FAILED = "failed"
    RETRY = "retry"
    REJECTED = "rejected"
    REQUEUED = "requeued"
    SHUTDOWN = "shutdown"
    REVOKED = "revoked"
    CRASHED = "crashed"
    CRASH_LOOP = "crash_loop"


def attempt_number(nesting: int, retries: int) -> int:
    """Return the attempt (how often replaced by itself, how often retried) as one integer, ordered as the pair is."""
    return nesting * RETRIES_LIMIT + retries


def new_owner() -> str:
    """Return a random 128-bit id, the proof of one delivery that it holds a lease (22 characters, safe in a URL)."""
    return secrets.token_urlsafe(16)


@dataclass(frozen=True, slots=True)
class Claim:
    """What one delivery asks of the store.

    Arguments:
        key: The operation.
        owner: Random id of this delivery.
        lease_ttl: Seconds the lease shall last without renewal.
        keep_ttl: Seconds a record that nobody settled is kept after its lease or its release, so that a take-over
            shows.
        task_id: Which message this is a delivery of; empty where the key is the task id, since all deliveries share it
            then.
        nesting, retries: The attempt, see `attempt`.
        copy: 0 for a message as its producer sent it, n for the n-th copy that deferring published.
        token: Random id of that copy; empty for copy 0.
        redelivered: Whether the broker says that it delivered this message before.
        sender: Owner of the delivery that published this message while it held the lease (a retry), or empty.
        fingerprint: Digest of the arguments, compared with that of other task ids; empty to compare nothing.
        max_crashes: How many holders in a row may die before the operation is refused.
        holder: Host and process, for people.
        message_id: The id under which this message announces its callbacks, where ``task_id`` is empty.
    """

    key: str
    owner: str
    lease_ttl: float
    keep_ttl: float
    task_id: str = ""
    nesting: int = 0
    retries: int = 0
    copy: int = 0
    token: str = ""
    redelivered: bool = False
    sender: str = ""
    fingerprint: str = ""
    max_crashes: int = 5
    holder: str = ""
    message_id: str = ""

    @property
    def announcer(self) -> str:
        """The id whose mark of announced callbacks the answer is to carry."""
        return self.task_id or self.message_id

    @property
    def attempt(self) -> int:
        """Order (nesting, retries) as one integer."""
        return attempt_number(self.nesting, self.retries)

    @property
    def is_copy(self) -> bool:
        """Tell whether this is surely not the first delivery of a message that somebody published on purpose."""
        return self.copy > 0 or self.redelivered


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to run, for a limited time.

    Arguments:
        claim: What was asked for; its owner is the proof shown on every later write.
        fence: Integer that rises with every lease of the key.
        taken_over: Whether the holder before us let its lease run out.
        crashes: How many holders in a row have died.
    """

    claim: Claim
    fence: int
    taken_over: bool = False
    crashes: int = 0

    @property
    def key(self) -> str:
        """The key of the operation."""
        return self.claim.key

    @property
    def owner(self) -> str:
        """The proof that the lease is ours."""
        return self.claim.owner


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an operation ended: ``state`` is COMPLETED or FAILED, ``payload`` what `results.Codec` made of the value."""

    state: State
    payload: bytes


@dataclass(frozen=True, slots=True)
class Release:
    """Why a lease is given back; a retry says in how many seconds it is due, and which attempt it will be."""

    reason: Reason
    retry_in: float = 0.0
    next_attempt: int = 0


@dataclass(frozen=True, slots=True)
class Record:
    """What the store remembers about a key.

    ``remaining`` is how many seconds the lease still runs (IN_PROGRESS) or a retry is still to be waited for
    (RELEASED), by the store's clock at the moment of the answer; ``age`` the seconds since the record was settled;
    ``held_for`` those since the lease was taken (IN_PROGRESS), or 0 where the store does not tell; ``retention`` those
    that it is kept from now on if nobody touches it, or 0 where the store does not tell. ``waiting`` is how many tasks
    have met the operation while it was being done, or waited for its retry, and have not run since; ``Store.get`` and
    ``Store.scan`` tell it, for people. ``dispatched`` holds ids of tasks whose callbacks were dispatched: the answer to
    a claim names no other than the claim's own, since their number must not make it longer; ``Store.get`` and
    ``Store.scan`` name all that are kept.
    """

    key: str
    state: State
    fence: int = 0
    owner: str = ""
    task_id: str = ""
    holder: str = ""
    crashes: int = 0
    reason: str = ""
    fingerprint: str = ""
    payload: bytes = b""
    remaining: float = 0.0
    age: float = 0.0
    held_for: float = field(default=0.0, compare=False)
    retention: float = field(default=0.0, compare=False)
    waiting: int = field(default=0, compare=False)
    dispatched: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Refusal:
    """The answer to a claim that got no lease: why, and the record in its way."""

    verdict: Verdict
    record: Record


#: Notes of one key that are kept, the newest.
HISTORY_LIMIT = 50


@dataclass(frozen=True, slots=True)
class HistoryEntry:
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
class PastEvent:
    """A note as a store gives it back: what happened, and ``age`` seconds ago by the store's clock."""

    text: str
    age: float
