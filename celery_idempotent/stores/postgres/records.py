"""The arguments of the functions for a claim, and the record in a row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...errors import RecordUnreadable
from ..records import Claim, Lease, Outcome, Record, Release, State

#: What is read of a row, in this order.
COLUMNS = (
    "key",
    "state",
    "fence",
    "owner",
    "task_id",
    "holder",
    "since",
    "lease_end",
    "not_before",
    "crashes",
    "reason",
    "fingerprint",
    "payload",
    "ended",
    "expires",
    "announced",
    "waiting",  # left out of the answer to a claim, for it may be long
)
SECOND = 1_000_000


def us(seconds: float) -> int:
    """Return seconds as whole microseconds."""
    return int(seconds * SECOND)


def stored(key: str) -> str:
    r"""Return a key as the table has it: PostgreSQL keeps no NUL, which becomes ``\0``, and a backslash ``\\``.

    Letter by letter, so that keys that begin alike still do.
    """
    return key.replace("\\", r"\\").replace("\0", r"\0") if "\0" in key or "\\" in key else key


def after(prefix: str) -> str:
    """Return the first text after all that begin with this prefix; "" if there is none."""
    while prefix:
        code = ord(prefix[-1])
        if code < 0x10FFFF:
            return prefix[:-1] + chr(0xE000 if code == 0xD7FF else code + 1)
        prefix = prefix[:-1]
    return ""


def unstored(text: str) -> str:
    """Return the key, or other text, that is kept as this text."""
    return "\\".join(part.replace(r"\0", "\0") for part in text.split(r"\\")) if "\\" in text else text


def marks(count: int) -> str:
    """Return the places of so many arguments."""
    return ", ".join(["%s"] * count)


def claim_args(claim: Claim) -> tuple[Any, ...]:
    """Return a claim as the arguments of acquire.sql."""
    return (
        stored(claim.key),
        claim.owner,
        claim.task_id,
        claim.attempt,
        claim.copy,
        claim.token,
        claim.is_copy,
        claim.sender,
        claim.fingerprint,
        claim.max_crashes,
        us(claim.lease_ttl),
        us(claim.keep_ttl),
        claim.holder,
        claim.announcer,
    )


def lease_args(leases: Sequence[Lease]) -> tuple[list[Any], ...]:
    """Return leases as the arguments of renew.sql: the proofs, and what it takes to restore lost records."""
    claims = [lease.claim for lease in leases]
    return (
        [stored(claim.key) for claim in claims],
        [claim.owner for claim in claims],
        [lease.fence for lease in leases],
        [us(claim.lease_ttl) for claim in claims],
        [us(claim.keep_ttl) for claim in claims],
        [claim.holder for claim in claims],
        [claim.task_id for claim in claims],
        [claim.fingerprint for claim in claims],
        [claim.attempt for claim in claims],
        [claim.revive for claim in claims],
    )


def outcome_args(lease: Lease, outcome: Outcome, ttl: float, home: str | None) -> tuple[Any, ...]:
    """Return an outcome as the arguments of settle.sql."""
    claim = lease.claim
    proof = (stored(claim.key), claim.owner, lease.fence, claim.task_id, claim.fingerprint)
    return (*proof, outcome.state.value, outcome.payload, us(ttl), home)


def release_args(lease: Lease, release: Release) -> tuple[Any, ...]:
    """Return a release as the arguments of release.sql."""
    claim = lease.claim
    return (
        stored(claim.key),
        claim.owner,
        lease.fence,
        release.reason.value,
        us(release.retry_in),
        release.next_attempt,
        us(claim.keep_ttl),
        claim.task_id,
        claim.attempt,
        claim.copy,
        claim.token,
    )


def record_of(row: Sequence[Any], now: int) -> Record:
    """Return the record that a row holds, seen at the server's time `now` in microseconds.

    Raises:
        RecordUnreadable: its state is none that this version knows.
    """
    fields = dict(zip(COLUMNS, row, strict=True))
    fields["key"] = unstored(fields["key"])
    since, lease_end, not_before = fields.pop("since"), fields.pop("lease_end"), fields.pop("not_before")
    ended, expires = fields.pop("ended"), fields.pop("expires")
    try:
        state = State(fields.pop("state"))
    except ValueError as error:
        raise RecordUnreadable(
            f"The record {fields['key']!r} is damaged or was written by a newer version of celery_idempotent "
            f"({error}). Upgrade this worker, or delete the key if it is garbage."
        ) from None
    end = lease_end if state is State.IN_PROGRESS else not_before
    return Record(
        state=state,
        remaining=max(0, end - now) / SECOND,
        age=max(0, now - ended) / SECOND if ended else 0.0,
        held_for=max(0, now - since) / SECOND if since and state is State.IN_PROGRESS else 0.0,
        retention=max(0, expires - now) / SECOND,
        dispatched=frozenset(fields.pop("announced")),
        waiting=len(fields.pop("waiting")),
        **fields,
    )
