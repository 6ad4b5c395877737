"""The algorithm, case by case: what a delivery is answered, what the record says afterwards, who was told."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import FrozenInstanceError, dataclass, field, replace
from typing import Any

import pytest
from billiard.exceptions import SoftTimeLimitExceeded

from celery_idempotent import events
from celery_idempotent.core import history
from celery_idempotent.core.breaker import Breaker
from celery_idempotent.core.guard import (
    STORE_PAUSE,
    Busy,
    Decision,
    Delivery,
    Dropped,
    Ending,
    Guard,
    Ignored,
    Ran,
    Replayed,
    in_progress,
)
from celery_idempotent.core.heartbeat import Heartbeat
from celery_idempotent.core.history import DeliveryEvents
from celery_idempotent.core.lease import LOOKS, HeldLease
from celery_idempotent.core.policy import Policy
from celery_idempotent.core.results import Codec
from celery_idempotent.errors import (
    Conflict,
    CrashLoop,
    KeyReused,
    LeaseLost,
    PreviouslyFailed,
    RecordUnreadable,
    ResultUnavailable,
    StoreError,
    StoreRefused,
    StoreUnreachable,
)
from celery_idempotent.events import Event
from celery_idempotent.stores import Claim, Lease, Outcome, Reason, Record, Refusal, Release, State, Verdict
from celery_idempotent.stores.base import Store
from tests.support.unit.scripted import Clock, ScriptedStore, listening

KEY = "idem:shop.charge:ORD-1"


class Declined(Exception):
    """What a task raises for good."""


class SoftTimeLimit(Exception):
    """What a signal raises wherever the process happens to be."""


class Stopped(BaseException):
    """What ends a body that is not caught by `except Exception`."""


class LostInTask(LeaseLost):
    """An adapter's own LeaseLost."""


class ScriptedDelivery(Delivery):
    """A delivery whose body and ending are functions."""

    def __init__(self, run: Callable[[HeldLease], Any], end: Callable[[BaseException], Ending]) -> None:
        super().__init__()
        self.run, self.end = run, end

    def body(self, held: HeldLease) -> Any:
        return self.run(held)

    def ending(self, error: BaseException) -> Ending:
        return self.end(error)


@dataclass
class Bench:
    """One worker process, and the deliveries that come to it."""

    clock: Clock
    heard: list[Event]
    store: ScriptedStore = field(default_factory=ScriptedStore)
    heartbeat: Heartbeat = field(default_factory=Heartbeat)
    breaker: Breaker = field(default_factory=Breaker)
    codec: Codec = field(default_factory=lambda: Codec(compress_above=1024, result_max_bytes=1048576))
    policy: Policy = field(default_factory=Policy)
    owners: int = 0
    #: what the bodies held
    runs: list[HeldLease] = field(default_factory=list)

    def claim(self, task_id: str = "a", **changes: Any) -> Claim:
        self.owners += 1
        return Claim(
            **{
                "key": KEY,
                "owner": f"owner-{self.owners}",
                "lease_ttl": self.policy.lease_ttl,
                "keep_ttl": self.policy.failure_ttl,
                "task_id": task_id,
                "max_crashes": self.policy.max_crashes,
                "holder": f"host:{self.owners}",
                **changes,
            }
        )

    def ending(self, error: BaseException) -> Ending:
        match error:
            case Declined():
                return Outcome(State.FAILED, self.codec.encode_exception(error))
            case LeaseLost():
                return Release(Reason.REQUEUED)
            case Exception():
                return Release(Reason.FAILED)
        return Release(Reason.SHUTDOWN)

    def delivery(self, body: Any = 42, claim: Claim | None = None, **changes: Any) -> Delivery:
        """Return a delivery whose body returns this value, raises this exception, or does what this function does."""

        def run(holding: HeldLease) -> Any:
            self.runs.append(holding)
            if isinstance(body, BaseException):
                raise body
            return body(holding) if callable(body) else body

        delivery = ScriptedDelivery(run, self.ending)
        delivery.lost_error = LostInTask
        note = changes.pop("note", None)
        delivery.identify(DeliveryEvents(claim or self.claim(), "shop.charge", "id-1", note))
        for name, value in changes.items():
            assert hasattr(delivery, name), name
            setattr(delivery, name, value)
        return delivery

    def deliver(self, body: Any = 42, claim: Claim | None = None, **changes: Any) -> Decision:
        return self.guard().run(self.delivery(body, claim, **changes))

    def guard(self) -> Guard:
        return Guard(self.store, self.policy, self.codec, self.heartbeat, self.breaker)

    # -- others --------------------------------------------------------------------------------------------------------

    def elsewhere(self, task_id: str = "b", **changes: Any) -> Lease:
        """Let another worker take the lease."""
        lease = self.store.inner.acquire(self.claim(task_id, **changes))
        assert isinstance(lease, Lease), lease
        return lease

    def done_elsewhere(self, value: Any = "theirs", task_id: str = "b") -> None:
        self.settle(self.elsewhere(task_id), value)

    def settle(self, lease: Lease, value: Any = "theirs") -> None:
        self.store.inner.settle(lease, Outcome(State.COMPLETED, self.codec.encode_value(value)), ttl=86400.0)

    def fail(self, lease: Lease, error: Exception) -> None:
        self.store.inner.settle(lease, Outcome(State.FAILED, self.codec.encode_exception(error)), ttl=86400.0)

    def overtake(self, task_id: str = "b") -> Lease:
        """Let the lease run out, and another worker take it."""
        self.clock.advance(self.policy.lease_ttl)
        return self.elsewhere(task_id)

    @property
    def record(self) -> Record:
        record = self.store.inner.get(KEY)
        assert record is not None
        return record

    @property
    def told(self) -> list[str]:
        return [type(event).__name__ for event in self.heard]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock().install(monkeypatch)


heard = pytest.fixture(listening)


@pytest.fixture
def bench(clock: Clock, heard: list[Event], monkeypatch: pytest.MonkeyPatch) -> Bench:
    # Renewals are made by calling `beat`.
    monkeypatch.setattr("celery_idempotent.core.heartbeat._Server.run", lambda self: None)
    return Bench(clock, heard)


def read_anew(text: str) -> str:
    """Return the same text as another object, as it comes from another message."""
    return "".join(list(text))


def sure(error: type[BaseException], call: Callable[[], Any]) -> BaseException:
    """Call, and return the error that this must raise."""
    with pytest.raises(error) as caught:
        call()
    assert type(caught.value) is error
    return caught.value


# -- a first run -------------------------------------------------------------------------------------------------------


def test_a_first_run_returns_its_value_and_settles_it(bench: Bench) -> None:
    assert bench.deliver({"charged": 999}) == Ran({"charged": 999})
    assert bench.record.state is State.COMPLETED
    assert bench.codec.decode(bench.record.payload).data == {"charged": 999}
    assert [verb for verb, _ in bench.store.calls] == ["acquire", "settle"]


def test_a_first_run_is_told_with_its_key_task_and_fence(bench: Bench) -> None:
    bench.deliver()
    fence = bench.runs[0].fence
    assert bench.heard == [
        events.Acquired(KEY, "shop.charge", "id-1", fence=fence),
        events.Completed(KEY, "shop.charge", "id-1", fence=fence),
    ]


def test_a_body_holds_what_was_asked_for(bench: Bench) -> None:
    delivery = bench.delivery(max_lease=90.0)
    bench.store.before("acquire", lambda: bench.clock.advance(1.0))
    bench.guard().run(delivery)
    [holding] = bench.runs
    assert holding.store is bench.store
    assert holding.lease.claim is delivery.claim
    assert holding.deadline == 1000.0 + 54.0  # from before the request
    assert holding.until == 1000.0 + 90.0
    assert holding.lost_error is LostInTask


def test_a_body_runs_without_an_end_of_its_lease_unless_one_is_set(bench: Bench) -> None:
    bench.deliver()
    assert bench.runs[0].until == float("inf")


def test_trust_counts_from_before_the_request_that_was_granted_and_not_from_one_that_failed(bench: Bench) -> None:
    bench.store.fail("acquire")
    bench.deliver()
    assert bench.clock() > 1000.0
    assert bench.runs[0].deadline == bench.clock() + 54.0


def test_a_lease_is_renewed_while_its_body_runs_and_no_longer(bench: Bench) -> None:
    def body(holding: HeldLease) -> None:
        assert bench.heartbeat.holdings() == [holding]
        for _ in range(10):
            bench.clock.advance(15.0)
            bench.heartbeat.beat(bench.clock())

    bench.store.before("settle", lambda: watched.extend(bench.heartbeat.holdings()))
    watched: list[HeldLease] = []
    assert bench.deliver(body) == Ran(None)
    assert bench.store.count("renew") == 5
    assert watched == bench.heartbeat.holdings() == []


@pytest.mark.parametrize("taken_over", [False, True])
def test_a_lease_is_renewed_before_any_hook_gets_its_first_event(bench: Bench, taken_over: bool) -> None:
    """A hook may take longer than the lease lasts; meanwhile nobody else may get it."""
    if taken_over:
        bench.elsewhere()
        bench.clock.advance(bench.policy.lease_ttl)
    renewed: list[list[str]] = []

    def hook(event: Event) -> None:
        renewed.append([holding.key for holding in bench.heartbeat.holdings()])

    events.add_hook(hook, {events.TakenOver if taken_over else events.Acquired})
    try:
        bench.deliver()
    finally:
        events.remove_hook(hook)
    assert renewed == [[KEY]]


@pytest.fixture
def before_body(bench: Bench) -> Iterator[Callable[[Callable[[], object]], None]]:
    """Have a hook do something when the body is about to begin."""
    hooks: list[Callable[[Event], None]] = []

    def add(act: Callable[[], object]) -> None:
        def hook(event: Event) -> None:
            act()

        hooks.append(hook)
        events.add_hook(hook, {events.Acquired})

    yield add
    for hook in hooks:
        events.remove_hook(hook)


BeforeBody = Callable[[Callable[[], object]], None]


def test_a_body_does_not_begin_whose_operation_was_done_while_a_hook_took_too_long(
    bench: Bench, before_body: BeforeBody
) -> None:
    """A process that is stopped there renews nothing."""

    def overtaken() -> None:
        bench.clock.advance(bench.policy.lease_ttl)
        bench.done_elsewhere()

    before_body(overtaken)
    decision = bench.deliver()
    assert isinstance(decision, Replayed)
    assert (decision.value, bench.runs, bench.told) == ("theirs", [], ["Acquired", "LeaseLost", "Replayed"])
    assert bench.heartbeat.holdings() == []


def test_what_failed_for_good_while_a_hook_took_too_long_is_raised_once(bench: Bench, before_body: BeforeBody) -> None:
    def overtaken() -> None:
        bench.fail(bench.overtake(), Declined("no funds"))

    before_body(overtaken)
    sure(PreviouslyFailed, bench.deliver)
    assert (bench.runs, bench.told) == ([], ["Acquired", "LeaseLost", "Replayed"])


def test_a_body_does_not_begin_whose_lease_a_renewal_found_lost(bench: Bench, before_body: BeforeBody) -> None:
    def overtaken() -> None:
        bench.overtake()
        bench.heartbeat.beat(bench.clock())

    before_body(overtaken)
    met = bench.deliver()
    assert isinstance(met, Busy)
    assert (bench.runs, bench.told) == ([], ["Acquired", "LeaseLost"])
    assert bench.record.owner == "owner-2"


def test_a_body_begins_whose_lease_nobody_took_while_a_hook_took_too_long(
    bench: Bench, before_body: BeforeBody
) -> None:
    before_body(lambda: bench.clock.advance(bench.policy.lease_ttl))
    assert bench.deliver() == Ran(42)
    assert bench.runs[0].deadline > bench.clock()


def test_a_body_does_not_begin_whose_operation_was_done_while_the_answer_was_on_its_way(
    bench: Bench, before_body: BeforeBody
) -> None:
    """A process may be stopped as the store says that it holds its lease yet, for longer than that lasts."""

    def overtaken() -> None:
        bench.clock.advance(bench.policy.lease_ttl)
        bench.done_elsewhere()

    before_body(lambda: bench.clock.advance(bench.policy.lease_ttl))
    bench.store.after("renew", overtaken)
    decision = bench.deliver()
    assert isinstance(decision, Replayed)
    assert (decision.value, bench.runs, bench.told) == ("theirs", [], ["Acquired", "LeaseLost", "Replayed"])


def test_a_delivery_comes_back_whose_store_answers_only_once_the_lease_has_run_out(
    bench: Bench, before_body: BeforeBody
) -> None:
    before_body(lambda: bench.clock.advance(bench.policy.lease_ttl))
    for _ in range(LOOKS):
        bench.store.after("renew", lambda: bench.clock.advance(bench.policy.lease_ttl))
    met = bench.deliver()
    assert isinstance(met, Busy)
    assert "came too late" in str(met.error)
    assert bench.runs == []


def test_a_delivery_comes_back_whose_lease_is_in_doubt_before_its_body_and_the_store_away(
    bench: Bench, before_body: BeforeBody
) -> None:
    def cut_off() -> None:
        bench.clock.advance(bench.policy.lease_ttl)
        bench.store.down("renew")

    before_body(cut_off)
    met = bench.deliver()
    assert isinstance(met, Busy)
    assert (met.remaining, type(met.error)) == (STORE_PAUSE[1], StoreUnreachable)
    assert (bench.runs, bench.told) == ([], ["Acquired", "Released"])
    assert (bench.record.state, bench.record.reason) == (State.RELEASED, Reason.SHUTDOWN.value)


def ringing(kind: type[Event]) -> Callable[[Event], None]:
    """Return a hook in which the task's time limit rings at the first event of a kind."""
    rung: list[Event] = []

    def hook(event: Event) -> None:
        if isinstance(event, kind) and not rung:
            rung.append(event)
            raise SoftTimeLimitExceeded

    return hook


@pytest.fixture
def rings(bench: Bench) -> Iterator[Callable[[type[Event]], None]]:
    added: list[Callable[[Event], None]] = []

    def add(kind: type[Event]) -> None:
        added.append(ringing(kind))
        events.add_hook(added[-1])

    yield add
    for hook in added:
        events.remove_hook(hook)


def test_a_time_limit_that_rings_in_a_hook_before_the_body_is_the_end_of_the_run(
    bench: Bench, rings: Callable[[type[Event]], None]
) -> None:
    rings(events.Acquired)
    with pytest.raises(SoftTimeLimitExceeded):
        bench.deliver()
    assert (bench.runs, bench.record.state, bench.record.reason) == ([], State.RELEASED, Reason.FAILED.value)
    assert [type(event) for event in bench.heard] == [events.Acquired, events.Released]
    assert bench.heartbeat.holdings() == []


@pytest.mark.parametrize("result_ttl", [60, 0])
def test_a_time_limit_that_rings_in_a_hook_after_the_body_does_not_change_its_end(
    bench: Bench, rings: Callable[[type[Event]], None], result_ttl: int
) -> None:
    bench.policy = Policy(result_ttl=result_ttl)
    rings(events.Completed)
    assert isinstance(bench.deliver(), Ran)
    assert [type(event) for event in bench.heard] == [events.Acquired, events.Completed]
    assert bench.record.state is (State.COMPLETED if result_ttl else State.RELEASED)


def test_a_short_task_costs_two_commands(bench: Bench) -> None:
    def body(holding: HeldLease) -> None:
        bench.clock.advance(19.9)
        bench.heartbeat.beat(bench.clock())

    bench.deliver(body)
    assert [verb for verb, _ in bench.store.calls] == ["acquire", "settle"]


def test_a_settled_result_is_kept_for_result_ttl(bench: Bench) -> None:
    bench.policy = Policy(result_ttl="7d", failure_ttl="1h")
    bench.deliver()
    assert bench.store.calls[-1][1][2] == 7 * 86400.0


def test_a_run_after_a_lease_ran_out_is_a_take_over(bench: Bench) -> None:
    bench.elsewhere("a")
    bench.clock.advance(60.0)
    assert bench.deliver() == Ran(42)
    fence = bench.runs[0].fence
    assert bench.heard[0] == events.TakenOver(KEY, "shop.charge", "id-1", fence=fence, crashes=1)


def test_the_same_delivery_gets_its_lease_again_when_the_first_reply_was_lost(bench: Bench) -> None:
    bench.store.lose_reply("acquire")
    assert bench.deliver() == Ran(42)
    assert bench.store.count("acquire") == 2
    assert bench.told == ["StoreFailed", "StoreRecovered", "Acquired", "Completed"]


# -- replay ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task_id", ["a", "b"])
def test_a_duplicate_gets_the_first_value_and_does_not_run(bench: Bench, task_id: str) -> None:
    bench.deliver("mine")
    bench.clock.advance(30.0)
    answer = bench.deliver("second", bench.claim(task_id))
    assert answer == Replayed("mine", bench.record)
    assert len(bench.runs) == 1
    assert bench.heard[2:] == [
        events.Replayed(KEY, "shop.charge", "id-1", age=30.0, original="" if task_id == "a" else "a", state="completed")
    ]


@pytest.mark.parametrize("value", [None, 0, 0.0, False, "", [], {}], ids=repr)
def test_a_falsy_value_is_replayed_as_itself(bench: Bench, value: Any) -> None:
    assert bench.deliver(value) == Ran(value)
    answer = bench.deliver("second")
    assert isinstance(answer, Replayed)
    assert answer.value == value
    assert type(answer.value) is type(value)


@pytest.mark.parametrize("why", ["store_result", "serializer", "size"])
def test_a_value_that_cannot_be_kept_settles_all_the_same(bench: Bench, why: str) -> None:
    value: Any = object() if why == "serializer" else "x" * 100
    bench.policy = Policy(store_result=why != "store_result")
    bench.codec = Codec(compress_above=1000, result_max_bytes=50)
    assert bench.deliver(value) == Ran(value)
    assert bench.record.state is State.COMPLETED
    assert bench.told == ["Acquired", "Completed"]


def test_a_duplicate_with_a_reader_fails_rather_than_get_a_none_that_nobody_returned(bench: Bench) -> None:
    bench.policy = Policy(store_result=False)
    bench.deliver()
    bench.clock.advance(7.0)
    error = sure(ResultUnavailable, lambda: bench.deliver(wants_result=True))
    assert str(error).startswith(
        "'idem:shop.charge:ORD-1' was done 7 s ago and its result was not kept (store_result is off)."
    )
    assert len(bench.runs) == 1


def test_a_duplicate_without_a_reader_succeeds_where_no_value_was_kept(bench: Bench) -> None:
    bench.policy = Policy(store_result=False)
    bench.deliver()
    assert bench.deliver(wants_result=False) == Replayed(None, bench.record)


@pytest.mark.parametrize("nesting", [None, 0, 2])
def test_an_operation_that_ended_ignored_is_answered_with_where_its_result_is(
    bench: Bench, nesting: int | None
) -> None:
    lease = bench.elsewhere()
    bench.store.inner.settle(lease, Outcome(State.COMPLETED, bench.codec.encode_ignored("id-9", nesting)), ttl=60.0)
    assert bench.deliver() == Ignored("id-9", bench.record, nesting)
    assert bench.runs == []
    assert bench.told == ["Replayed"]


def test_a_result_elsewhere_that_is_due_is_waited_for_and_no_replay(bench: Bench) -> None:
    ignored = Outcome(State.COMPLETED, bench.codec.encode_ignored("id-9", 0))
    bench.store.inner.settle(bench.elsewhere(), ignored, ttl=60.0)
    assert bench.deliver(due=lambda ignored: 7.0 if ignored.reference == "id-9" else 0.0) == Busy(7.0, "id-9")
    assert bench.told == []


@pytest.mark.parametrize("other", ["A", "b", ""])
def test_on_duplicate_raise_refuses_another_task_id(bench: Bench, other: str) -> None:
    bench.policy = Policy(on_duplicate="raise")
    bench.done_elsewhere(task_id=other)
    bench.clock.advance(3.0)
    error = sure(Conflict, bench.deliver)
    assert str(error) == f"'{KEY}' was done 3 s ago, and the task has on_duplicate=\"raise\"."
    assert bench.told == []


def test_on_duplicate_raise_replays_for_the_same_task_id(bench: Bench) -> None:
    bench.policy = Policy(on_duplicate="raise")
    bench.done_elsewhere(task_id=read_anew("id-7"))
    assert bench.deliver(claim=bench.claim(read_anew("id-7"))) == Replayed("theirs", bench.record)


# -- remembered failures -----------------------------------------------------------------------------------------------


def test_a_failure_that_is_final_is_settled_and_raised(bench: Bench) -> None:
    bench.policy = Policy(remember_failures=Declined, failure_ttl="1h", result_ttl="7d")
    error = Declined("no funds")
    assert sure(Declined, lambda: bench.deliver(error)) is error
    assert bench.record.state is State.FAILED
    assert bench.store.calls[-1][1][2] == 3600.0
    assert bench.heard[1:] == [events.Failed(KEY, "shop.charge", "id-1", error="Declined", fence=1000000000)]


@pytest.mark.parametrize("task_id", ["a", "b"])
@pytest.mark.parametrize("on_duplicate", ["replay", "raise"])
def test_a_remembered_failure_is_raised_again_for_duplicates(bench: Bench, task_id: str, on_duplicate: Any) -> None:
    bench.policy = Policy(remember_failures=Declined, on_duplicate=on_duplicate)
    with suppress(Declined):
        bench.deliver(Declined("no funds"))
    bench.clock.advance(5.0)
    error = sure(Declined, lambda: bench.deliver(claim=bench.claim(task_id)))
    assert error.args == ("no funds",)
    assert len(bench.runs) == 1
    assert bench.heard[2:] == [
        events.Replayed(KEY, "shop.charge", "id-1", age=5.0, original="" if task_id == "a" else "a", state="failed")
    ]


def test_a_remembered_failure_of_a_class_that_the_policy_does_not_name_is_raised_in_words(bench: Bench) -> None:
    with suppress(Declined):
        bench.deliver(Declined("no funds"))
    assert "Declined: no funds" in str(sure(PreviouslyFailed, bench.deliver))


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_a_superseded_copy_is_dropped_and_told(bench: Bench) -> None:
    lease = bench.elsewhere("a")
    assert isinstance(bench.deliver(claim=bench.claim(copy=2, token="two")), Busy)
    bench.heard.clear()
    assert bench.deliver(claim=bench.claim(copy=1, token="one")) == Dropped()
    assert bench.heard == [events.Superseded(KEY, "shop.charge", "id-1")]
    assert bench.runs == []
    assert bench.record.owner == lease.owner


def test_the_same_key_with_other_arguments_is_refused(bench: Bench) -> None:
    bench.settle(bench.elsewhere(fingerprint="one"))
    bench.clock.advance(90.0)
    error = sure(KeyReused, lambda: bench.deliver(claim=bench.claim(fingerprint="other")))
    assert str(error).startswith(
        f"The key '{KEY}' was used 90 s ago with other arguments (by task b). Expected the same"
    )
    assert bench.heard == [events.KeyReused(KEY, "shop.charge", "id-1", original="b")]
    assert bench.runs == []
    assert bench.store.count("acquire") == 1


def agreeing(bench: Bench, fingerprint: str) -> Delivery:
    """Return a delivery that takes the fingerprint of the record that it meets."""
    delivery = bench.delivery(claim=bench.claim(fingerprint="other"))

    def agrees(record: Record) -> bool:
        assert record.fingerprint == "one"
        delivery.claim = replace(delivery.claim, fingerprint=fingerprint)
        return True

    delivery.agrees = agrees  # type: ignore[method-assign]
    return delivery


def test_other_arguments_that_the_adapter_knows_to_be_the_same_are_answered(bench: Bench) -> None:
    bench.settle(bench.elsewhere(fingerprint="one"))
    assert bench.guard().run(agreeing(bench, "one")) == Replayed("theirs", bench.record)
    assert bench.told == ["Replayed"]


def test_other_arguments_are_asked_for_once_more_and_no_more(bench: Bench) -> None:
    bench.settle(bench.elsewhere(fingerprint="one"))
    sure(KeyReused, lambda: bench.guard().run(agreeing(bench, "another")))
    assert bench.store.count("acquire") == 2


def test_no_other_refusal_is_for_the_adapter_to_agree_with(bench: Bench) -> None:
    lease = bench.elsewhere(fingerprint="one")
    delivery = bench.delivery(claim=bench.claim(fingerprint="one"))
    delivery.agrees = lambda record: pytest.fail("these are the same")  # type: ignore[method-assign]
    assert bench.guard().run(delivery) == Busy(60.0, "b")
    bench.store.answer("acquire", Refusal(Verdict.SUPERSEDED, bench.record))
    assert bench.guard().run(delivery) == Dropped()
    bench.settle(lease)
    assert bench.guard().run(delivery) == Replayed("theirs", bench.record)


def test_a_key_that_is_just_being_used_with_other_arguments_is_refused(bench: Bench) -> None:
    bench.elsewhere(fingerprint="one")
    error = sure(KeyReused, lambda: bench.deliver(claim=bench.claim(fingerprint="other")))
    assert f"The key '{KEY}' was used just now with other arguments" in str(error)


def test_an_operation_that_keeps_killing_its_worker_is_not_run_again_for_this_task(bench: Bench) -> None:
    bench.policy = Policy(max_crashes=1)
    bench.elsewhere("a")
    bench.clock.advance(60.0)
    error = sure(CrashLoop, bench.deliver)
    assert f"'{KEY}' has lost its worker 1 times in a row" in str(error)
    assert "sys.exit() in the body" in str(error)
    assert bench.heard == [events.CrashLooped(KEY, "shop.charge", "id-1", crashes=1)]
    assert bench.runs == []


# -- a conflict --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task_id", ["a", "b"])
@pytest.mark.parametrize("on_store_error", ["wait", "run", "raise"])
def test_a_duplicate_that_meets_a_live_lease_learns_who_holds_it_and_for_how_long(
    bench: Bench, task_id: str, on_store_error: Any
) -> None:
    bench.policy = Policy(on_store_error=on_store_error)
    bench.elsewhere("b", holder="host:7")
    bench.clock.advance(20.0)
    assert bench.deliver(claim=bench.claim(task_id)) == Busy(40.0, "b")
    assert bench.heard == [
        events.Conflicted(
            KEY, "shop.charge", "id-1", held_by="host:7", held_for="" if task_id == "b" else "b", remaining=40.0
        )
    ]
    assert bench.clock.slept == []
    assert bench.runs == []


@pytest.mark.parametrize("other", ["A", "b", ""])
def test_on_conflict_raise_refuses_another_task_id(bench: Bench, other: str) -> None:
    bench.policy = Policy(on_conflict="raise")
    bench.elsewhere(other, holder="host:7")
    error = sure(Conflict, bench.deliver)
    assert str(error).startswith(f"'{KEY}' is being done by host:7 for another 60.0 s. Try again later")
    assert bench.told == ["Conflicted"]


def test_on_conflict_raise_says_so_where_a_retry_is_waited_for(bench: Bench) -> None:
    bench.policy = Policy(on_conflict="raise")
    bench.store.inner.release(bench.elsewhere("b"), Release(Reason.RETRY, 30.0, 1))
    assert "is being done by a retry that is due later for another 30.0 s" in str(sure(Conflict, bench.deliver))


@pytest.mark.parametrize("refused", [{"copy": 3, "token": "x"}, {}])
def test_what_on_conflict_raise_refuses_leaves_no_mark_for_which_its_task_would_be_dropped_when_it_is_sent_again(
    bench: Bench, refused: dict[str, Any]
) -> None:
    bench.policy = Policy(on_conflict="raise")
    bench.store.inner.release(bench.elsewhere("a", retries=1), Release(Reason.RETRY, 0.0, 2))
    bench.elsewhere("b")
    bench.store.inner.acquire(bench.claim("a", retries=2))
    bench.store.inner.acquire(bench.claim("a", retries=2, copy=2, token="x"))
    sure(Conflict, lambda: bench.deliver(claim=bench.claim("a", retries=2, **refused)))
    assert bench.told == ["Conflicted"]
    again = bench.store.inner.acquire(bench.claim("a", redelivered=True))
    assert isinstance(again, Refusal)
    assert again.verdict is Verdict.CONFLICT


def test_on_conflict_raise_refuses_a_copy_also_where_the_store_is_away_meanwhile(bench: Bench) -> None:
    bench.policy = Policy(on_conflict="raise")
    bench.elsewhere("b")
    bench.store.after("acquire", bench.store.down)
    sure(Conflict, lambda: bench.deliver(claim=bench.claim("a", copy=1, token="x")))


@pytest.mark.parametrize("on_conflict", ["raise", "wait"])
def test_the_holders_own_task_id_always_stands_aside(bench: Bench, on_conflict: Any) -> None:
    bench.policy = Policy(on_conflict=on_conflict)
    bench.elsewhere(read_anew("id-7"))
    assert bench.deliver(claim=bench.claim(read_anew("id-7"))) == Busy(60.0, "id-7")
    assert bench.clock.slept == []


# -- waiting -----------------------------------------------------------------------------------------------------------


def test_a_waiter_looks_ever_more_rarely_until_the_holder_settles(bench: Bench) -> None:
    bench.policy = Policy(on_conflict="wait")
    lease = bench.elsewhere()
    bench.clock.at(2.0, lambda: bench.settle(lease))
    assert bench.deliver() == Replayed("theirs", bench.record)
    assert bench.clock.slept == [0.05, 0.1, 0.2, 0.4, 0.8, 1.0]
    assert bench.runs == []


@pytest.mark.parametrize("other", ["A", "b", ""])
def test_a_duplicate_of_another_task_waits_and_is_told_as_one_conflict(bench: Bench, other: str) -> None:
    bench.policy = Policy(on_conflict="wait")
    bench.elsewhere(other)
    assert bench.deliver() == Busy(pytest.approx(50.0), other)
    assert bench.told == ["Conflicted"]


def test_a_waiter_stands_aside_after_wait_timeout_with_what_it_saw_last(bench: Bench) -> None:
    bench.policy = Policy(on_conflict="wait", wait_timeout=4.0)
    bench.elsewhere()
    assert bench.deliver() == Busy(56.0, "b")
    assert sum(bench.clock.slept) == pytest.approx(4.0)


def test_a_waiter_never_waits_beyond_its_patience(bench: Bench) -> None:
    bench.policy = Policy(on_conflict="wait", wait_timeout=10.0)
    bench.elsewhere()
    assert bench.deliver(patience=3.0) == Busy(57.0, "b")
    assert sum(bench.clock.slept) == pytest.approx(3.0)


def test_what_was_waited_for_the_store_counts_against_the_patience_of_a_waiter(bench: Bench) -> None:
    bench.policy = Policy(on_conflict="wait", wait_timeout=10.0)
    bench.elsewhere()
    bench.store.down()
    bench.clock.at(6.0, bench.store.up)
    assert isinstance(bench.deliver(patience=8.0), Busy)
    assert bench.clock() == pytest.approx(1008.0)


def test_a_delivery_whose_patience_a_slow_store_used_up_does_not_wait(bench: Bench) -> None:
    bench.policy = Policy(on_conflict="wait")
    bench.elsewhere()
    bench.store.before("acquire", lambda: bench.clock.advance(5.0))
    assert bench.deliver(patience=4.0) == Busy(55.0, "b")
    assert bench.clock.slept == []


def test_a_waiter_stops_when_the_process_is_about_to_stop(bench: Bench) -> None:
    bench.policy = Policy(on_conflict="wait")
    bench.elsewhere()
    assert bench.deliver(stopping=lambda: bench.clock() > 1000.1) == Busy(pytest.approx(59.85), "b")
    assert bench.clock.slept == [0.05, 0.1]


def test_a_waiter_runs_when_the_holder_gave_the_lease_back(bench: Bench) -> None:
    bench.policy = Policy(on_conflict="wait")
    lease = bench.elsewhere()
    bench.clock.at(1.0, lambda: bench.store.inner.release(lease, Release(Reason.FAILED)))
    assert bench.deliver() == Ran(42)
    assert bench.told == ["Conflicted", "Acquired", "Completed"]


def test_a_waiter_stands_aside_once_its_own_task_id_holds_the_lease(bench: Bench) -> None:
    bench.policy = Policy(on_conflict="wait")
    lease = bench.elsewhere("b")

    def change_hands() -> None:
        bench.store.inner.release(lease, Release(Reason.FAILED))
        bench.elsewhere("a")

    bench.clock.at(0.1, change_hands)
    assert bench.deliver() == Busy(pytest.approx(59.95), "a")
    assert bench.clock.slept == [0.05, 0.1]


# -- the store does not serve ------------------------------------------------------------------------------------------


def test_a_delivery_waits_ever_longer_for_the_store_and_runs_when_it_is_back(bench: Bench) -> None:
    bench.store.down()
    bench.clock.at(20.0, bench.store.up)
    assert bench.deliver() == Ran(42)
    assert bench.clock.slept == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0]
    assert bench.told == ["StoreFailed", "StoreRecovered", "Acquired", "Completed"]


def test_a_delivery_whose_patience_ends_stands_aside(bench: Bench) -> None:
    bench.store.down()
    assert bench.deliver(patience=8.0) == Busy(5.0, None)
    assert sum(bench.clock.slept) == pytest.approx(8.0)
    assert bench.runs == []


def test_a_delivery_does_not_wait_for_the_store_in_a_process_that_is_about_to_stop(bench: Bench) -> None:
    bench.store.down()
    assert bench.deliver(stopping=lambda: True) == Busy(5.0, None)
    assert bench.clock.slept == []


def test_a_store_that_is_down_is_asked_once_a_second_for_all_deliveries(bench: Bench) -> None:
    bench.store.down()
    bench.deliver(stopping=lambda: True)  # after one failure it may not be down
    for _ in range(32):
        bench.deliver(stopping=lambda: True)
        bench.clock.advance(0.125)
    assert bench.store.count("acquire") == 1 + 4
    assert bench.told == ["StoreFailed"]


def test_on_store_error_run_runs_without_protection_and_says_so(bench: Bench) -> None:
    bench.policy = Policy(on_store_error="run")
    bench.store.down()
    assert bench.deliver() == Ran(42)
    [holding] = bench.runs
    assert (holding.fence, holding.key, holding.lost) == (0, KEY, False)
    holding.check()
    assert bench.heard[1:] == [events.RanUnprotected(KEY, "shop.charge", "id-1", error="the store is down")]
    assert [verb for verb, _ in bench.store.calls] == ["acquire"]
    assert bench.heartbeat.holdings() == []


def test_an_exception_of_an_unprotected_body_comes_out_as_it_is(bench: Bench) -> None:
    bench.policy = Policy(on_store_error="run")
    bench.store.down()
    error = ValueError("no")
    assert sure(ValueError, lambda: bench.deliver(error)) is error
    assert error.__context__ is None  # it has nothing to do with the store


@pytest.mark.parametrize("reason", [StoreUnreachable("down"), StoreRefused("password"), RecordUnreadable("garbage")])
def test_on_store_error_raise_raises_what_the_store_said(bench: Bench, reason: StoreError) -> None:
    bench.policy = Policy(on_store_error="raise")
    bench.store.down(error=reason)
    assert sure(type(reason), bench.deliver) is reason
    assert bench.runs == []
    assert bench.clock.slept == []


@pytest.mark.parametrize("on_store_error", ["wait", "run"])
def test_a_record_that_cannot_be_read_is_left_alone_for_a_minute(
    bench: Bench, on_store_error: Any, caplog: pytest.LogCaptureFixture
) -> None:
    # It may be a newer worker's word that the operation is done, so that also "run" does not run it.
    bench.policy = Policy(on_store_error=on_store_error)
    bench.store.fail("acquire", RecordUnreadable("garbage"))
    assert bench.deliver() == Busy(60.0, None)
    assert bench.runs == []
    assert bench.clock.slept == []
    assert [(line.levelname, line.getMessage()) for line in caplog.records] == [("ERROR", "garbage")]
    assert bench.told == []


@pytest.mark.parametrize("state", [State.COMPLETED, State.FAILED])
@pytest.mark.parametrize("on_store_error", ["wait", "run"])
def test_a_settled_payload_that_cannot_be_read_is_left_alone_for_a_minute(
    bench: Bench, state: State, on_store_error: Any
) -> None:
    bench.policy = Policy(on_store_error=on_store_error)
    bench.store.inner.settle(bench.elsewhere(), Outcome(state, b"json2:?"), ttl=60.0)
    assert bench.deliver() == Busy(60.0, None)
    assert bench.told == []


def test_a_settled_payload_that_cannot_be_read_is_raised_where_the_policy_says_so(bench: Bench) -> None:
    bench.policy = Policy(on_store_error="raise")
    bench.store.inner.settle(bench.elsewhere(), Outcome(State.COMPLETED, b"json2:?"), ttl=60.0)
    sure(RecordUnreadable, bench.deliver)


# -- the body raises ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ValueError("no"), Reason.FAILED),
        (SystemExit(1), Reason.SHUTDOWN),
        (KeyboardInterrupt(), Reason.SHUTDOWN),
        (Stopped(), Reason.SHUTDOWN),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_body_that_raises_gives_the_lease_back_and_the_very_exception_comes_out(
    bench: Bench, error: BaseException, reason: Reason
) -> None:
    assert sure(type(error), lambda: bench.deliver(error)) is error
    assert (bench.record.state, bench.record.reason) == (State.RELEASED, reason.value)
    assert bench.heard[1:] == [events.Released(KEY, "shop.charge", "id-1", reason=reason.value, fence=1000000000)]
    assert bench.heartbeat.holdings() == []
    assert [verb for verb, _ in bench.store.calls] == ["acquire", "release"]


@pytest.mark.parametrize("reason", [reason for reason in Reason if reason is not Reason.DONE])
def test_an_error_is_told_as_a_release_whatever_its_reason(bench: Bench, reason: Reason) -> None:
    sure(ValueError, lambda: bench.deliver(ValueError(), ending=lambda error: Release(reason)))
    assert bench.heard[1:] == [events.Released(KEY, "shop.charge", "id-1", reason=reason.value, fence=1000000000)]


def test_a_retry_is_released_as_the_adapter_says(bench: Bench) -> None:
    ending = Release(Reason.RETRY, 30.0, 1)
    with suppress(ValueError):
        bench.deliver(ValueError(), ending=lambda error: ending)
    assert bench.store.calls[-1] == ("release", (bench.runs[0].lease, ending))
    assert bench.record.remaining == 30.0


def test_a_thread_that_a_failed_body_left_behind_is_told_to_stop(bench: Bench) -> None:
    """Its lease is not over yet, and another delivery may run."""
    with suppress(ValueError):
        bench.deliver(ValueError())
    [left_behind] = bench.runs
    assert not left_behind.doubtful
    assert "given back when its run ended" in str(sure(LostInTask, left_behind.check))
    assert bench.deliver(lambda holding: holding.check()) == Ran(None)


def test_a_thread_that_a_settled_body_left_behind_may_go_on(bench: Bench) -> None:
    bench.deliver()
    bench.runs[0].check()  # nothing else runs the operation


def test_a_body_that_was_released_runs_again(bench: Bench) -> None:
    with suppress(ValueError):
        bench.deliver(ValueError())
    assert bench.deliver() == Ran(42)


def test_what_raises_to_be_settled_as_completed_is_raised_and_settled(bench: Bench) -> None:
    bench.policy = Policy(result_ttl=7200, failure_ttl=3600)
    ignore = ValueError("ignore")
    outcome = Outcome(State.COMPLETED, bench.codec.encode_ignored("id-1"))
    assert sure(ValueError, lambda: bench.deliver(ignore, ending=lambda error: outcome)) is ignore
    assert bench.told == ["Acquired", "Completed"]
    assert bench.store.calls[-1][1][1:] == (outcome, 7200.0)


@pytest.mark.parametrize("child", [-1, 1])
@pytest.mark.parametrize("raised", [None, ValueError("no"), SystemExit(0)], ids=lambda raised: type(raised).__name__)
def test_a_child_that_the_body_forked_leaves_the_run_to_its_parent(
    bench: Bench, raised: BaseException | None, child: int
) -> None:
    def body(held: HeldLease) -> str:
        held.pid += child
        if raised is not None:
            raise raised
        return "the child's"

    if raised is None:
        assert bench.deliver(body) == Ran("the child's")
    else:
        assert sure(type(raised), lambda: bench.deliver(body)) is raised
    assert bench.told == ["Acquired"]
    assert bench.record.state is State.IN_PROGRESS
    assert [verb for verb, _ in bench.store.calls] == ["acquire"]


def test_a_lease_is_not_renewed_any_more_while_it_is_given_back(bench: Bench) -> None:
    watched: list[HeldLease] = []
    bench.store.before("release", lambda: watched.extend(bench.heartbeat.holdings()))
    with suppress(ValueError):
        bench.deliver(
            ValueError(), ending=lambda error: watched.extend(bench.heartbeat.holdings()) or Release(Reason.FAILED)
        )
    assert watched == []


@pytest.mark.parametrize("reason", [StoreUnreachable("down"), RecordUnreadable("garbage"), TypeError("a bug")])
def test_a_store_error_while_releasing_never_hides_the_users_exception(
    bench: Bench, reason: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    bench.store.down("release", error=reason)
    error = ValueError("no")
    assert sure(ValueError, lambda: bench.deliver(error)) is error
    assert bench.heard[1:] == [
        events.ReleaseFailed(KEY, "shop.charge", "id-1", reason="failed", error=str(reason), fence=1000000000)
    ]
    assert f"ReleaseFailed key={KEY}" in caplog.text


def test_an_adapter_that_cannot_tell_what_an_exception_means_does_not_hide_it(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    def ending(error: BaseException) -> Ending:
        raise TypeError("a bug")

    error = ValueError("no")
    assert sure(ValueError, lambda: bench.deliver(error, ending=ending)) is error
    assert (bench.record.state, bench.record.reason) == (State.RELEASED, "failed")
    assert f"{KEY}: what this error means is not known: <class 'ValueError'>" in caplog.text
    assert "a bug" in caplog.text


def test_where_no_thread_can_renew_a_lease_it_is_given_back_and_the_delivery_waits(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start)
        for _ in range(3):
            decision = bench.deliver()
            assert isinstance(decision, Busy)
            assert isinstance(decision.error, StoreUnreachable)
            assert (bench.record.state, bench.record.reason) == (State.RELEASED, "shutdown")
            assert bench.runs == bench.heartbeat.holdings() == []
    (told,) = [entry.message for entry in caplog.records if entry.levelname == "ERROR"]  # and not one a delivery
    assert "can't start new thread" in told
    assert "pids.max" in told
    assert bench.deliver() == Ran(42)
    assert not bench.heartbeat.short


class TestStartAndFinish:
    """Callers that run the body themselves, as a coroutine or a request, take the steps of `Guard.run` one by one."""

    def held(self, bench: Bench) -> tuple[Guard, Delivery, HeldLease]:
        guard, delivery = bench.guard(), bench.delivery()
        held = guard.acquire_now(delivery)
        assert isinstance(held, HeldLease), held
        return guard, delivery, held

    def test_what_the_body_returned_is_settled(self, bench: Bench) -> None:
        guard, delivery, held = self.held(bench)
        guard.start(delivery, held)
        assert bench.heartbeat.holdings() == [held]
        assert guard.finish(delivery, held, 42) == Ran(42)
        assert (bench.record.state, bench.heartbeat.holdings()) == (State.COMPLETED, [])
        assert bench.deliver() == Replayed(42, bench.record)

    def test_what_the_body_raised_is_raised_and_the_lease_given_back(self, bench: Bench) -> None:
        guard, delivery, held = self.held(bench)
        guard.start(delivery, held)
        error = ValueError("no")
        assert sure(ValueError, lambda: guard.finish(delivery, held, error=error)) is error
        assert (bench.record.state, bench.record.reason) == (State.RELEASED, "failed")
        assert bench.heartbeat.holdings() == []

    def test_what_cannot_begin_gives_the_lease_back(self, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
        def start(thread: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        guard, delivery, held = self.held(bench)
        monkeypatch.setattr(threading.Thread, "start", start)
        decision = guard.start(delivery, held)
        assert isinstance(decision, Busy)
        assert "can't start new thread" in str(decision.error)
        assert bench.record.state is State.RELEASED
        assert bench.heartbeat.holdings() == []

    def test_an_interruption_before_the_body_gives_the_lease_back(self, bench: Bench, before_body: BeforeBody) -> None:
        """As of a request whose server ends."""
        guard, delivery, held = self.held(bench)

        def interrupt() -> None:
            raise KeyboardInterrupt

        before_body(interrupt)
        sure(KeyboardInterrupt, lambda: guard.start(delivery, held))
        assert (bench.record.state, bench.record.reason) == (State.RELEASED, "shutdown")
        assert bench.heartbeat.holdings() == []

    def test_a_body_whose_lease_ran_out_before_it_does_not_begin(self, bench: Bench, before_body: BeforeBody) -> None:
        before_body(bench.overtake)
        guard, delivery = bench.guard(), bench.delivery()
        assert isinstance(guard.begin(delivery), Busy)
        assert (bench.told, bench.heartbeat.holdings()) == (["Acquired", "LeaseLost"], [])

    def test_a_body_begins_whose_lease_nobody_took_before_it(self, bench: Bench, before_body: BeforeBody) -> None:
        before_body(lambda: bench.clock.advance(bench.policy.lease_ttl))
        held = bench.guard().begin(bench.delivery())
        assert isinstance(held, HeldLease), held
        assert held.deadline > bench.clock()
        assert bench.heartbeat.holdings() == [held]

    def test_nothing_begins_where_a_settled_run_answers(self, bench: Bench) -> None:
        bench.deliver()
        assert isinstance(bench.guard().begin(bench.delivery()), Replayed)

    def test_what_runs_without_protection_has_no_lease_to_renew(self, bench: Bench) -> None:
        bench.policy = Policy(on_store_error="run")
        bench.store.down()
        held = bench.guard().begin(bench.delivery())
        assert isinstance(held, HeldLease)
        assert not held.fence
        assert bench.heartbeat.holdings() == []


def test_what_began_apart_and_lost_its_lease_is_answered_as_a_duplicate(bench: Bench) -> None:
    guard, delivery = bench.guard(), bench.delivery()
    held = guard.begin(delivery)
    assert isinstance(held, HeldLease)
    bench.settle(bench.overtake(), "theirs")
    assert guard.finish(delivery, held, error=ValueError("mine")) == Replayed("theirs", bench.record)
    assert bench.told == ["Acquired", "LeaseLost", "Replayed"]


def test_whatever_ends_a_run_its_lease_is_not_renewed_any_more(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def encode_value(*args: Any, **options: Any) -> bytes:
        raise SystemExit(1)

    monkeypatch.setattr(bench.codec, "encode_value", encode_value)
    sure(SystemExit, bench.deliver)
    assert bench.heartbeat.holdings() == []


# -- the lease was lost while the body ran -----------------------------------------------------------------------------

ENDINGS: dict[str, Callable[[], Any]] = {
    "returns": lambda: "mine",
    "raises": lambda: ValueError("no"),
    "raises for good": lambda: Declined("no funds"),
    "notices": lambda: LostInTask("gone"),
}


@pytest.fixture(params=ENDINGS)
def ending(request: pytest.FixtureRequest) -> Any:
    return ENDINGS[request.param]()


def after(happens: Callable[[], object], ending: Any) -> Callable[[HeldLease], Any]:
    """Return a body that ends like this after something has happened."""

    def body(holding: HeldLease) -> Any:
        happens()
        if isinstance(ending, BaseException):
            raise ending
        return ending

    return body


def test_a_run_that_lost_its_lease_is_answered_with_what_the_other_settled(bench: Bench, ending: Any) -> None:
    def overtaken() -> None:
        bench.settle(bench.overtake(), "theirs")

    answer = bench.deliver(after(overtaken, ending))
    assert answer == Replayed("theirs", bench.record)
    assert bench.told == ["Acquired", "LeaseLost", "Replayed"]


def test_a_run_that_lost_its_lease_raises_the_failure_that_the_other_settled(bench: Bench, ending: Any) -> None:
    bench.policy = Policy(remember_failures=Declined)

    def overtaken() -> None:
        bench.fail(bench.overtake(), Declined("theirs"))

    assert sure(Declined, lambda: bench.deliver(after(overtaken, ending))).args == ("theirs",)


def test_a_run_that_lost_its_lease_stands_aside_while_the_other_runs(bench: Bench, ending: Any) -> None:
    def overtaken() -> None:
        bench.overtake()
        bench.clock.advance(15.0)

    assert bench.deliver(after(overtaken, ending)) == Busy(45.0, "b")
    assert bench.record.state is State.IN_PROGRESS
    assert bench.told == ["Acquired", "LeaseLost"]


def giving_up(bench: Bench, then: Any) -> Decision:
    """Deliver a body that publishes its retry, and then returns this, raises it, or does what it does."""
    given_up = Release(Reason.RETRY, 30.0, 1)

    def body(holding: HeldLease) -> Any:
        bench.guard().give_up(delivery, holding, given_up, Exception("a retry"))
        if isinstance(then, BaseException):
            raise then
        return then(holding) if callable(then) else then

    delivery = bench.delivery(body)
    return bench.guard().run(delivery)


@pytest.mark.parametrize("then", [42, ValueError("no"), Declined("no"), LostInTask("gone"), HeldLease.check])
def test_a_run_that_gave_the_operation_up_leaves_it_to_what_carries_it_on(
    bench: Bench, then: Any, caplog: pytest.LogCaptureFixture
) -> None:
    bench.policy = Policy(remember_failures=Declined)
    assert giving_up(bench, then) == Dropped()
    assert (bench.record.state, bench.record.reason, bench.record.remaining) == (State.RELEASED, "retry", 30.0)
    assert bench.told == ["Acquired", "Released"]
    assert ("raised after" in caplog.text) == isinstance(then, (ValueError, Declined))


@pytest.mark.parametrize("reason", Reason)
def test_only_an_error_after_the_retry_was_published_is_logged(
    bench: Bench, reason: Reason, caplog: pytest.LogCaptureFixture
) -> None:
    """Celery's adapter counts a MemoryError as a crash, and nothing else tells of it."""

    def body(holding: HeldLease) -> None:
        bench.guard().give_up(delivery, holding, Release(Reason.RETRY, 30.0, 1), Exception("a retry"))
        raise ValueError("no")

    delivery = bench.delivery(body, ending=lambda error: Release(reason))
    assert bench.guard().run(delivery) == Dropped()
    assert ("raised after" in caplog.text) == (reason in (Reason.FAILED, Reason.CRASHED))


def test_a_run_that_gave_the_operation_up_ends_with_its_process(bench: Bench) -> None:
    sure(SystemExit, lambda: giving_up(bench, SystemExit(3)))
    assert (bench.record.state, bench.record.reason) == (State.RELEASED, "retry")


def test_a_lease_that_was_given_up_is_not_renewed_and_says_why(bench: Bench) -> None:
    def then(holding: HeldLease) -> None:
        bench.clock.advance(30.0)
        bench.heartbeat.beat(bench.clock())
        assert bench.store.count("renew") == 0
        assert "published its retry" in str(sure(LostInTask, holding.check))

    assert giving_up(bench, then) == Dropped()


def test_a_lease_that_cannot_be_given_up_because_the_store_is_down_is_not_the_runs_any_more(bench: Bench) -> None:
    def then(holding: HeldLease) -> str:
        bench.store.up()
        sure(LostInTask, holding.check)
        return "mine"

    bench.store.down("release")
    assert giving_up(bench, then) == Dropped()
    assert bench.told == ["Acquired", "ReleaseFailed"]
    assert bench.record.state is State.IN_PROGRESS


def test_an_unprotected_run_has_nothing_to_give_up(bench: Bench) -> None:
    bench.policy = Policy(on_store_error="run")
    bench.store.down("acquire")
    assert giving_up(bench, "mine") == Ran("mine")


def test_what_a_run_settled_within_its_transaction_is_not_given_up(bench: Bench) -> None:
    def body(holding: HeldLease) -> Any:
        holding.within = {b"": "mine"}
        bench.settle(holding.lease, "mine")
        bench.guard().give_up(delivery, holding, Release(Reason.RETRY), Exception("a retry"))
        return "not this"

    delivery = bench.delivery(body)
    assert bench.guard().run(delivery) == Ran("mine")
    assert bench.record.state is State.COMPLETED


def test_a_run_whose_record_was_forgotten_is_no_duplicate_of_anything(bench: Bench) -> None:
    def forgotten() -> None:
        bench.store.inner.delete(KEY)

    assert bench.deliver(after(forgotten, "mine")) == Ran("mine")
    assert bench.record.state is State.COMPLETED
    bench.store.inner.delete(KEY)
    sure(ValueError, lambda: bench.deliver(after(forgotten, ValueError("no"))))
    assert bench.deliver(after(forgotten, LostInTask("gone"))) == Busy(5.0, None)


@pytest.mark.parametrize("reason", [StoreUnreachable("down"), RecordUnreadable("garbage"), TypeError("a bug")])
def test_a_run_that_lost_its_lease_stands_aside_if_the_store_cannot_say_what_became_of_it(
    bench: Bench, ending: Any, reason: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    bench.store.down("get", error=reason)
    assert bench.deliver(after(bench.overtake, ending)) == Busy(5.0, None)
    assert f"What became of {KEY} is not known yet: {reason}" in caplog.text


def test_a_run_that_knows_of_its_lost_lease_stands_aside_if_the_store_is_down(bench: Bench, ending: Any) -> None:
    def overtaken() -> None:
        bench.overtake()
        bench.heartbeat.beat(bench.clock())
        bench.store.down()

    assert bench.deliver(after(overtaken, ending)) == Busy(5.0, None)
    assert bench.told[-1] == "LeaseLost"


def test_a_lost_run_is_answered_by_the_rules_for_duplicates(bench: Bench, ending: Any) -> None:
    bench.policy = Policy(on_duplicate="raise")

    def overtaken() -> None:
        bench.settle(bench.overtake(), "theirs")

    sure(Conflict, lambda: bench.deliver(after(overtaken, ending)))


def test_a_lost_run_asks_again_what_became_of_it_if_it_was_interrupted(bench: Bench, ending: Any) -> None:
    def overtaken() -> None:
        bench.settle(bench.overtake(), "theirs")

    bench.store.fail("get", SoftTimeLimit())
    assert bench.deliver(after(overtaken, ending)) == Replayed("theirs", bench.record)


@pytest.mark.parametrize(
    ("ending", "text"),
    [
        ("mine", "completed"),
        (ValueError("no"), "ValueError: no"),
        (LostInTask("gone"), f"{__name__}.LostInTask: gone"),
        (SystemExit(3), "SystemExit: 3"),
        (SyntaxError("bad", ("x.py", 7, None, None)), 'File "x.py", line 7\nSyntaxError: bad'),
    ],
    ids=["returns", "raises", "notices", "exits", "says more than one line"],
)
def test_what_a_lost_run_was_about_to_record_is_told(bench: Bench, ending: Any, text: str) -> None:
    with suppress(SystemExit):
        bench.deliver(after(bench.overtake, ending))
    [missed] = [event for event in bench.heard if isinstance(event, events.LeaseLost)]
    assert missed == events.LeaseLost(KEY, "shop.charge", "id-1", ending=text, fence=1000000000)


@pytest.mark.parametrize(
    "error", [SystemExit(1), KeyboardInterrupt(), Stopped()], ids=lambda error: type(error).__name__
)
@pytest.mark.parametrize("settled", [False, True])
def test_what_ends_the_process_comes_out_whoever_holds_the_lease(
    bench: Bench, error: BaseException, settled: bool
) -> None:
    bench.policy = Policy(remember_failures=Declined)

    def overtaken() -> None:
        lease = bench.overtake()
        if settled:
            bench.fail(lease, Declined("theirs"))

    assert sure(type(error), lambda: bench.deliver(after(overtaken, error))) is error
    assert bench.told == ["Acquired", "LeaseLost"]
    assert bench.store.count("get") == 0


def test_an_exception_that_cannot_be_shown_does_not_hide_that_the_lease_was_lost(bench: Bench) -> None:
    class Unspeakable(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no words")

    assert bench.deliver(after(bench.overtake, Unspeakable())) == Busy(60.0, "b")


@pytest.mark.parametrize("settled", [False, True])
def test_a_retry_that_was_published_goes_on_in_place_of_a_run_that_lost_its_lease(bench: Bench, settled: bool) -> None:
    def overtaken() -> None:
        lease = bench.overtake("a")
        if settled:
            bench.settle(lease)

    ending = Release(Reason.RETRY, 0.0, 1)
    assert bench.deliver(after(overtaken, ValueError("retry")), ending=lambda error: ending) == Dropped()
    assert bench.told == ["Acquired", "LeaseLost"]


def test_who_raises_lease_lost_without_having_lost_it_leaves_somebody_to_answer(bench: Bench) -> None:
    # Its adapter may ack what raises LeaseLost: without a copy that is published first the message would be gone.
    assert bench.deliver(LostInTask("gone")) == Busy(0.0, "a")
    assert bench.record.state is State.RELEASED
    assert bench.told == ["Acquired", "Released"]


def test_who_raises_lease_lost_while_the_store_is_down_leaves_somebody_to_answer(bench: Bench) -> None:
    bench.store.down("release", "get")
    assert bench.deliver(LostInTask("gone")) == Busy(5.0, None)


def test_a_body_that_checks_learns_that_its_lease_was_lost(bench: Bench) -> None:
    def body(holding: HeldLease) -> None:
        bench.overtake()
        holding.check()
        pytest.fail("it goes on")

    assert bench.deliver(body) == Busy(60.0, "b")


# -- settling while the store does not serve ---------------------------------------------------------------------------


@pytest.mark.parametrize("reason", [StoreUnreachable("down"), StoreRefused("password"), TypeError("a bug")])
def test_to_settle_is_tried_again_until_the_store_is_back(bench: Bench, reason: Exception) -> None:
    bench.store.down("settle", error=reason)
    bench.clock.at(10.0, bench.store.up)
    assert bench.deliver() == Ran(42)
    assert bench.clock.slept == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0]
    assert bench.record.state is State.COMPLETED
    assert bench.told == ["Acquired", "Completed"]


LARGE_VALUE = "x" * 100_000


def test_a_large_value_that_a_store_does_not_take_is_left_out_so_that_the_body_does_not_run_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    settle = bench.store.settle

    def refuse(lease: Lease, outcome: Outcome, *, ttl: float) -> None:
        if len(outcome.payload) > 90_000:
            raise StoreRefused("too much")
        settle(lease, outcome, ttl=ttl)

    monkeypatch.setattr(bench.store, "settle", refuse)
    bench.codec = Codec(compress_above=1_000_000, result_max_bytes=1_000_000)
    assert bench.deliver(LARGE_VALUE) == Ran(LARGE_VALUE)
    assert bench.told == ["Acquired", "Completed"]
    error = sure(ResultUnavailable, lambda: bench.deliver(wants_result=True))
    assert "(the store did not take 100007 bytes: too much)" in str(error)
    assert bench.store.count("ping") == 1


@pytest.mark.parametrize(
    ("after", "size", "left_out"),
    [(0.5, 65537, False), (46.5, 65537, False), (46.75, 65537, True), (46.75, 65536, False)],
)
def test_only_a_large_value_is_left_out_and_only_in_the_last_seconds_of_its_lease(
    bench: Bench, after: float, size: int, left_out: bool
) -> None:
    """Until then it may be the store, which will take it once it is back."""

    def refuse() -> None:
        bench.clock.now = began + after
        raise StoreRefused("too much")

    began = bench.clock()
    bench.codec = Codec(compress_above=1_000_000, result_max_bytes=1_000_000)
    bench.store.fail("settle", StoreRefused("too much"))
    bench.store.before("settle", refuse)
    bench.deliver("x" * (size - len('json:""')))
    first, second, third = [call[1].payload for verb, call in bench.store.calls if verb == "settle"]
    assert len(first) == len(second) == size
    assert (third != first) is left_out


@pytest.mark.parametrize("failing", [("settle",), ()], ids=["once", "with all else"])
def test_a_large_value_is_kept_where_the_store_fails_for_other_reasons(bench: Bench, failing: tuple[str, ...]) -> None:
    def body(_: HeldLease) -> str:
        if failing:
            bench.store.fail("settle")
        else:
            bench.store.down()
            bench.clock.at(10.0, bench.store.up)
        return LARGE_VALUE

    bench.codec = Codec(compress_above=1_000_000, result_max_bytes=1_000_000)
    bench.deliver(body)
    assert bench.deliver() == Replayed(LARGE_VALUE, bench.record)


def test_a_store_that_stays_down_is_not_taken_for_one_that_refuses_a_large_value(bench: Bench) -> None:
    def body(_: HeldLease) -> str:
        bench.store.down()
        return LARGE_VALUE

    bench.codec = Codec(compress_above=1_000_000, result_max_bytes=1_000_000)
    assert bench.deliver(body) == Ran(LARGE_VALUE)
    assert bench.told == ["Acquired", "SettleFailed"]
    assert bench.store.count("ping") > 0


def test_a_large_failure_is_not_recorded_as_a_success(bench: Bench) -> None:
    bench.codec = Codec(compress_above=1_000_000, result_max_bytes=1_000_000)
    bench.store.fail("settle", times=16)
    sure(Declined, lambda: bench.deliver(Declined(LARGE_VALUE)))
    assert bench.clock() > bench.runs[0].deadline - 2.5, "it was tried for as long as it could be"
    assert bench.record.state is State.FAILED


@pytest.mark.parametrize("started", [1.0, 1000.0], ids=["just started", "started long ago"])
def test_events_say_how_long_things_took_and_who_tells_it(bench: Bench, started: float) -> None:
    bench.clock.now = started
    bench.store.before("acquire", lambda: bench.clock.advance(0.5))
    bench.store.before("settle", lambda: bench.clock.advance(0.25))
    claim = bench.claim(holder="host:7", copy=2, token="x", retries=3, redelivered=True)

    def deliver() -> None:
        delivery = bench.delivery(lambda holding: bench.clock.advance(7.0), claim)
        bench.clock.advance(1.0)
        bench.guard().run(delivery)

    deliver()
    began, done = bench.heard
    assert isinstance(began, events.Acquired)
    assert isinstance(done, events.Completed)
    assert (began.holder, began.copy, began.retries, began.redelivered) == ("host:7", 2, 3, True)
    assert (began.asked, began.waited) == (0.5, 1.5)
    assert (done.holder, done.ran, done.took) == ("host:7", 7.0, 0.25)
    deliver()
    replayed = bench.heard[2]
    assert isinstance(replayed, events.Replayed)
    assert (replayed.waited, replayed.age) == (1.0, 1.0)


def test_an_event_that_has_no_receiver_is_not_made_unless_it_is_noted(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted: list[events.Event] = []
    made, send = [], history.send

    def count(event: events.Event, hooks: list[events.Hook]) -> None:
        made.append(type(event))
        send(event, hooks)

    monkeypatch.setattr(history, "send", count)
    events.remove_hook(bench.heard.append)
    try:
        bench.deliver("x", bench.claim(key="k0"), note=noted.append)
        assert (noted, made) == ([], [])
        bench.deliver("x", bench.claim(key="k1", copy=1), note=noted.append)
    finally:
        events.add_hook(bench.heard.append)
    assert [type(event) for event in noted] == made == [events.Acquired, events.Completed]


@pytest.mark.parametrize("started", [1.0, 1000.0], ids=["just started", "started long ago"])
def test_to_settle_is_given_up_at_the_deadline_of_the_lease_and_the_value_is_returned(
    bench: Bench, started: float
) -> None:
    bench.clock.now = started

    def body(holding: HeldLease) -> str:
        bench.clock.advance(20.0)
        bench.store.down("settle")
        return "mine"

    assert bench.deliver(body) == Ran("mine")
    assert bench.clock() == started + 54.0
    assert bench.heard[1:] == [
        events.SettleFailed(KEY, "shop.charge", "id-1", error="the store is down", fence=int(started * 1_000_000))
    ]


def test_a_lease_in_doubt_is_tried_to_settle_for_some_seconds(bench: Bench) -> None:
    def body(holding: HeldLease) -> None:
        bench.clock.advance(57.0)
        bench.store.down("settle")

    began = bench.clock.now
    assert bench.deliver(body) == Ran(None)
    assert bench.clock.now - began - 57.0 == pytest.approx(5.0, abs=0.2)
    assert bench.store.count("settle") > 2
    assert bench.told == ["Acquired", "SettleFailed"]


def test_a_lease_in_doubt_settles_once_a_short_outage_is_over(bench: Bench) -> None:
    def body(holding: HeldLease) -> None:
        bench.clock.advance(57.0)
        bench.store.down("settle")
        bench.clock.at(3.0, bench.store.up)

    assert bench.deliver(body) == Ran(None)
    assert bench.told == ["Acquired", "Completed"]


def test_a_lease_in_doubt_that_nobody_took_still_settles(bench: Bench) -> None:
    assert bench.deliver(lambda holding: bench.clock.advance(600.0)) == Ran(None)
    assert bench.told == ["Acquired", "Completed"]


def test_a_process_that_is_about_to_stop_still_waits_to_settle(bench: Bench) -> None:
    bench.store.down("settle")
    bench.clock.at(10.0, bench.store.up)
    assert bench.deliver(stopping=lambda: True) == Ran(42)
    assert bench.told == ["Acquired", "Completed"]


def test_a_final_failure_that_cannot_be_settled_is_raised(bench: Bench) -> None:
    bench.store.down("settle")
    error = Declined("no funds")
    assert sure(Declined, lambda: bench.deliver(error)) is error
    assert bench.told == ["Acquired", "SettleFailed"]


def test_a_lease_that_is_lost_while_it_waits_to_settle_makes_a_duplicate_of_its_run(bench: Bench) -> None:
    bench.policy = Policy(lease_ttl=3.0)
    bench.store.down("settle")
    bench.clock.at(2.5, lambda: (bench.store.inner.delete(KEY), bench.done_elsewhere(), bench.store.up()))
    assert bench.deliver("mine") == Replayed("theirs", bench.record)
    assert bench.told == ["Acquired", "LeaseLost", "Replayed"]


def test_a_lost_reply_to_settle_is_asked_for_again(bench: Bench) -> None:
    bench.store.lose_reply("settle")
    assert bench.deliver() == Ran(42)
    assert bench.store.count("settle") == 2
    assert bench.told == ["Acquired", "Completed"]


# -- interruptions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_interrupted_settle_is_asked_again_and_the_run_ends_as_it_was_about_to(bench: Bench, when: str) -> None:
    def interrupt() -> None:
        raise SoftTimeLimit

    getattr(bench.store, when)("settle", interrupt)
    assert bench.deliver() == Ran(42)
    assert bench.store.count("settle") == 2
    assert bench.record.state is State.COMPLETED
    assert bench.told == ["Acquired", "Completed"]
    assert bench.clock.slept == []


@pytest.mark.parametrize("interruption", [SoftTimeLimit("now"), KeyboardInterrupt()])
def test_an_interruption_while_the_result_is_written_down_leaves_no_effect_unrecorded(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, interruption: BaseException
) -> None:
    """A result may be a large file, which takes longer to write than a store call."""
    encode, interruptions = bench.codec.encode_value, [interruption]

    def interrupted(*args: Any, **options: Any) -> bytes:
        if interruptions:
            raise interruptions.pop()
        return encode(*args, **options)

    monkeypatch.setattr(bench.codec, "encode_value", interrupted)
    if isinstance(interruption, Exception):
        assert bench.deliver() == Ran(42)
    else:
        with pytest.raises(KeyboardInterrupt):
            bench.deliver()
    assert bench.record.state is State.COMPLETED


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_interrupted_release_is_asked_again_and_the_users_exception_comes_out(bench: Bench, when: str) -> None:
    def interrupt() -> None:
        raise SoftTimeLimit

    getattr(bench.store, when)("release", interrupt)
    error = ValueError("no")
    assert sure(ValueError, lambda: bench.deliver(error)) is error
    assert bench.record.state is State.RELEASED
    assert bench.told == ["Acquired", "Released"]


def test_an_interrupted_settle_of_a_failure_is_asked_again(bench: Bench) -> None:
    bench.store.fail("settle", SoftTimeLimit())
    sure(Declined, lambda: bench.deliver(Declined("no funds")))
    assert bench.record.state is State.FAILED


def test_an_interrupted_pause_between_two_tries_to_settle_ends_nothing(bench: Bench) -> None:
    def interrupt() -> None:
        raise SoftTimeLimit

    bench.store.fail("settle", times=3)
    bench.clock.at(0.2, interrupt)
    assert bench.deliver() == Ran(42)
    assert bench.record.state is State.COMPLETED
    assert bench.told == ["Acquired", "Completed"]


def test_an_interruption_while_the_adapter_tells_what_an_exception_means_ends_nothing(bench: Bench) -> None:
    interruptions = [SoftTimeLimit()]

    def ending(error: BaseException) -> Ending:
        if interruptions:
            raise interruptions.pop()
        return Release(Reason.REJECTED)

    sure(ValueError, lambda: bench.deliver(ValueError("no"), ending=ending))
    assert bench.record.reason == "rejected"


@pytest.mark.parametrize(
    ("error", "reason"),
    [(SoftTimeLimit(), "failed"), (SystemExit(1), "shutdown")],
    ids=["a soft time limit", "a shutdown"],
)
def test_an_interrupted_acquire_gives_back_what_it_may_have_got(
    bench: Bench, error: BaseException, reason: str
) -> None:
    bench.store.lose_reply("acquire", error)
    claim = bench.claim()
    assert sure(type(error), lambda: bench.deliver(claim=claim)) is error
    assert bench.store.calls[-1] == ("release", (Lease(claim, 0), Release(Reason(reason))))
    assert (bench.record.state, bench.record.reason) == (State.RELEASED, reason)
    assert bench.heard == []  # no run began, and none ended
    assert bench.runs == []


def test_an_interruption_as_the_answer_is_taken_gives_the_lease_back(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*args: Any) -> HeldLease:
        raise SoftTimeLimit

    monkeypatch.setattr(Guard, "_hold", interrupted)
    sure(SoftTimeLimit, bench.deliver)
    assert (bench.record.state, bench.record.reason) == (State.RELEASED, "failed")


def test_a_lease_that_came_late_is_given_back_by_a_delivery_that_is_interrupted_before_it_asks_again(
    bench: Bench,
) -> None:
    def interrupt() -> None:
        raise SoftTimeLimit

    late = bench.policy.lease_ttl
    bench.store.after("acquire", lambda: bench.clock.advance(late))
    bench.clock.at(late + 0.01, interrupt)
    sure(SoftTimeLimit, bench.deliver)
    assert (bench.record.state, bench.record.reason) == (State.RELEASED, "failed")


def test_an_interrupted_acquire_leaves_the_lease_of_another_alone(bench: Bench) -> None:
    lease = bench.elsewhere()
    bench.store.lose_reply("acquire", SoftTimeLimit())
    sure(SoftTimeLimit, bench.deliver)
    assert (bench.record.state, bench.record.owner) == (State.IN_PROGRESS, lease.owner)
    assert bench.told == []


def test_an_interrupted_acquire_raises_the_interruption_though_the_store_is_down(bench: Bench) -> None:
    error = SoftTimeLimit()
    bench.store.fail("acquire", error)
    bench.store.down("release")
    assert sure(SoftTimeLimit, bench.deliver) is error


def test_a_body_that_is_interrupted_ends_as_raising(bench: Bench) -> None:
    sure(SoftTimeLimit, lambda: bench.deliver(SoftTimeLimit()))
    assert bench.record.state is State.RELEASED


# -- max_lease ---------------------------------------------------------------------------------------------------------


def test_past_max_lease_a_stuck_body_loses_its_lease_to_the_next_delivery(bench: Bench) -> None:
    def body(holding: HeldLease) -> None:
        for _ in range(200):
            bench.clock.advance(1.0)
            bench.heartbeat.beat(bench.clock())
        bench.done_elsewhere()

    assert bench.deliver(body, max_lease=100.0) == Replayed("theirs", bench.record)
    assert bench.store.count("renew") == 4


# -- callers that are not called again ---------------------------------------------------------------------------------


def test_what_was_granted_late_is_given_back_by_a_delivery_that_asks_no_more(bench: Bench) -> None:
    delivery = bench.delivery()
    bench.guard().abandon(delivery, Exception())
    assert bench.store.count("release") == 0
    bench.store.inner.acquire(delivery.claim)
    delivery.granted_late = True
    bench.guard().abandon(delivery, Exception())
    assert bench.record.state is State.RELEASED


def test_a_caller_that_is_not_called_again_is_told_how_long_it_may_take() -> None:
    error = in_progress(KEY, 2.5)
    assert (error.remaining, "for another 2.5 s" in str(error), KEY in str(error)) == (2.5, True, True)


# -- the nouns ---------------------------------------------------------------------------------------------------------


def test_a_delivery_without_more_has_a_reader_and_all_the_time_there_is(bench: Bench) -> None:
    delivery = ScriptedDelivery(lambda held: None, bench.ending)
    delivery.identify(DeliveryEvents(bench.claim()))
    assert (delivery.task_id, delivery.wants_result, delivery.published, delivery.alone) == ("", True, False, False)
    assert delivery.min_wait() == 0
    assert delivery.patience == float("inf")
    assert delivery.stopping() is False
    assert delivery.lost_error is LeaseLost
    assert delivery.max_lease is None
    assert delivery.granted_late is False
    assert Busy(1.0).holder_task_id is None


@pytest.mark.parametrize("missing", ["body", "ending"])
def test_a_delivery_has_a_body_and_an_ending(missing: str) -> None:
    members = {name: getattr(ScriptedDelivery, name) for name in {"body", "ending"} - {missing}}
    with pytest.raises(TypeError, match=missing):
        type("Half", (Delivery,), members)()


DECISIONS = [
    Ran(1),
    Replayed(1, Record(KEY, State.COMPLETED)),
    Ignored("id-9", Record(KEY, State.COMPLETED)),
    Busy(1.0),
    Dropped(),
]


@pytest.mark.parametrize("decision", DECISIONS, ids=lambda decision: type(decision).__name__)
def test_a_decision_cannot_be_changed(decision: Decision) -> None:
    assert not hasattr(decision, "__dict__")
    assert decision in {decision}
    for name in decision.__dataclass_fields__:
        with pytest.raises(FrozenInstanceError):
            setattr(decision, name, None)


def test_what_is_busy_awaits_no_task_unless_it_says_so_and_is_compared_by_what_it_answers() -> None:
    assert (Busy(1.0).awaited, Busy(1.0).error) == (0, None)
    assert Busy(1.0, "a", awaited=7, error=StoreUnreachable("down")) == Busy(1.0, "a")
    assert Busy(1.0, "a") != Busy(1.0, "b")


def test_guards_are_told_apart_and_may_be_kept_in_sets(bench: Bench) -> None:
    assert len({bench.guard(), bench.guard()}) == 2


def test_a_refusal_with_nothing_kept_of_its_record_is_answered_too(bench: Bench) -> None:
    bench.store.answer("acquire", Refusal(Verdict.CONFLICT, Record(KEY, State.IN_PROGRESS)))
    assert bench.deliver(claim=replace(bench.claim(), task_id="")) == Busy(0.0, "")


def test_the_guard_logs_where_its_events_are_logged() -> None:
    assert events.logger is logging.getLogger("celery_idempotent")


def test_a_store_that_cannot_note_a_shutdown_says_that_it_did_not(bench: Bench) -> None:
    assert Store.mark_shutdown(bench.store.inner, bench.elsewhere()) is False


# -- what the figures in events count ----------------------------------------------------------------------------------


def late_reply(bench: Bench, held: HeldLease) -> None:
    bench.clock.advance(7.0)
    bench.store.before("settle", lambda: bench.clock.advance(20.0))


def taken_away(bench: Bench, held: HeldLease) -> None:
    bench.clock.advance(7.0)
    bench.store.fail("settle", LeaseLost("another has it"))


def stopped_answering(bench: Bench, held: HeldLease) -> None:
    bench.clock.advance(7.0)
    bench.store.down("settle")


@pytest.mark.parametrize("started", [1.0, 1000.0], ids=["just started", "started long ago"])
@pytest.mark.parametrize(
    ("turn", "kind"),
    [(late_reply, events.Completed), (taken_away, events.LeaseLost), (stopped_answering, events.SettleFailed)],
)
def test_the_end_of_a_run_has_the_seconds_of_its_body_and_of_its_settle(
    bench: Bench, turn: Callable[[Bench, HeldLease], None], kind: type[Event], started: float
) -> None:
    bench.clock.now = started
    with suppress(Exception):
        bench.deliver(lambda held: turn(bench, held))
    [end] = [event for event in bench.heard if isinstance(event, kind)]
    ran = end.ran  # type: ignore[attr-defined]
    assert ran == 7.0
    if isinstance(end, events.Completed):
        assert end.took == 20.0


@pytest.mark.parametrize("lost", [False, True], ids=["answered", "reply lost"])
@pytest.mark.parametrize(("deaths", "runs"), [(1, 1), (2, 0), (3, 0)])
def test_a_delivery_that_is_alone_runs_after_fewer_crashes_than_are_allowed(
    bench: Bench, deaths: int, runs: int, *, lost: bool
) -> None:
    bench.policy = Policy(max_crashes=2)
    for _ in range(deaths):
        bench.elsewhere("b", max_crashes=99)
        bench.clock.advance(bench.policy.lease_ttl)
    if lost:
        bench.store.lose_reply("acquire")
    with suppress(CrashLoop):
        bench.deliver(alone=True)
    assert len(bench.runs) == runs
    assert ("CrashLooped" in bench.told) == (not runs)


@pytest.mark.parametrize("retry_in", [30.0, 1.5])
def test_what_waits_for_its_retry_is_awaited_and_what_runs_is_not(bench: Bench, retry_in: float) -> None:
    bench.policy = Policy(on_conflict="wait", wait_timeout=1)
    lease = bench.elsewhere()
    running = bench.deliver()
    bench.store.inner.release(lease, Release(Reason.RETRY, retry_in=retry_in))
    retried = bench.deliver()
    assert isinstance(running, Busy)
    assert isinstance(retried, Busy)
    assert (running.awaited, retried.awaited) == (0, lease.fence)


def test_a_lost_run_whose_operation_was_given_up_awaits_no_task(bench: Bench) -> None:
    def lose(held: HeldLease) -> None:
        bench.clock.advance(bench.policy.lease_ttl)
        bench.store.inner.release(bench.elsewhere(), Release(Reason.CRASH_LOOP))

    decision = bench.deliver(lose)
    assert isinstance(decision, Busy)
    assert not decision.awaited, "to release it for the sake of a task that failed would forget its crashes"


@pytest.mark.parametrize("began", [True, False])
def test_a_release_that_fails_is_logged_where_no_event_reports_it(
    bench: Bench, caplog: pytest.LogCaptureFixture, *, began: bool
) -> None:
    guard, delivery = bench.guard(), bench.delivery()
    held = guard.acquire_now(delivery)
    assert isinstance(held, HeldLease)
    if began:
        guard.start(delivery, held)
    bench.store.fail("release", StoreUnreachable("down"))
    assert guard.release(delivery, held, Release(Reason.FAILED))
    assert ("ReleaseFailed" in bench.told) == began
    assert (f"The lease on {KEY} could not be released" in caplog.text) == (not began)


def test_a_doubtful_answer_at_the_end_of_patience_has_the_delivery_come_back_soon(bench: Bench) -> None:
    bench.store.before("acquire", lambda: bench.clock.advance(bench.policy.lease_ttl))
    met = bench.deliver(patience=1.0)
    assert isinstance(met, Busy)
    assert met.remaining == STORE_PAUSE[1]


@pytest.mark.parametrize(
    ("wait", "reason", "ending", "decision"),
    [
        (0.0, Reason.RETRY, "Released", Dropped()),
        (60.0, Reason.RETRY, "LeaseLost", Dropped()),
        # It has raised something else after it had published its retry.
        (0.0, Reason.FAILED, "LeaseLost", Busy(60.0, "a")),
        (0.0, Reason.SHUTDOWN, "LeaseLost", Busy(60.0, "a")),
    ],
)
def test_a_lease_that_its_own_retry_took_is_given_back_and_not_lost(
    bench: Bench, wait: float, reason: Reason, ending: str, decision: Decision
) -> None:
    """The retry is published before the body ends, and may be quick; what took a lease that had lapsed is another."""

    def retries(held: HeldLease) -> None:
        bench.clock.advance(wait)
        bench.elsewhere("a", sender=held.lease.owner, retries=1)
        raise ValueError("its retry was published")

    delivery = bench.delivery(retries)
    delivery.end = lambda error: Release(reason, 0.0, 1)  # type: ignore[attr-defined]
    assert bench.guard().run(delivery) == decision
    assert bench.told[-1] == ending
    assert bench.record.state is State.IN_PROGRESS, "the retry's"
