"""Both sides of a cached store: the durable one in full, the cache for what matters of one that may forget."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ..stores.cached import CachedStore
from . import redis
from .examination import Check
from .finding import Section
from .patient import Patient
from .round_trips import slow_store

__all__ = ["sections"]

#: What is seen of the cache as a whole.
CHECKS: tuple[Check, ...] = (slow_store,)


def sections(patient: Patient) -> Iterator[Section]:
    """Yield what is found of the durable store, and what is found of its cache."""
    from . import sections as of_any

    store = patient.store
    assert isinstance(store, CachedStore)
    yield from of_any(replace(patient, store=store.durable, name=f"{patient.name} (durable)"))
    cache = replace(patient, store=store._outcomes._redis, name=f"{patient.name} (cache)")
    yield Section(cache.name, list(redis.findings(cache, redis.CACHE_CHECKS, CHECKS)))
