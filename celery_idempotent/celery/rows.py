"""Which row of the memory that a worker shares with its children is whose, so that no two processes write to one.

Row 0 is the main process's. A child's is its place in the pool, which a child that replaces it takes over. Any other
process that a task forks has no row.
"""

from __future__ import annotations

import mmap
import os
import threading
from typing import Any

from billiard.process import current_process
from celery import signals

__all__ = ["ROWS", "children", "lives", "lock", "own", "prepare"]

#: The main process and 1023 children; those beyond are not counted.
ROWS = 1024

#: The row of this process, or None: it has none.
own: int | None = None
#: The pid of the process whose row that is.
pid = 0
#: What the threads of this process hold while they write into its row; another one after a fork.
lock = threading.Lock()
_prepared = False
_pids: memoryview | None = None


def prepare() -> None:
    """Take the first row for this process, and have each child that is forked later take its own."""
    global own, pid, _prepared, _pids
    if _pids is None or own != 0:
        _pids = memoryview(mmap.mmap(-1, ROWS * 8)).cast("Q")
    own, pid = 0, os.getpid()
    if not _prepared:
        _prepared = True
        os.register_at_fork(after_in_child=_leave)
        signals.worker_process_init.connect(_take, weak=False, dispatch_uid="celery_idempotent.rows")


def children() -> dict[int, int]:
    """Return the rows of the children that live, with their pids."""
    taken = enumerate(_pids) if _pids is not None else ()
    return {row: child for row, child in taken if child and lives(child)}


def lives(pid: int) -> bool:
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
