"""One check after the other, whatever becomes of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from ..errors import IdempotencyError, StoreRefused, StoreUnreachable
from .finding import Finding, Severity, Unasked

__all__ = ["NOT_CHECKED", "OTHERS", "Check", "code_of", "examined"]

#: Looks at one thing: returns what it finds, or None where it has nothing to say of such a thing. Its name is the code.
Check = Callable[[Any], Finding | None]

NOT_CHECKED = "not-checked"
UNREACHABLE, REFUSED, WRONG = "store-unreachable", "store-refused", "configuration"
#: The codes that are no check's own.
OTHERS = (NOT_CHECKED, UNREACHABLE, REFUSED, WRONG)

_REMEDIES = {
    UNREACHABLE: "Start the server, or correct the store's URL. Until then tasks do as their on_store_error says.",
    REFUSED: "Correct user, password, rights or database as the message says, then run doctor again.",
    WRONG: "Correct it as the message says; a worker refuses to start, or a task to run, until then.",
}


def code_of(check: Check) -> str:
    """Return the code of what a check finds."""
    return str(getattr(check, "__name__", "")).replace("_", "-")


def examined(checks: Sequence[Check], patient: Any) -> Iterator[Finding]:
    """Yield what the checks find, until one of them makes an end of it.

    What several may not ask is one finding for each remedy.
    """
    unasked: dict[str, dict[str, list[str]]] = {}  # by remedy, then by reason
    for check in checks:
        code = code_of(check)
        try:
            found = check(patient)
        except Unasked as reason:
            unasked.setdefault(reason.remedy, {}).setdefault(reason.reason, []).append(code)
            continue
        except IdempotencyError as failure:
            yield failed(failure)
            break
        except Exception as surprise:  # noqa: BLE001 - a server that answers oddly must not hide what the others say
            odd = " ".join(f"{type(surprise).__name__}: {surprise}".split())
            unasked.setdefault("", {}).setdefault(f"The answer was not understood ({odd}).", []).append(code)
            continue
        if found is not None:
            yield replace(found, code=found.code or code)
            if found.ends:
                break
    for remedy, reasons in unasked.items():
        said = [f"{why} Not checked: {', '.join(codes)}." for why, codes in reasons.items()]
        yield Finding(Severity.INFO, " ".join(said), remedy, NOT_CHECKED)


def failed(failure: IdempotencyError) -> Finding:
    """Return that a store, or what is said of it, is in error."""
    if isinstance(failure, StoreUnreachable):
        code = UNREACHABLE
    else:
        code = REFUSED if isinstance(failure, StoreRefused) else WRONG
    text = " ".join(str(failure).split())
    return Finding(Severity.ERROR, text, _REMEDIES[code], code, ends=True, error=failure)
