"""Processes that come and go leave their numbers to each other: files are as many as processes at a time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from celery_idempotent.metrics.prometheus import DIRECTORY
from tests.support.exposition import samples

pytest.importorskip("prometheus_client")

ROOT = Path(__file__).parents[2]

SETUP = """
import os, signal, sys
import prometheus_client
from celery_idempotent import events
from celery_idempotent.events import emit
from celery_idempotent.metrics import prometheus

prometheus.install(short_lived=True)

def work(end):
    emit(events.Acquired("k", "t", fence=os.getpid()))
    if end == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    emit(events.Completed("k", "t", fence=os.getpid(), ran=1.0))
"""

ONE = SETUP + "work(sys.argv[1])"

#: A parent that counts too, and forks while it does.
FAMILY = (
    SETUP
    + """
work("well")
gone = []
for end in ("well", "killed", "well"):
    pid = os.fork()
    if not pid:
        work(end)
        os._exit(0)
    os.waitpid(pid, 0)
work("well")
print(prometheus_client.generate_latest(prometheus.registry()).decode())
"""
)

#: Two children at a time, one of which holds a lease while its numbers are read, and then is killed.
TOGETHER = (
    SETUP
    + """
def read():
    return prometheus_client.generate_latest(prometheus.registry()).decode()

ready, told = os.pipe()
pids = []
for _ in range(2):
    pid = os.fork()
    if not pid:
        emit(events.Acquired("k", "t", fence=os.getpid()))
        os.write(told, b"x")
        signal.pause()
    pids.append(pid)
    os.read(ready, 1)
print(read())
for pid in pids:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
print("-----")
print(read())
"""
)


def run(code: str, folder: Path, *args: str) -> str:
    env = {**os.environ, "PYTHONPATH": str(ROOT), DIRECTORY: str(folder)}
    done = subprocess.run([sys.executable, "-c", code, *args], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode in (0, -9), done.stderr
    return done.stdout


def exposed(folder: Path) -> dict[tuple[str, ...], float]:
    code = "from celery_idempotent.metrics import prometheus; import prometheus_client as c\n"
    return samples(run(code + "print(c.generate_latest(prometheus.registry()).decode())", folder))


def value(found: dict[tuple[str, ...], float], name: str) -> float:
    return found.get((f"celery_idempotent_{name}", "t"), 0.0)


def test_a_process_goes_on_where_the_one_before_has_ended_or_was_killed(tmp_path: Path) -> None:
    run(ONE, tmp_path, "well")
    files = sorted(path.name for path in tmp_path.iterdir())
    for end in ("killed", "well", "killed", "well"):
        run(ONE, tmp_path, end)
    assert sorted(path.name for path in tmp_path.iterdir()) == files
    found = exposed(tmp_path)
    assert (value(found, "starts_total"), value(found, "completed_total")) == (5, 3)


@pytest.mark.nightly
def test_what_a_killed_process_held_is_live_no_more(tmp_path: Path) -> None:
    run(ONE, tmp_path, "killed")
    assert value(exposed(tmp_path), "live_leases") == 0
    run(ONE, tmp_path, "killed")
    run(ONE, tmp_path, "well")
    assert value(exposed(tmp_path), "live_leases") == 0


def test_a_parent_and_its_children_count_apart(tmp_path: Path) -> None:
    found = samples(run(FAMILY, tmp_path))
    assert (value(found, "starts_total"), value(found, "completed_total")) == (5, 4)
    assert value(found, "live_leases") == 0
    assert len(list(tmp_path.glob("counter_*.db"))) == 2, "the parent's, and one for all its children"


def test_processes_that_live_at_the_same_time_have_a_place_each(tmp_path: Path) -> None:
    while_they_live, after = run(TOGETHER, tmp_path).split("-----")
    assert value(samples(while_they_live), "live_leases") == 2
    assert value(samples(after), "live_leases") == 0
    assert value(samples(after), "starts_total") == 2


def test_celery_is_not_loaded_where_processes_live_for_one_job(tmp_path: Path) -> None:
    assert run(SETUP + "print('celery' in sys.modules)", tmp_path).strip() == "False"
