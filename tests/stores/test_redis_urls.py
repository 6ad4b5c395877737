"""What may be written as the URL of a store, and what is said of the rest."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import redis

from celery_idempotent.errors import ConfigurationError
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

    def test_a_client_of_ones_own_will_do(self, redis_url: str) -> None:
        with open_client(redis_url) as client:
            assert take(RedisStore(client)).fence > 0

    @pytest.mark.parametrize("protocol", [2, 3])
    def test_both_protocols_will_do(self, redis_url: str, opened: Callable[..., RedisStore], protocol: int) -> None:
        store = opened(f"{redis_url}?protocol={protocol}")
        lease = take(store)
        assert [store.renew([lease]), [record.key for record in store.scan()]] == [[], [KEY]]
        store.settle(lease, DONE, ttl=60)
        assert known(store).payload == DONE.payload
