"""A parent speaks for its child with the owner that it gave it, and of nothing that is not the child's any more."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from celery_idempotent.core import lease as deputy
from celery_idempotent.stores import Claim, Lease, Reason, Release, State
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.stores.records import new_owner
from tests.support.unit.scripted import ScriptedStore

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


def test_what_another_holds_by_now_is_left_alone(store: MemoryStore) -> None:
    asked = ScriptedStore(store)
    child, heir = claim_of(new_owner()), claim_of(new_owner())
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


def test_an_operation_within_another_has_ids_of_its_own_which_are_numbered_with_it() -> None:
    ids = ids_of(KEY)
    found = []
    for each in (ids, ids.within("a"), ids.within("a"), ids.within("b"), ids_of("other")):
        with each.next("send") as task_id:
            found.append(task_id)
    assert len(set(found)) == 5
