"""With ``result_ttl=0`` an operation is remembered only while it runs: duplicates wait for it, and then run."""

from __future__ import annotations

import inspect
from datetime import timedelta
from typing import Any

import pytest

from celery_idempotent.core.binding import Binding
from celery_idempotent.core.guard import Busy, Dropped, Ran, Replayed
from celery_idempotent.core.policy import Policy
from celery_idempotent.errors import ConfigurationError, LeaseLost
from celery_idempotent.events import Completed
from celery_idempotent.stores import Outcome, Reason, Release, State
from tests.support.unit.scripted import Clock, listening
from tests.unit.test_guard import KEY, Bench, LostInTask


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock().install(monkeypatch)


heard = pytest.fixture(listening)


@pytest.fixture
def bench(clock: Clock, heard: Any) -> Bench:
    return Bench(clock, heard, policy=Policy(result_ttl=0))


def raising(error: BaseException) -> Any:
    raise error


def test_a_duplicate_after_the_end_runs(bench: Bench) -> None:
    assert bench.deliver("first", bench.claim("a")) == Ran("first")
    record = bench.record
    assert (record.state, record.reason, record.payload) == (State.RELEASED, Reason.DONE, b"")
    assert bench.deliver("second", bench.claim("b")) == Ran("second")
    assert bench.deliver("third", bench.claim("a", redelivered=True)) == Ran("third")
    assert bench.told == ["Acquired", "Completed"] * 3


def test_a_duplicate_that_meets_the_holder_waits(bench: Bench) -> None:
    held = bench.elsewhere()
    decision = bench.deliver()
    assert isinstance(decision, Busy)
    assert decision.holder_task_id == "b"
    bench.store.inner.release(held, Release(Reason.DONE))
    assert bench.deliver() == Ran(42)


def test_a_run_asks_the_store_twice(bench: Bench) -> None:
    bench.deliver()
    assert [name for name, *_ in bench.store.calls] == ["acquire", "release"]


def test_a_result_that_cannot_be_written_is_none_of_the_store(bench: Bench) -> None:
    value = object()
    assert bench.deliver(value) == Ran(value)
    assert bench.told == ["Acquired", "Completed"]


def test_the_event_says_how_long_it_ran(bench: Bench) -> None:
    bench.deliver(lambda held: bench.clock.advance(7))
    (ended,) = [event for event in bench.heard if isinstance(event, Completed)]
    assert (ended.ran, ended.fence) == (7, bench.runs[0].fence)


def test_a_body_that_was_ignored_may_run_again(bench: Bench) -> None:
    ignored = Outcome(State.COMPLETED, bench.codec.encode_ignored("id-1", None))
    delivery = bench.delivery(lambda held: raising(KeyboardInterrupt()))
    delivery.ending = lambda error: ignored  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        bench.guard().run(delivery)
    assert (bench.record.state, bench.record.reason) == (State.RELEASED, Reason.DONE)


def test_what_waits_for_a_retry_holds_nobody_up(bench: Bench) -> None:
    """Another operation may have the turn meanwhile; a copy of the message that retried may not."""
    delivery = bench.delivery(ValueError("later"), bench.claim("a"))
    delivery.ending = lambda error: Release(Reason.RETRY, 300.0, 1)  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="later"):
        bench.guard().run(delivery)
    assert bench.store.calls[-1][1][1] == Release(Reason.RETRY, 0.0, 1)
    assert bench.record.remaining == 0
    assert bench.deliver("other", bench.claim("b")) == Ran("other")
    assert bench.deliver("stale", bench.claim("a", redelivered=True)) == Dropped()
    assert bench.deliver("retry", bench.claim("a", retries=1)) == Ran("retry")


def test_other_arguments_under_the_key_are_no_mistake() -> None:
    def of(**options: Any) -> str:
        policy = Policy(key="shop", **options)
        return Binding("task", inspect.signature(lambda shop, at: None), policy, "idem").fingerprint(
            {"shop": 1, "at": 2}
        )

    assert of(result_ttl=0) == of(result_ttl=0, fingerprint=True) == of(result_ttl=0, fingerprint=["at"]) == ""
    assert of() != ""


def test_a_remembered_failure_is_refused() -> None:
    with pytest.raises(
        ConfigurationError, match="remember_failures: expected nothing to be remembered with result_ttl=0"
    ):
        Policy(result_ttl=0, remember_failures=ValueError)
    assert Policy(result_ttl="0s").result_ttl == 0


@pytest.mark.parametrize("ttl", [0.1, "100ms", timedelta(microseconds=1)])
def test_a_result_cannot_be_remembered_for_less_than_half_a_second(ttl: object) -> None:
    with pytest.raises(ConfigurationError, match=r"expected 0, or a duration from 0\.5 s"):
        Policy(result_ttl=ttl)  # type: ignore[arg-type]


def test_nothing_can_be_settled_within_a_transaction(bench: Bench) -> None:
    with pytest.raises(ConfigurationError, match="result_ttl=0"):
        bench.deliver(lambda held: held.settle("value", using=object()))
    assert bench.record.reason == Reason.FAILED


# -- a lease that was lost ---------------------------------------------------------------------------------------------


def test_a_run_that_was_overtaken_keeps_its_value(bench: Bench) -> None:
    """There is no result of the operation that it could be answered with; the other run has its own."""

    def body(held: Any) -> str:
        bench.overtake()
        return "mine"

    assert bench.deliver(body) == Ran("mine")
    assert bench.told == ["Acquired", "LeaseLost"]
    assert bench.record.state is State.IN_PROGRESS  # the other's, as it was


def test_an_error_of_a_run_that_was_overtaken_is_its_own(bench: Bench) -> None:
    def body(held: Any) -> None:
        bench.overtake()
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        bench.deliver(body)


def stops(bench: Bench, task_id: str) -> Any:
    def body(held: Any) -> None:
        bench.overtake(task_id)
        held.check()

    return body


def test_a_run_that_stopped_for_another_operation_comes_back(bench: Bench) -> None:
    decision = bench.deliver(stops(bench, "b"), bench.claim("a"))
    assert isinstance(decision, Busy)


def test_a_run_that_stopped_for_its_own_redelivery_is_over(bench: Bench) -> None:
    assert bench.deliver(stops(bench, "a"), bench.claim("a")) == Dropped()


def test_a_run_that_stopped_for_its_own_redelivery_is_over_when_that_has_ended(bench: Bench) -> None:
    def body(held: Any) -> None:
        lease = bench.overtake("a")
        bench.store.inner.release(lease, Release(Reason.DONE))
        held.check()

    assert bench.deliver(body, bench.claim("a")) == Dropped()


@pytest.mark.parametrize("reason", [reason for reason in Reason if reason is not Reason.DONE])
def test_a_run_that_stopped_comes_back_if_its_redelivery_failed(bench: Bench, reason: Reason) -> None:
    def body(held: Any) -> None:
        lease = bench.overtake("a")
        bench.store.inner.release(lease, Release(reason))
        raise LostInTask("stopped")

    assert isinstance(bench.deliver(body, bench.claim("a")), Busy)
    assert issubclass(LostInTask, LeaseLost)
    assert bench.record.key == KEY


def test_a_run_that_stopped_is_answered_with_what_its_redelivery_settled(bench: Bench) -> None:
    """By a worker that has not been told yet that nothing is to be remembered."""

    def body(held: Any) -> None:
        bench.settle(bench.overtake("a"))
        held.check()

    assert bench.deliver(body, bench.claim("a")) == Replayed("theirs", bench.record)


def test_the_end_of_a_turn_has_the_seconds_of_its_body_and_of_its_release(bench: Bench) -> None:
    bench.policy = Policy(result_ttl=0)
    bench.clock.now = 1.0  # the machine has just been started
    bench.store.before("release", lambda: bench.clock.advance(20.0))
    bench.deliver(lambda held: bench.clock.advance(7.0))
    end = bench.heard[-1]
    assert isinstance(end, Completed)
    assert (end.ran, end.took) == (7.0, 20.0)
