"""What doctor finds of a store, by code."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from celery_idempotent.cli.doctor.findings import Finding, Section, Severity, Target
from celery_idempotent.cli.doctor.stores import sections
from celery_idempotent.stores import Store, hide_password, open_store

__all__ = ["by_code", "found_of", "severities"]


def by_code(found: Iterable[Section]) -> dict[str, Finding]:
    """Return findings by their codes, of which each comes once."""
    codes: dict[str, Finding] = {}
    for section in found:
        for finding in section.findings:
            assert finding.code not in codes, finding
            assert finding.found
            assert finding.remedy or finding.severity <= Severity.INFO, finding
            codes[finding.code] = finding
    return codes


def found_of(place: str | Store, **known: Any) -> dict[str, Finding]:
    """Examine a store, or the one that a URL names."""
    store = open_store(place) if isinstance(place, str) else place
    name = hide_password(place) if isinstance(place, str) else "store"
    try:
        return by_code(sections(Target(store, name, **known)))
    finally:
        if isinstance(place, str):
            store.close()


def severities(found: dict[str, Finding]) -> dict[str, str]:
    """Return what is not well, by code."""
    return {code: str(finding.severity) for code, finding in found.items() if finding.severity is not Severity.OK}
