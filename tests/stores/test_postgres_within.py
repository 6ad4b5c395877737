"""Settled in the task's own PostgreSQL transaction, by psycopg and SQLAlchemy: what every such way must keep.

Over the drivers for coroutines a contract that has none calls each step in an event loop of its own.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import Any

import psycopg
import pytest
import sqlalchemy
import wrapt
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session
from sqlalchemy.pool import NullPool

from celery_idempotent.stores import Lease, Outcome, Store
from celery_idempotent.stores.postgres import PostgresStore
from celery_idempotent.stores.postgres.connections import Address
from celery_idempotent.stores.transactions import in_greenlet_of
from celery_idempotent.testing import TransactionContract
from tests.support.stores.postgres import age_postgres

pytestmark = pytest.mark.thorough  # in `full` alone, as the contract over PostgreSQL


class InPostgres(TransactionContract):
    """What the ways to a PostgreSQL transaction have in common."""

    @pytest.fixture
    def store(self, postgres_url: str) -> Iterator[Store]:
        schema = re.search(r"schema=(\w+)", postgres_url)
        assert schema is not None
        self.schema = schema[1]
        self.database = re.sub(r"[?&]schema=\w+", "", postgres_url)
        with psycopg.connect(self.database) as connection:
            connection.execute(f"create table {self.schema}.names (name text)".encode())
        self.engine = sqlalchemy.create_engine(
            self.database.replace("postgresql:", "postgresql+psycopg:"), poolclass=NullPool
        )
        store = self.opened(postgres_url)
        yield store
        store.close()

    def opened(self, url: str) -> PostgresStore:
        return PostgresStore.from_url(url)

    def age(self, store: Store, key: str, seconds: float) -> None:
        assert isinstance(store, PostgresStore)
        age_postgres(store, key, seconds)

    def inserted(self, store: Store) -> set[str]:
        with psycopg.connect(self.database) as connection:
            return {name for (name,) in connection.execute(f"select name from {self.schema}.names".encode())}


class TestPsycopg(InPostgres):
    def begin(self, store: Store) -> Any:
        return psycopg.connect(self.database)

    def insert(self, using: Any, name: str) -> None:
        using.execute(f"insert into {self.schema}.names values (%s)".encode(), (name,))

    @contextmanager
    def bare(self, store: Store) -> Iterator[psycopg.Connection[Any]]:
        with psycopg.connect(self.database, autocommit=True) as connection:
            yield connection


class TestProxied(TestPsycopg):
    """As instrumentation hands out connections."""

    @contextmanager
    def begin(self, store: Store) -> Iterator[Any]:
        with super().begin(store) as connection:
            yield wrapt.ObjectProxy(connection)

    @contextmanager
    def bare(self, store: Store) -> Iterator[Any]:
        with super().bare(store) as connection:
            yield wrapt.ObjectProxy(connection)


class TestSqlAlchemyConnection(InPostgres):
    def begin(self, store: Store) -> Any:
        return self.engine.begin()

    def insert(self, using: Any, name: str) -> None:
        using.execute(sqlalchemy.text(f"insert into {self.schema}.names values (:name)"), {"name": name})

    @contextmanager
    def bare(self, store: Store) -> Iterator[Any]:
        with self.engine.connect() as connection:
            yield connection


class TestSqlAlchemySession(TestSqlAlchemyConnection):
    def begin(self, store: Store) -> Any:
        return _session(self.engine)


@contextmanager
def _session(engine: sqlalchemy.Engine) -> Iterator[Session]:
    with Session(engine) as session, session.begin():
        yield session


class LoopedStore(PostgresStore):
    """A store that settles in the event loop of the transaction that it is given."""

    def __init__(self, place: Address) -> None:
        super().__init__(place)
        self.loop = asyncio.new_event_loop()

    def close(self) -> None:
        super().close()
        self.loop.close()

    def settle_within(self, lease: Lease, outcome: Outcome, *, ttl: float, using: Any) -> None:
        settle = super().settle_within
        call: Callable[[Any], None] = lambda opened: settle(lease, outcome, ttl=ttl, using=opened)  # noqa: E731
        self.loop.run_until_complete(in_greenlet_of(using, call))


class OverCoroutines(InPostgres):
    """What a coroutine has of SQLAlchemy."""

    driver: str

    def opened(self, url: str) -> PostgresStore:
        place = self.database.partition("?")[0].replace("postgresql:", f"postgresql+{self.driver}:")
        self.async_engine = create_async_engine(place, poolclass=NullPool)
        self.opened_store = LoopedStore.from_url(url)
        return self.opened_store

    def run(self, step: Coroutine[Any, Any, Any]) -> Any:
        assert isinstance(self.opened_store, LoopedStore)
        return self.opened_store.loop.run_until_complete(step)

    @contextmanager
    def entered(self, manager: AbstractAsyncContextManager[Any]) -> Iterator[Any]:
        using = self.run(manager.__aenter__())
        try:
            yield using
        except BaseException as error:
            self.run(manager.__aexit__(type(error), error, error.__traceback__))
            raise
        else:
            self.run(manager.__aexit__(None, None, None))

    def begin(self, store: Store) -> Any:
        return self.entered(self.async_engine.begin())

    def insert(self, using: Any, name: str) -> None:
        self.run(using.execute(sqlalchemy.text(f"insert into {self.schema}.names values (:name)"), {"name": name}))

    def bare(self, store: Store) -> Any:
        return self.entered(self.async_engine.connect())


class TestAsyncConnectionOfPsycopg(OverCoroutines):
    driver = "psycopg"


class TestAsyncConnectionOfAsyncpg(OverCoroutines):
    driver = "asyncpg"


class TestAsyncSessionOfPsycopg(OverCoroutines):
    driver = "psycopg"

    @contextmanager
    def begin(self, store: Store) -> Iterator[Any]:
        with self.entered(AsyncSession(self.async_engine)) as session, self.entered(session.begin()):
            yield session


class TestAsyncSessionOfAsyncpg(TestAsyncSessionOfPsycopg):
    driver = "asyncpg"
