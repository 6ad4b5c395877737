"""A parameter that nothing reads is refused in the URL of every store, by its name, with what was meant."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import redis

from celery_idempotent.errors import ConfigurationError
from celery_idempotent.stores import SCHEMES, hide_password, open_store

SECRET = "hunter2"

WRONG: list[tuple[str, str, str]] = [
    (f"redis://:{SECRET}@h/0?wait_replica=1", "wait_replica", "Did you mean wait_replicas?"),
    (f"redis://u:{SECRET}@h?sokcet_timeout={SECRET}", "sokcet_timeout", "Did you mean socket_timeout?"),
    ("redis://h?timeout=5", "timeout", "Did you mean socket_timeout?"),
    ("redis://h?max_connection=5", "max_connection", "Did you mean max_connections?"),
    ("redis://h?zzz=1", "zzz", "There are wait_replicas, max_connections and redis-py's options"),
    ("redis://h?retry=3", "retry", "There are wait_replicas"),
    ("redis://h?ssl_ca_certs=x", "ssl_ca_certs", "That is one of rediss://."),
    ("valkey://h?ssl_cert_reqs=none", "ssl_cert_reqs", "That is one of rediss://."),
    ("rediss://h?ssl_ca_cert=x", "ssl_ca_cert", "Did you mean ssl_ca_certs?"),
    ("valkeys://h?wait_replica=1", "wait_replica", "Did you mean wait_replicas?"),
    ("unix:///run/redis.sock?dbb=1", "dbb", "Did you mean db?"),
    ("unix:///run/redis.sock?socket_keepalive=1", "socket_keepalive", "Did you mean"),
    (f"redis+cluster://u:{SECRET}@a,b?wait_replica=1", "wait_replica", "Did you mean wait_replicas?"),
    (f"rediss+cluster://u:{SECRET}@a,b?zzz=1", "zzz", "There are wait_replicas and redis-py's options"),
    ("redis+cluster://a?ssl_ca_certs=x", "ssl_ca_certs", "That is one of rediss+cluster://."),
    (f"redis+sentinel://u:{SECRET}@a/s/0?wait_replica=1", "wait_replica", "Did you mean wait_replicas?"),
    (f"redis+sentinel://a/s?sentinel_pasword={SECRET}", "sentinel_pasword", "Did you mean sentinel_password?"),
    (
        "rediss+sentinel://a/s?zzz=1",
        "zzz",
        "There are wait_replicas, sentinel_username, sentinel_password and redis-py",
    ),
    (f"postgresql://u:{SECRET}@h/d?tabel=x", "tabel", "Did you mean table?"),
    (f"postgres://u:{SECRET}@h/d?sslmod={SECRET}", "sslmod", "Did you mean sslmode?"),
    (f"postgresql://u:{SECRET}@h/d?zzz=1", "zzz", "There are schema, table, connections and those of libpq, as"),
    ("sqlite:////x.db?tabel=x", "tabel", "Did you mean table?"),
    ("sqlite:////x.db?zzz=x", "zzz", "There are table, timeout, synchronous."),
    (f"dynamodb://table?regoin={SECRET}", "regoin", "Did you mean region?"),
    ("dynamodb://table?zzz=1", "zzz", "There are region, endpoint_url, profile, timeout."),
    ("memory://?table=x", "table", "There are none."),
    (f"cached+redis://:{SECRET}@h?max_agee=5&cache=redis://h/1", "max_agee", "Did you mean max_age?"),
    ("cached+sqlite:///x.db?maxage=5&cache=redis://h/1", "maxage", "Did you mean max_age?"),
    ("cached+sqlite:///x.db?tabel=5&cache=redis://h/1", "tabel", "Did you mean table?"),
    (
        f"cached+sqlite:///x.db?cache=redis://:{SECRET}@h/1?wait_replica=1",
        "wait_replica",
        "Did you mean wait_replicas?",
    ),
]


@pytest.mark.parametrize(("url", "name", "advice"), WRONG, ids=lambda text: str(text).replace(SECRET, "*"))
def test_a_parameter_that_nothing_reads_is_named_with_what_was_meant(url: str, name: str, advice: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        open_store(url)
    text = str(caught.value)
    assert f"got {name!r}. {advice}" in text
    assert "password as" not in text  # nothing is wrong with it
    assert "__init__" not in text
    assert "Connection" not in text
    assert SECRET not in text
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


@pytest.mark.parametrize(
    "url",
    [
        "{scheme}://u:S?{tail}@h/d",
        "{scheme}://u:S?x={tail}@h/d",
        "{scheme}://h/d?password=S&{tail}",
        "{scheme}://h/d?password=S&{tail}=x",
        "{scheme}://h/d?password=S&port_{tail}",
        "{scheme}://h/d?x={tail}@y",
        "cached+sqlite:///d?cache={scheme}://u:S?{tail}@h/d",
    ],
)
@pytest.mark.parametrize("scheme", ["redis", "unix", "postgresql", "redis+cluster", "redis+sentinel", "dynamodb"])
def test_a_part_of_a_password_is_not_taken_for_the_name_of_a_parameter(scheme: str, url: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        open_store(url.format(scheme=scheme, tail=SECRET))
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        f"postgresql://u:S@{SECRET}@h:5432/d",
        f"cached+postgresql://u:S@{SECRET}@h/d?cache=redis://c/0",
        f"unix://:S/{SECRET}@/run/redis.sock",
        f"unix://u:S/{SECRET}@/run/redis.sock?db=1",
    ],
    ids=lambda url: url.partition(":")[0],
)
def test_a_password_of_which_a_driver_would_take_a_part_for_the_place_is_refused(url: str) -> None:
    with pytest.raises(ConfigurationError, match="Write special characters of a password as %2F, %40") as caught:
        open_store(url)
    assert SECRET not in str(caught.value)


def test_a_path_and_a_name_of_a_host_may_have_an_at() -> None:
    open_store("unix:///run/redis@1.sock").close()
    open_store("unix://u:p@/run/redis@1.sock").close()
    open_store("postgresql://u:p%40q@h/d@e").close()
    open_store("postgresql:///d?host=@abstract").close()


def test_a_password_where_none_belongs_is_not_shown() -> None:
    with pytest.raises(ConfigurationError, match="Expected three slashes") as caught:
        open_store(f"sqlite://u:{SECRET}@/data.db")
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        (f"redis://u:{SECRET}@h/0", "redis://***@h/0"),
        (f"redis://h/0?password=S@{SECRET}", "redis://***"),
        (f"redis://u:S?{SECRET}@h/0", "redis://***"),
        (f"redis://u:S?{SECRET}@{SECRET}@h/0", "redis://***"),
        (f"redis+sentinel://u:{SECRET}@h/s?sentinel_password=S@{SECRET}", "redis+sentinel://***@h/s"),
        (f"cached+postgresql://u:{SECRET}@h/d?cache=redis://:{SECRET}@c", "cached+postgresql://***@h/d"),
        (f"redis://u:S@{SECRET}?{SECRET}=x@h/0", "redis://***"),
        (f"redis://u:{SECRET}@h/0?x=1&sentinel_username={SECRET}@y", "redis://***@h/0"),
        (f"redis://u:S@{SECRET}?password=S&x={SECRET}@h/0", "redis://***"),
        (f"u:{SECRET}@h:1?x=1", "***@h:1"),
    ],
)
def test_a_url_is_shown_without_what_may_be_a_part_of_a_password(url: str, shown: str) -> None:
    assert hide_password(url) == shown


def test_every_scheme_is_shown() -> None:
    # django:// is shown in test_django_urls.py
    shown = {"django"} | {url.partition("://")[0].partition("+")[0] for url, _, _ in WRONG}
    assert {scheme.partition("+")[0] for scheme in SCHEMES} == shown


def redis_options(kind: type[redis.Connection]) -> list[str]:
    """Return a query with every option that redis-py reads from text, each with a value that it takes."""
    common = {
        "db": "1",
        "username": "u",
        "password": "p",
        "client_name": "c",
        "lib_name": "l",
        "lib_version": "1",
        "socket_timeout": "1",
        "socket_connect_timeout": "1",
        "retry_on_timeout": "yes",
        "encoding": "utf-8",
        "encoding_errors": "strict",
        "health_check_interval": "5",
        "protocol": "2",
        "max_connections": "5",
    }
    tls = {"ssl_cert_reqs": "none", "ssl_ca_certs": "x", "ssl_check_hostname": "no", "ssl_certfile": "x"}
    of_kind = {redis.Connection: {"socket_keepalive": "yes"}, redis.SSLConnection: tls}
    return [f"{name}={value}" for name, value in {**common, **of_kind.get(kind, {})}.items()]


@pytest.mark.parametrize(
    "url",
    [
        "redis://h/0?" + "&".join(redis_options(redis.Connection)),
        "rediss://h/0?" + "&".join(redis_options(redis.SSLConnection)),
        "unix:///run/redis.sock?" + "&".join(redis_options(redis.UnixDomainSocketConnection)),
        "redis://h?wait_replicas=1",
        "redis+cluster://a,b?socket_timeout=1&wait_replicas=1&health_check_interval=5",
        "rediss+cluster://a,b?ssl_cert_reqs=none",
        "redis+sentinel://a,b/s?sentinel_username=u&sentinel_password=p&socket_timeout=1&wait_replicas=1",
        "postgresql://u@h/d?sslmode=require&connect_timeout=2&target_session_attrs=read-write&application_name=x&table=t",
        "postgresql://u@h/d?ssl=true",
        "sqlite:////tmp/x.db?timeout=1&synchronous=normal&table=t",
        "memory://",
        "cached+sqlite:////tmp/x.db?table=t&max_age=5&cache=redis://h?socket_timeout=1",
    ],
)
def test_what_the_drivers_know_is_a_parameter(url: str) -> None:
    open_store(url).close()


@pytest.mark.parametrize(
    ("url", "advice"),
    [
        ("localhost:6379/1", "got 'localhost:6379/1', which has no scheme. Did you mean redis://localhost:6379/1?"),
        (f"u:{SECRET}@cache:6379", "got '***@cache:6379', which has no scheme. Did you mean redis://***@cache:6379?"),
        ("localhost", "which has no scheme. Did you mean redis://localhost?"),
        ("db:5432/shop", "Did you mean postgresql://db:5432/shop?"),
        ("/var/lib/shop.db", "Did you mean sqlite:////var/lib/shop.db?"),
        ("shop.sqlite", "Did you mean sqlite:///shop.sqlite?"),
        ("redis:localhost", "Did you mean redis://localhost?"),
        ("redis:/localhost/1", "Did you mean redis://localhost/1?"),
        ("redis//localhost/1", "got 'redis//localhost/1', which has no scheme. Did you mean redis://localhost/1?"),
        ("redis+cluster//a,b", "Did you mean redis+cluster://a,b?"),
        ("cache//shop", "Did you mean redis://cache//shop?"),
        (" ", "which has no scheme. Write redis://host:6379/1."),
        ("mongodb://h/1", "got 'mongodb://h/1'. Write redis://localhost/1, or sqlite:///path for a file."),
        ("memory", "Did you mean memory://?"),
    ],
)
def test_a_url_without_a_scheme_is_answered_with_the_one_that_is_meant(url: str, advice: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        open_store(url)
    assert advice in str(caught.value)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("url", [6379, None, Path("shop.db"), b"redis://localhost/1"])
def test_what_is_no_text_is_no_url(url: object) -> None:
    with pytest.raises(ConfigurationError, match=r"^Expected the URL .* as a text, got .*Write redis://localhost/1"):
        open_store(url)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("url", "why"),
    [
        (f"redis://:{SECRET}@h?socket_timeout=soon", "Invalid value for"),
        (f"redis://:{SECRET}@h?protocol=9", "rotocol"),
        (f"redis+cluster://:{SECRET}@h?socket_timeout=soon", "Invalid value for"),
    ],
)
def test_a_value_that_does_not_fit_is_said_whatever_the_password(url: str, why: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        open_store(url)
    assert why in str(caught.value)
    assert "password as" not in str(caught.value)
    assert SECRET not in str(caught.value)


def test_options_that_code_gives_may_be_objects() -> None:
    from celery_idempotent.stores.redis import RedisStore

    make: Callable[..., RedisStore] = RedisStore.from_url
    make("redis://h", retry=redis.retry.Retry(redis.backoff.NoBackoff(), 0), socket_timeout=0.1).close()
