"""Checks by kind of store; those of a store in memory and of a cached one.

Each kind of store has a module with a table of checks, which is imported when such a store is examined, and not before.
A check is a small function that looks at one thing; its name is the code of what it finds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module

from .any_store import claims_refused, schema_pending, slow_store
from .findings import Check, Finding, Section, Target, run_checks, warning

#: By the class of a store, the module here that knows its kind.
KINDS = {
    "MemoryStore": "memory",
    "RedisStore": "redis",
    "PostgresStore": "postgres",
    "SqliteStore": "sqlite",
    "DynamoDBStore": "dynamodb",
    "CachedStore": "cached",
}
#: The checks of a store of which nothing else is known: one of another author.
CHECKS: tuple[Check, ...] = (schema_pending, slow_store, claims_refused)


def sections(patient: Target) -> Iterator[Section]:
    """Yield what is found of a store; a section for each part of it."""
    known = (KINDS[cls.__name__] for cls in type(patient.store).__mro__ if cls.__name__ in KINDS)
    module = next(known, "")
    if module in ("memory", "cached"):
        yield from (memory_sections if module == "memory" else cached_sections)(patient)
    elif module:
        yield from import_module(f".{module}", __package__).sections(patient)
    else:
        yield Section(patient.name, list(run_checks(CHECKS, patient)))


def store_of_one_process(patient: Target) -> Finding:
    """Report that the store protects nothing between processes."""
    return warning(
        "The store is the memory of one process: no other process sees it, and it ends with it. A prefork worker "
        "refuses to start.",
        'app.conf.idempotency_store = "redis://host:6379/1"',
    )


MEMORY_CHECKS: tuple[Check, ...] = (store_of_one_process,)


def memory_sections(patient: Target) -> Iterator[Section]:
    """Yield what is found of a store in memory."""
    yield Section(patient.name, list(run_checks(MEMORY_CHECKS, patient)))


#: What is seen of the cache as a whole.
CACHED_CHECKS: tuple[Check, ...] = (slow_store,)


def cached_sections(patient: Target) -> Iterator[Section]:
    """Yield what is found of the durable store, and what is found of its cache."""
    from ...stores.cached import CachedStore
    from . import redis

    store = patient.store
    assert isinstance(store, CachedStore)
    yield from sections(replace(patient, store=store.durable, name=f"{patient.name} (durable)"))
    cache = replace(patient, store=store._outcomes._redis, name=f"{patient.name} (cache)")
    yield Section(cache.name, list(redis.findings(cache, redis.CACHE_CHECKS, CACHED_CHECKS)))
