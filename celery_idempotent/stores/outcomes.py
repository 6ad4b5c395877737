"""The outcomes that a cache holds in front of a store: one hash each, readable in ``redis-cli``, never a pickle.

An entry may vanish at any moment, and be as old as its ``max_age``. So that no entry comes back that was deleted, a
deletion leaves a mark for as long; and of two outcomes of one key the later one stays, by its fence.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

from ..errors import RecordUnreadable
from ..records import Record, State
from .hashes import answered, ms, whole
from .redis import RedisStore

__all__ = ["PREFIX", "Outcomes", "fields_of", "outcome_of"]

#: What the fields mean; one that is not known is as good as no entry. It also keeps a `RedisStore` in the same database
#: from taking an entry for one of its records.
VERSION = b"1"
#: In the order of their checksum.
FIELDS = (b"version", b"state", b"fence", b"task", b"fingerprint", b"payload")
#: What find.lua answers of an entry, in its order; the last is the asker's own mark.
ANSWERED = (*FIELDS, b"checksum", b"ended", b"expires", b"announced")
#: Before each key.
PREFIX = "cached:"


class Outcomes:
    """Keep outcomes in Redis for a while.

    Each verb is one round trip, and raises `StoreError` if the cache cannot serve.

    Arguments:
        redis: The connections to the cache.
        max_age: Longest time in seconds that an entry is kept.
    """

    def __init__(self, redis: RedisStore, *, max_age: float) -> None:
        self._redis, self._max_age = redis, max_age

    def find(self, key: str, announcer: str = "") -> Record | None:
        """Return the settled record that is kept under the key, or None.

        Arguments:
            key: The key.
            announcer: The id of the task that the record is to tell of whether its callbacks were dispatched.

        Raises:
            RecordUnreadable: what is kept there is damaged, or of another version.
        """
        now, values = self._redis._call("find", (PREFIX + key,), (announcer,))
        return outcome_of(key, answered(ANSWERED, values, announcer), int(now))

    def keep(self, record: Record, ttl: float) -> None:
        """Keep a settled record, at most for ``ttl`` seconds: the durable store knows it as long."""
        times = (ms(min(ttl, self._max_age)), ms(record.age), ms(ttl))
        self._redis._call("fill", (PREFIX + record.key,), (record.fence, *times, *fields_of(record)))

    def mark(self, key: str, task_id: str) -> None:
        """Remember that the callbacks of a task were dispatched."""
        self._redis._call("mark", (PREFIX + key,), (task_id, ms(self._max_age)))

    def forget(self, key: str) -> None:
        """Forget a key, and keep nothing under it for as long as somebody may still come with what was forgotten."""
        self._redis._call("forget", (PREFIX + key,), (ms(self._max_age),))

    def close(self) -> None:
        """Close the connections of this process."""
        self._redis.close()


def fields_of(record: Record) -> list[bytes]:
    """Return a settled record as fields and values, but for its times and marks."""
    said = (record.state.value, str(record.fence), record.task_id, record.fingerprint)
    values = [VERSION, *(text.encode() for text in said), record.payload]
    pairs = [part for pair in zip(FIELDS, values, strict=True) for part in pair]
    return [*pairs, b"checksum", checksum(values)]


def checksum(values: Sequence[bytes]) -> bytes:
    """Return what tells damage apart from what was written; it keeps nobody from forging an entry."""
    return b"%08x" % zlib.crc32(b"\0".join(b"%d:%b" % (len(value), value) for value in values))


def outcome_of(key: str, raw: Mapping[bytes, bytes], now: int) -> Record | None:
    """Return the record that the fields of an entry say, at the cache's time ``now`` in microseconds; None for marks.

    Raises:
        RecordUnreadable: the entry is damaged, or of another version.
    """
    marks = {name for name in raw if name.startswith(b"announced:")}
    if not raw.keys() - marks:
        return None
    try:
        if checksum([raw[name] for name in FIELDS]) != raw[b"checksum"] or raw[b"version"] != VERSION:
            raise ValueError("damaged, or of another version")
        state = State(raw[b"state"].decode())
        if state not in (State.COMPLETED, State.FAILED):
            raise ValueError(f"{state} is no outcome")
        return Record(
            key=key,
            state=state,
            fence=whole(raw[b"fence"]),
            task_id=raw[b"task"].decode(),
            fingerprint=raw[b"fingerprint"].decode(),
            payload=raw[b"payload"],
            age=max(0, now - whole(raw[b"ended"])) / 1e6,
            retention=max(0, whole(raw[b"expires"]) - now) / 1e6,
            announced=frozenset(name[10:].decode() for name in marks),
        )
    except (KeyError, ValueError) as error:
        raise RecordUnreadable(
            f"The cached outcome of {key!r} is damaged or of another version ({error}). "
            "It is passed over; nothing need be done."
        ) from error
