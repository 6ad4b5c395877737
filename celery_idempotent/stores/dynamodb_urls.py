"""Which table a URL names, and where it is: ``dynamodb://table?region=eu-west-1``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import isfinite
from urllib.parse import parse_qsl, urlsplit

from ..errors import ConfigurationError
from . import hide_password, unknown_parameter

__all__ = ["TIMEOUT", "Place"]

#: Seconds a connection attempt and a reply may take. A lease call must answer or fail long before a lease ends; boto3's
#: own default is a minute, four times over.
TIMEOUT = 2.0

_TABLE = re.compile(r"[A-Za-z0-9_.-]{3,255}")
_OPTIONS = ("region", "endpoint_url", "profile", "timeout")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a table is; who may use it, boto3 finds out as it always does.

    Arguments:
        table: The table's name.
        region: As ``eu-west-1``; "" for what boto3 finds in the environment.
        endpoint_url: Another endpoint than AWS's own, as ``http://localhost:8000``; "" for none.
        profile: Which profile of boto3's configuration; "" for what boto3 takes by itself.
        timeout: Seconds a connection attempt and a reply may take.
    """

    table: str
    region: str = ""
    endpoint_url: str = ""
    profile: str = ""
    timeout: float = TIMEOUT

    def __str__(self) -> str:
        """Return what to call the table in messages."""
        return f"dynamodb://{self.table}"

    @classmethod
    def in_url(cls, url: str) -> Place:
        """Return what a URL says.

        Raises:
            ConfigurationError: it holds a password, an option that is not known, or no table's name.
        """
        _, _, rest = url.partition("://")
        table, _, query = rest.partition("?")
        if "@" in table:
            raise _wrong(url, "it holds a user or a password; boto3 takes credentials from the environment, a profile")
        if not _TABLE.fullmatch(table.rstrip("/")):
            raise _wrong(url, "a table's name has 3 to 255 letters, digits, dots, dashes and underscores")
        given = dict(parse_qsl(query, keep_blank_values=True))
        for name in given:
            if name not in _OPTIONS:
                raise unknown_parameter(url, name, _OPTIONS, f"There are {', '.join(_OPTIONS)}.")
        timeout = _seconds(url, given.pop("timeout", str(TIMEOUT)))
        endpoint = given.get("endpoint_url", "")
        if endpoint and (urlsplit(endpoint).scheme not in ("http", "https") or "@" in endpoint):
            raise _wrong(url, "its endpoint_url is one like http://localhost:8000, without a password")
        return cls(table.rstrip("/"), timeout=timeout, **given)


def _seconds(url: str, text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not (seconds > 0 and isfinite(seconds)):
        raise _wrong(url, "its timeout is a number of seconds above 0")
    return seconds


def _wrong(url: str, why: str) -> ConfigurationError:
    return ConfigurationError(
        f"Expected a URL like dynamodb://table?region=eu-west-1, got {hide_password(url)!r}: {why}."
    )
