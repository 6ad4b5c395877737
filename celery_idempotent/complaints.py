"""What the guard says to a caller who cannot have an answer: the errors of one record, in words."""

from __future__ import annotations

from .errors import Conflict, CrashLoop, KeyReused, ResultUnavailable, SettleNotCommitted, StoreUnreachable
from .records import Record

__all__ = [
    "being_done",
    "crash_loop",
    "done_before",
    "in_progress",
    "key_reused",
    "not_committed",
    "not_kept",
    "too_late",
]


def being_done(record: Record) -> Conflict:
    """Return the error for a duplicate that may not wait for the holder."""
    holder = record.holder or "a retry that is due later"
    error = Conflict(
        f"{record.key!r} is being done by {holder} for another {record.remaining:.1f} s. "
        'Try again later, or let it wait with on_conflict="wait".'
    )
    error.remaining = record.remaining
    return error


def in_progress(key: str, remaining: float) -> Conflict:
    """Return the error for a caller who came while the operation is being done, and whom nobody will call again."""
    error = Conflict(
        f"{key!r} is being done elsewhere, for another {remaining:.1f} s unless that takes longer. "
        'Try again later, or wait for it with on_conflict="wait" and a longer wait_timeout.'
    )
    error.remaining = remaining
    return error


def done_before(record: Record) -> Conflict:
    """Return the error for a duplicate that may not be answered with the settled result."""
    return Conflict(f'{record.key!r} was done {record.age:.0f} s ago, and the task says on_duplicate="raise".')


def key_reused(record: Record) -> KeyReused:
    """Return the error for a key that came with other arguments."""
    when = f"{record.age:.0f} s ago" if record.age else "just now"
    return KeyReused(
        f"The key {record.key!r} was used {when} with other arguments (by task {record.task_id}). "
        "Expected the same arguments for the same key: give this call a key of its own, "
        "or leave arguments that may differ out of the comparison with fingerprint=[...]."
    )


def crash_loop(key: str, crashes: int) -> CrashLoop:
    """Return the error for an operation whose holders keep dying."""
    return CrashLoop(
        f"{key!r} has lost its worker {crashes} times in a row; this message does not run it again. "
        "Look for what kills the worker (memory, a native crash); publish the task anew once it is mended."
    )


def not_kept(record: Record, reason: str) -> ResultUnavailable:
    """Return the error for a duplicate that wants a value which was not kept."""
    return ResultUnavailable(
        f"{record.key!r} was done {record.age:.0f} s ago and its result was not kept ({reason}). "
        "The task does not run again; read the result where the first run left it."
    )


def too_late(key: str, took: float, ttl: float) -> StoreUnreachable:
    """Return the error for a lease that was granted when it had nearly run out."""
    return StoreUnreachable(
        f"The store took {took:.1f} s to grant {key!r} for {ttl:g} s. "
        "Try again, and look at the store and the way to it; a longer lease_ttl bears slower answers."
    )


def not_committed(key: str) -> SettleNotCommitted:
    """Return the error for a body that settled within its transaction and left it open, or rolled it back."""
    return SettleNotCommitted(
        f"The task settled {key!r} within its own transaction and returned, and that transaction is not committed: "
        "neither its effect nor its record is there. Commit before the body returns."
    )
