"""What is peculiar to a Redis Cluster: where commands go, what they cost, and slots that move while they are used."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import Any

import pytest
import redis
from redis.exceptions import ResponseError

from celery_idempotent.cli.doctor.redis import servers_of
from celery_idempotent.errors import ConfigurationError, RecordUnreadable, StoreError, StoreRefused, StoreUnreachable
from celery_idempotent.stores import Lease, Outcome, Reason, Refusal, Release, State, Verdict, open_store
from celery_idempotent.stores.redis import ClusterStore, RedisStore
from celery_idempotent.stores.redis.connections import Connections
from tests.conftest import missing
from tests.support.cluster import Cluster
from tests.support.forks import served_after_fork
from tests.support.servers import RedisServer, ServerMissing, free_port
from tests.support.stores.benches import DONE, KEY, VERBS, claim, known, take, verb

SECRET = "hunter2"
Start = Callable[..., RedisServer]
OpenCluster = Callable[..., ClusterStore]
#: Counted by a server as well: what scripts call, and what this test does.
NOT_SENT = {
    "time",
    "hgetall",
    "hset",
    "hdel",
    "hget",
    "hmget",
    "pttl",
    "hlen",
    "exists",
    "pexpire",
    "config",
    "info",
    "flushall",
    "hello",
    "client",
}


@pytest.fixture
def store(shared_cluster: Cluster, cluster_url: str, opened_cluster: OpenCluster) -> ClusterStore:
    store = opened_cluster(cluster_url)
    for node in shared_cluster.primaries:  # a connection to each, and the scripts on each
        [key] = shared_cluster.keys_of(node, 1)
        store.settle(take(store, key), DONE, ttl=60)
        assert known(store, key).payload == DONE.payload
        assert store.renew([Lease(claim(key), 1)])
        assert store.delete(key)
    list(store.scan())
    return store


def sent(cluster: Cluster, work: Callable[[], object]) -> Counter[str]:
    """Return how often each command was sent to any node during this work."""
    for node in cluster.primaries:
        node.says("CONFIG", "RESETSTAT")
    work()
    found: Counter[str] = Counter()
    for node in cluster.primaries:
        with node.client() as client:
            for name, row in client.info("commandstats").items():
                found[name.removeprefix("cmdstat_").partition("|")[0]] += row["calls"]
    return Counter({name: calls for name, calls in found.items() if name not in NOT_SENT})


@pytest.fixture
def trips(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many commands went in each round trip, as it is filled."""
    found: list[int] = []
    pipeline = Connections.pipeline

    def counted(self: Connections, commands: Sequence[Sequence[Any]], **options: Any) -> list[Any]:
        found.append(len(commands))
        return pipeline(self, commands, **options)

    monkeypatch.setattr(Connections, "pipeline", counted)
    return found


class TestCosts:
    def test_a_verb_costs_what_it_costs_on_one_node(
        self, shared_cluster: Cluster, store: ClusterStore, own_redis: Start, opened: Callable[..., RedisStore]
    ) -> None:
        server = own_redis()
        single = opened(server.url())
        alone = type("Alone", (), {"primaries": [_Says(server)]})()
        lease = take(store)
        other = take(single)
        for name in ("acquire", "renew", "get", "settle", "mark_dispatched", "release", "delete"):
            for each, held in ((single, other), (store, lease)):
                verb(each, name, held)()  # so that the script is there
            on_many = sent(shared_cluster, verb(store, name, lease))
            assert on_many == sent(alone, verb(single, name, other)), name
            assert on_many.total() == 1 + (name == "delete")  # which forgets the history too, wherever that is

    def test_renewals_travel_together_to_each_node(
        self, shared_cluster: Cluster, store: ClusterStore, trips: list[int]
    ) -> None:
        leases = [take(store, f"idem:{number}") for number in range(300)]
        trips.clear()
        assert sent(shared_cluster, lambda: store.renew(leases)) == {"evalsha": 300}
        assert (len(trips), sum(trips)) == (3, 300)
        trips.clear()
        assert store.renew([]) == []
        assert trips == []

    def test_a_listing_reads_many_records_in_one_round_trip(self, store: ClusterStore, trips: list[int]) -> None:
        keys = {f"idem:{number}" for number in range(300)}
        for key in keys:
            take(store, key)
        trips.clear()
        assert {record.key for record in store.scan()} == keys
        assert len(trips) <= 12  # for each node two pages of names at most, and their records
        trips.clear()
        assert [record.key for record in store.scan(prefix="idem:17", state=State.COMPLETED)] == []
        store.settle(take(store, "idem:a*"), DONE, ttl=60)
        assert [record.key for record in store.scan(prefix="idem:a*")] == ["idem:a*"]

    def test_a_listing_passes_by_what_is_no_record(self, shared_cluster: Cluster, store: ClusterStore) -> None:
        node = shared_cluster.owner("other")
        node.says("HSET", "other", "name", "x")
        take(store)
        assert [record.key for record in store.scan()] == [KEY]
        with pytest.raises(RecordUnreadable):
            store.get("other")

    def test_a_node_that_forgot_the_scripts_gets_them_again(
        self, shared_cluster: Cluster, store: ClusterStore, trips: list[int]
    ) -> None:
        leases = [take(store, f"idem:{number}") for number in range(60)]

        def forget() -> None:
            for node in shared_cluster.primaries:
                node.says("SCRIPT", "FLUSH")
            trips.clear()

        forget()
        assert store.renew(leases) == []
        assert len(trips) == 6  # once in vain, once with the source, to each node
        forget()
        assert len(list(store.scan())) == 60
        forget()
        for lease in leases[:10]:
            store.settle(lease, DONE, ttl=60)
        assert {known(store, lease.key).state for lease in leases[:10]} == {State.COMPLETED}


class _Says:
    """A server on its own, in the words of a node."""

    def __init__(self, server: RedisServer) -> None:
        self.server = server

    def says(self, *command: Any) -> Any:
        with self.client() as client:
            return client.execute_command(*command)

    def client(self) -> Any:
        return self.server.client()


@pytest.fixture(scope="module")
def reshaped() -> Iterator[Cluster]:
    """A cluster whose slots may be moved, each by one test alone."""
    try:
        cluster = Cluster()
    except ServerMissing as error:
        raise missing(error) from None
    with cluster:
        yield cluster


class TestSlotsThatMove:
    """Each test has keys, and with them slots, of its own."""

    @pytest.fixture
    def moving(self, reshaped: Cluster, opened_cluster: OpenCluster) -> ClusterStore:
        store = opened_cluster(reshaped.url())
        for node in reshaped.primaries:
            [key] = reshaped.keys_of(node, 1)
            store.get(key)
            store.acquire(claim(key))  # so that each node has these scripts
        return store

    def other(self, cluster: Cluster, key: str) -> Any:
        return next(node for node in cluster.primaries if node is not cluster.owner(key))

    def test_a_record_that_has_moved_is_found_and_costs_one_detour(
        self, reshaped: Cluster, moving: ClusterStore, trips: list[int]
    ) -> None:
        lease = take(moving, "idem:moved")
        reshaped.move(lease.key, self.other(reshaped, lease.key))
        trips.clear()
        moving.settle(lease, DONE, ttl=60)
        assert len(trips) <= 3  # one in vain, one where it is now, one more to bring the script there
        trips.clear()
        assert known(moving, lease.key).payload == DONE.payload
        again = moving.acquire(claim(lease.key))
        assert isinstance(again, Refusal)
        assert (again.verdict, len(trips)) == (Verdict.COMPLETED, 2)

    def test_leases_that_have_moved_are_renewed(self, reshaped: Cluster, moving: ClusterStore) -> None:
        leases = [take(moving, f"idem:renewed-{number}") for number in range(30)]
        for lease in leases[:3]:
            reshaped.move(lease.key, self.other(reshaped, lease.key))
        stranger = Lease(claim(leases[0].key), 1)
        assert moving.renew([*leases, stranger]) == [stranger]
        assert moving.renew([*leases, stranger]) == [stranger]

    def test_a_record_is_found_while_its_slot_moves(self, reshaped: Cluster, moving: ClusterStore) -> None:
        here, there, new = (f"{{idem:moving}}:{name}" for name in ("here", "there", "new"))
        target = self.other(reshaped, here)
        leases = [take(moving, here), take(moving, there)]
        source, slot = reshaped.begin_move(here, target)
        reshaped.move_key(there, source, target)
        assert moving.renew(leases) == []
        assert take(moving, new).fence > 0  # which is made where the slot goes
        assert {record.key for record in moving.scan(prefix="{idem:moving}")} == {here, there, new}
        assert isinstance(moving.acquire(claim(there)), Refusal)
        assert target.says("CLUSTER", "COUNTKEYSINSLOT", slot) == 2
        assert source.says("CLUSTER", "COUNTKEYSINSLOT", slot) == 1
        assert moving.delete(there)

    def test_the_fence_rises_wherever_the_slot_is(self, reshaped: Cluster, moving: ClusterStore) -> None:
        first = take(moving, "idem:fence")
        assert moving.release(first, Release(Reason.FAILED))
        reshaped.move(first.key, self.other(reshaped, first.key))
        assert take(moving, first.key).fence > first.fence

    def test_a_node_that_sends_us_round_in_circles_is_given_up(
        self, moving: ClusterStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(moving._connections, "send", lambda *_, **__: [ResponseError("MOVED 1 127.0.0.1:1")])
        with pytest.raises(StoreUnreachable, match="none of the 5 nodes"):
            take(moving)


class TestClustersThatRefuse:
    def test_one_server_alone_is_no_cluster(self, own_redis: Start, opened_cluster: OpenCluster) -> None:
        store = opened_cluster(f"redis+cluster://127.0.0.1:{own_redis().port}")
        for name in VERBS:
            with pytest.raises(StoreRefused, match="Name it redis://"):
                verb(store, name)()

    def test_a_node_of_a_cluster_is_no_server_alone(
        self, shared_cluster: Cluster, cluster_url: str, opened: Callable[..., RedisStore]
    ) -> None:
        node = next(node for node in shared_cluster.primaries if node is not shared_cluster.owner(KEY))
        with pytest.raises(StoreRefused, match=r"Name it redis\+cluster://"):
            take(opened(f"redis://127.0.0.1:{node.port}"))

    def test_a_wrong_password_is_refused(self, shared_cluster: Cluster, opened_cluster: OpenCluster) -> None:
        store = opened_cluster(shared_cluster.url().replace("://", f"://nobody:{SECRET}@"))
        for name in VERBS:
            with pytest.raises(StoreRefused, match="Check the password") as caught:
                verb(store, name)()
            assert SECRET not in str(caught.value)

    def test_a_client_of_redis_py_will_do_unless_it_decodes_replies(self, shared_cluster: Cluster) -> None:
        port = shared_cluster.nodes[0].port
        with closing(redis.RedisCluster(host="127.0.0.1", port=port)) as client:
            assert take(RedisStore(client)).fence > 0  # type: ignore[arg-type]
        with (
            closing(redis.RedisCluster(host="127.0.0.1", port=port, decode_responses=True)) as client,
            pytest.raises(ConfigurationError, match="must return bytes; got one made with decode_responses=True"),
        ):
            RedisStore(client)  # type: ignore[arg-type]

    def test_what_a_client_of_redis_py_reaches_is_found_on_every_node(
        self, shared_cluster: Cluster, cluster_url: str
    ) -> None:
        assert isinstance(cluster_url, str)
        with closing(redis.RedisCluster(host="127.0.0.1", port=shared_cluster.nodes[0].port)) as client:
            store = RedisStore(client)  # type: ignore[arg-type]
            keys = {take(store, f"idem:found:{number}").key for number in range(20)}
            assert {record.key for record in store.scan(prefix="idem:found:")} == keys
            assert store.usage(sorted(keys)).keys() == {"memory_bytes", "record_bytes"}
            used = [target.info("memory")["used_memory"] for target in servers_of(store)]
            assert len(used) == len(shared_cluster.primaries)

    def test_too_few_replicas_are_unreachable(self, cluster_url: str, opened_cluster: OpenCluster) -> None:
        store = opened_cluster(f"{cluster_url}?wait_replicas=1")
        with pytest.raises(StoreUnreachable, match="wait_replicas=1 needs 1, and 0 confirmed"):
            take(store)
        assert known(store).state is State.RELEASED
        with pytest.raises(StoreUnreachable, match="wait_replicas=1"):
            store.renew([Lease(claim("other"), 1)])


def test_one_seed_that_is_up_will_do(shared_cluster: Cluster, cluster_url: str, opened_cluster: OpenCluster) -> None:
    up = shared_cluster.primaries[1].port
    for _ in range(2):  # they are not always asked in the same order
        store = opened_cluster(f"redis+cluster://127.0.0.1:{free_port()},127.0.0.1:{up},127.0.0.1:{free_port()}")
        assert take(store, KEY).fence > 0
        assert store.delete(KEY)
    assert isinstance(cluster_url, str)


def test_a_cluster_of_which_no_node_is_up_is_unreachable(opened_cluster: OpenCluster) -> None:
    store = opened_cluster(f"redis+cluster://:{SECRET}@127.0.0.1:{free_port()},127.0.0.1:{free_port()}")
    for name in VERBS:
        with pytest.raises(StoreUnreachable, match="no node lists the slots") as caught:
            verb(store, name)()
        assert SECRET not in str(caught.value)


def test_a_store_that_was_closed_opens_again(store: ClusterStore) -> None:
    lease = take(store)
    store.close()
    assert store.renew([lease]) == []
    store.ping()


def test_a_record_belongs_to_the_part_that_its_node_is(
    shared_cluster: Cluster, cluster_url: str, opened_cluster: OpenCluster
) -> None:
    store = opened_cluster(cluster_url)
    assert store.shard("key") == ""  # nobody was asked yet
    store.ping()
    parts = {node: {store.shard(key) for key in shared_cluster.keys_of(node, 5)} for node in shared_cluster.primaries}
    assert parts == {node: {f"127.0.0.1:{node.port}"} for node in shared_cluster.primaries}


def test_a_child_that_is_forked_while_a_thread_looks_for_the_nodes_reaches_the_store(
    cluster_url: str, opened_cluster: OpenCluster
) -> None:
    store = opened_cluster(cluster_url)
    assert served_after_fork(store, store._connections._looking)


def test_threads_that_find_out_about_the_nodes_at_once_ask_for_them_once(
    shared_cluster: Cluster, cluster_url: str, opened_cluster: OpenCluster
) -> None:
    store = opened_cluster(cluster_url)
    barrier = threading.Barrier(16)
    failures: list[StoreError] = []

    def work(number: int) -> None:
        barrier.wait(30)
        try:
            store.settle(take(store, f"idem:{number}"), Outcome(State.COMPLETED, b"x"), ttl=60)
        except StoreError as error:
            failures.append(error)

    def crowd() -> None:
        threads = [threading.Thread(target=work, args=(number,)) for number in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    found = sent(shared_cluster, crowd)
    assert (failures, found["cluster"]) == ([], 1)


def test_the_urls_scheme_opens_it(cluster_url: str) -> None:
    store = open_store(cluster_url)
    assert type(store) is ClusterStore
    store.close()
