"""A store that no other process sees."""

from __future__ import annotations

from collections.abc import Iterator

from .examination import Check, examined
from .finding import Finding, Section, warning
from .patient import Patient

__all__ = ["CHECKS", "sections"]


def store_of_one_process(patient: Patient) -> Finding:
    """Say that the store protects nothing between processes."""
    return warning(
        "The store is the memory of one process: no other process sees it, and it ends with it. A prefork worker "
        "refuses to start.",
        'app.conf.idempotency_store = "redis://host:6379/1"',
    )


CHECKS: tuple[Check, ...] = (store_of_one_process,)


def sections(patient: Patient) -> Iterator[Section]:
    """Yield what is found of a store in memory."""
    yield Section(patient.name, list(examined(CHECKS, patient)))
