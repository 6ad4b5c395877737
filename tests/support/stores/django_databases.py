"""Databases of Django under an alias, for as long as a test lasts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

__all__ = ["django_database"]


@contextmanager
def django_database(alias: str, engine: str, **options: object) -> Iterator[None]:
    """Let Django know a database under this alias: `django_database("shop", "sqlite3", NAME=path)`."""
    django = pytest.importorskip("django")
    from django.apps import apps
    from django.conf import settings
    from django.db import connections

    if not settings.configured:
        databases = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}}
        settings.configure(DATABASES=databases, LOGGING_CONFIG=None)
    if not apps.ready:
        django.setup()
    described = {"ENGINE": f"django.db.backends.{engine}", **options}
    connections.databases[alias] = {**connections.databases["default"], **described}
    try:
        yield
    finally:
        connections[alias].close()
        del connections[alias], connections.databases[alias]
