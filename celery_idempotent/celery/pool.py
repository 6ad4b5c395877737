"""The memory that a worker's main process shares with its children: leases, counters, exit reasons, the stop flag.

It is one anonymous mapping, made before the pool forks. Slot 0 is the main process's. A child has the slot of its
place in the pool, which the child that replaces it takes over. Any other process that a task forks has no slot.

Nothing here sends a request, and nothing waits for another process: each byte has one process that writes it, but for
the exit reasons, where two deliveries that collide cost one crash count.
"""

from __future__ import annotations

import mmap
import os
import sys
import threading
from struct import Struct
from time import monotonic
from typing import Any
from zlib import crc32

from billiard.process import current_process
from celery import signals

from .. import events
from ..core.backoff import Backoff
from ..core.lease import HeldLease
from ..events import KINDS, Event
from ..stores.records import Reason

#: The main process and 1023 children; those beyond show and count nothing.
SLOTS = 1024
#: Leases that one child can show: more than one only where a body runs others by ``apply()``.
LEASES_PER_CHILD = 4
LEASE_SIZE = 2048
#: Owners for which there is an exit reason, or a mark of their run.
OWNERS = 1024
OWNER_SIZE = 32

# Where the parts of the mapping begin.
_COUNTS = SLOTS * 8  # behind the pids
_LEASES = _COUNTS + SLOTS * len(KINDS) * 8
_EXIT_REASONS = _LEASES + SLOTS * LEASES_PER_CHILD * LEASE_SIZE
_RUNS = _EXIT_REASONS + OWNERS * OWNER_SIZE
_STOPPING = _RUNS + OWNERS * OWNER_SIZE
_SIZE = _STOPPING + 1

#: The slot of this process, or None: it has none.
slot: int | None = None
#: The pid of the process whose slot that is.
pid = 0
#: What the threads of this process hold while they write into its slot; another one after a fork.
lock = threading.Lock()
#: The hard and the soft time limit of this worker's pool, for tasks and messages that have none.
limits: tuple[float | None, float | None] = (None, None)
#: The hard limit of each task that Celery applies: that of when the worker connected, whatever remote control has set
#: since. Children that were forked later have the other one.
task_limits: dict[str, float | None] = {}
#: Whether the pool ends a body at its hard limit.
enforces_limits = True
#: Whether its bodies are greenlets.
is_green = False

_memory: mmap.mmap | None = None
#: The pids, then the counters of each slot.
_cells: memoryview | None = None
_registered = False


def is_prefork(pool: type) -> bool:
    """Return whether a class of pools is Celery's pool of processes or derives from it; no other is imported for it."""
    loaded = sys.modules.get("celery.concurrency.prefork")
    return loaded is not None and issubclass(pool, loaded.TaskPool)


def prepare() -> None:
    """Make the memory of a worker that starts, all of it zero, and take the first slot for this process."""
    global slot, pid, _memory, _cells, _stopped, _registered, _cuts_off
    _memory = mmap.mmap(-1, _SIZE)
    _cells = memoryview(_memory)[:_LEASES].cast("Q")
    slot, pid, _stopped, _cuts_off = 0, os.getpid(), None, False
    events.add_counter(count)
    if not _registered:
        _registered = True
        if hasattr(os, "register_at_fork"):  # not on Windows
            os.register_at_fork(after_in_child=_leave)
        signals.worker_process_init.connect(_take_slot, weak=False, dispatch_uid="celery_idempotent.slot")


def _leave() -> None:
    """Have no slot, in a child that was just forked; the leases that its parent holds are not its own."""
    global slot, lock
    slot = None
    lock = threading.Lock()  # a thread of the parent may have held it
    _shown.clear()


def _take_slot(**_: Any) -> None:
    global slot, pid
    place = getattr(current_process(), "index", SLOTS) + 1
    if place < SLOTS and _cells is not None:
        slot, pid = place, os.getpid()
        _cells[place] = pid


def children() -> dict[int, int]:
    """Return the slots of the children that live, with their pids."""
    taken = enumerate(_cells[:SLOTS]) if _cells is not None else ()
    return {place: child for place, child in taken if child and is_alive(child)}


def is_alive(pid: int) -> bool:
    """Return whether the child of this pid lives."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, PermissionError):  # the latter: the pid is another user's process by now
        return False
    return True


# -- leases ------------------------------------------------------------------------------------------------------------
#
# In most pools the deliveries run in the worker's own process. A child of a prefork pool writes its leases into its
# slot: when a body begins and ends, and after each renewal.

#: A lease's place has one byte that selects the valid copy, and then two copies: the first for odd values, the second
#: for even ones. A child writes the other copy, and then the byte, so that a reader finds a whole one at any time.
#: The child's pid, or 0 where the place is free; began, deadline, renewals, fence; the length of the text, the text.
_TEXT = LEASE_SIZE // 2 - 48
_COPY = Struct(f"=QddQQH{_TEXT}s")
_COPIES = (1 + _COPY.size, 1)  # where those of the even and of the odd values begin
_FREE = bytes(_COPY.size)
#: How often a place is read that changes meanwhile.
TRIES = 10
SEPARATOR = "\0"

_Shown = tuple[HeldLease, str, str, int]  # with task, task id, and place or -1

_shown: dict[int, _Shown] = {}


def begin(held: HeldLease, task: str, task_id: str) -> None:
    """Show a lease from now on; a run without one has nothing to show."""
    if not held.lease.fence:
        return
    memory, row = _memory, slot
    if memory is None or not row:
        _shown[id(held)] = (held, task, task_id, -1)
        return
    with lock:
        taken = {shown[3] for shown in _shown.values()} if _shown else ()
        place = next((place for place in range(LEASES_PER_CHILD) if place not in taken), -1) if taken else 0
        _shown[id(held)] = shown = (held, task, task_id, place)
        if place >= 0:
            _write(memory, row, shown)


def end(held: HeldLease) -> None:
    """Show it no longer."""
    shown, memory, row = _shown.pop(id(held), None), _memory, slot
    if shown is not None and shown[3] >= 0 and memory is not None and row:
        with lock:
            _put(memory, row, shown[3], _FREE)


def refresh() -> None:
    """Write what was renewed or lost in this child."""
    memory, row = _memory, slot
    if memory is None or not row:
        return
    with lock:
        for shown in [shown for shown in list(_shown.values()) if shown[3] >= 0]:
            _write(memory, row, shown)


def leases() -> list[dict[str, Any]]:
    """Return the leases that this worker's deliveries hold, the oldest first, in the fields of `inspect.LiveLease`.

    A lease is shown while a body runs under it, and no longer while its result is settled.
    """
    found: list[dict[str, Any]] = []
    for held, task, task_id, _ in list(_shown.values()):
        if not held.lost:
            text = SEPARATOR.join((held.lease.claim.holder, task, task_id, held.key))
            found.append(_described((held.began, held.deadline, held.renewals, held.fence), text))
    if _memory is not None:
        for row, child in children().items():
            found += [lease for place in range(LEASES_PER_CHILD) if (lease := _read(_memory, row, place, child))]
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


def _write(memory: mmap.mmap, row: int, shown: _Shown) -> None:
    held, task, task_id, place = shown
    if held.lost:
        _put(memory, row, place, _FREE)
        return
    lease = held.lease
    text = f"{lease.claim.holder}\0{task}\0{task_id}\0{lease.claim.key}".encode("utf-8", "replace")
    # A store may have fences of any size; none may be so large that showing it fails the task.
    numbers = (held.began, held.deadline, held.renewals, lease.fence & 0xFFFF_FFFF_FFFF_FFFF)
    _put(memory, row, place, _COPY.pack(pid, *numbers, min(len(text), _TEXT), text))


def _put(memory: mmap.mmap, row: int, place: int, copy: bytes) -> None:
    offset = _LEASES + (row * LEASES_PER_CHILD + place) * LEASE_SIZE
    valid = memory[offset] % 254 + 1
    start = offset + _COPIES[valid % 2]
    memory[start : start + _COPY.size] = copy
    memory[offset] = valid


def _read(memory: mmap.mmap, row: int, place: int, pid: int) -> dict[str, Any] | None:
    """Return the lease at a place of a child's slot, or None where it is free, or left by a child that is gone."""
    offset = _LEASES + (row * LEASES_PER_CHILD + place) * LEASE_SIZE
    for _ in range(TRIES):
        valid = memory[offset]
        start = offset + _COPIES[valid % 2]
        copy = memory[start : start + _COPY.size]
        if memory[offset] == valid:
            child, began, deadline, renewals, fence, length, text = _COPY.unpack(copy)
            described = text[:length].decode(errors="replace")
            return _described((began, deadline, renewals, fence), described) if child == pid else None
    return None  # it changed each time: no delivery stays that short and is of interest


# -- exit reasons, and what runs ---------------------------------------------------------------------------------------
#
# A child gets the same signal for a revoke, a hard time limit, a lost broker connection and a cold shutdown, and sees
# no more than `SystemExit`. The record must hold which it was, since an operator's revoke is no crash: so the main
# process writes the reason before it sends the signal.
#
# And a child marks a delivery whose body runs, and one that ends without having run it: nothing else distinguishes a
# replay from a run, or what a run has recorded from what another has.

_REASONS = list(Reason)


def set_exit_reason(owner: str, reason: Reason) -> None:
    """Write why the delivery of this owner is about to be ended."""
    _put_owner(_EXIT_REASONS, owner, bytes([_REASONS.index(reason)]))


def exit_reason(owner: str) -> Reason | None:
    """Return why the delivery of this owner is being ended, or None where no reason was written."""
    entry = _owner_at(_EXIT_REASONS, owner)
    return _REASONS[entry[0]] if entry[1:] == owner.encode() else None


def begin_run(owner: str) -> None:
    """Mark that the body of this owner's delivery runs."""
    _put_owner(_RUNS, owner, b"\1")


def end_run(owner: str, *, begun: bool) -> None:
    """Mark that the delivery of this owner ends, and whether it has begun to run its body."""
    _put_owner(_RUNS, owner, b"\2" if begun else b"\0")


def runs(owner: str) -> bool:
    """Return whether the delivery of this owner runs its body; the mark may have been overwritten."""
    return _owner_at(_RUNS, owner) == b"\1" + owner.encode()


def was_unrun(owner: str) -> bool:
    """Return whether the delivery of this owner ended without having run its body; its mark may be overwritten."""
    return _owner_at(_RUNS, owner) == b"\0" + owner.encode()


def _put_owner(table: int, owner: str, first: bytes) -> None:
    if _memory is not None:
        start = table + crc32(owner.encode()) % OWNERS * OWNER_SIZE
        _memory[start : start + OWNER_SIZE] = (first + owner.encode())[:OWNER_SIZE].ljust(OWNER_SIZE, b"\0")


def _owner_at(table: int, owner: str) -> bytes:
    if _memory is None:
        return b""
    start = table + crc32(owner.encode()) % OWNERS * OWNER_SIZE
    entry = _memory[start : start + OWNER_SIZE]
    return entry[:1] + entry[1:].rstrip(b"\0")


# -- counters ----------------------------------------------------------------------------------------------------------

_PLACES = {kind: place for place, kind in enumerate(KINDS)}


def count(kind: type[Event]) -> None:
    """Count one event of this kind."""
    row = slot
    if _cells is not None and row is not None and kind in _PLACES:
        place = SLOTS + row * len(KINDS) + _PLACES[kind]
        with lock:
            _cells[place] += 1


def counts() -> dict[str, int]:
    """Return the number of events of each kind, by its name, without those that never happened."""
    if _cells is None:
        return {}
    found = {kind.name: sum(_cells[SLOTS + place :: len(KINDS)]) for kind, place in _PLACES.items()}
    return {name: number for name, number in found.items() if number}


# -- the stop flag -----------------------------------------------------------------------------------------------------

#: Most seconds that the main process may take to announce a shutdown; the first and longest pause between two looks.
STOP_LAG, STOP_LOOKS = 1.0, (0.02, 0.1)
#: Whether a worker that is about to stop has begun to end its greenlets.
_cuts_off = False
#: Set once a worker has stopped that this process outlives.
_stopped: threading.Event | None = None


def is_stopping() -> bool:
    """Return, in the worker's main process and in its children, whether the worker is about to stop."""
    return _memory is not None and _memory[_STOPPING] == 1 and not (_stopped is not None and _stopped.is_set())


def stops_soon() -> bool:
    """Return whether the worker is about to stop, where a signal may have come to this child before the main process.

    As systemd and process managers send it, to both. It is waited for a second at most.
    """
    looks = Backoff(STOP_LOOKS, STOP_LAG, is_stopping)
    while _memory is not None and looks.wait():
        pass
    return is_stopping()


def announce_stop(**_: Any) -> None:
    """Raise the flag that the worker is about to stop; safe in a signal handler."""
    if _memory is not None:
        _memory[_STOPPING] = 1


def cut_off() -> None:
    """Note that a body was ended by its worker; where that is about to stop, no other is to take its place."""
    global _cuts_off
    _cuts_off = is_stopping()


def begins_nothing() -> bool:
    """Return whether this is the process of a worker that ends its greenlets, or has done so, and will not wait."""
    if not (is_green and is_stopping()):
        return False
    from celery.worker import state  # which is there in a worker, and which a publisher need not import

    return _cuts_off or state.should_terminate not in (None, False)


def outlive(stopped: threading.Event) -> None:
    """Lower the flag once the worker has stopped, in a process that goes on, such as that of a test."""
    global _stopped
    _stopped = stopped
