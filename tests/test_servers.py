"""The servers and the proxy that other tests stand on."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import redis

from tests.support import processes
from tests.support.proxy import Proxy
from tests.support.servers import Databases, ExternalRedis, RedisServer, ServerMissing, open_client, redis_binary
from tests.support.waiting import wait_until

OwnRedis = Callable[..., RedisServer]
Proxied = Callable[[int], Proxy]


def test_each_test_has_an_empty_database_of_its_own(fresh_redis: Callable[[], str]) -> None:
    first, second = fresh_redis(), fresh_redis()
    with open_client(first) as one, open_client(second) as other:
        one.set("key", "value")
        assert (one.dbsize(), other.dbsize()) == (1, 0)


def test_a_stopped_server_leaves_no_process(own_redis: OwnRedis) -> None:
    server = own_redis()
    pid = server.pid
    server.stop()
    server.stop()
    assert processes.members(pid) == []
    assert not server.running


def test_a_restarted_server_keeps_its_port_and_what_it_persists(own_redis: OwnRedis) -> None:
    server = own_redis(appendonly="yes")
    port, pid = server.port, server.pid
    with server.client() as client:
        client.set("key", "value")
    server.restart()
    assert server.port == port
    assert server.pid != pid
    with server.client(decode_responses=True) as client:
        assert client.get("key") == "value"


def test_a_killed_server_refuses_and_comes_back_on_its_port(own_redis: OwnRedis) -> None:
    server = own_redis()
    port = server.port
    server.kill()
    with server.client() as client, pytest.raises(redis.ConnectionError):
        client.ping()
    server.start()
    with server.client() as client:
        assert client.ping()
    assert server.port == port


def test_a_paused_server_answers_when_it_is_resumed(own_redis: OwnRedis) -> None:
    server = own_redis()
    with server.client(socket_timeout=0.2) as client:
        assert client.ping()
        server.pause()
        with pytest.raises(redis.TimeoutError):
            client.ping()
        server.resume()
        assert client.ping()


def test_options_configure_a_server(own_redis: OwnRedis) -> None:
    server = own_redis(requirepass="s3cret", maxmemory="2mb")
    with server.client() as client:
        assert client.config_get("maxmemory") == {"maxmemory": str(2 * 1024 * 1024)}
    with (
        open_client(f"redis://127.0.0.1:{server.port}/0") as stranger,
        pytest.raises(redis.AuthenticationError),
    ):
        stranger.ping()


def test_a_server_that_cannot_start_shows_its_log() -> None:
    server = RedisServer(no_such_option="1")
    try:
        with pytest.raises(RuntimeError, match="did not start"):
            server.start()
    finally:
        server.stop()


def test_a_server_from_the_environment_lends_only_its_empty_databases(own_redis: OwnRedis) -> None:
    server = own_redis()
    with server.client(0) as client:
        client.set("theirs", "1")
    external = ExternalRedis(server.url(0))
    assert Databases(external).take() == 1
    with server.client(1) as ours:
        ours.set("ours", "1")
        external.stop()
        assert ours.dbsize() == 0
    with server.client(0) as client:
        assert client.dbsize() == 1
    assert external.url(3) == server.url(3)


def test_where_no_server_can_be_found_the_error_says_how_to_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(ServerMissing, match=r"python -m tests\.support\.servers"):
        redis_binary()


def test_a_healthy_proxy_forwards_large_values_both_ways(own_redis: OwnRedis, proxied: Proxied) -> None:
    proxy = proxied(own_redis().port)
    value = b"x" * 3_000_000
    with open_client(proxy.url()) as client:
        client.set("key", value)
        assert client.get("key") == value
        client.connection_pool.disconnect()  # which redis-py 5.0.0 does not do when a client is closed
    wait_until(lambda: proxy.open_links == 0, message="the link to be closed with its client")


def test_a_swallowed_reply_is_one_whose_request_was_served(own_redis: OwnRedis, proxied: Proxied) -> None:
    server = own_redis()
    proxy = proxied(server.port)
    with open_client(proxy.url()) as client, server.client() as direct:
        client.ping()
        proxy.swallow_reply(matching=b"INCR")
        with pytest.raises(redis.ConnectionError):
            client.incr("counter")
        assert direct.get("counter") == b"1"
        assert client.incr("counter") == 2
    assert proxy.swallowed == 1


def test_a_swallowed_reply_can_leave_the_client_waiting(own_redis: OwnRedis, proxied: Proxied) -> None:
    proxy = proxied(own_redis().port)
    with open_client(proxy.url(), socket_timeout=0.2) as client:
        client.ping()
        proxy.swallow_reply(matching=b"INCR", hang=True)
        with pytest.raises(redis.TimeoutError):
            client.incr("counter")
        assert client.incr("counter") == 2


def test_a_partition_holds_requests_back_and_delivers_them_late(own_redis: OwnRedis, proxied: Proxied) -> None:
    server = own_redis()
    proxy = proxied(server.port)
    with open_client(proxy.url(), socket_timeout=0.2) as client, server.client() as direct:
        client.ping()
        proxy.partition()
        with pytest.raises(redis.TimeoutError):
            client.incr("counter")
        assert direct.get("counter") is None
        proxy.heal()
        wait_until(lambda: direct.get("counter") == b"1", message="the late request to arrive")


def test_dropped_bytes_never_arrive(own_redis: OwnRedis, proxied: Proxied) -> None:
    server = own_redis()
    proxy = proxied(server.port)
    with open_client(proxy.url(), socket_timeout=0.2) as client, server.client() as direct:
        client.ping()
        proxy.drop()
        with pytest.raises(redis.TimeoutError):
            client.incr("counter")
        proxy.heal()
        assert client.incr("counter") == 1
        assert direct.get("counter") == b"1"


def test_a_reset_cuts_what_is_open_and_lets_new_connections_in(own_redis: OwnRedis, proxied: Proxied) -> None:
    proxy = proxied(own_redis().port)
    with open_client(proxy.url()) as client, client.pubsub() as held:
        held.subscribe("channel")
        assert held.get_message(timeout=5) is not None
        proxy.reset()
        with pytest.raises(redis.ConnectionError):
            held.connection.read_response()
        assert client.ping()


def test_a_refusing_proxy_looks_like_a_server_that_is_down(own_redis: OwnRedis, proxied: Proxied) -> None:
    proxy = proxied(own_redis().port)
    proxy.refuse()
    with open_client(proxy.url()) as client:
        with pytest.raises(redis.ConnectionError):
            client.ping()
        proxy.heal()
        assert client.ping()


def test_a_delay_slows_replies_beyond_the_clients_patience(own_redis: OwnRedis, proxied: Proxied) -> None:
    proxy = proxied(own_redis().port)
    with open_client(proxy.url(), socket_timeout=0.1) as client:
        client.ping()
        proxy.delay(1)
        with pytest.raises(redis.TimeoutError):
            client.ping()
        proxy.heal()
        assert client.ping()
