"""Celery workers and Redis servers as processes, in the shape of pytest-celery's nodes.

pytest-celery expects Docker containers. A node asks little of its container: ready, status, logs, kill, restart,
teardown. The classes here give that for processes, so that what is written against `celery_setup` runs on either.
"""

from __future__ import annotations

import os
import signal
import subprocess
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
from celery import Celery
from celery import __version__ as celery_version
from pytest_celery import CeleryTestBackend, CeleryTestBroker, CeleryTestWorker

from tests.support import preloaded, processes
from tests.support.celery import measuring
from tests.support.servers import RedisServer
from tests.support.waiting import wait_until

ROOT = Path(__file__).resolve().parents[3]

# What a worker does before it is ready, and no test looks at.
QUICK_START = ("--without-gossip", "--without-mingle", "--without-heartbeat")

READY_SECONDS = 100.0
#: A child of prefork whose last result the main process did not read before it stopped waits for that for 30 s and then
#: one more (billiard.pool, GUARANTEE_MESSAGE_CONSUMPTION_RETRY_LIMIT): seen with stock Celery in one stop of 80.
STOP_SECONDS = 60.0


class WorkerProcess:
    """What stands where a node of pytest-celery has its container: one `celery worker` and its process group."""

    ready_prompt = "ready."

    def __init__(
        self, command: Sequence[str], env: Mapping[str, str], log: Path, name: str, queues: str, *, forked: bool
    ) -> None:
        self.id = uuid.uuid4().hex
        self.name = f"{name}@{self.id[:12]}"
        self.command = [*command, f"--hostname={self.name}"]
        self.forked = forked
        self.log = log
        self.saved = log.with_suffix(".saved")
        self.env = dict(env)
        if measuring.measured():
            self.saved.mkdir(exist_ok=True)
            self.env[measuring.FOLDER] = str(self.saved)
        self.process: processes.Process | None = None
        self._name = name
        self._queues = queues
        self._log_start = 0  # where the log of the present run begins

    @property
    def status(self) -> str:
        """`running` or `exited`, as Docker says it."""
        return "running" if self.process is not None and self.process.poll() is None else "exited"

    @property
    def celeryconfig(self) -> dict[str, Any]:
        """What an app needs to know to reach this worker."""
        return {"hostname": self.name, "queues": self._queues}

    def version(self) -> str:
        return str(celery_version)

    def log_level(self) -> str:
        return "INFO"

    def worker_name(self) -> str:
        return self._name

    def worker_queue(self) -> str:
        return self._queues

    def start(self) -> None:
        assert self.status == "exited", f"{self.name} is running already"
        self._log_start = self.log.stat().st_size if self.log.exists() else 0
        with self.log.open("ab") as out:
            start = preloaded.celery.start if self.forked else processes.run_module
            self.process = start(self.command, self.env, out)

    def ready(self) -> bool:
        def prompted_or_ended() -> bool:
            return self.status == "exited" or self.ready_prompt in self.logs(present_run=True)

        wait_until(prompted_or_ended, READY_SECONDS, lambda: f"{self.name} to be ready; its log:\n{self.logs()}")
        if self.status == "exited":
            raise RuntimeError(f"{self.name} ended before it was ready; its log:\n{self.logs()}")
        return True

    def logs(self, *, present_run: bool = False) -> str:
        if not self.log.exists():
            return ""
        with self.log.open("rb") as file:
            file.seek(self._log_start if present_run else 0)
            return file.read().decode(errors="replace")

    def kill(self, signal: str | int = "SIGKILL") -> None:  # the name that Docker's client gives it
        """KILL, STOP and CONT reach the whole group, as with a lost host; other signals the main process."""
        number = _signal_number(signal)
        if self.process is None or self.process.poll() is not None:
            return
        if number == _signal_number("SIGKILL"):
            measuring.save(self.process.pid, self.saved)
        if number in (_signal_number("SIGKILL"), _signal_number("SIGSTOP"), _signal_number("SIGCONT")):
            processes.signal_group(self.process, number)
        else:
            self.process.send_signal(number)
        if number == _signal_number("SIGKILL"):
            self.process.wait(timeout=STOP_SECONDS)
            self.wait_until_gone()

    def wait_until_gone(self) -> None:
        assert self.process is not None
        pgid = self.process.pid
        wait_until(lambda: not processes.members(pgid), STOP_SECONDS, lambda: f"{processes.members(pgid)} to be gone")

    def reload(self) -> None:
        """A container is an object that must be refreshed; a process is not."""

    def restart(self, timeout: float = STOP_SECONDS) -> None:
        self.stop(timeout)
        self.start()
        self.ready()

    def stop(self, timeout: float = STOP_SECONDS, number: int = signal.SIGTERM) -> int:
        """Signal the main process, wait for its end, and return its exit status."""
        assert self.process is not None, f"{self.name} was never started"
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.wait(timeout)

    def wait(self, timeout: float = STOP_SECONDS) -> int:
        """Wait for the end of the main process, and return its exit status."""
        assert self.process is not None, f"{self.name} was never started"
        try:
            status = self.process.wait(timeout=timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.name} did not end within {timeout:g} s; its log:\n{self.logs()}") from None
        self.wait_until_gone()
        processes.watchdog.forget(self.process.pid)
        return status

    def teardown(self) -> None:
        if self.process is not None:
            processes.signal_group(self.process, signal.SIGCONT)
            measuring.save(self.process.pid, self.saved)
            processes.end(self.process)
            self.wait_until_gone()


class WorkerNode(CeleryTestWorker):  # type: ignore[misc]
    """A real `celery worker`: a main process and its pool, in a process group of their own.

    Beside what a node of pytest-celery offers (ready, logs, name, hostname, kill, restart, teardown, wait_for_log,
    assert_log_exists, get_running_processes_info) it knows its processes.
    """

    container: WorkerProcess

    def __init__(
        self,
        app_module: str,
        broker_url: str,
        store_url: str | None = None,
        *,
        result_url: str | None = None,
        directory: Path,
        name: str = "worker",
        app: Celery | None = None,
        pool: str = "prefork",
        concurrency: int = 2,
        queues: Sequence[str] = ("celery",),
        prefetch: int | None = None,
        visibility_timeout: float | None = None,
        env: Mapping[str, str] | None = None,
        extra_args: Sequence[str] = (),
        quick: bool = True,
    ) -> None:
        """Describe a worker; `start()` starts it.

        Args:
            app_module: what `celery -A` is given.
            broker_url: BROKER_URL of the worker.
            store_url: STORE_URL of the worker.
            result_url: RESULT_URL of the worker; the broker's where it is absent.
            directory: where the log goes.
            name: the part of the node name before the @.
            app: the app that the test publishes with.
            pool: prefork, threads, solo, gevent, eventlet.
            concurrency: slots.
            queues: what it consumes.
            prefetch: the prefetch multiplier, Celery's own default where it is absent.
            visibility_timeout: seconds.
            env: more environment.
            extra_args: more arguments for `celery worker`.
            quick: start without gossip, mingle, heartbeat and other commands' modules, and forked from a process that
                has imported Celery, which saves two seconds; False for a stock worker.
        """
        settings = {"BROKER_URL": broker_url, "STORE_URL": store_url, "RESULT_URL": result_url or broker_url}
        if visibility_timeout is not None:
            settings["VISIBILITY_TIMEOUT"] = str(visibility_timeout)
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        merged = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
        merged |= {key: value for key, value in settings.items() if value is not None}
        joined = ",".join(queues)
        options = [f"--pool={pool}", f"--concurrency={concurrency}", f"--queues={joined}", "--loglevel=INFO"]
        if prefetch is not None:
            options.append(f"--prefetch-multiplier={prefetch}")
        celery = "tests.support.celery.command" if quick else "celery"
        command = [celery, "-A", app_module, "worker", *options, *(QUICK_START if quick else ()), *extra_args]
        merged |= env or {}
        # gevent and eventlet patch modules before anything else imports them.
        forked = quick and pool in ("prefork", "threads", "solo")
        log = directory / f"{name}.log"
        super().__init__(WorkerProcess(command, merged, log, name, joined, forked=forked), app)

    def start(self) -> WorkerNode:
        """Start the processes, without waiting for them."""
        self.container.start()
        return self

    def hostname(self) -> str:
        """Return the node name, as `inspect` and events show it."""
        return self.container.name

    @property
    def pid(self) -> int:
        """The pid of the main process, which is the id of the process group too."""
        assert self.container.process is not None, "the worker was never started"
        return self.container.process.pid

    @property
    def running(self) -> bool:
        """Whether the main process is alive."""
        return self.container.status == "running"

    def children(self) -> list[int]:
        """Return the pids of the pool's living children."""
        try:
            found = psutil.Process(self.pid).children()
            return sorted(child.pid for child in found if _alive(child))
        except psutil.NoSuchProcess:
            return []

    def members(self) -> list[int]:
        """Return the pids of every living process of the group."""
        return sorted(process.pid for process in processes.members(self.pid))

    def kill_child(self, pid: int) -> None:
        """Kill one child with SIGKILL, and wait until it is gone."""
        assert pid in self.children(), f"{pid} is no child of {self.name()}: {self.children()}"
        child = psutil.Process(pid)
        measuring.save(self.pid, self.container.saved)
        child.kill()
        wait_until(lambda: not _alive(child), message=f"child {pid} to be gone")

    def stop(self, timeout: float = STOP_SECONDS) -> int:
        """Shut down warmly (SIGTERM): running tasks end first. Return the exit status."""
        return self.container.stop(timeout)

    def wait(self, timeout: float = STOP_SECONDS) -> int:
        """Wait for the end of what was told to end, and return its exit status: a second SIGTERM might kill it."""
        return self.container.wait(timeout)

    def quit(self, timeout: float = STOP_SECONDS) -> int:
        """Shut down coldly (SIGQUIT): running tasks are cut off and given back. Return the exit status."""
        return self.container.stop(timeout, signal.SIGQUIT)

    def abort(self) -> None:
        """End it, if it runs, with its threads' stacks at the end of its log."""
        if self.container.process is not None:
            processes.abort(self.container.process)

    def pause(self) -> None:
        """Freeze the whole group (SIGSTOP), as a virtual machine that is paused."""
        self.container.kill("SIGSTOP")
        wait_until(self._frozen, message=f"{self.name()} to freeze")

    def resume(self) -> None:
        """Let a frozen group go on (SIGCONT)."""
        self.container.kill("SIGCONT")

    def get_running_processes_info(
        self, columns: list[str] | None = None, filters: dict[str, str] | None = None
    ) -> list[dict[str, Any]]:
        """Return what psutil knows of each process of the group."""
        columns = columns or ["pid", "name", "username", "cmdline", "cpu_percent", "memory_percent", "create_time"]
        rows = [process.as_dict(columns) for process in processes.members(self.pid)]
        return [row for row in rows if all(row.get(key) == value for key, value in (filters or {}).items())]

    def _frozen(self) -> bool:
        return all(process.status() == psutil.STATUS_STOPPED for process in processes.members(self.pid))


class ServerProcess:
    """What stands where a node of pytest-celery has its container: one redis-server and one of its databases."""

    def __init__(self, server: RedisServer, db: int) -> None:
        self.server = server
        self.db = db
        self.id = uuid.uuid4().hex
        self.name = f"redis-{server.port}"

    @property
    def status(self) -> str:
        return "running" if self.server.running else "exited"

    @property
    def celeryconfig(self) -> dict[str, Any]:
        url = self.server.url(self.db)
        address = {"hostname": "127.0.0.1", "port": self.server.port, "vhost": str(self.db)}
        return {"url": url, "host_url": url, **address}

    def ready(self) -> bool:
        with self.server.client(self.db) as client:
            return bool(client.ping())

    def logs(self) -> str:
        return self.server.logs()

    def kill(self, signal: str | int = "SIGKILL") -> None:  # the name that Docker's client gives it
        number = _signal_number(signal)
        if number == _signal_number("SIGKILL"):
            self.server.kill()
        else:
            os.kill(self.server.pid, number)

    def reload(self) -> None:
        """A container is an object that must be refreshed; a process is not."""

    def restart(self, timeout: float = STOP_SECONDS) -> None:
        if self.server.running:
            self.server.restart()
        else:
            self.server.start()

    def teardown(self) -> None:
        self.server.stop()


class RedisBroker(CeleryTestBroker):  # type: ignore[misc]
    """A redis-server of its own as broker."""

    def __init__(self, server: RedisServer, db: int = 0) -> None:
        super().__init__(ServerProcess(server, db))


class RedisBackend(CeleryTestBackend):  # type: ignore[misc]
    """A redis-server of its own as result backend."""

    def __init__(self, server: RedisServer, db: int = 1) -> None:
        super().__init__(ServerProcess(server, db))


def _alive(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _signal_number(number: str | int) -> int:
    return int(getattr(signal, number)) if isinstance(number, str) else number
