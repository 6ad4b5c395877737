"""What may be written as the URL of a store, and what is said of the rest."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.backoff import ExponentialBackoff
from redis.retry import Retry

from celery_idempotent.errors import ConfigurationError, StoreUnreachable
from celery_idempotent.stores import SCHEMES, open_store
from celery_idempotent.stores.redis import RedisStore
from celery_idempotent.stores.redis.store import TIMEOUT
from tests.support.servers import RedisServer, open_client
from tests.support.stores.benches import DONE, KEY, known, take

SECRET = "hunter2"


class TestUrls:
    @pytest.mark.parametrize(
        ("url", "hint"),
        [
            (f"redsi://:{SECRET}@host", "Did you mean redis://?"),
            (f"rediss+tls://u:{SECRET}@host", "Did you mean rediss://?"),
            (f"memcached://u:{SECRET}@host", ", ".join(f"{scheme}://" for scheme in SCHEMES)),
            (f"u:{SECRET}@host:6379", "which has no scheme. Did you mean redis://***@host:6379?"),
            ("localhost", "which has no scheme. Did you mean redis://localhost?"),
            ("", "which has no scheme. Write redis://host:6379/1."),
        ],
    )
    def test_an_unknown_scheme_is_answered_with_those_that_are_known(self, url: str, hint: str) -> None:
        with pytest.raises(ConfigurationError) as caught:
            open_store(url)
        assert hint in str(caught.value)
        assert SECRET not in str(caught.value)

    @pytest.mark.parametrize(
        ("url", "advice"),
        [
            ("redis://host:6379/one", "Write numbers for the port and the database."),
            ("redis://host:port/1", "Write numbers for the port and the database."),
            (f"redis://:{SECRET}/x@host:6379/1", "Write special characters of a password as %2F"),
        ],
    )
    def test_the_advice_is_about_what_the_url_has(self, url: str, advice: str) -> None:
        with pytest.raises(ConfigurationError) as caught:
            open_store(url)
        assert advice in str(caught.value)
        assert ("password as" in str(caught.value)) == ("@" in url)

    @pytest.mark.parametrize(
        "url",
        [
            f"redis://:{SECRET}@host:port/0",
            f"redis://:{SECRET}@host:99999999/0",
            f"redis://u:{SECRET}/x@host:6379/0",
            f"redis://u:x/{SECRET}@host:6379/0",
            f"redis://:{SECRET}@[::1/0",
            f"redis://:{SECRET}@host:6379/0?socket_timeout=soon",
            f"redis://:{SECRET}@host:6379/0?sokcet_timeout=1",
            f"redis://host:6379/0?sokcet_timeout=1&password={SECRET}",
            f"redis://:{SECRET}@host:6379/zero",
        ],
    )
    def test_a_url_that_cannot_be_meant_is_an_error_at_once(self, url: str) -> None:
        with pytest.raises(ConfigurationError, match="redis://") as caught:
            open_store(url)
        error: BaseException | None = caught.value
        while error is not None:  # a log shows the causes too
            assert SECRET not in str(error)
            error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)

    @pytest.mark.parametrize(
        "url",
        [
            "redis://localhost",
            "rediss://localhost:6380/3",
            "unix:///run/redis.sock?db=2",
            "REDIS://localhost/0/",
            "valkey://localhost/1",
            "Valkeys://:p@localhost:6380/3?wait_replicas=1",
        ],
    )
    def test_opening_a_store_connects_nothing(self, url: str) -> None:
        store = open_store(url)
        assert isinstance(store, RedisStore)
        store.close()

    @pytest.mark.parametrize(("scheme", "secure"), [("valkey", False), ("VALKEYS", True)])
    def test_valkey_is_another_name_for_redis(self, scheme: str, *, secure: bool) -> None:
        store = open_store(f"{scheme}://:{SECRET}@host:1/2")
        assert isinstance(store, RedisStore)
        pool = store._client.connection_pool
        assert issubclass(pool.connection_class, redis.SSLConnection) == secure
        assert (pool.connection_kwargs["host"], pool.connection_kwargs["db"]) == ("host", 2)

    def test_the_timeouts_are_short_where_the_url_names_none(self, redis_url: str) -> None:
        store = open_store(redis_url)
        assert isinstance(store, RedisStore)
        options = store._client.connection_pool.connection_kwargs
        assert options["socket_timeout"] == options["socket_connect_timeout"] == TIMEOUT <= 2

    def test_a_unix_socket_serves(self, own_redis: Callable[..., RedisServer], tmp_path: Path) -> None:
        socket = tmp_path / "redis.sock"
        server = own_redis(unixsocket=socket, requirepass=SECRET)
        store = open_store(f"unix://:{SECRET}@{socket}?db=3&wait_replicas=0")
        assert store.renew([take(store)]) == []
        with server.client(3) as client:
            assert client.hget(KEY, "state") == b"in_progress"
        store.close()

    def test_a_client_that_decodes_replies_is_refused(self, redis_url: str) -> None:
        with (
            open_client(redis_url, decode_responses=True) as client,
            pytest.raises(ConfigurationError, match="decode_responses"),
        ):
            RedisStore(client)
        with pytest.raises(ConfigurationError, match="decode_responses"):
            open_store(f"{redis_url}?decode_responses=true")

    @pytest.mark.parametrize(
        ("make", "got"),
        [
            (redis.asyncio.from_url, "redis.asyncio.client.Redis"),
            (redis.ConnectionPool.from_url, "redis.connection.ConnectionPool"),
            (str, "builtins.str"),
            (lambda url: redis.Redis, "redis.client.Redis"),
        ],
        ids=["for coroutines", "a pool", "a URL", "a class"],
    )
    def test_what_is_no_synchronous_client_is_refused_at_once(self, make: Callable[[str], Any], got: str) -> None:
        with pytest.raises(ConfigurationError, match="Expected a synchronous client") as refused:
            RedisStore(make(f"redis://:{SECRET}@localhost/1"))
        assert f"got {got}. " in str(refused.value)
        assert SECRET not in str(refused.value)

    def test_a_client_of_ones_own_will_do(self, redis_url: str) -> None:
        with open_client(redis_url) as client:
            assert take(RedisStore(client)).fence > 0

    @pytest.mark.parametrize("kind", [redis.ConnectionPool, redis.BlockingConnectionPool])
    def test_a_client_keeps_its_connections_for_itself(
        self, own_redis: Callable[..., RedisServer], kind: type[redis.ConnectionPool]
    ) -> None:
        server = own_redis(requirepass=SECRET)
        options: dict[str, Any] = {"timeout": 0} if kind is redis.BlockingConnectionPool else {}
        pool = kind.from_url(server.url(3), max_connections=1, **options)
        with redis.Redis(connection_pool=pool) as client, ThreadPoolExecutor(8) as threads:
            store = RedisStore(client)
            alone = client.client()  # has its one connection
            assert len({lease.fence for lease in threads.map(partial(take, store), map(str, range(100)))}) == 100
            store.close()
            assert alone.hget("7", "state") == b"in_progress"
            alone.close()
        pool.disconnect()

    def test_a_client_over_a_unix_socket_will_do(self, own_redis: Callable[..., RedisServer], tmp_path: Path) -> None:
        server = own_redis(unixsocket=tmp_path / "redis.sock", requirepass=SECRET)
        with redis.Redis(unix_socket_path=str(tmp_path / "redis.sock"), password=SECRET, db=3) as client:
            store = RedisStore(client)
            assert store.renew([take(store)]) == []
            store.close()
        with server.client(3) as client:
            assert client.hget(KEY, "state") == b"in_progress"

    @pytest.mark.parametrize(
        ("given", "used"), [({}, TIMEOUT), ({"socket_timeout": 60}, TIMEOUT), ({"socket_timeout": 0.3}, 0.3)]
    )
    def test_a_client_that_would_wait_and_try_again_for_long_does_not_have_the_store_do_so(
        self, given: dict[str, float], used: float
    ) -> None:
        with closing(socket.create_server(("127.0.0.1", 0))) as silent:
            retry = Retry(ExponentialBackoff(), 3)
            client = redis.Redis(
                port=silent.getsockname()[1], retry=retry, retry_on_error=[redis.TimeoutError], **given
            )
            store, begun = RedisStore(client), time.monotonic()
            with pytest.raises(StoreUnreachable, match="Timeout"):
                store.ping()
            assert used <= time.monotonic() - begun < used + 3  # on a machine that is busy with other things
            store.close()
            client.close()

    def test_a_client_with_connections_of_its_own_kind_is_used_as_it_is(self, redis_url: str) -> None:
        class Traced(redis.Connection):
            """What it needs to connect, nobody else knows."""

        class Fair(redis.ConnectionPool):
            """Nor what a pool is for."""

        for pool in (redis.ConnectionPool.from_url(redis_url, connection_class=Traced), Fair.from_url(redis_url)):
            with redis.Redis(connection_pool=pool) as client:
                store = RedisStore(client)
                assert take(store, type(pool).__name__).fence > 0
                assert store._client is client
            store.close()

    @pytest.mark.parametrize("protocol", [2, 3])
    def test_both_protocols_will_do(self, redis_url: str, opened: Callable[..., RedisStore], protocol: int) -> None:
        store = opened(f"{redis_url}?protocol={protocol}")
        lease = take(store)
        assert [store.renew([lease]), [record.key for record in store.scan()]] == [[], [KEY]]
        store.settle(lease, DONE, ttl=60)
        assert known(store).payload == DONE.payload
