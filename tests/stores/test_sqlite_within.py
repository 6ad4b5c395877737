"""Settled in the task's own SQLite transaction: by sqlite3, SQLAlchemy and Django."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import wrapt

from celery_idempotent.errors import ConfigurationError, LeaseLost, StoreUnreachable
from celery_idempotent.stores import Lease, State, Store
from celery_idempotent.stores.sqlite import SqliteStore
from celery_idempotent.testing import TransactionContract
from tests.support.stores import benches
from tests.support.stores.benches import DONE, claim, known, take
from tests.support.stores.django_databases import django_database

OpenSqlite = Callable[..., SqliteStore]
ALIAS = "shop"
INSERT = "INSERT INTO names VALUES (?)"


def path_of(store: Store) -> str:
    assert isinstance(store, SqliteStore)
    return store._place.path


def connect(path: object, **options: Any) -> sqlite3.Connection:
    return sqlite3.connect(str(path), **options)


@pytest.fixture
def with_names(sqlite_path: Path) -> None:
    with closing(connect(sqlite_path)) as connection:
        connection.execute("CREATE TABLE names (name TEXT)")


class InSqlite(TransactionContract):
    """What the ways to a SQLite transaction have in common."""

    stalls = StoreUnreachable

    @pytest.fixture
    def store(self, open_sqlite: OpenSqlite, with_names: None) -> Store:
        return open_sqlite(timeout=0.3)  # nobody is waited for here but those who are waited for in vain

    def age(self, store: Store, key: str, seconds: float) -> None:
        benches.age(store, key, seconds)

    def inserted(self, store: Store) -> set[str]:
        with closing(connect(path_of(store))) as connection:
            return {name for (name,) in connection.execute("SELECT name FROM names").fetchall()}


class TestSqlite3(InSqlite):
    @contextmanager
    def begin(self, store: Store) -> Iterator[sqlite3.Connection]:
        with closing(connect(path_of(store))) as connection, connection:
            yield connection

    def insert(self, using: Any, name: str) -> None:
        using.execute(INSERT, (name,))

    @contextmanager
    def bare(self, store: Store) -> Iterator[sqlite3.Connection]:
        with closing(connect(path_of(store))) as connection:
            yield connection


class TestProxied(TestSqlite3):
    """As OpenTelemetry's and other instrumentation hands out connections."""

    @contextmanager
    def begin(self, store: Store) -> Iterator[Any]:
        with super().begin(store) as connection:
            yield wrapt.ObjectProxy(wrapt.ObjectProxy(connection))

    @contextmanager
    def bare(self, store: Store) -> Iterator[Any]:
        with super().bare(store) as connection:
            yield wrapt.ObjectProxy(connection)


class WithSqlAlchemy(InSqlite):
    @pytest.fixture
    def store(self, open_sqlite: OpenSqlite, with_names: None, sqlite_path: Path) -> Iterator[Store]:
        sqlalchemy = pytest.importorskip("sqlalchemy")
        self.sqlalchemy = sqlalchemy
        self.engine = sqlalchemy.create_engine(f"sqlite:///{sqlite_path}")
        yield open_sqlite(timeout=0.3)
        self.engine.dispose()

    def insert(self, using: Any, name: str) -> None:
        using.execute(self.sqlalchemy.text("INSERT INTO names VALUES (:name)"), {"name": name})

    @contextmanager
    def bare(self, store: Store) -> Iterator[Any]:
        with self.engine.connect() as connection:
            yield connection


class TestSqlAlchemyConnection(WithSqlAlchemy):
    def begin(self, store: Store) -> Any:
        return self.engine.begin()

    def test_a_transaction_that_has_written_nothing_yet_is_one(self, store: Store) -> None:
        """sqlite3 begins it with the first write; SQLAlchemy has promised to commit it before that."""
        lease = take(store)
        with self.engine.begin() as using:
            store.settle_within(lease, DONE, ttl=60, using=using)
            self.insert(using, "after")
            assert known(store).state is State.IN_PROGRESS
        assert known(store).state is State.COMPLETED
        assert self.inserted(store) == {"after"}
        with self.engine.begin() as using:
            store.settle_within(take(store, "rolled back"), DONE, ttl=60, using=using)
            using.rollback()
        assert known(store, "rolled back").state is State.IN_PROGRESS

    def test_a_savepoint_after_begin_immediate_commits_nothing(self, store: Store) -> None:
        """The guide's cure: sqlite3 begins no transaction before a savepoint, whose release would be the commit."""
        lease = take(store)
        with pytest.raises(LookupError), self.engine.begin() as using:  # noqa: PT012 - all of it is the transaction
            using.execute(self.sqlalchemy.text("BEGIN IMMEDIATE"))
            with using.begin_nested():
                self.insert(using, "rolled back")
            store.settle_within(lease, DONE, ttl=60, using=using)
            raise LookupError
        assert (known(store).state, self.inserted(store)) == (State.IN_PROGRESS, set())

    def test_what_commits_by_itself_is_refused(self, store: Store) -> None:
        lease = take(store)
        engine = self.engine.execution_options(isolation_level="AUTOCOMMIT")
        with engine.begin() as using:
            self.insert(using, "committed by itself")
            with pytest.raises(ConfigurationError, match="AUTOCOMMIT"):
                store.settle_within(lease, DONE, ttl=60, using=using)
        assert known(store).state is State.IN_PROGRESS

    def test_a_driver_that_commits_by_itself_is_refused(self, store: Store) -> None:
        """SQLAlchemy neither begins nor commits anything there; the option is new in Python 3.12."""

        class Connection(sqlite3.Connection):
            autocommit = True

        engine = self.sqlalchemy.create_engine(self.engine.url, connect_args={"factory": Connection})
        lease = take(store)
        with engine.begin() as using, pytest.raises(ConfigurationError, match="commits every statement by itself"):
            store.settle_within(lease, DONE, ttl=60, using=using)
        engine.dispose()
        assert known(store).state is State.IN_PROGRESS


class TestSqlAlchemySession(WithSqlAlchemy):
    def begin(self, store: Store) -> Any:
        from sqlalchemy.orm import sessionmaker

        return sessionmaker(self.engine).begin()

    def test_a_session_whose_info_was_emptied_can_be_used_again(self, store: Store) -> None:
        from sqlalchemy.orm import Session

        lease = take(store)
        with Session(self.engine) as session:
            self.insert(session, "first")
            store.settle_within(lease, DONE, ttl=60, using=session)
            session.commit()
            session.info.clear()
            self.insert(session, "second")
            session.commit()
        assert self.inserted(store) == {"first", "second"}

    def test_objects_that_wait_to_be_flushed_are_committed_with_the_outcome(self, store: Store) -> None:
        from sqlalchemy.orm import registry

        table = self.sqlalchemy.Table(
            "names", self.sqlalchemy.MetaData(), self.sqlalchemy.Column("name", primary_key=True)
        )
        name = type("Name", (), {})
        mapping = registry()
        mapping.map_imperatively(name, table)
        lease = take(store)
        with self.begin(store) as session:
            waiting = name()
            waiting.name = "flushed"
            session.add(waiting)
            store.settle_within(lease, DONE, ttl=60, using=session)
        mapping.dispose()
        assert (known(store).state, self.inserted(store)) == (State.COMPLETED, {"flushed"})


class TestDjango(InSqlite):
    @pytest.fixture
    def store(self, open_sqlite: OpenSqlite, with_names: None, sqlite_path: Path) -> Iterator[Store]:
        with django_database(ALIAS, "sqlite3", NAME=str(sqlite_path)):
            yield open_sqlite(timeout=0.3)

    @contextmanager
    def begin(self, store: Store) -> Iterator[str]:
        from django.db import transaction

        with transaction.atomic(using=ALIAS):
            yield ALIAS

    def insert(self, using: Any, name: str) -> None:
        from django.db import connections

        with connections[using].cursor() as cursor:
            cursor.execute("INSERT INTO names VALUES (%s)", [name])

    @contextmanager
    def bare(self, store: Store) -> Iterator[str]:
        yield ALIAS

    def test_a_block_that_is_rolled_back_inside_another_leaves_the_lease(self, store: Store) -> None:
        from django.db import transaction

        lease = take(store)
        with self.begin(store) as using:
            self.insert(using, "kept")
            try:
                with transaction.atomic(using=using):
                    store.settle_within(lease, DONE, ttl=60, using=using)
                    raise LookupError
            except LookupError:
                pass
        assert (known(store).state, self.inserted(store)) == (State.IN_PROGRESS, {"kept"})


@pytest.fixture
def store(open_sqlite: OpenSqlite, with_names: None) -> SqliteStore:
    return open_sqlite()


def settle(store: SqliteStore, lease: Lease, using: object) -> None:
    store.settle_within(lease, DONE, ttl=60, using=using)


@pytest.mark.parametrize("options", [{}, {"isolation_level": None}, {"isolation_level": "IMMEDIATE"}])
def test_a_connection_that_has_only_read_is_told_how_to_begin(store: SqliteStore, options: dict[str, Any]) -> None:
    lease = take(store)
    with closing(connect(path_of(store), **options)) as connection:
        connection.execute("SELECT * FROM names").fetchall()
        with pytest.raises(ConfigurationError, match="Write the task's own rows first, or execute BEGIN IMMEDIATE"):
            settle(store, lease, connection)
        connection.execute("BEGIN IMMEDIATE")
        settle(store, lease, connection)
        connection.commit()
    assert known(store).state is State.COMPLETED


@pytest.mark.skipif(not hasattr(sqlite3, "LEGACY_TRANSACTION_CONTROL"), reason="autocommit= is new in Python 3.12")
def test_a_connection_that_is_always_in_a_transaction_is_in_one(store: SqliteStore) -> None:
    lease = take(store)
    with closing(connect(path_of(store), autocommit=True)) as connection:
        connection.execute(INSERT, ("committed by itself",))
        with pytest.raises(ConfigurationError, match="in an open transaction"):
            settle(store, lease, connection)
    with closing(connect(path_of(store), autocommit=False)) as connection:
        settle(store, lease, connection)
        assert known(store).state is State.IN_PROGRESS
        connection.commit()
    assert known(store).state is State.COMPLETED


def test_a_connection_that_is_closed_or_another_threads_is_refused(store: SqliteStore) -> None:
    """That is no matter of the disk, and no later try would help."""
    lease = take(store)
    with closing(connect(path_of(store))) as connection:
        connection.execute(INSERT, ("effect",))
        with ThreadPoolExecutor(1) as other, pytest.raises(ConfigurationError, match="same thread"):
            other.submit(settle, store, lease, connection).result()
        connection.rollback()
    with pytest.raises(ConfigurationError, match="closed"):
        settle(store, lease, connection)


def test_a_connection_that_may_only_read_is_refused(store: SqliteStore, sqlite_path: Path) -> None:
    lease = take(store)
    with closing(sqlite3.connect(f"{sqlite_path.as_uri()}?mode=ro", uri=True)) as connection:
        connection.execute("BEGIN")
        with pytest.raises(ConfigurationError, match=r"may write, got one that may not.*mode=ro"):
            store.settle_within(lease, DONE, ttl=60, using=connection)


def test_a_temporary_table_of_the_same_name_is_not_taken_for_the_stores(store: SqliteStore) -> None:
    """The record would go where nobody sees it, and the effect be committed without it."""
    lease = take(store)
    with closing(connect(path_of(store))) as connection:
        connection.execute("CREATE TEMP TABLE celery_idempotency AS SELECT * FROM celery_idempotency")
        connection.execute(INSERT, ("effect",))
        settle(store, lease, connection)
        connection.commit()
    assert known(store).state is State.COMPLETED


def test_another_file_is_refused(store: SqliteStore, tmp_path: Path) -> None:
    """There the row could be committed, and the record not."""
    lease = take(store)
    for other in (tmp_path / "other.db", ":memory:"):
        with closing(connect(other)) as connection:
            connection.execute("CREATE TABLE names (name TEXT)")
            connection.execute(INSERT, ("effect",))
            with pytest.raises(ConfigurationError, match=r"to have the store's file .* open as its main database"):
                settle(store, lease, connection)
    assert known(store).state is State.IN_PROGRESS


def test_a_file_that_is_only_attached_is_refused(store: SqliteStore, tmp_path: Path) -> None:
    lease = take(store)
    with closing(connect(tmp_path / "other.db")) as connection:
        connection.execute("ATTACH DATABASE ? AS records", (path_of(store),))
        connection.execute("INSERT INTO records.names VALUES ('effect')")
        with pytest.raises(ConfigurationError, match="a crash may come between"):
            settle(store, lease, connection)
    assert known(store).state is State.IN_PROGRESS


def test_the_same_file_by_another_name_is_the_same_file(store: SqliteStore, sqlite_path: Path, tmp_path: Path) -> None:
    lease = take(store)
    (tmp_path / "link").symlink_to(tmp_path)
    with closing(connect(tmp_path / "link" / sqlite_path.name)) as connection, connection:
        connection.execute(INSERT, ("effect",))
        settle(store, lease, connection)
    assert known(store).state is State.COMPLETED


def test_what_the_caller_makes_of_rows_and_texts_is_left_as_it_is(store: SqliteStore) -> None:
    lease, lost = take(store), take(store, "lost")
    store.delete("lost")
    take(store, "lost")
    with closing(connect(path_of(store))) as connection, connection:
        connection.row_factory = lambda cursor, row: {"row": row}
        connection.text_factory = bytes
        connection.execute(INSERT, ("effect",))
        settle(store, lease, connection)
        with pytest.raises(LeaseLost):
            settle(store, lost, connection)
        assert connection.execute("SELECT name FROM names").fetchall() == [{"row": (b"effect",)}]
    assert known(store).payload == DONE.payload


def test_a_transaction_that_began_to_read_before_another_wrote_says_how_to_begin(store: SqliteStore) -> None:
    """SQLite lets nobody write who has seen what is no more; to wait would not help."""
    lease = take(store)
    with closing(connect(path_of(store), timeout=0)) as connection:
        connection.execute("BEGIN")
        connection.execute("SELECT * FROM names").fetchall()
        take(store, "another")
        with pytest.raises(StoreUnreachable, match="begin them with BEGIN IMMEDIATE"):
            settle(store, lease, connection)
        assert connection.in_transaction
        connection.rollback()
        connection.execute("BEGIN IMMEDIATE")
        settle(store, lease, connection)
        connection.commit()
    assert known(store).state is State.COMPLETED


def test_who_waits_behind_the_callers_transaction_is_served_when_that_ends(open_sqlite: OpenSqlite, store: Any) -> None:
    lease = take(store)
    waiting = open_sqlite(timeout=0.1)
    with closing(connect(path_of(store))) as connection:
        connection.execute(INSERT, ("effect",))
        settle(store, lease, connection)
        for _ in range(2):  # as the heartbeat, which tries again
            with pytest.raises(StoreUnreachable):
                waiting.renew([lease])
        connection.commit()
    assert waiting.renew([lease]) == [lease]
    assert isinstance(waiting.acquire(claim("another")), Lease)
