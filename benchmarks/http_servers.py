"""Web servers in processes of their own, which are started as people start them."""

from __future__ import annotations

import os
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.support.processes import Process, end, members, spawn
from tests.support.servers import free_port
from tests.support.waiting import wait_until

__all__ = ["ROOT", "WebProcess", "gunicorn", "uvicorn", "web"]

ROOT = Path(__file__).resolve().parents[1]


def uvicorn(app: str, *, processes: int = 1) -> list[str]:
    """Return a command that takes a port; a connection is kept longer than any pause between two requests."""
    options = ["--host", "127.0.0.1", "--no-access-log", "--log-level", "critical", "--backlog", "4096"]
    options += ["--timeout-keep-alive", "75"]
    return ["-m", "uvicorn", app, *options, "--workers", str(processes), "--port", "{port}"]


def gunicorn(app: str, *, processes: int = 1, threads: int = 32) -> list[str]:
    """Return a command that takes a port."""
    options = ["--keep-alive", "75", "--log-level", "critical", "--backlog", "4096", "--worker-connections", "4096"]
    workers = ["--workers", str(processes), "--threads", str(threads)]
    return ["-m", "gunicorn", app, *options, *workers, "--bind", "127.0.0.1:{port}"]


class WebProcess:
    """A server, which can be started again on its port.

    Arguments:
        command: For a Python, with ``{port}`` in it.
        env: What the application reads.
        python: In whose environment its packages are.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str], python: str = sys.executable) -> None:
        self.port = free_port()
        self._command = [python, *(part.format(port=self.port) for part in command)]
        self._env = {**os.environ, "PYTHONPATH": str(ROOT), **env}
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed where it is stopped
        self._process: Process | None = None

    def start(self) -> None:
        """Start it, if it does not run, and wait until it listens."""
        if self._process is not None and self._process.poll() is not None:
            end(self._process)
            self._process = None
        if self._process is None:
            self._process = spawn(self._command, env=self._env, stdout=self._log, stderr=self._log, cwd=ROOT)
        wait_until(self._listens, 60, lambda: f"{self._command} to listen:\n{self.log()}")

    def stop(self) -> None:
        """End it and its children."""
        if self._process is not None:
            end(self._process, grace=3)
        self._log.close()

    def seconds_used(self) -> float:
        """Return the processor time that its processes have used."""
        assert self._process is not None
        times = [member.cpu_times() for member in members(self._process.pid)]
        return float(sum(time.user + time.system for time in times))

    def log(self) -> str:
        """Return what it has printed."""
        self._log.seek(0)
        return self._log.read().decode(errors="replace")

    def _listens(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            raise RuntimeError(f"{self._command} ended:\n{self.log()}")
        try:
            socket.create_connection(("127.0.0.1", self.port), 1).close()
        except OSError:
            return False
        return True


@contextmanager
def web(command: Sequence[str], env: Mapping[str, str], python: str = sys.executable) -> Iterator[WebProcess]:
    """Start a server, and stop it in the end."""
    server = WebProcess(command, env, python)
    try:
        server.start()
        yield server
    finally:
        server.stop()
