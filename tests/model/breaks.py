"""The lines that protect, each taken away in a copy of the source: after how many states the model finds out.

`python -m tests.model.breaks [NAME ...]` prints the table. The list is the simulation's, without what is not in the
model.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.simulation.breaks import BREAKS as SIMULATED
from tests.simulation.breaks import kind_of
from tests.support.gauntlet.breaks import PACKAGE, ROOT

#: Of the simulation's, what is in code that the model does not run.
ELSEWHERE = {
    "a duplicate is acked without a copy": "publishing a copy",
    "a copy is always the first": "publishing a copy",
    "copies have one token": "publishing a copy",
    "a copy waits as long as its number says": "how long a copy waits",
    "a copy waits longer than its broker": "how long a copy waits",
    "the task id is the owner": "the worker's main process",
    "an owner in the message counts": "the worker's main process",
    "a lost child keeps its lease": "the worker's main process",
    "an error ends the heartbeat": "the heartbeat's thread",
    "a message is put back before its lease": "the worker's main process",
    "a retry that the broker does not take is dropped": "publishing a retry",
    "a store that failed is not asked again": "the breaker",
    "messages are acked before they run": "Celery's options",
    "a lost child fails its task": "Celery's options",
    "a lease is given back before its child is killed": "the worker's main process",
    "a child that hit its hard limit keeps its lease": "the worker's main process",
    "a hard limit with its message back is no crash": "the worker's main process",
    "a final failure is released": "failures that are remembered",
    "a final failure is a result": "failures that are remembered",
    "a message fails for its own operation": 'on_conflict="raise"',
    "what is replaced by itself is done": "replacements",
    "what is replaced by itself is its continuation": "replacements",
}

#: What the model does not find, and why.
UNSEEN: dict[str, str] = {
    **dict.fromkeys(
        (
            "a quick retry is a lost lease",
            "what a retry leaves is answered as a duplicate",
            "a run that gave up answers",
            "what was given up is renewed",
        ),
        "bodies that go on after their retry",
    ),
    **dict.fromkeys(
        (
            "a run that loses its lease acks for good",
            "an interrupted acquire keeps its lease",
            "a lease that was granted late is kept",
            "an interrupted ending is not repeated",
        ),
        "a body that is interrupted",
    ),
    **dict.fromkeys(
        (
            "a message goes back without a pause",
            "a look at a lease is trusted from its reply",
        ),
        "how long something takes",
    ),
    **dict.fromkeys(
        (
            "a lost run that cannot settle answers",
            "a look that finds a lease lost says nothing",
            "a run does not clear the mark of its attempts",
            "a failure does not clear the mark of its attempts",
            "a run does not end its task's waiting",
            "a copy of an older attempt does not wait its turn",
        ),
        "nothing in its states tells the difference",
    ),
    **dict.fromkeys(
        (
            "tasks that take turns are no crash loop",
            "a lost child is no crash",
            "a retry that overtakes counts as a crash",
            "a crash that was noticed is not counted",
            "a failure does not end a row of crashes",
        ),
        "more crashes than its states have",
    ),
}

BREAKS = {name: edits for name, edits in SIMULATED.items() if kind_of(name) == "charges" and name not in ELSEWHERE}


def _run(name: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Run the model on a copy of the library without a line that protects."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(ROOT / PACKAGE, Path(folder) / PACKAGE, ignore=shutil.ignore_patterns("__pycache__"))
        for edit in BREAKS[name]:
            edit.apply(Path(folder))
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([folder, str(ROOT)])}
        command = [sys.executable, "-m", "tests.model", "--broken", *options]
        return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)


def found_after(name: str, *options: str) -> tuple[int | None, str]:
    """Return after how many states a break is found, None if it is not, and what was found."""
    run = _run(name, *options)
    found = re.search(r"^BROKEN: (.*)", run.stdout, re.MULTILINE)
    states = sum(int(count) for count in re.findall(r": (\d+) states", run.stdout))
    if found is None:
        assert run.returncode == 0, run.stdout + run.stderr
        return None, f"not within {states} states"
    return states, found[1]


def run_without(name: str) -> int:
    """Print what the model says without a line that protects."""
    run = _run(name)
    print(run.stdout + run.stderr)
    return run.returncode


def main() -> None:
    """Print the table."""
    missed, names = 0, sys.argv[1:] or list(BREAKS)
    for name in names:
        states, why = found_after(name)
        missed += states is None
        print(f"{name:50} {states if states is not None else 'not found':>9}  {why}", flush=True)
    print(f"{len(names) - missed} of {len(names)} found")


if __name__ == "__main__":
    main()
