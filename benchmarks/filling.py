"""Stores that remember many operations already, filled by their servers: through the verbs it would take an hour."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import psycopg
import redis
from redis.cluster import RedisCluster

from celery_idempotent.stores.postgres.connections import TABLE as POSTGRES
from celery_idempotent.stores.sqlite.connections import TABLE as SQLITE
from tests.support.celery.business import Business

__all__ = ["bytes_each", "expire", "fill"]

BATCH = 5000
#: Copies a settled record under new keys, within the server: a million of them take seconds.
_COPY = """
local fields = redis.call('HGETALL', KEYS[1])
for i = tonumber(ARGV[1]), tonumber(ARGV[2]) do
  local key = string.format('%s-%08d', string.sub(KEYS[1], 1, -10), i)
  redis.call('HSET', key, unpack(fields)) redis.call('PEXPIRE', key, 86400000 + i % 1000 * 1000)
end
"""
_COPY_POSTGRES = f"""
INSERT INTO {POSTGRES} SELECT r.* FROM {POSTGRES} t, generate_series(%s::int, %s::int) i,
LATERAL jsonb_populate_record(t, jsonb_build_object('key', left(t.key, -9) || '-' || lpad(i::text, 8, '0'))) r
WHERE t.key = %s
"""
_COPY_SQLITE = f"""
WITH RECURSIVE numbers(i) AS (SELECT ? UNION ALL SELECT i + 1 FROM numbers WHERE i < ?)
INSERT INTO {SQLITE} SELECT substr(key, 1, length(key) - 9) || printf('-%08d', i), {{columns}} FROM {SQLITE}, numbers
WHERE key = ?
"""


def fill(url: str, model: str, records: int) -> None:
    """Have the store at ``url`` remember that many copies of its settled record ``model``, with keys as long."""
    if url.startswith("redis:"):
        with redis.Redis.from_url(url) as client:
            _copy_on(client, model, records)
        return
    if url.startswith("redis+cluster:"):
        with _cluster(url) as cluster:
            fields, nodes = cluster.hgetall(model), cluster.get_primaries()
            for node in nodes:
                # All have one slot of it, so that its server may make them.
                names = (f"idem:{{{number}}}{model}" for number in count())
                own = next(name for name in names if cluster.get_node_from_key(name) == node)
                with redis.Redis(host=node.host, port=node.port) as client:
                    client.hset(own, mapping=fields)
                    _copy_on(client, own, records // len(nodes))
                    client.delete(own)
        return
    with _database(url) as database:
        for start in range(0, records, BATCH):
            end = min(start + BATCH, records) - 1
            if isinstance(database, sqlite3.Connection):
                columns = ", ".join(
                    name for _, name, *_ in database.execute(f"PRAGMA table_info({SQLITE})").fetchall()[1:]
                )
                database.execute(_COPY_SQLITE.format(columns=columns), (start, end, model))
            else:
                database.execute(_COPY_POSTGRES, (start, end, model))
            database.commit()
    _settle_down(url)


def _copy_on(client: redis.Redis, model: str, records: int) -> None:
    copy = client.register_script(_COPY)
    for start in range(0, records, BATCH):
        copy(keys=[model], args=[start, min(start + BATCH, records) - 1])


def _cluster(url: str) -> RedisCluster:
    host, _, port = url.partition("://")[2].partition(",")[0].rpartition(":")
    return RedisCluster(host=host, port=int(port))


def expire(url: str, key_like: str) -> int:
    """Make the SQL store at ``url`` believe that the records with such keys have expired; return how many."""
    table, mark = (SQLITE, "?") if url.startswith("sqlite:") else (POSTGRES, "%s")
    with _database(url) as database:
        count = database.execute(f"UPDATE {table} SET expires = 1 WHERE key LIKE {mark}", (key_like,)).rowcount
        database.commit()
    _settle_down(url)
    return int(count)


def bytes_each(url: str, records: int) -> float:
    """Return the bytes per record of a store that holds so many: on disk with the indexes, of Redis in memory."""
    if url.startswith("redis+cluster:"):
        with _cluster(url) as cluster:
            nodes = [cluster.info(target_nodes=node) for node in cluster.get_primaries()]
        return sum(map(_memory, nodes)) / records
    if url.startswith("redis:"):
        with redis.Redis.from_url(url) as client:
            return _memory(client.info()) / records
    with _database(url) as database:
        if isinstance(database, sqlite3.Connection):
            path = Path(Business(url).url.partition("://")[2].removeprefix("/"))
            return path.stat().st_size / records
        [size] = database.execute("SELECT pg_total_relation_size(%s)", (POSTGRES,)).fetchone()
        return float(size / records)


def _memory(info: Any) -> float:
    """Return what a server spends on its records, with its tables of keys."""
    return float(info["used_memory"] - info["used_memory_startup"])


@contextmanager
def _database(url: str) -> Iterator[sqlite3.Connection | psycopg.Connection]:
    with closing(Business(url).connect()) as connection:
        yield connection


def _settle_down(url: str) -> None:
    """Let the database do now what it would do in the background while somebody measures."""
    with _database(url) as database:
        if isinstance(database, sqlite3.Connection):
            database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        else:
            database.autocommit = True
            database.execute(f"VACUUM ANALYZE {POSTGRES}")
            database.execute("CHECKPOINT")
    time.sleep(1)
