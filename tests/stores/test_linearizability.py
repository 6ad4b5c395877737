"""What concurrent clients see of a store could have happened one thing at a time, whatever the network loses.

First it is shown that the checker tells what can be from what cannot, and finds stores that are broken.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest

from celery_idempotent.errors import StoreUnreachable
from celery_idempotent.stores import Claim, Lease, Outcome, Reason, Record, Refusal, Release, State, Verdict, rules
from celery_idempotent.stores.memory import MemoryStore
from tests.support.stores import benches, linearizability
from tests.support.stores.benches import DONE, KEY
from tests.support.stores.histories import CLIENTS, Place, Seat, check, placed, record
from tests.support.stores.kinds import Kind
from tests.support.stores.linearizability import LOST, UNKNOWN, Operation, Undecided, linearization

IN_SOAK = int(os.environ.get("SOAK_HISTORIES", "1000"))
#: A store that is broken is found in so many histories at the latest.
TO_FIND = 300

Span = tuple[float, float]


@pytest.fixture(scope="module")
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(CLIENTS[1]) as pool:
        yield pool


@pytest.fixture(autouse=True)
def hasty_threads() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def claims(owner: str, **changes: Any) -> Claim:
    return benches.claim(**{"owner": owner, "task_id": owner, **changes})


def leased(owner: str, fence: int, **changes: Any) -> Lease:
    return Lease(claims(owner), fence, **changes)


def op(verb: str, subject: Any, answer: Any, span: Span, details: Any = None, echoes: int = 0) -> Operation:
    return Operation("client", verb, subject, details, answer, *span, echoes)


def acquired(owner: str, fence: int, span: Span, **changes: Any) -> Operation:
    return op("acquire", claims(owner), leased(owner, fence, **changes), span)


def in_the_way(owner: str, holder: str, fence: int, span: Span) -> Operation:
    record = Record(KEY, State.IN_PROGRESS, fence, owner=holder, task_id=holder, remaining=3.0)
    return op("acquire", claims(owner), Refusal(Verdict.CONFLICT, record), span)


def completed(owner: str, fence: int) -> Record:
    return Record(KEY, State.COMPLETED, fence, task_id=owner, payload=DONE.payload, age=7.0)


def can_be(*operations: Operation) -> bool:
    return linearization(KEY, operations)[0] is not None


class TestTheChecker:
    def test_nothing_can_be(self) -> None:
        assert can_be()

    def test_one_after_the_other_can_be(self) -> None:
        lease = leased("a", 5)
        order = [
            acquired("a", 5, (0, 1)),
            in_the_way("b", "a", 5, (2, 3)),
            op("renew", lease, False, (4, 5)),
            op("settle", lease, None, (6, 7), DONE),
            op("get", None, completed("a", 5), (8, 9)),
            op("release", lease, False, (10, 11), Release(Reason.FAILED)),
            op("mark_dispatched", None, True, (12, 13), "a"),
            op("delete", None, True, (14, 15)),
            op("delete", None, False, (16, 17)),
            op("get", None, None, (18, 19)),
        ]
        assert linearization(KEY, order)[0] == order

    def test_two_leases_at_once_cannot_be(self) -> None:
        assert not can_be(acquired("a", 5, (0, 3)), acquired("b", 6, (1, 4)))

    @pytest.mark.parametrize(("began", "expected"), [(1, True), (3, False)])
    def test_what_overlaps_may_have_come_first_and_what_was_over_may_not(self, *, began: float, expected: bool) -> None:
        refused = in_the_way("a", "b", 6, (0, 2))  # before whoever is in the way has asked?
        assert can_be(refused, acquired("b", 6, (began, 4))) == expected

    def test_a_lease_whose_grant_was_not_heard_of_is_newer_than_those_that_were(self) -> None:
        """What it has taken over is not given back by who held it before, whoever's lease is over."""
        history = [
            acquired("a", 5, (0, 1)),
            op("delete", None, True, (2, 3)),
            op("acquire", claims("b", lease_ttl=60.0), UNKNOWN, (4, 5)),
            op("age", None, None, (6, 7), 61.0),
            op("settle", leased("a", 5), LOST, (8, 9), DONE),
        ]
        again = leased("c", 9, taken_over=True, crashes=1)
        assert can_be(*history, op("acquire", again.claim, again, (10, 11)))

    def test_a_stale_look_cannot_be(self) -> None:
        seen = [acquired("a", 5, (0, 1)), op("settle", leased("a", 5), None, (2, 3), DONE)]
        assert can_be(*seen, op("get", None, completed("a", 5), (4, 5)))
        assert not can_be(*seen, op("get", None, None, (4, 5)))
        assert can_be(*seen[:1], replace(seen[1], ended=9), op("get", None, replace(record_of("a"), fence=5), (4, 5)))

    def test_a_fence_that_does_not_rise_cannot_be(self) -> None:
        freed = op("release", leased("a", 5), True, (2, 3), Release(Reason.FAILED))
        for fence, expected in ((6, True), (5, False), (4, False)):
            assert can_be(acquired("a", 5, (0, 1)), freed, acquired("b", fence, (4, 5))) == expected
        gone = op("delete", None, True, (2, 3))
        assert not can_be(acquired("a", 5, (0, 1)), gone, acquired("b", 5, (4, 5)))

    def test_a_lease_ends_when_time_passes_and_not_before(self) -> None:
        first, passes = acquired("a", 5, (0, 1)), op("age", None, None, (2, 3), 61.0)
        second = acquired("b", 6, (4, 5), taken_over=True, crashes=1)
        assert can_be(first, passes, second)
        assert not can_be(first, second)
        assert not can_be(first, passes, acquired("b", 6, (4, 5)))
        late = op("settle", leased("a", 5), LOST, (6, 7), DONE)
        assert can_be(first, passes, second, late)
        assert not can_be(first, passes, second, replace(late, answer=None))

    def test_everything_expires_in_the_end(self) -> None:
        seen = [acquired("a", 5, (0, 1)), op("age", None, None, (2, 3), 3661.0)]
        assert can_be(*seen, op("get", None, None, (4, 5)), acquired("b", 6, (6, 7)))

    def test_what_was_not_heard_of_may_have_happened_or_not_or_late(self) -> None:
        lost = op("acquire", claims("a"), UNKNOWN, (0, 1))
        other = acquired("b", 6, (2, 3))
        assert can_be(lost, other)
        assert can_be(lost, in_the_way("b", "a", 5, (2, 3)))
        gone = op("release", leased("b", 6), True, (4, 5), Release(Reason.FAILED))
        assert can_be(lost, other, gone, in_the_way("c", "a", 7, (6, 7)))
        assert not can_be(lost, other, gone, in_the_way("c", "a", 6, (6, 7)))
        assert not can_be(in_the_way("b", "a", 5, (-2, -1)), lost, other)  # it had not been sent yet

    def test_a_lease_nobody_heard_of_is_heard_of_later(self) -> None:
        lost = op("acquire", claims("a"), UNKNOWN, (0, 1))
        assert can_be(lost, acquired("a", 5, (2, 3)), op("settle", leased("a", 5), None, (4, 5), DONE))
        assert can_be(lost, in_the_way("b", "a", 5, (2, 3)), acquired("a", 5, (4, 5)))
        assert not can_be(lost, in_the_way("b", "a", 5, (2, 3)), acquired("a", 7, (4, 5)))

    def test_what_was_sent_twice_may_have_been_done_twice(self) -> None:
        freed = op("release", leased("a", 5), False, (2, 7), Release(Reason.FAILED))
        seen = [acquired("a", 5, (0, 1)), acquired("b", 6, (4, 5))]
        assert not can_be(*seen, freed)  # it was not freed, and b has it
        assert can_be(*seen, replace(freed, echoes=1))

    def test_what_was_settled_is_settled_again_by_its_holder_alone(self) -> None:
        seen = [acquired("a", 5, (0, 1)), op("settle", leased("a", 5), None, (2, 3), DONE)]
        again = op("settle", leased("a", 5), None, (4, 5), DONE)
        assert can_be(*seen, again)
        assert not can_be(*seen, replace(again, subject=leased("a", 4)))
        assert not can_be(*seen, replace(again, details=Outcome(State.FAILED, b"")))

    def test_a_holder_brings_its_record_back(self) -> None:
        seen = [acquired("a", 5, (0, 1)), op("delete", None, True, (2, 3)), op("renew", leased("a", 5), False, (4, 5))]
        assert can_be(*seen, in_the_way("b", "a", 5, (6, 7)))
        assert not can_be(*seen, acquired("b", 6, (6, 7)))

    def test_what_cannot_be_is_shown(self) -> None:
        said = check({KEY: [acquired("a", 5, (0, 3)), acquired("b", 6, (1, 4))]}, 7)
        assert "(seed 7)" in said
        assert said.count("acquire(") == 3

    def test_many_who_were_not_heard_of_do_not_take_for_ever(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(linearizability, "STATES", 500)
        lost = [op("acquire", claims(f"n{number}"), UNKNOWN, (0, 1), echoes=1) for number in range(20)]
        impossible = [acquired("a", 5, (2, 3)), acquired("b", 6, (4, 5))]
        assert not can_be(*lost[:4], *impossible)
        with pytest.raises(Undecided):
            can_be(*lost, *impossible)


def record_of(owner: str) -> Record:
    return Record(KEY, State.IN_PROGRESS, 5, owner=owner, task_id=owner)


class UncheckedSettle(MemoryStore):
    """Whoever settles last is right."""

    def settle(self, lease: Lease, outcome: Outcome, *, ttl: float) -> None:
        with self._lock:
            now = self._now()
            row = rules.settle(None, lease, outcome, ttl, now)
            assert row is not None
            self._rows[lease.key] = row


class LostUpdates(MemoryStore):
    """Look, then take, and do not look again."""

    def acquire(self, claim: Claim) -> Lease | Refusal:
        with self._lock:  # a look is whole
            row = deepcopy(self._row(claim.key, self._now()))
        time.sleep(0.0005)
        answer, row = rules.acquire(claim.key, row, claim, self._now())
        self._rows[claim.key] = row
        return answer


class StaleLooks(MemoryStore):
    """Answer what was true the last time somebody looked."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, Record | None] = {}

    def get(self, key: str) -> Record | None:
        record = super().get(key)
        return self.seen.setdefault(key, record)


class UncheckedRelease(MemoryStore):
    """Whoever releases frees whatever is there."""

    def release(self, lease: Lease, release: Release) -> bool:
        row = self._rows.get(lease.key)
        owner = row.owner if row else ""
        return super().release(replace(lease, claim=replace(lease.claim, owner=owner)), release)


class DeafRenewals(MemoryStore):
    """Tell every holder that all is well."""

    def renew(self, leases: Any) -> Any:
        super().renew(leases)
        return []


class RefusedForWantOfAReply(MemoryStore):
    """Lose a reply now and then, and refuse who asks again for it."""

    def acquire(self, claim: Claim) -> Lease | Refusal:
        record = self.get(claim.key)
        if record is not None and record.owner == claim.owner and record.remaining:
            return Refusal(Verdict.CONFLICT, record)
        answer = super().acquire(claim)
        if isinstance(answer, Lease) and claim.owner < "4":
            raise StoreUnreachable("the reply was lost")
        return answer


class FencesThatRest(MemoryStore):
    """Every lease has the same fence."""

    def acquire(self, claim: Claim) -> Lease | Refusal:
        with self._lock:
            answer = super().acquire(claim)
            self._rows[claim.key].fence = 1
            return replace(answer, fence=1) if isinstance(answer, Lease) else answer


class SettledWithoutAWord(MemoryStore):
    """Say that it was settled, and forget it."""

    def settle(self, lease: Lease, outcome: Outcome, *, ttl: float) -> None:
        with self._lock:
            before = deepcopy(self._rows.get(lease.key))
            super().settle(lease, outcome, ttl=ttl)
            if before is not None:
                self._rows[lease.key] = before


BROKEN = [
    UncheckedSettle,
    LostUpdates,
    StaleLooks,
    UncheckedRelease,
    DeafRenewals,
    RefusedForWantOfAReply,
    FencesThatRest,
    SettledWithoutAWord,
]


def age(store: Any, key: str, seconds: float) -> None:
    by, row = round(seconds * rules.SECOND), store._rows.get(key)
    if row is not None:
        row.lease_end, row.not_before, row.expires = row.lease_end - by, row.not_before - by, row.expires - by


@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_store_is_found(broken: type[MemoryStore], threads: ThreadPoolExecutor) -> None:
    store = broken()
    place = Place([Seat(store)] * CLIENTS[1], store, age)
    assert any(check(record(place, seed, threads), seed) for seed in range(TO_FIND))


def holds(kind: Kind, url: str, threads: ThreadPoolExecutor, seeds: range) -> Counter[str]:
    """See that what happens at this kind of store can have happened, and return what there was to see."""
    seen: Counter[str] = Counter()
    with placed(kind, url) as place:
        for seed in seeds:
            history = record(place, seed, threads)
            try:
                problem = check(history, seed, fences_fall=kind.fences_fall)
            except Undecided:
                seen["undecided"] += 1
            else:
                assert not problem, problem
            operations = [one for part in history.values() for one in part]
            seen["operations"] += len(operations)
            seen["unknown"] += sum(one.answer is UNKNOWN for one in operations)
            seen["sent again"] += sum(bool(one.echoes) for one in operations)
            seen["leases"] += sum(isinstance(one.answer, Lease) for one in operations)
            seen["lost leases"] += sum(one.answer is LOST for one in operations)
    return seen


@pytest.mark.thorough
@pytest.mark.unmeasured
def test_histories_can_have_happened(kind: Kind, kind_url: str, threads: ThreadPoolExecutor) -> None:
    number = kind.examples
    seen = holds(kind, kind_url, threads, range(number))
    assert seen["undecided"] <= number // 20
    assert seen["leases"] > number
    assert seen["lost leases"] > number // 10
    if kind.through:
        assert seen["sent again"] > number // 10


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_a_thousand_histories_can_have_happened(
    kind: Kind, kind_url: str, threads: ThreadPoolExecutor, request: pytest.FixtureRequest
) -> None:
    began = time.monotonic()
    seen = holds(kind, kind_url, threads, range(1000, 1000 + IN_SOAK))
    name = request.node.callspec.params["kind"]
    figures = ", ".join(f"{count} {what}" for what, count in seen.items())
    print(f"\n{name}: {IN_SOAK} histories linearizable in {time.monotonic() - began:.0f} s: {figures}")
