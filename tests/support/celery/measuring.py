"""Coverage of workers that are going to be killed.

A killed process writes no coverage data. Where coverage is measured, the harness first asks each process of the group
to save what it has (SIGURG, which whoever does not know it ignores), and waits for the answers.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import FrameType

from tests.support import processes
from tests.support.waiting import WaitTimeout, wait_until

SAVE = signal.SIGURG
FOLDER = "COVERAGE_SAVED"
SAVE_SECONDS = 3.0
#: In the folder, once a worker has said that it will answer; examples do not, and are killed without delay.
ANSWERS = "answers"


def measured() -> bool:
    """Say whether this process's children measure their coverage."""
    return "COVERAGE_PROCESS_CONFIG" in os.environ or "COVERAGE_PROCESS_START" in os.environ


def unmeasured() -> dict[str, str]:
    """Return the environment for a child that runs nothing of the library, and would be slow if it were measured."""
    return {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_PROCESS")}


def answer_saves() -> None:
    """Save on request, in a worker and in what it forks. Does nothing where no coverage is measured."""
    if FOLDER in os.environ:
        signal.signal(SAVE, _save)
        (Path(os.environ[FOLDER]) / ANSWERS).touch()


def save(pgid: int, folder: Path) -> None:
    """Have every process of a group save its coverage; one that does not answer loses it, and nothing else."""
    if not measured() or not (folder / ANSWERS).exists():
        return
    for mark in folder.iterdir():
        if mark.name != ANSWERS:
            mark.unlink()
    asked = processes.members(pgid)
    for process in asked:
        os.kill(process.pid, SAVE)
    try:
        wait_until(
            lambda: all((folder / str(process.pid)).exists() or not process.is_running() for process in asked),
            SAVE_SECONDS,
        )
    except WaitTimeout:
        pass


def _save(number: int, frame: FrameType | None) -> None:
    from coverage import Coverage

    current = Coverage.current()
    if current is not None:
        current.save()
    (Path(os.environ[FOLDER]) / str(os.getpid())).touch()
