"""One thread renews the leases of a process, and a holder knows how far to trust its own."""

from __future__ import annotations

import hashlib
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

from celery_idempotent.core import heartbeat as module
from celery_idempotent.core.heartbeat import Heartbeat
from celery_idempotent.core.lease import HeldLease
from celery_idempotent.errors import ConfigurationError, LeaseLost, StoreRefused, StoreUnreachable
from celery_idempotent.stores import Claim, Lease, Outcome, Reason, Record, Release, State
from celery_idempotent.stores.memory import MemoryStore
from tests.support.forks import served_after_fork
from tests.support.unit.scripted import PROMPTLY, Clock, ScriptedStore

RUN = module._Server.run
TTL = 60.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock().install(monkeypatch)


@pytest.fixture
def store() -> ScriptedStore:
    return ScriptedStore()


@pytest.fixture
def heart(monkeypatch: pytest.MonkeyPatch) -> Heartbeat:
    """A heartbeat that beats when a test calls `beat`, and not by itself."""
    monkeypatch.setattr(module._Server, "run", lambda self: None)
    return Heartbeat()


def only(heart: Heartbeat) -> module._Server:
    """Return the one server on which this process has had leases."""
    [server] = heart._servers.values()
    return server


def take(store: ScriptedStore, key: str = "k", *, ttl: float = TTL, owner: str = "me") -> Lease:
    lease = store.inner.acquire(Claim(key, owner, ttl, 3600.0, task_id=owner))
    assert isinstance(lease, Lease)
    return lease


def hold(store: ScriptedStore, clock: Clock, key: str = "k", *, ttl: float = TTL, **options: Any) -> HeldLease:
    return HeldLease(store, take(store, key, ttl=ttl), clock(), **options)


def take_away(store: ScriptedStore, key: str = "k") -> Lease:
    """Let the lease run out, and another delivery take it."""
    store.inner.offset += TTL
    return take(store, key, owner="thief")


# -- a holding ---------------------------------------------------------------------------------------------------------


def test_a_holding_has_the_key_and_the_fence_of_its_lease(store: ScriptedStore, clock: Clock) -> None:
    holding = hold(store, clock)
    assert (holding.key, holding.fence) == (holding.lease.key, holding.lease.fence) == ("k", 1_000_000_000)
    assert holding.lost is False


def test_a_derived_key_is_the_same_for_every_run_everywhere(store: ScriptedStore, clock: Clock) -> None:
    frozen = "9aadc8328dfc49dd6a2287beb2bd0cc3"
    for fence in (0, 7):
        lease = Lease(Claim("idem:shop.charge:ORD-1", f"owner-{fence}", TTL, TTL), fence)
        assert HeldLease(store, lease, clock()).derived_key("capture") == frozen
    assert frozen == hashlib.sha256(b"idem:shop.charge:ORD-1\ncapture").hexdigest()[:32]


def test_a_derived_key_tells_names_and_operations_apart(store: ScriptedStore, clock: Clock) -> None:
    one, other = hold(store, clock, "k1"), hold(store, clock, "k2")
    assert len({one.derived_key("a"), one.derived_key("b"), other.derived_key("a"), one.derived_key("\udcff")}) == 4


@pytest.mark.parametrize(
    "name", [None, object(), f"charge {object()}"], ids=["None", "an object", "an object in a text"]
)
def test_no_key_is_derived_of_what_is_no_name(store: ScriptedStore, clock: Clock, name: Any) -> None:
    """None is that of each item without an id, and an address another one on the next run."""
    with pytest.raises(
        ConfigurationError, match=r"derived_key: expected a name that .*, got (None|.* at 0x\w+>): write"
    ):
        hold(store, clock).derived_key(name)


def test_a_lease_is_trusted_for_nine_tenths_of_its_ttl(store: ScriptedStore, clock: Clock) -> None:
    holding = hold(store, clock)
    clock.advance(53.9)
    holding.check()
    assert store.calls == []
    clock.advance(0.1)
    holding.check()
    assert store.count("renew") == 1


def test_trust_counts_from_before_the_request(store: ScriptedStore, clock: Clock) -> None:
    lease, since = take(store), clock()
    clock.advance(30.0)  # so long did the reply travel
    holding = HeldLease(store, lease, since)
    assert holding.deadline == since + 54.0
    assert holding.due == since + 20.0


def test_a_holding_in_doubt_asks_the_store_and_is_trusted_again_if_it_is_ours(
    store: ScriptedStore, clock: Clock
) -> None:
    holding = hold(store, clock)
    clock.advance(59.0)
    asked = clock()
    store.before("renew", lambda: clock.advance(0.5))
    holding.check()
    assert store.calls == [("renew", ([holding.lease],))]
    assert holding.deadline == asked + 54.0
    assert store.get("k").remaining == 60.0
    holding.check()
    assert store.count("renew") == 1


def test_a_holding_in_doubt_that_was_taken_over_is_lost(store: ScriptedStore, clock: Clock) -> None:
    class Stop(LeaseLost):
        pass

    holding = hold(store, clock, lost_error=Stop)
    deadline = holding.deadline
    take_away(store)
    clock.advance(54.0)
    with pytest.raises(Stop, match=r"The lease on 'k' \(fence 1000000000\) was lost"):
        holding.check()
    assert holding.lost is True
    assert holding.deadline == deadline
    with pytest.raises(Stop):
        holding.check()
    assert store.count("renew") == 1


def test_a_lease_that_ran_out_and_that_nobody_took_is_still_ours(store: ScriptedStore, clock: Clock) -> None:
    holding = hold(store, clock)
    clock.advance(600.0)
    holding.check()
    assert store.get("k").remaining == TTL


def test_a_holding_in_doubt_says_so_if_the_store_does_not_answer(store: ScriptedStore, clock: Clock) -> None:
    holding = hold(store, clock)
    clock.advance(54.0)
    store.fail("renew")
    with pytest.raises(StoreUnreachable):
        holding.check()
    assert not holding.lost
    holding.check()


def test_a_holding_that_is_known_to_be_lost_raises_without_asking(store: ScriptedStore, clock: Clock) -> None:
    holding = hold(store, clock)
    holding.lost = True
    with pytest.raises(LeaseLost):
        holding.check()
    assert store.calls == []


def test_a_holding_stays_lost_whatever_an_older_answer_says(store: ScriptedStore, clock: Clock) -> None:
    holding = hold(store, clock)
    clock.advance(54.0)
    store.after("renew", lambda: setattr(holding, "lost", True))  # by the heartbeat, which asked later
    with pytest.raises(LeaseLost):
        holding.check()


def test_an_unprotected_run_asks_nobody_and_is_never_lost(store: ScriptedStore, clock: Clock) -> None:
    holding = HeldLease(store, Lease(Claim("k", "me", TTL, TTL), 0), clock())
    clock.advance(1e6)
    holding.check()
    assert holding.fence == 0
    assert store.calls == []


# -- past max_lease ----------------------------------------------------------------------------------------------------


def test_until_max_lease_a_holding_in_doubt_is_renewed(store: ScriptedStore, clock: Clock) -> None:
    holding = hold(store, clock, max_lease=100.0)
    clock.advance(99.9)
    holding.check()
    assert store.count("renew") == 1


def test_past_max_lease_to_check_asks_every_time_and_prolongs_nothing(store: ScriptedStore, clock: Clock) -> None:
    holding = hold(store, clock, max_lease=100.0)
    clock.advance(100.0)
    for _ in range(2):
        holding.check()
    assert store.calls == [("get", ("k",))] * 2
    assert store.get("k").remaining == 0.0
    take_away(store)
    with pytest.raises(LeaseLost):
        holding.check()


def test_past_max_lease_a_record_that_is_not_ours_in_progress_any_more_is_lost(
    store: ScriptedStore, clock: Clock
) -> None:
    released, settled = (hold(store, clock, key, max_lease=10.0) for key in ("r", "s"))
    store.inner.release(released.lease, Release(Reason.CRASHED))  # the main process took us for dead
    store.inner.settle(settled.lease, Outcome(State.COMPLETED, b"json:1"), ttl=60.0)
    clock.advance(54.0)
    for holding in (released, settled):
        with pytest.raises(LeaseLost):
            holding.check()
        assert holding.lost


@pytest.mark.parametrize(
    ("state", "owner", "ours"),
    [
        (State.IN_PROGRESS, "the-holder", True),
        (State.IN_PROGRESS, "a-later-one", False),
        (State.IN_PROGRESS, "you", False),
        (State.RELEASED, "the-holder", False),
        (State.COMPLETED, "the-holder", False),
        (State.FAILED, "the-holder", False),
    ],
)
def test_past_max_lease_the_record_tells_whose_the_lease_is(
    store: ScriptedStore, clock: Clock, state: State, owner: str, ours: bool
) -> None:
    lease = take(store, owner="the-holder")
    holding = HeldLease(store, lease, clock(), max_lease=10.0)
    clock.advance(54.0)
    store.answer("get", Record("k", state, lease.fence, "".join(list(owner))))
    with nullcontext() if ours else pytest.raises(LeaseLost):
        holding.check()
    assert holding.lost is not ours


@pytest.mark.parametrize(
    ("state", "later", "ours"),
    [
        (State.IN_PROGRESS, 0, True),  # not committed yet
        (State.COMPLETED, 0, True),  # committed
        (State.COMPLETED, 1, False),  # rolled back, and another has done it since
        (State.FAILED, 0, False),
        (State.RELEASED, 0, False),
    ],
)
@pytest.mark.parametrize("max_lease", [None, 10.0])
def test_a_holding_that_settled_within_its_transaction_asks_the_record_what_became_of_it(
    store: ScriptedStore, clock: Clock, state: State, later: int, ours: bool, max_lease: float | None
) -> None:
    holding = hold(store, clock, max_lease=max_lease)
    holding.within = {b"": "result"}
    store.answer("renew", [holding.lease])
    store.answer("get", Record("k", state, holding.fence + later, holding.lease.owner))
    clock.advance(54.0)
    with nullcontext() if ours else pytest.raises(LeaseLost):
        holding.check()
    assert holding.lost is not ours
    assert store.count("renew") == (max_lease is None)


def test_a_lease_that_the_store_forgot_is_lost_to_nobody(store: ScriptedStore, clock: Clock) -> None:
    renewed, ended = hold(store, clock, "r"), hold(store, clock, "e", max_lease=10.0)
    store.inner.delete("r")
    store.inner.delete("e")
    clock.advance(54.0)
    renewed.check()
    ended.check()
    assert store.get("r").owner == "me"
    assert store.get("e") is None


# -- beats -------------------------------------------------------------------------------------------------------------


def test_a_lease_is_renewed_three_times_per_ttl(heart: Heartbeat, store: ScriptedStore, clock: Clock) -> None:
    heart.watch(hold(store, clock))
    for _ in range(600):
        clock.advance(0.2)
        heart.beat(clock())
    assert store.count("renew") == 6
    assert store.get("k").remaining > 39.0


def test_a_task_shorter_than_a_third_of_its_ttl_costs_no_renewal(
    heart: Heartbeat, store: ScriptedStore, clock: Clock
) -> None:
    holding = heart.watch(hold(store, clock))
    clock.advance(19.9)
    assert heart.beat(clock()) == pytest.approx(0.1)
    heart.forget(holding)
    clock.advance(0.1)
    assert heart.beat(clock()) == float("inf")
    assert store.calls == []


def test_leases_in_different_parts_of_a_store_are_renewed_apart(
    heart: Heartbeat, store: ScriptedStore, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When one part is down, the others must not run out with it."""
    keys = ["a1", "b1", "a2", "b2"]
    holdings = [heart.watch(hold(store, clock, key)) for key in keys]
    monkeypatch.setattr(store, "shard", lambda key: key[0], raising=False)
    renew, asked = store.renew, []

    def half(leases: Any) -> Any:
        asked.append([lease.key for lease in leases])
        if leases[0].key == "a1":
            raise StoreUnreachable("half of it is down")
        return renew(leases)

    monkeypatch.setattr(store, "renew", half)
    clock.advance(TTL / 3)
    heart.beat(clock())
    assert sorted(asked) == [["a1", "a2"], ["b1", "b2"]]
    assert [holding.due > clock() + 15 for holding in holdings] == [False, True, False, True]


def test_a_lease_is_renewed_as_soon_as_it_is_due(heart: Heartbeat, store: ScriptedStore, clock: Clock) -> None:
    heart.watch(hold(store, clock))
    clock.advance(20.0)
    assert heart.beat(clock()) == 20.0
    assert store.count("renew") == 1


def test_a_thousand_leases_are_renewed_by_one_call(heart: Heartbeat, store: ScriptedStore, clock: Clock) -> None:
    held = [heart.watch(hold(store, clock, f"k{n}")) for n in range(1000)]
    clock.advance(20.0)
    heart.beat(clock())
    assert store.calls == [("renew", ([holding.lease for holding in held],))]


def test_only_what_is_due_is_renewed_and_the_next_is_waited_for(
    heart: Heartbeat, store: ScriptedStore, clock: Clock
) -> None:
    long, short = hold(store, clock, "long", ttl=90.0), hold(store, clock, "short", ttl=30.0)
    heart.watch(long)
    heart.watch(short)
    assert heart.beat(clock()) == 10.0
    clock.advance(25.0)
    assert heart.beat(clock()) == 5.0
    assert store.calls == [("renew", ([short.lease],))]


def test_each_store_gets_its_own_leases_in_one_call(heart: Heartbeat, store: ScriptedStore, clock: Clock) -> None:
    other = ScriptedStore()
    ours = [heart.watch(hold(store, clock, key)) for key in "ab"]
    theirs = [heart.watch(hold(other, clock, key)) for key in "ab"]
    clock.advance(20.0)
    heart.beat(clock())
    assert store.calls == [("renew", ([holding.lease for holding in ours],))]
    assert other.calls == [("renew", ([holding.lease for holding in theirs],))]


def test_a_renewed_lease_is_trusted_from_before_the_request(
    heart: Heartbeat, store: ScriptedStore, clock: Clock
) -> None:
    holding = heart.watch(hold(store, clock))
    clock.advance(25.0)
    asked = clock()
    store.before("renew", lambda: clock.advance(2.0))
    assert heart.beat(clock()) == 18.0
    assert holding.deadline == asked + 54.0
    assert holding.due == asked + 20.0


@pytest.mark.parametrize(("ttl", "pause"), [(60.0, 1.0), (10.0, 1.0), (6.0, 0.6), (0.5, 0.05)])
def test_a_store_that_fails_is_asked_again_after_a_tenth_of_the_ttl_and_at_most_a_second(
    heart: Heartbeat, store: ScriptedStore, clock: Clock, ttl: float, pause: float, caplog: pytest.LogCaptureFixture
) -> None:
    holding = heart.watch(hold(store, clock, ttl=ttl))
    clock.advance(ttl / 3)
    store.fail("renew", StoreUnreachable("no route"))
    store.before("renew", lambda: None)
    assert heart.beat(clock()) == pytest.approx(pause)
    assert "1 leases could not be renewed, trying again: StoreUnreachable('no route')" in caplog.text
    assert not holding.lost
    clock.advance(pause)
    assert heart.beat(clock()) == pytest.approx(ttl / 3)
    assert store.count("renew") == 2


def test_an_outage_is_logged_once(
    heart: Heartbeat, store: ScriptedStore, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """Each process with a lease would say so each second, for as long as the store is away."""
    heart.watch(hold(store, clock))
    clock.advance(20.0)
    for times in (1, 2):
        store.down("renew", error=StoreUnreachable("no route"))
        for _ in range(5):
            heart.beat(clock())
            clock.advance(1.0)
        store.up()
        heart.beat(clock())
        clock.advance(20.0)
        assert caplog.text.count("could not be renewed") == times


def test_the_pause_counts_from_when_the_store_failed(heart: Heartbeat, store: ScriptedStore, clock: Clock) -> None:
    def slowly() -> None:
        clock.advance(2.0)
        raise StoreUnreachable("timed out")

    heart.watch(hold(store, clock))
    clock.advance(20.0)
    store.before("renew", slowly)
    assert heart.beat(clock()) == pytest.approx(1.0)


def test_a_store_that_serves_again_restores_the_trust(heart: Heartbeat, store: ScriptedStore, clock: Clock) -> None:
    holding = heart.watch(hold(store, clock))
    store.down("renew", error=StoreRefused("wrong password"))
    for _ in range(50):
        clock.advance(1.0)
        heart.beat(clock())
    assert holding.deadline == clock() + 4.0
    store.up()
    clock.advance(1.0)
    heart.beat(clock())
    assert holding.deadline == clock() + 54.0
    assert not holding.lost


def test_an_unexpected_error_of_one_store_does_not_keep_the_leases_in_another_from_renewal(
    heart: Heartbeat, store: ScriptedStore, clock: Clock
) -> None:
    broken, sound = ScriptedStore(), store
    heart.watch(hold(broken, clock))
    holding = heart.watch(hold(sound, clock))
    broken.down("renew", error=TypeError("a bug"))
    clock.advance(20.0)
    assert heart.beat(clock()) == 1.0
    assert holding.due == clock() + 20.0


def test_a_beat_marks_as_lost_only_what_is_lost(
    heart: Heartbeat, store: ScriptedStore, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    ours, theirs = heart.watch(hold(store, clock, "ours")), heart.watch(hold(store, clock, "theirs"))
    take_away(store, "theirs")
    clock.advance(20.0)
    heart.beat(clock())
    assert (ours.lost, theirs.lost) == (False, True)
    assert ours.due == clock() + 20.0
    assert [line.getMessage() for line in caplog.records] == [
        f"The lease on theirs (fence {theirs.fence}) is lost: it was taken over"
    ]


def test_a_store_may_answer_with_leases_of_its_own_making(heart: Heartbeat, store: ScriptedStore, clock: Clock) -> None:
    one, other = heart.watch(hold(store, clock, "one")), heart.watch(hold(store, clock, "other"))
    store.answer("renew", [Lease(Claim("one", "me", 1.0, 1.0), 1), Lease(Claim("other", "somebody", 1.0, 1.0), 1)])
    clock.advance(20.0)
    heart.beat(clock())
    assert (one.lost, other.lost) == (True, False)


def test_a_lost_lease_is_not_renewed_any_more(heart: Heartbeat, store: ScriptedStore, clock: Clock) -> None:
    heart.watch(hold(store, clock))
    take_away(store)
    for _ in range(5):
        clock.advance(20.0)
        pause = heart.beat(clock())
    assert store.count("renew") == 1
    assert pause == float("inf")


def test_what_is_forgotten_is_not_renewed(heart: Heartbeat, store: ScriptedStore, clock: Clock) -> None:
    holding = heart.watch(hold(store, clock))
    assert heart.holdings() == [holding]
    heart.forget(holding)
    heart.forget(holding)
    clock.advance(20.0)
    heart.beat(clock())
    assert heart.holdings() == []
    assert store.calls == []


def test_what_was_settled_while_a_renewal_was_on_its_way_is_not_marked_lost(
    heart: Heartbeat, store: ScriptedStore, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    holding = heart.watch(hold(store, clock))

    def settle() -> None:
        heart.forget(holding)
        store.inner.settle(holding.lease, Outcome(State.COMPLETED, b"json:1"), ttl=60.0)

    clock.advance(20.0)
    store.before("renew", settle)
    heart.beat(clock())
    assert holding.lost is False
    assert caplog.records == []


def test_what_was_settled_within_its_transaction_is_not_marked_lost_but_left_to_the_guard(
    heart: Heartbeat, store: ScriptedStore, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    holding = heart.watch(hold(store, clock))
    holding.within = {b"": "result"}
    store.inner.settle(holding.lease, Outcome(State.COMPLETED, b"json:1"), ttl=60.0)
    clock.advance(20.0)
    assert heart.beat(clock()) == float("inf")
    assert holding.lost is False
    assert heart.holdings() == []
    assert caplog.records == []
    holding.check()


def test_past_max_lease_nothing_is_renewed_nor_waited_for(heart: Heartbeat, store: ScriptedStore, clock: Clock) -> None:
    heart.watch(hold(store, clock, max_lease=50.0))
    pauses = []
    for _ in range(5):
        clock.advance(20.0)
        pauses.append(heart.beat(clock()))
    assert store.count("renew") == 2
    assert pauses == [20.0, float("inf"), float("inf"), float("inf"), float("inf")]


def test_a_lease_that_is_due_at_max_lease_is_not_renewed(heart: Heartbeat, store: ScriptedStore, clock: Clock) -> None:
    heart.watch(hold(store, clock, max_lease=20.0))
    assert heart.beat(clock()) == float("inf")
    clock.advance(20.0)
    heart.beat(clock())
    assert store.calls == []


def test_a_thread_that_woke_too_late_for_max_lease_does_not_spin(
    heart: Heartbeat, store: ScriptedStore, clock: Clock
) -> None:
    heart.watch(hold(store, clock, max_lease=25.0))
    clock.advance(25.0)  # past due and past the end at once: the process was stopped for a while
    assert heart.beat(clock()) == float("inf")
    assert store.calls == []


def test_who_wants_to_know_is_called_after_each_round_in_which_leases_were_due(
    heart: Heartbeat, store: ScriptedStore, clock: Clock
) -> None:
    calls: list[int] = []
    heart.renewed = lambda: calls.append(store.count("renew"))
    heart.watch(hold(store, clock))
    for seconds in (0.0, 19.0, 1.0, 1.0):
        clock.advance(seconds)
        heart.beat(clock())
    assert calls == [1]
    clock.advance(19.0)
    store.fail("renew")
    heart.beat(clock())
    assert calls == [1, 2], "also where none was renewed"


def test_what_became_due_during_a_beat_is_next_at_once(heart: Heartbeat, store: ScriptedStore, clock: Clock) -> None:
    heart.watch(hold(store, clock, "a", ttl=30.0))
    heart.watch(hold(store, clock, "b", ttl=33.0))
    clock.advance(10.0)
    store.before("renew", lambda: clock.advance(1.5))
    assert heart.beat(clock()) == 0.001


# -- the thread --------------------------------------------------------------------------------------------------------


class Ended(BaseException):
    """What ends the loop of a thread that is not one."""


class Watch:
    """A condition whose waits are written down, and end the loop when there are enough.

    During the first wait something may happen.
    """

    def __init__(self, clock: Clock, waits: int, happens: Callable[[], object] = lambda: None) -> None:
        self.clock, self.left, self.waited, self.notified = clock, waits, [], 0
        self.happens = happens

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...

    def notify(self) -> None:
        self.notified += 1

    def wait(self, timeout: float) -> None:
        self.waited.append(timeout)
        self.left -= 1
        if not self.left:
            raise Ended
        if len(self.waited) == 1:
            self.happens()
        self.clock.advance(timeout)


def to_its_end(
    server: module._Server, clock: Clock, monkeypatch: pytest.MonkeyPatch, happens: Callable[[], object]
) -> list[float]:
    """Run the loop of a thread that is about to end in this thread, and return for how long it slept each time."""
    watch = Watch(clock, 9, happens)
    monkeypatch.setattr(server, "_wake", watch)
    monkeypatch.setattr(server, "_lock", watch)
    RUN(server)
    assert server.heartbeat._servers == {}
    return watch.waited


def loop(heart: Heartbeat, clock: Clock, waits: int, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Run the thread's loop in this thread, and return for how long it slept each time."""
    watch = Watch(clock, waits)
    server = only(heart)
    monkeypatch.setattr(server, "_wake", watch)
    monkeypatch.setattr(server, "_lock", watch)
    with pytest.raises(Ended):
        RUN(server)
    return watch.waited


@pytest.fixture
def beating() -> Iterator[Heartbeat]:
    """A heartbeat with its thread, which gets nothing more to do when the test has ended."""
    heart = Heartbeat()
    yield heart
    for holding in heart.holdings():
        heart.forget(holding)


def test_the_thread_wakes_when_a_renewal_is_due_and_else_once_a_step(
    heart: Heartbeat, store: ScriptedStore, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    heart.watch(hold(store, clock, "a", ttl=30.0))
    clock.advance(4.0)
    assert loop(heart, clock, 4, monkeypatch) == [6.0, 10.0, 10.0, 10.0]
    assert store.count("renew") == 3


def test_a_thread_ends_after_a_step_in_which_no_lease_came(
    heart: Heartbeat, store: ScriptedStore, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    heart.forget(heart.watch(hold(store, clock, "before")))
    server = only(heart)

    def comes_and_goes() -> None:
        heart.forget(heart.watch(hold(store, clock, "meanwhile")))

    assert to_its_end(server, clock, monkeypatch, comes_and_goes) == [20.0, 20.0]


def test_a_thread_that_sleeps_ends_as_soon_as_its_store_is_not_used_any_more(
    heart: Heartbeat, store: ScriptedStore, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    holding = heart.watch(hold(store, clock))
    server = only(heart)

    def ends() -> None:
        heart.forget(holding)
        heart.end(store)

    assert to_its_end(server, clock, monkeypatch, ends) == [20.0]


def test_a_thread_that_is_awake_does_not_sleep_once_more_if_its_store_is_not_used_any_more(
    heart: Heartbeat, store: ScriptedStore, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    heart.forget(heart.watch(hold(store, clock)))
    heart.end(store)
    assert to_its_end(only(heart), clock, monkeypatch, lambda: None) == [0.0]


def test_a_thread_that_wakes_and_has_no_lease_ends_and_the_next_lease_starts_another(
    beating: Heartbeat, store: ScriptedStore
) -> None:
    for _ in range(2):
        holding = beating.watch(HeldLease(store, take(store, ttl=0.03), module.monotonic()))
        thread = only(beating).thread
        beating.forget(holding)
        thread.join(PROMPTLY)
        assert not thread.is_alive()
        assert beating._servers == {}


def test_the_thread_of_a_store_that_is_not_used_any_more_ends_at_once(beating: Heartbeat) -> None:
    old, other = ScriptedStore(), ScriptedStore()
    begun = module.monotonic()
    holding = beating.watch(HeldLease(old, take(old), begun))
    rest = beating.watch(HeldLease(other, take(other), begun))
    thread = beating._servers[old, ""].thread
    beating.end(old)  # it has a lease, and goes on
    assert thread.is_alive()
    beating.forget(holding)
    beating.end(old)
    beating.watch(holding)  # used again after all, by this thread or, if that has ended, by another
    again = beating._servers[old, ""].thread
    beating.forget(holding)
    beating.end(old)
    for each in (thread, again):
        each.join(PROMPTLY)
        assert not each.is_alive()
    assert [server for server, _ in beating._servers] == [other]
    beating.forget(rest)
    beating.end(other)
    assert module.monotonic() < begun + TTL / 3


def test_a_server_that_hangs_keeps_no_lease_on_another_from_renewal(beating: Heartbeat) -> None:
    """Two stores, of which one answers no more: the leases of the other must not run out."""
    hung, sound = ScriptedStore(), ScriptedStore()
    door, renewed = hung.block("renew"), threading.Event()
    stuck = beating.watch(HeldLease(hung, take(hung, ttl=0.03), module.monotonic()))
    assert door.entered.wait(PROMPTLY)
    for _ in range(2):
        sound.after("renew", lambda: None)
    sound.after("renew", renewed.set)
    beating.watch(HeldLease(sound, take(sound, ttl=0.03), module.monotonic()))
    assert renewed.wait(PROMPTLY)
    assert stuck.renewals == 0
    door.open()


def test_a_node_that_hangs_keeps_no_lease_on_another_node_of_its_cluster_from_renewal(
    beating: Heartbeat, store: ScriptedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "shard", lambda key: key[0], raising=False)
    door, renewed, renew = threading.Event(), threading.Event(), store.renew
    stuck = threading.Event()

    def half(leases: Any) -> Any:
        if leases[0].key == "a":
            stuck.set()
            door.wait(PROMPTLY)
        else:
            renewed.set()
        return renew(leases)

    monkeypatch.setattr(store, "renew", half)
    beating.watch(HeldLease(store, take(store, "a", ttl=0.03), module.monotonic()))
    assert stuck.wait(PROMPTLY)
    beating.watch(HeldLease(store, take(store, "b", ttl=0.03), module.monotonic()))
    try:
        assert renewed.wait(PROMPTLY)
    finally:
        door.set()


def test_an_unexpected_error_does_not_end_the_thread(
    heart: Heartbeat,
    store: ScriptedStore,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    heart.watch(hold(store, clock))
    beat, errors = only(heart).beat, [MemoryError("full"), RuntimeError("changed size")]

    def failing_twice(now: float) -> float:
        if errors:
            raise errors.pop(0)
        return beat(now)

    monkeypatch.setattr(only(heart), "beat", failing_twice)
    assert loop(heart, clock, 4, monkeypatch) == [1.0, 1.0, 18.0, 20.0]
    assert [line.getMessage() for line in caplog.records] == ["A heartbeat failed; the next one is due in 1.0 s"] * 2
    assert "changed size" in caplog.text
    assert store.count("renew") == 1


def test_an_error_does_not_make_a_thread_with_short_leases_sleep_longer_than_a_step(
    heart: Heartbeat, store: ScriptedStore, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    heart.watch(hold(store, clock, ttl=1.5))
    monkeypatch.setattr(only(heart), "beat", lambda now: 1 / 0)
    assert loop(heart, clock, 1, monkeypatch) == [0.5]


def test_a_shorter_ttl_shortens_the_step_and_wakes_the_thread_and_a_longer_does_not(
    heart: Heartbeat, store: ScriptedStore, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    heart.watch(hold(store, clock, "first"))
    watch = Watch(clock, 0)
    monkeypatch.setattr(only(heart), "_wake", watch)
    monkeypatch.setattr(only(heart), "thread", threading.main_thread())  # any that is alive
    for key, ttl, step, notified in [
        ("longer", 90.0, 20.0, 0),
        ("same", 60.0, 20.0, 0),
        ("shorter", 30.0, 10.0, 1),
        ("again", 60.0, 10.0, 1),
    ]:
        heart.watch(hold(store, clock, key, ttl=ttl))
        assert (only(heart).step, watch.notified) == (step, notified), key


def test_one_daemon_thread_is_started_by_the_first_lease(beating: Heartbeat, store: ScriptedStore) -> None:
    before = set(threading.enumerate())
    for key in "abc":
        holding = HeldLease(store, take(store, key), module.monotonic())
        assert beating.watch(holding) is holding
    started = set(threading.enumerate()) - before
    assert [(thread.name, thread.daemon) for thread in started] == [("celery-idempotent-heartbeat", True)]


def test_what_no_thread_can_renew_is_not_renewed_by_a_later_one(
    beating: Heartbeat, store: ScriptedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its message has gone back, with the reservation that it holds until it is done."""

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(StoreUnreachable, match="can't start new thread"):
        beating.watch(HeldLease(store, take(store), module.monotonic()))
    assert beating.holdings() == []


def test_the_thread_renews_by_itself_and_is_woken_by_a_shorter_ttl(beating: Heartbeat, store: ScriptedStore) -> None:
    beating.watch(HeldLease(store, take(store, "long", ttl=3000.0), module.monotonic()))
    renewed = threading.Event()
    store.after("renew", renewed.set)
    short = HeldLease(store, take(store, "short", ttl=0.03), module.monotonic())
    beating.watch(short)
    assert renewed.wait(PROMPTLY)
    assert store.calls[0] == ("renew", ([short.lease],))


def test_work_may_end_while_the_thread_stands_in_the_store(beating: Heartbeat, store: ScriptedStore) -> None:
    door, renewed = store.block("renew"), threading.Event()
    store.after("renew", renewed.set)
    first, second = (HeldLease(store, take(store, key, ttl=0.03), module.monotonic()) for key in ("first", "second"))
    beating.watch(first)
    assert door.entered.wait(PROMPTLY)
    beating.forget(first)
    store.inner.settle(first.lease, Outcome(State.COMPLETED, b"json:1"), ttl=60.0)
    beating.watch(second)
    door.open()
    assert renewed.wait(PROMPTLY)
    assert not first.lost
    assert store.calls[1] == ("renew", ([second.lease],))


def test_a_thread_that_ended_is_replaced_with_its_step(heart: Heartbeat, store: ScriptedStore, clock: Clock) -> None:
    heart.watch(hold(store, clock, "a", ttl=30.0))
    first = only(heart).thread
    first.join(PROMPTLY)
    heart.watch(hold(store, clock, "b", ttl=90.0))
    assert only(heart).thread is not first
    assert only(heart).step == 10.0
    assert len(heart.holdings()) == 2


@pytest.mark.parametrize("step", [1, -1])
def test_a_forked_child_starts_anew_and_leaves_the_parents_leases_alone(
    heart: Heartbeat, store: ScriptedStore, clock: Clock, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    inherited = heart.watch(hold(store, clock, "parent"))
    lock, pid = heart._lock, os.getpid()
    monkeypatch.setattr(module.os, "getpid", lambda: pid + step)
    assert heart.holdings() == []
    clock.advance(20.0)
    assert heart.beat(clock()) == float("inf")
    own = heart.watch(hold(store, clock, "child"))
    assert heart.holdings() == [own]
    assert heart._lock is not lock  # the parent's thread may have held it when the child was forked
    clock.advance(20.0)
    heart.beat(clock())
    assert store.calls == [("renew", ([own.lease],))]
    heart.forget(inherited)
    assert heart.holdings() == [own]


class Forked(MemoryStore):
    """Its ping is what a child does with the heartbeat."""

    def __init__(self, ping: Callable[[], object]) -> None:
        super().__init__()
        self.ping = ping  # type: ignore[method-assign, assignment]


def test_a_child_whose_parent_was_starting_a_thread_finds_nothing_locked() -> None:
    heart = Heartbeat()
    assert served_after_fork(Forked(lambda: heart.end(MemoryStore())), heart._lock)


def test_two_threads_of_a_child_that_begin_at_once_both_have_their_leases_renewed() -> None:
    """As the first requests of a server that was forked after it had loaded its app."""
    first = threading.Event()

    class Late(Heartbeat):
        def _reset(self) -> None:
            if threading.current_thread().name == "late":
                first.wait(PROMPTLY)
            super()._reset()

    heart, store = Late(), ScriptedStore()

    def begin() -> None:
        late = threading.Thread(
            target=lambda: heart.watch(HeldLease(store, take(store, "b"), monotonic())), name="late"
        )
        late.start()
        late.join(0.2)  # until it waits, if it does
        heart.watch(HeldLease(store, take(store, "a"), monotonic()))
        first.set()
        late.join()
        assert {holding.key for holding in heart.holdings()} == {"a", "b"}

    assert served_after_fork(Forked(begin), threading.Lock())


FORK = """
import os, sys, threading, warnings
warnings.simplefilter("ignore")  # newer Pythons dislike a fork with threads: that is what is tried here
from time import monotonic
from celery_idempotent.core.heartbeat import Heartbeat
from celery_idempotent.core.lease import HeldLease
from celery_idempotent.stores import Claim
from tests.support.unit.scripted import PROMPTLY, ScriptedStore

store, heart = ScriptedStore(), Heartbeat()

def hold(key):
    lease = store.inner.acquire(Claim(key, "me", 0.03, 60.0))
    return heart.watch(HeldLease(store, lease, monotonic()))

def renewals(n):
    renewed = threading.Event()
    for _ in range(n - 1):
        store.after("renew", lambda: None)
    store.after("renew", renewed.set)
    return renewed

renewed = renewals(1)
hold("parent")
assert renewed.wait(PROMPTLY)
child = os.fork()
if not child:
    # The parent's thread may have been within the store it uses, and holds its lock for ever here.
    inherited, store = store, ScriptedStore()
    inherited.calls.clear()
    assert threading.active_count() == 1 and heart.holdings() == []
    renewed = renewals(3)
    hold("child")
    ok = renewed.wait(PROMPTLY) and threading.active_count() == 2
    keys = {lease.key for _, (leases,) in store.calls for lease in leases}
    print("child renewed", keys, ok, inherited.calls, flush=True)
    os._exit(0)
os.waitpid(child, 0)
renewed = renewals(2)
print("parent goes on", renewed.wait(PROMPTLY), [holding.key for holding in heart.holdings()])
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_after_a_real_fork_parent_and_child_each_renew_their_own() -> None:
    command, here = [sys.executable, "-c", FORK], Path(__file__).parents[2]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, cwd=here)
    assert run.stderr == ""
    assert run.stdout.splitlines() == ["child renewed {'child'} True []", "parent goes on True ['parent']"]


def test_the_heartbeat_speaks_through_a_logger_of_its_own() -> None:
    assert module.logger is logging.getLogger("celery_idempotent.heartbeat")
