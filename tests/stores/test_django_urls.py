"""`django://alias` is the store in a database of Django's settings."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from django.core.exceptions import ImproperlyConfigured
from psycopg.conninfo import conninfo_to_dict

from celery_idempotent.errors import ConfigurationError
from celery_idempotent.stores import open_store
from celery_idempotent.stores.django import DjangoDatabase
from celery_idempotent.stores.postgres.connections import Address
from celery_idempotent.stores.sqlite import SqliteStore
from tests.support.stores.django_databases import django_database


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Path]:
    with django_database("shop", "sqlite3", NAME=tmp_path / "my shop.sqlite3"):
        yield tmp_path / "my shop.sqlite3"


def address(**described: Any) -> dict[str, Any]:
    """Return what libpq is given for a database of Django that is described so."""
    with django_database("pg", "postgresql", **{"NAME": "shop", "OPTIONS": {}, **described}):
        found = Address.of_url(DjangoDatabase("pg").url())
    assert "secret" not in found.shown
    return dict(conninfo_to_dict(found.conninfo))


def test_a_store_in_sqlite_is_in_the_file_of_the_alias(shop: Path) -> None:
    with closing(open_store("django://shop?table=tasks")) as store:
        assert isinstance(store, SqliteStore)
        store.ping()
        assert "tasks" in store._schema._table
    assert shop.exists()


def test_a_cache_may_stand_before_it(shop: Path) -> None:
    with closing(open_store("cached+django://shop?cache=redis://localhost:1/0")) as store:
        assert isinstance(store.durable, SqliteStore)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("described", "expected"),
    [
        ({}, {}),
        (
            {"USER": "app", "PASSWORD": "secret@/:?", "HOST": "db", "PORT": 6432},
            {"user": "app", "password": "secret@/:?", "host": "db", "port": "6432"},
        ),
        ({"HOST": "/var/run/postgresql"}, {"host": "/var/run/postgresql"}),
        ({"HOST": "a,b", "PORT": "1,2"}, {"host": "a,b", "port": "1,2"}),
        ({"HOST": "::1"}, {"host": "::1"}),
        (
            {"OPTIONS": {"sslmode": "require", "sslrootcert": Path("/ca.pem"), "isolation_level": 4}},
            {"sslmode": "require", "sslrootcert": "/ca.pem"},
        ),
        (
            {"OPTIONS": {"assume_role": "app", "options": "-c search_path=shop"}},
            {"options": "-c search_path=shop -c role=app"},
        ),
    ],
)
def test_what_django_connects_with_the_store_connects_with(described: Any, expected: dict[str, str]) -> None:
    assert address(**described) == {"dbname": "shop", **expected}


def test_the_options_of_a_store_go_through() -> None:
    with django_database("pg", "postgresql", NAME="sh op"):
        url = DjangoDatabase.of("django://pg?table=tasks&schema=own&connections=3").url()
    found = Address.of_url(url)
    assert (found.table, found.schema, found.connections) == ("tasks", "own", 3)
    assert unquote(found.conninfo).endswith("/sh op")


def test_without_an_alias_it_is_the_default_one() -> None:
    assert DjangoDatabase.of("django://").alias == "default"


@pytest.mark.parametrize(
    ("url", "advice"),
    [
        ("django://shopp", "one of the Django databases .*shop"),
        ("django://shop/app", "whose host is an alias"),
        ("django://user:secret@shop", "whose host is an alias"),
        ("django://shop?tabel=x", r"Did you mean table\?"),
        ("django://default", "to be a file, got ':memory:'"),
    ],
)
def test_what_names_no_store_is_refused(shop: Path, url: str, advice: str) -> None:
    with pytest.raises(ConfigurationError, match=advice) as caught:
        open_store(url)
    assert "secret" not in str(caught.value)


def test_another_kind_of_database_is_refused_with_what_to_use(monkeypatch: pytest.MonkeyPatch, shop: Path) -> None:
    monkeypatch.setattr("django.db.backends.sqlite3.base.DatabaseWrapper.vendor", "mysql")
    with pytest.raises(ConfigurationError, match=r"PostgreSQL or SQLite, got mysql\. Name another store"):
        open_store("django://shop")


def test_settings_that_do_not_serve_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Bare(dict[str, object]):
        def __missing__(self, alias: str) -> object:
            raise ImproperlyConfigured("DATABASES is not set.")

    monkeypatch.setattr("celery_idempotent.stores.django.connections", Bare())
    with pytest.raises(ConfigurationError, match=r"DATABASES is not set\. Set DJANGO_SETTINGS_MODULE"):
        open_store("django://default")
