"""Tables and words, without a command around them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_idempotent.cli.tables import NOTHING, Cell, Column, Table, cells, dots_of, shortened
from celery_idempotent.units import clean, format_size, shorten_duration

COLUMNS = (Column("KEY", least=8), Column("STATE"), Column("N", right=True, spare=1), Column("ID", least=4, spare=2))


def table(*rows: tuple[str, ...]) -> Table:
    return Table(COLUMNS, [[Cell(text) for text in row] for row in rows])


def lines(found: Table) -> list[str]:
    return found.plain().splitlines()


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (-1, "-1s"),
        (0, "0s"),
        (0.9, "0s"),
        (89.9, "89s"),
        (90, "1m"),
        (5399, "89m"),
        (5400, "1h"),
        (129599, "35h"),
        (129600, "1d"),
    ],
)
def test_a_duration_is_in_the_unit_that_says_most(seconds: float, words: str) -> None:
    assert shorten_duration(seconds) == words


@pytest.mark.parametrize(
    ("count", "words"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (2**30, "1.0 GiB"), (2**50, "1024.0 TiB")]
)
def test_a_size_is_in_the_unit_that_says_most(count: int, words: str) -> None:
    assert format_size(count) == words


def test_a_key_is_shortened_in_its_middle() -> None:
    assert shortened("idem:shop.charge::ORD-1", 11) == "idem:\N{HORIZONTAL ELLIPSIS}ORD-1"
    assert shortened("idem:shop.charge::ORD-1", 11, "..") == "idem..ORD-1"
    assert shortened("idem", 4) == "idem"


@pytest.mark.nightly
@pytest.mark.thorough
@given(st.text(), st.integers(1, 30))
def test_what_is_shortened_fits_and_commands_nothing(text: str, width: int) -> None:
    found = shortened(clean(text), width)
    assert cells(found) <= width
    assert found.isprintable()


def test_wide_letters_take_two_columns() -> None:
    assert cells("名前") == 4
    assert shortened("名前名前", 5) == "名\N{HORIZONTAL ELLIPSIS}前"


def test_a_table_that_fits_is_left_as_it_is() -> None:
    found = table(("idem:1", "completed", "7", "abc"))
    assert found.fitted(80, "..") == found
    assert lines(found) == ["KEY     STATE      N  ID", "idem:1  completed  7  abc"]


def test_what_stands_first_is_shortened_last_and_what_may_be_spared_goes_first() -> None:
    wide = table(("idem:shop.charge", "completed", "7", "0123456789"))
    assert lines(wide.fitted(40, ".."))[1] == "idem:shop.charge  completed  7  012..789"
    assert lines(wide.fitted(33, ".."))[1] == "idem:..charge  completed  7  0..9"
    assert lines(wide.fitted(27, ".."))[1] == "idem:..charge  completed  7"
    assert lines(wide.fitted(20, ".."))[1] == "ide..arge  completed"
    assert lines(wide.fitted(5, ".."))[1] == "ide..rge  completed"  # no less: a state is never shortened


def test_a_column_of_which_nothing_is_told_takes_no_room() -> None:
    found = table(("idem:1", "completed", NOTHING, "a"), ("idem:2", "failed", NOTHING, NOTHING))
    assert lines(found.fitted(80, ".."))[0].split() == ["KEY", "STATE", "ID"]
    assert lines(table().fitted(80, "..")) == ["KEY  STATE  N  ID"]


def test_dots_are_what_the_terminal_can_print() -> None:
    assert dots_of("utf-8") == dots_of("UTF8") == "\N{HORIZONTAL ELLIPSIS}"
    assert dots_of("ascii") == dots_of(None) == ".."
