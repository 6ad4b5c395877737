"""Findings: a check's result, its severity and its remedy; the store examined; and running checks one after another."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any

from ...errors import IdempotencyError, StoreRefused, StoreUnreachable
from ...stores.base import Store
from ...stores.maintenance import NAMESPACE


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
    """The result of one check.

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


class CheckSkipped(Exception):
    """Raised by a check that may not read what it needs.

    Arguments:
        reason: Why not, in words.
        remedy: What would let it read that.
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


#: Looks at one thing: returns what it finds, or None where it does not apply. Its name is the code.
Check = Callable[[Any], Finding | None]

NOT_CHECKED = "not-checked"
UNREACHABLE, REFUSED, WRONG = "store-unreachable", "store-refused", "configuration"
#: The codes that are no check's own.
OTHERS = (NOT_CHECKED, UNREACHABLE, REFUSED, WRONG)

_REMEDIES = {
    UNREACHABLE: "Start the server, or correct the store's URL. Until then tasks follow their on_store_error.",
    REFUSED: "Correct user, password, rights or database, then run doctor again.",
    WRONG: "Correct it; a worker refuses to start, or a task to run, until then.",
}


def code_of(check: Check) -> str:
    """Return the code of what a check finds."""
    return str(getattr(check, "__name__", "")).replace("_", "-")


def run_checks(checks: Sequence[Check], patient: Any) -> Iterator[Finding]:
    """Yield what the checks find, until one of them makes an end of it.

    What several may not read is one finding for each remedy.
    """
    unasked: dict[str, dict[str, list[str]]] = {}  # by remedy, then by reason
    for check in checks:
        code = code_of(check)
        try:
            found = check(patient)
        except CheckSkipped as reason:
            unasked.setdefault(reason.remedy, {}).setdefault(reason.reason, []).append(code)
            continue
        except IdempotencyError as failure:
            yield failed(failure)
            break
        except Exception as surprise:  # noqa: BLE001 - a server that answers oddly must not hide what the others find
            odd = " ".join(f"{type(surprise).__name__}: {surprise}".split())
            unasked.setdefault("", {}).setdefault(f"The answer was not understood ({odd}).", []).append(code)
            continue
        if found is not None:
            yield replace(found, code=found.code or code)
            if found.ends:
                break
    for remedy, reasons in unasked.items():
        reasons_given = [f"{why} Not checked: {', '.join(codes)}." for why, codes in reasons.items()]
        yield Finding(Severity.INFO, " ".join(reasons_given), remedy, NOT_CHECKED)


def failed(failure: IdempotencyError) -> Finding:
    """Return the finding for the error of a store, or of its configuration."""
    if isinstance(failure, StoreUnreachable):
        code = UNREACHABLE
    else:
        code = REFUSED if isinstance(failure, StoreRefused) else WRONG
    text = " ".join(str(failure).split())
    return Finding(Severity.ERROR, text, _REMEDIES[code], code, ends=True, error=failure)


@dataclass(frozen=True, slots=True)
class Target:
    """A store that is examined.

    Arguments:
        store: The store.
        name: What to call it; no password in it.
        namespace: How keys begin there, without the colon.
        purged: Whether beat purges it; None where there is no app that would know.
    """

    store: Store
    name: str
    namespace: str = NAMESPACE
    purged: bool | None = None
