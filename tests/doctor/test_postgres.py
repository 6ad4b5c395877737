"""What doctor says of a PostgreSQL, on real servers: once as it should not be, and once as it should."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import psycopg
import pytest

from celery_idempotent.cli.doctor import any_store
from celery_idempotent.cli.doctor import postgres as checks
from celery_idempotent.cli.doctor.findings import Severity
from celery_idempotent.stores.postgres import PostgresStore
from tests.conftest import missing
from tests.support.doctor.wards import found_of, severities
from tests.support.pgbouncer import CONFIG, Bouncer
from tests.support.postgres import PostgresServer
from tests.support.servers import ServerMissing
from tests.support.stores.benches import KEY, take
from tests.support.stores.postgres import age_postgres, with_schema

Start = Callable[..., PostgresServer]


@pytest.fixture(scope="module")
def durable() -> Iterator[PostgresServer]:
    """A server as it comes, which the tests of this module may set as they like if they set it back."""
    try:
        server = PostgresServer(fsync="on")
    except ServerMissing as error:
        raise missing(error) from None
    server.start()
    with_schema(server.url())
    yield server
    server.stop()


def says(server: PostgresServer, *statements: str) -> None:
    with psycopg.connect(server.url(), autocommit=True) as connection:
        for statement in statements:
            connection.execute(statement.encode())


@pytest.fixture
def role(durable: PostgresServer) -> Iterator[str]:
    """The URL of a user with the rights that the guide lists."""
    says(
        durable,
        "create role worker login",
        "grant select, insert, update, delete on idempotency to worker",
        "grant select, insert, update, delete on idempotency_history to worker",
        "grant select on idempotency_meta to worker",
        "grant usage on idempotency_fences to worker",
    )
    yield durable.url(user="worker")
    says(durable, "drop owned by worker", "drop role worker")


def test_a_server_as_it_comes_is_well(durable: PostgresServer) -> None:
    found = found_of(durable.url())
    assert severities(found) == {}
    assert found.keys() == {check.code for check in checks.CHECKS}


def test_a_user_with_the_least_rights_sees_all_of_it(role: str) -> None:
    assert severities(found_of(role)) == {}


def test_a_right_that_is_missing_is_named(durable: PostgresServer, role: str) -> None:
    says(durable, "revoke delete on idempotency from worker")
    found = found_of(role)
    assert severities(found) == {"claims-refused": "error"}
    assert "permission denied" in found["claims-refused"].found


def test_what_may_not_be_asked_is_a_note(durable: PostgresServer, role: str) -> None:
    says(durable, "revoke execute on function pg_is_in_recovery() from public")
    try:
        found = found_of(role)
    finally:
        says(durable, "grant execute on function pg_is_in_recovery() to public")
    assert found["not-checked"].severity is Severity.INFO
    assert "store-is-replica" in found["not-checked"].found


def test_nothing_is_left_behind(durable: PostgresServer) -> None:
    says(durable, "delete from idempotency")
    found_of(durable.url())
    store = PostgresStore.from_url(durable.url())
    assert list(store.scan()) == []
    store.close()


def test_a_table_that_was_never_made_is_an_error(durable: PostgresServer) -> None:
    found = found_of(f"{durable.url()}?table=other")
    assert severities(found) == {"schema-pending": "error"}
    assert "schema --apply" in found["schema-pending"].remedy


@pytest.mark.parametrize(
    ("setting", "code", "severity"),
    [
        ("synchronous_commit = off", "commits-not-durable", "warning"),
        ("default_transaction_isolation = 'serializable'", "isolation-strict", "info"),
        ("default_transaction_read_only = on", "writes-refused", "error"),
    ],
)
def test_a_setting_of_the_user_is_seen(
    durable: PostgresServer, role: str, setting: str, code: str, severity: str
) -> None:
    says(durable, f"alter role worker set {setting}")
    assert severities(found_of(role)) == {code: severity}


@pytest.mark.nightly
def test_a_server_that_trusts_its_memory_is_an_error(own_postgres: Start) -> None:
    server = own_postgres(fsync="off", autovacuum="off", max_connections="30")
    with_schema(server.url())
    wrong = {"commits-not-durable": "error", "autovacuum-off": "warning"}
    assert severities(found_of(server.url())) == wrong
    crowd = [psycopg.connect(server.url()) for _ in range(24)]
    assert severities(found_of(server.url())) == {**wrong, "connections-full": "warning"}
    for each in crowd:
        each.close()


def test_a_table_that_is_not_vacuumed_is_a_warning(durable: PostgresServer) -> None:
    says(durable, "alter table idempotency set (autovacuum_enabled = false)")
    found = found_of(durable.url())
    says(durable, found["autovacuum-off"].remedy)
    assert severities(found) == {"autovacuum-off": "warning"}
    assert severities(found_of(durable.url())) == {}


def test_a_standby_is_no_store(own_postgres: Start) -> None:
    server = own_postgres()
    with_schema(server.url())
    (server.data / "standby.signal").touch()
    server.restart()
    assert severities(found_of(server.url())) == {"store-is-replica": "error"}


def test_a_standby_that_nobody_waits_for_is_a_warning(durable: PostgresServer) -> None:
    follower = psycopg.connect(f"{durable.url()}?replication=database", autocommit=True)
    found = found_of(durable.url())
    says(durable, "alter system set synchronous_standby_names = 'ANY 1 (*)'", "select pg_reload_conf()")
    try:
        with psycopg.connect(durable.url(), autocommit=True, options="-c synchronous_commit=local") as connection:
            (names,) = connection.execute("show synchronous_standby_names").fetchone() or ("",)
    finally:
        says(durable, "alter system reset synchronous_standby_names", "select pg_reload_conf()")
        follower.close()
    assert severities(found) == {"replicas-not-awaited": "warning"}
    assert names in ("", "ANY 1 (*)")  # the remedy is one that the server takes


@pytest.mark.parametrize(
    ("mode", "wrong"), [("transaction", {}), ("session", {}), ("statement", {"statement-pooling": "error"})]
)
def test_a_pooler_must_let_transactions_through(
    durable: PostgresServer, monkeypatch: pytest.MonkeyPatch, mode: str, wrong: dict[str, str]
) -> None:
    monkeypatch.setattr(
        "tests.support.pgbouncer.CONFIG", CONFIG.replace("pool_mode = transaction", f"pool_mode = {mode}")
    )
    try:
        bouncer = Bouncer(durable.url())
    except ServerMissing as error:
        raise missing(error, optional="pgbouncer") from None
    try:
        found = found_of(bouncer.url())
    finally:
        bouncer.stop()
    assert severities(found) == wrong
    if not wrong:
        assert "behind a pooler" in found["statement-pooling"].found


@pytest.mark.parametrize(
    ("purged", "few", "many"), [(None, "ok", "warning"), (True, "ok", "warning"), (False, "info", "warning")]
)
def test_expired_rows_are_counted_and_somebody_is_to_remove_them(
    durable: PostgresServer, monkeypatch: pytest.MonkeyPatch, purged: bool | None, few: str, many: str
) -> None:
    store = PostgresStore.from_url(durable.url())
    take(store)
    age_postgres(store, KEY, 10_000)
    assert str(found_of(store, purged=purged)["expired-rows"].severity) == few
    monkeypatch.setattr(any_store, "MANY", 1)
    found = found_of(store, purged=purged)["expired-rows"]
    assert (str(found.severity), found.found[:2]) == (many, "1 ")
    store.purge()
    assert found_of(store, purged=True)["expired-rows"].severity is Severity.OK
    store.close()


@pytest.mark.parametrize(
    ("place", "limit", "value", "code"),
    [(checks, "OLDEST", 10**9, "server-old"), (any_store, "SLOW", 0.0, "slow-store")],
)
def test_what_is_too_old_or_too_slow_is_said(
    durable: PostgresServer, monkeypatch: pytest.MonkeyPatch, place: object, limit: str, value: float, code: str
) -> None:
    monkeypatch.setattr(place, limit, value)
    assert severities(found_of(durable.url())).keys() == {code}


def test_a_server_that_is_down_is_one_finding(own_postgres: Start) -> None:
    server = own_postgres()
    url = server.url().replace("postgres@", "postgres:hunter2@")
    server.stop()
    found = found_of(url)
    assert severities(found) == {"store-unreachable": "error"}
    assert "hunter2" not in str(found)


def test_a_database_that_is_not_there_is_a_refusal(durable: PostgresServer) -> None:
    assert severities(found_of(durable.url(database="nowhere"))) == {"store-refused": "error"}
