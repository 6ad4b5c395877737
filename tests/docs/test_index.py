"""The index of the tests, the tests, and the pages that say what they show, name the same."""

from __future__ import annotations

import re

import pytest

from tests.support.docs import index

pytestmark = pytest.mark.thorough  # the page is the same on every Python


def test_every_ending_of_the_page_is_shown_by_a_test_and_every_test_has_its_row() -> None:
    assert len(index.endings()) >= 30
    assert index.endings().keys() == index.marked().keys()


def test_every_ending_says_what_the_record_is_and_what_celery_does() -> None:
    described = index.endings()
    assert {ending for ending, cells in described.items() if len(cells) != 3 or not all(cells[:2])} == set()


@pytest.mark.parametrize("heading", ["Endings", "Known faults"])
def test_the_index_names_the_tests_that_carry_a_mark(heading: str) -> None:
    old = index.section(index.INDEX, heading)
    assert old[old.index("\n|") :].strip() == index.tables()[heading], "run `python -m tests.support.docs.index`"


def test_the_index_has_every_promise_of_the_page() -> None:
    promised = re.findall(r"^\d\. \*\*(.*?)\*\*", index.section(index.GUARANTEES, "Promised"), re.MULTILINE)
    assert [row[0] for row in index.rows(index.section(index.INDEX, "Promises"))] == [
        promise.rstrip(".") for promise in promised
    ]


def test_the_index_has_everything_that_fails_on_the_page() -> None:
    described = index.rows(index.section(index.GUARANTEES, "What fails, and what happens"))
    indexed = index.rows(index.section(index.INDEX, "What fails"))
    assert [row[:2] for row in indexed] == [row[:2] for row in described]


def test_the_index_names_no_test_that_is_not_there() -> None:
    text = index.INDEX.read_text(encoding="utf-8")
    assert index.missing(text) == []
    assert index.missing("`unit/test_guard.py::test_nothing` `nowhere/` `unit/`") == [
        "unit/test_guard.py::test_nothing",
        "nowhere/",
    ]
