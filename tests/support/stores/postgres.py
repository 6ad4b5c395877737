"""Empty places in a PostgreSQL, and how the records there grow old."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import psycopg
import pytest

from celery_idempotent.stores.postgres import PostgresStore
from celery_idempotent.stores.postgres.records import stored
from celery_idempotent.stores.rules import SECOND
from tests.conftest import missing
from tests.support.postgres import ExternalPostgres, PostgresServer, fresh_schema, start_postgres
from tests.support.servers import ServerMissing

Urls = Callable[[], str]


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer | ExternalPostgres]:
    """The session's server. It is shared, and POSTGRES_URL may name it: never kill, pause or configure it."""
    try:
        server = start_postgres()
    except ServerMissing as error:
        raise missing(error) from None
    yield server
    server.stop()


@pytest.fixture
def fresh_postgres(postgres_server: PostgresServer | ExternalPostgres) -> Iterator[Urls]:
    """A function that returns the URL of a schema of this test's alone, with nothing in it yet."""
    with ExitStack() as schemas:
        yield lambda: schemas.enter_context(fresh_schema(postgres_server.url()))


@pytest.fixture
def postgres_url(fresh_postgres: Urls) -> str:
    """The URL of a store that is this test's alone, its table made."""
    return with_schema(fresh_postgres())


@pytest.fixture
def own_postgres() -> Iterator[Callable[..., PostgresServer]]:
    """A function that starts a server for this test alone: options become its configuration."""
    started: list[PostgresServer] = []

    def start(**config: object) -> PostgresServer:
        try:
            started.append(PostgresServer(**config))
        except ServerMissing as error:
            raise missing(error) from None
        return started[-1].start()

    yield start
    for server in started:
        server.stop()


def with_schema(url: str) -> str:
    """Make the table, and return the URL."""
    store = PostgresStore.from_url(url)
    store.apply_schema()
    store.close()
    return url


@contextmanager
def begun(url: str, **options: Any) -> Iterator[psycopg.Connection[Any]]:
    """Give a connection of a task's own with a transaction open, which is committed in the end."""
    with psycopg.connect(url, **options) as connection:
        connection.execute("show server_version")  # which, unlike a query, leaves the isolation level open
        yield connection


def run(store: PostgresStore, statement: str, *args: object) -> list[tuple[object, ...]]:
    return store._connections.run(store._schema.render(statement), args)


def age_postgres(store: PostgresStore, key: str, seconds: float) -> None:
    run(
        store,
        "update {table} t set lease_end = t.lease_end - a.us, not_before = t.not_before - a.us, "
        "expires = t.expires - a.us, ended = case when t.ended > 0 then t.ended - a.us else 0 end "
        "from (select %s::bigint as us) a where key = %s returning 1",
        round(seconds * SECOND),
        stored(key),
    )


def age_postgres_fence(store: PostgresStore, key: str, seconds: float) -> None:
    # The others have the time of the lease in its fence, and are aged by it: there the holder's fence is another then.
    # By as much here, or the fence may become that of the holder before.
    aged = "update {table} t set since = t.since - a.us, fence = t.fence - a.us from (select %s::bigint as us) a "
    run(store, aged + "where key = %s returning 1", round(seconds * SECOND), stored(key))


def empty_postgres(store: PostgresStore) -> None:
    run(store, "delete from {table} returning 1")
