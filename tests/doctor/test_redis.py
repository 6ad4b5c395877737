"""What doctor says of a Redis, on real servers: once as it should not be, and once as it should."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import redis

from celery_idempotent.cli.doctor import any_store
from celery_idempotent.cli.doctor import redis as checks
from celery_idempotent.cli.doctor.findings import CheckSkipped, Severity
from celery_idempotent.cli.doctor.redis import servers_of
from celery_idempotent.errors import StoreUnreachable
from celery_idempotent.stores.redis import RedisStore, store
from tests.conftest import missing
from tests.stores.test_redis import BINARIES
from tests.support.cluster import Cluster
from tests.support.doctor.wards import found_of, severities
from tests.support.sentinel import NAME, Watch
from tests.support.servers import RedisServer, ServerMissing
from tests.support.stores.rights import FOR_A_CLUSTER, FOR_A_DATABASE, RIGHTS
from tests.support.waiting import wait_until

Start = Callable[..., RedisServer]
#: As the guide on production has it.
GOOD = {"appendonly": "yes", "appendfsync": "everysec", "maxmemory-policy": "noeviction", "maxmemory": "200mb"}


@pytest.fixture
def server(own_redis: Start) -> RedisServer:
    return own_redis(**GOOD)


def says(server: RedisServer, *command: Any) -> Any:
    with server.client() as client:
        return client.execute_command(*command)


@pytest.mark.parametrize("binary", BINARIES.values(), ids=BINARIES)
def test_a_server_as_the_checklist_has_it_is_well(own_redis: Start, binary: str) -> None:
    found = found_of(own_redis(binary=binary, **GOOD).url(1))
    assert severities(found) == {}
    assert found.keys() >= {"evicts-keys", "not-persistent", "claims-refused", "slow-store"}


def test_nothing_is_left_behind(server: RedisServer) -> None:
    found_of(server.url())
    assert says(server, "DBSIZE") == 0


@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-ttl"])
def test_a_server_that_evicts_is_an_error(server: RedisServer, policy: str) -> None:
    says(server, "CONFIG", "SET", "maxmemory-policy", policy)
    assert severities(found_of(server.url())) == {"evicts-keys": "error"}
    says(server, "CONFIG", "SET", "maxmemory", "0")
    assert severities(found_of(server.url())) == {"evicts-keys": "info"}


def test_a_server_that_has_evicted_says_how_much(server: RedisServer) -> None:
    says(server, "CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    says(server, "CONFIG", "SET", "maxmemory", "3mb")
    with server.client() as client:
        for number in range(200):
            client.set(f"key-{number}", "x" * 50_000)
    found = found_of(server.url())
    assert "has evicted" in found["evicts-keys"].found
    assert "evicts keys" in found["memory-full"].found  # it refuses no claim


@pytest.mark.parametrize(("part", "severity"), [(0.85, "warning"), (0.97, "error")])
def test_memory_that_runs_out_is_said_before_it_has(server: RedisServer, part: float, severity: str) -> None:
    with server.client() as client:
        for number in range(200):
            client.set(f"other-{number}", "x" * 100_000)
    with server.client() as client:
        # What the writer's connection took is given back some time after it has gone, and what waits for a slow disk.
        wait_until(lambda: client.info("clients")["connected_clients"] == 1)
        wait_until(lambda: not client.info("persistence")["aof_buffer_length"])
        client.config_set("maxmemory", int(client.info("memory")["used_memory"] / part))
    found = found_of(server.url())
    assert severities(found) == {"memory-full": severity}
    assert "refuses claims" in found["memory-full"].found


def test_what_a_slow_replica_has_yet_to_read_fills_no_memory(server: RedisServer) -> None:
    with server.client() as client, socket.create_connection(("127.0.0.1", server.port)) as replica:
        replica.sendall(b"SYNC\r\n")
        wait_until(lambda: client.info("replication")["connected_slaves"] == 1)
        for number in range(200):
            client.set(f"other-{number}", "x" * 100_000)
        wait_until(lambda: not client.info("persistence")["aof_buffer_length"])
        client.config_set("maxmemory", int(client.info("memory")["used_memory"] / 0.97))
        assert "memory-full" not in severities(found_of(server.url()))


def test_memory_without_a_limit_is_compared_with_the_machines(server: RedisServer) -> None:
    says(server, "CONFIG", "SET", "maxmemory", "0")
    assert "the machine's memory" in found_of(server.url())["memory-full"].found


def test_what_a_restart_forgets_is_said(own_redis: Start) -> None:
    nothing = own_redis(maxmemory_policy="noeviction")
    assert severities(found_of(nothing.url())) == {"not-persistent": "warning"}
    says(nothing, "CONFIG", "SET", "save", "900 1")
    found = found_of(nothing.url())
    assert severities(found) == {"not-persistent": "info"}
    assert "save 900 1" in found["not-persistent"].found


def test_an_append_only_file_that_nobody_flushes_is_said(server: RedisServer) -> None:
    says(server, "CONFIG", "SET", "appendfsync", "no")
    assert severities(found_of(server.url())) == {"not-persistent": "info"}


def test_a_disk_that_takes_nothing_is_an_error(server: RedisServer) -> None:
    assert server._directory is not None
    shutil.rmtree(server._directory.name)
    says(server, "BGSAVE")
    with server.client() as client:
        wait_until(lambda: client.info("persistence")["rdb_last_bgsave_status"] == "err", 20, "the snapshot to fail")
    found = found_of(server.url())
    assert found["persistence-failing"].severity is Severity.ERROR


def test_a_disk_that_takes_nothing_is_said_by_a_server_that_refuses_everything_for_it(server: RedisServer) -> None:
    assert server._directory is not None
    shutil.rmtree(server._directory.name)
    says(server, "CONFIG", "SET", "save", "3600 1")
    says(server, "BGSAVE")
    with server.client() as client:
        wait_until(lambda: client.info("persistence")["rdb_last_bgsave_status"] == "err", 20, "the snapshot to fail")
    found = found_of(server.url())
    assert found["persistence-failing"].severity is Severity.ERROR
    assert "MISCONF" in found["store-unreachable"].found


#: What a store waits for a server that a busy machine holds up, as one whose replica writes what it has just received.
LONG = "socket_timeout=30"


class TestReplicas:
    @pytest.fixture(autouse=True)
    def patient(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(store, "PATIENCE", 15)

    @pytest.fixture
    def replica(self, server: RedisServer, own_redis: Start) -> RedisServer:
        says(server, "CONFIG", "SET", "repl-diskless-sync", "yes")
        says(server, "CONFIG", "SET", "repl-diskless-sync-delay", "0")
        replica = own_redis(replicaof=f"127.0.0.1 {server.port}", **GOOD)
        wait_until(lambda: says(server, "WAIT", 1, 100) == 1, 20, "the replica to follow")
        return replica

    def test_claims_that_no_replica_confirms_are_a_warning(self, server: RedisServer, replica: RedisServer) -> None:
        found = found_of(server.url())
        assert severities(found) == {"replicas-not-awaited": "warning"}
        assert "wait_replicas=1" in found["replicas-not-awaited"].remedy

    def test_a_replica_that_cannot_be_spared_is_told(self, server: RedisServer, replica: RedisServer) -> None:
        assert severities(found_of(f"{server.url()}?wait_replicas=1&{LONG}")) == {"replicas-too-few": "info"}

    def test_fewer_replicas_than_must_confirm_stop_every_task(
        self, server: RedisServer, replica: RedisServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(store, "PATIENCE", 0.2)
        found = severities(found_of(f"{server.url()}?wait_replicas=2"))
        assert found == {"replicas-too-few": "error", "store-unreachable": "error"}

    def test_a_replica_to_spare_is_well(self, server: RedisServer, replica: RedisServer, own_redis: Start) -> None:
        own_redis(replicaof=f"127.0.0.1 {server.port}")
        wait_until(lambda: says(server, "WAIT", 2, 100) == 2, 20, "the second replica to follow")
        found = found_of(f"{server.url()}?wait_replicas=1&{LONG}")
        assert severities(found) == {}
        assert "2 replicas, of which 1 must confirm" in found["replicas-too-few"].found

    def test_a_replica_is_no_store(self, server: RedisServer, replica: RedisServer) -> None:
        found = found_of(replica.url())
        assert found["store-is-replica"].severity is Severity.ERROR
        assert found_of(server.url())["store-is-replica"].severity is Severity.OK


def test_connections_that_run_out_are_a_warning(server: RedisServer) -> None:
    says(server, "CONFIG", "SET", "maxclients", "20")
    with ExitStack() as crowd:
        for _ in range(17):
            crowd.enter_context(server.client()).ping()
        assert severities(found_of(server.url())) == {"connections-full": "warning"}
    wait_until(lambda: severities(found_of(server.url())) == {}, 10, "the connections to be closed")


def test_a_server_that_is_too_old_is_a_warning(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "OLDEST", (99, 0))
    assert severities(found_of(server.url())) == {"server-old": "warning"}


def test_a_slow_round_trip_is_a_warning(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(any_store, "SLOW", 0.0)
    assert severities(found_of(server.url())) == {"slow-store": "warning"}


def test_a_server_that_is_down_is_one_finding(server: RedisServer) -> None:
    url = server.url()
    server.stop()
    found = found_of(url.replace("redis://", "redis://:hunter2@"))
    assert severities(found) == {"store-unreachable": "error"}
    assert "hunter2" not in str(found)


def test_a_wrong_password_is_one_finding(own_redis: Start) -> None:
    server = own_redis(requirepass="right")
    found = found_of(server.url().replace("right", "hunter2"))
    assert severities(found) == {"store-refused": "error"}
    assert "hunter2" not in str(found)


class TestRights:
    @pytest.fixture
    def url(self, server: RedisServer) -> str:
        self.grant(server, f"{RIGHTS} {FOR_A_DATABASE}")
        return f"redis://shop:hunter2@127.0.0.1:{server.port}/1"

    def grant(self, server: RedisServer, rights: str) -> None:
        says(server, "ACL", "SETUSER", "shop", "reset", "on", ">hunter2", *rights.split())

    def test_what_may_not_be_asked_is_one_note(self, url: str) -> None:
        found = found_of(url)
        assert severities(found) == {"not-checked": "info"}
        assert "evicts-keys" in found["not-checked"].found
        assert "+info" in found["not-checked"].remedy

    def test_what_the_note_says_lets_it_ask(self, server: RedisServer, url: str) -> None:
        self.grant(server, f"{RIGHTS} {FOR_A_DATABASE} +info +config|get")
        assert severities(found_of(url)) == {}

    def test_a_server_that_hides_its_settings_is_asked_what_it_answers(self, server: RedisServer, url: str) -> None:
        self.grant(server, f"{RIGHTS} {FOR_A_DATABASE} +info")
        found = found_of(url)
        assert severities(found) == {"not-checked": "info"}
        assert found["evicts-keys"].severity is Severity.OK
        assert "not-persistent" in found["not-checked"].found

    @pytest.mark.parametrize("verb", ["hset", "hincrby", "evalsha", "del", "pexpire"])
    def test_a_right_that_the_verbs_need_is_named(self, server: RedisServer, url: str, verb: str) -> None:
        found_of(url)  # so that the scripts are known to the server
        says(server, "ACL", "SETUSER", "shop", f"-{verb}")
        found = found_of(url)["claims-refused"]
        assert found.severity is Severity.ERROR
        assert "hunter2" not in found.found

    def test_a_namespace_that_the_user_may_not_write_is_refused(self, url: str) -> None:
        assert found_of(url, namespace="site")["claims-refused"].severity is Severity.ERROR


def test_a_server_that_sentinels_name_is_examined(server: RedisServer) -> None:
    with Watch({NAME: server.port}) as watch:
        assert severities(found_of(f"redis+sentinel://127.0.0.1:{watch.port}/{NAME}")) == {}
        says(server, "CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
        assert severities(found_of(f"redis+sentinel://127.0.0.1:{watch.port}/{NAME}")) == {"evicts-keys": "error"}


@pytest.fixture
def own_cluster() -> Iterator[Cluster]:
    try:
        cluster = Cluster(**GOOD)
    except ServerMissing as error:
        raise missing(error) from None
    with cluster:
        yield cluster


@pytest.mark.nightly
def test_a_cluster_is_examined_node_by_node(own_cluster: Cluster) -> None:
    found = found_of(own_cluster.url())
    assert severities(found) == {}
    assert "on each of 3 nodes" in found["claims-refused"].found
    node = own_cluster.primaries[1]
    node.says("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    found = found_of(own_cluster.url())
    assert severities(found) == {"evicts-keys": "error"}
    assert found["evicts-keys"].found.startswith(f"Node 127.0.0.1:{node.port}: ")
    own_cluster.primaries[2].says("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    assert "and like it 1 more" in found_of(own_cluster.url())["evicts-keys"].found
    for each in own_cluster.primaries:
        each.says("CONFIG", "SET", "maxmemory-policy", "noeviction")
        each.says("CLUSTER", "DELSLOTS", 0)
    assert found_of(own_cluster.url())["cluster-broken"].severity is Severity.ERROR


def test_a_cluster_that_is_named_as_one_server_is_said() -> None:
    with Cluster(primaries=1, **GOOD) as cluster:
        assert severities(found_of(cluster.primaries[0].url())) == {"cluster-as-server": "info"}
        assert severities(found_of(cluster.url())) == {}


def test_one_server_is_no_broken_cluster(server: RedisServer) -> None:
    assert "cluster-broken" not in found_of(server.url())


def test_a_user_of_a_cluster_may_be_kept_from_asking(shared_cluster: Cluster, cluster_url: str) -> None:
    for node in shared_cluster.primaries:
        node.says("ACL", "SETUSER", "doc", "reset", "on", ">hunter2", *f"{RIGHTS} {FOR_A_CLUSTER}".split())
    found = found_of(cluster_url.replace("://", "://doc:hunter2@"))
    for node in shared_cluster.primaries:
        node.says("ACL", "DELUSER", "doc")
    assert severities(found) == {"not-checked": "info"}


def test_the_newer_protocol_is_understood(server: RedisServer) -> None:
    assert severities(found_of(f"{server.url()}?protocol=3")) == {}


def test_every_check_of_a_server_has_its_say(server: RedisServer) -> None:
    unsaid = {check.code for check in checks.SERVER_CHECKS} - found_of(server.url()).keys()
    assert unsaid == {"cluster-broken", "replicas-too-few"}  # of clusters, and where replicas must confirm


def test_a_server_that_goes_away_between_two_questions_is_no_refusal(own_redis: Start) -> None:
    server = own_redis()
    store = RedisStore.from_url(server.url())
    [asked] = servers_of(store)
    assert asked.call("PING") == b"PONG"
    with pytest.raises(CheckSkipped, match="does not show its no-such-setting"):
        asked.config("no-such-setting")
    server.kill()
    with pytest.raises(StoreUnreachable):
        asked.call("INFO", "server")
    store.close()


def test_a_server_that_is_stopped_is_unreachable(server: RedisServer) -> None:
    server.pause()
    try:
        assert severities(found_of(server.url())) == {"store-unreachable": "error"}
    finally:
        server.resume()


def test_the_errors_of_a_driver_do_not_escape(server: RedisServer) -> None:
    with server.client() as client:
        client.config_set("maxmemory", "1")
    with pytest.raises(redis.OutOfMemoryError):
        says(server, "SET", "a", "b")
    assert severities(found_of(server.url())) == {"memory-full": "error", "store-unreachable": "error"}
