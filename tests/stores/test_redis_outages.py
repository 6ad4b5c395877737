"""Redis servers that cannot serve, and those that will not."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from time import monotonic
from typing import NoReturn

import pytest
import redis

from celery_idempotent import idempotent
from celery_idempotent.errors import ResultUnavailable, StoreError, StoreRefused, StoreUnreachable
from celery_idempotent.stores import HistoryEntry, Lease, Reason, Refusal, Release, State
from celery_idempotent.stores.redis import RedisStore
from celery_idempotent.stores.redis import store as redis_module
from celery_idempotent.stores.redis.connections import translate_error
from tests.support import servers
from tests.support.proxy import Proxy
from tests.support.servers import RedisServer
from tests.support.stores.benches import DONE, KEY, NOBODYS, VERBS, age, claim, known, take, verb
from tests.support.waiting import wait_until

SECRET = "hunter2"
Start = Callable[..., RedisServer]
Open = Callable[..., RedisStore]


class TestServersThatCannotServe:
    @pytest.mark.parametrize("name", VERBS)
    def test_a_server_that_is_down_is_unreachable(self, opened: Open, name: str) -> None:
        store = opened(f"redis://:{SECRET}@127.0.0.1:{servers.free_port()}/0")
        with pytest.raises(StoreUnreachable, match=r"Check that it runs") as caught:
            verb(store, name)()
        assert SECRET not in str(caught.value)

    def test_a_host_that_does_not_exist_is_unreachable(self, opened: Open) -> None:
        with pytest.raises(StoreUnreachable):
            opened("redis://no-such-host.invalid").ping()

    def test_a_name_is_looked_up_once(self, opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
        """A resolver that does not answer takes its own time, often 20 s, and no timeout of a connection ends that."""
        asked: list[object] = []

        def unanswered(host: object, *_: object) -> NoReturn:
            asked.append(host)
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

        monkeypatch.setattr(socket, "getaddrinfo", unanswered)
        with pytest.raises(StoreUnreachable, match="name resolution"):
            opened("redis://store.example.com").ping()
        assert asked == ["store.example.com"]

    @pytest.mark.parametrize("connected", [True, False])
    def test_a_server_that_hangs_is_unreachable_within_the_timeout(
        self, own_redis: Start, opened: Open, *, connected: bool
    ) -> None:
        server = own_redis()
        store = opened(server.url() + "?socket_timeout=0.3&socket_connect_timeout=0.3")
        if connected:
            store.ping()
        server.pause()
        for name in ("acquire", "renew"):
            began = monotonic()
            with pytest.raises(StoreUnreachable):
                verb(store, name)()
            assert monotonic() - began < 1.5
        server.resume()
        wait_until(lambda: answers(store), message="the server to answer again")
        assert take(store).fence > 0

    def test_a_server_that_was_restarted_meanwhile_is_no_error(self, own_redis: Start, opened: Open) -> None:
        """Every pooled connection is stale then, and the server has forgotten the scripts."""
        server = own_redis()
        store = opened(server.url())
        pooled = [store._client.client() for _ in range(5)]
        for client in pooled:
            client.ping()
            client.close()  # goes back to the pool, open
        server.restart()
        assert take(store).fence > 0
        server.restart()
        assert store.release(NOBODYS, Release(Reason.FAILED))
        server.restart()
        assert store.get(KEY) is None

    def test_a_server_that_forgot_the_scripts_gets_them_again(self, redis_store: RedisStore) -> None:
        lease = take(redis_store)
        for name in ("renew", "mark_dispatched", "get", "settle"):
            redis_store._client.script_flush()
            verb(redis_store, name, lease)()
        redis_store._client.script_flush()
        assert isinstance(redis_store.acquire(claim()), Refusal)
        lease = take(redis_store, "other")
        redis_store._client.script_flush()
        assert redis_store.release(lease, Release(Reason.FAILED))

    def test_a_full_server_grants_nothing_and_lets_holders_end(self, own_redis: Start, opened: Open) -> None:
        server = own_redis(maxmemory_policy="noeviction")
        store = opened(server.url())
        settling, releasing, renewing, stopping = (take(store, key) for key in ("s", "f", "r", "h"))
        with server.client() as client:
            age(store, "r", 50)
            client.config_set("maxmemory", 1)
        with pytest.raises(StoreUnreachable, match="memory"):
            take(store, "new")
        gone = Lease(claim("gone"), 1)
        assert store.renew([gone, renewing]) == [gone]  # it cannot be restored, and keeps no other from being renewed
        assert known(store, "r").remaining > 55
        assert store.release(releasing, Release(Reason.RETRY, retry_in=5, next_attempt=1))
        store.settle(settling, DONE, ttl=60)
        assert store.mark_dispatched("s", "a")
        assert (known(store, "s").payload, known(store, "s").dispatched) == (DONE.payload, {"a"})
        assert store.mark_shutdown(stopping)
        assert known(store, "h").reason == Reason.SHUTDOWN

    def test_a_replica_is_unreachable_for_those_who_write(self, own_redis: Start, opened: Open) -> None:
        main, replica = own_redis(repl_diskless_sync_delay=0), own_redis()
        held = take(opened(main.url()))
        with replica.client() as client:
            client.replicaof("127.0.0.1", main.port)
            wait_until(
                lambda: client.info("replication")["master_link_status"] == "up", message="the replica to follow"
            )
        store = opened(replica.url())
        with pytest.raises(StoreUnreachable, match=r"(?i)read only replica"):
            store.acquire(claim("other"))
        for lease in (held, Lease(claim("unknown"), 1)):
            with pytest.raises(StoreUnreachable, match=r"(?i)read only replica"):
                store.renew([lease])  # not lost: another server may know better
        assert known(store).state is State.IN_PROGRESS

    @pytest.mark.parametrize(
        ("wait_replicas", "call"),
        [
            (0, lambda store: store.acquire(claim())),
            (1, lambda store: store.acquire(claim())),
            (1, lambda store: store.renew([NOBODYS])),
            (0, lambda store: store.append_history([HistoryEntry(KEY, "begun", 0, 60)])),
        ],
        ids=["acquire", "acquire and wait", "renew and wait", "append_history"],
    )
    def test_a_connection_to_a_server_that_became_a_replica_is_closed(
        self, own_redis: Start, opened: Open, wait_replicas: int, call: Callable[[RedisStore], object]
    ) -> None:
        """After a planned failover the same name may lead to another server."""
        server = own_redis()
        store = opened(f"{server.url()}?wait_replicas={wait_replicas}")
        store.ping()
        with server.client() as client:
            before = client.info("clients")["connected_clients"]
            client.replicaof("127.0.0.1", 1)
            with pytest.raises(StoreUnreachable, match=r"(?i)read only replica"):
                call(store)
            wait_until(
                lambda: client.info("clients")["connected_clients"] == before - 1, message="the connection to be closed"
            )

    def test_no_call_fails_where_the_name_leads_to_the_new_primary_once_the_old_one_is_a_replica(
        self, own_redis: Start, opened: Open
    ) -> None:
        """As where a service of a cloud fails over: connections to the old one stay open."""
        old, new = own_redis(), own_redis()
        with Proxy(old.port) as name:
            store = opened(name.url())
            name.delay(0.1)
            with ThreadPoolExecutor(3) as threads:
                wait_until(lambda: [*threads.map(store.get, "abc")] and name.open_links > 1, message="connections")
            name.delay(0.0)
            name.target = new.port
            with old.client() as client:
                client.replicaof("127.0.0.1", new.port)
            assert isinstance(store.acquire(claim()), Lease)
            with ThreadPoolExecutor(3) as threads:
                answers = [*threads.map(store.acquire, map(claim, "abc"))]
            assert [type(answer) for answer in answers] == [Lease] * 3
            store.close()

    def test_a_result_that_the_server_does_not_take_does_not_have_its_effect_repeated(
        self, own_redis: Start, opened: Open
    ) -> None:
        store, ran = opened(own_redis(proto_max_bulk_len="1mb").url()), []

        @idempotent(
            store=store, key="day", name="shop.export", result_max_bytes="16MiB", compression="none", lease_ttl=4
        )
        def export(day: str) -> str:
            ran.append(day)
            return "x" * 2_000_000

        assert len(export("monday")) == 2_000_000
        with pytest.raises(ResultUnavailable, match="the store did not take 2000007 bytes"):
            export("monday")
        assert ran == ["monday"]

    def test_a_server_without_its_replicas_is_unreachable(self, own_redis: Start, opened: Open) -> None:
        store = opened(own_redis(min_replicas_to_write=1).url())
        with pytest.raises(StoreUnreachable, match=r"(?i)replicas"):
            take(store)

    def test_a_server_that_loads_its_data_is_unreachable(self, own_redis: Start, opened: Open) -> None:
        server = own_redis(key_load_delay=100_000, rdbcompression="no")  # microseconds for each key
        with server.client() as client:
            for number in range(40):
                client.set(f"k{number}", b"x" * 1024 * 1024)  # it answers after each 2 MB that it has read
            client.save()
        server.restart()
        store = opened(server.url())
        with server.client() as client:
            assert client.info("persistence")["loading"] == 1
        began = monotonic()
        with pytest.raises(StoreUnreachable, match=r"(?i)loading"):
            take(store)
        assert monotonic() - began < redis_module.TIMEOUT
        server.kill()

    def test_a_server_busy_with_a_script_is_unreachable(self, own_redis: Start, opened: Open) -> None:
        server = own_redis(lua_time_limit=10)
        store = opened(server.url())
        store.ping()

        def loop() -> None:
            with server.client(socket_timeout=60) as client, pytest.raises(redis.ResponseError, match="killed"):
                client.eval("while true do end", 0)

        busy = threading.Thread(target=loop)
        busy.start()
        with server.client() as client:
            wait_until(lambda: says_busy(client), message="the server to say that it is busy")
            try:
                with pytest.raises(StoreUnreachable, match=r"(?i)busy"):
                    take(store)
            finally:
                client.script_kill()
        busy.join()
        assert take(store).fence > 0


class TestServersThatRefuse:
    @pytest.mark.parametrize("user", ["", "default", "nobody"])
    def test_a_wrong_password_is_refused(self, own_redis: Start, opened: Open, user: str) -> None:
        server = own_redis(requirepass="right")
        store = opened(f"redis://{user}:{SECRET}@127.0.0.1:{server.port}")
        for name in VERBS:
            with pytest.raises(StoreRefused, match="Check the password") as caught:
                verb(store, name)()
            assert SECRET not in str(caught.value)

    @pytest.mark.parametrize("reply", ["NOPROTO unsupported protocol version", "unknown command 'HELLO'"])
    def test_a_proxy_without_resp3_says_what_to_add_to_the_url(self, reply: str) -> None:
        """As Envoy replies, and a server whose HELLO is renamed."""
        error = translate_error(redis.ResponseError(reply), (), "redis://proxy")
        assert isinstance(error, StoreRefused)
        assert "Add protocol=2" in str(error)

    def test_a_server_without_scripts_is_refused_and_says_what_it_lacks(self, own_redis: Start, opened: Open) -> None:
        server = own_redis(rename_command='EVALSHA ""')
        with pytest.raises(StoreRefused, match=r"lacks a command .*(?i:evalsha).* Lua scripts"):
            take(opened(server.url()))

    def test_a_missing_password_is_refused(self, own_redis: Start, opened: Open) -> None:
        server = own_redis(requirepass="right")
        with pytest.raises(StoreRefused, match="Check the password"):
            take(opened(f"redis://127.0.0.1:{server.port}"))

    def test_a_password_that_is_not_needed_is_refused(self, own_redis: Start, opened: Open) -> None:
        server = own_redis()
        with pytest.raises(StoreRefused) as caught:
            take(opened(f"redis://somebody:{SECRET}@127.0.0.1:{server.port}"))
        assert SECRET not in str(caught.value)

    @pytest.mark.parametrize(
        "rights",
        [
            "~idem:* +@all -@scripting",
            "~idem:* +@all -hset",
            "~idem:* +@all -hlen",
            "~idem:* +@all -pexpire",
            "~other:* +@all",
            "~idem:* -@all",
        ],
    )
    def test_missing_rights_are_refused(self, own_redis: Start, opened: Open, rights: str) -> None:
        server = own_redis()
        with server.client() as client:
            client.execute_command("ACL", "SETUSER", "shop", "on", f">{SECRET}", *rights.split())
        store = opened(f"redis://shop:{SECRET}@127.0.0.1:{server.port}")
        with pytest.raises(StoreRefused, match="rights") as caught:
            take(store)
        assert SECRET not in str(caught.value)
        with server.client() as client:
            assert client.hget(KEY, "state") is None or "pexpire" in rights

    @pytest.mark.parametrize("number", ["9999", "-1"])
    def test_a_database_that_does_not_exist_is_refused(self, own_redis: Start, opened: Open, number: str) -> None:
        store = opened(f"redis://127.0.0.1:{own_redis().port}/{number}")
        for _ in range(2):
            with pytest.raises(StoreRefused, match="database"):
                take(store)


def answers(store: RedisStore) -> bool:
    try:
        store.ping()
    except StoreError:
        return False
    return True


def says_busy(client: redis.Redis) -> bool:
    try:
        client.ping()
    except redis.ResponseError as error:
        return "BUSY" in str(error)
    except redis.RedisError:
        return False
    return False


class Interrupted(Exception):
    """What a soft time limit raises, wherever the process happens to be."""


def test_a_reply_that_comes_after_an_interruption_answers_no_later_command(
    redis_server: RedisServer, redis_url: str, proxied: Callable[[int], Proxy]
) -> None:
    """The connection is used again: what is left in it would be taken for the next answer."""
    proxy = proxied(redis_server.port)
    store = RedisStore.from_url(proxy.url(int(redis_url.rpartition("/")[2])))
    lease = take(store)
    proxy.delay(0.5)

    def interrupt(*_: object) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGUSR1, interrupt)
    timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR1))
    try:
        timer.start()
        with pytest.raises(Interrupted):
            store.get(KEY)
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, before)
    proxy.heal()
    assert store.get("another") is None
    assert store.renew([lease]) == []
    assert known(store).owner == lease.owner
