from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from tests.support.django_app.project import Project, postgres, sqlite
from tests.support.postgres import fresh_schema


@pytest.fixture(scope="session")
def postgres_project(postgres_server: Any) -> Iterator[Project]:
    """A project that was migrated, whose store is in its own PostgreSQL."""
    with fresh_schema(postgres_server.url()) as url:
        schema = url.rpartition("schema=")[2]
        with psycopg.connect(postgres_server.url(), autocommit=True) as connection:
            connection.execute(f"create schema {schema}".encode())
        store = f"django://default?schema={schema}"
        yield from migrated({"default": postgres(url)}, store)


@pytest.fixture(scope="session")
def sqlite_project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    """A project with several databases, the store in its own SQLite file, the default one."""
    folder = tmp_path_factory.mktemp("shop")
    yield from migrated({name: sqlite(folder / f"{name}.sqlite3") for name in ("default", "archive", "closed")})


def migrated(databases: dict[str, Any], store: str = "django://default") -> Iterator[Project]:
    project = Project(DATABASES=databases, CELERY_IDEMPOTENCY_STORE=store)
    project.manage("migrate", "--run-syncdb", "-v0")
    yield project
    project.stop()


@pytest.fixture(params=["postgres", "sqlite"])
def project(request: pytest.FixtureRequest) -> Project:
    """Each of the two."""
    found: Project = request.getfixturevalue(f"{request.param}_project")
    return found
