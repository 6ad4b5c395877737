"""Memory that a worker shares with its children: live leases, counters, exit reasons, and whether it stops.

Row 0 is the main process's. A child's is its place in the pool, which a child that replaces it takes over. Any other
process that a task forks has no row.
"""

from __future__ import annotations

import mmap
import os
import threading
from struct import Struct
from time import monotonic
from typing import Any
from zlib import crc32

from billiard.process import current_process
from celery import signals

from .. import events
from ..core.lease import HeldLease
from ..events import NAMES, Event
from ..stores.records import Reason

#: The main process and 1023 children; those beyond are not counted.
ROWS = 1024

#: The row of this process, or None: it has none.
own: int | None = None
#: The pid of the process whose row that is.
pid = 0
#: What the threads of this process hold while they write into its row; another one after a fork.
lock = threading.Lock()
_rows_prepared = False
_pids: memoryview | None = None


def prepare_rows() -> None:
    """Take the first row for this process, and have each child that is forked later take its own."""
    global own, pid, _rows_prepared, _pids
    if _pids is None or own != 0:
        _pids = memoryview(mmap.mmap(-1, ROWS * 8)).cast("Q")
    own, pid = 0, os.getpid()
    if not _rows_prepared:
        _rows_prepared = True
        os.register_at_fork(after_in_child=_leave)
        signals.worker_process_init.connect(_take, weak=False, dispatch_uid="celery_idempotent.rows")


def children() -> dict[int, int]:
    """Return the rows of the children that live, with their pids."""
    taken = enumerate(_pids) if _pids is not None else ()
    return {row: child for row, child in taken if child and is_alive(child)}


def is_alive(pid: int) -> bool:
    """Tell whether the child of this pid lives."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, PermissionError):  # the latter: the id already names somebody else's process
        return False
    return True


def _leave() -> None:
    global own, lock
    own = None
    lock = threading.Lock()  # a thread of the parent may have held it


def _take(**_: Any) -> None:
    global own, pid
    row = getattr(current_process(), "index", ROWS) + 1
    if row < ROWS and _pids is not None:
        own, pid = row, os.getpid()
        _pids[row] = pid


# The leases that a worker holds, as its main process can tell them without asking anybody.
#
# In most pools the deliveries run in the worker's own process, which knows what it holds. The children of a prefork
# pool write it into memory that they share with the main process: when a body begins and ends, and after each renewal.


#: Leases that one child can show: more than one only where a body runs others by ``apply()``.
LEASES_PER_CHILD = 4
LEASE_SIZE = 2048
#: How often a place is read that changes meanwhile.
TRIES = 10
SEPARATOR = "\0"

#: What a place holds, twice, after one byte that says which is valid: the odd values the first, the even ones the
#: second. A child writes the other one and then that byte, so that a reader finds a whole one at any time.
#: The child's pid, or 0 where the place is free; began, deadline, renewals, fence; how long the text is, and the text.
_TEXT = LEASE_SIZE // 2 - 48
_COPY = Struct(f"=QddQQH{_TEXT}s")
_COPIES = (1 + _COPY.size, 1)  # where those of the even and of the odd values begin
_FREE = bytes(_COPY.size)

_Shown = tuple[HeldLease, str, str, int]  # with task, task id, and place or -1

_shown: dict[int, _Shown] = {}
_table: mmap.mmap | None = None
_leases_prepared = False


def prepare_leases() -> None:
    """Make room for what children hold; those that are forked later write there."""
    global _table, _leases_prepared
    prepare_rows()
    _table = mmap.mmap(-1, ROWS * LEASES_PER_CHILD * LEASE_SIZE)
    if not _leases_prepared:
        _leases_prepared = True
        os.register_at_fork(after_in_child=_shown.clear)  # what a parent holds is the parent's


def begin(holding: HeldLease, task: str, task_id: str) -> None:
    """Show a lease from now on; a run without one has nothing to show."""
    if not holding.lease.fence:
        return
    row = own
    if _table is None or not row:
        _shown[id(holding)] = (holding, task, task_id, -1)
        return
    with lock:
        taken = {shown[3] for shown in _shown.values()} if _shown else ()
        place = next((place for place in range(LEASES_PER_CHILD) if place not in taken), -1) if taken else 0
        _shown[id(holding)] = shown = (holding, task, task_id, place)
        if place >= 0:
            _write(_table, row, shown)


def end(holding: HeldLease) -> None:
    """Show it no longer."""
    shown, row = _shown.pop(id(holding), None), own
    if shown is not None and shown[3] >= 0 and _table is not None and row:
        with lock:
            _put(_table, row, shown[3], _FREE)


def refresh() -> None:
    """Write down what was renewed or lost in this child."""
    row = own
    if _table is None or not row:
        return
    with lock:
        for shown in [shown for shown in list(_shown.values()) if shown[3] >= 0]:
            _write(_table, row, shown)


def leases() -> list[dict[str, Any]]:
    """Return the leases that this worker's deliveries hold, the oldest first; `inspect.LiveLease` says what of each.

    It reads memory and asks nobody. A lease that a body runs under is shown; while its result is settled it is not.
    """
    found: list[dict[str, Any]] = []
    for holding, task, task_id, _ in list(_shown.values()):
        if not holding.lost:
            text = SEPARATOR.join((holding.lease.claim.holder, task, task_id, holding.key))
            found.append(_described((holding.began, holding.deadline, holding.renewals, holding.fence), text))
    if _table is not None:
        for row, pid in children().items():
            found += [lease for place in range(LEASES_PER_CHILD) if (lease := _read(_table, row, place, pid))]
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
    _put(table, row, place, _COPY.pack(pid, *numbers, min(len(text), _TEXT), text))


def _put(table: mmap.mmap, row: int, place: int, copy: bytes) -> None:
    offset = (row * LEASES_PER_CHILD + place) * LEASE_SIZE
    valid = table[offset] % 254 + 1
    start = offset + _COPIES[valid % 2]
    table[start : start + _COPY.size] = copy
    table[offset] = valid


def _read(table: mmap.mmap, row: int, place: int, pid: int) -> dict[str, Any] | None:
    """Return the lease at a place, or None: it is free, or a child that is gone left it."""
    offset = (row * LEASES_PER_CHILD + place) * LEASE_SIZE
    for _ in range(TRIES):
        valid = table[offset]
        start = offset + _COPIES[valid % 2]
        copy = table[start : start + _COPY.size]
        if table[offset] == valid:
            child, began, deadline, renewals, fence, length, text = _COPY.unpack(copy)
            told = text[:length].decode(errors="replace")
            return _described((began, deadline, renewals, fence), told) if child == pid else None
    return None  # it has changed each time: no delivery stays that short and is of interest


# Word from a worker's main process to the delivery that it is about to end: why.
#
# A child that is told to end gets the same signal for a revoke, a hard time limit, a lost broker connection and a cold
# shutdown, and sees no more than `SystemExit`. The record is to say which it was: an operator's revoke is no crash. So
# the main process leaves a word, before it sends the signal, in memory that it shares with its children.
#
# And word back, of a delivery that ends without having run its body: no other sign tells a replay from a run.


#: A word is lost where two deliveries that end at once share a place; that costs one crash count.
NOTICES = 1024
NOTICE_SIZE = 32
_REASONS = list(Reason)

_words: mmap.mmap | None = None
_unrun: mmap.mmap | None = None


def prepare_notices() -> None:
    """Make room for words; children that are forked later see them."""
    global _words, _unrun
    _words, _unrun = mmap.mmap(-1, NOTICES * NOTICE_SIZE), mmap.mmap(-1, NOTICES * NOTICE_SIZE)


def set_exit_reason(owner: str, reason: Reason) -> None:
    """Leave word that the delivery of this owner is about to be ended."""
    if _words is not None:
        word = bytes([_REASONS.index(reason)]) + owner.encode()
        place = _place(owner)
        _words[place : place + NOTICE_SIZE] = word[:NOTICE_SIZE].ljust(NOTICE_SIZE, b"\0")


def exit_reason(owner: str) -> Reason | None:
    """Return why the delivery of this owner is being ended, or None: nobody said that it would be."""
    if _words is None:
        return None
    place = _place(owner)
    word = _words[place : place + NOTICE_SIZE]
    return _REASONS[word[0]] if word[1:].rstrip(b"\0") == owner.encode() else None


def answer_unrun(owner: str) -> None:
    """Leave word that the delivery of this owner ends without having run its body."""
    if _unrun is not None:
        place = _place(owner)
        _unrun[place : place + NOTICE_SIZE] = owner.encode()[:NOTICE_SIZE].ljust(NOTICE_SIZE, b"\0")


def was_unrun(owner: str) -> bool:
    """Tell whether the delivery of this owner has ended without having run its body, as far as anybody said."""
    place = _place(owner)
    return _unrun is not None and _unrun[place : place + NOTICE_SIZE].rstrip(b"\0") == owner.encode()


def _place(owner: str) -> int:
    return crc32(owner.encode()) % NOTICES * NOTICE_SIZE


KINDS = len(NAMES)
_PLACES = {kind: place for place, kind in enumerate(NAMES)}

_cells: memoryview | None = None


def prepare_counts() -> None:
    """Begin at zero; children that are forked later count too."""
    global _cells
    prepare_rows()
    _cells = memoryview(mmap.mmap(-1, ROWS * KINDS * 8)).cast("Q")
    events.add_counter(count)


def count(kind: type[Event]) -> None:
    """Count one event of this kind."""
    row = own
    if _cells is not None and row is not None and kind in _PLACES:
        place = row * KINDS + _PLACES[kind]
        with lock:
            _cells[place] += 1


def counts() -> dict[str, int]:
    """Return how many there were of each kind, by its name in `NAMES`; a kind that never happened is left out."""
    if _cells is None:
        return {}
    found = {NAMES[kind]: sum(_cells[place::KINDS]) for kind, place in _PLACES.items()}
    return {name: number for name, number in found.items() if number}


_stopping: mmap.mmap | None = None
#: Set once a worker has stopped that this process outlives.
_stopped: threading.Event | None = None
#: The hard and the soft time limit of this worker's pool, for tasks and messages that have none.
limits: tuple[float | None, float | None] = (None, None)
#: Whether the pool ends a body at its hard limit.
enforces_limits = True


def is_stopping() -> bool:
    """Tell, in the worker's main process and in its children, whether the worker is about to stop."""
    return _stopping is not None and _stopping[0] == 1 and not (_stopped is not None and _stopped.is_set())


def announce_stop(**_: Any) -> None:
    """Let the worker's main process and its children know that it is about to stop; safe in a signal's handler."""
    if _stopping is not None:
        _stopping[0] = 1


def outlive(stopped: threading.Event) -> None:
    """Forget that the worker stops once it has: a test, say, runs it in a thread, and the process goes on."""
    global _stopped
    _stopped = stopped
