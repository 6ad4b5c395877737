"""What a store that does not expire by itself has to have done for it: its tables made, its old rows removed."""

from __future__ import annotations

from .finding import Finding, error, info, ok, warning
from .patient import Patient

__all__ = ["MOST", "expired", "schema_pending"]

#: Expired rows from which on it is said, and the most that are counted.
MANY, MOST = 10_000, 100_000
SCHEDULE = "celery_idempotent.celery.schedule_purge(app)  # beat then purges once an hour"


def schema_pending(patient: Patient) -> Finding:
    """See whether the store has on its server what it needs."""
    pending = patient.store.pending_schema()
    if pending:
        what = pending.strip().splitlines()
        about = f"{what[0].rstrip(',;')}" if len(what) <= 2 else f"{len(what)} lines of statements are due"
        return error(
            f"The store lacks what this version needs on its server ({about}): claims are refused.",
            "celery -A proj idempotency schema --apply (or celery-idempotent --store URL schema --apply)",
            ends=True,
        )
    return ok("the schema is that of this version")


def expired(patient: Patient, rows: int) -> Finding:
    """Say what becomes of rows that have expired, given how many there are."""
    count = f"{rows:,}{' or more' if rows >= MOST else ''} expired rows wait to be removed"
    if rows >= MANY:
        if patient.purged:
            return warning(
                f"{count}, though beat purges the store.", "See that beat and a worker run, and purge more often."
            )
        return warning(f"{count}.", f"celery -A proj idempotency purge, and from then on {SCHEDULE}")
    if patient.purged is False:
        return info(f"{count}, and nothing but new claims removes them.", SCHEDULE)
    return ok(count)
