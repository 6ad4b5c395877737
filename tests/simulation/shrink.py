"""A shorter schedule that breaks the law too: delta debugging over what was chosen.

The way is that of A. Zeller and R. Hildebrandt, "Simplifying and isolating failure-inducing input" (IEEE Transactions
on Software Engineering 28, 2002): leave out halves, quarters and so on of what was chosen while the law is broken.
What is left out is chosen as simply as possible, see `world.Choices`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from .celery import Simulation
from .law import Broken, Law, Unended
from .world import Choices, Schedule

T = TypeVar("T")
Run = Callable[[Schedule], "Schedule | None"]


def shrink(schedule: Schedule, breaks: Run) -> Schedule:
    """Return the shortest schedule that is found.

    Arguments:
        schedule: One that breaks the law.
        breaks: Runs one; returns what was chosen in it, up to where the law is broken, or None if it is not.
    """
    before = None
    while size(schedule) != before:
        before = size(schedule)
        schedule = replace(schedule, steps=_fewer(schedule.steps, partial(_breaks_with_steps, breaks, schedule)))
        values = _fewer([*schedule.values.items()], partial(_breaks_with_values, breaks, schedule))
        schedule = replace(schedule, values=dict(values))
    return schedule


def _breaks_with_steps(breaks: Run, schedule: Schedule, steps: list[str]) -> bool:
    return breaks(replace(schedule, steps=steps)) is not None


def _breaks_with_values(breaks: Run, schedule: Schedule, values: list[tuple[str, Any]]) -> bool:
    return breaks(replace(schedule, values=dict(values))) is not None


def size(schedule: Schedule) -> int:
    """Return how much a schedule says."""
    return len(schedule.steps) + len(schedule.values)


def _fewer(items: list[T], breaks: Callable[[list[T]], Any]) -> list[T]:
    """Return items none of which can be left out by itself."""
    if breaks([]):
        return []
    part = max(1, len(items) // 2)
    while True:
        at, removed = len(items), False
        while at > 0:
            fewer = items[: max(0, at - part)] + items[at:]
            if breaks(fewer):
                items, removed = fewer, True
            at -= part
        if part == 1 and not removed:
            return items
        part = part if removed and part == 1 else max(1, part // 2)


class Breaking:
    """Runs schedules that break the law as the first of them did.

    Arguments:
        law: The law.
        apps: As `Simulation` takes them.
    """

    def __init__(self, law: Law, apps: list[Any]) -> None:
        self.law, self.apps = law, apps
        self._why = ""

    def __call__(self, choices: Choices) -> Schedule | None:
        """Return what was chosen until the law was broken; None if it was not, or not in this way."""
        try:
            Simulation(choices, self.law, self.apps).run()
        except Broken as broken:
            why = re.sub(r"[\d.]+|\[.*\]", "", str(broken))
            self._why = self._why or why
            return choices.made if why == self._why else None
        except Unended:
            pass
        return None
