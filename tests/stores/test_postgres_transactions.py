"""PostgreSQL: what is settled within the task's own transaction counts with it or not at all."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from functools import partial
from time import monotonic
from typing import Any

import psycopg
import pytest
import sqlalchemy
import wrapt
from psycopg.rows import dict_row
from psycopg.types.json import JsonbDumper, JsonLoader
from sqlalchemy.orm import Session
from sqlalchemy.pool import NullPool

from celery_idempotent.errors import ConfigurationError, LeaseLost, StoreRefused, StoreUnreachable
from celery_idempotent.stores import HistoryEntry, Lease, Reason, Refusal, Release, State, Verdict
from celery_idempotent.stores.postgres import PostgresStore, connections
from celery_idempotent.stores.postgres.records import stored
from tests.support.postgres import PostgresServer
from tests.support.stores.benches import DONE, KEY, age, claim, known, take
from tests.support.stores.django_databases import django_database
from tests.support.stores.postgres import begun, run, with_schema
from tests.support.waiting import wait_until

TTL = 600.0


@pytest.fixture
def store(postgres_url: str) -> Iterator[PostgresStore]:
    store = PostgresStore.from_url(postgres_url)
    yield store
    store.close()


@pytest.fixture
def database(postgres_url: str) -> str:
    """The URL of the database without what is the store's."""
    return re.sub(r"[?&]schema=\w+", "", postgres_url)


@pytest.fixture
def business(database: str, postgres_url: str) -> Iterator[psycopg.Connection[Any]]:
    """A connection of the task's own, with a table `orders` and a transaction open."""
    schema = re.search(r"schema=(\w+)", postgres_url)
    assert schema is not None
    with psycopg.connect(database) as connection:
        connection.execute(f"set search_path = {schema[1]}; create table orders (id text)".encode())
        connection.commit()
        connection.execute("show server_version")
        yield connection
        connection.rollback()


def effects(store: PostgresStore) -> int:
    rows = run(store, "select count(*) from {schema}.orders")
    return int(str(rows[0][0]))


def order(connection: psycopg.Connection[Any]) -> None:
    connection.execute("insert into orders values ('ORD-1')")


def test_the_record_and_the_effect_are_committed_together(
    store: PostgresStore, business: psycopg.Connection[Any]
) -> None:
    lease = take(store, fingerprint="f", task_id="a")
    order(business)
    store.settle_within(lease, DONE, ttl=TTL, using=business)
    assert (known(store).state, effects(store)) == (State.IN_PROGRESS, 0)
    business.commit()
    record = known(store)
    assert (record.state, record.payload, record.fence) == (State.COMPLETED, DONE.payload, lease.fence)
    assert (record.owner, record.task_id, record.fingerprint) == ("", "a", "f")
    assert TTL - 30 < record.retention <= TTL
    assert effects(store) == 1


def test_a_rollback_leaves_the_lease_as_it_was(store: PostgresStore, business: psycopg.Connection[Any]) -> None:
    lease = take(store)
    order(business)
    store.settle_within(lease, DONE, ttl=TTL, using=business)
    business.rollback()
    assert (known(store).state, known(store).owner, effects(store)) == (State.IN_PROGRESS, lease.owner, 0)
    assert store.renew([lease]) == []
    store.settle(lease, DONE, ttl=TTL)


def test_a_connection_that_has_begun_no_transaction_is_refused_and_the_error_says_what_to_do(
    store: PostgresStore, business: psycopg.Connection[Any]
) -> None:
    """The record would be committed apart from what the task wrote before, and a crash between would repeat that."""
    lease = take(store)
    business.rollback()
    with business.transaction():
        order(business)
    for using in (business, wrapt.ObjectProxy(business)):
        with pytest.raises(ConfigurationError, match=r"begun none.*or use `with connection\.transaction\(\):`"):
            store.settle_within(lease, DONE, ttl=TTL, using=using)
    with business.pipeline(), pytest.raises(ConfigurationError, match="begun none"):
        store.settle_within(lease, DONE, ttl=TTL, using=business)
    assert known(store).state is State.IN_PROGRESS
    with business.transaction():  # before the first row
        store.settle_within(lease, DONE, ttl=TTL, using=business)
        order(business)
        assert known(store).state is State.IN_PROGRESS
    assert (known(store).state, effects(store)) == (State.COMPLETED, 2)


def test_a_transaction_whose_begin_waits_in_a_pipeline_is_open(
    store: PostgresStore, business: psycopg.Connection[Any]
) -> None:
    lease = take(store)
    business.rollback()
    with business.pipeline():
        order(business)
        store.settle_within(lease, DONE, ttl=TTL, using=business)
    assert known(store).state is State.IN_PROGRESS
    business.commit()
    assert (known(store).state, effects(store)) == (State.COMPLETED, 1)


def test_a_connection_in_autocommit_mode_settles_within_a_transaction_block(
    store: PostgresStore, database: str
) -> None:
    lease = take(store)
    with psycopg.connect(database, autocommit=True, row_factory=dict_row) as connection:
        with connection.transaction():
            store.settle_within(lease, DONE, ttl=TTL, using=connection)
            assert known(store).state is State.IN_PROGRESS
        assert known(store).state is State.COMPLETED


def test_autocommit_is_refused_and_the_error_says_why(store: PostgresStore, database: str) -> None:
    lease = take(store)
    with (
        psycopg.connect(database, autocommit=True) as connection,
        pytest.raises(ConfigurationError, match="autocommit mode"),
    ):
        store.settle_within(lease, DONE, ttl=TTL, using=connection)
    with pytest.raises(ConfigurationError, match="closed"):
        store.settle_within(lease, DONE, ttl=TTL, using=connection)
    assert known(store).state is State.IN_PROGRESS


def test_a_pipeline_in_autocommit_mode_is_no_transaction(store: PostgresStore, database: str) -> None:
    """What is sent at once is committed at once, before anybody has read that the lease is lost."""
    lease = take(store)
    with psycopg.connect(database, autocommit=True) as connection:
        with connection.pipeline():
            connection.execute("select 1")
            with pytest.raises(ConfigurationError, match="autocommit mode"):
                store.settle_within(lease, DONE, ttl=TTL, using=connection)
        assert known(store).state is State.IN_PROGRESS
        with connection.pipeline(), connection.transaction():
            connection.execute("select 1")
            store.settle_within(lease, DONE, ttl=TTL, using=connection)
            assert known(store).state is State.IN_PROGRESS
    assert known(store).state is State.COMPLETED


def test_a_transaction_that_has_failed_is_refused(store: PostgresStore, business: psycopg.Connection[Any]) -> None:
    lease = take(store)
    with pytest.raises(psycopg.errors.DivisionByZero):
        business.execute("select 1 / 0")
    with pytest.raises(ConfigurationError, match="roll it back"):
        store.settle_within(lease, DONE, ttl=TTL, using=business)


@pytest.mark.parametrize("using", [None, 5, object()], ids=["None", "a number", "an object"])
def test_what_is_no_connection_is_refused(store: PostgresStore, using: object) -> None:
    with pytest.raises(ConfigurationError, match="expected using= to be a connection"):
        store.settle_within(take(store), DONE, ttl=TTL, using=using)


def test_a_holder_that_was_taken_over_is_refused_whatever_the_encoding_of_its_connection(
    store: PostgresStore, database: str
) -> None:
    """With SQL_ASCII psycopg gives bytes for texts; what is not understood must not pass for settled."""
    held = take(store)
    store.delete(KEY)
    lease = take(store)
    with begun(database, client_encoding="sql_ascii") as connection:
        with pytest.raises(LeaseLost):
            store.settle_within(held, DONE, ttl=TTL, using=connection)
        store.settle_within(lease, DONE, ttl=TTL, using=connection)
    assert known(store).state is State.COMPLETED


def test_what_the_callers_connection_has_registered_changes_neither_what_is_written_nor_what_is_read(
    store: PostgresStore, database: str
) -> None:
    held = take(store)
    store.delete(KEY)
    lease = take(store)
    with begun(database) as connection:
        for each in (bytes, int, str):
            connection.adapters.register_dumper(each, JsonbDumper)
        connection.adapters.register_loader("text", JsonLoader)
        with pytest.raises(LeaseLost):
            store.settle_within(held, DONE, ttl=TTL, using=connection)
        store.settle_within(lease, DONE, ttl=TTL, using=connection)
    assert (known(store).state, known(store).payload) == (State.COMPLETED, DONE.payload)


def test_a_holder_that_was_taken_over_writes_nothing_and_its_transaction_lives(
    store: PostgresStore, business: psycopg.Connection[Any]
) -> None:
    zombie = take(store)
    order(business)
    age(store, KEY, 61)
    lease = take(store, redelivered=True)
    with pytest.raises(LeaseLost):
        store.settle_within(zombie, DONE, ttl=TTL, using=business)
    assert business.execute("select 1").fetchone() == (1,)
    business.rollback()
    assert (known(store).owner, effects(store)) == (lease.owner, 0)


@pytest.mark.parametrize("end", ["settled", "released", "forgotten and taken"])
def test_a_holder_whose_record_went_on_without_it_writes_nothing(
    store: PostgresStore, business: psycopg.Connection[Any], end: str
) -> None:
    zombie = take(store)
    if end == "settled":
        age(store, KEY, 61)
        store.settle(take(store, redelivered=True), DONE, ttl=TTL)
    elif end == "released":
        assert store.release(zombie, Release(Reason.SHUTDOWN))
    else:
        store.delete(KEY)
        take(store)
    before = known(store)
    with pytest.raises(LeaseLost):
        store.settle_within(zombie, DONE, ttl=TTL, using=business)
    business.commit()
    assert (known(store).state, known(store).fence) == (before.state, before.fence)


def test_a_holder_whose_lease_ran_out_settles_if_nobody_took_it_over(
    store: PostgresStore, business: psycopg.Connection[Any]
) -> None:
    lease = take(store)
    age(store, KEY, 61)
    store.settle_within(lease, DONE, ttl=TTL, using=business)
    answer = store.acquire(claim(redelivered=True))  # whoever would take it over meets the open transaction
    assert isinstance(answer, Refusal)
    assert answer.verdict is Verdict.CONFLICT
    business.commit()
    assert known(store).state is State.COMPLETED


def test_an_outcome_whose_record_the_store_lost_is_settled_all_the_same(
    store: PostgresStore, business: psycopg.Connection[Any]
) -> None:
    lease = take(store, fingerprint="f")
    store.delete(KEY)
    store.settle_within(lease, DONE, ttl=TTL, using=business)
    business.commit()
    assert (known(store).state, known(store).fence, known(store).fingerprint) == (State.COMPLETED, lease.fence, "f")


def test_settling_twice_within_a_transaction_is_settling(
    store: PostgresStore, business: psycopg.Connection[Any]
) -> None:
    lease = take(store)
    store.settle_within(lease, DONE, ttl=TTL, using=business)
    store.settle_within(lease, DONE, ttl=TTL, using=business)
    business.commit()
    business.execute("select 1")
    store.settle_within(lease, DONE, ttl=TTL, using=business)
    store.settle(lease, DONE, ttl=TTL)


def test_a_transaction_that_settles_a_lost_record_keeps_no_other_lease_from_being_renewed(
    store: PostgresStore, database: str
) -> None:
    """A process renews all its leases in one statement: what that waits for, all of them wait for."""
    lost, other = take(store, "lost"), take(store, "other")
    store.delete("lost")
    with begun(database) as connection:
        store.settle_within(lost, DONE, ttl=TTL, using=connection)
        assert store.renew([lost, other]) == []
    assert known(store, "lost").state is State.COMPLETED


def test_claims_do_not_wait_for_a_transaction_that_settles_and_renewals_count_as_held(
    store: PostgresStore, business: psycopg.Connection[Any]
) -> None:
    lease, other = take(store), take(store, "another")
    store.settle_within(lease, DONE, ttl=TTL, using=business)
    with ThreadPoolExecutor(8) as crowd:  # each would wait for the 1.5 s of lock_timeout, and then fail
        asked = [crowd.submit(store.acquire, claim(task_id=f"t{number}")) for number in range(40)]
        answers = [each.result(30) for each in asked]
    assert {(a.verdict, a.record.owner) for a in answers if isinstance(a, Refusal)} == {(Verdict.CONFLICT, lease.owner)}
    assert not any(isinstance(answer, Lease) for answer in answers)
    age(store, "another", 30)
    assert store.renew([lease, other]) == []
    assert known(store, "another").remaining > 40  # the one that is free was renewed
    business.rollback()
    assert store.renew([lease]) == []


@pytest.mark.nightly
@pytest.mark.parametrize("record", ["forgotten", "expired"])
@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_nothing_waits_for_a_transaction_that_settles_a_record_which_is_gone(
    store: PostgresStore, business: psycopg.Connection[Any], record: str, end: str
) -> None:
    """Claims that did so would keep the renewals of all leases waiting, until these have run out."""
    lease, other = take(store), take(store, "another")
    late = replace(lease, claim=replace(lease.claim, revive=False))
    if record == "forgotten":
        store.delete(KEY)
    else:
        age(store, KEY, 10_000)
    store.settle_within(lease, DONE, ttl=TTL, using=business)
    with ThreadPoolExecutor(8) as crowd:
        asked = [crowd.submit(store.acquire, claim(task_id=f"t{number}")) for number in range(40)]
        answers = [each.result(30) for each in asked]
        assert {a.verdict for a in answers if isinstance(a, Refusal)} == {Verdict.CONFLICT}
        assert not any(isinstance(answer, Lease) for answer in answers)
        assert {a.record.state for a in answers if isinstance(a, Refusal)} == {State.IN_PROGRESS}
        age(store, "another", 30)
        asked = [crowd.submit(store.acquire, claim(task_id=f"t{number}")) for number in range(40)]
        settling = crowd.submit(store.settle, lease, DONE, ttl=TTL)
        assert store.renew([lease, other]) == []
        assert store.renew([late, other]) == [late]
        assert known(store, "another").remaining > 40
        with pytest.raises(StoreUnreachable, match="open transaction that settles it"):
            settling.result(30)
        assert {type(each.result(30)) for each in asked} == {Refusal}
    getattr(business, end)()
    answer = store.acquire(claim(task_id="next"))
    if end == "commit":
        assert isinstance(answer, Refusal)
        assert answer.verdict is Verdict.COMPLETED
        assert store.renew([late]) == [late]
    else:
        assert isinstance(answer, Lease)
        assert answer.fence > lease.fence
        business.execute("select 1")
        with pytest.raises(LeaseLost):
            store.settle_within(lease, DONE, ttl=TTL, using=business)


@pytest.mark.thorough
def test_a_shutdown_does_not_wait_for_a_transaction_that_settles(
    store: PostgresStore, business: psycopg.Connection[Any]
) -> None:
    """The worker asks again a moment later."""
    lease = take(store)
    store.settle_within(lease, DONE, ttl=TTL, using=business)
    assert not store.mark_shutdown(lease)
    business.rollback()
    assert store.mark_shutdown(lease)


def test_while_a_transaction_settles_a_release_lets_the_lease_run_out_and_a_settle_is_told_to_wait(
    store: PostgresStore, business: psycopg.Connection[Any]
) -> None:
    lease = take(store)
    store.settle_within(lease, DONE, ttl=TTL, using=business)
    assert store.release(lease, Release(Reason.CRASHED))
    with pytest.raises(StoreUnreachable, match="open transaction"):
        store.settle(lease, DONE, ttl=TTL)
    with pytest.raises(StoreUnreachable, match="open transaction"):
        store.delete(KEY)
    business.rollback()
    assert known(store).state is State.IN_PROGRESS
    assert store.release(lease, Release(Reason.CRASHED))
    assert known(store).state is State.RELEASED


def test_a_release_waits_a_moment_for_the_rollback_of_a_holder_that_just_died(
    store: PostgresStore, business: psycopg.Connection[Any]
) -> None:
    lease = take(store)
    store.settle_within(lease, DONE, ttl=TTL, using=business)
    with ThreadPoolExecutor(1) as thread:
        asked = thread.submit(store.release, lease, Release(Reason.CRASHED))
        wait_until(lambda: asked.running(), message="the release to begin")
        business.rollback()
        assert asked.result(30)
    assert wait_until(lambda: known(store).state is State.RELEASED, message="the lease to be released")


def test_who_writes_over_an_older_record_waits_for_what_its_holder_is_about_to_commit(
    store: PostgresStore, business: psycopg.Connection[Any]
) -> None:
    """As where a promoted standby does not know of a take-over, and both runs go on."""
    holder = take(store)
    age(store, KEY, 61)
    store.settle_within(holder, DONE, ttl=TTL, using=business)
    later = Lease(claim(), holder.fence + 1)
    with ThreadPoolExecutor(1) as thread:
        asked = thread.submit(store.settle, later, replace(DONE, payload=b"json:43"), ttl=TTL)
        assert wait([asked], 0.3).not_done
        business.commit()
        with pytest.raises(LeaseLost):
            asked.result(30)
    assert (known(store).fence, known(store).payload) == (holder.fence, DONE.payload)


def test_a_holder_that_was_taken_over_does_not_wait_for_the_transaction_of_the_next(
    store: PostgresStore, business: psycopg.Connection[Any], database: str
) -> None:
    zombie = take(store)
    age(store, KEY, 61)
    lease = take(store, redelivered=True)
    store.settle_within(lease, DONE, ttl=TTL, using=business)
    with begun(database) as late:
        with pytest.raises(LeaseLost):  # and not the error of a lock_timeout, which would break the transaction
            store.settle_within(zombie, DONE, ttl=TTL, using=late)
        assert late.execute("select 1").fetchone() == (1,)
    business.commit()
    assert known(store).state is State.COMPLETED


def test_a_renewal_that_meets_a_claim_waits_for_it_and_renews(store: PostgresStore, database: str) -> None:
    """What a claim has locked for a moment is not what an open transaction holds: to skip it would be a lie."""
    lease = take(store)
    age(store, KEY, 50)
    queue = store._schema.render("select {queue}").replace("c_key", "%s")
    with psycopg.connect(database) as claiming, ThreadPoolExecutor(1) as thread:
        claiming.execute(queue.encode(), (KEY,))
        claiming.execute(store._schema.render("select from {table} where key = %s for update").encode(), (KEY,))
        asked = thread.submit(store.renew, [lease])
        waits = "select 1 from pg_stat_activity where wait_event = 'advisory' and query like %s"
        table = f"%{store._place.schema}%"
        wait_until(lambda: run(store, waits, table) or asked.done(), message="the renewal to wait")
        claiming.commit()
        assert asked.result(30) == []
    assert known(store).remaining > 40


@pytest.mark.parametrize("claimed", [True, False])
def test_a_lock_on_one_row_keeps_no_other_lease_from_being_renewed(
    store: PostgresStore, business: psycopg.Connection[Any], claimed: bool
) -> None:
    """As of an operator who has rows open: claims wait for them, and have the turn for longer than a renewal waits."""
    keys = ["one", "two", "three"]
    leases = [take(store, key) for key in [*keys, "another"]]
    age(store, "another", 50)
    queue = store._schema.render("select {queue}").replace("c_key", "%s")
    for key in keys:
        if claimed:
            business.execute(queue.encode(), (stored(key),))
        business.execute("select 1 from idempotency where key = %s for update", (stored(key),))
    began = monotonic()
    with pytest.raises(StoreUnreachable, match=r"has locked 3 of the 4 records .* as 'one'"):
        store.renew(leases)  # nobody is to trust a lease that was not extended
    assert monotonic() - began < 2 * 1.5  # one lock_timeout, and not one for each row
    assert known(store, "another").remaining > 40
    business.rollback()
    assert store.renew(leases) == []
    assert all(known(store, key).remaining > 40 for key in keys)


@pytest.mark.parametrize("table", ["table", "history", "meta"])
def test_while_a_table_is_locked_no_session_waits_longer_than_its_caller(
    store: PostgresStore,
    business: psycopg.Connection[Any],
    database: str,
    monkeypatch: pytest.MonkeyPatch,
    table: str,
) -> None:
    """As by VACUUM FULL: each try would leave a session behind, until the server has no room for others."""
    monkeypatch.setattr(connections, "LOCK_TIMEOUT", connections.LOCK_TIMEOUT.replace("1500ms", "100ms"))
    lease = take(store)
    calls: dict[str, list[Callable[[], object]]] = {
        "table": [
            lambda: store.get(KEY),
            lambda: store.mark_shutdown(lease),
            lambda: list(store.scan()),
            store.usage,
            store.purge,
        ],
        "history": [
            lambda: store.append_history([HistoryEntry(KEY, "{}", 0, 60)]),
            lambda: store.history(KEY),
            lambda: store.delete(KEY),
            store.purge,
        ],
        "meta": [
            store.ping,
            store.pending_schema,
            store.apply_schema,
            lambda: store.settle_within(lease, DONE, ttl=TTL, using=business),
        ],
    }
    with psycopg.connect(database) as locking:
        locking.execute(store._schema.render(f"lock table {{{table}}}").encode())
        for call in calls[table]:
            with pytest.raises(StoreUnreachable, match="LockNotAvailable"):
                call()
        waiting = "select pid from pg_locks where not granted and database = %s::oid"
        (home,) = locking.execute("select oid from pg_database where datname = current_database()").fetchone() or ()
        assert locking.execute(waiting, (home,)).fetchall() == []
    assert store.renew([lease]) == []


def test_another_database_is_an_error_and_not_a_weaker_promise(
    own_postgres: Callable[..., PostgresServer],
) -> None:
    server = own_postgres(log_statement="all", autovacuum="off")
    store = PostgresStore.from_url(with_schema(server.url()))
    with psycopg.connect(server.url(), autocommit=True) as connection:
        connection.execute("create database bare")
        connection.execute("create database twin")
        with_schema(server.url("twin"))
        connection.execute("create database copied")  # of the schema, without its rows
        with psycopg.connect(with_schema(server.url("copied"))) as copied:
            copied.execute("delete from idempotency_meta")
        for name in ("bare", "twin", "copied"):
            lease = take(store)
            with (
                begun(server.url(name)) as elsewhere,
                pytest.raises(ConfigurationError, match=f"got the database '{name}'"),
            ):
                store.settle_within(lease, DONE, ttl=TTL, using=elsewhere)
            assert known(store).state is State.IN_PROGRESS
            store.delete(KEY)
    store.close()


def test_settling_is_one_statement_more_than_the_bare_transaction_and_no_commit_more(
    own_postgres: Callable[..., PostgresServer],
) -> None:
    server = own_postgres(log_statement="all", autovacuum="off")
    store = PostgresStore.from_url(with_schema(server.url()))
    engine = sqlalchemy.create_engine(
        server.url().replace("postgresql://", "postgresql+psycopg://"), poolclass=NullPool
    )
    insert = "insert into orders values ('ORD-1')"
    with psycopg.connect(server.url(), autocommit=True) as connection:
        connection.execute("create table orders (id text)")
    engine.connect().close()  # its first connection asks this and that
    bare, mapped = take(store, "bare"), take(store, "mapped")
    store._find_home()  # each process learns it with its first settling
    store.close()  # so that what it did is counted before

    def on_psycopg(*, settles: bool) -> None:
        with psycopg.connect(server.url()) as task:
            task.execute(insert.encode())
            if settles:
                store.settle_within(bare, DONE, ttl=TTL, using=task)

    def on_sqlalchemy(*, settles: bool) -> None:
        with Session(engine) as session, session.begin():
            session.execute(sqlalchemy.text(insert))
            if settles:
                store.settle_within(mapped, DONE, ttl=TTL, using=session)

    for work in (on_psycopg, on_sqlalchemy):
        commits, statements = cost(server, partial(work, settles=False))
        assert cost(server, partial(work, settles=True)) == (commits, statements + 1)
    assert (known(store, "bare").state, known(store, "mapped").state) == (State.COMPLETED, State.COMPLETED)
    store.close()
    engine.dispose()


def cost(server: PostgresServer, work: Callable[[], None]) -> tuple[int, int]:
    """Return how many commits and how many statements a server sees of this work."""
    commits, statements = committed(server), logged(server)
    work()
    return committed(server) - commits, logged(server) - statements


def logged(server: PostgresServer) -> int:
    """Return how many statements were logged, without those of `committed`."""
    lines = re.findall(r"LOG: +(?:statement|execute).*", server.logs())
    return sum("pg_stat" not in line for line in lines)


def committed(server: PostgresServer) -> int:
    """Return how many transactions a database has seen committed, once nobody is connected who has not told yet."""
    query = "select xact_commit from pg_stat_database where datname = 'postgres' and numbackends = 0"
    with psycopg.connect(server.url("template1"), autocommit=True) as connection:
        row = wait_until(lambda: connection.execute(query.encode()).fetchone(), 30)
    return int(row[0])


def test_a_sqlalchemy_connection_and_session_are_taken(store: PostgresStore, database: str) -> None:
    plain = database.replace("postgresql://", "postgresql+psycopg://")
    engine, autocommit = sqlalchemy.create_engine(plain), sqlalchemy.create_engine(plain, isolation_level="AUTOCOMMIT")
    lease = take(store)
    with autocommit.begin() as connection, pytest.raises(ConfigurationError, match="autocommit mode"):
        store.settle_within(lease, DONE, ttl=TTL, using=connection)
    with (
        engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection,
        connection.begin(),
        pytest.raises(ConfigurationError, match="AUTOCOMMIT"),
    ):
        store.settle_within(lease, DONE, ttl=TTL, using=connection)
    with engine.connect() as connection:
        with pytest.raises(ConfigurationError, match="has begun none"):
            store.settle_within(lease, DONE, ttl=TTL, using=connection)
        with connection.begin() as transaction:
            store.settle_within(lease, DONE, ttl=TTL, using=connection)
            transaction.rollback()
    assert known(store).state is State.IN_PROGRESS
    with Session(engine) as session, session.begin():
        store.settle_within(lease, DONE, ttl=TTL, using=session)
        assert known(store).state is State.IN_PROGRESS
    assert known(store).state is State.COMPLETED
    engine.dispose()
    autocommit.dispose()


def test_the_alias_of_a_django_database_is_taken_within_atomic(store: PostgresStore, database: str) -> None:
    facts = psycopg.conninfo.conninfo_to_dict(database)
    options = {"NAME": facts["dbname"], "USER": facts.get("user", ""), "PASSWORD": facts.get("password", "")}
    options |= {"HOST": facts.get("host", ""), "PORT": str(facts.get("port", ""))}
    lease = take(store)
    with django_database("orders", "postgresql", **options):
        from django.db import transaction

        with pytest.raises(ConfigurationError, match="atomic"):
            store.settle_within(lease, DONE, ttl=TTL, using="orders")
        with transaction.atomic(using="orders"):
            store.settle_within(lease, DONE, ttl=TTL, using="orders")
            transaction.set_rollback(True, using="orders")
        assert known(store).state is State.IN_PROGRESS
        with transaction.atomic(using="orders"):
            store.settle_within(lease, DONE, ttl=TTL, using="orders")
        assert known(store).state is State.COMPLETED


@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
def test_under_a_stricter_level_a_record_that_changed_meanwhile_is_the_drivers_error(
    store: PostgresStore, business: psycopg.Connection[Any], level: str
) -> None:
    """As with every row of the task's own: the transaction is to be run again."""
    lease = take(store)
    business.execute(f"set transaction isolation level {level}".encode())
    business.execute("select count(*) from orders")
    store.renew([lease])
    with pytest.raises(psycopg.errors.SerializationFailure):
        store.settle_within(lease, DONE, ttl=TTL, using=business)
    business.rollback()
    business.execute(f"set transaction isolation level {level}".encode())
    order(business)
    store.settle_within(lease, DONE, ttl=TTL, using=business)
    assert store.renew([lease]) == []
    business.commit()
    assert (known(store).state, effects(store)) == (State.COMPLETED, 1)


def test_a_user_who_may_not_write_the_table_is_told_so(
    own_postgres: Callable[..., PostgresServer],
) -> None:
    server = own_postgres()
    store = PostgresStore.from_url(with_schema(server.url()))
    lease = take(store)
    with psycopg.connect(server.url(), autocommit=True) as connection:
        connection.execute("create role stranger login")
    with (
        begun(server.url(user="stranger")) as connection,
        pytest.raises(StoreRefused, match="rights on the table"),
    ):
        store.settle_within(lease, DONE, ttl=TTL, using=connection)
    store.close()


def test_a_claim_waits_for_a_renewal_and_is_answered_by_the_rules(
    store: PostgresStore, business: psycopg.Connection[Any]
) -> None:
    """Whoever has the row and settles nothing has it for a moment; to say conflict would hide that a copy is late."""
    take(store)
    assert isinstance(store.acquire(claim(task_id="b", copy=2, token="x")), Refusal)
    with ThreadPoolExecutor(1) as thread:
        business.execute("select 1 from idempotency where key = %s for update", (stored(KEY),))
        answer = thread.submit(store.acquire, claim(task_id="b", copy=1, token="y"))
        waits = "select 1 from pg_stat_activity where wait_event_type = 'Lock' and query like %s"
        wait_until(lambda: run(store, waits, "%acquire%"), message="the claim to wait")
        business.rollback()
        refusal = answer.result(30)
    assert isinstance(refusal, Refusal)
    assert refusal.verdict is Verdict.SUPERSEDED


def test_of_two_tasks_that_announce_at_once_both_are_remembered(
    store: PostgresStore, business: psycopg.Connection[Any]
) -> None:
    store.settle(take(store), DONE, ttl=TTL)
    with ThreadPoolExecutor(1) as thread:
        business.execute(store._schema.render("select {announce}(%s, 'a')").encode(), (stored(KEY),))
        other = thread.submit(store.mark_dispatched, KEY, "b")
        waits = "select 1 from pg_stat_activity where wait_event_type = 'Lock' and query like %s"
        wait_until(lambda: run(store, waits, "%announce%") or other.done(), message="the other to wait")
        business.commit()
        assert other.result(30)
    assert known(store).dispatched == {"a", "b"}
