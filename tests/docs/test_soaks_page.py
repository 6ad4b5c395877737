"""The page of soaks adds up what it lists."""

from __future__ import annotations

from functools import partial

import pytest

from tests.support.docs import soaks
from tests.support.docs.soaks import AIMS, GATEWAY, IN_TRANSACTIONS, PAGE, POSTGRES, SQLITE, Figures, Schedules

pytestmark = pytest.mark.thorough  # the page is the same on every Python


def added_up(page: str, line: str) -> tuple[int, ...]:
    """Return the numbers of a sum line of a page, after its aim."""
    [found] = [each for each in page.splitlines() if each.startswith(f"| {line} |")]
    return tuple(int(cell.replace(",", "")) for cell in found.strip("| ").split(" | ")[2:])


def test_the_sums_of_the_page_are_those_of_its_rows() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert soaks.with_rows(page, soaks.rows(page)) == page
    assert soaks.with_schedules(page, soaks.schedules(page)) == page
    assert added_up(page, GATEWAY)[0] == page.count(f"| {GATEWAY} |") - 1


def test_each_soak_is_a_row_and_counts_in_its_sums() -> None:
    page = soaks.with_rows(PAGE.read_text(encoding="utf-8"), [])
    assert soaks.rows(page) == []
    run = partial(Figures, date="2026-11-26", commit="c298979e")
    listed = [
        run(POSTGRES, 1, kills=1000, operations=200, runs=1200),
        run(SQLITE, 2, kills=300, operations=50, runs=350, duplicates=2, popped=3, lost=1, wrong=4),
        run(GATEWAY, 3, kills=7, operations=3, runs=11, repeated=5, unexplained=6),
    ]
    for count in range(len(listed)):
        page = soaks.with_rows(page, [*soaks.rows(page), listed[count]])
    assert soaks.rows(page) == listed
    assert added_up(page, IN_TRANSACTIONS) == (2, 1300, 250, 1550, 0, 0, 2, 3, 1, 4)
    assert added_up(page, GATEWAY) == (1, 7, 3, 11, 5, 6, 0, 0, 0, 0)


def test_the_aims_stand_beside_the_sums() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert [f"| {line} | {aim:,} kills |" in page for line, aim in AIMS.items()] == [True, True]


def test_schedules_follow_upon_those_that_the_page_lists_and_count_in_its_sums() -> None:
    page = soaks.with_schedules(PAGE.read_text(encoding="utf-8"), [])
    kills = soaks.rows(page)
    assert (soaks.schedules(page), soaks.next_seed(page)) == ([], 0)
    listed = [
        Schedules(0, 99, 210, 60, 3, broken=0, unended=1, date="2026-11-30", commit="c298979e"),
        Schedules(100, 1299, 2500, 700, 41, broken=2, unended=0, date="2026-12-01", commit="c298979e"),
    ]
    page = soaks.with_schedules(page, listed)
    assert (soaks.schedules(page), soaks.next_seed(page), soaks.rows(page)) == (listed, 1300, kills)
    assert "| 1,300 | 1,000,000 | 2,710 | 760 | 44 | 2 | 1 |" in page
