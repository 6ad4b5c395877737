"""Connections to Redis that all threads share, the URLs that name servers, and what redis-py's errors mean.

Half of what a command costs in redis-py is the pool's locks, a look whether stray data is waiting, and the wrapping of
retries, which lease calls do not use. What the look is for is done here by closing whatever was interrupted.

A connection for every thread would be simpler, but pools of threads and greenlets have hundreds, greenlets new ones for
every task, and redis-py gives out no more than a hundred connections.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from urllib.parse import parse_qsl, unquote

import redis
from redis import connection
from redis.connection import HiredisRespSerializer
from redis.exceptions import (
    AskError,
    AuthenticationError,
    AuthorizationError,
    NoPermissionError,
    NoScriptError,
    ReadOnlyError,
    RedisError,
    ResponseError,
)

from ...errors import ConfigurationError, RecordUnreadable, StoreError, StoreRefused, StoreUnreachable
from .. import hide_password, unknown_parameter
from ..pool import Pool

#: Most connections of one process, and twice as many while none comes back.
MOST = 32
#: Errors that mean the server did not answer.
UNANSWERED = (redis.ConnectionError, redis.TimeoutError, OSError)


hiredis: Any = sys.modules.get("hiredis")  # which redis-py has imported, if it can use it


class Packer(HiredisRespSerializer):
    """Spell commands by hiredis, and their numbers before.

    hiredis (3.5 and before) spells a number by a function that looks for signals, and crashes the process if a handler
    raises there, as that of the soft time limit does.
    """

    def pack(self, *command: Any) -> Any:
        spelled: list[Any] = [str(part) if type(part) in (int, float) else part for part in command]
        if type(spelled[0]) is str and " " not in spelled[0]:  # else redis-py takes it apart
            try:
                return [hiredis.pack_command(tuple(spelled))]
            except TypeError:  # of which redis-py makes its own error
                return super().pack(*spelled)
        return super().pack(*spelled)


#: None for redis-py's own, which spells by itself where there is no hiredis.
PACKER = Packer() if hasattr(hiredis, "pack_command") else None


class Connections:
    """Execute commands, each on a connection that no other command is using.

    Arguments:
        client: A redis-py client. One without a connection pool (a Cluster client) is used by its ``execute_command``.
        closed: What it raises when the server has closed a connection.
    """

    def __init__(self, client: Any, closed: type[Exception]) -> None:
        self._client, self._closed = client, closed
        #: false for a Cluster client, whose keys live on different nodes
        self.one_node = hasattr(client, "connection_pool") and hasattr(client, "client")
        self._limit = min(2 * MOST, getattr(getattr(client, "connection_pool", None), "max_connections", 2 * MOST))
        if self.one_node:
            _let_in_again(client.connection_pool)
            for each in _pools(client.connection_pool):
                each.connection_kwargs.setdefault("command_packer", PACKER)
        self._reset()

    def _reset(self) -> None:
        # Of clients of one connection each. Made by no method: in a cycle they would wait for the collector.
        self._pool: Pool[Any] = Pool(partial(_connect, self._client), min(MOST, self._limit), self._limit, UNANSWERED)
        self._pid = os.getpid()  # last, as in `Heartbeat`

    def execute(self, *command: Any, then: Sequence[Any] | None = None, urgent: bool = False) -> Any:
        """Send a command and return its reply; raise what redis-py raises.

        Arguments:
            command: What to send.
            then: A command to send with it, on the same connection and in one round trip; the reply is a pair.
            urgent: Come before the calls that wait for a connection (default: after them).
        """
        if not self.one_node:
            return self._client.execute_command(*command)
        if then is None:
            return self._lend(_one, command, urgent)
        return self._lend(_both, (command, then), urgent)

    def pipeline(self, commands: Sequence[Sequence[Any]], *, urgent: bool = False) -> list[Any]:
        """Send commands in one round trip, and return their replies, of which each may be a `ResponseError`.

        Arguments:
            commands: What to send.
            urgent: As in `execute`.
        """
        if self.one_node:
            replies: list[Any] = self._lend(_all, commands, urgent)
            return replies
        return [_caught(self.execute, command) for command in commands]

    def _lend(self, use: Callable[[Any, Any], Any], what: Any, urgent: bool) -> Any:
        """Return what `use` makes of a connection and this, on a connection that no other thread is using."""
        if self._pid != os.getpid():  # what came through a fork is the parent's
            _after_fork(self._client.connection_pool)  # first: what is forgotten goes back there
            self._reset()
        pool = self._pool
        try:
            client = pool.take(urgent=urgent) if pool.line else pool.idle.pop()
        except IndexError:
            client = pool.take(urgent=urgent)
        connection = client.connection
        try:
            if pool.is_stale(client):
                connection.disconnect()
            if getattr(connection, "_sock", None) is None:
                connection.connect()  # to send would do it too, without a query to a sentinel for the primary
            reply = use(connection, what)
        except BaseException as error:
            if not isinstance(error, NoScriptError):  # of which all is read, and the script goes on the same connection
                connection.disconnect()  # a reply that is still on its way must not answer the next command
            if not isinstance(error, (RedisError, OSError)):
                _close_idle(_pools(self._client.connection_pool)[1:])  # those to a sentinel, see `_connect`
            if isinstance(error, self._closed):
                pool.idle.clear()  # closed by the server too; back in redis-py's pool they are looked at before use
            elif is_read_only(error):
                pool.idle.clear()  # to the same server
                _close_idle([self._client.connection_pool])
            pool.give_back(client, None if isinstance(error, ResponseError) else error)
            raise
        pool.give_back(client)  # unless it is interrupted: back in redis-py's pool, too
        return reply

    def close(self) -> None:
        """Close every connection, those of other threads too; the next call opens a new one."""
        if self.one_node:
            for each in _pools(self._client.connection_pool):
                each.disconnect()
        self._client.close()


def _connect(client: Any) -> Any:
    """Return a client of one connection to the same server."""
    try:
        return client.client()
    except (RedisError, OSError):
        raise
    except BaseException:
        # redis-py puts back into its pool what was interrupted during its handshake, and gives it out again: half made,
        # so that every later opening fails on it, or with a reply on its way that would be taken for the one to the
        # first command. Closed, it begins with a new handshake.
        _close_idle(_pools(client.connection_pool))
        raise


def _pools(pool: Any) -> list[Any]:
    sentinels = getattr(getattr(pool, "sentinel_manager", None), "sentinels", ())
    return [pool, *(sentinel.connection_pool for sentinel in sentinels)]


def _close_idle(pools: Iterable[Any]) -> None:
    """Close the connections of pools that no thread is using."""
    for pool in pools:
        with suppress(TypeError):  # redis-py 5 can close only all connections of a BlockingConnectionPool
            pool.disconnect(inuse_connections=False)


def _let_in_again(pool: Any) -> None:
    """Give a pool of redis-py a lock that a thread which has it may take once more.

    The collector may run while a thread is within the pool, and find a client there, whose end is to give its
    connection back to the same pool. With redis-py 5.0.0, whose lock is a plain one, that thread then waits for itself,
    and all others for it.
    """
    for each in _pools(pool):
        if not hasattr(getattr(each, "_lock", None), "_is_owned"):  # which an RLock has
            each._lock = threading.RLock()


def _after_fork(pool: Any) -> None:
    """Give a pool of redis-py locks of this process.

    It makes one itself after a fork, but waits for the old one before: for ever, if a thread that our parent had and we
    have not was just opening a connection.
    """
    for each in _pools(pool):
        each._lock = threading.RLock()
        getattr(each, "_checkpid", lambda: None)()  # so that it makes its own now, and does not replace this one later
    _let_in_again(pool)


def _one(connection: Any, command: Sequence[Any]) -> Any:
    """Send a command and read its reply."""
    connection.send_command(*command)
    return connection.read_response()


def _both(connection: Any, commands: Sequence[Sequence[Any]]) -> tuple[Any, Any]:
    """Send two commands together and read their replies; raise the first if it is an error."""
    first, second = _all(connection, commands)
    if isinstance(first, ResponseError):
        raise first
    return first, second


def _all(connection: Any, commands: Sequence[Sequence[Any]]) -> list[Any]:
    """Send commands together and read their replies, of which each may be an error."""
    connection.send_packed_command(connection.pack_commands(commands))
    replies = [_caught(connection.read_response, ()) for _ in commands]
    errors = [reply for reply in replies if isinstance(reply, ResponseError)]
    if any(map(is_read_only, errors)):
        connection.disconnect()
    return replies


def is_read_only(error: BaseException) -> bool:
    """Return whether a server takes no writes: after a failover the same name leads to another server."""
    return isinstance(error, ReadOnlyError) or (isinstance(error, ResponseError) and "READONLY" in str(error))


def _caught(call: Callable[..., Any], what: Sequence[Any]) -> Any:
    """Return the reply to a command, or the error that the server replied."""
    try:
        return call(*what)
    except ResponseError as error:
        return error


REFUSALS = (AuthenticationError, AuthorizationError, NoPermissionError)
#: The same from inside a script (Redis 6 and 7.0, then later), for a client that sends much without a login, and for
#: a database that does not exist.
_REFUSED = (
    "The user executing the script can't",
    "ACL failure in script",
    "Protocol error: unauthenticated",
    "DB index is out of range",
)


#: What is replied to redis-py, which asks for RESP3 by HELLO, by what has only RESP2.
_NO_RESP3 = re.compile("NOPROTO|unknown command '?`?HELLO", re.IGNORECASE)


def translate_error(error: Exception, command: Sequence[Any], url: str) -> StoreError:
    """Return the store's error that an error of redis-py means.

    Arguments:
        error: What redis-py raised.
        command: What was sent.
        url: What to call the server; no password in it.
    """
    if isinstance(error, StoreError):
        return error
    what = f"{type(error).__name__}: {error}"
    if isinstance(error, AskError) or str(error).startswith(("MOVED ", "ASK ")):
        return StoreRefused(f"The idempotency store {url} is a node of a Cluster ({what}). Name it redis+cluster://.")
    if "cluster support disabled" in what:
        return StoreRefused(
            f"The idempotency store {url} is no Cluster ({what}). Name it redis://, or the right nodes."
        )
    if isinstance(error, ResponseError) and _NO_RESP3.search(str(error)):
        return StoreRefused(
            f"The idempotency store {url} does not speak RESP3, as some proxies do not ({what}). "
            "Add protocol=2 to the query of its URL."
        )
    if isinstance(error, ResponseError) and str(error).lower().startswith("unknown command"):
        return StoreRefused(
            f"The idempotency store {url} lacks a command ({what}). Expected a Redis or Valkey with its Lua scripts, "
            'and none of its commands renamed; of fakeredis, install "fakeredis[lua]".'
        )
    if isinstance(error, REFUSALS) or any(words in str(error) for words in _REFUSED):
        return StoreRefused(
            f"The idempotency store {url} refused us ({what}). "
            "Check the password, the user and its rights, and the number of the database."
        )
    if isinstance(error, ResponseError) and "WRONGTYPE" in str(error):
        return RecordUnreadable(
            f"{command[3]!r} in the idempotency store {url} is no record of celery_idempotent: its value is of another "
            "type. Does something else use this database? Delete the key, or set idempotency_namespace."
        )
    return StoreUnreachable(
        f"The idempotency store {url} cannot serve ({what}). Check that it runs and has memory left."
    )


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
    """The parts of such a URL.

    Arguments:
        url: As it was written.
        example: A good one, for errors.
        hosts: Hosts and ports.
        path: The parts behind the hosts.
        options: Credentials, and the options in the query, as redis-py takes them.
        secure: Whether the scheme requires TLS.
    """

    url: str = field(repr=False)
    example: str
    hosts: tuple[tuple[str, int], ...]
    path: tuple[str, ...]
    options: dict[str, Any] = field(repr=False)
    secure: bool

    @classmethod
    def of(cls, url: str, *, port: int, example: str, own: Sequence[str] = ()) -> Addresses:
        """Return the parts of a URL.

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
            given = PARSE(f"redis://host/?{query}")
        except ValueError as error:
            raise _error(url, example, str(error)) from None
        given.pop("host")
        secure = scheme.lower().startswith("rediss")
        check_parameters(url, redis.SSLConnection if secure else redis.Connection, own)
        options = {**given, **{name: value for name, value in named.items() if value}}
        parts = tuple(unquote(part) for part in path.split("/") if part)
        return cls(url, example, places, parts, options, secure)

    def connection(self, defaults: dict[str, Any], **changes: Any) -> dict[str, Any]:
        """Return how redis-py connects to each, as the arguments of one of its pools.

        Arguments:
            defaults: Options that the URL need not give.
            changes: Options that override the URL's; None is left out.

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
    own_options = (OPTION, *own)
    texts = {name for name in _options_of(kind) if not OBJECTS.fullmatch(name)}
    for name, _ in parse_qsl(url.partition("?")[2], keep_blank_values=True):
        if name in texts or name in own_options:
            continue
        if name.startswith("ssl_") and name in _options_of(redis.SSLConnection):
            scheme = url.partition("://")[0].lower()
            others = f"That is one of {scheme.replace('redis', 'rediss').replace('valkey', 'rediss')}://."
            raise unknown_parameter(url, name, (), others)
        others = f"There are {', '.join(own_options)} and redis-py's options of a connection, as socket_timeout."
        raise unknown_parameter(url, name, (*own_options, *sorted(texts)), others)


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
    """Return a URL as redis-py takes it, which knows neither Valkey's schemes nor Celery's ``CERT_REQUIRED``."""
    scheme, separator, rest = url.partition("://")
    rest = re.sub(r"(?<=[?&]ssl_cert_reqs=)CERT_(\w+)", lambda found: found[1].lower(), rest)
    return f"{scheme.lower().replace('valkey', 'redis')}{separator}{rest}"


#: What the option is called, in a store's URL too.
OPTION = "wait_replicas"
