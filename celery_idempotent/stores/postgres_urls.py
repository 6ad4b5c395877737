"""What the URL of a PostgreSQL store says: where the server is, and what the table is called."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import parse_qsl, quote, urlencode

import psycopg
from psycopg.conninfo import conninfo_to_dict

from ..errors import ConfigurationError
from . import hide_password, unknown_parameter

__all__ = ["Place"]

OPTIONS = ("schema", "table", "connections")
SCHEMA, TABLE, CONNECTIONS = "public", "idempotency", 8
#: The names of the functions are made of the table's, and PostgreSQL cuts names off at 63 bytes.
NAME = re.compile(r"[a-z_][a-z0-9_]{0,39}")


@dataclass(frozen=True)
class Place:
    """Where the records are.

    Arguments:
        conninfo: The connection string without what is ours, for libpq.
        shown: What to call the server in messages; no password in it.
        schema, table: Names of lower-case letters, digits and underscores, 40 at most.
        connections: Most connections of one process, unless they do not suffice for 2 seconds.
    """

    conninfo: str
    shown: str = "postgresql"
    schema: str = SCHEMA
    table: str = TABLE
    connections: int = CONNECTIONS

    def __post_init__(self) -> None:
        for option, name in (("schema", self.schema), ("table", self.table)):
            if not NAME.fullmatch(name):
                raise ConfigurationError(
                    f"Expected {option}= of a PostgreSQL store to be a name of 1 to 40 lower-case letters, digits and "
                    f"underscores that begins with no digit, got {name!r}."
                )
        if self.connections < 1:
            raise ConfigurationError(
                f"Expected connections= of a PostgreSQL store to be at least 1, got {self.connections}."
            )

    @classmethod
    def of_url(cls, url: str) -> Place:
        """Return the place that a URL names.

        Arguments:
            url: As libpq takes it; its query may also carry ``schema``, ``table`` and ``connections``.

        Raises:
            ConfigurationError: the URL cannot be parsed, or an option is wrong.
        """
        shown = hide_password(url)
        base, _, query = url.partition("?")
        options, rest = {}, []
        _check_parameters(url, query)
        try:
            for name, value in parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query)):
                if name in OPTIONS:
                    options[name] = value
                else:
                    rest.append((name, value))
            conninfo = base + ("?" + urlencode(rest, quote_via=quote) if rest else "")
            ports = str(conninfo_to_dict(conninfo).get("port") or "")
            if not ports.replace(",", "0").isdecimal() and ports:  # libpq says so only when it connects
                raise ValueError("the port is no number")
        except (ValueError, psycopg.ProgrammingError) as error:
            # What libpq could not read may be the password.
            why = "" if "@" in url else f" ({str(error).strip()})"
            raise ConfigurationError(
                f"Expected a PostgreSQL URL like postgresql://user:password@host:5432/database, got {shown!r}{why}. "
                "Write special characters of a password as %2F, %40 and so on."
            ) from None
        most = options.get("connections", str(CONNECTIONS))
        if not most.isdecimal():
            raise ConfigurationError(f"Expected connections= of a PostgreSQL store to be a whole number, got {most!r}.")
        return cls(conninfo, shown, options.get("schema", SCHEMA), options.get("table", TABLE), int(most))


def _check_parameters(url: str, query: str) -> None:
    libpq = [option.keyword.decode() for option in psycopg.pq.Conninfo.get_defaults()]
    known = (*OPTIONS, *libpq, "ssl")  # ssl=true, as JDBC has it, is sslmode=require
    for name, _ in parse_qsl(query, keep_blank_values=True):
        if name not in known:
            others = f"There are {', '.join(OPTIONS)} and those of libpq, as sslmode."
            raise unknown_parameter(url, name, known, others)
