"""The law holds in every schedule that is tried, and the simulation finds out where a line that protects is missing."""

from __future__ import annotations

import pytest

from .breaks import BREAKS, ROOT, found_after
from .celery import WORKERS, Simulation, make_app, simulated_clock
from .law import Broken, Law

SCHEDULES, SOAK_SCHEDULES = 600, 100_000


@pytest.fixture(scope="module")
def apps() -> list[object]:
    """The apps of a producer and the workers."""
    return [make_app(f"app-{number}") for number in range(WORKERS + 1)]


def stories(apps: list[object], seeds: range) -> dict[int, list[str]]:
    """Run schedules, and return those that break the law."""
    broken = {}
    with Law() as law, simulated_clock():
        for seed in seeds:
            story: list[str] = []
            try:
                Simulation(seed, law, apps, story.append).run()
            except Broken:
                broken[seed] = story
    assert law.counts["runs"] > len(seeds), "bodies that nobody ran prove nothing"
    assert law.counts["kills"] > len(seeds) / 4
    return broken


@pytest.mark.unmeasured
def test_whatever_is_killed_stopped_or_lost_the_law_holds(apps: list[object]) -> None:
    broken = stories(apps, range(SCHEDULES))
    assert not broken, "\n".join(broken.popitem()[1])


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_the_law_holds_in_a_hundred_thousand_schedules(apps: list[object]) -> None:
    broken = stories(apps, range(SCHEDULES, SOAK_SCHEDULES))
    assert not broken, "\n".join(broken.popitem()[1])


@pytest.mark.unmeasured
def test_a_seed_is_a_schedule(apps: list[object]) -> None:
    told = []
    for _ in range(2):
        lines: list[str] = []
        with Law() as law, simulated_clock():
            Simulation(7, law, apps, lines.append).run()
        told.append(lines)
    assert len(told[0]) > 20
    assert told[0] == told[1]


@pytest.mark.parametrize("name", BREAKS)
def test_what_a_break_replaces_is_in_the_source_once(name: str) -> None:
    for edit in BREAKS[name]:
        text = (ROOT / "celery_idempotent" / edit.file).read_text(encoding="utf-8")
        assert text.count(edit.old) == 1, f"{edit.file}: {edit.old!r}"


@pytest.mark.unmeasured
@pytest.mark.parametrize("name", ["a live lease is no conflict", "a duplicate is acked without a copy"])
def test_a_line_that_is_missing_is_found(name: str) -> None:
    count, why = found_after(name, 100)
    assert count is not None
    print(f"{name}: after {count} schedules: {why}")
