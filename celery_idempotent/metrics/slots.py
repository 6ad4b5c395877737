"""Places for the numbers of processes that come and go: who ends leaves its own to the next.

prometheus_client gives each process files of its own. Where a process lives for one job, as RQ's horses do, files would
be as many as jobs. A slot is the right to a set of files, held by a lock that the kernel gives back, however its
process ends; what is counted there goes on from where the one before has left it.
"""

from __future__ import annotations

import fcntl
import os
from itertools import count
from pathlib import Path

__all__ = ["Slot", "leave_dead"]

_NAME = "slot{}"


class Slot:
    """The slot of whichever process asks; a child gets one of its own.

    Arguments:
        path: The folder that the processes share.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._pid = self._lock = -1
        self._name = ""

    def __call__(self) -> str:
        """Return its name, which is no other living process's."""
        if self._pid != os.getpid():
            self._take()
        return self._name

    def _take(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)  # the parent's, who holds it still
        for name in map(_NAME.format, count()):
            lock = _locked(self._path, name)
            if lock is not None:
                _forget_live(self._path, name)
                self._name, self._lock, self._pid = name, lock, os.getpid()
                return


def leave_dead(path: Path) -> None:
    """Forget what was of the moment with processes that are gone."""
    for name in {file.stem.rsplit("_", 1)[1] for file in path.glob(f"gauge_live*_{_NAME.format('*')}.db")}:
        lock = _locked(path, name)
        if lock is not None:
            _forget_live(path, name)
            os.close(lock)


def _locked(path: Path, name: str) -> int | None:
    lock = os.open(path / f"{name}.lock", os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    return lock


def _forget_live(path: Path, name: str) -> None:
    for file in path.glob(f"gauge_live*_{name}.db"):
        file.unlink(missing_ok=True)
