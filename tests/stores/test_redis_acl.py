"""A user with the least rights can do everything; one right less is a refusal, and never a lost lease."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from celery_idempotent.errors import StoreRefused, StoreUnreachable
from celery_idempotent.stores import HistoryEntry, Lease, Reason, Refusal, Release, State, Store
from celery_idempotent.stores.redis import ClusterStore, RedisStore, SentinelStore
from tests.stores.test_redis import BINARIES
from tests.support.cluster import Cluster
from tests.support.sentinel import NAME, Watch
from tests.support.servers import RedisServer
from tests.support.stores.benches import DONE, KEY, claim, known, take
from tests.support.stores.kinds import AGE
from tests.support.stores.rights import FOR_A_CLUSTER, FOR_A_DATABASE, FOR_REPLICAS, FOR_SENTINELS, RIGHTS

SECRET = "hunter2"
Open = Callable[..., RedisStore]
OpenCluster = Callable[..., ClusterStore]
Ageing = Callable[[str, float], None]


def grant(says: Callable[..., Any], rights: str, user: str = "shop") -> None:
    says("ACL", "SETUSER", user, "reset", "on", f">{SECRET}", *rights.split())


class Server:
    """A server, what its operator says to it, and a store of the user with few rights."""

    def __init__(self, redis: RedisServer, store: RedisStore) -> None:
        self.redis, self.store = redis, store

    def says(self, *command: Any) -> Any:
        with self.redis.client() as client:
            return client.execute_command(*command)

    def age(self, key: str, seconds: float) -> None:
        self.says("EVAL", AGE, 1, key, round(seconds * 1000))


@pytest.fixture(params=BINARIES.values(), ids=BINARIES)
def server(request: pytest.FixtureRequest, own_redis: Callable[..., RedisServer], opened: Open) -> Server:
    redis = own_redis(binary=request.param)
    server = Server(redis, opened(f"redis://shop:{SECRET}@127.0.0.1:{redis.port}"))
    grant(server.says, RIGHTS)
    return server


def everything(store: Store, age: Ageing) -> None:
    """Have every script go every way."""
    lease = take(store, crashes_key := "idem:crashes")
    assert isinstance(store.acquire(claim(crashes_key, task_id="other")), Refusal)
    age(crashes_key, 61)
    lease = take(store, crashes_key, max_crashes=9)
    assert lease.taken_over
    assert store.renew([lease, gone := Lease(claim("idem:gone", task_id="t", fingerprint="f"), 1)]) == []
    assert known(store, gone.key).owner == gone.owner
    for reason in (Reason.CRASHED, Reason.SHUTDOWN, Reason.RETRY, Reason.FAILED):
        assert store.release(take(store, "idem:released", max_crashes=9), Release(reason))
    assert store.release(Lease(claim("idem:unknown"), 1), Release(Reason.FAILED))
    age("idem:looping", 0)
    take(store, "idem:looping", task_id="a")
    age("idem:looping", 61)
    assert isinstance(store.acquire(claim("idem:looping", task_id="a", max_crashes=1)), Refusal)
    for settled in (lease, Lease(claim("idem:forgotten"), 1)):
        store.settle(settled, DONE, ttl=60)
        for task_id in ("a", "b"):
            assert store.mark_dispatched(settled.key, task_id)
    assert {record.state for record in store.scan(prefix="idem:forg")} == {State.COMPLETED}
    store.append_history([HistoryEntry(crashes_key, "taken over", 0, 60)])
    assert [noted.text for noted in store.history(crashes_key)] == ["taken over"]
    assert store.delete(crashes_key)
    store.ping()


def test_the_documented_rights_are_enough(server: Server) -> None:
    everything(server.store, server.age)


@pytest.mark.nightly
@pytest.mark.parametrize("name", [word for word in RIGHTS.split() if word.startswith("+")])
def test_none_of_them_can_be_done_without(server: Server, name: str) -> None:
    everything(server.store, server.age)  # so that no script is missing
    server.says("FLUSHALL")
    if name == "+eval":
        server.says("SCRIPT", "FLUSH")
    server.says("ACL", "SETUSER", "shop", f"-{name[1:]}")
    with pytest.raises(StoreRefused, match="rights") as caught:
        everything(server.store, server.age)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("name", ["hmget", "hset", "pexpire", "time", "evalsha", "exists"])
def test_a_right_that_is_taken_away_loses_no_lease(server: Server, name: str) -> None:
    """Who hears that his lease is lost stops working, and an operator's slip must not stop every worker."""
    held, gone = take(server.store), Lease(claim("idem:gone"), 1)
    assert server.store.renew([held]) == []
    server.says("ACL", "SETUSER", "shop", f"-{name}")
    with pytest.raises(StoreRefused, match="rights"):
        server.store.renew([held, gone])
    server.says("ACL", "SETUSER", "shop", f"+{name}")
    assert server.store.renew([held, gone]) == []


def test_the_keys_of_others_are_refused(server: Server) -> None:
    with pytest.raises(StoreRefused, match="rights"):
        take(server.store, "other:key")
    with pytest.raises(StoreRefused, match="rights"):
        server.store.renew([Lease(claim("other:key"), 1)])


def test_a_database_of_its_own_needs_one_right_more(server: Server, opened: Open) -> None:
    store = opened(f"redis://shop:{SECRET}@127.0.0.1:{server.redis.port}/1")
    with pytest.raises(StoreRefused, match="rights"):
        take(store)
    grant(server.says, f"{RIGHTS} {FOR_A_DATABASE}")
    assert take(store).fence > 0


def test_replicas_that_must_confirm_need_one_right_more(server: Server, opened: Open) -> None:
    grant(server.says, f"{RIGHTS} {FOR_REPLICAS}")
    store = opened(f"redis://shop:{SECRET}@127.0.0.1:{server.redis.port}?wait_replicas=1")
    with pytest.raises(StoreUnreachable, match="0 confirmed"):
        take(store)


def test_without_the_right_to_wait_no_claim_counts(server: Server, opened: Open) -> None:
    store = opened(f"redis://shop:{SECRET}@127.0.0.1:{server.redis.port}?wait_replicas=1")
    with pytest.raises(StoreUnreachable, match=r"(?i)permission"):
        take(store)


@pytest.fixture
def few(shared_cluster: Cluster, cluster_url: str) -> Iterator[str]:
    """The URL of the cluster for a user with the least rights."""
    for node in shared_cluster.primaries:
        grant(node.says, f"{RIGHTS} {FOR_A_CLUSTER}", "few")
    yield cluster_url.replace("://", f"://few:{SECRET}@")
    for node in shared_cluster.primaries:
        node.says("ACL", "DELUSER", "few")


def test_a_cluster_needs_two_rights_more(shared_cluster: Cluster, few: str, opened_cluster: OpenCluster) -> None:
    store = opened_cluster(few)

    def age(key: str, seconds: float) -> None:
        shared_cluster.owner(key).says("EVAL", AGE, 1, key, round(seconds * 1000))

    everything(store, age)
    owner = shared_cluster.owner(KEY)
    assert store._connections.send(owner.address, [("ASKING",)]) == [b"OK"]  # said while a slot moves
    for node in shared_cluster.primaries:
        node.says("ACL", "SETUSER", "few", "-hmget")
    with pytest.raises(StoreRefused, match="rights"):
        store.renew([Lease(claim(), 1)])


def test_a_user_of_the_sentinels_needs_one_right(own_redis: Callable[..., RedisServer]) -> None:
    server = own_redis()
    grants = f"user watcher on >{SECRET} {FOR_SENTINELS}"
    with Watch({NAME: server.port}, grants) as watch:
        url = f"redis+sentinel://127.0.0.1:{watch.port}/{NAME}"
        store = SentinelStore.from_url(f"{url}?sentinel_username=watcher&sentinel_password={SECRET}")
        assert take(store).fence > 0
        store.close()
