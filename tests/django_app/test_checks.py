"""`manage.py check` finds what is set wrongly, without a network."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from celery import Celery

from celery_idempotent.celery.declarations import check_settings
from celery_idempotent.errors import ConfigurationError
from celery_idempotent.http.django import IdempotencyMiddleware
from tests.django_app.test_migrations import STORE, execute
from tests.support.django_app.project import SETTINGS, Project

Found = list[tuple[str, str]]
SESSIONS = "django.contrib.sessions.middleware.SessionMiddleware"
USERS = "django.contrib.auth.middleware.AuthenticationMiddleware"
OURS = "celery_idempotent.http.django.IdempotencyMiddleware"


class Derived(IdempotencyMiddleware):
    """The middleware of a project that has derived its own."""


class Closed:
    """A router that keeps every app out of every database."""

    def allow_migrate(self, db: str, app_label: str, **hints: object) -> bool:
        return False


def found(*, deploy: bool = False, databases: list[str] | None = None) -> Found:
    """Return the ids and texts of what the checks find."""
    from django.core.checks import Tags, run_checks

    from celery_idempotent.django.checks import TAG

    tags = [TAG, *([Tags.database] if databases else [])]
    messages = run_checks(tags=tags, include_deployment_checks=deploy, databases=databases)
    return [(str(each.id).rpartition(".")[2], f"{each.msg} {each.hint or ''}") for each in messages]


def deployed() -> Found:
    return found(deploy=True)


def of_databases() -> Found:
    return found(databases=["default"])


def while_migrating() -> Found:
    """Return what is found of tables while `manage.py migrate` runs."""
    with mock.patch.object(sys, "argv", ["manage.py", "migrate"]):
        return of_databases()


def test_a_project_that_is_set_up_passes(sqlite_project: Project) -> None:
    assert sqlite_project.run(found) == []


@pytest.mark.parametrize(
    ("settings", "code", "advice"),
    [
        ({"CELERY_IDEMPOTENCY_STORE": "reddis://localhost"}, "E001", "Did you mean redis://?"),
        ({"CELERY_IDEMPOTENCY_STORE": "django://defalt"}, "E001", "one of the Django databases default"),
        ({"CELERY_IDEMPOTENCY_STORE": "django://default?tabel=x"}, "E001", "Did you mean table?"),
        ({"CELERY_IDEMPOTENCY_STOER": "memory://"}, "E001", "Did you mean CELERY_IDEMPOTENCY_STORE?"),
        ({"CELERY_IDEMPOTENCY": {"result_tll": "7d"}}, "E001", "did you mean 'result_ttl'"),
        ({"CELERY_IDEMPOTENCY_UNIQUE": {"fro": "1h"}}, "E001", "did you mean 'for'"),
        ({"IDEMPOTENCY_STORE": "memory://"}, "W002", "Write CELERY_IDEMPOTENCY_STORE."),
        ({"NAMESPACE": "OTHER"}, "W001", "Import the app in the __init__.py"),
        ({"MIDDLEWARE": [OURS]}, "E002", "IDEMPOTENCY_HTTP = {"),
        ({"MIDDLEWARE": [OURS], "IDEMPOTENCY_HTTP": {"store": "memory://"}}, "E002", "scope"),
        ({"MIDDLEWARE": [USERS, OURS.replace(".django", "")], "IDEMPOTENCY_HTTP": {}}, "W006", f'Add "{OURS}"'),
        ({"MIDDLEWARE": ["shop.Lost"], "IDEMPOTENCY_HTTP": {}}, "W006", f'Add "{OURS}"'),
        (
            {"MIDDLEWARE": [SESSIONS, OURS, USERS], "IDEMPOTENCY_HTTP": {"store": "memory://", "scope": None}},
            "W003",
            f"Move it behind {USERS}",
        ),
    ],
)
def test_what_is_set_wrongly_is_named_with_what_to_do(
    sqlite_project: Project, settings: dict[str, Any], code: str, advice: str
) -> None:
    ((found_code, text),) = sqlite_project.run(found, **settings)
    assert found_code == code
    assert advice.lower() in text.lower()


def test_the_middleware_in_its_place_passes(sqlite_project: Project) -> None:
    options = {"store": "memory://", "scope": None}
    for ours in (OURS, f"{__name__}.Derived"):
        assert sqlite_project.run(found, MIDDLEWARE=[SESSIONS, USERS, ours], IDEMPOTENCY_HTTP=options) == []


def within_tests() -> Found:
    """Return what is found once Django's test runner has made its database."""
    from django.db import connection

    name = connection.settings_dict["NAME"]
    connection.close()
    connection.creation.create_test_db(verbosity=0, autoclobber=True)
    try:
        return found()
    finally:  # the project's process is that of other tests, too
        connection.creation.destroy_test_db(name, verbosity=0)


@pytest.mark.nightly
def test_the_database_in_memory_of_djangos_test_runner_is_no_error(sqlite_project: Project) -> None:
    assert sqlite_project.run(within_tests) == []
    assert sqlite_project.run(within_tests, **{STORE: "django://"}) == []
    assert [code for code, _ in sqlite_project.run(within_tests, **{STORE: "django://defualt"})] == ["E001"]


def test_a_store_of_one_process_is_no_store_of_a_deployment(sqlite_project: Project) -> None:
    assert sqlite_project.run(found, **{STORE: "memory://"}) == []
    assert [code for code, _ in sqlite_project.run(deployed, **{STORE: "memory://"})] == ["W004"]
    assert sqlite_project.run(deployed) == []


def test_tables_that_are_missing_are_found_where_a_database_is_checked(postgres_project: Project) -> None:
    missing = {STORE: f"{postgres_project.settings[STORE]}&table=missing"}
    assert postgres_project.run(found, **missing) == []
    ((code, text),) = postgres_project.run(of_databases, **missing)
    assert code == "W005"
    assert "migrate celery_idempotent" in text
    ((code, text),) = postgres_project.run(of_databases, DATABASE_ROUTERS=[f"{__name__}.Closed"], **missing)
    assert code == "W005"
    assert "Have its allow_migrate return True for that, and run celery -A proj idempotency schema --apply." in text
    assert postgres_project.run(while_migrating, **missing) == []
    assert postgres_project.run(of_databases) == []


def without_celery() -> Found:
    with mock.patch("celery_idempotent.django.checks.celery_app", return_value=Celery(set_as_current=False)):
        return of_databases()


def test_a_project_without_celery_is_told_another_command(postgres_project: Project) -> None:
    url = f"{postgres_project.settings[STORE]}&table=missing"
    command = f"DJANGO_SETTINGS_MODULE={SETTINGS} celery-idempotent --store '{url}' schema --apply"
    text = dict(postgres_project.run(without_celery, **{STORE: url}))["W005"]
    assert command in text
    assert "celery -A" not in text


def test_a_file_that_has_no_tables_yet_is_well_and_one_with_anothers_is_not(sqlite_project: Project) -> None:
    jobs = {STORE: "django://default?table=jobs"}
    assert sqlite_project.run(of_databases, **jobs) == []
    sqlite_project.run(execute, "create table jobs (id integer)")
    ((code, text),) = sqlite_project.run(of_databases, **jobs)
    assert code == "W005"
    assert "another application's" in text


def aliases() -> list[str]:
    """Return the databases in which the settings' stores are."""
    from celery_idempotent.django.databases import database_stores

    return [each.alias for each in database_stores()]


def alias_of_an_object() -> object:
    from celery_idempotent.django.databases import database_store
    from celery_idempotent.stores.memory import MemoryStore

    return database_store(MemoryStore())


def without_psycopg() -> str:
    from celery_idempotent.django.databases import database_store

    with mock.patch.dict(sys.modules, {"psycopg.conninfo": None}), pytest.raises(ConfigurationError) as error:
        database_store("postgresql://app@db/shop")
    return str(error.value)


def test_migrations_are_for_stores_in_databases_of_django_and_leave_wrong_urls_to_the_checks(
    sqlite_project: Project,
) -> None:
    assert sqlite_project.run(aliases) == ["default"]
    for url in ("django://defalt", "redis://localhost/1", "sqlite:////elsewhere.db", "memory://"):
        assert sqlite_project.run(aliases, **{STORE: url}) == [], url
    assert sqlite_project.run(alias_of_an_object) is None
    assert "pip install 'celery-idempotent[postgres]'" in sqlite_project.run(without_psycopg)


def test_an_app_without_a_namespace_is_not_taken_in_by_the_setting_of_the_middleware() -> None:
    app = Celery("old", set_as_current=False)
    app.config_from_object(SimpleNamespace(BROKER_URL="memory://", IDEMPOTENCY_HTTP={}))
    check_settings(app)
    app = Celery("old", set_as_current=False)
    app.config_from_object(SimpleNamespace(BROKER_URL="memory://", IDEMPOTENCY_STORE="memory://"))
    with pytest.raises(ConfigurationError, match=r'write CELERY_IDEMPOTENCY_STORE, and .*namespace="CELERY"'):
        check_settings(app)
