"""The harness itself, with plain Celery: what later tests stand on."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from celery import Celery
from pytest_celery import CeleryTestSetup

from tests.support import preloaded, processes
from tests.support.celery.fixtures import StartWorker
from tests.support.celery.gates import Gates
from tests.support.celery.journal import Journal
from tests.support.celery.measuring import MEASURED_PROCESSES, children, measured
from tests.support.celery.nodes import ROOT, WorkerNode
from tests.support.waiting import WaitTimeout, wait_until

CHARGE = "tests.support.celery.plain_app.charge"


@pytest.mark.smoke
def test_a_worker_runs_a_task_in_a_child_of_its_own(
    start_worker: StartWorker, client_app: Callable[..., Celery], journal: Journal
) -> None:
    node = start_worker()
    result = client_app().tasks[CHARGE].delay("ORD-1")
    assert result.get(timeout=15) == "charged ORD-1"
    assert journal.count("charged", "ORD-1") == 1
    assert journal.entries("charged")[0].pid in node.children()
    node.assert_log_exists("Task tests.support.celery.plain_app.charge")


def test_a_worker_has_as_many_children_as_slots_and_one_group(start_worker: StartWorker) -> None:
    node = start_worker(concurrency=3)
    assert len(node.children()) == 3
    assert node.members() == sorted([node.pid, *node.children()])
    assert {row["pid"] for row in node.get_running_processes_info(["pid"])} == set(node.members())


def test_a_gate_holds_a_body_until_the_test_lets_it_go(
    start_worker: StartWorker, client_app: Callable[..., Celery], journal: Journal, gates: Gates
) -> None:
    gate = gates.close("before")
    node = start_worker()
    result = client_app().tasks[CHARGE].delay("ORD-2")
    assert gate.reached()[0] in node.children()
    assert (journal.count("started"), journal.count("charged")) == (1, 0)
    gate.open()
    assert result.get(timeout=15) == "charged ORD-2"
    assert gates["after"].arrivals == gate.arrivals


@pytest.mark.nightly
def test_a_killed_child_is_replaced_and_its_worker_lives_on(
    start_worker: StartWorker, client_app: Callable[..., Celery], gates: Gates
) -> None:
    gate = gates.close("before")
    node = start_worker(concurrency=1)
    app = client_app()
    app.tasks[CHARGE].delay("ORD-3")
    [pid] = gate.reached()
    node.kill_child(pid)
    gate.open()
    fresh = app.tasks["tests.support.celery.plain_app.whoami"].delay().get(timeout=20)
    assert fresh != pid
    assert fresh in node.children()
    assert node.running


@pytest.mark.smoke
def test_a_killed_group_leaves_no_process(
    start_worker: StartWorker, client_app: Callable[..., Celery], gates: Gates, journal: Journal
) -> None:
    gate = gates.close("before")
    node = start_worker()
    client_app().tasks[CHARGE].delay("ORD-4")
    gate.reached()
    before = node.members()
    node.kill()
    assert len(before) == 3
    assert node.members() == []
    assert journal.count("charged") == 0


def test_a_paused_worker_runs_nothing_until_it_is_resumed(
    start_worker: StartWorker, client_app: Callable[..., Celery], journal: Journal
) -> None:
    node = start_worker()
    node.pause()
    assert {psutil.Process(pid).status() for pid in node.members()} == {psutil.STATUS_STOPPED}
    result = client_app().tasks[CHARGE].delay("ORD-5")
    assert journal.count("started") == 0
    node.resume()
    assert result.get(timeout=15) == "charged ORD-5"


@pytest.mark.nightly
def test_a_warm_stop_lets_the_running_task_end(
    start_worker: StartWorker, client_app: Callable[..., Celery], journal: Journal, gates: Gates
) -> None:
    gate = gates.close("before")
    node = start_worker()
    client_app().tasks[CHARGE].delay("ORD-6")
    gate.reached()
    os.kill(node.pid, signal.SIGTERM)
    node.wait_for_log("Warm shutdown")
    gate.open()
    assert node.wait() == 0
    assert journal.count("charged", "ORD-6") == 1


@pytest.mark.nightly
def test_a_cold_stop_cuts_the_running_task_off(
    start_worker: StartWorker, client_app: Callable[..., Celery], journal: Journal, gates: Gates
) -> None:
    gate = gates.close("before")
    node = start_worker()
    app = client_app()
    app.tasks[CHARGE].delay("ORD-7")
    gate.reached()
    # Celery cuts off what its main process knows to run, and would wait for a body of which it has not heard yet.
    active = app.control.inspect().active
    wait_until(lambda: any(task["worker_pid"] for tasks in (active() or {}).values() for task in tasks))
    node.quit()
    assert journal.count("charged") == 0
    assert node.members() == []


@pytest.mark.nightly
def test_a_restarted_worker_is_ready_anew(start_worker: StartWorker, client_app: Callable[..., Celery]) -> None:
    node = start_worker()
    first = node.pid
    node.restart()
    assert node.pid != first
    assert client_app().tasks["tests.support.celery.plain_app.whoami"].delay().get(timeout=15) in node.children()


def test_a_worker_that_cannot_start_shows_its_log(start_worker: StartWorker) -> None:
    with pytest.raises(RuntimeError, match="no_such_module"):
        start_worker("tests.celery.no_such_module")


def test_threads_run_tasks_in_the_main_process(start_worker: StartWorker, client_app: Callable[..., Celery]) -> None:
    node = start_worker(pool="threads")
    assert client_app().tasks["tests.support.celery.plain_app.whoami"].delay().get(timeout=15) == node.pid


@pytest.mark.nightly
@pytest.mark.smoke
def test_the_nodes_make_a_setup_of_pytest_celery(celery_setup: CeleryTestSetup, journal: Journal) -> None:
    assert celery_setup.ready(ping=True, control=True)
    result = celery_setup.app.send_task(CHARGE, ("ORD-8",))
    assert result.get(timeout=15) == "charged ORD-8"
    assert journal.count("charged", "ORD-8") == 1
    celery_setup.worker.assert_log_exists("ORD-8")


@pytest.mark.nightly
def test_a_setup_survives_the_restart_of_its_nodes(celery_setup: CeleryTestSetup) -> None:
    celery_setup.worker.kill()
    celery_setup.broker.restart()
    celery_setup.worker.restart()
    assert celery_setup.app.send_task(CHARGE, ("ORD-9",)).get(timeout=15) == "charged ORD-9"


def test_nothing_outlives_a_test_run_that_is_killed(tmp_path: Path) -> None:
    script = (
        "import sys, time\n"
        "from tests.support import processes\n"
        "child = processes.spawn([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, env=env, text=True)
    assert run.stdout is not None
    pgid = int(run.stdout.readline())
    assert processes.members(pgid)
    run.kill()
    run.communicate(timeout=10)
    wait_until(lambda: not processes.members(pgid), message=f"group {pgid} to be killed by the watchdog")


def test_a_failing_test_shows_its_journal_its_workers_logs_and_what_they_did(
    request: pytest.FixtureRequest, start_worker: StartWorker, journal: Journal
) -> None:
    node = start_worker()
    children = node.children()
    journal.write("seen", "a key with spaces", note="x")
    item = request.node
    call = pytest.CallInfo.from_call(lambda: pytest.fail("on purpose"), when="call")
    report = item.ihook.pytest_runtest_makereport(item=item, call=call)
    sections = dict(report.sections)
    assert "a key with spaces" in sections["journal"]
    log = sections[f"log of {node.name()}"]
    assert "ready." in log
    assert log.count("Fatal Python error: Aborted") == 1 + len(children)
    assert "in asynloop" in log


def test_a_wait_that_ends_in_vain_says_what_it_waited_for(journal: Journal) -> None:
    journal.write("started", "ORD-10")
    with pytest.raises(WaitTimeout, match=r"1 x charged of ORD-10; the journal:\n.*started"):
        journal.wait_for_count(1, "charged", "ORD-10", timeout=0.05)


def test_a_worker_that_was_never_started_is_torn_down_quietly(tmp_path: Path) -> None:
    node = WorkerNode("tests.support.celery.plain_app", "redis://127.0.0.1:1/0", directory=tmp_path)
    node.teardown()
    assert node.container.status == "exited"


REPORT = """
import json, os, signal, sys
def is_of_libffi(fd):  # which newer ones keep open once it is used
    path = f"/proc/self/fd/{fd}"
    return os.path.exists(path) and "libffi" in os.readlink(path)
print(json.dumps({
    "argv": sys.argv[1:], "paths": sys.path[:2], "name": __name__, "leads": os.getpgid(0) == os.getpid(),
    "env": os.environ.get("COLOUR"), "tests": [name for name in sys.modules if name.endswith("_app")],
    "ends": signal.getsignal(signal.SIGTERM) == signal.SIG_DFL,
    "files": len([fd for fd in os.listdir("/proc/self/fd") if not is_of_libffi(fd)]),
    "celery": "celery" in sys.modules,
}))
sys.exit(3)
"""


def test_a_process_that_is_forked_is_as_a_new_one_but_for_what_it_has_imported(tmp_path: Path) -> None:
    """Its arguments, path, environment, signals, open files, group and exit status."""
    (tmp_path / "report.py").write_text(REPORT)
    env = {**os.environ, "PYTHONPATH": str(tmp_path), "COLOUR": "red"}
    found = []
    for start in (preloaded.celery.start, processes.run_module):
        log = tmp_path / "log"
        with log.open("wb") as output:
            process = start(["report", "one", "two words"], env, output)
        assert process.wait(timeout=20) == process.poll() == 3
        processes.watchdog.forget(process.pid)
        found.append(json.loads(log.read_text()))
    forked, new = found
    assert (forked.pop("celery"), new.pop("celery")) == (True, False)
    assert forked == new
    assert new["argv"] == ["one", "two words"]
    assert (new["env"], new["leads"], new["tests"]) == ("red", True, [])


def test_a_process_that_is_forked_and_killed_is_seen_to_be_so(tmp_path: Path) -> None:
    (tmp_path / "wait.py").write_text("input = __import__('time').sleep(600)")
    with (tmp_path / "log").open("wb") as output:
        process = preloaded.celery.start(["wait"], {**os.environ, "PYTHONPATH": str(tmp_path)}, output)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=0.2)
    assert process.poll() is None
    assert processes.end(process) == -signal.SIGKILL
    assert not processes.members(process.pid)


def test_the_tests_whose_processes_are_measured_are_there() -> None:
    """Else a test that was given another name would cover less, and nobody would know why."""
    for file, names in MEASURED_PROCESSES.items():
        text = (ROOT / "tests" / file).read_text()
        for name in names:
            assert re.search(rf"\b(def|class) {re.escape(name.partition('[')[0])}", text), f"{file} has no {name}"


def test_processes_are_measured_where_they_are_to_be_and_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COVERAGE_PROCESS_CONFIG", "some")
    with children(are_measured=True):
        assert measured()
    with children(are_measured=False):
        assert not measured()
    assert os.environ["COVERAGE_PROCESS_CONFIG"] == "some"
