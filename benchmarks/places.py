"""A server for every kind of store, and an empty place in it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest import mock
from urllib.parse import quote

from celery_idempotent.stores import open_store
from tests.support.cluster import Cluster
from tests.support.dynamodb import DynamoServer, credentials
from tests.support.postgres import PostgresServer, fresh_schema
from tests.support.servers import RedisServer

__all__ = ["NAMES", "places"]

NAMES = ("memory", "redis", "cluster", "postgres", "sqlite", "cached", "dynamodb")


@contextmanager
def places(names: tuple[str, ...] = NAMES) -> Iterator[dict[str, str]]:
    """Start what these kinds of store need, and give their URLs by name; "cached" is PostgreSQL behind Redis."""
    with ExitStack() as stack:
        urls = {name: _START[name](stack) for name in names}
        for url in urls.values():
            store = open_store(url)
            store.apply_schema()
            store.close()
        yield urls


def _redis(stack: ExitStack) -> str:
    return stack.enter_context(RedisServer()).url()


def _postgres(stack: ExitStack) -> str:
    server = PostgresServer(fsync="on").start()  # as a database is run whose commits count
    stack.callback(server.stop)
    return stack.enter_context(fresh_schema(server.url()))


def _sqlite(stack: ExitStack) -> str:
    folder = stack.enter_context(tempfile.TemporaryDirectory())
    return f"sqlite:///{Path(folder) / 'idempotency.db'}"


def _cached(stack: ExitStack) -> str:
    durable = _postgres(stack)
    return f"cached+{durable}{'&' if '?' in durable else '?'}cache={quote(_redis(stack), safe=':/')}"


def _dynamodb(stack: ExitStack) -> str:
    stack.enter_context(mock.patch.dict(os.environ, credentials()))
    server = DynamoServer().start()
    stack.callback(server.stop)
    return server.url("benchmark")


_START = {
    "memory": lambda stack: "memory://",
    "redis": _redis,
    "cluster": lambda stack: stack.enter_context(Cluster()).url(),
    "postgres": _postgres,
    "sqlite": _sqlite,
    "cached": _cached,
    "dynamodb": _dynamodb,
}
