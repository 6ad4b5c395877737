"""What stores tell people beside the contract: how long a lease is held, how many wait, what room is taken."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from celery_idempotent.stores import Reason, Refusal, Release, Store
from celery_idempotent.stores.redis import RedisStore
from tests.support.servers import RedisServer
from tests.support.stores.benches import DONE, KEY, claim, known, take
from tests.support.stores.kinds import Kind
from tests.support.stores.rights import FOR_ROOM, RIGHTS
from tests.support.waiting import wait_until

#: By the fixture of a kind of store, what its server tells.
TOLD = {
    "memory_url": set(),
    "redis_url": {"memory_bytes", "record_bytes"},
    "sqlite_url": {"file_bytes"},
    "postgres_url": {"table_bytes"},
    "cluster_url": {"memory_bytes", "record_bytes"},
    "dynamodb_url": {"counted_bytes", "counted_records"},
}


def test_a_record_tells_for_how_long_its_lease_is_held(any_store: Store) -> None:
    lease = take(any_store)
    first = known(any_store).held_for
    assert 0 <= first < 30
    any_store.renew([lease])
    wait_until(lambda: known(any_store).held_for > first, message="time to pass, which a renewal does not turn back")
    assert [record.held_for > first for record in any_store.scan()] == [True]
    any_store.release(lease, Release(Reason.FAILED))
    assert known(any_store).held_for == 0
    any_store.settle(take(any_store), DONE, ttl=60)
    assert known(any_store).held_for == 0


def test_a_lease_that_was_taken_earlier_is_held_for_longer(any_store: Store, kind: Kind) -> None:
    take(any_store)
    kind.age_fence(any_store, KEY, 3600)
    assert known(any_store).held_for > 3600


def test_a_record_tells_how_many_tasks_wait_until_they_run_or_it_is_settled(any_store: Store) -> None:
    lease = take(any_store, task_id="holder")
    assert known(any_store).waiting == 0
    for task_id, copy in (("a", 0), ("a", 1), ("b", 0)):
        assert isinstance(any_store.acquire(claim(task_id=task_id, copy=copy, token=f"{copy}")), Refusal)
    assert known(any_store).waiting == 2
    assert [record.waiting for record in any_store.scan()] == [2]
    any_store.release(lease, Release(Reason.FAILED))
    assert known(any_store).waiting == 2
    lease = take(any_store, task_id="b")
    assert known(any_store).waiting == 1
    any_store.settle(lease, DONE, ttl=60)
    assert known(any_store).waiting == 0


def test_a_store_tells_the_room_that_its_server_knows(any_store: Store, kind: Kind) -> None:
    take(any_store)
    told = any_store.usage([KEY, "idem:gone"])
    wanted = TOLD.get(kind.fixture)
    assert wanted is None or told.keys() == wanted  # a cache tells what the store behind it does
    assert all(number > 0 or name.startswith("counted_") for name, number in told.items())


def test_a_redis_user_without_the_rights_is_told_nothing_and_one_with_them_all(
    own_redis: Callable[..., RedisServer], opened: Callable[..., RedisStore]
) -> None:
    server = own_redis()

    def grant(rights: str) -> Any:
        with server.client() as client:
            return client.execute_command("ACL", "SETUSER", "shop", "reset", "on", ">hunter2", *rights.split())

    grant(RIGHTS)
    store = opened(f"redis://shop:hunter2@127.0.0.1:{server.port}")
    take(store, "idem:one")
    assert store.usage(["idem:one"]) == {}
    grant(f"{RIGHTS} {FOR_ROOM}")
    assert store.usage(["idem:one"]).keys() == {"memory_bytes", "record_bytes"}
    assert store.usage().keys() == {"memory_bytes"}
    assert store.acquire(claim("idem:two"))
