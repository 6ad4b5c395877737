"""The page of endings, the index of the tests and the tests themselves agree."""

from __future__ import annotations

import re

import pytest

from tests.support.docs import endings

pytestmark = pytest.mark.thorough  # the page is the same on every Python


def test_every_ending_of_the_page_is_shown_by_a_test_and_every_test_has_its_row() -> None:
    described = endings.described()
    assert len(described) >= 30
    assert described.keys() == endings.marked().keys()


def test_every_ending_says_what_the_record_is_and_what_celery_does() -> None:
    assert {name for name, cells in endings.described().items() if len(cells) != 3 or not all(cells[:2])} == set()


def test_the_index_names_the_tests_of_each_ending() -> None:
    _, after = endings.parts()
    wanted = endings.table(list(endings.described()))
    assert after.strip() == wanted.strip(), "run `python -m tests.support.docs.endings`"


def test_every_test_that_the_index_names_is_there() -> None:
    before, _ = endings.parts()
    named = re.findall(r"`([\w/]+\.py)(?:::(\w+))?`", before)
    assert len(named) >= 20
    for path, test in named:
        text = (endings.ROOT / "tests" / path).read_text(encoding="utf-8")
        assert not test or f"def {test}(" in text, f"{path} has no test {test}"
        left_out = re.search(rf"@pytest\.mark\.nightly\n(?:@.*\n)*def {test}\(", text)
        assert not left_out, f"{path}: {test} is nightly; what the index names is in the line"
