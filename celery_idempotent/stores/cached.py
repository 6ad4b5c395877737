"""A cache in front of a durable store: what is finished is answered from Redis, what may run is decided behind it.

The cache may lose, forget or garble what it likes. It only ever serves what is already done, and only to the first
delivery of another message than the one that did it: whether the callbacks of a message were dispatched is what a
redelivery must know for certain, and the durable store does.
"""

from __future__ import annotations

import logging
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from time import monotonic
from typing import Any, TypeVar
from urllib.parse import unquote

from ..errors import ConfigurationError, RecordUnreadable, StoreError, StoreUnreachable
from ..units import parse_duration
from . import SCHEMES, hide_password, open_store, unknown_parameter
from .base import Store
from .records import Claim, HistoryEntry, Lease, Outcome, PastEvent, Record, Refusal, Release, State, Verdict
from .redis.records import answered, ms, whole
from .redis.store import RedisStore

__all__ = ["CachedStore"]


#: Longest time in seconds that an outcome is answered from the cache, by default.
MAX_AGE = 3600.0

MARK = "cached+"
#: The parameter of this store's own, and how alike another one is that is a slip for it.
AGE, ALIKE = "max_age", 0.75
LIKE = "cached+postgresql://app@db/shop?cache=redis://cache:6379/0"


@dataclass(frozen=True, slots=True)
class CachedUrl:
    """The parts of a URL: the store behind the cache, the cache, and for how many seconds it answers."""

    durable: str
    cache: str
    max_age: float

    @classmethod
    def of(cls, url: str) -> CachedUrl:
        """Take a URL apart.

        Raises:
            ConfigurationError: it does not begin with ``cached+``, or does not end with ``cache=`` and a Redis URL.
        """
        if not url.lower().startswith(MARK):
            raise _unlike(url, "it does not begin with cached+ and the scheme of the durable store")
        base, _, query = url[len(MARK) :].partition("?")
        # Whatever follows is the cache's, so that its own & and ? need no escaping.
        options, *caches = re.split(r"(?:^|&)cache=", query, maxsplit=1)
        cache = caches[0] if caches else ""
        if "://" not in cache:
            cache = unquote(cache)
        if not caches or not _is_redis(cache):
            raise _unlike(url, "it does not end with cache= and the URL of a Redis")
        if re.search(r"[?&]max_age=", cache):
            raise _unlike(url, "max_age= comes after cache=, whose URL ends the whole: write it before")
        parts = [part for part in options.split("&") if part]
        for name in (part.partition("=")[0] for part in parts):
            if name != AGE and get_close_matches(name, [AGE], cutoff=ALIKE):
                raise unknown_parameter(url.partition("cache=")[0], name, [AGE], "")
        ages = [part.partition("=")[2] for part in parts if part.startswith("max_age=")]
        rest = "&".join(part for part in parts if not part.startswith("max_age="))
        durable = f"{base}?{rest}" if rest else base
        return cls(durable, cache, _seconds(unquote(ages[-1])) if ages else MAX_AGE)


def _seconds(text: str) -> float:
    return parse_duration(float(text) if text.isdecimal() else text, "max_age")


def _is_redis(url: str) -> bool:
    scheme, separator, _ = url.partition("://")
    return bool(separator) and SCHEMES.get(scheme.lower(), ("",))[0] == "redis"


def _unlike(url: str, why: str) -> ConfigurationError:
    return ConfigurationError(
        f"Expected the URL of a cached store to be like {LIKE} "
        f"(max_age=15m may stand before cache=), got {hide_password(url)!r}: {why}."
    )


T = TypeVar("T")
logger = logging.getLogger("celery_idempotent.stores")

#: Seconds that the cache may take to answer. The durable store would have answered meanwhile.
TIMEOUT = 0.3
#: Seconds for which a cache that failed is left alone.
PROBE_EVERY = 1.0
#: What was read longer ago than this, in seconds, is not put into the cache: it may have been deleted meanwhile.
LATE = 5.0

SETTLED = (State.COMPLETED, State.FAILED)


class CachedStore(Store):
    """Answer from a Redis what another store has settled; everything else is the other store's.

    The cache fails no verb but `delete`, which must reach it: an outcome that is deleted must not be answered any more.

    Arguments:
        durable: Decides who may run.
        cache: A Redis database for the outcomes of this durable store and of no other: an outcome that a second one
            left there would be taken for this one's. Its timeouts should be short; those of `from_url` are.
        max_age: Longest time in seconds that an outcome is answered from the cache.
    """

    def __init__(self, durable: Store, cache: RedisStore, *, max_age: float = MAX_AGE) -> None:
        if not isinstance(cache, RedisStore):
            raise ConfigurationError(f"Expected the cache to be a RedisStore, got a {type(cache).__name__}.")
        self.durable = durable
        self.keeps_history, self.seeks_in_progress = durable.keeps_history, durable.seeks_in_progress
        self._outcomes = CacheEntries(cache, max_age=parse_duration(max_age, "max_age"))
        self._failing = self._logged_damage = False
        self._spared_until = 0.0

    @classmethod
    def from_url(cls, url: str) -> CachedStore:
        """Return the store of a URL like ``cached+postgresql://app@db/shop?cache=redis://cache/0``.

        Arguments:
            url: The durable store's, with ``cached+`` before it, and at its very end ``cache=`` with the URL of the
                cache. ``max_age=15m`` before that limits how long an outcome is answered from the cache (default: 1 h).

        Raises:
            ConfigurationError: it is no such URL, or one of the two cannot be meant.
        """
        parts = CachedUrl.of(url)
        options = {"socket_timeout": TIMEOUT, "socket_connect_timeout": TIMEOUT}
        cache = RedisStore.from_url(parts.cache, **options)
        return cls(open_store(parts.durable), cache, max_age=parts.max_age)

    def acquire(self, claim: Claim) -> Lease | Refusal:
        may_hit = bool(claim.task_id) and not claim.is_copy and not claim.attempt
        record = self._try(self._outcomes.find, claim.key, claim.announcer) if may_hit else None
        if record is not None and record.task_id != claim.task_id:
            reused = claim.fingerprint and record.fingerprint and record.fingerprint != claim.fingerprint
            return Refusal(Verdict.KEY_REUSED if reused else Verdict(record.state.value), record)
        sent_at = monotonic()
        answer = self.durable.acquire(claim)
        if isinstance(answer, Refusal) and answer.record.state in SETTLED:
            self._keep(answer.record, sent_at)
        return answer

    def settle(self, lease: Lease, outcome: Outcome, *, ttl: float) -> None:
        sent_at = monotonic()
        self.durable.settle(lease, outcome, ttl=ttl)
        claim = lease.claim  # a settle repeated for want of a reply writes the same
        record = Record(lease.key, outcome.state, lease.fence, task_id=claim.task_id, fingerprint=claim.fingerprint)
        self._keep(replace(record, payload=outcome.payload, retention=ttl), sent_at)

    def settle_within(self, lease: Lease, outcome: Outcome, *, ttl: float, using: Any) -> None:
        # The cache gets nothing: this may be rolled back. The first duplicate will fill it.
        self.durable.settle_within(lease, outcome, ttl=ttl, using=using)

    def mark_dispatched(self, key: str, task_id: str) -> bool:
        settled = self.durable.mark_dispatched(key, task_id)
        if settled:
            self._try(self._outcomes.mark, key, task_id)
        return settled

    def delete(self, key: str) -> bool:
        """Forget a key in both.

        Raises:
            StoreUnreachable: the cache could not be reached, and may answer with the outcome until ``max_age`` is over.
                If that was before the deletion, nothing was deleted.
        """
        self._forget(key, "Nothing was deleted")
        known = self.durable.delete(key)
        self._forget(key, "It is deleted behind the cache")  # once more, for the cache may have lost the mark
        return known

    def _forget(self, key: str, so_far: str) -> None:
        try:
            self._outcomes.forget(key)
        except StoreError as error:
            raise StoreUnreachable(
                f"Expected the cache to forget {key!r}, and it cannot: {error} {so_far}; the cache may answer with the "
                "outcome until max_age is over. Delete the key again once the cache serves."
            ) from error

    def renew(self, leases: Sequence[Lease]) -> Sequence[Lease]:
        return self.durable.renew(leases)

    def shard(self, key: str) -> str:
        return self.durable.shard(key)

    def release(self, lease: Lease, release: Release) -> bool:
        return self.durable.release(lease, release)

    def mark_shutdown(self, lease: Lease) -> bool:
        return self.durable.mark_shutdown(lease)

    def get(self, key: str) -> Record | None:
        return self.durable.get(key)

    def append_history(self, entries: Sequence[HistoryEntry]) -> None:
        self.durable.append_history(entries)

    def history(self, key: str) -> Sequence[PastEvent]:
        return self.durable.history(key)

    def scan(self, *, prefix: str = "", state: State | None = None) -> Iterator[Record]:
        return self.durable.scan(prefix=prefix, state=state)

    def purge(self, limit: int | None = None) -> int:
        return self.durable.purge(limit)

    def pending_schema(self) -> str:
        return self.durable.pending_schema()

    def apply_schema(self) -> None:
        self.durable.apply_schema()

    def usage(self, sample: Sequence[str] = ()) -> dict[str, int]:
        return self.durable.usage(sample)

    def warnings(self) -> list[str]:
        return self.durable.warnings()

    def ping(self) -> None:
        self.durable.ping()

    def close(self) -> None:
        self.durable.close()
        self._outcomes.close()

    def _keep(self, record: Record, sent_at: float) -> None:
        """Put into the cache what the durable store replied to a call; not if it is unknown for how long it holds."""
        passed = monotonic() - sent_at
        ttl = record.retention - passed
        if record.task_id and record.fence and ttl > 0 and passed < LATE:
            self._try(self._outcomes.keep, record, ttl)

    def _try(self, verb: Callable[..., T], *args: Any) -> T | None:
        """Call the cache; return None if it does not answer, and log when that begins and ends."""
        if self._failing:
            if monotonic() < self._spared_until:
                return None
            self._spared_until = monotonic() + PROBE_EVERY
        try:
            answer = verb(*args)
        except RecordUnreadable as error:
            if not self._logged_damage:
                logger.warning("%s Others like it will not be mentioned.", error)
            self._logged_damage = True
            return None
        except StoreError as error:
            if not self._failing:
                logger.warning("The durable store %s is used without its cache: %s", type(self.durable).__name__, error)
            self._failing, self._spared_until = True, monotonic() + PROBE_EVERY
            return None
        if self._failing:
            self._failing = False
            logger.info("The cache of the durable store %s serves again.", type(self.durable).__name__)
        return answer


# The outcomes that a cache holds in front of a store: one hash each, readable in ``redis-cli``, never a pickle.
#
# An entry may vanish at any moment, and be as old as its ``max_age``. So that no entry comes back that was deleted, a
# deletion leaves a mark for as long; and of two outcomes of one key the later one stays, by its fence.


#: What the fields mean; one that is not known is as good as no entry. It also keeps a `RedisStore` in the same database
#: from taking an entry for one of its records.
VERSION = b"1"
#: In the order of their checksum.
FIELDS = (b"version", b"state", b"fence", b"task", b"fingerprint", b"payload")
#: What find.lua answers of an entry, in its order; the last is the asker's own mark.
ANSWERED = (*FIELDS, b"checksum", b"ended", b"expires", b"announced")
#: Before each key.
PREFIX = "cached:"


class CacheEntries:
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
            announcer: The id of the task for which the record holds whether its callbacks were dispatched.

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
        """Forget a key, and keep nothing under it for as long as a process may still write what was deleted."""
        self._redis._call("forget", (PREFIX + key,), (ms(max(self._max_age, 2 * LATE)),))

    def close(self) -> None:
        """Close the connections of this process."""
        self._redis.close()


def fields_of(record: Record) -> list[bytes]:
    """Return a settled record as fields and values, but for its times and marks."""
    texts = (record.state.value, str(record.fence), record.task_id, record.fingerprint)
    values = [VERSION, *(text.encode() for text in texts), record.payload]
    pairs = [part for pair in zip(FIELDS, values, strict=True) for part in pair]
    return [*pairs, b"checksum", checksum(values)]


def checksum(values: Sequence[bytes]) -> bytes:
    """Return a checksum that shows damage; it is no protection against a forged entry."""
    return b"%08x" % zlib.crc32(b"\0".join(b"%d:%b" % (len(value), value) for value in values))


def outcome_of(key: str, raw: Mapping[bytes, bytes], now: int) -> Record | None:
    """Return the record in the fields of an entry, at the cache's time ``now`` in microseconds; None for marks.

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
            dispatched=frozenset(name[10:].decode() for name in marks),
        )
    except (KeyError, ValueError) as error:
        raise RecordUnreadable(
            f"The cached outcome of {key!r} is damaged or of another version ({error}). "
            "It is passed over; nothing need be done."
        ) from error
