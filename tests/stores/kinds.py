"""Every kind of store under test: where an empty one comes from, and how its records grow old.

A new kind is an entry in `KINDS` and a fixture of that name in a conftest, whose value is the URL of an empty place
that is this test's alone. The contract, the races, the state machine and the histories then run over it too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from celery_idempotent.stores import Store
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.stores.postgres import PostgresStore
from celery_idempotent.stores.redis import RedisStore
from celery_idempotent.stores.rules import SECOND
from tests.stores.postgres import age_postgres, age_postgres_fence, empty_postgres

__all__ = ["KINDS", "Kind", "kind_of"]


@dataclass(frozen=True)
class Kind:
    """One kind of store.

    Arguments:
        fixture: The name of the fixture that gives the URL of an empty place.
        store: The class that `open_store` makes of that URL.
        age: Makes a record look as if this many more seconds had passed; the fence stays.
        age_fence: Makes the current lease look as if it had been taken so much earlier, for the ten renewals.
        empty: Forgets everything, also between the examples of a state machine.
        shared: Whether other processes that open the same URL see the same records.
        examples: How many runs of the state machine compare it with the memory store.
    """

    fixture: str
    store: type[Store]
    age: Callable[[Any, str, float], None]
    age_fence: Callable[[Any, str, float], None]
    empty: Callable[[Any], None]
    shared: bool = True
    examples: int = 300


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


def age_redis(store: RedisStore, key: str, seconds: float) -> None:
    if store.get(key) is not None:
        store._client.eval(AGE, 1, key, round(seconds * 1000))


def age_redis_fence(store: RedisStore, key: str, seconds: float) -> None:
    fence = store._client.hget(key, "fence")
    if fence is not None:
        store._client.hset(key, "fence", int(fence) - round(seconds * SECOND))


def empty_redis(store: RedisStore) -> None:
    store._client.flushdb()


def age_memory(store: MemoryStore, key: str, seconds: float) -> None:
    row = store._rows.get(key)
    if row is not None:
        by = round(seconds * SECOND)
        row.lease_end -= by
        row.not_before -= by
        row.ended -= by if row.ended else 0
        row.expires -= by


def age_memory_fence(store: MemoryStore, key: str, seconds: float) -> None:
    if key in store._rows:
        store._rows[key].fence -= round(seconds * SECOND)


def empty_memory(store: MemoryStore) -> None:
    store._rows.clear()


KINDS: dict[str, Kind] = {
    "memory": Kind("memory_url", MemoryStore, age_memory, age_memory_fence, empty_memory, shared=False),
    "redis": Kind("redis_url", RedisStore, age_redis, age_redis_fence, empty_redis),
    "postgres": Kind("postgres_url", PostgresStore, age_postgres, age_postgres_fence, empty_postgres, examples=60),
}


def kind_of(store: Store) -> Kind:
    """Return what kind of store this is."""
    return next(kind for kind in KINDS.values() if type(store) is kind.store)
