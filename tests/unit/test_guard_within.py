"""A body that settles within its own transaction: what the guard makes of its commit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import pytest

from celery_idempotent import events
from celery_idempotent.core.guard import Busy, Ran, Replayed
from celery_idempotent.core.lease import HeldLease
from celery_idempotent.core.policy import Policy
from celery_idempotent.errors import ConfigurationError, LeaseLost, SettleNotCommitted, StoreUnreachable
from celery_idempotent.stores import Lease, Outcome, Reason, Record, Release, State
from celery_idempotent.stores.memory import MemoryStore
from tests.support.unit.scripted import ScriptedStore
from tests.unit.test_guard import KEY, Bench, LostInTask, bench, clock, heard, read_anew

__all__ = ["bench", "clock", "heard"]


@dataclass
class Transaction:
    """A transaction of a database that a memory store stands for: what is written in it happens at the commit."""

    writes: list[Callable[[], None]] = field(default_factory=list)

    def commit(self) -> None:
        for write in self.writes:
            write()
        self.writes.clear()


class Database(MemoryStore):
    """A memory store with transactions, as far as the guard can tell."""

    #: whether an open one has the records, so that renewals pass them over
    locked = False

    def renew(self, leases: Sequence[Lease]) -> Sequence[Lease]:
        return [] if self.locked else super().renew(leases)

    def settle_within(self, lease: Lease, outcome: Outcome, *, ttl: float, using: Any) -> None:
        record = self.get(lease.key)
        settled = record is not None and record.state is State.COMPLETED and record.fence == lease.fence
        if not settled and (record is None or record.owner != lease.owner):
            raise LeaseLost("not ours")
        using.writes.append(lambda: self.settle(lease, outcome, ttl=ttl))


class Shop(ScriptedStore):
    def settle_within(self, lease: Lease, outcome: Outcome, *, ttl: float, using: Any) -> None:
        self.inner.settle_within(lease, outcome, ttl=ttl, using=using)


@pytest.fixture
def shop(bench: Bench) -> Bench:
    bench.store = Shop(Database())
    return bench


@contextmanager
def transaction() -> Iterator[Transaction]:
    """A transaction that commits unless its block raises."""
    opened = Transaction()
    yield opened
    opened.commit()


def settles(holding: HeldLease, result: Any = 42) -> None:
    with transaction() as opened:
        holding.settle(result, using=opened)


def test_a_result_that_was_committed_counts_whatever_the_body_returns(shop: Bench) -> None:
    assert shop.deliver(lambda holding: settles(holding, "paid")) == Ran("paid")
    assert "settle" not in [verb for verb, _ in shop.store.calls]
    answer = shop.deliver()
    assert isinstance(answer, Replayed)
    assert answer.value == "paid"
    assert shop.told == ["Acquired", "Completed", "Replayed"]


def test_none_is_a_result_too(shop: Bench) -> None:
    assert shop.deliver(lambda holding: settles(holding, None) or "not this") == Ran(None)


def test_what_was_committed_is_kept_for_result_ttl(shop: Bench) -> None:
    shop.policy = Policy(result_ttl=500)
    shop.deliver(settles)
    shop.clock.advance(499)
    assert shop.record.state is State.COMPLETED
    shop.clock.advance(2)
    assert shop.store.inner.get(KEY) is None


def test_without_store_result_the_fact_alone_is_committed(shop: Bench) -> None:
    shop.policy = Policy(store_result=False)
    assert shop.deliver(settles) == Ran(42)
    assert b"42" not in shop.record.payload


@pytest.mark.parametrize("again", [True, False])
def test_a_body_that_settles_and_does_not_commit_fails_and_may_run_again(shop: Bench, *, again: bool) -> None:
    with pytest.raises(SettleNotCommitted, match="not committed"):
        shop.deliver(lambda holding: holding.settle(42, using=Transaction()))
    assert (shop.record.state, shop.record.reason) == (State.RELEASED, Reason.FAILED.value)
    assert shop.deliver(settles if again else 7) == Ran(42 if again else 7)


def test_a_rollback_that_the_body_lets_out_is_a_failure_like_any(shop: Bench) -> None:
    def rolls_back(holding: HeldLease) -> None:
        with transaction() as opened:
            holding.settle(42, using=opened)
            raise ValueError("no stock")

    with pytest.raises(ValueError, match="no stock"):
        shop.deliver(rolls_back)
    assert shop.record.state is State.RELEASED
    assert shop.deliver(settles) == Ran(42)


def test_a_body_may_settle_again_after_it_rolled_back(shop: Bench) -> None:
    def tries_twice(holding: HeldLease) -> None:
        holding.settle("first", using=Transaction())
        settles(holding, "second")

    assert shop.deliver(tries_twice) == Ran("second")


def test_a_lease_that_no_renewal_reached_while_a_transaction_was_open_is_looked_up_after_the_rollback(
    shop: Bench,
) -> None:
    """As one on PostgreSQL, whose renewals pass over what a transaction has locked."""
    database = shop.store.inner
    assert isinstance(database, Database)

    def is_slow(holding: HeldLease) -> None:
        holding.settle("first", using=Transaction())
        database.locked = True
        for _ in range(4):
            shop.clock.advance(holding.lease.claim.lease_ttl / 3)
            shop.heartbeat.beat(shop.clock.now)
        holding.check()  # nobody else can have it
        database.locked = False
        assert isinstance(database.acquire(shop.claim("b")), Lease)
        with pytest.raises(LostInTask):
            holding.check()

    assert isinstance(shop.deliver(is_slow), Busy)


def test_a_transaction_that_is_repeated_after_its_commit_is_rolled_back(shop: Bench) -> None:
    """As by a body whose COMMIT got no reply, though the database had done it."""
    effects = []

    def repeats(holding: HeldLease) -> str:
        for attempt in (1, 2, 3):
            with suppress(LeaseLost), transaction() as opened:
                opened.writes.append(lambda attempt=attempt: effects.append(attempt))
                holding.settle(attempt, using=opened)
        holding.check()
        return "whatever"

    assert shop.deliver(repeats) == Ran(1)
    assert effects == [1]
    assert shop.deliver(repeats) == Replayed(1, shop.record)


def test_of_two_results_that_are_settled_the_recorded_one_counts(shop: Bench) -> None:
    def settles_twice(holding: HeldLease) -> None:
        with transaction() as opened:
            holding.settle("first", using=opened)
            holding.settle("second", using=opened)  # which changes nothing

    assert shop.deliver(settles_twice) == Ran("first")


def test_a_body_that_raises_after_its_commit_has_succeeded(shop: Bench, caplog: pytest.LogCaptureFixture) -> None:
    def raises_late(holding: HeldLease) -> None:
        settles(holding, "paid")
        raise ValueError("the mail server is down")

    assert shop.deliver(raises_late) == Ran("paid")
    assert "the mail server is down" in caplog.text
    assert shop.record.state is State.COMPLETED


def test_what_ends_the_process_after_a_commit_comes_out_and_the_commit_counts(shop: Bench) -> None:
    def stops(holding: HeldLease) -> None:
        settles(holding, "paid")
        raise SystemExit

    with pytest.raises(SystemExit):
        shop.deliver(stops)
    assert shop.record.state is State.COMPLETED
    assert (shop.told.count("Completed"), shop.told.count("LeaseLost")) == (1, 0)


def test_what_ends_the_process_after_a_commit_waits_for_no_store(shop: Bench) -> None:
    def stops(holding: HeldLease) -> None:
        settles(holding, "paid")
        for verb in ("get", "release"):
            shop.store.fail(verb, times=1000)
        raise SystemExit

    with pytest.raises(SystemExit):
        shop.deliver(stops)
    assert shop.told == ["Acquired", "ReleaseFailed"]
    assert not shop.clock.slept


def test_what_ends_the_process_as_a_rolled_back_run_gives_its_lease_back_has_lost_nothing(shop: Bench) -> None:
    def stop() -> None:
        raise SystemExit

    def rolls_back(holding: HeldLease) -> None:
        holding.settle(42, using=Transaction())
        shop.store.after("release", stop)
        raise ValueError("no stock")

    with pytest.raises(SystemExit):
        shop.deliver(rolls_back)
    assert shop.told == ["Acquired", "Released"]
    assert (shop.record.state, shop.record.reason) == (State.RELEASED, Reason.FAILED.value)


def test_a_holder_that_was_taken_over_cannot_settle_and_is_answered_as_a_duplicate(shop: Bench) -> None:
    def is_paused(holding: HeldLease) -> None:
        shop.settle(shop.overtake(), "theirs")
        with pytest.raises(LostInTask, match="was lost"):
            holding.settle("mine", using=Transaction())
        assert holding.lost
        with pytest.raises(LostInTask):
            holding.settle("mine", using=Transaction())
        holding.check()

    answer = shop.deliver(is_paused)
    assert isinstance(answer, Replayed)
    assert answer.value == "theirs"


def test_a_commit_that_came_too_late_makes_a_duplicate(shop: Bench) -> None:
    """The store refuses such a commit; whatever came of it, the record is the other's."""

    def is_overtaken(holding: HeldLease) -> None:
        holding.settle("mine", using=Transaction())
        shop.overtake()

    assert isinstance(shop.deliver(is_overtaken), Busy)
    assert "LeaseLost" in shop.told


def test_a_failure_settled_by_another_is_not_taken_for_the_commit(shop: Bench) -> None:
    def is_overtaken(holding: HeldLease) -> None:
        holding.settle("mine", using=Transaction())
        shop.settle(shop.overtake(), "theirs")

    answer = shop.deliver(is_overtaken)
    assert isinstance(answer, Replayed)
    assert answer.value == "theirs"


def test_a_record_that_somebody_released_is_not_committed_by_us(shop: Bench) -> None:
    def is_released(holding: HeldLease) -> None:
        holding.settle("mine", using=Transaction())
        shop.store.inner.release(holding.lease, Release(Reason.CRASHED))

    assert isinstance(shop.deliver(is_released), Busy)


def test_a_record_that_is_gone_was_not_committed(shop: Bench) -> None:
    def is_forgotten(holding: HeldLease) -> None:
        holding.settle("mine", using=Transaction())
        shop.store.inner.delete(KEY)

    with pytest.raises(SettleNotCommitted):
        shop.deliver(is_forgotten)


@pytest.mark.parametrize("renewed", [False, True])
def test_a_body_that_goes_on_for_longer_than_its_result_is_kept_has_succeeded(shop: Bench, renewed: bool) -> None:
    def goes_on(holding: HeldLease) -> None:
        settles(holding, "paid")
        shop.clock.advance(31.0)
        if renewed:
            assert shop.store.renew([holding.lease]) == [holding.lease]

    shop.policy = Policy(result_ttl=30)
    assert shop.deliver(goes_on) == Ran("paid")
    assert shop.told == ["Acquired", "Completed"]


def test_a_body_that_goes_on_for_longer_than_any_record_is_kept_may_not_have_committed(shop: Bench) -> None:
    def goes_on(holding: HeldLease) -> None:
        holding.settle("mine", using=Transaction())
        shop.clock.advance(300.0)

    shop.policy = Policy(result_ttl=30, failure_ttl=60)
    with pytest.raises(SettleNotCommitted):
        shop.deliver(goes_on)


def test_the_store_is_asked_for_the_commit_until_it_answers(shop: Bench) -> None:
    shop.store.fail("get", times=3)
    assert shop.deliver(settles) == Ran(42)
    assert [verb for verb, _ in shop.store.calls] == ["acquire", "get", "get", "get", "get"]
    assert len(shop.clock.slept) == 3


def test_a_commit_that_the_store_cannot_tell_of_is_not_repeated(shop: Bench) -> None:
    """The body returned, so its commit did not fail; to run it again is the one thing that we are here to prevent."""
    shop.store.fail("get", times=1000)
    assert shop.deliver(settles) == Ran(42)
    assert "SettleFailed" in shop.told


def test_an_unprotected_run_has_nothing_to_settle(shop: Bench) -> None:
    shop.policy = Policy(on_store_error="run")
    shop.store.fail("acquire")
    with pytest.raises(StoreUnreachable, match="unprotected"):
        shop.deliver(settles)


def test_a_store_without_transactions_says_so(bench: Bench) -> None:
    with pytest.raises(ConfigurationError, match="got a ScriptedStore"):
        bench.deliver(settles)
    assert bench.record.state is State.RELEASED


def test_a_lease_that_was_granted_too_late_to_be_trusted_is_asked_for_again(shop: Bench) -> None:
    shop.store.after("acquire", lambda: shop.clock.advance(55))
    assert shop.deliver() == Ran(42)
    assert [verb for verb, _ in shop.store.calls] == ["acquire", "acquire", "settle"]


def test_a_lease_that_was_granted_too_late_and_taken_over_is_not_run(shop: Bench) -> None:
    shop.store.after("acquire", lambda: shop.overtake())
    assert isinstance(shop.deliver(), Busy)
    assert shop.runs == []


def test_a_lease_that_was_granted_too_late_is_given_back_where_there_is_no_time_left(shop: Bench) -> None:
    shop.store.after("acquire", lambda: shop.clock.advance(55))
    assert isinstance(shop.deliver(patience=50), Busy)
    assert shop.runs == []
    assert (shop.record.state, shop.record.reason) == (State.RELEASED, Reason.SHUTDOWN.value)


@pytest.mark.parametrize("started", [1.0, 1000.0], ids=["just started", "started long ago"])
@pytest.mark.parametrize("answers", [True, False])
def test_the_end_of_a_run_has_the_seconds_of_its_body_and_of_the_look_at_its_commit(
    shop: Bench, *, answers: bool, started: float
) -> None:
    shop.clock.now = started

    def body(holding: HeldLease) -> None:
        settles(holding)
        shop.clock.advance(7.0)
        if answers:
            shop.store.before("get", lambda: shop.clock.advance(20.0))
        else:
            shop.store.down("get")

    assert shop.deliver(body) == Ran(42)
    end = shop.heard[-1]
    assert isinstance(end, events.Completed if answers else events.SettleFailed)
    assert end.ran == 7.0
    if isinstance(end, events.Completed):
        assert end.took == 20.0


def test_a_run_of_another_that_is_completed_is_not_the_commit(shop: Bench) -> None:
    """Nor is a lease that another holds now a sign that this one's transaction was rolled back."""

    def body(holding: HeldLease) -> None:
        holding.settle(42, using=Transaction())
        shop.overtake()

    answer = shop.deliver(body)
    assert isinstance(answer, Busy)
    assert "LeaseLost" in shop.told


@pytest.mark.parametrize("later", [-1, 1])
def test_a_completed_record_with_another_fence_is_not_the_commit(shop: Bench, later: int) -> None:
    def body(holding: HeldLease) -> None:
        settles(holding)
        shop.store.answer("get", Record(KEY, State.COMPLETED, holding.fence + later, payload=b"json:42"))

    shop.deliver(body)
    assert shop.told[:2] == ["Acquired", "LeaseLost"]


def test_the_record_of_a_commit_is_known_by_the_value_of_its_fence(shop: Bench) -> None:
    def body(holding: HeldLease) -> None:
        settles(holding)
        shop.store.answer("get", Record(KEY, State.COMPLETED, int(str(holding.fence)), payload=b"json:42"))

    assert shop.deliver(body) == Ran(42)
    assert shop.told == ["Acquired", "Completed"]


@pytest.mark.parametrize(
    ("owner", "told"), [("owner-1", "Released"), ("another", "LeaseLost"), ("owner-11", "LeaseLost")]
)
def test_the_lease_of_a_commit_that_was_not_made_is_known_by_the_letters_of_its_owner(
    shop: Bench, owner: str, told: str
) -> None:
    def body(holding: HeldLease) -> None:
        assert holding.lease.owner == "owner-1"
        holding.settle(42, using=Transaction())
        shop.store.answer("get", Record(KEY, State.IN_PROGRESS, holding.fence, owner=read_anew(owner), remaining=9.0))

    with suppress(SettleNotCommitted):
        shop.deliver(body)
    assert shop.told == ["Acquired", told]


def test_of_two_results_the_last_is_returned_where_the_store_cannot_tell_which_was_committed(shop: Bench) -> None:
    def body(holding: HeldLease) -> None:
        holding.settle("first", using=Transaction())
        settles(holding, "second")
        shop.store.down("get")

    assert shop.deliver(body) == Ran("second")
    assert shop.told == ["Acquired", "SettleFailed"]
