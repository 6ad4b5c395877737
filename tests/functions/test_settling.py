"""A function that settles within its caller's own transaction: effect and record, or neither."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest

from celery_idempotent import SettleNotCommitted, current_lease, idempotent
from celery_idempotent.core.history import history
from celery_idempotent.errors import ConfigurationError, LeaseLost
from celery_idempotent.events import Event
from celery_idempotent.stores import State, Store, open_store
from tests.support.functions.calls import names
from tests.support.stores.benches import age, known
from tests.support.waiting import wait_until

KEY = "idem:shop.charge::ORD-1"
Connect = Callable[[], AbstractContextManager[Any]]


@pytest.fixture(params=["sqlite_url", pytest.param("postgres_url", marks=pytest.mark.thorough)])
def place(request: pytest.FixtureRequest, sqlite_path: Path) -> Iterator[tuple[Store, Connect]]:
    """A store, and a function that opens a connection to its database with a table of charges."""
    url: str = request.getfixturevalue(request.param)
    store = open_store(url)

    @contextmanager
    def connect() -> Iterator[Any]:
        if url.startswith("sqlite"):
            with closing(sqlite3.connect(sqlite_path)) as connection, connection:
                yield connection
        else:
            database, schema = url.split("?")[0], url.split("schema=")[1].split("&")[0]
            with psycopg.connect(database, options=f"-c search_path={schema}") as connection:
                yield connection

    with connect() as connection:
        connection.execute("create table charges (number text)")
    yield store, connect
    history.flush(10.0)
    store.close()


def charges(connect: Connect) -> int:
    with connect() as connection:
        return int(connection.execute("select count(*) from charges").fetchone()[0])


def charging(store: Store, connect: Connect, after: Callable[[Any], object] = lambda connection: None) -> Any:
    @idempotent(store=store, key="order", name="shop.charge")
    def charge(order: str) -> str:
        lease = current_lease()
        assert lease is not None
        with connect() as connection:
            connection.execute("insert into charges values ('one')")
            lease.settle({"charged": order}, using=connection)
            after(connection)
        return "what is returned does not count"

    return charge


def test_what_was_settled_is_the_result_of_this_call_and_of_duplicates(
    place: tuple[Store, Connect], heard: list[Event]
) -> None:
    charge = charging(*place)
    assert charge("ORD-1") == charge("ORD-1") == {"charged": "ORD-1"}
    assert charges(place[1]) == 1
    assert known(place[0], KEY).state is State.COMPLETED
    assert names(heard) == ["Acquired", "Completed", "Replayed"]


def test_what_was_rolled_back_is_not_recorded(place: tuple[Store, Connect], heard: list[Event]) -> None:
    def fail(connection: Any) -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        charging(*place, fail)("ORD-1")
    assert charges(place[1]) == 0
    assert known(place[0], KEY).state is State.RELEASED
    assert charging(*place)("ORD-1") == {"charged": "ORD-1"}
    assert names(heard) == ["Acquired", "Released", "Acquired", "Completed"]


def test_what_was_not_committed_is_an_error(place: tuple[Store, Connect]) -> None:
    with pytest.raises(SettleNotCommitted):
        charging(*place, lambda connection: connection.rollback())("ORD-1")
    assert charges(place[1]) == 0
    assert known(place[0], KEY).state is State.RELEASED


@pytest.mark.parametrize("ending", ["returns", "raises", "raises for good"])
def test_a_commit_that_comes_while_its_run_ends_is_its_success(
    place: tuple[Store, Connect], heard: list[Event], monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    """As where the network was cut after the commit was sent; the result is this run's, though none is kept."""
    store, connect = place
    under_way = ExitStack()

    def after_the_commit(verb: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            under_way.close()
            return verb(*args, **options)

        return call

    monkeypatch.setattr(store, "release", after_the_commit(store.release))
    monkeypatch.setattr(store, "settle", after_the_commit(store.settle))
    final = (ConnectionError,) if ending == "raises for good" else ()

    @idempotent(store=store, key="order", name="shop.charge", store_result=False, remember_failures=final)
    def charge(order: str) -> str:
        lease = current_lease()
        assert lease is not None
        connection = under_way.enter_context(connect())
        connection.execute("insert into charges values ('one')")
        lease.settle(order, using=connection)
        if ending != "returns":
            raise ConnectionError("no answer to the commit")
        return order

    assert charge("ORD-1") == "ORD-1"
    assert charges(connect) == 1
    assert known(store, KEY).state is State.COMPLETED
    assert names(heard) == ["Acquired", "Completed"]


@pytest.mark.parametrize("apart", ["savepoint", "commit"])
def test_where_the_effect_was_committed_without_its_record_the_error_does_not_deny_it(
    place: tuple[Store, Connect], apart: str
) -> None:
    store, connect = place

    @idempotent(store=store, key="order", name="shop.charge")
    def charge(order: str) -> None:
        lease = current_lease()
        assert lease is not None
        with connect() as connection:
            connection.execute("insert into charges values ('one')")
            if apart == "commit":
                connection.commit()
                connection.execute("insert into charges values ('another')")
            connection.execute("savepoint audit")
            lease.settle(order, using=connection)
            connection.execute("rollback to savepoint audit" if apart == "savepoint" else "rollback")

    with pytest.raises(SettleNotCommitted, match=r"not committed: there is no record.* repeats what was committed"):
        charge("ORD-1")
    assert charges(connect) == 1
    assert known(store, KEY).state is State.RELEASED


def test_a_body_that_outlasts_its_settled_result_has_succeeded(place: tuple[Store, Connect]) -> None:
    """The lease's record would be there for longer."""
    store, connect = place

    @idempotent(store=store, key="order", name="shop.charge", result_ttl=0.5, failure_ttl=0.5)
    def charge(order: str) -> str:
        lease = current_lease()
        assert lease is not None
        with connect() as connection:
            connection.execute("insert into charges values ('one')")
            lease.settle(order, using=connection)
        wait_until(lambda: store.get(KEY) is None)
        return order

    assert charge("ORD-1") == "ORD-1"
    assert charges(connect) == 1


def test_who_lost_its_lease_cannot_commit(place: tuple[Store, Connect]) -> None:
    store, connect = place
    lost: list[LeaseLost] = []

    @idempotent(store=store, key="order", name="shop.charge")
    def charge(order: str) -> object:
        lease = current_lease()
        assert lease is not None
        if lost_already:
            return "theirs"
        lost_already.append(1)
        age(store, KEY, 61)
        charge(order)
        with connect() as connection:
            connection.execute("insert into charges values ('one')")
            try:
                lease.settle("mine", using=connection)
            except LeaseLost as error:
                lost.append(error)
                raise
        return "mine"

    lost_already: list[int] = []
    assert charge("ORD-1") == "theirs"
    assert len(lost) == 1
    assert charges(connect) == 0


def test_a_transaction_that_an_earlier_run_left_open_is_refused_and_the_lease_is_not_lost(
    place: tuple[Store, Connect],
) -> None:
    store, connect = place
    with connect() as connection:

        @idempotent(store=store, key="order", name="shop.charge")
        def charge(order: str) -> str:
            lease = current_lease()
            assert lease is not None
            if not runs:
                runs.append(1)
                sqlite = isinstance(connection, sqlite3.Connection)
                connection.execute("begin" if sqlite else "set transaction isolation level serializable")
                connection.execute("select * from charges").fetchall()
                raise ValueError("no")
            connection.execute("insert into charges values ('one')" if rolled_back else "select 1")
            lease.settle(order, using=connection)
            connection.commit()
            return order

        rolled_back = False
        runs: list[int] = []
        with pytest.raises(ValueError, match="no"):
            charge("ORD-1")
        with pytest.raises(ConfigurationError, match="an earlier task may have left it open"):
            charge("ORD-1")
        connection.rollback()
        rolled_back = True
        assert charge("ORD-1") == "ORD-1"


def test_a_coroutine_settles_in_the_thread_that_has_its_connection(place: tuple[Store, Connect]) -> None:
    store, connect = place

    @idempotent(store=store, key="order", name="shop.charge")
    async def charge(order: str) -> object:
        def work() -> None:
            lease = current_lease()
            assert lease is not None
            with connect() as connection:
                connection.execute("insert into charges values ('one')")
                lease.settle({"charged": order}, using=connection)

        await asyncio.to_thread(work)
        return None

    async def main() -> list[object]:
        return [await charge("ORD-1"), await charge("ORD-1")]

    assert asyncio.run(main()) == [{"charged": "ORD-1"}] * 2
    assert charges(connect) == 1
