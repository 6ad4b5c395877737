"""What may be written as the URL of a Redis Cluster, and what is said of the rest."""

from __future__ import annotations

from typing import Any

import pytest
import redis

from celery_idempotent.errors import ConfigurationError
from celery_idempotent.stores import open_store
from celery_idempotent.stores.redis import ClusterStore
from celery_idempotent.stores.redis.store import TIMEOUT

SECRET = "hunter2"


def opened(url: str, **options: Any) -> ClusterStore:
    """Open a store, which connects nothing, so that there is nothing to close."""
    store = ClusterStore.from_url(url, **options) if options else open_store(url)
    assert isinstance(store, ClusterStore)
    return store


@pytest.mark.parametrize(
    ("url", "hosts"),
    [
        ("redis+cluster://h", [("h", 6379)]),
        ("redis+cluster://h:7000/", [("h", 7000)]),
        ("REDIS+CLUSTER://a:1,b,c:3", [("a", 1), ("b", 6379), ("c", 3)]),
        ("redis+cluster://u:p@a:1,b:2?socket_timeout=1", [("a", 1), ("b", 2)]),
        (
            "redis+cluster://:p%40%2Fx@10.0.0.1:7000,[::1]:7001,[::2]",
            [("10.0.0.1", 7000), ("::1", 7001), ("::2", 6379)],
        ),
    ],
)
def test_several_nodes_stand_with_commas_between_them(url: str, hosts: list[tuple[str, int]]) -> None:
    assert list(opened(url)._connections._seeds) == hosts


def test_credentials_and_options_are_those_of_every_node() -> None:
    options = opened(f"redis+cluster://shop:{SECRET}%2F@a,b?socket_timeout=0.5&client_name=x")._connections._options
    assert (options["username"], options["password"]) == ("shop", f"{SECRET}/")
    assert (options["socket_timeout"], options["client_name"]) == (0.5, "x")
    assert options["connection_class"] is redis.Connection


def test_tls_is_a_scheme_of_its_own() -> None:
    options = opened("rediss+cluster://a?ssl_ca_certs=/etc/ca.pem")._connections._options
    assert options["connection_class"] is redis.SSLConnection
    assert options["ssl_ca_certs"] == "/etc/ca.pem"


def test_the_timeouts_are_short_where_the_url_names_none() -> None:
    options = opened("redis+cluster://a")._connections._options
    assert options["socket_timeout"] == options["socket_connect_timeout"] == TIMEOUT <= 2


def test_options_may_come_beside_the_url() -> None:
    store = opened("redis+cluster://a?socket_timeout=0.5", socket_timeout=1, password=SECRET, wait_replicas=1)
    assert (store._connections._options["password"], store._connections._options["socket_timeout"]) == (SECRET, 0.5)
    assert store._replicas.wanted == 1
    assert opened("redis+cluster://a?wait_replicas=2")._replicas.wanted == 2


@pytest.mark.parametrize(
    ("url", "why"),
    [
        (f"redis+cluster://:{SECRET}@", "A host is missing"),
        ("redis+cluster://", "A host is missing"),
        ("redis+cluster://a,,b", "A host is missing"),
        (f"redis+cluster://u:{SECRET}@a:port", "A port is a number from 1 to 65535"),
        (f"redis+cluster://u:{SECRET}@a:0", "A port is a number from 1 to 65535"),
        (f"redis+cluster://u:{SECRET}@a:65536", "A port is a number from 1 to 65535"),
        ("redis+cluster://::1", "An IPv6 address stands in brackets"),
        ("redis+cluster://[::1", "An IPv6 address stands in brackets"),
        (f"redis+cluster://u:{SECRET}/x@a:1", "An @ follows a slash"),
        (f"redis+cluster://u:x/{SECRET}@a:1", "An @ follows a slash"),
        (f"redis+cluster://u:{SECRET}@a/1", "A cluster has one database"),
        (f"redis+cluster://u:{SECRET}@a?sokcet_timeout=1", "Did you mean socket_timeout?"),
        (f"redis+cluster://a?zzz=1&password={SECRET}", "got 'zzz'. There are wait_replicas"),
        (f"redis+cluster://u:{SECRET}@a?ssl_ca_certs=x", "got 'ssl_ca_certs'. That is one of rediss+cluster://."),
        (f"redis+cluster://u:{SECRET}@a?socket_timeout=soon", "socket_timeout"),
        (f"redis+cluster://u:{SECRET}@a?protocol=9", "rotocol"),
        (f"redis+cluster://u:{SECRET}@a?decode_responses=true", "no decode_responses"),
        (f"redis+cluster://u:{SECRET}@a?wait_replicas=x", "wait_replicas"),
        (f"redis+clutser://u:{SECRET}@a", "Did you mean redis+cluster://?"),
        (f"redis-cluster://u:{SECRET}@a", "Did you mean redis+cluster://?"),
        (f"cluster://u:{SECRET}@a", "Did you mean redis+cluster://?"),
    ],
)
def test_a_url_that_cannot_be_meant_is_an_error_at_once(url: str, why: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        open_store(url)
    assert why in str(caught.value)
    error: BaseException | None = caught.value
    while error is not None:  # a log shows the causes too
        assert SECRET not in str(error)
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def test_the_password_is_in_no_representation() -> None:
    store = opened(f"redis+cluster://shop:{SECRET}@a,b")
    assert SECRET not in f"{store!r} {store._connections!r} {store._url}"
    assert store._url == "redis+cluster://***@a,b"


@pytest.mark.parametrize("wrong", [-1, "1", True])
def test_what_is_no_number_of_replicas_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigurationError, match="Expected wait_replicas to be a number of replicas"):
        ClusterStore([("a", 1)], wait_replicas=wrong)
