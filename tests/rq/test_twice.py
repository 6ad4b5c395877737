"""The table of RQ's ways to run a job twice holds, cell by cell."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.rq.twice import MODES, WAYS, Mode, Way, play, written

pytestmark = [pytest.mark.worker, pytest.mark.thorough]


def test_the_page_has_every_way_with_one_charge_for_who_has_the_decorator_and_more_for_who_has_not() -> None:
    table = written()
    assert list(table) == [way.text for way in WAYS]
    for bare, *decorated in table.values():
        assert "2 charged" in bare
        assert len(decorated) == len(MODES) - 1
        assert all(", 1 charged" in cell for cell in decorated)


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name.replace(" ", "-"))
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_what_the_page_says_of_it_happens(way: Way, mode: Mode, fresh_redis: Callable[[], str], tmp_path: Path) -> None:
    counts = str(play(way, mode, fresh_redis(), tmp_path))
    # Seconds are those of one run, on one machine.
    assert counts.partition(";")[0] == written()[way.text][MODES.index(mode)].partition(";")[0]
