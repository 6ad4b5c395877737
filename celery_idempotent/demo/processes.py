"""The demo's processes and its directory: whatever happens to the demo, they go with it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import monotonic, sleep
from types import TracebackType
from typing import Any

__all__ = ["Processes"]

#: Seconds that killed processes get to be gone.
END_SECONDS = 5.0
# Cleans up where the demo itself cannot (kill -9): its standard input ends when the demo does.
_KEEPER = """
import os, shutil, signal, sys
groups = set()
for line in sys.stdin:
    verb, group = line.split()
    (groups.add if verb == "+" else groups.discard)(int(group))
for group in groups:
    try:
        os.killpg(group, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass
shutil.rmtree(sys.argv[1], ignore_errors=True)
"""


class Processes:
    """Process groups in a temporary directory.

    Each process leads a session of its own, so that Ctrl-C in the terminal reaches the demo alone, which then ends them
    all.
    """

    def __init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="celery-idempotent-demo-"))
        self._groups: dict[int, subprocess.Popen[str]] = {}
        command = [sys.executable, "-I", "-S", "-c", _KEEPER, str(self.directory)]
        self._keeper = subprocess.Popen(command, stdin=subprocess.PIPE, text=True, start_new_session=True)

    def __enter__(self) -> Processes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end(*self._groups.values())
        assert self._keeper.stdin is not None
        try:
            self._keeper.stdin.close()
        except BrokenPipeError:
            pass  # what could not be told is still buffered, and closing tries again
        self._keeper.wait()
        shutil.rmtree(self.directory, ignore_errors=True)

    def start(
        self, name: str, command: Sequence[str], env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[str]:
        """Start a process.

        Arguments:
            name: Names its log.
            command: The program and its arguments.
            env: What its environment has besides ours.
            options: For `subprocess.Popen`.
        """
        with self.log(name).open("w") as log:
            process = subprocess.Popen(
                command,
                # A killed worker leaves temporary files of its own: they shall be in the directory that goes.
                env={**os.environ, "TMPDIR": str(self.directory), **(env or {})},
                cwd=self.directory,  # `python -m` imports from there; a celery.py may be where the user is
                stdin=subprocess.DEVNULL,
                stderr=log,
                text=True,
                start_new_session=True,
                **{"stdout": log, **options},
            )
        self._groups[process.pid] = process
        self._tell_keeper("+", process.pid)
        return process

    def log(self, name: str) -> Path:
        """Return the path of a process's log."""
        return self.directory / f"{name}.log"

    def kill_child(self, pid: int) -> bool:
        """Kill a process that one of ours has forked, and tell whether it was there."""
        try:
            if os.getpgid(pid) in self._groups and pid not in self._groups:
                os.kill(pid, signal.SIGKILL)
                return True
        except ProcessLookupError:
            pass
        return False

    def end(self, *processes: subprocess.Popen[str], grace: float = 0.0) -> None:
        """End processes and all they have forked, and wait until they are gone.

        Arguments:
            processes: Which.
            grace: Seconds that they get to end by themselves before they are killed.
        """
        # An id that was ours may be somebody else's by now.
        ours = [process for process in processes if process.pid in self._groups]
        if grace:
            _terminate(ours, grace)
        for process in ours:
            _signal_group(process.pid, signal.SIGKILL)
        end = monotonic() + END_SECONDS
        for process in ours:
            process.wait()
            # The id of a group stays taken while it has members; those of a worker are reaped by init, a little later.
            while _signal_group(process.pid, 0) and monotonic() < end:
                sleep(0.01)
            self._groups.pop(process.pid, None)
            self._tell_keeper("-", process.pid)

    def _tell_keeper(self, verb: str, group: int) -> None:
        assert self._keeper.stdin is not None
        try:
            self._keeper.stdin.write(f"{verb} {group}\n")
            self._keeper.stdin.flush()
        except BrokenPipeError:
            pass  # somebody killed it; we still end what we started


def _terminate(processes: Sequence[subprocess.Popen[str]], grace: float) -> None:
    for process in processes:
        process.terminate()
    end = monotonic() + grace
    while monotonic() < end and any(process.poll() is None for process in processes):
        sleep(0.02)


def _signal_group(group: int, number: int) -> bool:
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    except PermissionError:  # macOS says so of a group that has only zombies
        return False
    return True
