"""Child processes that never outlive the test run.

Each child leads its own process group. A watchdog process holds the reading end of a pipe and the list of groups; when
the test process ends, in whatever way (also SIGKILL), the pipe closes and the watchdog kills what is left. A
parent-death signal would not do: it fires when the *thread* that started the child ends.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import IO, Any, Protocol

import psutil

from tests.support.waiting import WaitTimeout, wait_until

WATCHDOG = """
import os, signal, sys
groups = set()
for line in sys.stdin:
    verb, pgid = line.split()
    (groups.add if verb == "+" else groups.discard)(int(pgid))
for pgid in groups:
    try:
        os.killpg(pgid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass
"""


class Process(Protocol):
    """What the tests use of a process: that of `subprocess.Popen`."""

    @property
    def pid(self) -> int: ...
    @property
    def returncode(self) -> int | None: ...
    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, number: int, /) -> None: ...
    def terminate(self) -> None: ...
    def kill(self) -> None: ...


class Watchdog:
    """The process that kills what a test run left behind."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._owner = 0

    def _tell(self, verb: str, pgid: int) -> None:
        with self._lock:
            if self._process is None or self._owner != os.getpid():
                self._owner = os.getpid()
                # Its own session: Ctrl-C in a terminal must not reach it.
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-S", "-c", WATCHDOG],
                    stdin=subprocess.PIPE,
                    text=True,
                    start_new_session=True,
                )
            assert self._process.stdin is not None
            self._process.stdin.write(f"{verb} {pgid}\n")
            self._process.stdin.flush()

    def watch(self, pgid: int) -> None:
        self._tell("+", pgid)

    def forget(self, pgid: int) -> None:
        self._tell("-", pgid)

    def close(self) -> None:
        """End the watchdog, which kills every group it still knows."""
        with self._lock:
            if self._process is not None and self._owner == os.getpid():
                assert self._process.stdin is not None
                self._process.stdin.close()
                self._process.wait(timeout=10)
                self._process = None


watchdog = Watchdog()


def spawn(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
    """Start `command` as the leader of its own process group, watched over."""
    process = subprocess.Popen(command, start_new_session=True, **options)
    watchdog.watch(process.pid)
    return process


def run_module(command: Sequence[str], env: Mapping[str, str], output: IO[bytes]) -> subprocess.Popen[bytes]:
    """Run ``python -m`` with this command, and all that it prints to one file."""
    options: dict[str, Any] = {"stdout": output, "stderr": output, "stdin": subprocess.DEVNULL}
    return spawn([sys.executable, "-m", *command], env=env, **options)


def signal_group(process: Process, number: int) -> None:
    """Send a signal to every process of the group that `process` leads or led."""
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        pass


def members(pgid: int) -> list[psutil.Process]:
    """Return the living processes of a group; zombies do not count."""
    alive = []
    for process in psutil.process_iter():
        try:
            if os.getpgid(process.pid) == pgid and process.status() != psutil.STATUS_ZOMBIE:
                alive.append(process)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return alive


def abort(process: Process, timeout: float = 5.0) -> None:
    """End a group by SIGABRT, at which each process of Python prints what its threads do; conftest.py asks for that."""
    if process.poll() is not None:
        return
    signal_group(process, signal.SIGSTOP)
    # One after the other: they share a log. The leader last: the kernel hangs up a stopped group that has none.
    for each in sorted(members(process.pid), key=lambda each: each.pid == process.pid):
        try:
            each.send_signal(signal.SIGABRT)
            each.send_signal(signal.SIGCONT)
            wait_until(lambda each=each: each.pid not in {one.pid for one in members(process.pid)}, timeout)
        except (psutil.NoSuchProcess, WaitTimeout):
            continue


def end(process: Process, *, grace: float = 0.0) -> int:
    """End a group: ask its leader for `grace` seconds, then SIGKILL what is left. Return the leader's status."""
    if process.returncode is None and grace:
        signal_group(process, signal.SIGCONT)
        process.terminate()
        try:
            process.wait(timeout=grace)
        except subprocess.TimeoutExpired:
            pass
    signal_group(process, signal.SIGKILL)
    status = process.wait(timeout=10)
    watchdog.forget(process.pid)
    return status
