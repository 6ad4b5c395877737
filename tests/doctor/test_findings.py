"""One check after the other, whatever becomes of each."""

from __future__ import annotations

from time import sleep

import pytest

from celery_idempotent.cli.doctor import any_store
from celery_idempotent.cli.doctor.findings import (
    Check,
    Checks,
    CheckSkipped,
    Findings,
    Severity,
    Target,
    error,
    ok,
    run_checks,
    warning,
)
from celery_idempotent.errors import ConfigurationError, IdempotencyError, StoreRefused, StoreUnreachable
from celery_idempotent.stores.memory import MemoryStore

CHECKS = Checks()


@CHECKS.add("fine")
def well(_: object) -> Findings:
    yield from ()


@CHECKS.add("not reported", when=lambda _: False)
def no_concern(_: object) -> Findings:
    yield error("not reported", "do nothing")


@CHECKS.add()
def nothing_to_report(_: object) -> Findings:
    yield from ()


@CHECKS.add()
def no_right(_: object) -> Findings:
    raise CheckSkipped("It does not say.", "Ask nicely.")


@CHECKS.add()
def no_right_either(_: object) -> Findings:
    raise CheckSkipped("It does not say.", "Ask nicely.")


@CHECKS.add()
def other_right(_: object) -> Findings:
    raise CheckSkipped("It is silent.", "Ask nicely.")


@CHECKS.add()
def surprise(_: object) -> Findings:
    yield ok(str(int("twelve")))


def codes(*checks: Check) -> list[str]:
    return [finding.code for finding in run_checks(checks, None)]


def test_the_name_of_a_check_is_the_code_of_what_it_finds() -> None:
    (finding,) = run_checks([well], None)
    assert (finding.code, finding.severity, finding.found) == ("well", Severity.OK, "fine")


def test_checks_are_run_in_the_order_of_their_declaration() -> None:
    assert [check.code for check in CHECKS[:3]] == ["well", "no-concern", "nothing-to-report"]


def test_a_check_may_have_nothing_to_report() -> None:
    assert codes(no_concern, nothing_to_report, well) == ["well"]


def test_the_first_finding_of_a_check_counts() -> None:
    def two(_: object) -> Findings:
        yield warning("first", "do this")
        yield ok("second")

    assert [finding.found for finding in run_checks([Check("two", two, "well")], None)] == ["first"]


def test_what_one_remedy_would_tell_is_one_finding() -> None:
    *_, finding = run_checks([no_right, well, other_right, no_right_either], None)
    assert codes(no_right, well, other_right, no_right_either) == ["well", "not-checked"]
    assert finding.found == (
        "It does not say. Not checked: no-right, no-right-either. It is silent. Not checked: other-right."
    )
    assert finding.remedy == "Ask nicely."


def test_an_odd_answer_is_told_and_hides_nothing() -> None:
    assert codes(surprise, well) == ["well", "not-checked"]
    *_, finding = run_checks([surprise], None)
    assert "twelve" in finding.found
    assert finding.found.endswith("Not checked: surprise.")


@pytest.mark.parametrize(
    ("failure", "code"),
    [
        (StoreUnreachable("down"), "store-unreachable"),
        (StoreRefused("no"), "store-refused"),
        (ConfigurationError("wrong"), "configuration"),
    ],
)
def test_a_store_that_does_not_serve_ends_the_examination(failure: IdempotencyError, code: str) -> None:
    def failing(_: object) -> Findings:
        raise failure

    found = list(run_checks([well, Check("failing", failing), surprise], None))
    assert [finding.code for finding in found] == ["well", code]
    assert found[-1].error is failure
    assert found[-1].severity is Severity.ERROR


def test_a_finding_may_make_an_end() -> None:
    def hopeless(_: object) -> Findings:
        yield error("gone", "come back", ends=True)

    def bad(_: object) -> Findings:
        yield warning("bad", "fix it")

    assert codes(Check("bad", bad), Check("hopeless", hopeless), well) == ["bad", "hopeless"]


def test_a_store_that_is_very_slow_is_not_asked_twenty_times(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []

    class Slow(MemoryStore):
        def ping(self) -> None:
            asked.append(0.06)
            sleep(asked[-1])  # what is measured

    monkeypatch.setattr(any_store, "SLOW", 0.05)
    monkeypatch.setattr(any_store, "PATIENCE", 0.1)
    finding = any_store.slow_store(Target(Slow(), "slow"))
    assert finding is not None
    assert finding.severity is Severity.WARNING
    assert len(asked) < any_store.PINGS
