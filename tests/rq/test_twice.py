"""The table of RQ's ways to run a job twice holds: all of it among the soak tests, else what no other test shows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.rq.twice import MODES, WAYS, Mode, Way, held_up, killed_after_the_body, play, written

pytestmark = [pytest.mark.worker, pytest.mark.thorough]


def test_the_page_has_every_way_with_one_charge_for_who_has_the_decorator_and_more_for_who_has_not() -> None:
    table = written()
    assert list(table) == [way.text for way in WAYS]
    for bare, *decorated in table.values():
        assert charges(bare) == "2"
        assert len(decorated) == len(MODES) - 1
        assert {charges(cell) for cell in decorated} == {"1"}


def charges(cell: str) -> str:
    return cell.partition(";")[0].rpartition(" / ")[2]


def cells(*, soak: bool) -> list[Any]:
    """Return the cells of the table that are staged each time, or those that are soak tests, as parameters."""
    brief = [(killed_after_the_body, "with the decorator")]
    brief += [(play, "with IdempotentWorker") for play in (killed_after_the_body, held_up)]
    return [
        pytest.param(way, mode, id=f"{way.name}-{mode.name.replace(' ', '-')}", marks=[pytest.mark.soak] * soak)
        for way in WAYS
        for mode in MODES
        if ((way.play, mode.name) in brief) is not soak
    ]


@pytest.mark.parametrize(("way", "mode"), cells(soak=False) + cells(soak=True))
def test_what_the_page_says_of_it_happens(way: Way, mode: Mode, fresh_redis: Callable[[], str], tmp_path: Path) -> None:
    """The other cells: the worker sees the same deaths in `test_idempotent_worker` and `test_deaths`, and `test_keys`
    has each job that is done once more; what RQ does alone is RQ's.
    """
    counts = str(play(way, mode, fresh_redis(), tmp_path))
    # Seconds are those of one run, on one machine.
    assert counts.partition(";")[0] == written()[way.text][MODES.index(mode)].partition(";")[0]
