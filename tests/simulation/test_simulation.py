"""The law holds in every schedule that is tried, and the simulation finds out where a line that protects is missing."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextvars import Context
from dataclasses import asdict

import pytest

from celery_idempotent.core import lease
from celery_idempotent.stores import Claim, Lease, Outcome, Refusal, State, Verdict, rules
from tests.support.docs import soaks

from . import celery
from .breaks import BETWEEN, BREAKS, ROOT, found_after
from .celery import WORKERS, Simulation, make_app, simulated_clock
from .charges import Charges
from .kinds import KINDS, Laws
from .law import Broken, Unended
from .shrink import Breaking, shrink, size
from .threads import Threads
from .world import Choices, Schedule

SCHEDULES = 2000
#: First seeds of those that the nightly run tries beside them, so many each.
NIGHTLY, SCHEDULES_NIGHTLY = (2000, 6500, 11_000, 15_500), 4500
#: Schedules of a soak: so many after those that docs/soaks.md lists.
SOAK_SCHEDULES = int(os.environ.get("SOAK_SCHEDULES", "20000"))


@pytest.fixture(scope="module")
def apps() -> Iterator[list[object]]:
    """The apps of a producer and the workers.

    Coroutines of asgiref that a schedule has thrown away set the variables of their context where they are collected.
    """
    yield [make_app() for _ in range(WORKERS + 1)]
    Context().run(gc.collect)
    lease._current.set(None)


def tried(apps: list[object], seeds: range) -> tuple[dict[int, list[str]], Counter[str]]:
    """Run schedules; return the stories of those that break the law, and counts of what happened in all."""
    broken, laws = {}, Laws()
    with simulated_clock():
        for seed in seeds:
            story: list[str] = []
            try:
                Simulation(Choices(seed), laws.of(seed), apps, story.append).run()
            except Broken:
                broken[seed] = story
            except Unended as why:
                laws.counts["unended"] += 1
                print(f"seed {seed} is {why}")
    counts = laws.counts
    assert counts["runs"] > len(seeds), "bodies that nobody ran prove nothing"
    assert counts["kills"] > len(seeds) / 4
    assert counts["leases lost"] > len(seeds) / 50, "trouble that nobody notices proves nothing"
    happened = ("skipped", "chord", "conflicts", "201 Created", "side by side")
    assert min(counts[name] for name in happened) > len(seeds) / 50
    return broken, counts


@pytest.mark.unmeasured
# A process that is killed leaves what it was about to await.
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
@pytest.mark.timeout(900)  # half a minute of a processor or more than one, of which others may leave it little
@pytest.mark.parametrize(
    ("first", "schedules"),
    [(0, SCHEDULES), *(pytest.param(first, SCHEDULES_NIGHTLY, marks=pytest.mark.nightly) for first in NIGHTLY)],
)
def test_whatever_is_killed_stopped_or_lost_the_law_holds(apps: list[object], first: int, schedules: int) -> None:
    broken, counts = tried(apps, range(first, first + schedules))
    gc.collect()  # here, where the warnings are left out, and not in a later test
    assert not broken, "\n".join(broken.popitem()[1])
    assert not counts["unended"]


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_the_law_holds_in_the_next_schedules(apps: list[object]) -> None:
    first = soaks.next_seed(soaks.PAGE.read_text(encoding="utf-8"))
    broken, counts = tried(apps, range(first, first + SOAK_SCHEDULES))
    numbers = (counts["runs"], counts["kills"], counts["leases lost"], len(broken), counts["unended"])
    soaks.add_schedules(soaks.Schedules(first, first + SOAK_SCHEDULES - 1, *numbers))
    assert not broken, f"{list(broken)}\n" + "\n".join(broken.popitem()[1])


@pytest.mark.unmeasured
def test_a_seed_is_a_schedule_in_whichever_process_it_is_run() -> None:
    told = []
    for hash_seed in ("1", "2"):
        command = [sys.executable, "-W", "ignore", "-m", "tests.simulation", "--verbose", "--runs", "12"]
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
        told.append(run.stdout.splitlines()[:-1])  # the last line has its speed
    assert len(told[0]) > 12 * 20
    assert told[0] == told[1]


@pytest.mark.unmeasured
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("kind", "schedules"),
    [
        ("threads", 80),
        *(pytest.param(kind, 500, marks=pytest.mark.nightly) for kind in KINDS if kind != "greenlets"),
    ],
)
def test_the_law_holds_where_threads_take_turns_between_two_statements(kind: str, schedules: int) -> None:
    command = ["-W", "ignore", "-m", "tests.simulation.statements", "--only", kind, "--runs", str(schedules)]
    run = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert f"{schedules} schedules" in run.stdout


def test_a_seed_is_of_one_kind_and_all_kinds_have_seeds() -> None:
    laws = Laws()
    assert {laws.of(seed).kind for seed in range(16)} == set(KINDS)


@pytest.mark.unmeasured
def test_a_schedule_is_replayed_step_for_step_and_shrunk_to_what_breaks_the_law(
    apps: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rules, "settle", any_holder_settles)
    law = Charges()
    with simulated_clock():
        breaking = Breaking(law, apps)
        seed = next(seed for seed in range(1000) if breaking(Choices(seed, record=True)))
        told: list[list[str]] = []
        found = breaking(Choices(seed, record=True))
        for choices in (Choices(seed), Choices(0, found)):
            told.append([])
            with pytest.raises(Broken):
                Simulation(choices, law, apps, told[-1].append).run()
        assert told[0] == told[1]
        shorter = shrink(found, lambda schedule: breaking(Choices(0, schedule, record=True)))
        assert size(shorter) < size(found) / 2
        again = Schedule(**json.loads(json.dumps(asdict(shorter))))
        assert breaking(Choices(0, again, record=True)) is not None
        for left_out in range(len(again.steps)):
            steps = again.steps[:left_out] + again.steps[left_out + 1 :]
            assert breaking(Choices(0, Schedule(again.kind, steps, again.values))) is None


@pytest.mark.unmeasured
def test_a_schedule_that_is_only_long_breaks_no_law_and_one_that_has_no_end_does(
    apps: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    long = {"calls of ORD-1 #1": 2}
    with simulated_clock():
        simulation = Simulation(Choices(0, Schedule("charges", [], long)), Charges(), apps)
        with pytest.raises(Unended, match="not at its end after 20 steps"):
            simulation.run(most_steps=20)
        monkeypatch.setattr(celery, "ENDS_WITHIN", 0.0)
        simulation = Simulation(Choices(0, Schedule("charges", [], long)), Charges(), apps)
        with pytest.raises(Unended, match=r"at its end only \d+ s after the last that happened to it"):
            simulation.run()
        monkeypatch.setattr(rules, "acquire", nobody_acquires)
        monkeypatch.setattr(celery, "LONGEST", 100.0)
        simulation = Simulation(Choices(0, Schedule("charges", [], long)), Charges(), apps)
        with pytest.raises(Broken, match="not at its end 100 s after the last that happened to it"):
            simulation.run()


def nobody_acquires(key: str, row: rules.Row | None, claim: Claim, now: int) -> tuple[Refusal, rules.Row]:
    """Another one holds whatever is asked for, for ever."""
    row = row or rules.Row(State.IN_PROGRESS, now, "another", expires=now + 10**12)
    row.lease_end = now + 6_000_000
    return Refusal(Verdict.CONFLICT, rules.view(key, row, now, claim)), row


def any_holder_settles(row: rules.Row | None, lease: Lease, outcome: Outcome, ttl: float, now: int) -> rules.Row:
    """What is settled may be settled again, by whoever comes."""
    return rules.Row(outcome.state, lease.fence, payload=outcome.payload, ended=now, expires=now + int(ttl * 1e6))


@pytest.mark.unmeasured
def test_a_duplicate_waits_for_a_retry_whose_id_has_failed_before(apps: list[object]) -> None:
    values = {
        "calls of ORD-1 #1": 2,
        "publishes of ORD-1-0 #1": 2,
        "raises #1": 0.2,
        "run of ORD-1: raises #1": True,
        "retries #1": 0.3,
        "quietly #1": True,
        "run of ORD-1: retries #1": True,
        "run of ORD-1: retries after #1": 8,
    }
    with simulated_clock():
        Simulation(Choices(0, Schedule("charges", [], values)), Charges(), apps).run()


@pytest.mark.unmeasured
def test_what_was_replaced_by_itself_and_is_sent_again_runs_once_the_replacement_has_died(apps: list[object]) -> None:
    """Also if that had its lease as a message that was delivered again."""
    steps = [
        *("worker-2: gets a message", "worker-2: tells the broker", "worker-1: cut off from the store"),
        *("a message is delivered again", "worker-1: killed", "a message is delivered again"),
        *("worker-2 heartbeat", "worker-2: cut off from the store"),
    ]
    values = {
        "visibility #1": 12.0,
        "takes #1": [0, 0, 1, 9],
        "calls later #1": 1,
        "run of ORD-1: after #1": 1,
        "run of ORD-1: replaces itself #1": True,
        "down for #1": 19.665758,
        "run of ORD-1: before #2": 1,
        "cut off for #2": 3.523365,
        "a lost request takes #3": 1.0,
    }
    with simulated_clock():
        Simulation(Choices(0, Schedule("threads", steps, values)), Threads(), apps).run()


@pytest.mark.parametrize("name", BREAKS)
def test_what_a_break_replaces_is_in_the_source_once(name: str) -> None:
    for edit in BREAKS[name]:
        text = (ROOT / "celery_idempotent" / edit.file).read_text(encoding="utf-8")
        assert text.count(edit.old) == 1, f"{edit.file}: {edit.old!r}"


@pytest.mark.unmeasured
@pytest.mark.parametrize("name", ["a live lease is no conflict", "a duplicate is acked without a copy", *BETWEEN])
def test_a_line_that_is_missing_is_found(name: str) -> None:
    count, why = found_after(name, 100)
    assert count is not None
    print(f"{name}: after {count} schedules: {why}")
