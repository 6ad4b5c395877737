"""Records as rows of a table, and as JSON."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..records import Reason, Record, State
from .filters import age_of, task_of
from .tables import NOTHING, Cell, Column, Table
from .wording import duration

__all__ = ["facts", "in_order", "table"]

COLUMNS = (
    Column("KEY", least=24),
    Column("STATE"),
    Column("LEASE/REASON"),
    Column("AGE", right=True),
    Column("CRASHES", right=True),
    Column("HOLDER", least=12, spare=1),
    Column("TASK ID", least=9, spare=2),
    Column("FENCE", spare=3),
)
#: What somebody looks for comes first.
_ORDER = (State.IN_PROGRESS, State.RELEASED, State.FAILED, State.COMPLETED)
_STYLES = {State.IN_PROGRESS: "cyan", State.FAILED: "red", State.COMPLETED: "green", State.RELEASED: "yellow"}


def in_order(records: Iterable[Record]) -> list[Record]:
    """Return the records by state; first those whose lease ran out, then the oldest."""
    return sorted(records, key=_place)


def _place(record: Record) -> tuple[int, bool, float, str]:
    return _ORDER.index(record.state), not _ran_out(record), -(age_of(record) or 0), record.key


def _ran_out(record: Record) -> bool:
    return record.state is State.IN_PROGRESS and not record.remaining


def table(records: Iterable[Record]) -> Table:
    """Return a row for each record."""
    return Table(COLUMNS, [_row(record) for record in records])


def _row(record: Record) -> list[Cell]:
    crashes = Cell(str(record.crashes), "bold red") if record.crashes else Cell()
    return [
        Cell(record.key),
        Cell(str(record.state), _STYLES[record.state]),
        _standing(record),
        Cell(NOTHING if (age := age_of(record)) is None else duration(age)),
        crashes,
        Cell(record.holder or NOTHING),
        Cell(record.task_id or NOTHING),
        Cell(str(record.fence)),
    ]


def _standing(record: Record) -> Cell:
    """Return what is left of the lease of what is in progress, and why what is released was."""
    left = duration(record.remaining)
    if record.state is State.IN_PROGRESS:
        return Cell("ran out", "bold red") if _ran_out(record) else Cell(f"{left} left")
    if record.reason == Reason.CRASH_LOOP:
        return Cell(record.reason, "bold red")
    if record.reason == Reason.RETRY:
        return Cell(f"retry in {left}" if record.remaining else "retry due")
    return Cell(record.reason or NOTHING)


def facts(record: Record, store: str | None = None) -> dict[str, Any]:
    """Return a record as JSON has it; null is what the store does not tell, or what there is not in this state.

    Arguments:
        record: The record.
        store: What to call its store, where there are several.
    """
    settled = record.state in (State.COMPLETED, State.FAILED)
    return {
        **({} if store is None else {"store": store}),
        "key": record.key,
        "state": str(record.state),
        "task": task_of(record.key) or None,
        "task_id": record.task_id or None,
        "holder": record.holder or None,
        "remaining": None if settled else record.remaining,
        "held_for": record.held_for or None,
        "age": record.age if settled else None,
        "crashes": record.crashes,
        "reason": record.reason or None,
        "fence": record.fence,
        "payload_bytes": len(record.payload),
    }
