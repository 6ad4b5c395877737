"""`migrate` makes and upgrades a store's tables, where the store is, and forgets nothing."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from celery_idempotent.stores.postgres.schema import VERSION as POSTGRES_VERSION
from celery_idempotent.stores.sqlite.schema import VERSION as SQLITE_VERSION
from tests.support.django_app.project import Project

OWN = "celery_idempotent"
STORE = "CELERY_IDEMPOTENCY_STORE"


def migrate_again(project: Project, database: str = "default", **settings: Any) -> None:
    """Apply the migrations as to a database that has none of them yet."""
    project.manage("migrate", OWN, "zero", "--database", database, "-v0", **settings)
    project.manage("migrate", OWN, "--database", database, "-v0", **settings)


def opened() -> Any:
    from django.conf import settings

    from celery_idempotent import open_store

    return open_store(settings.CELERY_IDEMPOTENCY_STORE)


def pending() -> str:
    return str(opened().pending_schema())


def make_by_command() -> None:
    opened().apply_schema()


def claim(key: str) -> str:
    from celery_idempotent.stores import Claim, Lease

    answer = opened().acquire(Claim(key=key, owner=uuid4().hex, task_id="one", lease_ttl=60.0, keep_ttl=60.0))
    return "lease" if isinstance(answer, Lease) else str(answer.verdict.value)


def tables(alias: str = "default") -> set[str]:
    from django.db import connections

    return {name for name in connections[alias].introspection.table_names() if "idempotency" in name}


def execute(statement: str) -> int:
    """Execute a statement, and return the number that it answers."""
    from django.db import connection

    with connection.cursor() as cursor:
        cursor.execute(statement)
        return int(cursor.fetchone()[0]) if cursor.description else 0


def stores_in_databases() -> list[str]:
    from celery_idempotent.django.databases import database_stores

    return [store.alias for store in database_stores()]


def test_migrate_makes_all_that_the_store_needs(project: Project) -> None:
    assert project.run(pending) == ""
    assert project.run(claim, "first") == "lease"


def test_migrating_back_and_forth_forgets_nothing(project: Project) -> None:
    project.run(claim, "kept")
    migrate_again(project)
    assert project.run(claim, "kept") == "conflict"


def test_no_migration_is_missing(project: Project) -> None:
    assert "No changes" in project.manage("makemigrations", "--check", "--dry-run", OWN)


@pytest.mark.parametrize("options", [(), ("--all",)], ids=["", "all"])
@pytest.mark.parametrize("store", [None, "redis://localhost:1/0"])
def test_a_dump_of_the_projects_data_has_no_records(
    sqlite_project: Project, options: tuple[str, ...], store: str | None
) -> None:
    sqlite_project.run(claim, "dumped")
    dumped = sqlite_project.manage("dumpdata", *options, **({STORE: store} if store else {}))
    assert '"contenttypes.contenttype"' in dumped
    assert '"celery_idempotent.record"' not in dumped


def test_the_plan_and_the_statements_can_be_read_before(project: Project) -> None:
    project.manage("migrate", OWN, "zero", "-v0")
    assert "Make or upgrade the tables of idempotency stores in this database" in project.manage("migrate", "--plan")
    project.manage("migrate", OWN, "-v0")
    statements = project.manage("sqlmigrate", OWN, "0001").lower()
    assert "create table" in statements
    assert "idempotency_history" in statements
    assert "{" not in statements.replace("'{}'", "")


def test_the_newest_migration_is_there_for_the_versions_of_the_stores() -> None:
    """A new version of a store's tables has a migration of its own, so that `migrate` knows of it."""
    folder = Path(import_module("celery_idempotent.django.migrations").__path__[0])
    newest = max(path.stem for path in folder.glob("[0-9]*.py"))
    migration = import_module(f"celery_idempotent.django.migrations.{newest}").Migration
    (applied,) = [each for each in migration.operations if hasattr(each, "postgresql")]
    assert (applied.postgresql, applied.sqlite) == (POSTGRES_VERSION, SQLITE_VERSION)


def test_tables_of_an_older_version_are_upgraded(postgres_project: Project) -> None:
    store = f"{postgres_project.settings[STORE]}&table=older"
    migrate_again(postgres_project, **{STORE: store})
    postgres_project.run(execute, "update older_meta set version = 3")
    postgres_project.run(execute, "drop function older_renew_9")
    migrate_again(postgres_project, **{STORE: store})
    assert postgres_project.run(execute, "select version from older_meta") == POSTGRES_VERSION
    assert postgres_project.run(pending, **{STORE: store}) == ""


def test_tables_that_were_copied_without_rows_are_repaired(postgres_project: Project) -> None:
    store = f"{postgres_project.settings[STORE]}&table=copied"
    migrate_again(postgres_project, **{STORE: store})
    postgres_project.run(execute, "delete from copied_meta")
    migrate_again(postgres_project, **{STORE: store})
    assert postgres_project.run(execute, "select version from copied_meta") == POSTGRES_VERSION


def test_tables_that_the_command_has_made_are_left_as_they_are(sqlite_project: Project) -> None:
    made = {STORE: "django://default?table=made"}
    sqlite_project.run(make_by_command, **made)
    sqlite_project.run(claim, "kept", **made)
    migrate_again(sqlite_project, **made)
    assert sqlite_project.run(claim, "kept", **made) == "conflict"


class Closed:
    """A router that keeps the app out of one database."""

    def allow_migrate(self, db: str, app_label: str, **hints: object) -> bool | None:
        return False if db == "closed" and app_label == OWN else None


def test_the_tables_are_made_in_the_database_of_the_store_alone(sqlite_project: Project) -> None:
    closed = sqlite_project.settings["DATABASES"]["closed"]["NAME"]
    settings = {
        STORE: "django://archive?table=idempotency",
        "IDEMPOTENCY_HTTP": {"store": f"sqlite:///{closed}?table=idempotency", "scope": None},
        "DATABASE_ROUTERS": ["tests.django_app.test_migrations.Closed"],
    }
    assert sqlite_project.run(stores_in_databases, **settings) == ["archive", "closed"]
    before = sqlite_project.run(tables)
    for name in ("default", "archive", "closed"):
        migrate_again(sqlite_project, name, **settings)
    own = {"idempotency", "idempotency_history", "idempotency_meta"}
    assert sqlite_project.run(tables) == before
    assert [sqlite_project.run(tables, name) for name in ("archive", "closed")] == [own, set()]


@pytest.mark.parametrize("store", ["redis://localhost:1/0", "memory://", "sqlite:////elsewhere.db", "nosuch://", None])
def test_a_store_elsewhere_gets_no_tables(sqlite_project: Project, store: str | None) -> None:
    assert sqlite_project.run(stores_in_databases, **{STORE: store}) == []


@pytest.mark.parametrize("scheme", ["", "cached+"])
def test_a_url_of_the_same_database_is_known_as_that(postgres_project: Project, scheme: str) -> None:
    name = postgres_project.settings["DATABASES"]["default"]["NAME"]
    url = f"{scheme}postgresql://other@pgbouncer:6432/{name}?{'cache=redis://localhost/0' if scheme else ''}"
    assert postgres_project.run(stores_in_databases, **{STORE: url}) == ["default"]


@pytest.mark.parametrize(("place", "alias"), [("two", "second"), ("one:6432", "pooled"), ("pgbouncer", "default")])
def test_of_databases_of_one_name_it_is_that_on_its_server(place: str, alias: str) -> None:
    servers = {"default": ("one", ""), "pooled": ("one", "6432"), "second": ("two", "")}
    databases = {
        name: {"ENGINE": "django.db.backends.postgresql", "NAME": "shop", "HOST": host, "PORT": port}
        for name, (host, port) in servers.items()
    }
    project = Project(DATABASES=databases)
    try:
        assert project.run(stores_in_databases, **{STORE: f"postgresql://worker@{place}/shop"}) == [alias]
    finally:
        project.stop()
