"""RQ workers as processes, and the shop that they work for: a Redis, a journal, gates, a queue."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
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
from tests.support.rq.nodes import asks_for_jobs
from tests.support.servers import open_client
from tests.support.waiting import wait_until

ROOT = Path(__file__).resolve().parents[3]
OURS = "celery_idempotent.rq.IdempotentWorker"
OURS_SPAWNED = "celery_idempotent.rq.IdempotentSpawnWorker"
STOCK = "rq.worker.Worker"
STOCK_SPAWNED = "rq.worker.SpawnWorker"
READY_SECONDS = 40.0
STOP_SECONDS = 40.0
#: Seconds at the end of a test for a worker to end by itself.
GRACE = 3.0
#: Seconds for whatever a test waits for; no test needs them.
PATIENCE = 60.0


class RqWorker:
    """One `rq worker`: its main process, and the horses that run its jobs, each in a process group of its own.

    Args:
        url: of the queue's Redis.
        log: where its output goes.
        kind: its class.
        verb: `worker` or `worker-pool`.
        options: more of the command line's.
        queues: what it works on.
        env: its environment.
    """

    def __init__(
        self,
        url: str,
        log: Path,
        kind: str = STOCK,
        *,
        verb: str = "worker",
        options: Sequence[str] = (),
        queues: Sequence[str] = ("default",),
        env: Mapping[str, str],
    ) -> None:
        self.url, self.log = url, log
        self._command = [sys.executable, "-m", "rq.cli", verb, "--url", url, "--worker-class", kind, *options, *queues]
        self._env = dict(env)
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> RqWorker:
        with self.log.open("ab") as out:
            self.process = processes.spawn(
                self._command, env=self._env, stdout=out, stderr=out, stdin=subprocess.DEVNULL, cwd=ROOT
            )
        return self

    def ready(self) -> RqWorker:
        """Wait until it asks for jobs; a pool, until one of its workers does."""
        assert self.process is not None
        pid = None if "worker-pool" in self._command else self.process.pid
        with open_client(self.url) as client:
            wait_until(
                lambda: asks_for_jobs(client, pid) or not self.running, READY_SECONDS, lambda: f"it: {self.logs()}"
            )
        assert self.running, f"the worker ended; its log:\n{self.logs()}"
        return self

    def name(self) -> str:
        return self.log.stem

    def logs(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def pid(self) -> int:
        assert self.process is not None, "the worker was never started"
        return self.process.pid

    def horses(self) -> list[int]:
        """Return the pids of its living horses."""
        try:
            below = psutil.Process(self.pid).children(recursive=True)
            return [each.pid for each in below if is_alive(each.pid) and leads_group(each.pid)]
        except psutil.NoSuchProcess:
            return []

    def descriptors(self) -> set[str]:
        """Return the numbers of what the main process has open."""
        return set(os.listdir(f"/proc/{self.pid}/fd"))

    def kill(self) -> None:
        """Kill the main process alone: a horse that works goes on."""
        os.kill(self.pid, signal.SIGKILL)
        assert self.process is not None
        self.process.wait(STOP_SECONDS)

    def stop(self) -> int:
        """Shut down warmly, and return the exit status."""
        assert self.process is not None
        if self.running:
            self.process.terminate()
        return self.process.wait(STOP_SECONDS)


def is_alive(pid: int) -> bool:
    """Say whether a process is there and no zombie."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def leads_group(pid: int) -> bool:
    """Say whether a process is there and leads its own group, as a horse does and a scheduler does not."""
    try:
        return os.getpgid(pid) == pid
    except ProcessLookupError:
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
        self.workers: list[RqWorker] = []
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

    def start(self, kind: str = STOCK, *options: str, ready: bool = True, **more: Any) -> RqWorker:
        """Start a worker, by default one that looks at its horse every second."""
        if more.get("verb", "worker") == "worker":
            options = ("--job-monitoring-interval", "1", *options)
        env = {**self.env, **more.pop("env", {})}
        log = self.directory / f"worker{len(self.workers) + 1}.log"
        worker = RqWorker(self.url, log, kind, options=options, env=env, **more).start()
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
        return "\n".join(f"--- {worker.name()}\n{worker.logs()}" for worker in self.workers)
