"""The arguments of the scripts for a claim, and the record in the hash that they keep."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any
from uuid import UUID

from ...errors import RecordUnreadable
from ..records import Claim, Lease, Record, Release, State

#: What acquire.lua answers of a record, in its order (and two marks behind these). The last is the asker's own mark.
ANSWERED = (
    *(b"state", b"owner", b"fence", b"lease_end", b"not_before", b"crashes", b"task", b"args", b"reason"),
    *(b"holder", b"value", b"ended", b"version", b"announced"),
)

#: What `RedisStore.peek` reads of a record.
PEEKED = tuple(name for name in ANSWERED if name not in (b"value", b"announced"))


def claim_args(claim: Claim) -> tuple[Any, ...]:
    """Return a claim as the arguments of acquire.lua."""
    attempt = claim.attempt
    written = padded(attempt)
    return (
        claim.owner,
        packed(claim.task_id),
        claim.announcer,
        mark_of(written, claim),
        claim.token,
        "1" if claim.is_copy else "0",
        claim.sender,
        packed(claim.fingerprint),
        claim.max_crashes,
        ms(claim.lease_ttl),
        ms(claim.keep_ttl),
        claim.holder,
        written if attempt else "",
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
        packed(claim.task_id),
        packed(claim.fingerprint),
        padded(attempt) if attempt else "",
    )


def renewal_args(lease: Lease) -> tuple[Any, ...]:
    """Return a lease as renew.lua wants it."""
    return (*lease_args(lease), int(lease.claim.revive))


def release_args(lease: Lease, release: Release) -> tuple[Any, ...]:
    """Return a release as release.lua wants it."""
    claim = lease.claim
    return (
        claim.owner,
        release.reason.value,
        ms(release.retry_in),
        padded(release.next_attempt),
        ms(claim.keep_ttl),
        lease.fence,
        packed(claim.task_id),
        mark_of(padded(claim.attempt), claim),
        claim.token,
    )


def mark_of(attempt: str, claim: Claim) -> str:
    """Return a claim's attempt, which is padded, and its copy as one text."""
    return f"{attempt}.{claim.copy:06d}"


def padded(attempt: int) -> str:
    """Return an attempt in fixed width: the scripts compare marks as strings."""
    return f"{attempt:012d}"


#: The first byte of 128 bits without dashes, of those of a UUID, and of text that begins with one of these bytes.
_HEX, _UUID, _TEXT = b"\0", b"\1", b"\2"
_SPELLED = re.compile("[0-9a-f]{32}|[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}").fullmatch


@lru_cache(maxsize=256)  # a run writes the same twice
def packed(text: str) -> bytes:
    """Return a task id or a fingerprint as it is kept: 17 bytes for 128 bits in hex, with the dashes of a UUID or not.

    Of a record that has both, that and short names of fields save a quarter of the memory.
    """
    if _SPELLED(text):
        digits = text.replace("-", "")
        return (_HEX if digits == text else _UUID) + bytes.fromhex(digits)
    return _TEXT + text.encode() if text[:1] in ("\0", "\1", "\2") else text.encode()


def unpacked(kept: bytes) -> str:
    """Return the text that `packed` was given."""
    if kept[:1] == _HEX:
        return kept[1:].hex()
    if kept[:1] == _UUID:
        return str(UUID(bytes=kept[1:]))
    return kept.removeprefix(_TEXT).decode()


@lru_cache(maxsize=256)  # of which a policy has few
def ms(seconds: float) -> int:
    """Return seconds as whole milliseconds."""
    return round(seconds * 1000)


def whole(digits: bytes) -> int:
    """Return the number; `int` alone takes -5, 1_0 and any number of digits, which the scripts do not."""
    if not digits.isdigit() or len(digits) > 20:
        raise ValueError(f"{digits!r} is no whole number")
    return int(digits)


def count(digits: bytes) -> int:
    """Return the number, if it is one that the server adds to: with no zero in front, and not too large."""
    number = whole(digits)
    if b"%d" % number != digits or len(digits) > 18:
        raise ValueError(f"{digits!r} is no count")
    return number


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


def record_of(key: str, raw: Mapping[bytes, bytes], now: int, kept: int = 0) -> Record:
    """Return the record in the fields of a hash.

    Arguments:
        key: Of the hash.
        raw: Its fields.
        now: The server's time at which they were read, in microseconds.
        kept: Milliseconds after which the server deletes it (default: unknown).

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
            task_id=unpacked(raw.get(b"task", b"")),
            holder=raw.get(b"holder", b"").decode(),
            crashes=count(raw.get(b"crashes", b"0")),
            reason=raw.get(b"reason", b"").decode(),
            fingerprint=unpacked(raw.get(b"args", b"")),
            payload=raw.get(b"value", b""),
            remaining=max(0, end - now) / 1e6,
            age=max(0, now - ended) / 1e6 if ended else 0.0,
            held_for=max(0, now - whole(raw[b"fence"])) / 1e6 if state is State.IN_PROGRESS else 0.0,
            retention=max(0, kept) / 1e3,
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
