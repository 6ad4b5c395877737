"""What is wrong with a store, and what to do about it.

Each kind of store has a module with a table of checks, which is imported when such a store is examined, and not before.
A check is a small function that looks at one thing; its name is the code of what it finds.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module

from .examination import Check, examined
from .finding import Section
from .patient import Patient
from .round_trips import slow_store
from .trial import claims_refused
from .upkeep import schema_pending

__all__ = ["CHECKS", "KINDS", "Patient", "Section", "sections"]

#: By the class of a store, the module here that knows its kind.
KINDS = {
    "MemoryStore": "memory",
    "RedisStore": "redis",
    "PostgresStore": "postgres",
    "SqliteStore": "sqlite",
    "DynamoDBStore": "dynamodb",
    "CachedStore": "cached",
}
#: What is seen of a store of which nothing else is known: one that somebody else wrote.
CHECKS: tuple[Check, ...] = (schema_pending, slow_store, claims_refused)


def sections(patient: Patient) -> Iterator[Section]:
    """Yield what is found of a store; a section for each part of it."""
    known = (KINDS[cls.__name__] for cls in type(patient.store).__mro__ if cls.__name__ in KINDS)
    module = next(known, "")
    if module:
        yield from import_module(f".{module}", __name__).sections(patient)
    else:
        yield Section(patient.name, list(examined(CHECKS, patient)))
