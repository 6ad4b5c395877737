"""The shop that RQ workers work for: a Redis, a journal, gates, a queue."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
from rq import Queue
from rq.job import Job, JobStatus

from celery_idempotent.stores import Record
from celery_idempotent.stores.redis import RedisStore
from tests.support import processes
from tests.support.celery.gates import Gates
from tests.support.celery.journal import Journal
from tests.support.rq.nodes import RqNode
from tests.support.servers import open_client
from tests.support.waiting import wait_until

ROOT = Path(__file__).resolve().parents[3]
OURS = "celery_idempotent.rq.IdempotentWorker"
OURS_SPAWNED = "celery_idempotent.rq.IdempotentSpawnWorker"
STOCK = "rq.worker.Worker"
STOCK_SPAWNED = "rq.worker.SpawnWorker"
#: Seconds at the end of a test for a worker to end by itself.
GRACE = 3.0
#: Seconds for whatever a test waits for; no test needs them.
PATIENCE = 60.0


def is_alive(pid: int) -> bool:
    """Say whether a process is there and no zombie."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def kill_horse(pid: int) -> None:
    """Kill a horse with SIGKILL, as the kernel does when memory runs out, and wait until it is gone."""
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not is_alive(pid), message=f"horse {pid} to be gone")


class Shop:
    """What one test works with. `with Shop(url, directory) as shop:` leaves no process behind.

    Args:
        url: of an empty database.
        directory: an empty one.
        env: more environment for its workers.
    """

    def __init__(self, url: str, directory: Path, **env: str) -> None:
        self.url, self.directory = url, directory
        self.client = open_client(url)
        self.store = RedisStore.from_url(url)
        self.queue = Queue(connection=self.client)
        self.journal = Journal(directory / "journal")
        self.gates = Gates(directory / "gates")
        self.workers: list[RqNode] = []
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        ours = {"PYTHONPATH": path, "JOURNAL": str(self.journal.path), "GATES": str(self.gates.directory), **env}
        # The library's own entry is no business of a worker that is started here.
        self.env = {**os.environ, "PYTHONUNBUFFERED": "1", **ours}

    def __enter__(self) -> Shop:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.gates.open_all()
        for worker in self.workers:
            if worker.process is not None:
                processes.end(worker.process, grace=GRACE)  # what it ran is measured only if it ends by itself
        for pid in self.members():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not self.members(), message=lambda: f"{self.members()} to be gone")
        self.store.close()
        self.client.close()

    def members(self) -> list[int]:
        """Return the pids of all living processes of the shop, also of horses that have lost their worker."""
        mark, found = self.env["GATES"], []
        for process in psutil.process_iter():
            try:
                if process.pid != os.getpid() and process.environ().get("GATES") == mark and is_alive(process.pid):
                    found.append(process.pid)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found

    def start(self, kind: str = STOCK, *options: str, ready: bool = True, **more: Any) -> RqNode:
        """Start a worker, by default one that looks at its horse every second."""
        if more.get("command", "worker") == "worker":
            options = ("--job-monitoring-interval", "1", *options)
        env = {**self.env, **more.pop("env", {})}
        name = f"worker{len(self.workers) + 1}"
        worker = RqNode(self.url, directory=self.directory, name=name, worker=kind, options=options, env=env, **more)
        worker.start()
        self.workers.append(worker)
        return worker.ready() if ready else worker

    def record(self, key: str) -> Record:
        """Return what the store has of a key, in its database."""
        record = self.store.get(key)
        assert record is not None, f"no record of {key}"
        return record

    def finished(self, job: Job, *, timeout: float = PATIENCE) -> Any:
        """Wait until a job has succeeded, and return its result; one that has failed ends the wait."""
        self.ended(job, JobStatus.FINISHED, JobStatus.FAILED, timeout=timeout)
        assert job.get_status(refresh=False) == JobStatus.FINISHED, f"{job} failed:\n{self.logs()}"
        return job.return_value(refresh=True)

    def ended(self, job: Job, *wanted: JobStatus, timeout: float = PATIENCE) -> None:
        """Wait until RQ says one of these of a job."""
        wait_until(
            lambda: job.get_status(refresh=True) in wanted,
            timeout,
            lambda: (
                f"{wanted} of {job}, which is {job.get_status(refresh=True)}; journal:\n{self.journal}\n{self.logs()}"
            ),
        )

    def logs(self) -> str:
        return "\n".join(f"--- {worker.name}\n{worker.logs()}" for worker in self.workers)
