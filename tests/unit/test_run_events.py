"""Every run that was told to begin is told to end, once: whatever the store, the body and the signals do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from celery_idempotent import events
from celery_idempotent.core.guard import Ran
from celery_idempotent.core.lease import HeldLease
from celery_idempotent.errors import LeaseLost, SettleNotCommitted, StoreRefused, StoreUnreachable
from celery_idempotent.stores import Reason, Release, State
from tests.support.faults.run_account import ENDINGS, STARTS
from tests.support.unit.scripted import Clock, listening
from tests.unit.test_guard import KEY, Bench, Declined, LostInTask, SoftTimeLimit, Stopped, bench, clock, heard
from tests.unit.test_guard_within import Database, Shop, Transaction, settles

__all__ = ["bench", "clock", "heard"]

RAISED = [ValueError("no"), Declined("no funds"), LostInTask("gone"), SystemExit(1), KeyboardInterrupt(), Stopped()]
ERRORS = [StoreUnreachable("down"), StoreRefused("password"), TypeError("a bug"), SoftTimeLimit(), SystemExit(2)]
VERBS = ["acquire", "settle", "release", "get"]
HOW = ["fails", "before", "after"]


@contextmanager
def worker() -> Iterator[Bench]:
    """A bench of its own for one example."""
    with pytest.MonkeyPatch.context() as patch:
        clock, told = Clock().install(patch), listening()
        patch.setattr("celery_idempotent.core.heartbeat._Server.run", lambda self: None)
        made = Bench(clock, next(told))
        made.store = Shop(Database())
        yield made
        next(told, None)


def disturb(bench: Bench, verb: str, how: str, error: BaseException, times: int) -> None:
    def interrupt() -> None:
        raise error

    for _ in range(times):
        if how == "fails":
            bench.store.fail(verb, error)
        else:
            getattr(bench.store, how)(verb, interrupt)


def overtaken(bench: Bench) -> None:
    with suppress(AssertionError):  # somebody has it already
        bench.overtake()


def settled_elsewhere(bench: Bench) -> None:
    with suppress(AssertionError):
        bench.settle(bench.overtake())


def outage(bench: Bench) -> None:
    bench.store.down()
    bench.clock.at(20.0, bench.store.up)


#: What happens while a body runs.
TURNS: dict[str, Callable[[Bench, HeldLease], object]] = {
    "time passes": lambda bench, holding: bench.clock.advance(15.0),
    "the lease is in doubt": lambda bench, holding: bench.clock.advance(57.0),
    "it is renewed": lambda bench, holding: bench.heartbeat.beat(bench.clock()),
    "it is overtaken": lambda bench, holding: overtaken(bench),
    "another settles": lambda bench, holding: settled_elsewhere(bench),
    "the record is forgotten": lambda bench, holding: bench.store.inner.delete(KEY),
    "it is released for it": lambda bench, holding: bench.store.inner.release(holding.lease, Release(Reason.CRASHED)),
    "the store is down": lambda bench, holding: outage(bench),
    "it checks": lambda bench, holding: holding.check(),
    "it settles and commits": lambda bench, holding: settles(holding),
    "it settles and does not commit": lambda bench, holding: holding.settle(1, using=Transaction()),
}

faults = st.lists(
    st.tuples(
        st.sampled_from(VERBS),
        st.sampled_from(HOW),
        st.sampled_from(ERRORS),
        st.integers(1, 3),
    ),
    max_size=3,
)
deliveries = st.lists(
    st.tuples(faults, st.lists(st.sampled_from(list(TURNS)), max_size=4), st.sampled_from([None, *RAISED])),
    min_size=1,
    max_size=3,
)


@settings(deadline=None, max_examples=300)
@given(deliveries, st.sampled_from([50.0, 1e6]))
def test_every_run_that_began_is_told_to_have_ended_once(script: Any, patience: float) -> None:
    with worker() as bench:
        for faulty, turns, raised in script:
            before, ran = len(bench.heard), len(bench.runs)
            bench.store.calm()
            for fault in faulty:
                disturb(bench, *fault)

            def body(holding: HeldLease, turns: list[str] = turns, raised: BaseException | None = raised) -> int:
                assert balance(bench.heard) == 1, "the run that is live"
                for turn in turns:
                    TURNS[turn](bench, holding)
                if raised is not None:
                    raise raised
                return 42

            with suppress(Exception, SystemExit, KeyboardInterrupt, Stopped):
                bench.deliver(body, patience=patience)
            told = [event for event in bench.heard[before:] if isinstance(event, (*STARTS, *ENDINGS))]
            assert len(told) in (0, 2), told
            assert len(told) == 2 * (len(bench.runs) - ran), "what is told to begin is what ran"
            if told:
                assert isinstance(told[0], STARTS)
                assert isinstance(told[1], ENDINGS)
                assert told[0].fence == told[1].fence
                once = sum(times for *_, times in faulty) <= 1
                broken_off = getattr(told[1], "error", "").startswith("interrupted by")
                assert not (broken_off and once), "one interruption keeps nothing from being recorded"
            assert bench.heartbeat.holdings() == []


def balance(told: list[events.Event]) -> int:
    """Return how many runs began and have not ended."""
    return sum(isinstance(event, STARTS) - isinstance(event, ENDINGS) for event in told)


# -- what broke it, case by case ---------------------------------------------------------------------------------------


@pytest.fixture
def shop(bench: Bench) -> Bench:
    bench.store = Shop(Database())
    return bench


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(("commits", "ending"), [(True, "Completed"), (False, "Released")])
@pytest.mark.parametrize("error", [SystemExit(1), SoftTimeLimit()], ids=["shutdown", "soft time limit"])
def test_who_is_interrupted_while_it_looks_for_the_commit_of_a_body_that_raised_records_and_tells_what_it_finds(
    shop: Bench, error: BaseException, commits: bool, ending: str, how: str
) -> None:
    def body(holding: HeldLease) -> None:
        transaction = Transaction()
        holding.settle(1, using=transaction)
        if commits:
            transaction.commit()
        raise ValueError("no")

    disturb(shop, "get", how, error, 1)
    with nullcontext() if commits and not isinstance(error, SystemExit) else pytest.raises((SystemExit, ValueError)):
        assert shop.deliver(body) == Ran(1)
    assert shop.told == ["Acquired", ending]
    assert shop.record.state is (State.COMPLETED if commits else State.RELEASED)


@pytest.mark.parametrize("error", [SystemExit(1), KeyboardInterrupt()], ids=lambda error: type(error).__name__)
def test_a_release_that_a_shutdown_interrupts_is_told(bench: Bench, error: BaseException) -> None:
    bench.store.fail("release", error)
    with pytest.raises(type(error)):
        bench.deliver(ValueError("no"))
    assert bench.told == ["Acquired", "Released"]


def test_a_final_failure_whose_settling_a_shutdown_interrupts_is_told(bench: Bench) -> None:
    bench.store.fail("settle", SystemExit(1))
    with pytest.raises(SystemExit):
        bench.deliver(Declined("no funds"))
    assert bench.told == ["Acquired", "Failed"]


def test_a_commit_that_was_not_made_under_a_lease_that_was_lost_is_told(shop: Bench) -> None:
    def body(holding: HeldLease) -> None:
        holding.settle(1, using=Transaction())

    shop.store.after("get", lambda: shop.overtake())
    with pytest.raises(SettleNotCommitted):
        shop.deliver(body)
    assert shop.told == ["Acquired", "LeaseLost"]


def test_a_commit_that_was_not_made_gives_the_lease_back_and_is_told(shop: Bench) -> None:
    with pytest.raises(SettleNotCommitted):
        shop.deliver(lambda holding: holding.settle(1, using=Transaction()))
    assert shop.told == ["Acquired", "Released"]


def test_a_run_that_knows_of_its_lost_lease_is_lost_and_nothing_else_if_it_cannot_be_settled(bench: Bench) -> None:
    def body(holding: HeldLease) -> None:
        bench.overtake()
        bench.heartbeat.beat(bench.clock())
        bench.store.down("settle", "release")

    bench.deliver(body)
    assert bench.told == ["Acquired", "LeaseLost"]


def test_a_commit_that_cannot_be_looked_for_is_told_once_though_the_body_raised(shop: Bench) -> None:
    def body(holding: HeldLease) -> None:
        settles(holding)
        shop.store.down("get")
        raise ValueError("no")

    with suppress(ValueError):
        shop.deliver(body)
    assert [name for name in shop.told if name != "Acquired"] == ["SettleFailed"]


def test_what_keeps_a_run_from_being_recorded_at_all_is_told(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def encode(*args: Any, **options: Any) -> bytes:
        raise LeaseLost("of the file store's own")

    monkeypatch.setattr(bench.codec, "encode_value", encode)
    with pytest.raises(LeaseLost):
        bench.deliver()
    assert bench.told == ["Acquired", "SettleFailed"]
    [_, failed] = bench.heard
    assert isinstance(failed, events.SettleFailed)
    assert failed.error.startswith("interrupted by LeaseLost(")


def test_a_lease_that_came_too_late_to_be_used_is_given_back_without_a_word_of_a_run(bench: Bench) -> None:
    bench.store.after("acquire", lambda: bench.clock.advance(55))
    assert not isinstance(bench.deliver(patience=50), Ran)
    assert bench.told == []
