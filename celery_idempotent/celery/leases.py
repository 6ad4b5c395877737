"""The leases that a worker holds, as its main process can tell them without asking anybody.

In most pools the deliveries run in the worker's own process, which knows what it holds. The children of a prefork pool
write it into memory that they share with the main process: when a body begins and ends, and after each renewal.
"""

from __future__ import annotations

import mmap
import os
from struct import Struct
from time import monotonic
from typing import Any

from ..holding import Holding
from . import rows

__all__ = ["begin", "end", "leases", "prepare", "refresh"]

#: Leases that one child can show: more than one only where a body runs others by ``apply()``.
PLACES = 4
SIZE = 2048
#: How often a place is read that changes meanwhile.
TRIES = 10
SEPARATOR = "\0"

#: What a place holds, twice, after one byte that says which is valid: the odd values the first, the even ones the
#: second. A child writes the other one and then that byte, so that a reader finds a whole one at any time.
#: The child's pid, or 0 where the place is free; began, deadline, renewals, fence; how long the text is, and the text.
_TEXT = SIZE // 2 - 48
_COPY = Struct(f"=QddQQH{_TEXT}s")
_COPIES = (1 + _COPY.size, 1)  # where those of the even and of the odd values begin
_FREE = bytes(_COPY.size)

_Shown = tuple[Holding, str, str, int]  # with task, task id, and place or -1

_shown: dict[int, _Shown] = {}
_table: mmap.mmap | None = None
_prepared = False


def prepare() -> None:
    """Make room for what children hold; those that are forked later write there."""
    global _table, _prepared
    rows.prepare()
    _table = mmap.mmap(-1, rows.ROWS * PLACES * SIZE)
    if not _prepared:
        _prepared = True
        os.register_at_fork(after_in_child=_shown.clear)  # what a parent holds is the parent's


def begin(holding: Holding, task: str, task_id: str) -> None:
    """Show a lease from now on; a run without one has nothing to show."""
    if not holding.lease.fence:
        return
    row = rows.own
    if _table is None or not row:
        _shown[id(holding)] = (holding, task, task_id, -1)
        return
    with rows.lock:
        taken = {shown[3] for shown in _shown.values()} if _shown else ()
        place = next((place for place in range(PLACES) if place not in taken), -1) if taken else 0
        _shown[id(holding)] = shown = (holding, task, task_id, place)
        if place >= 0:
            _write(_table, row, shown)


def end(holding: Holding) -> None:
    """Show it no longer."""
    shown, row = _shown.pop(id(holding), None), rows.own
    if shown is not None and shown[3] >= 0 and _table is not None and row:
        with rows.lock:
            _put(_table, row, shown[3], _FREE)


def refresh() -> None:
    """Write down what was renewed or lost in this child."""
    row = rows.own
    if _table is None or not row:
        return
    with rows.lock:
        for shown in [shown for shown in list(_shown.values()) if shown[3] >= 0]:
            _write(_table, row, shown)


def leases() -> list[dict[str, Any]]:
    """Return the leases that this worker's deliveries hold, the oldest first; `inspection.LiveLease` says what of each.

    It reads memory and asks nobody. A lease that a body runs under is shown; while its result is settled it is not.
    """
    found: list[dict[str, Any]] = []
    for holding, task, task_id, _ in list(_shown.values()):
        if not holding.lost:
            text = SEPARATOR.join((holding.lease.claim.holder, task, task_id, holding.key))
            found.append(_described((holding.began, holding.deadline, holding.renewals, holding.fence), text))
    if _table is not None:
        for row, pid in rows.children().items():
            found += [lease for place in range(PLACES) if (lease := _read(_table, row, place, pid))]
    return sorted(found, key=lambda lease: -lease["age"])


def _described(numbers: tuple[float, float, int, int], text: str) -> dict[str, Any]:
    began, deadline, renewals, fence = numbers
    holder, task, task_id, key = (*text.split(SEPARATOR, 3), "", "", "")[:4]
    now = monotonic()
    return {
        "key": key,
        "task": task,
        "task_id": task_id,
        "holder": holder,
        "fence": fence,
        "age": round(now - began, 3),
        "renewals": renewals,
        "trusted_for": round(max(deadline - now, 0.0), 3),
    }


def _write(table: mmap.mmap, row: int, shown: _Shown) -> None:
    holding, task, task_id, place = shown
    if holding.lost:
        _put(table, row, place, _FREE)
        return
    lease = holding.lease
    text = f"{lease.claim.holder}\0{task}\0{task_id}\0{lease.claim.key}".encode("utf-8", "replace")
    # A fence is a store's own; none may be so large that showing it fails the task.
    numbers = (holding.began, holding.deadline, holding.renewals, lease.fence & 0xFFFF_FFFF_FFFF_FFFF)
    _put(table, row, place, _COPY.pack(rows.pid, *numbers, min(len(text), _TEXT), text))


def _put(table: mmap.mmap, row: int, place: int, copy: bytes) -> None:
    offset = (row * PLACES + place) * SIZE
    valid = table[offset] % 254 + 1
    start = offset + _COPIES[valid % 2]
    table[start : start + _COPY.size] = copy
    table[offset] = valid


def _read(table: mmap.mmap, row: int, place: int, pid: int) -> dict[str, Any] | None:
    """Return the lease at a place, or None: it is free, or a child that is gone left it."""
    offset = (row * PLACES + place) * SIZE
    for _ in range(TRIES):
        valid = table[offset]
        start = offset + _COPIES[valid % 2]
        copy = table[start : start + _COPY.size]
        if table[offset] == valid:
            child, began, deadline, renewals, fence, length, text = _COPY.unpack(copy)
            told = text[:length].decode(errors="replace")
            return _described((began, deadline, renewals, fence), told) if child == pid else None
    return None  # it has changed each time: no delivery stays that short and is of interest
