"""A Redis Cluster of which a node is down or hangs, that fails over, or whose replies are lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from time import monotonic
from typing import Any

import pytest

from celery_idempotent.core.heartbeat import Heartbeat
from celery_idempotent.core.lease import HeldLease
from celery_idempotent.errors import StoreError, StoreRefused, StoreUnreachable
from celery_idempotent.stores import Lease, Reason, Release, State
from celery_idempotent.stores.redis import ClusterStore
from tests.conftest import missing
from tests.support.cluster import Cluster, ClusterNode
from tests.support.proxy import Proxy
from tests.support.servers import ServerMissing
from tests.support.stores.benches import DONE, claim, known, take
from tests.support.stores.kinds import empty_cluster
from tests.support.waiting import WaitTimeout, wait_until

OpenCluster = Callable[..., ClusterStore]
SECRET = "hunter2"
#: Longest time that a call may take, in seconds, on a machine that is busy.
FEW = 15.0


def made(**options: Any) -> Cluster:
    try:
        return Cluster(**options)
    except ServerMissing as error:
        raise missing(error) from None


@pytest.fixture
def own_cluster() -> Iterator[Callable[..., Cluster]]:
    """A function that starts a cluster for this test alone."""
    started: list[Cluster] = []

    def start(**options: Any) -> Cluster:
        started.append(made(**options))
        return started[-1].__enter__()

    yield start
    for cluster in started:
        cluster.stop()


@pytest.fixture(scope="module")
def crippled() -> Iterator[Cluster]:
    """A cluster whose first node is down; the others go on."""
    with made(cluster_require_full_coverage="no") as cluster:
        cluster.primaries[0].kill()
        yield cluster


@pytest.fixture(scope="module")
def patient() -> Iterator[Cluster]:
    """A cluster whose nodes may be paused for a while, and go on when one of them does not."""
    with made(cluster_require_full_coverage="no", cluster_node_timeout=15_000) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def lonely() -> Iterator[Proxy]:
    """The proxy before a cluster of one node, which says that it is where the proxy is."""
    with Proxy(0) as proxy, made(primaries=1, cluster_announce_port=proxy.port) as cluster:
        proxy.target = cluster.primaries[0].port
        yield proxy


def serves(store: ClusterStore, key: str) -> bool:
    try:
        store.get(key)
    except StoreUnreachable:
        return False
    return True


def held_in(
    cluster: Cluster, store: ClusterStore, nodes: Sequence[ClusterNode], name: str
) -> dict[ClusterNode, list[Lease]]:
    """Take three leases on each of these nodes."""
    keys = {node: [f"{{{key}}}:{name}" for key in cluster.keys_of(node, 3)] for node in nodes}
    return {node: [take(store, key) for key in keys[node]] for node in nodes}


QUICK = "socket_timeout=0.5&socket_connect_timeout=0.5"


class TestANodeThatIsDown:
    @pytest.fixture
    def store(self, crippled: Cluster, opened_cluster: OpenCluster) -> ClusterStore:
        return opened_cluster(crippled.url(QUICK))

    @pytest.mark.nightly
    def test_its_keys_are_unreachable_and_the_others_are_served(self, crippled: Cluster, store: ClusterStore) -> None:
        dead, *others = crippled.primaries
        leases = held_in(crippled, store, others, "served")
        began = monotonic()
        for key in crippled.keys_of(dead, 3):
            with pytest.raises(StoreUnreachable):
                take(store, key)
        for lease in (lease for held in leases.values() for lease in held):
            store.settle(lease, DONE, ttl=60)
        assert monotonic() - began < FEW
        with pytest.raises(StoreUnreachable):
            store.ping()
        with pytest.raises(StoreUnreachable):
            list(store.scan())

    def test_the_leases_on_other_nodes_do_not_run_out_for_it(
        self, crippled: Cluster, store: ClusterStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        dead, *others = crippled.primaries
        leases = held_in(crippled, store, others, "beating")
        leases[dead] = [Lease(claim(key), 1) for key in crippled.keys_of(dead, 3)]
        holdings = {
            node: [HeldLease(store, lease, monotonic() - 25) for lease in held] for node, held in leases.items()
        }
        # By `beat` alone: a thread that is asleep looks at a new lease after a third of its ttl, and these are older.
        monkeypatch.setattr("celery_idempotent.core.heartbeat._Server.run", lambda self: None)
        heart = Heartbeat()
        for each in [each for node in crippled.primaries for each in holdings[node]]:
            heart.watch(each)
        before = monotonic()
        heart.beat(before)
        assert all(each.due > before + 15 for node in others for each in holdings[node])
        assert all(each.due < before + 15 and not each.lost for each in holdings[dead])

    def test_a_batch_with_its_leases_is_renewed_as_far_as_it_goes(self, crippled: Cluster, store: ClusterStore) -> None:
        dead, *others = crippled.primaries
        leases = held_in(crippled, store, others, "batch")
        for node in others:
            node.says("PEXPIRE", leases[node][0].key, 1_000_000)
        with pytest.raises(StoreUnreachable):
            store.renew([Lease(claim(crippled.keys_of(dead, 1)[0]), 1), *(leases[node][0] for node in others)])
        for node in others:
            assert node.says("PTTL", leases[node][0].key) > 1_000_000


class TestANodeThatComesBack:
    def test_one_that_hangs_is_unreachable_within_the_timeout(
        self, patient: Cluster, opened_cluster: OpenCluster
    ) -> None:
        store = opened_cluster(patient.url(QUICK))
        leases = held_in(patient, store, patient.primaries, "hung")
        hung, other, _ = patient.primaries
        hung.pause()
        try:
            began = monotonic()
            for _ in range(2):  # the second one looks for the nodes anew
                with pytest.raises(StoreUnreachable):
                    take(store, leases[hung][0].key)
            assert store.renew(leases[other]) == []
            assert monotonic() - began < FEW
        finally:
            hung.resume()
        wait_until(lambda: serves(store, leases[hung][0].key), 60, "the node to be asked again")
        assert store.renew(leases[hung]) == []

    @pytest.mark.nightly
    def test_one_that_was_restarted_is_asked_again(self, patient: Cluster, opened_cluster: OpenCluster) -> None:
        """It has forgotten everything but its slots."""
        store = opened_cluster(patient.url(QUICK))
        node = patient.primaries[1]
        leases = held_in(patient, store, [node], "restarted")[node]
        node.restart()
        patient.wait_until_whole()
        assert store.renew(leases) == []
        assert known(store, leases[0].key).owner == leases[0].owner

    @pytest.mark.nightly
    @pytest.mark.thorough
    def test_a_cluster_that_is_to_be_whole_serves_nobody_and_recovers(
        self, own_cluster: Callable[..., Cluster], opened_cluster: OpenCluster
    ) -> None:
        cluster = own_cluster(cluster_node_timeout=500)
        store = opened_cluster(cluster.url())
        leases = held_in(cluster, store, cluster.primaries, "whole")
        dead, other, _ = cluster.primaries
        dead.kill()
        wait_until(lambda: other.state()["cluster_state"] == "fail", 60, "the cluster to be down")
        with pytest.raises(StoreUnreachable, match=r"(?i)cluster is down"):
            take(store, leases[other][0].key)
        dead.start()
        cluster.wait_until_whole()
        assert store.renew(leases[other]) == []
        assert store.renew(leases[dead]) == []


@pytest.mark.nightly
@pytest.mark.thorough
def test_slots_that_no_node_serves_are_unreachable(
    own_cluster: Callable[..., Cluster], opened_cluster: OpenCluster
) -> None:
    cluster = own_cluster(cluster_require_full_coverage="no")
    store = opened_cluster(cluster.url())
    first, second, _ = cluster.primaries
    [key], [other] = cluster.keys_of(first, 1), cluster.keys_of(second, 1)
    store.ping()
    slot = int(first.says("CLUSTER", "KEYSLOT", key))
    for node in cluster.primaries:
        node.says("CLUSTER", "DELSLOTS", slot)
    with pytest.raises(StoreUnreachable, match=r"(?i)slot"):
        take(store, key)
    with pytest.raises(StoreUnreachable, match=f"no node of the cluster serves slot {slot}"):
        take(store, key)
    lease = take(store, other)
    assert store.shard(key) == ""
    second.says("PEXPIRE", other, 1_000_000)
    with pytest.raises(StoreUnreachable, match=f"no node of the cluster serves slot {slot}"):
        store.renew([Lease(claim(key), 1), lease])
    assert second.says("PTTL", other) > 1_000_000, "a lease on another node runs out for it"

    second.says("CLUSTER", "ADDSLOTS", slot)
    assert take(store, key).fence > 0, "the slot is served again, and the store knows the old table"
    assert store.shard(key) == "{}:{}".format(*second.address)


class TestLostReplies:
    """A cluster of one node, which says that it is where a proxy is."""

    @pytest.fixture
    def between(self, lonely: Proxy) -> Iterator[Proxy]:
        yield lonely
        lonely.heal()

    @pytest.fixture
    def store(self, between: Proxy, opened_cluster: OpenCluster) -> ClusterStore:
        store = opened_cluster(f"redis+cluster://127.0.0.1:{between.port}?socket_timeout=0.5")
        store.ping()
        assert store.shard("key") == f"127.0.0.1:{between.port}"
        empty_cluster(store)
        return store

    def lose(self, between: Proxy, call: Callable[[], Any], *, hang: bool) -> Any:
        """Lose the reply to a call, and return what it answers in the end: by itself, or when it is asked again."""
        before = between.swallowed
        between.swallow_reply(matching=b"EVALSHA", hang=hang)
        try:
            answer = call()
        except StoreUnreachable:
            assert hang
            answer = call()
        assert between.swallowed == before + 1
        return answer

    @pytest.mark.parametrize("hang", [False, True])
    def test_an_acquire_asked_again_gives_the_same_lease(
        self, between: Proxy, store: ClusterStore, *, hang: bool
    ) -> None:
        asked = claim()
        lease = self.lose(between, lambda: store.acquire(asked), hang=hang)
        assert isinstance(lease, Lease)
        assert (known(store).owner, known(store).fence) == (asked.owner, lease.fence)

    @pytest.mark.parametrize("hang", [False, True])
    def test_a_settle_asked_again_is_done(self, between: Proxy, store: ClusterStore, *, hang: bool) -> None:
        lease = take(store)
        self.lose(between, lambda: store.settle(lease, DONE, ttl=60), hang=hang)
        assert known(store).payload == DONE.payload

    @pytest.mark.parametrize("hang", [False, True])
    def test_a_release_asked_again_is_done_once(self, between: Proxy, store: ClusterStore, *, hang: bool) -> None:
        lease = take(store)
        release = Release(Reason.CRASHED)
        assert self.lose(between, lambda: store.release(lease, release), hang=hang) is True
        assert known(store).crashes == 1

    @pytest.mark.parametrize("hang", [False, True])
    def test_a_batch_of_renewals_asked_again_is_done(self, between: Proxy, store: ClusterStore, *, hang: bool) -> None:
        leases = [take(store, f"idem:{number}") for number in range(20)]
        store.renew(leases)
        assert self.lose(between, lambda: store.renew(leases), hang=hang) == []


def test_a_node_that_may_not_be_asked_for_the_slots_refuses(
    shared_cluster: Cluster, cluster_url: str, opened_cluster: OpenCluster
) -> None:
    for node in shared_cluster.primaries:
        node.says("ACL", "SETUSER", "blind", "on", f">{SECRET}", "~*", "+@all", "-cluster")
    store = opened_cluster(cluster_url.replace("://", f"://blind:{SECRET}@"))
    with pytest.raises(StoreRefused, match="rights") as caught:
        take(store)
    assert SECRET not in str(caught.value)


@pytest.mark.nightly
@pytest.mark.thorough
def test_a_replica_that_is_promoted_serves_what_it_has(
    own_cluster: Callable[..., Cluster], opened_cluster: OpenCluster
) -> None:
    """Replicas have what they confirmed, so that leases and outcomes outlive their primary."""
    cluster = own_cluster(replicas=1)
    store = opened_cluster(cluster.url("wait_replicas=0"))
    [primary, *_], [replica] = cluster.primaries, cluster.replicas
    held, done, free = (take(store, key) for key in cluster.keys_of(primary, 3))
    store.settle(done, DONE, ttl=600)
    assert store.release(free, Release(Reason.FAILED))
    assert primary.says("WAIT", 1, 5000) == 1
    primary.kill()
    slowest = 0.0

    def back() -> bool:
        nonlocal slowest
        began = monotonic()
        served = serves(store, held.key)
        slowest = max(slowest, monotonic() - began)
        return served

    wait_until(back, 60, "the replica to be promoted")
    assert slowest < FEW
    assert store.renew([held]) == []
    assert known(store, done.key).payload == DONE.payload
    assert take(store, free.key).fence > free.fence
    store.settle(held, DONE, ttl=600)
    assert known(store, held.key).state is State.COMPLETED
    assert store.shard(held.key) == f"127.0.0.1:{replica.port}"

    primary.start()  # it comes back as a replica of its own replica
    wait_until(lambda: b"slave" in info(primary), 60, "the old primary to follow")
    assert known(store, done.key).payload == DONE.payload


def info(node: ClusterNode) -> bytes:
    with node.client() as client:
        return f"{client.info('replication')['role']}".encode()


def promote(replica: ClusterNode) -> None:
    """Order a failover, again where the nodes did not agree on it within the five seconds that one lasts."""
    end = monotonic() + 60
    while b"master" not in info(replica):
        assert monotonic() < end, f"the replica was not promoted:\n{replica.logs()}"
        replica.says("CLUSTER", "FAILOVER")
        with suppress(WaitTimeout):
            wait_until(lambda: b"master" in info(replica), 7)


@pytest.mark.nightly
@pytest.mark.thorough
def test_a_failover_by_hand_costs_no_call(own_cluster: Callable[..., Cluster], opened_cluster: OpenCluster) -> None:
    """The old primary lives on as a replica, and says who has its slots now."""
    cluster = own_cluster(replicas=1)
    store = opened_cluster(cluster.url())
    [primary, *_], [replica] = cluster.primaries, cluster.replicas
    leases = [take(store, key) for key in cluster.keys_of(primary, 20)]
    promote(replica)
    wait_until(lambda: b"slave" in info(primary), 60, "the primary to follow")
    failures: list[StoreError] = []
    for lease in leases[:10]:
        try:
            store.settle(lease, DONE, ttl=60)
        except StoreError as error:
            failures.append(error)
    assert failures == []
    assert store.renew(leases[10:]) == []
    assert store.shard(leases[0].key) == f"127.0.0.1:{replica.port}"
