"""The verdict of `python -m tests.suites`: which differences between stock and guarded runs let it fail."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.suites.__main__ import SUITES, Comparison, FileRun, confirm, read_counts, read_junit
from tests.suites.expected import EXPECTED, KINDS, Expected

GUARDED = Counter(ran=5, guarded=5)


def problems(
    stock: dict[str, str],
    guarded: dict[str, str],
    *,
    expected: dict[str, Expected] | None = None,
    counts: Counter[str] = GUARDED,
    error: str = "",
    whole: bool = False,
) -> list[str]:
    comparison = Comparison(SUITES["celery"], expected or {}, whole=whole)
    messages = dict.fromkeys(stock, "")
    names = Counter({(kind, "shop.charge"): number for kind, number in counts.items()})
    before = FileRun(stock, messages, Counter(ran=5))
    after = FileRun(guarded, messages, counts, names, error)
    comparison.add("test_x.py", before, after)
    comparison.finish(["test_x.py"])
    return comparison.problems


LISTED = {"test_x.py::a": Expected("acks_late")}
OK = {"a": "passed", "b": "passed"}


def test_a_run_without_a_difference_has_no_problem() -> None:
    assert problems(OK, OK) == []


def test_a_difference_that_is_listed_is_no_problem() -> None:
    assert problems(OK, {**OK, "a": "failed"}, expected=LISTED) == []


@pytest.mark.parametrize("outcome", ["failed", "skipped"])
def test_a_difference_that_is_not_listed_is_a_problem(outcome: str) -> None:
    [problem] = problems(OK, {**OK, "b": outcome})
    assert problem.startswith(f"test_x.py::b: passed on stock, {outcome} guarded")


def test_a_test_that_only_one_run_has_is_a_problem() -> None:
    [problem] = problems(OK, {"a": "passed"})
    assert "missing guarded" in problem


def test_a_listed_difference_that_no_longer_occurs_is_a_problem() -> None:
    [problem] = problems(OK, OK, expected=LISTED)
    assert "take it off the list" in problem


def test_a_listed_test_that_the_suite_no_longer_has_is_a_problem() -> None:
    [problem] = problems({"b": "passed"}, {"b": "passed"}, expected=LISTED)
    assert "was not among the tests" in problem


def test_what_fails_on_stock_is_noted_and_no_problem() -> None:
    assert problems({"a": "failed"}, {"a": "failed"}) == []
    assert problems({"a": "failed"}, {"a": "passed"}) == []


def test_a_run_that_guards_nothing_or_too_little_is_a_problem() -> None:
    assert "0 deliveries were guarded" in problems(OK, OK, counts=Counter())[0]
    [problem] = problems(OK, OK, counts=Counter(ran=5, guarded=4))
    assert problem == "test_x.py: shop.charge was about to run 5 times, 1 of them unguarded"
    assert "at least 1000 were expected" in problems(OK, OK, whole=True)[0]
    [problem] = problems(OK, OK, counts=Counter(ran=5, guarded=5, unguarded=1))
    assert problem == "test_x.py: shop.charge is declared so that nothing guards it"


def test_a_file_that_did_not_end_is_a_problem() -> None:
    assert problems(OK, OK, error="did not end within 1800 s") == ["test_x.py, guarded: did not end within 1800 s"]


def test_a_difference_counts_only_where_it_is_there_again_when_its_tests_are_repeated_alone() -> None:
    repeated: list[tuple[str, str, list[str]]] = []

    def run(name: str, mode: str, tests: Sequence[str]) -> FileRun:
        repeated.append((name, mode, list(tests)))
        return FileRun({"b": "passed", "c": "failed" if mode == "guarded" else "passed"})

    stock = FileRun(dict.fromkeys("abcd", "passed"))
    guarded = FileRun({"a": "failed", "b": "failed", "c": "failed", "d": "passed"})
    [note] = confirm("test_x.py", (stock, guarded), LISTED, run)
    assert note.startswith("test_x.py::b: failed guarded")
    assert repeated == [("test_x.py", mode, ["b", "c"]) for mode in ("stock", "guarded")]
    assert guarded.outcomes == {"a": "failed", "b": "passed", "c": "failed", "d": "passed"}
    assert confirm("test_x.py", (stock, FileRun(dict.fromkeys("abcd", "passed"))), {}, run) == []


def test_every_listed_difference_is_of_a_kind_that_is_explained() -> None:
    assert {each.kind for suite in EXPECTED.values() for each in suite.values()} <= KINDS.keys()


def test_a_test_is_named_by_its_class_and_has_the_worst_outcome_of_its_subtests(tmp_path: Path) -> None:
    cases = (
        '<testcase classname="t.integration.test_x.test_chord" name="a[1.5]"/>',
        '<testcase classname="t.integration.test_x.test_chord" name="a[1.5]">',
        '<failure message="one&#10;two"/></testcase>',
        '<testcase classname="t.integration.test_x" name="b"><skipped message=""/></testcase>',
    )
    (tmp_path / "junit.xml").write_text(f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>")
    run = FileRun()
    read_junit(tmp_path / "junit.xml", "test_x", run)
    assert run.outcomes == {"test_chord::a[1.5]": "failed", "b": "skipped"}
    assert run.messages["test_chord::a[1.5]"] == "one"


def test_counts_of_several_processes_are_added_up(tmp_path: Path) -> None:
    (tmp_path / "counts").write_text("ran shop.charge\nguarded shop.charge\nran shop.ship\nunguarded shop.ship\n")
    run = FileRun()
    read_counts(tmp_path / "counts", run)
    assert (run.counts["ran"], run.counts["guarded"]) == (2, 1)
    assert (run.names["ran", "shop.charge"], run.names["unguarded", "shop.ship"]) == (1, 1)
