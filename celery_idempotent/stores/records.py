"""Arguments and results of a store's methods: claims, leases, outcomes, records.

All of them are immutable. Durations are seconds. Points in time stay within the store, whose clock alone decides what
has expired.
"""

from __future__ import annotations

import os
from binascii import b2a_base64
from dataclasses import dataclass, field
from enum import Enum

#: What base64 has for the last two of its digits, and what it has in URLs.
_URLSAFE = bytes.maketrans(b"+/", b"-_")

#: An attempt is (nesting, retries), ordered. One integer carries both, so that every store can compare it.
RETRIES_LIMIT = 1_000_000
#: So many crashes never come: the ``max_crashes`` of a claim that no crash loop is to stop.
NO_CRASH_LOOP = 1_000_000_000


#: Stands for the task in the keys of reservations, which messages of unique tasks hold while they wait.
RESERVED = "~unique"
#: Likewise in the keys of the claims to return a chord's part, which last for seconds.
PART = "~part"


def is_reservation(key: str) -> bool:
    """Return whether a key is that of a reservation, and not of an operation."""
    return _is_of(key, RESERVED)


def is_part(key: str) -> bool:
    """Return whether a key is that of a claim to return a chord's part."""
    return _is_of(key, PART)


def _is_of(key: str, word: str) -> bool:
    return key.partition(":")[2].startswith(f"{word}:")


class Word(str, Enum):
    """A string enum that prints as its word on every Python."""

    def __str__(self) -> str:
        return str(self.value)


class State(Word):
    """The state of an operation. An operation without a record was never begun, or its record has expired."""

    IN_PROGRESS = "in_progress"
    COMPLETED = "completed"
    FAILED = "failed"
    RELEASED = "released"


class Verdict(Word):
    """The reason for which a claim got no lease."""

    COMPLETED = "completed"
    FAILED = "failed"
    CONFLICT = "conflict"
    SUPERSEDED = "superseded"
    KEY_REUSED = "key_reused"
    CRASH_LOOP = "crash_loop"


class Reason(Word):
    """The reason for which a lease was released unsettled.

    ``crashed`` adds to the crash count. ``shutdown`` and ``revoked``, which an operator intended, leave it. Every other
    reason was recorded by a living holder, and resets it. ``done`` is the end of what is remembered only until then:
    of an operation with ``result_ttl=0``, or of a message that held a reservation; ``started`` is the start of the
    body for which a message held one.
    """

    DONE = "done"
    STARTED = "started"
    FAILED = "failed"
    RETRY = "retry"
    REJECTED = "rejected"
    REQUEUED = "requeued"
    SHUTDOWN = "shutdown"
    REVOKED = "revoked"
    CRASHED = "crashed"
    CRASH_LOOP = "crash_loop"


def attempt_number(nesting: int, retries: int) -> int:
    """Return the pair of times replaced by itself and times retried as one integer of the same order.

    Both come with a message, in which anything may stand; every store must be able to keep the result.
    """
    most = RETRIES_LIMIT - 1
    return min(max(nesting, 0), most) * RETRIES_LIMIT + min(max(retries, 0), most)


def new_owner() -> str:
    """Return a random id of 128 bits in 22 characters, by which one delivery proves that it holds a lease."""
    return b2a_base64(os.urandom(16))[:22].translate(_URLSAFE).decode()


@dataclass(frozen=True, slots=True)
class Claim:
    """The request of one delivery for the lease on a key.

    Arguments:
        key: The operation.
        owner: Random id of this delivery.
        lease_ttl: Seconds for which the lease lasts without renewal.
        keep_ttl: Seconds for which an unsettled record is kept after its lease has expired or was released, so that
            the next holder learns of it.
        task_id: The id of the message; empty where the key is the task id, which all its deliveries share.
        nesting, retries: The attempt, see `attempt`.
        copy: 0 for the message of the producer, n for the n-th copy that a deferral published.
        token: Random id of that copy; empty for copy 0.
        redelivered: Whether the broker reports that it delivered this message before.
        sender: Owner of the delivery that published this message as its retry while it held the lease, or empty.
        fingerprint: Digest of the arguments, compared with that of other task ids; empty to compare nothing.
        max_crashes: How many holders in a row may die before the operation is refused.
        holder: Host and process, for people.
        message_id: The id under which the callbacks of this message are marked, where ``task_id`` is empty.
        revive: Whether a renewal restores the record if it is gone (default). Of a lease that another process may have
            released, and whose record may have expired since, it must not.
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
    revive: bool = True

    @property
    def announcer(self) -> str:
        """The id whose mark of dispatched callbacks the reply contains."""
        return self.task_id or self.message_id

    @property
    def attempt(self) -> int:
        """The pair of nesting and retries as one integer."""
        return attempt_number(self.nesting, self.retries) if self.nesting or self.retries else 0

    @property
    def is_copy(self) -> bool:
        """Whether the message was certainly delivered before, or is a copy that a deferral published."""
        return self.copy > 0 or self.redelivered


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to run, for a limited time.

    Arguments:
        claim: The request; its owner is the proof in every later write.
        fence: An integer that rises with every lease on the key.
        taken_over: Whether the lease of the holder before had expired.
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
        """The random id by which the holder proves that it holds the lease."""
        return self.claim.owner


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of an operation: a ``state``, COMPLETED or FAILED, and the value as `results.Codec` encoded it."""

    state: State
    payload: bytes


@dataclass(frozen=True, slots=True)
class Release:
    """The reason for a release; for a retry, also the seconds until it is due and the number of its attempt."""

    reason: Reason
    retry_in: float = 0.0
    next_attempt: int = 0


@dataclass(frozen=True, slots=True)
class Record:
    """What a store keeps under a key.

    Arguments:
        key, state, fence, owner, task_id, holder, crashes, fingerprint: As in `Claim`, `State` and `Lease`.
        reason: A word of `Reason`, for a record that was released.
        payload: The value, for a record that is settled.
        remaining: Seconds until the lease expires (IN_PROGRESS), or until the retry is due (RELEASED), by the store's
            clock when it replied.
        age: Seconds since the record was settled.
        held_for: Seconds since the lease was taken (IN_PROGRESS); 0 where the store does not report it.
        retention: Seconds for which the record is kept from now on; 0 where the store does not report it.
        waiting: How many tasks met the lease, or waited for its retry, and have not run since. ``Store.get`` and
            ``Store.scan`` report it.
        dispatched: Ids of tasks whose callbacks were dispatched. A reply to a claim contains the claim's own alone,
            so that its size does not grow with their number; ``Store.get`` and ``Store.scan`` return all that are kept.
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
    """The reply to a claim that got no lease: the reason, and the record that is in the way."""

    verdict: Verdict
    record: Record


#: How many entries the history of a key has at most; the newest are kept.
HISTORY_LIMIT = 50


@dataclass(frozen=True, slots=True)
class HistoryEntry:
    """One event in the history of a key, as it is written.

    Arguments:
        key: The operation.
        text: A line that describes it; any text that UTF-8 can encode.
        ago: Seconds since it happened.
        keep: Seconds for which to keep it, counted from when it happened.
    """

    key: str
    text: str
    ago: float
    keep: float


@dataclass(frozen=True, slots=True)
class PastEvent:
    """One event in the history of a key, as it is read: its line, and its age in seconds by the store's clock."""

    text: str
    age: float
