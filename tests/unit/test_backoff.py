"""How long to wait between tries, and what an interruption does not end."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from celery_idempotent.core import backoff
from celery_idempotent.core.backoff import Backoff, never, retry_if_interrupted
from celery_idempotent.errors import LeaseLost
from tests.support.unit.scripted import Clock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock().install(monkeypatch)


class Interruption(Exception):
    """What a signal raises wherever the process happens to be."""


def test_a_pause_is_twice_the_one_before_up_to_the_longest(clock: Clock) -> None:
    tries = Backoff((0.1, 1.0), 100.0, never)
    assert all(tries.wait() for _ in range(6))
    assert clock.slept == [0.1, 0.2, 0.4, 0.8, 1.0, 1.0]


def test_a_pause_is_shortened_by_up_to_a_half_at_random(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    bounds: list[tuple[float, float]] = []
    monkeypatch.setattr(backoff.random, "uniform", lambda low, high: bounds.append((low, high)) or 0.75)
    Backoff((2.0, 8.0), 100.0, never).wait()
    assert bounds == [(0.5, 1.0)]
    assert clock.slept == [1.5]


def test_the_last_pause_ends_at_the_limit_and_no_other_follows(clock: Clock) -> None:
    tries = Backoff((4.0, 4.0), 6.0, never)
    assert [tries.wait(), tries.wait(), tries.wait()] == [True, True, False]
    assert clock.slept == [4.0, 2.0]


def test_the_limit_counts_what_happened_between_the_pauses(clock: Clock) -> None:
    tries = Backoff((1.0, 1.0), 5.0, never)
    clock.advance(5.0)
    assert not tries.wait()


@pytest.mark.parametrize("limit", [0.0, -1.0])
def test_without_time_there_is_no_pause(clock: Clock, limit: float) -> None:
    assert not Backoff((1.0, 1.0), limit, never).wait()
    assert clock.slept == []


def test_without_a_limit_there_is_always_another_pause(clock: Clock) -> None:
    tries = Backoff((1.0, 1.0), float("inf"), never)
    assert all(tries.wait() for _ in range(1000))


def test_a_process_that_is_about_to_stop_does_not_pause(clock: Clock) -> None:
    stopping = False
    tries = Backoff((1.0, 1.0), 10.0, lambda: stopping)
    assert tries.wait()
    stopping = True
    assert not tries.wait()
    assert clock.slept == [1.0]


def test_a_process_that_stops_in_a_long_pause_is_seen_within_a_second(clock: Clock) -> None:
    stopping = False
    tries = Backoff((5.0, 5.0), 100.0, lambda: stopping)
    assert tries.wait()
    assert sum(clock.slept) == 5.0

    def stop() -> None:
        nonlocal stopping
        stopping = True

    begun = clock.now
    clock.at(1.5, stop)
    assert tries.wait()  # to try once more
    assert clock.now - begun == 2.0
    assert not tries.wait()


def test_the_real_pause_is_slept(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(backoff.time, "sleep", slept.append)
    assert Backoff((1.0, 1.0), 10.0, never).wait()
    assert 0.5 <= slept[0] <= 1.0


# -- interruptions -----------------------------------------------------------------------------------------------------


def failing(*errors: BaseException) -> tuple[Callable[[], str], list[str]]:
    """Return a function that raises these, one a call, and then returns; and what it has done."""
    waiting, done = list(errors), []

    def call() -> str:
        done.append("called")
        if waiting:
            raise waiting.pop(0)
        return "done"

    return call, done


class Killed(BaseException):
    """What the hub raises in a greenlet that is killed, or that has reached its time limit."""


@pytest.mark.parametrize("interruption", [Interruption("soft limit"), Killed("terminated")])
def test_an_interrupted_call_is_asked_again(caplog: pytest.LogCaptureFixture, interruption: BaseException) -> None:
    call, done = failing(interruption)
    with caplog.at_level(logging.WARNING):
        assert retry_if_interrupted(call) == "done"
    assert len(done) == 2
    assert f"Interrupted by {interruption!r}" in caplog.text


def test_a_call_that_goes_well_is_asked_once() -> None:
    call, done = failing()
    assert retry_if_interrupted(call) == "done"
    assert len(done) == 1


def test_what_the_call_itself_answers_is_no_interruption() -> None:
    answer = LeaseLost("gone")
    call, done = failing(answer)
    with pytest.raises(LeaseLost) as caught:
        retry_if_interrupted(call)
    assert caught.value is answer
    assert len(done) == 1


@pytest.mark.parametrize("end", [KeyboardInterrupt(), SystemExit(0)])
@pytest.mark.parametrize("second", [[], [LeaseLost("gone")], [Interruption("too late")]], ids=len)
def test_a_process_that_is_to_end_has_the_call_made_first(end: BaseException, second: list[Exception]) -> None:
    call, done = failing(end, *second)
    with pytest.raises(type(end)) as caught:
        retry_if_interrupted(call)
    assert caught.value is end
    assert len(done) == 2


def test_a_second_interruption_comes_out() -> None:
    call, done = failing(Interruption("first"), Interruption("second"))
    with pytest.raises(Interruption, match="second"):
        retry_if_interrupted(call)
    assert len(done) == 2


def test_what_the_call_answers_on_a_stack_of_its_own_comes_out() -> None:
    """As a lease that is gone: without it, the run would be taken for one that was settled."""
    answer = LeaseLost("gone")
    call, done = failing(RecursionError("too deep"), answer)
    with pytest.raises(LeaseLost) as caught:
        retry_if_interrupted(call)
    assert caught.value is answer
    assert len(done) == 2
