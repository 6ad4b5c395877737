"""The law holds in every state, and the model finds out where a line that protects is missing."""

from __future__ import annotations

import pytest

from .__main__ import LARGE, SMALL, look
from .breaks import BREAKS, ELSEWHERE, ROOT, SIMULATED, UNSEEN, found_after
from .protocol import Configuration
from .stories import Broken, replay, written


@pytest.mark.unmeasured
@pytest.mark.parametrize("name", SMALL)
def test_the_law_holds_in_every_state(name: str) -> None:
    found = look(name, SMALL[name], verbose=False)
    assert not found.broken
    assert found.states > 4000


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_the_law_holds_in_ten_million_states() -> None:
    for name, configuration in LARGE.items():
        found = look(name, configuration, verbose=True)
        assert not found.broken
        assert found.depth >= 12
        assert found.states >= 10_000_000


@pytest.mark.parametrize("name", BREAKS)
def test_what_a_break_replaces_is_in_the_source_once(name: str) -> None:
    for edit in BREAKS[name]:
        text = (ROOT / "celery_idempotent" / edit.file).read_text(encoding="utf-8")
        assert text.count(edit.old) == 1, f"{edit.file}: {edit.old!r}"


def test_breaks_that_are_left_out_are_breaks() -> None:
    assert ELSEWHERE.keys() <= SIMULATED.keys()
    assert UNSEEN.keys() <= BREAKS.keys()


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", BREAKS)
def test_every_line_that_is_missing_is_found(name: str) -> None:
    states, why = found_after(name)
    assert (states is None) == (name in UNSEEN), why


@pytest.mark.unmeasured
def test_a_line_that_is_missing_is_found() -> None:
    states, why = found_after("a live lease is no conflict")
    assert states is not None
    assert why == "a lease was given while another one holds"


def test_a_path_that_was_printed_can_be_gone_again() -> None:
    path = ["entry 0: delivered", "worker 0: its acquire is served", "worker 0: gets its answer", "worker 0: returns"]
    core, tally = replay(written(Configuration("A", faults=1), [*path, "worker 0: its settle is answered"]))
    assert core.row is not None
    assert (core.row.state, tally.faults) == ("completed", 1)
    with pytest.raises(LookupError, match="cannot happen here"):
        replay(written(Configuration("A"), [*path, "worker 0: raises"]))


def test_a_path_on_which_something_breaks_says_what(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.model.law.answer", lambda *_: "wrong")
    path = ["entry 0: delivered", "worker 0: its acquire is served", "worker 0: gets its answer", "worker 0: returns"]
    path += ["worker 0: its settle is answered", "worker 0: ends (value)"]
    with pytest.raises(Broken, match=r"completed, of A, fence 1, value 0\n(.|\n)*wrong$"):
        replay(written(Configuration("A"), path))
