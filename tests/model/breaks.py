"""The lines that protect, each taken away in a copy of the source: after how many states the model finds out.

`python -m tests.model.breaks [NAME ...]` prints the table. The list is the simulation's, without what is not in the
model, and more.
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
from tests.simulation.breaks import DELIVERY, GUARD, HEARTBEAT, LEASE, RULES, kind_of
from tests.support.gauntlet.breaks import PACKAGE, ROOT, Edit

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
            "a lost run that has retried waits",
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

MORE: dict[str, list[tuple[str, str, str]]] = {
    "what is published on purpose is superseded": [(RULES, "    if not claim.is_copy:\n", "    if False:\n")],
    "an attempt that was retried runs again": [
        (RULES, "if claim.attempt < row.attempts.get(claim.task_id, 0):", "if False:")
    ],
    "a lease that ran out is not taken over": [
        (RULES, "row.state is State.IN_PROGRESS and row.lease_end > now", "row.state is State.IN_PROGRESS")
    ],
    "any settle of what is settled is accepted": [
        (RULES, "if row.state is outcome.state and row.fence == lease.fence:", "if row.state is outcome.state:")
    ],
    "a renewal does not extend the lease": [(RULES, "    _extend(row, lease.claim, now)\n    if now", "    if now")],
    "a record is gone with its lease": [
        (RULES, "row.expires = row.lease_end + int(claim.keep_ttl * SECOND)", "row.expires = row.lease_end")
    ],
    "a record is gone before its retry is due": [(RULES, "row.expires += int(release.retry_in * SECOND)", "pass")],
    "a result is not kept": [(RULES, "expires=now + int(ttl * SECOND),", "expires=now,")],
    "a run whose record is gone is not settled": [
        (
            RULES,
            "    row = row or forgotten(lease)\n    if row.state is outcome",
            "    if row is None:\n        return None\n    if row.state is outcome",
        )
    ],
    "a lease whose record is gone is not renewed": [
        (RULES, "if row is None and not lease.claim.revive:", "if row is None:")
    ],
    "a retry that overtakes counts as a crash": [
        (
            RULES,
            "lapsed = row.state is State.IN_PROGRESS and not ended_by_publishing",
            "lapsed = row.state is State.IN_PROGRESS",
        )
    ],
    "a crash that was noticed is not counted": [(RULES, "        row.crashes += 1\n", "        pass\n")],
    "a failure does not end a row of crashes": [
        (
            RULES,
            "elif release.reason not in _KEEPS_CRASHES:\n        row.crashes = 0",
            "elif release.reason not in _KEEPS_CRASHES:\n        pass",
        )
    ],
    "a run does not clear the mark of its attempts": [
        (RULES, "    row.attempts.pop(claim.task_id, None)\n    if claim", "    if claim")
    ],
    "a failure does not clear the mark of its attempts": [
        (
            RULES,
            "elif release.reason not in _KEEPS_MARK:\n        row.attempts.pop(row.task_id, None)",
            "elif release.reason not in _KEEPS_MARK:\n        pass",
        )
    ],
    "a run does not end its task's waiting": [
        (RULES, "    row.waiting.pop(claim.task_id, None)\n    row.attempts", "    row.attempts")
    ],
    "a copy of an older attempt does not wait its turn": [
        (RULES, "        return claim.attempt < attempt\n", "        return claim.attempt > attempt\n")
    ],
    "a released record still has its lease": [
        (RULES, "row.state, row.reason, row.holder = State.RELEASED, release", "row.reason, row.holder = release")
    ],
    "a renewal goes on while a result is recorded": [
        (GUARD, "        self.heartbeat.forget(held)  # not before: a large", "        # not before: a large")
    ],
    "a settle that is refused counts as done": [
        (
            GUARD,
            "            except LeaseLost:\n                return _lost(delivery, held, error)",
            "            except LeaseLost:\n                return True",
        )
    ],
    "a settle that was given up on counts as lost": [
        (
            GUARD,
            "                if held.lost:\n                    return _lost(delivery, held, error)\n          ",
            "                if True:\n                    return _lost(delivery, held, error)\n          ",
        )
    ],
    "a duplicate that meets a holder is dropped": [
        (GUARD, "                    return _busy_with(found.record)\n", "                    return Dropped()\n")
    ],
    "a superseded copy waits": [
        (GUARD, "        delivery.emit(events.Superseded)\n        return Dropped()", "        return Busy(1.0)")
    ],
    "a lost run whose record is gone is dropped": [
        (
            GUARD,
            "        if record is None:\n            return Busy(STORE_PAUSE[1])",
            "        if record is None:\n            return Dropped()",
        )
    ],
    "a lost run is dropped": [
        (
            GUARD,
            "            return self._replay(delivery, record)\n        return _busy_with(record)",
            "            return self._replay(delivery, record)\n        return Dropped()",
        )
    ],
    "a lost run that has retried waits": [
        (
            GUARD,
            "        if isinstance(ending, Release) and ending.reason is Reason.RETRY:\n            return Dropped()",
            "        if False:\n            return Dropped()",
        )
    ],
    "without the store a task runs": [(GUARD, 'if self.policy.on_store_error == "run":', "if True:")],
    "without the store a task fails": [
        (
            GUARD,
            'if self.policy.on_store_error == "raise":\n            raise error\n        if',
            "if True:\n            raise error\n        if",
        )
    ],
    "a refused release counts as accepted": [(GUARD, "        if not released:\n", "        if False:\n")],
    "a check does not hear that the lease is lost": [
        (
            LEASE,
            "            if not self.store.renew([self.lease]):",
            "            self.store.renew([self.lease])\n            if True:",
        )
    ],
    "a lease is renewed when it has run out": [
        (LEASE, "self.due = since + ttl / RENEWALS_PER_TTL", "self.due = since + ttl")
    ],
    "a dead child's lease is not given back": [
        (LEASE, "released = store.release(Lease(claim, 0), Release(reason))", "released = False")
    ],
    "a renewal that failed is the last": [
        (
            HEARTBEAT,
            "holding.due = monotonic() + min(RETRY_PAUSE, holding.lease.claim.lease_ttl / 10)",
            "holding.due = monotonic() + 3600.0",
        )
    ],
    "a lease that was settled is found lost": [(HEARTBEAT, "elif id(holding) in self.holdings:", "else:")],
    "a failure counts as a crash": [(DELIVERY, "Reason.CRASHED if fatal else Reason.FAILED", "Reason.CRASHED")],
    "callbacks of a replay get ids of their own": [
        (
            DELIVERY,
            "        canvas.assign_callback_ids(request, task.app, record.fence)",
            "        canvas.assign_callback_ids(request, task.app, 0)",
        )
    ],
    "callbacks are dispatched by every replay": [(DELIVERY, "if request.id in record.dispatched:", "if False:")],
}

BREAKS: dict[str, tuple[Edit, ...]] = {
    **{name: edits for name, edits in SIMULATED.items() if kind_of(name) == "charges" and name not in ELSEWHERE},
    **{name: tuple(Edit(*edit) for edit in edits) for name, edits in MORE.items()},
}


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
