"""What a PostgreSQL must be, so that it keeps what was committed and lets workers in."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg
from psycopg import errors

from ...stores.postgres.connections import translate_error
from ...stores.postgres.store import PostgresStore
from .any_store import MOST, claims_refused, compared, expired, schema_pending, slow_store
from .findings import Check, CheckSkipped, Finding, Section, Target, error, info, ok, run_checks, warning

OLDEST = 130000
BUSY = 0.8


def _store(patient: Target) -> PostgresStore:
    store = patient.store
    assert isinstance(store, PostgresStore)
    return store


def _query(patient: Target, query: str) -> tuple[Any, ...]:
    """Return the one row that a query answers.

    Raises:
        Unasked: we have no right to it.
        StoreError: the server does not answer.
    """
    store = _store(patient)
    try:
        return store._connections.run(store._schema.render(query))[0]
    except errors.InsufficientPrivilege as refusal:
        raise CheckSkipped(f"The server does not let us see it: {str(refusal).strip()}.") from refusal
    except psycopg.Error as failure:
        raise translate_error(failure, store._place.shown) from failure


def _setting(patient: Target, name: str) -> str:
    return str(_query(patient, f"select coalesce(current_setting('{name}', true), '')")[0])


def server_old(patient: Target) -> Finding:
    """Look at the server's version."""
    version = _setting(patient, "server_version")
    if int(_setting(patient, "server_version_num")) < OLDEST:
        return error(f"The server is PostgreSQL {version}; 13 is the oldest that will do.", "Upgrade the server.")
    return ok(f"PostgreSQL {version}")


def store_is_replica(patient: Target) -> Finding:
    """See whether the server can be written to."""
    if _query(patient, "select pg_is_in_recovery()")[0]:
        return error(
            "The server is a standby, which takes no writes: no task can claim its key.",
            "Let the URL name the primary, or add target_session_attrs=read-write to its query with all hosts in it.",
            ends=True,
        )
    return ok("the server is a primary")


def writes_refused(patient: Target) -> Finding:
    """See whether transactions of this user may write."""
    if _setting(patient, "default_transaction_read_only") == "on":
        return error(
            "default_transaction_read_only is on: no task can claim its key.",
            "alter role CURRENT_USER set default_transaction_read_only = off",
            ends=True,
        )
    return ok("transactions may write")


def commits_not_durable(patient: Target) -> Finding:
    """See whether the server may forget what it has committed."""
    if _setting(patient, "fsync") == "off":
        return error(
            "fsync is off: a machine that crashes may leave a database that cannot be read.",
            "alter system set fsync = on; select pg_reload_conf()",
        )
    if (waits := _setting(patient, "synchronous_commit")) == "off":
        return warning(
            "synchronous_commit is off: a server that crashes forgets what was settled in the last moment, and that "
            "runs again if it is delivered again.",
            "alter role CURRENT_USER set synchronous_commit = on",
        )
    return ok(f"fsync is on, synchronous_commit {waits}")


def replicas_not_awaited(patient: Target) -> Finding:
    """See whether a standby may be promoted that has not seen the last commits."""
    standbys = int(_query(patient, "select count(*) from pg_stat_replication")[0])
    if standbys and not _setting(patient, "synchronous_standby_names"):
        return warning(
            f"The server answers before its standby servers ({standbys}) have a commit: one that is promoted forgets "
            "the last claims and results.",
            "alter system set synchronous_standby_names = 'ANY 1 (*)'; select pg_reload_conf()",
        )
    return ok("synchronous_standby_names is set" if standbys else "there is no standby")


def statement_pooling(patient: Target) -> Finding:
    """See whether a pooler lets transactions through."""
    store = _store(patient)
    try:
        with store._connections.connect() as connection:
            announced = connection.info.backend_pid
            with connection.transaction():
                row = connection.execute("select pg_backend_pid()").fetchone()
    except psycopg.Error as failure:
        if "statement pooling" not in str(failure):
            raise translate_error(failure, store._place.shown) from failure
        return error(
            "PgBouncer pools statements and refuses transactions: a task cannot settle within its own.",
            "pool_mode = transaction in pgbouncer.ini, or for this database alone, then RELOAD",
        )
    # PgBouncer makes up the number that it announces.
    return ok("behind a pooler that lets transactions through" if row != (announced,) else "no pooler in between")


def isolation_strict(patient: Target) -> Finding:
    """See whether each call has to request READ COMMITTED."""
    level = _setting(patient, "default_transaction_isolation")
    if level != "read committed":
        return info(
            f"default_transaction_isolation is {level}. Calls request READ COMMITTED, which costs each a little.",
            "alter role CURRENT_USER set default_transaction_isolation = 'read committed'",
        )
    return ok("default_transaction_isolation is read committed")


def autovacuum_off(patient: Target) -> Finding:
    """See whether the table is vacuumed."""
    (options,) = _query(patient, "select coalesce(reloptions::text, '') from pg_class where oid = '{table}'::regclass")
    if "autovacuum_enabled=false" in options or "autovacuum_enabled=off" in options:
        return warning(
            "Autovacuum is off for the table of records, whose every row is written twice or more: it only grows.",
            _store(patient)._schema.render("alter table {table} reset (autovacuum_enabled)"),
        )
    if _setting(patient, "autovacuum") == "off":
        return warning(
            "autovacuum is off, and every record is written twice or more: the table only grows.",
            "alter system set autovacuum = on; select pg_reload_conf()",
        )
    return ok("autovacuum is on")


def expired_rows(patient: Target) -> Finding:
    """Count what has expired and is still there, by its index and no further than need be."""
    some = f"select 1 from {{table}} where expires <= {{now}} limit {MOST}"  # noqa: S608 - the schema's own names
    (rows,) = _query(patient, f"select count(*) from ({some}) r")  # noqa: S608
    return expired(patient, int(rows))


def connections_full(patient: Target) -> Finding:
    """Compare the connections that are open with those there may be."""
    used = int(_query(patient, "select coalesce(sum(numbackends), 0) from pg_stat_database")[0])
    most = int(_setting(patient, "max_connections"))
    if used >= BUSY * most:
        return warning(
            f"{used} of {most} connections are open: further workers will be refused.",
            "Put PgBouncer between (pool_mode = transaction), or raise max_connections.",
        )
    return ok(f"{used} of {most} connections are open")


def clocks_differ(patient: Target) -> Finding:
    """Compare the server's clock with this machine's."""
    return compared(lambda: float(_query(patient, "select extract(epoch from clock_timestamp())")[0]))


CHECKS: tuple[Check, ...] = (
    server_old,
    store_is_replica,
    writes_refused,
    schema_pending,
    commits_not_durable,
    replicas_not_awaited,
    statement_pooling,
    isolation_strict,
    autovacuum_off,
    expired_rows,
    connections_full,
    clocks_differ,
    slow_store,
    claims_refused,
)


def sections(patient: Target) -> Iterator[Section]:
    """Yield what is found of a PostgreSQL store."""
    yield Section(patient.name, list(run_checks(CHECKS, patient)))
