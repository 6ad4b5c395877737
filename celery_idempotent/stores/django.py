"""A database of Django's settings, as a place of a store: ``django://default``."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from django.core.exceptions import ImproperlyConfigured
from django.db import connections
from django.utils.connection import ConnectionDoesNotExist

from ..errors import ConfigurationError
from . import open_store
from .base import Store

LIKE = "django://default, or django://alias?table=..."
#: What Django passes to psycopg beside the parameters of libpq.
NOT_LIBPQ = {"autocommit", "client_encoding", "context", "cursor_factory", "prepare_threshold", "row_factory"}


@dataclass(frozen=True)
class DjangoDatabase:
    """A PostgreSQL or SQLite database of Django's ``DATABASES``, in which a store keeps its records.

    Arguments:
        alias: Of the database.
        query: The options of the store, as in the query of its URL.
    """

    alias: str = "default"
    query: str = ""

    @classmethod
    def of(cls, url: str) -> DjangoDatabase:
        """Return what a URL ``django://alias?options`` names.

        Raises:
            ConfigurationError: it is no such URL.
        """
        parts = urlsplit(url)
        if parts.path.strip("/") or "@" in parts.netloc or ":" in parts.netloc:
            raise ConfigurationError(
                f"Expected a URL like {LIKE}, whose host is an alias of DATABASES in Django's settings and nothing "
                "else, got one with a path, a port or a user. The settings have those."
            )
        return cls(parts.netloc or "default", parts.query)

    @classmethod
    def from_url(cls, url: str) -> Store:
        """Return a store in the database that a URL names; nothing is connected yet.

        Arguments:
            url: ``django://alias``; its query may give the options of a ``postgresql://`` or ``sqlite://`` store.

        Raises:
            ConfigurationError: Django has no such database, it is of another kind, or an option is wrong.
        """
        return open_store(cls.of(url).url())

    def url(self) -> str:
        """Return the URL of the database itself, with its password.

        Raises:
            ConfigurationError: Django has no such database, or it is of another kind.
        """
        wrapper = self._wrapper()
        if wrapper.vendor == "postgresql":
            return _postgres_url(wrapper.get_connection_params(), wrapper.settings_dict, self.query)
        if wrapper.vendor != "sqlite":
            raise ConfigurationError(
                f"Expected the Django database {self.alias!r} to be PostgreSQL or SQLite, got {wrapper.vendor}. Name "
                'another store: "redis://host:6379/1".'
            )
        name = str(wrapper.settings_dict["NAME"])
        if wrapper.is_in_memory_db() or name.startswith("file:"):
            raise ConfigurationError(
                f"Expected the Django database {self.alias!r} to be a file, got {name!r}, which the connections of a "
                'store do not see. Give it a NAME that is a path, and in tests use "memory://" as the store.'
            )
        return f"sqlite:///{quote(os.path.abspath(name))}{_query(self.query)}"

    def _wrapper(self) -> Any:
        try:
            wrapper = connections[self.alias]
            if wrapper.vendor == "postgresql":
                wrapper.get_connection_params()
        except ConnectionDoesNotExist:
            raise ConfigurationError(
                f"Expected django://{self.alias} to name one of the Django databases {', '.join(connections)}."
            ) from None
        except (ImproperlyConfigured, ImportError) as error:
            raise ConfigurationError(
                f"Expected django://{self.alias} to name a database of Django's settings, and they do not serve: "
                f"{str(error).rstrip('.')}. Set DJANGO_SETTINGS_MODULE to a module that can be "
                "imported here, and DATABASES there."
            ) from None
        return wrapper


def _query(*parts: str) -> str:
    found = "&".join(part for part in parts if part)
    return f"?{found}" if found else ""


def _postgres_url(params: dict[str, Any], described: dict[str, Any], query: str) -> str:
    known = {
        name: str(value)
        for name, value in params.items()
        if name not in NOT_LIBPQ and isinstance(value, (str, int, os.PathLike)) and value != ""
    }
    if role := described["OPTIONS"].get("assume_role"):  # Django sends SET ROLE
        known["options"] = f"{known.get('options', '')} -c role={role}".strip()
    user, password = known.pop("user", ""), known.pop("password", "")
    login = ":".join(quote(part, safe="") for part in ([user, password] if password else [user]))
    host, port, name = known.pop("host", ""), known.pop("port", ""), known.pop("dbname", "")
    if "," in host or ":" in host:  # several of them, or an address of IPv6
        known, host, port = {**known, "host": host, **({"port": port} if port else {})}, "", ""
    place = f"{quote(host, safe='')}{f':{port}' if port else ''}"
    return (
        f"postgresql://{f'{login}@' if login else ''}{place}/{quote(name, safe='')}"
        f"{_query(urlencode(known, quote_via=quote), query)}"
    )
