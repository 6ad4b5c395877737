"""What a task has of its own transaction leads to the driver's connection, or to an error that says what to do."""

from __future__ import annotations

import sqlite3
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy
import wrapt
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, scoped_session, sessionmaker
from sqlalchemy.pool import NullPool

from celery_idempotent.errors import ConfigurationError
from celery_idempotent.stores.transactions import driver_connection
from tests.support.stores.django_databases import django_database


class Base(DeclarativeBase):
    """Of the class of rows."""


class Row(Base):
    """What a task writes."""

    __tablename__ = "rows"
    id: Mapped[int] = mapped_column(primary_key=True)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[sqlalchemy.Engine]:
    engine = sqlalchemy.create_engine(f"sqlite:///{tmp_path / 'shop.db'}", poolclass=NullPool)
    yield engine
    engine.dispose()


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[str]:
    """The alias of a Django database."""
    with django_database("shop", "sqlite3", NAME=str(tmp_path / "shop.db")):
        yield "shop"


def found(using: Any) -> Any:
    return driver_connection(using, sqlite3.Connection)


def test_a_connection_of_the_driver_is_itself(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "shop.db")) as connection:
        assert found(connection) is connection


def test_a_connection_of_sqlalchemy_leads_to_the_drivers(engine: sqlalchemy.Engine) -> None:
    with engine.begin() as connection:
        assert found(connection) is connection.connection.driver_connection
    with engine.connect() as connection, pytest.raises(ConfigurationError, match=r"with engine\.begin\(\)"):
        found(connection)


def test_a_proxy_leads_to_what_is_within_it(engine: sqlalchemy.Engine, tmp_path: Path, shop: str) -> None:
    """As that which instrumentation puts around the driver's connection, below SQLAlchemy and Django too."""
    from django.db import connections, transaction

    with closing(sqlite3.connect(tmp_path / "shop.db")) as connection:
        assert found(wrapt.ObjectProxy(connection)) is connection
        with transaction.atomic(using=shop):
            opened, connections[shop].connection = connections[shop].connection, wrapt.ObjectProxy(connection)
            assert found(shop) is connection
            connections[shop].connection = opened
    with Session(engine) as session, session.begin():
        assert found(wrapt.ObjectProxy(session)) is session.connection().connection.driver_connection
    with pytest.raises(ConfigurationError, match=r"over sqlite3 as the store is, got builtins\.object"):
        found(wrapt.ObjectProxy(object()))


def test_a_session_leads_to_the_connection_of_its_transaction(engine: sqlalchemy.Engine) -> None:
    with Session(engine) as session, session.begin():
        assert found(session) is session.connection().connection.driver_connection


def test_a_session_that_has_begun_no_transaction_is_refused_with_what_to_do(engine: sqlalchemy.Engine) -> None:
    """Committed apart from what it committed before, the record would be of no use."""
    with Session(engine) as session:
        session.execute(sqlalchemy.text("select 1"))
        session.commit()
        with pytest.raises(ConfigurationError, match=r"or use `with session\.begin\(\):`"):
            found(session)
        session.add(Row())  # which is written with the commit
        assert found(session) is session.connection().connection.driver_connection
        session.expunge_all()


def test_a_scoped_session_stands_for_the_session_of_its_thread(engine: sqlalchemy.Engine) -> None:
    sessions = scoped_session(sessionmaker(engine))
    sessions.begin()
    assert found(sessions) is sessions.connection().connection.driver_connection
    sessions.remove()


def test_a_session_that_has_connections_to_two_engines_is_refused(engine: sqlalchemy.Engine) -> None:
    reader = sqlalchemy.create_engine(engine.url, poolclass=NullPool)
    with Session(engine) as session:
        session.execute(sqlalchemy.text("select 1"), bind_arguments={"bind": reader})
        with pytest.raises(ConfigurationError, match=r"one connection, got one of 2.*bind_arguments") as error:
            found(session)
        assert str(error.value).count("Engine(sqlite") == 2
        mapped = session.connection(bind_arguments={"bind": engine})
        assert found(mapped) is mapped.connection.driver_connection
    with Session(engine) as session, session.begin(), session.begin_nested(), session.begin_nested():
        assert found(session) is session.connection().connection.driver_connection


def test_a_session_whose_mappers_alone_have_engines_is_told_what_to_hand_in(engine: sqlalchemy.Engine) -> None:
    with Session(binds={Row: engine}) as session, session.begin():
        with pytest.raises(ConfigurationError, match=r"for its mappers alone .*bind_arguments"):
            found(session)
        mapped = session.connection(bind_arguments={"mapper": Row})
        assert found(mapped) is mapped.connection.driver_connection


def test_a_session_gets_no_second_connection_in_a_transaction_that_settled(engine: sqlalchemy.Engine) -> None:
    other = sqlalchemy.create_engine(engine.url, poolclass=NullPool)
    with Session(engine) as session:
        for _ in range(2):
            session.begin()
            found(session)
            with session.begin_nested():
                session.execute(sqlalchemy.text("select 1"))
            with pytest.raises(ConfigurationError, match="one connection, got one of 2"):
                session.connection(bind_arguments={"bind": other})
            session.rollback()
        session.begin()
        found(session)
        session.commit()
        for bind in (engine, other):  # the next transaction settles nothing
            session.connection(bind_arguments={"bind": bind})
        session.commit()


def test_what_commits_by_itself_is_refused(engine: sqlalchemy.Engine) -> None:
    with (
        engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection,
        pytest.raises(ConfigurationError, match="AUTOCOMMIT"),
    ):
        found(connection)


@pytest.mark.parametrize("using", [None, 5])
def test_what_is_no_connection_is_named(using: object) -> None:
    with pytest.raises(
        ConfigurationError, match=rf"over sqlite3 as the store is, got builtins\.{type(using).__name__}\."
    ):
        found(using)


def test_an_engine_is_no_connection(engine: sqlalchemy.Engine) -> None:
    with pytest.raises(ConfigurationError, match=r"got sqlalchemy\.engine\.base\.Engine\."):
        found(engine)


def test_what_the_pool_of_an_engine_hands_out_is_no_connection(engine: sqlalchemy.Engine) -> None:
    with (
        closing(engine.raw_connection()) as raw,
        pytest.raises(ConfigurationError, match=r"got sqlalchemy\.pool\.base\._ConnectionFairy\."),
    ):
        found(raw)


@pytest.mark.parametrize("kind", [AsyncEngine.connect, AsyncSession])
def test_what_is_asynchronous_is_refused_with_what_to_use(kind: Callable[[AsyncEngine], Any]) -> None:
    with pytest.raises(ConfigurationError, match=r"got sqlalchemy\.ext\.asyncio\..*: use a synchronous one"):
        found(kind(create_async_engine("postgresql+psycopg://")))


class OfCoroutines:
    """What psycopg and others have beside their connections, and a Session has below it in `run_sync`."""

    async def commit(self) -> None: ...


class WithoutCommit:
    """What asyncpg has."""

    async def close(self) -> None: ...


@pytest.mark.parametrize("kind", [OfCoroutines, WithoutCommit])
def test_a_connection_of_a_driver_for_coroutines_is_refused_with_what_to_use(kind: type[Any]) -> None:
    with pytest.raises(ConfigurationError, match=rf"got tests\.stores\..*{kind.__name__}: use a synchronous one"):
        found(kind())


def test_another_driver_is_named_with_what_led_to_it(engine: sqlalchemy.Engine) -> None:
    class Other:
        """A driver's connection."""

    with (
        engine.begin() as connection,
        pytest.raises(ConfigurationError, match=r"got sqlalchemy\.\S+ over sqlite3\.Connection\."),
    ):
        driver_connection(connection, Other)


def test_a_django_database_is_taken_within_atomic_alone(shop: str) -> None:
    from django.db import connections, transaction

    with pytest.raises(ConfigurationError, match=r"no transaction\.atomic\(using='shop'\)"):
        found(shop)
    with transaction.atomic(using=shop):
        assert found(shop) is connections[shop].connection


def test_a_django_transaction_that_will_be_rolled_back_is_refused(shop: str) -> None:
    from django.db import transaction

    with transaction.atomic(using=shop):
        with suppress(LookupError), transaction.atomic(using=shop, savepoint=False):
            raise LookupError
        with pytest.raises(ConfigurationError, match="Django is going to roll it back"):
            found(shop)


def test_a_connection_of_django_is_as_good_as_its_alias(shop: str) -> None:
    from django.db import connections, transaction

    connection = connections[shop]
    with pytest.raises(ConfigurationError, match=r"no transaction\.atomic\(using='shop'\)"):
        found(connection)
    with transaction.atomic(using=shop):
        assert found(connection) is connection.connection


def test_the_connection_that_django_exports_is_the_default_ones(shop: str) -> None:
    from django.db import connection, connections, transaction

    with transaction.atomic():
        assert found(connection) is connections["default"].connection


def test_an_alias_that_django_does_not_know_is_answered_with_those_it_knows(shop: str) -> None:
    with pytest.raises(ConfigurationError, match=r"using='shopp' to be one of the Django databases .*shop"):
        found("shopp")


def test_a_name_means_nothing_without_django(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "django.core.exceptions", None)
    with pytest.raises(ConfigurationError, match="Django is not installed"):
        found("default")


def test_a_django_that_is_not_set_up_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from django.core.exceptions import ImproperlyConfigured

    class Bare(dict[str, object]):
        def __missing__(self, alias: str) -> object:
            raise ImproperlyConfigured("DATABASES is not set")

    monkeypatch.setattr("django.db.connections", Bare())
    with pytest.raises(ConfigurationError, match="Django is not set up: DATABASES is not set"):
        found("default")
