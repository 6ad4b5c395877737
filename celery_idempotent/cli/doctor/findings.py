"""Findings: the results of checks, with a severity and a remedy; and running checks one after another."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any

from ...errors import IdempotencyError, StoreRefused, StoreUnreachable
from ...stores.base import Store
from ...stores.maintenance import NAMESPACE


class Severity(IntEnum):
    """The weight of a finding; a worse one is greater."""

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
        severity: Its weight.
        found: One sentence on what was found.
        remedy: What to do, with the setting and its value; "" where nothing is to be done.
        code: The check's name: a short word that does not change from one release to the next.
        ends: Whether the checks that would follow make no sense any more.
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
    """The findings about one thing: the app, or one of its stores.

    Arguments:
        name: Its name, without a password.
        findings: What was found, in the order of the checks.
    """

    name: str
    findings: list[Finding] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Target:
    """A store to examine.

    Arguments:
        store: The store.
        name: Its name, without a password.
        namespace: The beginning of its keys, without the colon.
        purged: Whether beat purges it; None where there is no app that would know.
        messages: Returns the task ids of what the app's broker has for these queues, or None if that is too much to
            read; None where it cannot be asked.
    """

    store: Store
    name: str
    namespace: str = NAMESPACE
    purged: bool | None = None
    messages: Callable[[set[str]], set[str] | None] | None = None


class CheckSkipped(Exception):
    """Raised by a check that has no right to see what it needs.

    Arguments:
        reason: Why not, in words.
        remedy: What would give it the right.
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


#: Seconds below which a lease is short, and above which it is long.
SHORT, LONG = 5.0, 600.0
#: Names in one sentence, the rest is counted.
SHOWN = 3


def listed(names: Iterable[str]) -> str:
    """Return names as a few words, however many there are."""
    known = list(dict.fromkeys(names))
    more = len(known) - SHOWN
    shown = ", ".join(known[:SHOWN])
    return f"{shown} and {more} more" if more > 0 else shown


#: What the function of a check yields; the first one counts.
Findings = Iterator[Finding]


@dataclass(frozen=True, slots=True)
class Check:
    """A look at one thing.

    Arguments:
        code: Its name, the code of what it finds.
        look: Yields a finding, or nothing where all is well.
        well: The words for that; "" if then there is nothing to report.
        when: Returns whether the check applies (default: always).
    """

    code: str
    look: Callable[[Any], Findings]
    well: str = ""
    when: Callable[[Any], bool] = lambda target: True

    def __call__(self, target: Any) -> Finding | None:
        """Return what is found, or None where there is nothing to report."""
        if not self.when(target):
            return None
        found = next(self.look(target), ok(self.well) if self.well else None)
        return found and replace(found, code=self.code)


class Checks(list[Check]):
    """The checks of one kind of thing, in their order."""

    def add(self, well: str = "", *, when: Callable[[Any], bool] = lambda target: True) -> Callable[..., Check]:
        """Make a function the next check, under the function's name; see `Check`."""

        def decorate(look: Callable[[Any], Findings]) -> Check:
            self.append(Check(look.__name__.replace("_", "-"), look, well, when))
            return self[-1]

        return decorate


NOT_CHECKED = "not-checked"
UNREACHABLE, REFUSED, WRONG = "store-unreachable", "store-refused", "configuration"
#: The codes that are no check's own.
OTHERS = (NOT_CHECKED, UNREACHABLE, REFUSED, WRONG)

_REMEDIES = {
    UNREACHABLE: "Start the server, or correct the store's URL. Until then tasks follow their on_store_error.",
    REFUSED: "Correct user, password, rights or database, then run doctor again.",
    WRONG: "Correct it; a worker refuses to start, or a task to run, until then.",
}


def run_checks(checks: Iterable[Check], target: Any) -> Iterator[Finding]:
    """Yield what the checks find, until a finding ends the examination.

    The checks that were skipped are one finding for each remedy.
    """
    skipped: dict[str, dict[str, list[str]]] = {}  # by remedy, then by reason
    for check in checks:
        try:
            found = check(target)
        except CheckSkipped as reason:
            skipped.setdefault(reason.remedy, {}).setdefault(reason.reason, []).append(check.code)
            continue
        except IdempotencyError as failure:
            yield failed(failure)
            break
        except Exception as surprise:  # noqa: BLE001 - an odd reply to one check must not hide what the others find
            odd = " ".join(f"{type(surprise).__name__}: {surprise}".split())
            skipped.setdefault("", {}).setdefault(f"The answer was not understood ({odd}).", []).append(check.code)
            continue
        if found is not None:
            yield found
            if found.ends:
                break
    for remedy, reasons in skipped.items():
        words = [f"{why} Not checked: {', '.join(codes)}." for why, codes in reasons.items()]
        yield Finding(Severity.INFO, " ".join(words), remedy, NOT_CHECKED)


def failed(failure: IdempotencyError) -> Finding:
    """Return that a store, or its configuration, is in error."""
    if isinstance(failure, StoreUnreachable):
        code = UNREACHABLE
    else:
        code = REFUSED if isinstance(failure, StoreRefused) else WRONG
    text = " ".join(str(failure).split())
    return Finding(Severity.ERROR, text, _REMEDIES[code], code, ends=True, error=failure)
