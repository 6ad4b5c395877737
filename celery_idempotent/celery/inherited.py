"""The Redis that an app already has, as a store: same server, credentials, TLS and sentinels, our timeouts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import redis

from ..stores import Store
from ..stores.inherited import direct, merged
from ..stores.redis import RedisStore

__all__ = ["store_of_backend", "store_of_broker"]


def store_of_backend(app: Any) -> Store | None:
    """Return a store on the result backend's Redis, or None if the backend is something else."""
    try:
        from celery.backends.redis import RedisBackend, SentinelBackend
    except ImportError:  # pragma: no cover - redis is a dependency of ours
        return None
    backend = app.backend
    if not isinstance(backend, RedisBackend):
        return None
    params = merged(backend.connparams)
    if isinstance(backend, SentinelBackend):
        hosts = [(host["host"], host["port"]) for host in params.pop("hosts")]
        return _sentinel(hosts, backend._transport_options, params, backend.as_uri())
    return direct(params, backend.as_uri())


def store_of_broker(app: Any) -> Store | None:
    """Return a store on the broker's Redis, or None if the broker is something else."""
    connection = app.connection_for_write()
    if connection.transport.driver_type != "redis":
        return None
    channel = object.__new__(connection.transport.Channel)  # only asked for its parameters; a real one would connect
    channel.connection = connection.transport
    for name, value in (connection.transport_options or {}).items():
        if name in channel.from_transport_options:
            setattr(channel, name, value)
    params = merged(channel._connparams())
    if params["connection_class"].__name__.startswith("Sentinel"):
        hosts = [_host_of(uri) for uri in connection.alt or [connection.as_uri(include_password=True)]]
        for name in ("host", "port"):
            params.pop(name, None)
        return _sentinel(hosts, connection.transport_options, params, connection.as_uri())
    return direct(params, connection.as_uri())


def _sentinel(hosts: list[tuple[str, int]], options: dict[str, Any], params: dict[str, Any], url: str) -> Store:
    from redis.sentinel import Sentinel

    secure = issubclass(params.pop("connection_class", redis.Connection), redis.SSLConnection)
    make: Callable[..., Any] = Sentinel
    sentinel = make(
        hosts,
        min_other_sentinels=options.get("min_other_sentinels", 0),
        sentinel_kwargs={**RedisStore.connection_options(), **(options.get("sentinel_kwargs") or {})},
        **params,
        **({"ssl": True} if secure else {}),
    )
    return RedisStore(sentinel.master_for(options["master_name"]), url=url)


def _host_of(uri: str) -> tuple[str, int]:
    from kombu.utils.url import url_to_parts

    parts = url_to_parts(uri)
    return parts.hostname or "127.0.0.1", parts.port or 26379
