# ruff: noqa: D103 - a check is documented by its name, its words where all is well, and its findings
"""Checks of a PostgreSQL server, which must keep what was committed and let workers in."""

from __future__ import annotations

from typing import Any

import psycopg
from psycopg import errors

from ...stores.postgres.connections import translate_error
from ...stores.postgres.store import PostgresStore
from .any_store import MOST, claims_refused, compared, expired, schema_pending, slow_store
from .findings import Checks, CheckSkipped, Findings, Target, error, info, ok, warning

CHECKS = Checks()
OLDEST = 130000
BUSY = 0.8


def _store(target: Target) -> PostgresStore:
    store = target.store
    assert isinstance(store, PostgresStore)
    return store


def _ask(target: Target, query: str) -> tuple[Any, ...]:
    """Return the one row of a query.

    Raises:
        CheckSkipped: the user has no right to it.
        StoreError: the server does not answer.
    """
    store = _store(target)
    try:
        return store._connections.run(store._schema.render(query))[0]
    except errors.InsufficientPrivilege as refusal:
        raise CheckSkipped(f"The server does not let this user see it: {str(refusal).strip()}.") from refusal
    except psycopg.Error as failure:
        raise translate_error(failure, store._place.shown) from failure


def _setting(target: Target, name: str) -> str:
    return str(_ask(target, f"select coalesce(current_setting('{name}', true), '')")[0])


@CHECKS.add()
def server_old(target: Target) -> Findings:
    version = _setting(target, "server_version")
    if int(_setting(target, "server_version_num")) < OLDEST:
        yield error(f"The server is PostgreSQL {version}; 13 is the oldest that will do.", "Upgrade the server.")
    yield ok(f"PostgreSQL {version}")


@CHECKS.add("the server is a primary")
def store_is_replica(target: Target) -> Findings:
    if _ask(target, "select pg_is_in_recovery()")[0]:
        yield error(
            "The server is a standby, which takes no writes: no task can claim its key.",
            "Let the URL name the primary, or add target_session_attrs=read-write to its query with all hosts in it.",
            ends=True,
        )


@CHECKS.add("transactions may write")
def writes_refused(target: Target) -> Findings:
    if _setting(target, "default_transaction_read_only") == "on":
        yield error(
            "default_transaction_read_only is on: no task can claim its key.",
            "alter role CURRENT_USER set default_transaction_read_only = off",
            ends=True,
        )


CHECKS.append(schema_pending)


@CHECKS.add()
def commits_not_durable(target: Target) -> Findings:
    if _setting(target, "fsync") == "off":
        yield error(
            "fsync is off: a machine that crashes may leave a database that cannot be read.",
            "alter system set fsync = on; select pg_reload_conf()",
        )
    if (waits := _setting(target, "synchronous_commit")) == "off":
        yield warning(
            "synchronous_commit is off: a server that crashes forgets what was settled in the last moment, and that "
            "runs again if it is delivered again.",
            "alter role CURRENT_USER set synchronous_commit = on",
        )
    yield ok(f"fsync is on, synchronous_commit {waits}")


@CHECKS.add()
def replicas_not_awaited(target: Target) -> Findings:
    standbys = int(_ask(target, "select count(*) from pg_stat_replication")[0])
    if standbys and not _setting(target, "synchronous_standby_names"):
        yield warning(
            f"The server answers before its standby servers ({standbys}) have a commit: one that is promoted forgets "
            "the last claims and results.",
            "alter system set synchronous_standby_names = 'ANY 1 (*)'; select pg_reload_conf()",
        )
    yield ok("synchronous_standby_names is set" if standbys else "there is no standby")


@CHECKS.add()
def statement_pooling(target: Target) -> Findings:
    store = _store(target)
    try:
        with store._connections.connect() as connection:
            announced = connection.info.backend_pid
            with connection.transaction():
                row = connection.execute("select pg_backend_pid()").fetchone()
    except psycopg.Error as failure:
        if "statement pooling" not in str(failure):
            raise translate_error(failure, store._place.shown) from failure
        yield error(
            "PgBouncer pools statements and refuses transactions: a task cannot settle within its own.",
            "pool_mode = transaction in pgbouncer.ini, or for this database alone, then RELOAD",
        )
    # PgBouncer makes up the number that it announces.
    yield ok("behind a pooler that lets transactions through" if row != (announced,) else "no pooler in between")


@CHECKS.add("default_transaction_isolation is read committed")
def isolation_strict(target: Target) -> Findings:
    level = _setting(target, "default_transaction_isolation")
    if level != "read committed":
        yield info(
            f"default_transaction_isolation is {level}. Calls request READ COMMITTED, which costs each a little.",
            "alter role CURRENT_USER set default_transaction_isolation = 'read committed'",
        )


@CHECKS.add("autovacuum is on")
def autovacuum_off(target: Target) -> Findings:
    (options,) = _ask(target, "select coalesce(reloptions::text, '') from pg_class where oid = '{table}'::regclass")
    if "autovacuum_enabled=false" in options or "autovacuum_enabled=off" in options:
        yield warning(
            "Autovacuum is off for the table of records, whose every row is written twice or more: it only grows.",
            _store(target)._schema.render("alter table {table} reset (autovacuum_enabled)"),
        )
    if _setting(target, "autovacuum") == "off":
        yield warning(
            "autovacuum is off, and every record is written twice or more: the table only grows.",
            "alter system set autovacuum = on; select pg_reload_conf()",
        )


@CHECKS.add()
def expired_rows(target: Target) -> Findings:
    some = f"select 1 from {{table}} where expires <= {{now}} limit {MOST}"  # noqa: S608 - the schema's own names
    (rows,) = _ask(target, f"select count(*) from ({some}) r")  # noqa: S608
    yield expired(target, int(rows))


@CHECKS.add()
def connections_full(target: Target) -> Findings:
    used = int(_ask(target, "select coalesce(sum(numbackends), 0) from pg_stat_database")[0])
    most = int(_setting(target, "max_connections"))
    if used >= BUSY * most:
        yield warning(
            f"{used} of {most} connections are open: further workers will be refused.",
            "Put PgBouncer between (pool_mode = transaction), or raise max_connections.",
        )
    yield ok(f"{used} of {most} connections are open")


@CHECKS.add()
def clocks_differ(target: Target) -> Findings:
    yield compared(lambda: float(_ask(target, "select extract(epoch from clock_timestamp())")[0]))


CHECKS += [slow_store, claims_refused]
