"""Every kind of store under test: where an empty one comes from, and how its records grow old.

A new kind is an entry in `KINDS` and a fixture of that name in a conftest, whose value is the URL of an empty place
that is this test's alone. The contract, the races, the state machine and the histories then run over it too.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from celery_idempotent.stores import Store
from celery_idempotent.stores.cached import PREFIX, CachedStore
from celery_idempotent.stores.dynamodb import DynamoDBStore
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.stores.postgres import PostgresStore
from celery_idempotent.stores.redis import ClusterStore, RedisStore
from celery_idempotent.stores.rules import SECOND
from celery_idempotent.stores.sqlite import SqliteStore
from celery_idempotent.testing import StoreContract
from tests.support.stores.postgres import age_postgres, age_postgres_fence, empty_postgres

__all__ = ["BEHIND_CACHE", "KINDS", "Kind", "kind_of", "lead", "port_of"]


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
        rounds: How often each race is run.
        many: How many leases are renewed, or records found, where that is to be more than fit into one request.
        through: Makes a URL lead to another port of this machine, so that a fault proxy comes between; None where there
            is no server. `lead` does it for every URL that says ``127.0.0.1:port``.
        fences_fall: Whether a fence may be lower than those before the record was deleted, as the store's guide says.
        examples: How many histories are searched; half as many runs of a state machine compare it with memory.
    """

    fixture: str
    store: type[Store]
    age: Callable[[Any, str, float], None]
    age_fence: Callable[[Any, str, float], None]
    empty: Callable[[Any], None]
    shared: bool = True
    rounds: int = 20
    many: int = StoreContract.many
    examples: int = 50
    through: Callable[[str, int], str] | None = None
    fences_fall: bool = False


ADDRESS = re.compile(r"127\.0\.0\.1(?::|%3A)(\d+)")


def port_of(url: str) -> int:
    """Return the port of the server that a URL leads to; of the first one, where it leads to two."""
    found = ADDRESS.search(url)
    assert found is not None, f"{url} names no 127.0.0.1:port"
    return int(found[1])


def lead(url: str, port: int) -> str:
    """Return a URL that leads to another port, and is the same otherwise."""
    start, end = cast("re.Match[str]", ADDRESS.search(url)).span(1)
    return f"{url[:start]}{port}{url[end:]}"


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


def age_cluster(store: ClusterStore, key: str, seconds: float) -> None:
    if store.get(key) is not None:
        store._command("EVAL", AGE, 1, key, round(seconds * 1000))


def age_cluster_fence(store: ClusterStore, key: str, seconds: float) -> None:
    fence = store._command("HGET", key, "fence")
    if fence is not None:
        store._command("HSET", key, "fence", int(fence) - round(seconds * SECOND))


def empty_cluster(store: ClusterStore) -> None:
    for node in store._places():
        node.execute("FLUSHALL")


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


AGE_SQLITE = """
UPDATE celery_idempotency SET lease_end = lease_end - :by, not_before = not_before - :by,
  ended = CASE ended WHEN 0 THEN 0 ELSE ended - :by END, expires = expires - :by
WHERE key = :key
"""
AGE_SQLITE_FENCE = "UPDATE celery_idempotency SET fence = fence - :by WHERE key = :key"


def age_sqlite(store: SqliteStore, key: str, seconds: float, statement: str = AGE_SQLITE) -> None:
    store._connections.write(lambda cursor: cursor.execute(statement, {"key": key, "by": round(seconds * SECOND)}))


def age_sqlite_fence(store: SqliteStore, key: str, seconds: float) -> None:
    age_sqlite(store, key, seconds, AGE_SQLITE_FENCE)


def empty_sqlite(store: SqliteStore) -> None:
    store._connections.write(lambda cursor: cursor.execute("DELETE FROM celery_idempotency"))


def age_dynamodb(store: DynamoDBStore, key: str, seconds: float) -> None:
    item = store._table.read(key)
    if item is not None:
        by = round(seconds * SECOND)
        for name in {"not_before", "ended"} & item.keys():
            item[name] = {"N": str(int(item[name]["N"]) - by)}
        item["expires"] = {"N": str(int(item["expires"]["N"]) - round(seconds))}
        if "watch" in item:  # since when a machine has seen the lease
            seen = {machine: {"N": str(int(ticks["N"]) - by)} for machine, ticks in item["watch"]["M"].items()}
            item["watch"] = {"M": seen}
        store._table.call("put_item", Item=item)


def age_dynamodb_fence(store: DynamoDBStore, key: str, seconds: float) -> None:
    item = store._table.read(key)
    if item is not None:
        item["fence"] = {"N": str(int(item["fence"]["N"]) - round(seconds * SECOND))}
        store._table.call("put_item", Item=item)


def empty_dynamodb(store: DynamoDBStore) -> None:
    for item in store._table.scan(""):
        store._table.call("delete_item", Key={"key": item["key"]})


# What is cached is aged as its record is: without that, a cache would remember what its durable store forgot.
AGE_OUTCOME = """
for _, field in ipairs({'ended', 'expires'}) do
  local value = redis.call('HGET', KEYS[1], field)
  if tonumber(value) then redis.call('HSET', KEYS[1], field, string.format('%.0f', value - ARGV[1] * 1000)) end
end
redis.call('PEXPIRE', KEYS[1], redis.call('PTTL', KEYS[1]) - ARGV[1])
"""

#: The kind that is put behind a cache.
BEHIND_CACHE = "redis"


def age_cached(store: CachedStore, key: str, seconds: float) -> None:
    KINDS[BEHIND_CACHE].age(store.durable, key, seconds)
    entry, cache = PREFIX + key, store._outcomes._redis._client
    if cache.type(entry) == b"hash":
        cache.eval(AGE_OUTCOME, 1, entry, round(seconds * 1000))


def age_cached_fence(store: CachedStore, key: str, seconds: float) -> None:
    KINDS[BEHIND_CACHE].age_fence(store.durable, key, seconds)


def empty_cached(store: CachedStore) -> None:
    KINDS[BEHIND_CACHE].empty(store.durable)
    store._outcomes._redis._client.flushdb()


KINDS: dict[str, Kind] = {
    "memory": Kind("memory_url", MemoryStore, age_memory, age_memory_fence, empty_memory, shared=False),
    "redis": Kind("redis_url", RedisStore, age_redis, age_redis_fence, empty_redis, through=lead),
    "sqlite": Kind("sqlite_url", SqliteStore, age_sqlite, age_sqlite_fence, empty_sqlite),
    "postgres": Kind("postgres_url", PostgresStore, age_postgres, age_postgres_fence, empty_postgres, through=lead),
    "cluster": Kind("cluster_url", ClusterStore, age_cluster, age_cluster_fence, empty_cluster),
    "dynamodb": Kind(
        "dynamodb_url",
        DynamoDBStore,
        age_dynamodb,
        age_dynamodb_fence,
        empty_dynamodb,
        rounds=3,
        many=110,  # each is a request of its own
        examples=8,
        through=lead,
        fences_fall=True,
    ),
    "cached": Kind("cached_url", CachedStore, age_cached, age_cached_fence, empty_cached, through=lead),
}


def kind_of(store: Store) -> Kind:
    """Return what kind of store this is."""
    return next(kind for kind in KINDS.values() if type(store) is kind.store)
