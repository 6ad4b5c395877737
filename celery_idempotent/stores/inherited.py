"""A Redis that somebody uses already, as a store: same server, credentials and TLS, our timeouts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import redis
from kombu.utils.url import maybe_sanitize_url

from .base import Store
from .redis import RedisStore

__all__ = ["direct", "merged", "store_like"]

#: What its user says about patience, pools and decoding does not bind a lease call.
_OURS = (
    "max_connections",
    "retry_on_timeout",
    "client_name",
    "driver_info",
    "lib_name",
    "lib_version",
    "decode_responses",
    "health_check_interval",
)
#: What of a client's connections says whose and where they are.
_IDENTITY = (
    "credential_provider",
    "db",
    "host",
    "password",
    "path",
    "port",
    "protocol",
    "redis_connect_func",
    "socket_keepalive",
    "socket_keepalive_options",
    "socket_type",
    "username",
)


def merged(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of a connection with ours in place of its user's."""
    kept = {name: value for name, value in params.items() if name not in _OURS and value is not None}
    kept.pop("virtual_host", None)
    return {**kept, **RedisStore.connection_options()}


def direct(params: dict[str, Any], url: str) -> Store:
    """Return a store on the server that ``params`` name, as `merged` returns them."""
    if issubclass(params.get("connection_class", redis.Connection), redis.UnixDomainSocketConnection):
        params.pop("socket_connect_timeout", None)
    if not params.get("password"):  # kombu hides one that is not there, too
        url = re.sub(r"//[^/@]*@", "//", url)
    return RedisStore(redis.Redis(connection_pool=redis.ConnectionPool(**params)), url=maybe_sanitize_url(url))


def store_like(client: redis.Redis) -> Store:
    """Return a store on the server, or behind the sentinels, that a redis-py client uses, in the same database."""
    from redis.sentinel import SentinelConnectionPool

    pool = client.connection_pool
    own = {name: value for name, value in pool.connection_kwargs.items() if name in _IDENTITY or name[:4] == "ssl_"}
    params = merged(own)
    if isinstance(pool, SentinelConnectionPool):
        name, manager = pool.service_name, pool.sentinel_manager
        make: Any = SentinelConnectionPool
        sentinels = make(name, manager, connection_class=pool.connection_class, **params)
        return RedisStore(redis.Redis(connection_pool=sentinels), url=f"redis+sentinel://{name}")
    place = params.get("path") or f"{params.get('host', 'localhost')}:{params.get('port', 6379)}"
    scheme = "unix" if params.get("path") else "redis"
    return direct({**params, "connection_class": pool.connection_class}, f"{scheme}://{place}/{params.get('db') or 0}")
