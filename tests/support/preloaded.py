"""Python processes forked from one that has imported what all of them import.

Two thirds of the start of a worker or a web server are imports of Celery, RQ or a framework, and the tests start
hundreds of them. `start` runs a module as ``python -m module`` does, in a process with its own group, environment,
output and exit status. Imported beforehand is what ``celery worker``, ``rq worker``, uvicorn and gunicorn import
whatever their arguments are; our command line among it, as a plugin of Celery's, and no application. What needs a new
interpreter is started by `processes.run_module`.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

from tests.support import processes, slowness
from tests.support.celery.measuring import measured, unmeasured

ROOT = Path(__file__).resolve().parents[2]

CELERY = (
    "tests.support.celery.command",
    "billiard.heap",
    "billiard.popen_fork",
    "billiard.sharedctypes",
    "billiard.synchronize",
    "celery.app.control",
    "celery.app.events",
    "celery.app.log",
    "celery.apps.worker",
    "celery.backends.redis",
    "celery.bin.celery",
    "celery.concurrency.prefork",
    "celery.concurrency.solo",
    "celery.events",
    "celery.fixups.django",
    "celery.worker.autoscale",
    "celery.worker.components",
    "celery.worker.consumer",
    "celery.worker.control",
    "celery.worker.strategy",
    "encodings.idna",
    "kombu.matcher",
    "kombu.mixins",
    "kombu.pidbox",
    "kombu.transport.redis",
    "psutil",
    "tests.support.servers",
    # What billiard imports in each child, to have the kernel end it with its worker, where cffi is installed.
    *(("cffi.cparser",) if importlib.util.find_spec("cffi") else ()),
)
RQ = ("rq.cli", "rq.worker", "rq.worker_pool", "rq.scheduler")
HTTP = (
    "celery.app.base",
    "celery_idempotent.celery",
    "celery_idempotent.http.asgi",
    "celery_idempotent.http.wsgi",
    "celery_idempotent.stores.postgres",
    "celery_idempotent.stores.redis",
    "django.core.asgi",
    "django.core.wsgi",
    "django.db",
    "fastapi",
    "flask",
    "gunicorn.app.wsgiapp",
    "gunicorn.workers.gthread",
    "gunicorn.workers.sync",
    "kombu.transport.redis",
    "psycopg",
    "starlette.applications",
    "starlette.responses",
    "uvicorn.lifespan.on",
    "uvicorn.loops.auto",
    "uvicorn.main",
    "uvicorn.protocols.http.auto",
)

MESSAGE_BYTES = 1 << 20


def _is_available() -> bool:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):  # not Linux, or a sandbox that forbids it
        return False
    return True


#: Elsewhere every process is a new interpreter.
AVAILABLE = _is_available()


class PreloadedProcess:
    """A process that a `Preloaded` has forked, with what the tests use of `subprocess.Popen`."""

    def __init__(self, command: list[str], reports: int) -> None:
        self.args = command
        self.returncode: int | None = None
        self._reports = os.fdopen(reports, "rb", buffering=0)
        self.pid = self._next("pid")

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self._reports], [], [], 0)[0]:
            self._end()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._reports], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            self._end()
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _end(self) -> None:
        self.returncode = self._next("status")
        self._reports.close()

    def _next(self, what: str) -> int:
        report = self._reports.readline().decode().split()
        if len(report) != 2 or report[0] != what:
            raise RuntimeError(f"Expected the {what} of {self.args}, got {report}: the process that forks has ended.")
        return int(report[1])


class Preloaded:
    """A process that forks others: `start` has it do so, and starts it the first time."""

    def __init__(self, *modules: str) -> None:
        self.modules = modules
        self._owner = 0
        self._requests: socket.socket
        self._process: processes.Process

    def start(self, command: Sequence[str], env: Mapping[str, str], output: IO[bytes]) -> processes.Process:
        """Run ``python -m`` with this command as the leader of its own process group, watched over."""
        if not AVAILABLE:
            return processes.run_module(command, env, output)
        if self._owner != os.getpid():
            self._start()
        reading, writing = os.pipe()
        try:
            request = json.dumps({"command": [*command], "env": {**env}}).encode()
            socket.send_fds(self._requests, [request], [output.fileno(), writing])
        finally:
            os.close(writing)
        process = PreloadedProcess([*command], reading)
        processes.watchdog.watch(process.pid)
        return process

    def close(self) -> None:
        """End the process that forks; what it has forked is the watchdog's."""
        if self._owner == os.getpid():
            self._owner = 0
            self._requests.close()
            self._process.wait(timeout=10)

    def _start(self) -> None:
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        env = {**unmeasured(), "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
        command = [sys.executable, "-m", "tests.support.preloaded", str(theirs.fileno()), *self.modules]
        if "coverage" in sys.modules:
            command.append("coverage")
        self._process = processes.spawn(command, env=env, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        theirs.close()
        self._owner = os.getpid()


celery = Preloaded(*CELERY)
rq = Preloaded(*RQ)
http = Preloaded(*HTTP)


def fork_on_request(requests: socket.socket) -> Callable[[], None] | None:
    """Fork for each request and report each end; return what to run in a child, and None once nobody requests more."""
    poll = select.poll()
    poll.register(requests, select.POLLIN)
    running: dict[int, tuple[int, int]] = {}  # by pidfd: the pid, and where its end is reported
    while True:
        for ready, _ in poll.poll():
            if ready != requests.fileno():
                pid, reports = running.pop(ready)
                _, status = os.waitpid(pid, 0)
                poll.unregister(ready)
                _report(reports, "status", os.waitstatus_to_exitcode(status))
                os.close(reports)
                os.close(ready)
                continue
            data, fds, _, _ = socket.recv_fds(requests, MESSAGE_BYTES, 2)
            if not data:
                return None
            output, reports = fds
            pid = os.fork()
            if not pid:
                os.setsid()
                _report(reports, "pid", os.getpid())
                requests.close()
                for each in (*running, *(theirs for _, theirs in running.values()), reports):
                    os.close(each)
                for number in (1, 2):
                    os.dup2(output, number)
                os.close(output)
                return lambda: _run(**json.loads(data))
            os.close(output)
            watched = os.pidfd_open(pid)
            running[watched] = pid, reports
            poll.register(watched, select.POLLIN)


def _report(reports: int, what: str, number: int) -> None:
    try:
        os.write(reports, f"{what} {number}\n".encode())
    except BrokenPipeError:  # the test run has ended
        pass


def _run(command: list[str], env: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(env)
    sys.path[:] = [path for path in sys.path if path != str(ROOT)]
    sys.path[:0] = [os.getcwd(), *filter(None, env.get("PYTHONPATH", "").split(os.pathsep))]
    if measured():
        import coverage

        coverage.process_startup()
    if slowness.SLOW in env:
        slowness.slow_down(env[slowness.SLOW])
    module, *sys.argv[1:] = command
    if not hasattr(sys.modules.get(module), "__path__"):  # of a package, its `__main__` is run
        sys.modules.pop(module, None)  # else runpy warns that it is run once more
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def main() -> None:
    """Import the modules, and serve."""
    requests = socket.socket(fileno=int(sys.argv[1]))
    for module in sys.argv[2:]:
        importlib.import_module(module)
    gc.freeze()
    run = fork_on_request(requests)
    if run is not None:
        run()


if __name__ == "__main__":
    main()
