"""The page of endings and the tests that show them say the same."""

from __future__ import annotations

import pytest

from tests.support.docs import endings

pytestmark = pytest.mark.thorough  # the page is the same on every Python


def test_every_ending_of_the_page_is_shown_by_a_test_and_every_test_has_its_row() -> None:
    described = endings.rows(endings.parts()[0])
    assert len(described) >= 30
    assert described.keys() == endings.marked().keys()


def test_every_ending_says_what_the_record_is_and_what_celery_does() -> None:
    described = endings.rows(endings.parts()[0])
    assert {ending for ending, cells in described.items() if len(cells) != 3 or not all(cells[:2])} == set()


def test_the_page_names_the_tests_that_there_are() -> None:
    before, after = endings.parts()
    assert after.strip() == endings.table(list(endings.rows(before))).strip(), (
        "run `python -m tests.support.docs.endings`"
    )
