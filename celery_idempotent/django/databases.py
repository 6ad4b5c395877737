"""The stores that a project's settings name, and which of them are in a database of Django."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from celery._state import get_current_app
from django.conf import settings
from django.db import connections

from ..errors import ConfigurationError
from ..stores.cached import CachedUrl
from ..stores.django import DjangoDatabase


@dataclass(frozen=True)
class DatabaseStore:
    """A store whose records are in a database of Django.

    Arguments:
        alias: Of the database.
        vendor: "postgresql" or "sqlite".
        address: Where in it the records are.
        url: Of the store, as the settings have it.
    """

    alias: str
    vendor: str
    address: Any
    url: str = field(repr=False)

    @property
    def table(self) -> str:
        """The table of records, as Django's ``db_table`` has it."""
        if self.vendor == "postgresql":
            return f'"{self.address.schema}"."{self.address.table}"'
        return str(self.address.table)

    def statements(self, connection: Any) -> list[str]:
        """Return what makes the tables, or upgrades them; nothing where they have this library's version.

        Arguments:
            connection: Django's connection to the database, or None for one that has no tables.

        Raises:
            errors.StoreRefused: a table has the name and is another application's, or a newer version made it.
        """
        if self.vendor == "postgresql":
            return _due_in_postgres(self.address, connection)
        from ..stores.sqlite.schema import Schema

        if connection is not None:
            connection.ensure_connection()
        return Schema(self.address).due(connection and connection.connection)


def _due_in_postgres(address: Any, connection: Any) -> list[str]:
    from ..stores.postgres.schema import VERSION, Schema

    schema = Schema(address)
    if connection is not None:
        with connection.cursor() as cursor:
            if connection.in_atomic_block:  # of a migration
                cursor.execute(schema.turn)
            cursor.execute("select to_regclass(%s)", [schema.names["meta"]])
            if cursor.fetchone()[0] is not None:
                cursor.execute(schema.version)
                if any(version >= VERSION for (version,) in cursor.fetchall()):
                    return []
    return [schema.statements()]


def celery_app() -> Any:
    """Return the project's Celery app, which its ``__init__.py`` imports; without it, one that has no settings."""
    return get_current_app()


def named_stores() -> list[object]:
    """Return the stores, or their URLs, that the Celery app and the middleware have; each once."""
    options = getattr(settings, "IDEMPOTENCY_HTTP", None)
    of_app = celery_app().conf.get("idempotency_store") or getattr(settings, "CELERY_IDEMPOTENCY_STORE", None)
    named = [of_app, options.get("store") if isinstance(options, dict) else None]
    return [store for n, store in enumerate(named) if store and store not in named[:n]]


def database_stores() -> Iterator[DatabaseStore]:
    """Yield those of the stores that are in a database of Django; a URL that is wrong is the checks' matter."""
    for store in named_stores():
        try:
            found = database_store(store)
        except ConfigurationError:
            continue
        if found is not None:
            yield found


def database_store(store: object) -> DatabaseStore | None:
    """Return what a URL names, or None if that is in no database of Django.

    Raises:
        ConfigurationError: the URL is wrong.
    """
    if not isinstance(store, str):
        return None
    url = CachedUrl.of(store).durable if store.lower().startswith("cached+") else store
    alias = DjangoDatabase.of(url).alias if url.lower().startswith("django:") else ""
    url = DjangoDatabase.of(url).url() if alias else url
    scheme = url.partition("://")[0].lower()
    if scheme in ("postgresql", "postgres"):
        vendor, (address, likeness) = "postgresql", _in_postgres(url)
    elif scheme == "sqlite":
        vendor, (address, likeness) = "sqlite", _in_sqlite(url)
    else:
        return None
    alias = alias or _alias(vendor, likeness)
    return DatabaseStore(alias, vendor, address, store) if alias else None


def _in_postgres(url: str) -> tuple[Any, Callable[[Any], int]]:
    """Return the address of a store, and what rates databases of Django by their likeness to its own, from 0."""
    try:
        from psycopg.conninfo import conninfo_to_dict

        from ..stores.postgres.connections import Address
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"Expected {error.name} to be installed for a store in PostgreSQL, and it is not. "
            "Install it with: pip install 'celery-idempotent[postgres]'"
        ) from None
    address = Address.of_url(url)
    wanted = conninfo_to_dict(address.conninfo)

    def likeness(described: Any) -> int:
        # The store may reach it through PgBouncer, and Django itself; of several with one name the server decides.
        if described["NAME"] != wanted.get("dbname"):
            return 0
        host, port = (str(described[name]) == str(wanted.get(name.lower(), "")) for name in ("HOST", "PORT"))
        return 1 + 2 * host + port

    return address, likeness


def _in_sqlite(url: str) -> tuple[Any, Callable[[Any], int]]:
    from ..stores.sqlite.connections import Address

    address = Address.of(url)
    path = os.path.realpath(address.path)
    return address, lambda described: os.path.realpath(described["NAME"]) == path


def _alias(vendor: str, likeness: Callable[[Any], int]) -> str:
    """Return the alias of the database that is most alike, the first of equals; "" if none is."""
    found = {alias: likeness(connections[alias].settings_dict) for alias in connections if _is_of(vendor, alias)}
    best = max(found, key=lambda alias: found[alias], default="")
    return str(best) if best and found[best] else ""


def _is_of(vendor: str, alias: str) -> bool:
    return bool(connections[alias].vendor == vendor)
