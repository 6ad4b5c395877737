"""A parent speaks for its child with the owner that it gave it, and of nothing that is not the child's any more."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext, suppress
from functools import partial
from time import monotonic

import pytest

from celery_idempotent.core import lease as deputy
from celery_idempotent.errors import LeaseLost
from celery_idempotent.stores import Claim, Lease, Outcome, Reason, Record, Release, State
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.stores.records import new_owner
from tests.support.unit.scripted import Clock, ScriptedStore

KEY = "idem:shop.charge::ORD-1"


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


def claim_of(owner: str) -> Claim:
    return Claim(KEY, owner, lease_ttl=60.0, keep_ttl=60.0, task_id=owner)


def taken(store: MemoryStore, owner: str) -> Lease:
    lease = store.acquire(claim_of(owner))
    assert isinstance(lease, Lease)
    return lease


def test_what_its_child_holds_is_renewed_and_released_once(store: MemoryStore) -> None:
    child = claim_of(new_owner())
    lease = taken(store, child.owner)
    assert deputy.renew(store, child)
    released = deputy.release(store, child, Reason.CRASHED)
    assert released is not None
    assert released.fence == lease.fence
    assert deputy.release(store, child, Reason.CRASHED) is None
    assert not deputy.renew(store, child)


def test_what_its_child_gave_back_itself_is_nobody_s_news(store: MemoryStore) -> None:
    child = claim_of(new_owner())
    store.release(taken(store, child.owner), Release(Reason.FAILED))
    assert deputy.release(store, child, Reason.CRASHED) is None
    assert not deputy.renew(store, child)


@pytest.mark.parametrize("owners", ["ab", "ba"])
def test_what_another_holds_by_now_is_left_alone(store: MemoryStore, owners: str) -> None:
    asked = ScriptedStore(store)
    child, heir = map(claim_of, owners)
    store.release(taken(store, child.owner), Release(Reason.FAILED))
    lease = taken(store, heir.owner)
    assert deputy.release(asked, child, Reason.CRASHED) is None
    assert not deputy.renew(asked, child)
    assert asked.count("renew") == 0, "it would bring the child's record back if the heir's were gone by then"
    record = store.get(KEY)
    assert record is not None
    assert (record.state, record.owner, record.fence) == (State.IN_PROGRESS, heir.owner, lease.fence)


def test_a_key_that_nobody_took_is_not_made(store: MemoryStore) -> None:
    child = claim_of(new_owner())
    assert not deputy.renew(store, child)
    assert deputy.release(store, child, Reason.CRASHED) is None
    assert store.get(KEY) is None


def ids_of(key: str) -> deputy.TaskIds:
    return deputy.TaskIds(key, 60.0, lambda name, task_id: None)


def test_equal_calls_of_many_threads_have_an_id_each_and_the_same_ones_on_each_run() -> None:
    def run() -> list[str]:
        ids = ids_of(KEY)

        def call(_: int) -> str:
            with ids.next("send", "1") as found:
                return found

        with ThreadPoolExecutor(8) as pool:
            return sorted(pool.map(call, range(500)))

    assert run() == run()
    assert len(set(run())) == 500


def test_the_number_of_a_call_that_raised_is_the_next_ones() -> None:
    ids, given = ids_of(KEY), []
    for fails in (False, True, False, False):
        try:
            with ids.next("send") as found:
                given.append(found)
                if fails:
                    raise ValueError(found)
        except ValueError:
            pass
    assert given[1] == given[2]
    assert len(set(given)) == 3


def test_a_number_that_comes_back_while_higher_ones_are_out_is_given_out_once() -> None:
    ids = ids_of(KEY)
    with ExitStack() as calls:
        with suppress(OSError), ids.next("mail") as first:
            second = calls.enter_context(ids.next("mail"))
            raise OSError
        third, fourth = (calls.enter_context(ids.next("mail")) for _ in range(2))
    assert (first, second) == (third, ids.derive("mail", "2"))
    assert fourth == ids.derive("mail", "3")


@pytest.mark.parametrize(("age", "outlived"), [(9.9, False), (10.0, True), (113.9, True), (114.0, False)])
def test_a_record_that_is_gone_was_the_results_between_their_times(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch, age: float, outlived: bool
) -> None:
    clock = Clock().install(monkeypatch)
    clock.now = 3.0 + age
    held = deputy.HeldLease(store, Lease(claim_of("a"), 1), 3.0, result_ttl=10.0)
    assert held.outlived_result is outlived
    assert held.asked == age


def test_a_run_whose_settle_is_refused_knows_that_it_has_lost_its_lease() -> None:
    class Refusing(MemoryStore):
        def settle_within(self, lease: Lease, outcome: Outcome, *, ttl: float, using: object) -> None:
            raise LeaseLost("held by another")

    encode = partial(Outcome, State.COMPLETED)
    held = deputy.HeldLease(Refusing(), Lease(claim_of("a"), 7), monotonic(), encode=encode, result_ttl=10.0)
    with pytest.raises(LeaseLost, match="taken over"):
        held.settle(b"", using=[])
    with pytest.raises(LeaseLost):
        held.check()


def test_what_an_earlier_run_settled_is_not_this_ones_transaction(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, scripted = Clock().install(monkeypatch), ScriptedStore()
    held = deputy.HeldLease(scripted, Lease(claim_of("a"), 7), clock.now)
    held.within = {b"mine": "mine"}
    clock.advance(60)
    for fence, lost in ((7, False), (6, True), (8, True)):
        scripted.answer("renew", [held.lease])
        scripted.answer("get", Record(KEY, State.COMPLETED, fence))
        held.lost = False
        with pytest.raises(LeaseLost) if lost else nullcontext():
            held.check()


def test_an_operation_within_another_has_ids_of_its_own_which_are_numbered_with_it() -> None:
    ids = ids_of(KEY)
    found = []
    for each in (ids, ids.within("a"), ids.within("a"), ids.within("b"), ids_of("other")):
        with each.next("send") as task_id:
            found.append(task_id)
    assert len(set(found)) == 5
