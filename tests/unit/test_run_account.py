"""The account that the soak keeps of runs finds what breaks the law, and nothing else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.celery.journal import Journal
from tests.support.faults.run_account import Account

ALIVE, GONE, MAIN = os.getpid(), 2**22 + 1, 2**22 + 2


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal"


def account(path: Path, *told: tuple[int, str, int]) -> Account:
    lines = [
        f'{at}.0 {pid} told%20{kind} key {{"fence": {fence}, "reason": ""}}\n'
        for at, (pid, kind, fence) in enumerate(told)
    ]
    path.write_text("".join(lines))
    return Account(Journal(path))


def test_runs_that_ended_once_are_no_fault(path: Path) -> None:
    told = account(path, (ALIVE, "Acquired", 1), (ALIVE, "Released", 1), (GONE, "TakenOver", 2), (GONE, "Completed", 2))
    assert told.faults() == told.live() == told.died() == []
    assert told.kinds == {"starts": 2, "Released": 1, "Completed": 1}


def test_the_last_run_of_a_process_that_is_gone_has_died_with_it(path: Path) -> None:
    told = account(path, (GONE, "Acquired", 1), (MAIN, "Released", 1))
    assert (told.faults(), told.live(), told.died()) == ([], [], [(("key", 1), GONE)])


def test_a_run_that_goes_on_is_live(path: Path) -> None:
    told = account(path, (ALIVE, "Acquired", 1))
    assert (told.faults(), told.live(), told.died()) == ([], [(("key", 1), ALIVE)], [])


@pytest.mark.parametrize(
    ("told", "fault"),
    [
        ([(GONE, "Acquired", 1), (GONE, "Acquired", 2), (GONE, "Completed", 2)], "began 1 times, ended 0 times"),
        ([(ALIVE, "Acquired", 1), (ALIVE, "Released", 1), (ALIVE, "LeaseLost", 1)], "began 1 times, ended 2 times"),
        ([(ALIVE, "Completed", 1)], "ended and never began"),
        (
            [(GONE, "Acquired", 1), (GONE, "Completed", 1), (MAIN, "Released", 1)],
            "was released 1 times for 0 that died",
        ),
    ],
    ids=["it was not told to end", "it was told to end twice", "it was not told to begin", "it was released as well"],
)
def test_what_breaks_the_law_is_found(path: Path, told: list[tuple[int, str, int]], fault: str) -> None:
    [found] = account(path, *told).faults()
    assert found.endswith(fault)
