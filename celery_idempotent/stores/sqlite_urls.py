"""Which file and table a ``sqlite://`` URL names."""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass
from urllib.parse import parse_qsl, unquote

from ..errors import ConfigurationError
from . import unknown_parameter

__all__ = ["Place"]

TABLE = "celery_idempotency"
#: Seconds a verb waits for other writers. A lease call must answer or fail long before a lease ends.
TIMEOUT = 2.0
SYNCHRONOUS = ("full", "normal", "extra", "off")
OPTIONS = ("table", "timeout", "synchronous")
_NAME = re.compile(r"(?!sqlite_)[A-Za-z_][A-Za-z0-9_]{0,62}", re.IGNORECASE)


@dataclass(frozen=True)
class Place:
    """Where a store keeps its records, and how.

    Arguments:
        path: The file; what is relative is looked for in the folder that is current now.
        table: The table in it, which the store makes; a second one is ``<table>_meta``.
        timeout: Seconds a verb waits for other writers.
        synchronous: What a commit waits for, as SQLite's pragma of this name says it.

    Raises:
        ConfigurationError: one of these is nothing that SQLite takes.
    """

    path: str
    table: str = TABLE
    timeout: float = TIMEOUT
    synchronous: str = SYNCHRONOUS[0]

    def __post_init__(self) -> None:
        if not self.path or ":memory:" in self.path:
            raise ConfigurationError(
                f"Expected the path of a file, as in sqlite:///idempotency.db, got {self.path!r}. "
                "For a store in the memory of one process use memory://."
            )
        if not _NAME.fullmatch(self.table):
            raise ConfigurationError(
                f"Expected table to be letters, digits and underscores, 63 at most, got {self.table!r}. "
                f"The default is {TABLE}."
            )
        if not (math.isfinite(self.timeout) and self.timeout >= 0):
            raise ConfigurationError(f"Expected timeout to be seconds, 0 or more, got {self.timeout!r}.")
        if self.synchronous not in SYNCHRONOUS:
            raise ConfigurationError(f"Expected synchronous to be one of {SYNCHRONOUS}, got {self.synchronous!r}.")
        # A worker that becomes a daemon changes its folder, and its children would use another file.
        object.__setattr__(self, "path", os.path.abspath(self.path))

    def room(self) -> dict[str, int]:
        """Return the size of the file with its log, of all that is in it."""
        files = [path for path in (self.path, f"{self.path}-wal") if os.path.exists(path)]
        return {"file_bytes": sum(map(os.path.getsize, files))}

    @classmethod
    def of(cls, url: str) -> Place:
        """Return what a URL names: ``sqlite:///relative/path`` or ``sqlite:////absolute/path``, as SQLAlchemy's.

        Raises:
            ConfigurationError: it names no file, or has an option that is wrong.
        """
        rest, _, query = url.partition("://")[2].partition("?")
        host, _, path = rest.partition("/")
        if host:
            raise ConfigurationError(
                f"Expected three slashes before a relative path and four before an absolute one, got sqlite://{rest}. "
                f"Write sqlite:///{rest}."
            )
        options = dict(parse_qsl(query, keep_blank_values=True))
        for name in options:
            if name not in OPTIONS:
                raise unknown_parameter(url, name, OPTIONS, f"There are {', '.join(OPTIONS)}.")
        try:
            timeout = float(options.get("timeout", TIMEOUT))
        except ValueError:
            raise ConfigurationError(
                f"Expected timeout to be seconds, 0 or more, got {options['timeout']!r}."
            ) from None
        synchronous = options.get("synchronous", SYNCHRONOUS[0]).lower()
        return cls(unquote(path), options.get("table", TABLE), timeout, synchronous)
