"""Real workers of RQ: processes of `rq worker`, and workers in burst mode in this process."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import redis
from rq import Queue, SimpleWorker

from tests.support import preloaded, processes
from tests.support.servers import open_client
from tests.support.waiting import wait_until

ROOT = Path(__file__).resolve().parents[3]
STOCK = "rq.Worker"
STOCK_SPAWNED = "rq.SpawnWorker"
OURS = "celery_idempotent.rq.IdempotentWorker"
OURS_SPAWNED = "celery_idempotent.rq.IdempotentSpawnWorker"
READY_SECONDS = 40.0
STOP_SECONDS = 40.0
#: Seconds at the end of a test for a worker of the library's to end by itself: else what it ran is not measured.
GRACE = 3.0


def asks_for_jobs(client: redis.Redis, pid: int | None = None) -> bool:
    """Return whether a worker has come so far that SIGTERM ends it; `pid` is its process's (default: whichever it is).

    RQ stops by an exception in its signal handler. One that comes while RQ 3.0 still cleans its registries may be
    swallowed with those of the cleaning, and the worker goes on.
    """
    found = [client.hmget(key, "state", "pid") for key in client.smembers("rq:workers")]
    return any(state in (b"idle", b"busy") and pid in (None, int(own or 0)) for state, own in found)


class RqNode:
    """One `rq worker`: the worker, its horse, which leads a group of its own, and perhaps its scheduler."""

    def __init__(
        self,
        url: str,
        *,
        directory: Path,
        name: str = "worker",
        worker: str = STOCK,
        queues: Sequence[str] = ("default",),
        scheduler: bool = False,
        command: str = "worker",
        env: Mapping[str, str] | None = None,
        options: Sequence[str] = (),
    ) -> None:
        """Describe a worker; `start()` starts it.

        Args:
            url: of the queues' database.
            directory: where the log goes.
            name: the worker's.
            worker: its class.
            queues: what it works on.
            scheduler: start it with one.
            command: worker or worker-pool.
            env: more environment.
            options: more options.
        """
        self.url, self.name, self.log = url, name, directory / f"{name}.log"
        self.stock, self.pool = worker.startswith("rq."), command == "worker-pool"
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        self.env = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "TELL": "1", **(env or {})}
        self.command = ["rq.cli", command, "--url", url, "--worker-class", worker]
        self.command += [] if self.pool else ["--name", name]
        self.command += [*options, *(["--with-scheduler"] if scheduler else []), *queues]
        self.process: processes.Process | None = None

    def start(self) -> RqNode:
        with self.log.open("ab") as out:
            self.process = preloaded.rq.start(self.command, self.env, out)
        return self

    def ready(self) -> RqNode:
        """Wait until it asks for jobs; a pool, until one of its workers does."""

        def listens() -> bool:
            if self._started().poll() is not None:
                raise RuntimeError(f"{self.name} ended before it was ready; its log:\n{self.logs()}")
            return asks_for_jobs(client, None if self.pool else self.pid)

        with open_client(self.url) as client:
            wait_until(listens, READY_SECONDS, lambda: f"{self.name} to be ready; its log:\n{self.logs()}")
        return self

    @property
    def pid(self) -> int:
        return self._started().pid

    @property
    def running(self) -> bool:
        return self._started().poll() is None

    def logs(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def members(self) -> list[int]:
        """Return the pids of the worker and of what it started, also of what outlived it."""
        found = []
        for process in psutil.process_iter():
            try:
                if os.getsid(process.pid) == self.pid and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process.pid)
            except (ProcessLookupError, psutil.NoSuchProcess):
                continue
        return sorted(found)

    def horses(self) -> list[int]:
        """Return the pids of its living horses, which lead a group of their own, as a scheduler does not."""
        return [pid for pid in self.members() if pid != self.pid and _leads_group(pid)]

    def kill(self) -> None:
        """Kill the worker, and leave its horse."""
        self._started().kill()
        self._started().wait(STOP_SECONDS)

    def kill_horse(self, pid: int) -> None:
        """Kill its horse, as the kernel does when memory runs out, and wait until it is gone."""
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: pid not in self.members(), message=f"horse {pid} to be gone")

    def kill_all(self) -> None:
        """Kill the worker and all that it started, as when its host is lost."""
        self.kill()
        for pid in self.members():
            _kill(pid)
        wait_until(lambda: not self.members(), STOP_SECONDS, lambda: f"{self.members()} to be gone")

    def pause(self, pid: int) -> None:
        """Freeze one of its processes."""
        processes.watchdog.watch(pid)  # a horse leads its own group, and would stay behind
        os.kill(pid, signal.SIGSTOP)
        wait_until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED, message=f"{pid} to freeze")

    def resume(self, pid: int) -> None:
        os.kill(pid, signal.SIGCONT)

    def ask_to_stop(self) -> None:
        """Ask for a warm shutdown, without waiting for it."""
        self._started().send_signal(signal.SIGTERM)

    def stop(self) -> int:
        """Shut down warmly: what runs ends first."""
        self.ask_to_stop()
        return self.wait()

    def cut_off(self) -> int:
        """Shut down coldly: the horse is killed. RQ does so at a second signal, a second after the first.

        A third would break off what it does then.
        """

        def ended() -> bool:
            if self.running and "cold shut down" not in self.logs():
                self.ask_to_stop()
            return not self.running

        wait_until(ended, STOP_SECONDS, lambda: f"{self.name} to end; its log:\n{self.logs()}")
        return self.wait()

    def wait(self) -> int:
        """Wait for its end."""
        status = self._started().wait(STOP_SECONDS)
        wait_until(lambda: not self.members(), STOP_SECONDS, lambda: f"{self.members()} to be gone")
        return status

    def abort(self) -> None:
        """End it, if it runs, with its threads' stacks at the end of its log; the horse that it waits for as well."""
        if self.process is None:
            return
        for pid in self.members():
            if pid != self.pid:
                os.kill(pid, signal.SIGABRT)
        processes.abort(self.process)

    def teardown(self) -> None:
        if self.process is None:
            return
        processes.end(self.process, grace=0.0 if self.stock else GRACE)
        for pid in self.members():
            processes.watchdog.forget(pid)
            _kill(pid)
        wait_until(lambda: not self.members(), STOP_SECONDS, lambda: f"{self.members()} to be gone")

    def _started(self) -> processes.Process:
        assert self.process is not None, f"{self.name} was never started"
        return self.process


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):  # it has ended meanwhile
        os.kill(pid, signal.SIGKILL)


def _leads_group(pid: int) -> bool:
    try:
        return os.getpgid(pid) == pid
    except ProcessLookupError:
        return False


def burst(*queues: Queue, worker: type[Any] = SimpleWorker, jobs: int | None = None, **options: Any) -> None:
    """Work on what is in the queues, in this process, until they are empty, or so many jobs were done."""
    serializer = options.pop("serializer", queues[0].serializer)
    quiet = type(
        worker.__name__, (worker,), {"subscribe": lambda self: None}
    )  # to commands, in a thread that ends late
    made = quiet(list(queues), connection=queues[0].connection, serializer=serializer, **options)
    with signals_kept():
        made.work(burst=True, max_jobs=jobs, logging_level="CRITICAL")


@contextmanager
def signals_kept() -> Iterator[None]:
    """Put back what RQ's workers do with signals and with the alarm, which is pytest-timeout's."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGALRM, signal.SIGINT, signal.SIGTERM)}
    left = signal.getitimer(signal.ITIMER_REAL)[0]
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        signal.setitimer(signal.ITIMER_REAL, left)
