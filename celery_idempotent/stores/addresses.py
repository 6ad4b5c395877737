"""URLs that name several servers: ``scheme://user:password@host1:port,host2:port/path?option=value``."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl, unquote

import redis
from redis import connection

from ..errors import ConfigurationError
from . import hide_password, unknown_parameter
from .replicas import OPTION

__all__ = ["ESCAPING", "PARSE", "Addresses", "as_redis", "check_parameters"]

PARSE: Any = connection.parse_url  # which has no types
#: What may be wrong with a URL that cannot be taken apart.
ESCAPING = "Write special characters of a password as %2F, %40 and so on."
#: Options of a connection that are objects of Python, and that no text can be.
OBJECTS = re.compile(
    "retry|credential_provider|command_packer|driver_info|event_dispatcher|himport_registry|parser|.*_class|"
    "redis_connect_func|socket_keepalive_options|ssl_ocsp_context|(maint|oss|orig)_.*|maintenance_.*"
)


@dataclass(frozen=True)
class Addresses:
    """What such a URL says.

    Arguments:
        url: As it was written.
        example: A good one, for errors.
        hosts: Hosts and ports.
        path: The parts behind the hosts.
        options: Credentials, and what the query says, as redis-py takes it.
        secure: Whether the scheme asks for TLS.
    """

    url: str = field(repr=False)
    example: str
    hosts: tuple[tuple[str, int], ...]
    path: tuple[str, ...]
    options: dict[str, Any] = field(repr=False)
    secure: bool

    @classmethod
    def of(cls, url: str, *, port: int, example: str, own: Sequence[str] = ()) -> Addresses:
        """Return what a URL says.

        Arguments:
            url: The URL.
            port: Where a host is reached that is written without one.
            example: A good URL, for errors.
            own: Parameters beside redis-py's and ``wait_replicas``.

        Raises:
            ConfigurationError: it cannot be parsed, or has a parameter that nothing reads.
        """
        scheme, _, rest = url.partition("://")
        base, _, query = rest.partition("?")
        authority, _, path = base.partition("/")
        credentials, _, hosts = authority.rpartition("@")
        user, _, password = credentials.partition(":")
        named = {"username": unquote(user), "password": unquote(password)}
        try:
            if "@" in path:  # the rest of a password, which must not be taken for a host
                raise ValueError("an @ follows a slash")
            places = tuple(_place(host, port) for host in hosts.split(","))
        except ValueError as error:
            raise _error(url, example, str(error), advice=ESCAPING) from None
        try:
            asked = PARSE(f"redis://host/?{query}")
        except ValueError as error:
            raise _error(url, example, str(error)) from None
        asked.pop("host")
        secure = scheme.lower().startswith("rediss")
        check_parameters(url, redis.SSLConnection if secure else redis.Connection, own)
        options = {**asked, **{name: value for name, value in named.items() if value}}
        parts = tuple(unquote(part) for part in path.split("/") if part)
        return cls(url, example, places, parts, options, secure)

    def connection(self, defaults: dict[str, Any], **changes: Any) -> dict[str, Any]:
        """Return how redis-py connects to each, as the arguments of one of its pools.

        Arguments:
            defaults: Options that the URL need not give.
            changes: What holds whatever it says; None is left out.

        Raises:
            ConfigurationError: the URL has an option that redis-py does not know.
        """
        kind = redis.SSLConnection if self.secure else redis.Connection
        merged = {**defaults, **self.options, **changes}
        options = {name: value for name, value in merged.items() if value is not None}
        if options.pop("decode_responses", False):
            raise self.error("A store needs replies as bytes, and no decode_responses")
        known = _options_of(kind)
        for name in options.keys() - known:  # given by code: those of the URL are checked
            raise unknown_parameter(self.url, name, known, "redis-py has no such option of a connection.")
        try:
            kind(**options)  # connects nothing
        except (TypeError, ValueError, redis.RedisError) as error:
            raise self.error(str(error)) from None
        return {**options, "connection_class": kind}

    def error(self, why: str) -> ConfigurationError:
        """Return the error for such a URL."""
        return _error(self.url, self.example, why)


def _place(written: str, port: int) -> tuple[str, int]:
    """Return a host and its port; the message of an error has nothing of what was written in it, or of a password."""
    host, colon, number = written.strip().rpartition(":")
    if not colon or number.endswith("]"):  # an IPv6 address has colons of its own
        host, number = written.strip(), str(port)
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host or "[" in host:
        raise ValueError("an IPv6 address stands in brackets, as in [::1]:6379")
    if not host:
        raise ValueError("a host is missing")
    if not (number.isdecimal() and 0 < int(number) < 65536):
        raise ValueError("a port is a number from 1 to 65535")
    return unquote(host), int(number)


def check_parameters(url: str, kind: type[Any], own: Sequence[str]) -> None:
    """Refuse parameters of a URL that nothing reads.

    Arguments:
        url: The URL.
        kind: redis-py's class of the connection.
        own: Parameters beside those of the connection and ``wait_replicas``.

    Raises:
        ConfigurationError: there is one; its value is in no message.
    """
    ours = (OPTION, *own)
    texts = {name for name in _options_of(kind) if not OBJECTS.fullmatch(name)}
    for name, _ in parse_qsl(url.partition("?")[2], keep_blank_values=True):
        if name in texts or name in ours:
            continue
        if name.startswith("ssl_") and name in _options_of(redis.SSLConnection):
            scheme = url.partition("://")[0].lower()
            others = f"That is one of {scheme.replace('redis', 'rediss').replace('valkey', 'rediss')}://."
            raise unknown_parameter(url, name, (), others)
        others = f"There are {', '.join(ours)} and redis-py's options of a connection, as socket_timeout."
        raise unknown_parameter(url, name, (*ours, *sorted(texts)), others)


def _options_of(kind: type[Any]) -> set[str]:
    """Return the names of all options of a connection."""
    found = {name for base in kind.__mro__ for name in inspect.signature(vars(base).get("__init__", object)).parameters}
    return found - {"self", "args", "kwargs", "host", "port", "path"}


def _error(url: str, example: str, why: str, *, advice: str = "") -> ConfigurationError:
    text = (
        f"Expected a URL like {example}, got {hide_password(url)!r}. {why[:1].upper()}{why[1:].rstrip('.')}. {advice}"
    )
    return ConfigurationError(text.rstrip())


def as_redis(url: str) -> str:
    """Return a URL of one server, Valkey or Redis, as redis-py takes it."""
    scheme, separator, rest = url.partition("://")
    return f"{scheme.lower().replace('valkey', 'redis')}{separator}{rest}"
