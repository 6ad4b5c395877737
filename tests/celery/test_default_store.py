"""An app that names no store keeps its records in the Redis it has, reached as the app reaches it."""

from __future__ import annotations

import json
import ssl
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import redis
from celery import Celery
from celery.concurrency.solo import TaskPool
from celery.worker.control import conf

from celery_idempotent import IdempotentTask, open_store
from celery_idempotent.celery import app as app_module
from celery_idempotent.celery import monitoring, pool
from celery_idempotent.celery.app import store_of
from celery_idempotent.celery.worker import IdempotencyStep
from celery_idempotent.errors import ConfigurationError
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.stores.redis import RedisStore
from celery_idempotent.stores.redis.store import TIMEOUT
from tests.support import processes
from tests.support.forks import served_after_fork
from tests.support.servers import RedisServer, free_port, redis_binary
from tests.support.waiting import wait_until


def app_with(**conf: Any) -> Celery:
    app = Celery("inherits", set_as_current=False)
    app.conf.update({"broker_url": "memory://", "result_backend": "cache+memory://", **conf})
    return app


def charge() -> None:
    """Do nothing."""


def database_of(store: Any, server: RedisServer, db: int) -> None:
    """Check that what the store writes is in this database and in no other."""
    assert isinstance(store, RedisStore)
    store.ping()
    store._client.set("idem:here", db)
    with server.client(db) as client:
        assert client.get("idem:here") == str(db).encode()
    store.close()


@pytest.fixture
def locked(own_redis: Callable[..., RedisServer]) -> RedisServer:
    return own_redis(requirepass="s3cret")


@pytest.mark.parametrize(
    ("maxmemory", "policy", "warns"),
    [
        ("50mb", "volatile-ttl", True),
        ("50mb", "noeviction", False),
        ("0", "allkeys-lru", False),
    ],
)
def test_a_worker_warns_of_a_cache_that_would_forget_operations(
    own_redis: Callable[..., RedisServer],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    maxmemory: str,
    policy: str,
    warns: bool,
) -> None:
    monkeypatch.setattr(pool, "limits", pool.limits)
    for module in (pool, monitoring):  # this process does not become a worker
        monkeypatch.setattr(module, "prepare", lambda **_: None)
    server = own_redis(maxmemory=maxmemory, maxmemory_policy=policy)
    app = app_with(result_backend=server.url(0))
    app.task(base=IdempotentTask, name="charge")(charge)
    worker = SimpleNamespace(app=app, pool_cls=TaskPool, time_limit=None, soft_time_limit=None)
    IdempotencyStep(worker).create(worker)
    assert (f"its maxmemory-policy is {policy}. Set it to noeviction." in caplog.text) == warns
    store_of(app).close()


@pytest.mark.parametrize("setting", ["result_backend", "broker_url"])
def test_server_database_and_password_are_the_apps(locked: RedisServer, setting: str) -> None:
    database_of(store_of(app_with(**{setting: locked.url(3)})), locked, 3)


def test_the_result_backend_comes_before_the_broker(locked: RedisServer) -> None:
    database_of(store_of(app_with(result_backend=locked.url(4), broker_url=locked.url(5))), locked, 4)


@pytest.mark.parametrize("setting", ["result_backend", "broker_url"])
def test_a_unix_socket_serves_too(own_redis: Callable[..., RedisServer], tmp_path: Path, setting: str) -> None:
    socket = tmp_path / "r.sock"
    server = own_redis(unixsocket=socket)
    database_of(store_of(app_with(**{setting: f"redis+socket://{socket}?virtual_host=2"})), server, 2)


@pytest.mark.parametrize("setting", ["result_backend", "broker_url"])
def test_tls_settings_are_the_apps(setting: str) -> None:
    tls = {"ssl_cert_reqs": ssl.CERT_REQUIRED, "ssl_ca_certs": "/etc/ca.pem"}
    names = {"result_backend": "redis_backend_use_ssl", "broker_url": "broker_use_ssl"}
    store = store_of(app_with(**{setting: "rediss://127.0.0.1:1/0", names[setting]: tls}))
    assert isinstance(store, RedisStore)
    pool = store._client.connection_pool
    assert issubclass(pool.connection_class, redis.SSLConnection)
    assert pool.connection_kwargs["ssl_ca_certs"] == "/etc/ca.pem"


def test_our_timeouts_hold_whatever_the_app_says(locked: RedisServer) -> None:
    app = app_with(result_backend=locked.url(), redis_socket_timeout=120, redis_retry_on_timeout=True)
    store = store_of(app)
    assert isinstance(store, RedisStore)
    kwargs = store._client.connection_pool.connection_kwargs
    assert (kwargs["socket_timeout"], kwargs["socket_connect_timeout"]) == (TIMEOUT, TIMEOUT)
    assert not kwargs.get("retry_on_timeout")


@pytest.fixture
def sentinel(own_redis: Callable[..., RedisServer], tmp_path: Path) -> Iterator[tuple[RedisServer, int]]:
    """A master and one sentinel that knows it as `orders`."""
    master, port = own_redis(), free_port()
    config = tmp_path / "sentinel.conf"
    config.write_text(
        f"port {port}\nbind 127.0.0.1\ndir {tmp_path}\nsentinel monitor orders 127.0.0.1 {master.port} 1\n"
    )
    with (tmp_path / "sentinel.log").open("ab") as log:
        process = processes.spawn([redis_binary(), str(config), "--sentinel"], stdout=log, stderr=log)
    client = redis.Redis(port=port)

    def knows() -> bool:
        try:
            return bool(client.execute_command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", "orders"))
        except redis.ConnectionError:
            return False

    try:
        wait_until(knows, message="the sentinel to know the master")
        yield master, port
    finally:
        client.close()
        processes.end(process)


@pytest.mark.parametrize("setting", ["result_backend", "broker_url"])
def test_sentinels_are_asked_where_the_app_asks_them(sentinel: tuple[RedisServer, int], setting: str) -> None:
    master, port = sentinel
    options = {"result_backend": "result_backend_transport_options", "broker_url": "broker_transport_options"}
    app = app_with(**{setting: f"sentinel://127.0.0.1:{port}/6", options[setting]: {"master_name": "orders"}})
    database_of(store_of(app), master, 6)


def test_the_same_app_gets_the_same_store(locked: RedisServer) -> None:
    app = app_with(result_backend=locked.url())
    assert store_of(app) is store_of(app)
    assert store_of(app, locked.url(1)) is store_of(app, locked.url(1))
    assert store_of(app, locked.url(1)) is not store_of(app)


def test_apps_that_are_told_apart_by_a_key_prefix_do_not_share_keys(locked: RedisServer) -> None:
    app = app_with(result_backend=locked.url(), result_backend_transport_options={"global_keyprefix": "blue_"})

    def charge(order_id: str) -> str:
        return order_id

    task = app.task(base=IdempotentTask, name="t", shared=False)(charge)
    assert task._binding.namespace == "blue_idem"
    app.conf.idempotency_namespace = "own"
    assert app.task(base=IdempotentTask, name="u", shared=False)(charge)._binding.namespace == "own"


def test_what_celery_prints_of_its_settings_has_no_password_of_a_store_that_is_opened(locked: RedisServer) -> None:
    """Celery masks its own settings alone, and others by their names: a URL would stand there as it is."""
    with closing(open_store(locked.url(2))) as store:
        app = app_with(idempotency_store=store)
        printed = app.bugreport() + json.dumps(conf(SimpleNamespace(app=app)))
        assert printed.count("idempotency_store") == 2
        assert "s3cret" not in printed
        database_of(store_of(app), locked, 2)


def test_an_empty_url_as_of_a_variable_that_is_not_set_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="Expected idempotency_store to be a URL, got an empty one"):
        store_of(app_with(result_backend="redis://localhost/1", idempotency_store=""))


def test_a_child_that_is_forked_while_a_thread_opens_a_store_opens_its_own() -> None:
    class Opening(MemoryStore):
        def ping(self) -> None:
            store_of(app_with(idempotency_store="memory://"))

    assert served_after_fork(Opening(), app_module._lock)
