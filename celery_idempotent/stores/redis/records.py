"""The arguments of the scripts for a claim, and the record in the hash that they keep."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ...errors import RecordUnreadable
from ..records import Claim, Lease, Record, State

#: What acquire.lua answers of a record, in its order (and two marks behind these). The last is the asker's own mark.
ANSWERED = (
    *(b"state", b"owner", b"fence", b"lease_end", b"not_before", b"crashes", b"task", b"fingerprint", b"reason"),
    *(b"holder", b"payload", b"ended", b"version", b"announced"),
)

#: What `RedisStore.peek` reads of a record.
PEEKED = tuple(name for name in ANSWERED if name not in (b"payload", b"announced"))


def claim_args(claim: Claim) -> tuple[Any, ...]:
    """Return a claim as the arguments of acquire.lua."""
    attempt = claim.attempt
    return (
        claim.owner,
        claim.task_id,
        claim.announcer,
        f"{padded(attempt)}.{claim.copy:06d}",
        claim.token,
        "1" if claim.is_copy else "0",
        claim.sender,
        claim.fingerprint,
        claim.max_crashes,
        ms(claim.lease_ttl),
        ms(claim.keep_ttl),
        claim.holder,
        padded(attempt) if attempt else "",
    )


def lease_args(lease: Lease) -> tuple[Any, ...]:
    """Return a lease as settle.lua wants it: the proof, and what it takes to restore a lost record."""
    claim = lease.claim
    attempt = claim.attempt
    return (
        claim.owner,
        lease.fence,
        ms(claim.lease_ttl),
        ms(claim.keep_ttl),
        claim.holder,
        claim.task_id,
        claim.fingerprint,
        padded(attempt) if attempt else "",
    )


def renewal_args(lease: Lease) -> tuple[Any, ...]:
    """Return a lease as renew.lua wants it."""
    return (*lease_args(lease), int(lease.claim.revive))


def padded(attempt: int) -> str:
    """Return an attempt in fixed width: the scripts compare marks as strings."""
    return f"{attempt:012d}"


def ms(seconds: float) -> int:
    """Return seconds as whole milliseconds."""
    return round(seconds * 1000)


def whole(digits: bytes) -> int:
    """Return the number; `int` alone takes -5 and 1_0, which the scripts do not."""
    if not digits.isdigit():
        raise ValueError(f"{digits!r} is no whole number")
    return int(digits)


def by_name(flat: Sequence[bytes]) -> dict[bytes, bytes]:
    """Return the fields of a hash by their names."""
    return dict(zip(flat[::2], flat[1::2], strict=True))


def answered(names: Sequence[bytes], values: Sequence[bytes | None], announcer: str) -> dict[bytes, bytes]:
    """Return by their names the fields that a script has read, and of the marks of announced callbacks the asker's own.

    Arguments:
        names: Which fields it reads; the last, ``announced``, is the asker's mark.
        values: What it answered; there may be more than names.
        announcer: The asker's task id.
    """
    raw = {name: value for name, value in zip(names, values, strict=False) if value is not None}
    if raw.pop(b"announced", None) is not None:
        raw[b"announced:" + announcer.encode()] = b"1"
    return raw


def record_of(key: str, raw: Mapping[bytes, bytes], now: int) -> Record:
    """Return the record in the fields of a hash, seen at the server's time `now` in microseconds.

    Raises:
        RecordUnreadable: they hold none, or one of a newer version.
    """
    try:
        state = State(raw[b"state"].decode())
        if b"version" in raw:
            raise ValueError("a version that this one does not know")
        end = whole(raw[b"lease_end"] if state is State.IN_PROGRESS else raw.get(b"not_before", b"0"))
        ended = whole(raw.get(b"ended", b"0")) * 1_000_000
        return Record(
            key=key,
            state=state,
            fence=whole(raw[b"fence"]),
            owner=raw.get(b"owner", b"").decode(),
            task_id=raw.get(b"task", b"").decode(),
            holder=raw.get(b"holder", b"").decode(),
            crashes=whole(raw.get(b"crashes", b"0")),
            reason=raw.get(b"reason", b"").decode(),
            fingerprint=raw.get(b"fingerprint", b"").decode(),
            payload=raw.get(b"payload", b""),
            remaining=max(0, end - now) / 1e6,
            age=max(0, now - ended) / 1e6 if ended else 0.0,
            held_for=max(0, now - whole(raw[b"fence"])) / 1e6 if state is State.IN_PROGRESS else 0.0,
            waiting=0 if ended else sum(name.startswith(b"waiting:") for name in raw),
            dispatched=frozenset(name[10:].decode() for name in raw if name.startswith(b"announced:")),
        )
    except (KeyError, ValueError) as error:
        raise unreadable(key, raw) from error


def unreadable(key: str, raw: Iterable[bytes]) -> RecordUnreadable:
    """Return the error for a hash of these fields that is no record of this version."""
    names = ", ".join(sorted(name.decode(errors="replace") for name in raw))
    return RecordUnreadable(
        f"The record {key!r} is damaged or was written by a newer version of celery_idempotent (its fields: {names}). "
        "Upgrade this worker, or delete the key if it is garbage."
    )
