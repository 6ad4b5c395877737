"""What may be written as the URL of a server that sentinels watch, and what is said of the rest."""

from __future__ import annotations

from typing import Any

import pytest

from celery_idempotent.errors import ConfigurationError
from celery_idempotent.stores import open_store
from celery_idempotent.stores.redis import SentinelStore
from celery_idempotent.stores.redis.store import TIMEOUT

SECRET, THEIRS = "hunter2", "correct-horse"


def pool_of(url: str, **options: Any) -> Any:
    """Open a store, which connects nothing, and return redis-py's pool of the server."""
    store = SentinelStore.from_url(url, **options) if options else open_store(url)
    assert isinstance(store, SentinelStore)
    return store._client.connection_pool


def sentinels_of(pool: Any) -> list[dict[str, Any]]:
    return [each.connection_pool.connection_kwargs for each in pool.sentinel_manager.sentinels]


@pytest.mark.parametrize(
    ("url", "hosts", "service", "db"),
    [
        ("redis+sentinel://s/orders", [("s", 26379)], "orders", 0),
        ("redis+sentinel://s:1/orders/", [("s", 1)], "orders", 0),
        ("redis+sentinel://a,b:2,[::1]:3/my%20orders/7", [("a", 26379), ("b", 2), ("::1", 3)], "my orders", 7),
        ("redis+sentinel://u:p@a,b/orders/1?socket_timeout=1", [("a", 26379), ("b", 26379)], "orders", 1),
    ],
)
def test_sentinels_service_and_database_are_read(url: str, hosts: list[tuple[str, int]], service: str, db: int) -> None:
    pool = pool_of(url)
    assert [(each["host"], each["port"]) for each in sentinels_of(pool)] == hosts
    assert (pool.service_name, pool.connection_kwargs["db"]) == (service, db)
    assert {each["db"] for each in sentinels_of(pool)} == {0}  # a sentinel has no databases


def test_the_sentinels_have_credentials_of_their_own() -> None:
    query = f"sentinel_username=watcher&sentinel_password={THEIRS}"
    pool = pool_of(f"redis+sentinel://shop:{SECRET}@a,b/orders?{query}")
    server = pool.connection_kwargs
    assert (server["username"], server["password"]) == ("shop", SECRET)
    assert not [name for name in server if name.startswith("sentinel")]
    assert {(each["username"], each["password"]) for each in sentinels_of(pool)} == {("watcher", THEIRS)}


def test_sentinels_that_are_given_none_are_not_told_those_of_the_server() -> None:
    [sentinel] = sentinels_of(pool_of(f"redis+sentinel://shop:{SECRET}@a/orders"))
    assert (sentinel.get("username"), sentinel.get("password")) == (None, None)


def test_tls_is_for_both() -> None:
    pool = pool_of("rediss+sentinel://a/orders?ssl_ca_certs=/etc/ca.pem")
    [sentinel] = pool.sentinel_manager.sentinels
    for each in (pool, sentinel.connection_pool):
        assert "SSL" in each.connection_class.__name__
        assert each.connection_kwargs["ssl_ca_certs"] == "/etc/ca.pem"
    assert "SSL" not in pool_of("redis+sentinel://a/orders").connection_class.__name__


def test_the_timeouts_are_short_and_nothing_is_tried_again_in_secret() -> None:
    pool = pool_of("redis+sentinel://a,b/orders?socket_timeout=10")
    server = pool.connection_kwargs
    assert (server["socket_timeout"], server["socket_connect_timeout"]) == (10, TIMEOUT)
    for each in (server, *sentinels_of(pool)):
        assert each["retry"]._retries == 0
    assert {each["socket_timeout"] for each in sentinels_of(pool)} == {1.0}


def test_options_may_come_beside_the_url() -> None:
    store = SentinelStore.from_url("redis+sentinel://a/orders", password=SECRET, wait_replicas=2)
    assert store._client.connection_pool.connection_kwargs["password"] == SECRET
    assert store._replicas.wanted == 2


@pytest.mark.parametrize(
    ("url", "why"),
    [
        (f"redis+sentinel://:{SECRET}@/orders", "A host is missing"),
        (f"redis+sentinel://u:{SECRET}@a", "The name of the service is missing"),
        (f"redis+sentinel://u:{SECRET}@a/0", "The name of the service is missing"),
        (f"redis+sentinel://u:{SECRET}@a/orders/zero", "The database is a number"),
        (f"redis+sentinel://u:{SECRET}@a/orders/-1", "The database is a number"),
        (f"redis+sentinel://u:{SECRET}@a/orders/1/2", "The database is a number"),
        (f"redis+sentinel://u:{SECRET}@a:x/orders", "A port is a number"),
        (f"redis+sentinel://u:{SECRET}/x@a/orders", "An @ follows a slash"),
        (f"redis+sentinel://a/orders?sentinel_pasword={SECRET}", "Did you mean sentinel_password?"),
        (f"redis+sentinel://a/orders?usrname=x&sentinel_password={SECRET}", "Did you mean username?"),
        (f"redis+sentinel://a/orders?wait_replicas=x&password={SECRET}", "wait_replicas"),
        (f"redis+sentinal://u:{SECRET}@a/orders", "Did you mean redis+sentinel://?"),
        (f"sentinel://u:{SECRET}@a/orders", "Did you mean redis+sentinel://?"),
    ],
)
def test_a_url_that_cannot_be_meant_is_an_error_at_once(url: str, why: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        open_store(url)
    assert why in str(caught.value)
    error: BaseException | None = caught.value
    while error is not None:
        assert SECRET not in str(error)
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def test_the_passwords_are_in_no_representation() -> None:
    store = open_store(f"redis+sentinel://shop:{SECRET}@a,b/orders/1?sentinel_password={THEIRS}")
    assert isinstance(store, SentinelStore)
    assert store._url == "redis+sentinel://***@a,b/orders/1"
    assert SECRET not in repr(store)
    assert THEIRS not in repr(store)
