"""PostgreSQL behind PgBouncer in transaction mode: each statement may reach another connection of the server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from sqlalchemy.ext.asyncio import create_async_engine

from celery_idempotent.errors import ConfigurationError
from celery_idempotent.stores import State
from celery_idempotent.stores.postgres import PostgresStore
from celery_idempotent.stores.transactions import in_greenlet_of
from tests.conftest import missing
from tests.support.pgbouncer import Bouncer
from tests.support.postgres import ExternalPostgres, PostgresServer, fresh_schema
from tests.support.servers import ServerMissing
from tests.support.stores.benches import DONE, known, take
from tests.support.stores.postgres import age_postgres, begun, with_schema
from tests.support.stores.server_contract import ServerContract

pytestmark = pytest.mark.thorough  # in `full` alone: a server of its own kind


@pytest.fixture(scope="module")
def bouncer(postgres_server: PostgresServer | ExternalPostgres) -> Iterator[Bouncer]:
    if isinstance(postgres_server, ExternalPostgres):
        pytest.skip("needs a server that trusts everybody, which that at POSTGRES_URL need not")
    try:
        bouncer = Bouncer(postgres_server.url())
    except ServerMissing as error:
        raise missing(error, optional="pgbouncer") from None
    yield bouncer
    bouncer.stop()


@pytest.fixture
def bounced(bouncer: Bouncer) -> Iterator[PostgresStore]:
    with fresh_schema(bouncer.url()) as url:
        store = PostgresStore.from_url(with_schema(url))
        yield store
        store.close()


@pytest.mark.nightly
class TestThroughPgBouncer(ServerContract):
    @pytest.fixture
    def store(self, bounced: PostgresStore) -> PostgresStore:
        return bounced

    def age(self, store: PostgresStore, key: str, seconds: float) -> None:  # type: ignore[override]
        age_postgres(store, key, seconds)


def test_a_crowd_shares_two_connections_of_the_server(bounced: PostgresStore) -> None:
    def deliver(number: int) -> None:
        lease = take(bounced, f"key-{number}")
        assert bounced.renew([lease]) == []
        bounced.settle(lease, DONE, ttl=60)

    with ThreadPoolExecutor(16) as crowd:
        list(crowd.map(deliver, range(160)))
    assert len(list(bounced.scan(state=State.COMPLETED))) == 160


def test_settling_within_a_transaction_works_through_it(bounced: PostgresStore, bouncer: Bouncer) -> None:
    lease = take(bounced)
    with begun(bouncer.url(), prepare_threshold=None) as connection:
        bounced.settle_within(lease, DONE, ttl=60, using=connection)
        assert known(bounced).state is State.IN_PROGRESS
    assert known(bounced).state is State.COMPLETED


@pytest.mark.parametrize(
    ("driver", "options"),
    [
        ("psycopg", {"prepare_threshold": None}),
        ("asyncpg", {"statement_cache_size": 0, "prepared_statement_name_func": lambda: f"__{uuid4()}__"}),
    ],
)
def test_settling_within_a_coroutines_transaction_works_through_it(
    bounced: PostgresStore, bouncer: Bouncer, driver: str, options: dict[str, Any]
) -> None:
    place = bouncer.url().partition("?")[0].replace("postgresql:", f"postgresql+{driver}:")

    async def main() -> None:
        engine = create_async_engine(place, connect_args=options)
        for number in range(8):  # after some, a driver prepares a statement
            lease = take(bounced, f"key-{number}")
            settle = partial(bounced.settle_within, lease, DONE, ttl=60)
            async with engine.begin() as connection:
                await in_greenlet_of(connection, lambda opened, settle=settle: settle(using=opened))
        await engine.dispose()

    asyncio.run(main())
    assert len(list(bounced.scan(state=State.COMPLETED))) == 8


def test_stricter_transactions_work_through_it(
    own_postgres: Callable[..., PostgresServer],
) -> None:
    server = own_postgres(default_transaction_isolation="serializable")
    try:
        bouncer = Bouncer(server.url())
    except ServerMissing as error:
        raise missing(error, optional="pgbouncer") from None
    store = PostgresStore.from_url(with_schema(bouncer.url()))
    try:
        with ThreadPoolExecutor(8) as crowd:
            list(crowd.map(lambda number: store.delete(take(store, f"key-{number}").key), range(80)))
        assert list(store.scan()) == []
        with (
            psycopg.connect(bouncer.url(), autocommit=True) as connection,
            pytest.raises(ConfigurationError, match="autocommit"),
        ):
            store.settle_within(take(store), DONE, ttl=60, using=connection)
    finally:
        store.close()
        bouncer.stop()
