"""Checks by kind of store; those of a store in memory and of a cached one.

Each kind of store has a module of checks, which is imported when such a store is examined, and not before.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module

from . import any_store
from .findings import Check, Checks, Findings, Section, Target, run_checks, warning

#: The kind of each class of stores, which names the module here that has its checks.
KINDS = {
    "MemoryStore": "memory",
    "RedisStore": "redis",
    "PostgresStore": "postgres",
    "SqliteStore": "sqlite",
    "DynamoDBStore": "dynamodb",
    "CachedStore": "cached",
}
MEMORY_CHECKS = Checks()


@MEMORY_CHECKS.add()
def store_of_one_process(target: Target) -> Findings:
    """Warn that the store protects nothing between processes."""
    yield warning(
        "The store is the memory of one process: no other process sees it, and it ends with it. A prefork worker "
        "refuses to start.",
        'app.conf.idempotency_store = "redis://host:6379/1"',
    )


def sections(target: Target) -> Iterator[Section]:
    """Yield what is found of a store, with a section for each part of it."""
    kind = next((KINDS[cls.__name__] for cls in type(target.store).__mro__ if cls.__name__ in KINDS), "")
    if kind == "cached":
        yield from _cached_sections(target)
    elif kind == "redis":
        from . import redis

        yield Section(
            redis.title(target), list(redis.findings(target, redis.SERVER_CHECKS, [*redis.CHECKS, *any_store.OF_APPS]))
        )
    else:
        yield Section(target.name, list(run_checks([*_checks(kind), *any_store.OF_APPS], target)))


def _checks(kind: str) -> list[Check]:
    if kind == "memory":
        return MEMORY_CHECKS
    module = import_module(f".{kind}", __package__) if kind else any_store  # a store of another package has no kind
    checks: list[Check] = module.CHECKS
    return checks


def _cached_sections(target: Target) -> Iterator[Section]:
    """Yield what is found of the durable store, and what is found of its cache."""
    from ...stores.cached import CachedStore
    from . import redis

    store = target.store
    assert isinstance(store, CachedStore)
    yield from sections(replace(target, store=store.durable, name=f"{target.name} (durable)"))
    cache = replace(target, store=store._outcomes._redis, name=f"{target.name} (cache)")
    yield Section(cache.name, list(redis.findings(cache, redis.CACHE_CHECKS, [any_store.slow_store])))
