"""PostgreSQL over SQLAlchemy's drivers for coroutines: what is refused, and what `asettle` keeps till a run ends."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from typing import Any

import psycopg
import pytest
import sqlalchemy
from fastapi import FastAPI
from fastapi.responses import JSONResponse
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import (
    AsyncEngine,
    AsyncSession,
    async_scoped_session,
    async_sessionmaker,
    create_async_engine,
)
from sqlalchemy.pool import NullPool

from celery_idempotent import SettleNotCommitted, current_lease, idempotent
from celery_idempotent.errors import ConfigurationError, LeaseLost, StoreRefused
from celery_idempotent.http import IdempotencyMiddleware
from celery_idempotent.stores import State
from celery_idempotent.stores.postgres import PostgresStore
from celery_idempotent.stores.transactions import in_greenlet_of
from tests.support.http.inproc import request_asgi
from tests.support.postgres import PostgresServer
from tests.support.stores.benches import DONE, KEY, age, known, take
from tests.support.stores.postgres import with_schema

pytestmark = pytest.mark.thorough  # in `full` alone, as the contract over PostgreSQL

TTL = 600.0
ORDER = "idem:shop.charge::ORD-1"
Engines = Callable[..., AsyncEngine]


def text(statement: str) -> Any:
    return sqlalchemy.text(statement)


@pytest.fixture
def store(postgres_url: str) -> Iterator[PostgresStore]:
    store = PostgresStore.from_url(postgres_url)
    yield store
    store.close()


@pytest.fixture
def charges(postgres_url: str) -> str:
    """The name of a table of charges."""
    schema = re.search(r"schema=(\w+)", postgres_url)
    assert schema is not None
    with psycopg.connect(postgres_url.partition("?")[0]) as connection:
        connection.execute(f"create table {schema[1]}.charges (number text)".encode())
    return f"{schema[1]}.charges"


@pytest.fixture(params=["psycopg", "asyncpg"])
def engines(request: pytest.FixtureRequest, postgres_url: str) -> Engines:
    """A function that makes an engine, whose connections are closed as they come back."""

    def make(url: str = postgres_url, **options: Any) -> AsyncEngine:
        place = url.partition("?")[0].replace("postgresql:", f"postgresql+{request.param}:")
        return create_async_engine(place, poolclass=NullPool, **options)

    return make


@asynccontextmanager
async def begun(engine: AsyncEngine) -> AsyncIterator[AsyncSession]:
    async with AsyncSession(engine) as session, session.begin():
        yield session


async def settle(store: PostgresStore, lease: Any, using: Any) -> None:
    await in_greenlet_of(using, lambda opened: store.settle_within(lease, DONE, ttl=TTL, using=opened))


def count(store: PostgresStore, charges: str) -> int:
    return int(str(store._connections.run(f"select count(*) from {charges}")[0][0]))


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_autocommit_is_refused_wherever_it_is_set(store: PostgresStore, engines: Engines) -> None:
    lease = take(store)

    async def main() -> None:
        async with engines(isolation_level="AUTOCOMMIT").begin() as connection:
            with pytest.raises(ConfigurationError, match="AUTOCOMMIT"):
                await settle(store, lease, connection)
        async with begun(engines(isolation_level="AUTOCOMMIT")) as session:
            await session.execute(text("select 1"))
            with pytest.raises(ConfigurationError, match="AUTOCOMMIT"):
                await settle(store, lease, session)
        async with engines().connect() as connection:
            await connection.execution_options(isolation_level="AUTOCOMMIT")
            async with connection.begin():
                with pytest.raises(ConfigurationError, match="AUTOCOMMIT"):
                    await settle(store, lease, connection)

    asyncio.run(main())
    assert known(store).state is State.IN_PROGRESS


def test_a_transaction_that_an_error_has_broken_is_refused(store: PostgresStore, engines: Engines) -> None:
    lease = take(store)

    async def main() -> None:
        async with begun(engines()) as session:
            with pytest.raises(DBAPIError):
                await session.execute(text("select 1 / 0"))
            with pytest.raises(ConfigurationError, match="a statement before this one has failed"):
                await settle(store, lease, session)

    asyncio.run(main())


def test_another_database_and_who_may_not_write_are_refused(
    engines: Engines, own_postgres: Callable[..., PostgresServer]
) -> None:
    server = own_postgres()
    store = PostgresStore.from_url(with_schema(server.url()))
    with psycopg.connect(server.url(), autocommit=True) as connection:
        connection.execute("create database bare")
        connection.execute("create database twin")
        connection.execute("create role stranger login")
        with_schema(server.url("twin"))
    lease = take(store)

    async def main() -> None:
        for name in ("bare", "twin"):
            async with begun(engines(server.url(name))) as session:
                with pytest.raises(ConfigurationError, match=f"got the database '{name}' on 127.0.0.1:{server.port},"):
                    await settle(store, lease, session)
        async with begun(engines(server.url(user="stranger"))) as session:
            with pytest.raises(StoreRefused, match="rights on the table"):
                await settle(store, lease, session)

    asyncio.run(main())
    assert known(store).state is State.IN_PROGRESS
    store.close()


def test_a_session_that_writes_to_two_engines_is_refused(store: PostgresStore, engines: Engines) -> None:
    engine, other = engines(), engines()
    lease = take(store)

    async def main() -> None:
        async with begun(engine) as session:
            await session.execute(text("select 1"))
            await session.execute(text("select 1"), bind_arguments={"bind": other.sync_engine})
            with pytest.raises(ConfigurationError, match="one connection, got one of 2"):
                await settle(store, lease, session)
        async with begun(engine) as session:
            await settle(store, lease, session)
            with pytest.raises(ConfigurationError, match="one connection, got one of 2"):
                await session.execute(text("select 1"), bind_arguments={"bind": other.sync_engine})
            await session.rollback()

    asyncio.run(main())
    assert known(store).state is State.IN_PROGRESS


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
def test_under_a_stricter_level_a_record_that_changed_meanwhile_is_sqlalchemys_error(
    store: PostgresStore, engines: Engines, level: str
) -> None:
    """As with every row of the coroutine's own: the transaction is to be run again."""
    lease = take(store)

    async def main() -> None:
        engine = engines(isolation_level=level)
        async with AsyncSession(engine) as session:
            await session.execute(text("select 1"))
            store.renew([lease])
            with pytest.raises(DBAPIError) as refused:
                await settle(store, lease, session)
            assert getattr(refused.value.orig, "sqlstate", None) == "40001"
        async with begun(engine) as session:
            await settle(store, lease, session)

    asyncio.run(main())
    assert known(store).state is State.COMPLETED


# -- a coroutine and its run -------------------------------------------------------------------------------------------


class Shop:
    """A guarded coroutine that charges an order and settles in the same transaction.

    Arguments:
        after: What is awaited with the session once it has settled; else that is committed.
    """

    def __init__(
        self,
        store: PostgresStore,
        engine: AsyncEngine,
        charges: str,
        after: Callable[[AsyncSession], Any] | None = None,
    ) -> None:
        self.engine, self.insert, self.after = engine, text(f"insert into {charges} values ('one')"), after
        self.charge = idempotent(store=store, key="order", name="shop.charge")(self.body)

    async def body(self, order: str) -> str:
        lease = current_lease()
        assert lease is not None
        async with AsyncSession(self.engine) as session:
            await session.execute(self.insert)
            await lease.asettle({"charged": order}, using=session)
            await (session.commit() if self.after is None else self.after(session))
        return "what is returned does not count"


def test_what_was_settled_is_the_result_of_this_call_and_of_duplicates(
    store: PostgresStore, engines: Engines, charges: str
) -> None:
    async def main() -> list[object]:
        shop = Shop(store, engines(), charges)
        return [await shop.charge("ORD-1"), await shop.charge("ORD-1")]

    assert asyncio.run(main()) == [{"charged": "ORD-1"}] * 2
    assert count(store, charges) == 1


def test_without_a_commit_neither_is_there(store: PostgresStore, engines: Engines, charges: str) -> None:
    async def main() -> None:
        with pytest.raises(SettleNotCommitted):
            await Shop(store, engines(), charges, lambda session: session.rollback()).charge("ORD-1")
        with pytest.raises(SettleNotCommitted):  # as it is closed
            await Shop(store, engines(), charges, lambda session: asyncio.sleep(0)).charge("ORD-1")

    asyncio.run(main())
    assert (known(store, ORDER).state, count(store, charges)) == (State.RELEASED, 0)


@pytest.mark.parametrize("committed", [False, True])
def test_who_is_cancelled_has_both_or_neither(
    store: PostgresStore, engines: Engines, charges: str, committed: bool
) -> None:
    async def main() -> None:
        settled = asyncio.Event()

        async def after(session: AsyncSession) -> None:
            if committed:
                await session.commit()
            settled.set()
            await asyncio.sleep(60)

        call = asyncio.create_task(Shop(store, engines(), charges, after).charge("ORD-1"))
        await settled.wait()
        call.cancel()
        await asyncio.wait([call])

    asyncio.run(main())
    expected = State.COMPLETED if committed else State.RELEASED
    assert (known(store, ORDER).state, count(store, charges)) == (expected, int(committed))


def test_who_was_taken_over_has_its_rows_rolled_back(store: PostgresStore, engines: Engines, charges: str) -> None:
    async def main() -> None:
        shop = Shop(store, engines(), charges)
        ran: list[Any] = []
        body = shop.body

        @idempotent(store=store, key="order", name="shop.charge", lease_ttl="60s")
        async def charge(order: str) -> object:
            if not ran:
                ran.append(current_lease())
                age(store, ORDER, 61)
                assert await charge("ORD-1") == {"charged": "ORD-1"}
            return await body(order)

        assert await charge("ORD-1") == {"charged": "ORD-1"}
        assert ran[0].lost

    asyncio.run(main())
    assert count(store, charges) == 1


def test_a_transaction_that_an_earlier_call_left_open_is_refused(
    store: PostgresStore, engines: Engines, charges: str
) -> None:
    async def main() -> None:
        async with AsyncSession(engines(isolation_level="REPEATABLE READ")) as session:

            @idempotent(store=store, key="order", name="shop.charge")
            async def charge(order: str) -> None:
                lease = current_lease()
                assert lease is not None
                if not session.in_transaction():
                    await session.execute(text(f"select * from {charges}"))
                    raise ValueError("no")
                await lease.asettle(order, using=session)

            with pytest.raises(ValueError, match="no"):
                await charge("ORD-1")
            with pytest.raises(ConfigurationError, match="an earlier task may have left it open"):
                await charge("ORD-1")

    asyncio.run(main())


def test_a_run_that_repeats_its_transaction_after_the_commit_is_told_so(
    store: PostgresStore, engines: Engines, charges: str
) -> None:
    async def main() -> object:
        async def again(session: AsyncSession) -> None:
            await session.commit()
            await session.execute(text(f"insert into {charges} values ('again')"))
            lease = current_lease()
            assert lease is not None
            with pytest.raises(LeaseLost, match="earlier transaction"):
                await lease.asettle("again", using=session)

        return await Shop(store, engines(), charges, again).charge("ORD-1")

    assert asyncio.run(main()) == {"charged": "ORD-1"}
    assert count(store, charges) == 1


def test_of_what_may_be_passed_each_leads_to_the_transaction(
    store: PostgresStore, engines: Engines, charges: str
) -> None:
    async def opened(engine: AsyncEngine, kind: str, work: Callable[[Any], Coroutine[Any, Any, None]]) -> None:
        if kind == "connection":
            async with engine.begin() as connection:
                await work(connection)
        else:
            sessions = async_scoped_session(async_sessionmaker(engine), asyncio.current_task)
            async with sessions.begin():
                await work(sessions)
            await sessions.remove()

    @idempotent(store=store, key="kind", fingerprint=False, name="shop.charge")
    async def charge(kind: str, engine: AsyncEngine) -> object:
        async def work(using: Any) -> None:
            lease = current_lease()
            assert lease is not None
            await lease.asettle(kind, using=using)

        await opened(engine, kind, work)
        return None

    async def main() -> list[object]:
        return [await charge(kind, engines()) for kind in ("connection", "scoped_session")]

    assert asyncio.run(main()) == ["connection", "scoped_session"]


def test_each_way_refuses_what_is_the_others(store: PostgresStore, engines: Engines) -> None:
    @idempotent(store=store, key="order", fingerprint=False, name="shop.charge")
    async def charge(order: str, using: Any, *, waits: bool) -> None:
        lease = current_lease()
        assert lease is not None
        if waits:
            await lease.asettle(order, using=using)
        else:
            lease.settle(order, using=using)

    async def main() -> None:
        async with begun(engines()) as session:
            with pytest.raises(ConfigurationError, match=r"`await lease\.asettle\(result, using=session\)`"):
                await charge("ORD-1", session, waits=False)
            for using in ("default", session.sync_session, engines()):
                with pytest.raises(ConfigurationError, match=r"asettle: .* is for settle\(\), without await"):
                    await charge("ORD-1", using, waits=True)

    asyncio.run(main())


def test_the_loop_goes_on_while_a_process_learns_where_its_store_is(
    store: PostgresStore, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = take(store)

    async def main() -> None:
        loop, find_home = asyncio.get_running_loop(), store._find_home

        def find() -> str:
            asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop).result(30)
            return find_home()

        monkeypatch.setattr(store, "_find_home", find)
        async with begun(engines()) as session:
            await settle(store, lease, session)

    asyncio.run(main())
    assert known(store, KEY).state is State.COMPLETED


# -- a request ---------------------------------------------------------------------------------------------------------


def test_a_view_of_fastapi_commits_its_rows_and_its_response_together(
    postgres_url: str, store: PostgresStore, engines: Engines, charges: str
) -> None:
    app, engine, commits = FastAPI(), engines(), [False, True]
    app.add_middleware(IdempotencyMiddleware, store=postgres_url, scope=None)

    @app.post("/orders")
    async def place_order() -> JSONResponse:
        lease = current_lease()
        assert lease is not None
        response = JSONResponse({"id": 1}, 201)
        async with AsyncSession(engine) as session:
            await session.execute(text(f"insert into {charges} values ('one')"))
            await lease.asettle(response, using=session)
            if commits.pop(0):
                await session.commit()
        return response

    async def main() -> list[tuple[int, str | None]]:
        replies = [await request_asgi(app) for _ in range(3)]
        return [(reply.status, reply.header("idempotent-replayed")) for reply in replies]

    assert asyncio.run(main()) == [(500, None), (201, None), (201, "true")]
    assert count(store, charges) == 1


def test_a_connection_of_a_driver_that_is_not_sqlalchemys_is_refused_with_what_to_use(postgres_url: str) -> None:
    store = PostgresStore.from_url(postgres_url)
    lease = take(store)

    async def main() -> None:
        async with await psycopg.AsyncConnection.connect(postgres_url.partition("?")[0]) as connection:
            with pytest.raises(ConfigurationError, match=r"got psycopg\..*`await lease\.asettle"):
                store.settle_within(lease, DONE, ttl=TTL, using=connection)

    asyncio.run(main())
    store.close()
