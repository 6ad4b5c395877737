"""Stores to test, and how their records grow old."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from celery_idempotent.records import Claim, Lease, Outcome, Reason, Record, Release, State, new_owner
from celery_idempotent.stores import Store
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.stores.redis import RedisStore
from celery_idempotent.stores.rules import SECOND

KEY = "idem:shop.charge:ORD-1"
DONE = Outcome(State.COMPLETED, b"json:42")
#: A lease of somebody else, on a key that may or may not be there.
NOBODYS = Lease(Claim(KEY, "nobody", 60.0, 60.0), 1)
VERBS = ["acquire", "renew", "settle", "release", "announce", "get", "delete", "scan", "ping"]

# A record without an expiry would be a fault that ageing must not hide: `PTTL` is -1 then, and it vanishes at once.
AGE = """
for _, field in ipairs({'lease_end', 'not_before'}) do
  local value = redis.call('HGET', KEYS[1], field)
  if value then redis.call('HSET', KEYS[1], field, string.format('%.0f', value - ARGV[1] * 1000)) end
end
local ended = redis.call('HGET', KEYS[1], 'ended')
if ended then redis.call('HSET', KEYS[1], 'ended', string.format('%.0f', ended - ARGV[1] / 1000)) end
redis.call('PEXPIRE', KEYS[1], redis.call('PTTL', KEYS[1]) - ARGV[1])
"""


def age(store: Store, key: str, seconds: float) -> None:
    """Make a record look as if this much more time had passed; the fence stays."""
    if isinstance(store, MemoryStore):
        age_row(store, key, seconds)
    else:
        assert isinstance(store, RedisStore)
        if store.get(key) is not None:
            store._client.eval(AGE, 1, key, round(seconds * 1000))


def age_row(store: MemoryStore, key: str, seconds: float) -> None:
    row = store._rows.get(key)
    if row is not None:
        by = round(seconds * SECOND)
        row.lease_end -= by
        row.not_before -= by
        row.ended -= by if row.ended else 0
        row.expires -= by


def age_fence(store: Store, key: str, seconds: float) -> None:
    """Make the current lease look as if it had been taken so much earlier, for the rule of the ten renewals."""
    if isinstance(store, MemoryStore):
        if key in store._rows:
            store._rows[key].fence -= round(seconds * SECOND)
    else:
        assert isinstance(store, RedisStore)
        fence = store._client.hget(key, "fence")
        if fence is not None:
            store._client.hset(key, "fence", int(fence) - round(seconds * SECOND))


def claim(key: str = KEY, **changes: Any) -> Claim:
    return Claim(**{"key": key, "owner": new_owner(), "lease_ttl": 60.0, "keep_ttl": 3600.0, **changes})


def take(store: Store, key: str = KEY, **changes: Any) -> Lease:
    answer = store.acquire(claim(key, **changes))
    assert isinstance(answer, Lease)
    return answer


def known(store: Store, key: str = KEY) -> Record:
    record = store.get(key)
    assert record is not None
    return record


def verb(store: Store, name: str, lease: Lease = NOBODYS) -> Callable[[], object]:
    """Return a call of each verb that goes to a server."""
    calls: dict[str, Callable[[], object]] = {
        "acquire": lambda: store.acquire(claim(lease.key)),
        "renew": lambda: store.renew([lease]),
        "settle": lambda: store.settle(lease, DONE, ttl=60),
        "release": lambda: store.release(lease, Release(Reason.FAILED)),
        "announce": lambda: store.announce(lease.key, "a"),
        "get": lambda: store.get(lease.key),
        "delete": lambda: store.delete(lease.key),
        "scan": lambda: list(store.scan()),
        "ping": store.ping,
    }
    return calls[name]
