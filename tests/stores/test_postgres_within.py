"""Settled in the task's own PostgreSQL transaction, by psycopg and SQLAlchemy: what every such way must keep."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest
import sqlalchemy
import wrapt
from sqlalchemy.orm import Session
from sqlalchemy.pool import NullPool

from celery_idempotent.stores import Store
from celery_idempotent.stores.postgres import PostgresStore
from celery_idempotent.testing import TransactionContract
from tests.support.stores import benches

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
        store = PostgresStore.from_url(postgres_url)
        yield store
        store.close()

    def age(self, store: Store, key: str, seconds: float) -> None:
        benches.age(store, key, seconds)

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
