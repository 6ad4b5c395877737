"""How many commands an operation costs on the store."""

from __future__ import annotations

from collections.abc import Callable

from .figure import Figure
from .subject import Subject

__all__ = ["measure"]

#: What this benchmark itself asks of the server.
_OURS = ("info", "config|resetstat")
_FROM_CLIENTS = ("evalsha", "eval")


def measure(subject: Subject, *, operations: int) -> list[Figure]:
    """Count commands per first run, replay and conflict; the note says what the scripts call inside the server."""
    subject.guarded()  # the first of all sends the scripts
    keys = [subject.claim().key for _ in range(operations)]
    figures = [_counted(subject, "first run", 2, operations, lambda i: subject.guarded(keys[i]))]
    figures.append(_counted(subject, "replay", 1, operations, lambda i: subject.guarded(keys[i])))
    held = subject.claim()
    subject.store.acquire(held)
    figures.append(_counted(subject, "conflict", 1, operations, lambda i: subject.guarded(held.key)))
    return figures


def _counted(subject: Subject, what: str, reach: int, operations: int, call: Callable[[int], object]) -> Figure:
    before = subject.commands()
    for number in range(operations):
        call(number)
    after = subject.commands()
    grown = {name: calls - before.get(name, 0) for name, calls in after.items() if name not in _OURS}
    sent = sum(grown.pop(name, 0) for name in _FROM_CLIENTS)
    inner = " ".join(f"{name} {calls / operations:g}" for name, calls in sorted(grown.items()) if calls)
    return Figure("commands", f"store commands per {what}", sent / operations, "", reach=reach, note=f"inside: {inner}")
