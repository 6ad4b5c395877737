"""A cache in front of a durable store: what is finished is answered from Redis, what may run is decided behind it.

The cache may lose, forget or garble what it likes. It is only ever asked what is already done, and only by the first
delivery of another message than the one that did it: whether the callbacks of a message were dispatched is what a
redelivery must know for certain, and the durable store does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from time import monotonic
from typing import Any, TypeVar

from ..errors import ConfigurationError, RecordUnreadable, StoreError, StoreUnreachable
from ..notes import Note, Noted
from ..policy import parse_duration
from ..records import Claim, Lease, Outcome, Record, Refusal, Release, State, Verdict
from . import open_store
from .base import Store
from .cached_url import MAX_AGE, CachedUrl
from .outcomes import Outcomes
from .redis import RedisStore

__all__ = ["CachedStore"]

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
            left there would be taken for one of ours. Its timeouts should be short; those of `from_url` are.
        max_age: Longest time in seconds that an outcome is answered from the cache.
    """

    def __init__(self, durable: Store, cache: RedisStore, *, max_age: float = MAX_AGE) -> None:
        if not isinstance(cache, RedisStore):
            raise ConfigurationError(f"Expected the cache to be a RedisStore, got a {type(cache).__name__}.")
        self.durable = durable
        self.keeps_history = durable.keeps_history
        self._outcomes = Outcomes(cache, max_age=parse_duration(max_age, "max_age"))
        self._failing = self._told_damage = False
        self._spared_until = 0.0

    @classmethod
    def from_url(cls, url: str) -> CachedStore:
        """Return the store of a URL like ``cached+postgresql://app@db/shop?cache=redis://cache/0``.

        Arguments:
            url: The durable store's, with ``cached+`` before it, and at its very end ``cache=`` with the URL of the
                cache. ``max_age=15m`` before that says how long an outcome is answered from the cache (default: 1 h).

        Raises:
            ConfigurationError: it is no such URL, or one of the two cannot be meant.
        """
        parts = CachedUrl.of(url)
        options = {"socket_timeout": TIMEOUT, "socket_connect_timeout": TIMEOUT}
        cache = RedisStore.from_url(parts.cache, **options)
        return cls(open_store(parts.durable), cache, max_age=parts.max_age)

    def acquire(self, claim: Claim) -> Lease | Refusal:
        may_ask = bool(claim.task_id) and not claim.is_copy and not claim.attempt
        record = self._ask(self._outcomes.find, claim.key, claim.announcer) if may_ask else None
        if record is not None and record.task_id != claim.task_id:
            reused = claim.fingerprint and record.fingerprint and record.fingerprint != claim.fingerprint
            return Refusal(Verdict.KEY_REUSED if reused else Verdict(record.state.value), record)
        asked = monotonic()
        answer = self.durable.acquire(claim)
        if isinstance(answer, Refusal) and answer.record.state in SETTLED:
            self._keep(answer.record, asked)
        return answer

    def settle(self, lease: Lease, outcome: Outcome, *, ttl: float) -> None:
        asked = monotonic()
        self.durable.settle(lease, outcome, ttl=ttl)
        claim = lease.claim  # who settles once more, for want of a reply, says the same once more
        record = Record(lease.key, outcome.state, lease.fence, task_id=claim.task_id, fingerprint=claim.fingerprint)
        self._keep(replace(record, payload=outcome.payload, retention=ttl), asked)

    def settle_within(self, lease: Lease, outcome: Outcome, *, ttl: float, using: Any) -> None:
        # Nothing is told to the cache: who knows whether this commits. The first duplicate will tell it.
        self.durable.settle_within(lease, outcome, ttl=ttl, using=using)

    def announce(self, key: str, task_id: str) -> bool:
        settled = self.durable.announce(key, task_id)
        if settled:
            self._ask(self._outcomes.mark, key, task_id)
        return settled

    def delete(self, key: str) -> bool:
        """Forget a key in both.

        Raises:
            StoreUnreachable: the cache could not be told, and may answer with the outcome until ``max_age`` is over.
                Where it was not told first, nothing was deleted.
        """
        self._forget(key, "Nothing was deleted")
        known = self.durable.delete(key)
        self._forget(key, "It is deleted behind the cache")  # once more, for the cache may have lost that it was told
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

    def part(self, key: str) -> str:
        return self.durable.part(key)

    def release(self, lease: Lease, release: Release) -> bool:
        return self.durable.release(lease, release)

    def mark_shutdown(self, lease: Lease) -> bool:
        return self.durable.mark_shutdown(lease)

    def get(self, key: str) -> Record | None:
        return self.durable.get(key)

    def note(self, notes: Sequence[Note]) -> None:
        self.durable.note(notes)

    def history(self, key: str) -> Sequence[Noted]:
        return self.durable.history(key)

    def scan(self, *, prefix: str = "", state: State | None = None) -> Iterator[Record]:
        return self.durable.scan(prefix=prefix, state=state)

    def purge(self, limit: int | None = None) -> int:
        return self.durable.purge(limit)

    def pending_schema(self) -> str:
        return self.durable.pending_schema()

    def apply_schema(self) -> None:
        self.durable.apply_schema()

    def room(self, sample: Sequence[str] = ()) -> dict[str, int]:
        return self.durable.room(sample)

    def ping(self) -> None:
        self.durable.ping()

    def close(self) -> None:
        self.durable.close()
        self._outcomes.close()

    def _keep(self, record: Record, asked: float) -> None:
        """Put into the cache what the durable store said when it was asked; not where it does not say for how long."""
        passed = monotonic() - asked
        ttl = record.retention - passed
        if record.task_id and record.fence and ttl > 0 and passed < LATE:
            self._ask(self._outcomes.keep, record, ttl)

    def _ask(self, verb: Callable[..., T], *args: Any) -> T | None:
        """Ask the cache, and take no answer for one that knows nothing; say so when that begins and ends."""
        if self._failing:
            if monotonic() < self._spared_until:
                return None
            self._spared_until = monotonic() + PROBE_EVERY
        try:
            answer = verb(*args)
        except RecordUnreadable as error:
            if not self._told_damage:
                logger.warning("%s Others like it will not be mentioned.", error)
            self._told_damage = True
            return None
        except StoreError as error:
            if not self._failing:
                logger.warning(
                    "The durable store %s is asked without its cache: %s", type(self.durable).__name__, error
                )
            self._failing, self._spared_until = True, monotonic() + PROBE_EVERY
            return None
        if self._failing:
            self._failing = False
            logger.info("The cache of the durable store %s serves again.", type(self.durable).__name__)
        return answer
