"""A real `celery worker` that drains its queue while somebody looks at the clock."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from time import perf_counter, sleep
from types import TracebackType
from typing import Any

import psutil  # type: ignore[import-untyped]

from tests.support import processes
from tests.support.servers import RedisServer

__all__ = ["BROKER_DB", "PLAIN_DB", "RESULT_DB", "STORE_DB", "Worker", "environment"]

ROOT = Path(__file__).resolve().parents[1]
BROKER_DB, RESULT_DB, STORE_DB = 0, 1, 2
#: The broker of a second worker, which has no part of this library.
PLAIN_DB = 3
POLL_SECONDS = 0.005
#: How long a worker may take for any block, in seconds.
LONGEST_DRAIN = 120.0


def environment(server: RedisServer, broker: int = BROKER_DB) -> dict[str, str]:
    """Return what tells an app where its servers are: three databases of one, and the number of the first."""
    return {
        "BROKER_URL": server.url(broker),
        "RESULT_URL": server.url(RESULT_DB),
        "STORE_URL": server.url(STORE_DB),
    }


class Worker:
    """A worker with Celery's own settings, but for the chatter between workers that a lone one does not need.

    Arguments:
        server: Broker, result backend and store.
        module: The module of its app.
        pool: prefork or threads.
        concurrency: Slots.
        broker: The number of its broker's database.
        env: What else its environment says.
    """

    def __init__(
        self,
        server: RedisServer,
        module: str,
        *,
        pool: str,
        concurrency: int,
        broker: int = BROKER_DB,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.broker = server.client(broker)
        self._server = server
        self._env = {**os.environ, **environment(server, broker), "PYTHONPATH": str(ROOT), **(env or {})}
        options = [f"--pool={pool}", f"--concurrency={concurrency}", "--loglevel=WARNING"]
        quiet = ["--without-gossip", "--without-mingle", "--without-heartbeat"]
        self._command = [sys.executable, "-m", "celery", "-A", module, "worker", *options, *quiet]
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed where the worker ends
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Worker:
        self._process = processes.spawn(self._command, env=self._env, stdout=self._log, stderr=self._log, cwd=ROOT)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        processes.end(self._running(), grace=20.0)
        self._log.close()

    def drain(self, publish: Callable[[], object]) -> float:
        """Return the seconds from the moment the worker is let go until the last of the published messages is acked."""
        self.signal(signal.SIGSTOP)
        try:
            publish()
        finally:
            since = perf_counter()
            self.signal(signal.SIGCONT)
        return self.settled() - since

    def settled(self) -> float:
        """Return the time at which nothing is queued and nothing is unacked any more."""
        deadline = perf_counter() + LONGEST_DRAIN
        while self._left():
            if perf_counter() > deadline or self.ended:
                self._log.seek(0)
                raise RuntimeError(f"The worker left {self._left()} messages; its log:\n{self._log.read().decode()}")
            sleep(POLL_SECONDS)
        return perf_counter()

    def seconds_used(self) -> float:
        """Return the processor time that the worker, its children and the server have used."""
        members = [*processes.members(self._running().pid), psutil.Process(self._server.pid)]
        times = [member.cpu_times() for member in members]
        return float(sum(time.user + time.system for time in times))

    def signal(self, number: int) -> None:
        """Send a signal to the worker and its children."""
        processes.signal_group(self._running(), number)

    @property
    def ended(self) -> bool:
        """Whether the worker has ended by itself, or was killed."""
        return self._running().poll() is not None

    def _left(self) -> int:
        counts: Any = self.broker.pipeline(transaction=False)
        counts.llen("celery")
        counts.hlen("unacked")
        return int(sum(counts.execute()))

    def _running(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, "the worker was not started"
        return self._process
