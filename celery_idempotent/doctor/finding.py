"""What a check finds, how bad it is, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

from ..errors import IdempotencyError

__all__ = ["Finding", "Section", "Severity", "Unasked", "error", "info", "ok", "warning"]


class Severity(IntEnum):
    """How bad it is; what is worse is greater."""

    #: As it should be.
    OK = 0
    #: Good to know; nothing need be done.
    INFO = 1
    #: Works, and will hurt one day.
    WARNING = 2
    #: Operations are lost or repeated, or do not run at all.
    ERROR = 3

    def __str__(self) -> str:
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check says.

    Arguments:
        severity: How bad it is.
        found: One sentence of what was found.
        remedy: What to do, with the setting and its value; "" where nothing is to be done.
        code: A short word for it that does not change from one release to the next; the check's name.
        ends: Whether the checks that would follow have no sense any more.
        error: What the store raised, if that is what was found.
    """

    severity: Severity
    found: str
    remedy: str = ""
    code: str = ""
    ends: bool = False
    error: IdempotencyError | None = None


@dataclass(slots=True)
class Section:
    """What was found of one thing: the app, or one of its stores.

    Arguments:
        name: What to call it; no password in it.
        findings: What was found, in the order of the checks.
    """

    name: str
    findings: list[Finding] = field(default_factory=list)


class Unasked(Exception):
    """Raised by a check that may not ask what it would have to know.

    Arguments:
        reason: Why not, in words.
        remedy: What would let it ask.
    """

    def __init__(self, reason: str, remedy: str = "") -> None:
        super().__init__(reason)
        self.reason, self.remedy = reason, remedy


def ok(found: str) -> Finding:
    """Return that something is as it should be."""
    return Finding(Severity.OK, found)


def info(found: str, remedy: str = "") -> Finding:
    """Return what is good to know."""
    return Finding(Severity.INFO, found, remedy)


def warning(found: str, remedy: str) -> Finding:
    """Return what works, and will hurt one day."""
    return Finding(Severity.WARNING, found, remedy)


def error(found: str, remedy: str, *, ends: bool = False) -> Finding:
    """Return what loses or repeats operations, or keeps them from running."""
    return Finding(Severity.ERROR, found, remedy, ends=ends)
