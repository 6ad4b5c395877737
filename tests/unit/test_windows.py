"""What Python lacks on Windows, where Celery runs with the pools solo and threads: nothing of it is needed there.

There is no Windows here. A process of its own has Celery, the drivers and what else is not ours loaded, and then what
Windows lacks taken out of the standard library. It finds a use of these names; what Windows does otherwise it does not.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import click
import pytest

from celery_idempotent.cli import cli
from celery_idempotent.errors import ConfigurationError
from celery_idempotent.metrics import prometheus

SCRIPT = """
import fcntl, mmap, os, pkgutil, signal, sqlite3, sys, time
import celery.bin.base, celery.concurrency.thread, celery.contrib.testing.worker, celery.worker
import kombu.transport.memory, kombu.transport.virtual
import click, prometheus_client, redis, redis.cluster, redis.sentinel, rich.live, rich.table, uvicorn

assert not [name for name in sys.modules if name.startswith("celery_idempotent")]
for name in ("fcntl", "grp", "pwd", "resource", "termios", "pty", "tty"):
    sys.modules[name] = None  # an ImportError, as there
for module, names in {
    os: "fork forkpty register_at_fork getuid geteuid killpg getpgid setsid waitpid uname getloadavg WNOHANG chown",
    signal: "SIGHUP SIGKILL SIGQUIT SIGUSR1 SIGUSR2 SIGALRM SIGCHLD setitimer alarm pthread_sigmask pthread_kill",
    time: "clock_gettime clock_gettime_ns CLOCK_REALTIME CLOCK_MONOTONIC",
}.items():
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)


def kill(pid, number):
    raise AssertionError(f"Windows ends the process {pid} by signal {number}, also by 0")


os.kill = kill

import celery_idempotent

for module in pkgutil.walk_packages(celery_idempotent.__path__, "celery_idempotent."):
    if not module.name.startswith(("celery_idempotent.django", "celery_idempotent.rq", "celery_idempotent.cli.demo")):
        if not module.name.endswith("__main__") and ".stores.django" not in module.name:
            __import__(module.name)

from celery import Celery
from celery_idempotent import IdempotentTask, idempotent

app = Celery("shop", broker="memory://", backend="cache+memory://")
app.conf.update(idempotency_store=sys.argv[1], broker_transport_options={"polling_interval": 0.02})
effects = []


@app.task(base=IdempotentTask, name="charge", idempotency={"key": "order"})
def charge(order):
    effects.append(order)
    return f"charged {order}"


@app.task(base=IdempotentTask, name="index", unique="document")
def index(document):
    return document


@idempotent(store=sys.argv[1], key="order")
def refund(order):
    effects.append(order)
    return f"refunded {order}"


assert [refund("ORD-1"), refund("ORD-1")] == ["refunded ORD-1"] * 2
assert [charge.apply(("ORD-2",)).get(), charge.apply(("ORD-2",)).get()] == ["charged ORD-2"] * 2
with celery.contrib.testing.worker.start_worker(app, pool=sys.argv[2], concurrency=1, perform_ping_check=False):
    for _ in range(2):
        assert charge.delay("ORD-3").get(timeout=20) == "charged ORD-3"
    assert index.delay("ORD-4").get(timeout=20) == "ORD-4"
assert effects == ["ORD-1", "ORD-2", "ORD-3"], effects

from celery_idempotent.cli import cli

assert not cli.main(["--store", sys.argv[1], "list"], standalone_mode=False)
"""


@pytest.mark.parametrize("pool", ["threads", "solo"])
def test_what_windows_lacks_is_not_needed_for_the_pools_that_celery_has_there(tmp_path: Path, pool: str) -> None:
    command = [sys.executable, "-c", SCRIPT, f"sqlite:///{tmp_path / 'idempotency.db'}", pool]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert (ran.returncode, "charge::ORD-3" in ran.stdout) == (0, True), ran.stdout + ran.stderr


def test_what_needs_more_than_windows_has_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delattr(os, "killpg")
    monkeypatch.setitem(sys.modules, "fcntl", None)
    monkeypatch.setenv(prometheus.DIRECTORY, str(tmp_path))
    with pytest.raises(click.ClickException, match="Run the demo on Linux or macOS"):
        cli.main(["demo"], standalone_mode=False)
    with pytest.raises(ConfigurationError, match="Expected a system that can fork, as short_lived=True needs"):
        prometheus.install(short_lived=True)


def test_a_process_is_not_looked_for_where_that_would_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.delattr(os, "kill")
    assert prometheus._is_alive(os.getpid())
