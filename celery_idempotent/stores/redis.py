"""Redis, Valkey, and whatever speaks their protocol with Lua scripts.

One hash per record, one script per verb, one round trip per verb; the server's TIME is the clock. Field names are the
words of the project, so that ``HGETALL`` explains itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from functools import cache
from importlib import resources
from typing import Any
from urllib.parse import unquote, urlsplit

import redis
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    NoPermissionError,
    NoScriptError,
    RedisError,
    ResponseError,
)
from redis.retry import Retry

from ..errors import (
    ConfigurationError,
    LeaseLost,
    RecordUnreadable,
    StoreError,
    StoreRefused,
    StoreUnreachable,
)
from ..records import Claim, Lease, Outcome, Record, Refusal, Release, State, Verdict
from . import hide_password
from .base import Store
from .connections import Connections
from .hashes import claim_args, lease_args, ms, padded, record_of, unreadable

__all__ = ["RedisStore"]

#: Seconds a connection attempt and a command may take. A lease call must answer or fail long before a lease ends;
#: redis-py's own defaults keep a caller waiting for tens of seconds.
TIMEOUT = 2.0
BATCH = 1000

_REFUSALS = (AuthenticationError, AuthorizationError, NoPermissionError)
#: The same said from inside a script (Redis 6 and 7.0, then later), to whoever sends much and is nobody, and of a
#: database that does not exist.
_REFUSED = (
    "The user executing the script can't",
    "ACL failure in script",
    "Protocol error: unauthenticated",
    "DB index is out of range",
)


@cache
def script(verb: str) -> tuple[str, str]:
    """Return the source of a verb's script and its digest, under which the server caches it."""
    source = (resources.files(__package__) / "lua" / f"{verb}.lua").read_text(encoding="utf-8")
    return source, hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()


class RedisStore(Store):
    """Keep the records in Redis.

    Weaker than the contract where a failover loses writes that were not replicated, or where the server evicts keys.

    Arguments:
        client: A redis-py client, or anything with its ``execute_command``, that returns bytes.
        url: What to call the server in messages; no password in it.

    Raises:
        ConfigurationError: the client decodes replies, which would break binary results.
    """

    def __init__(self, client: redis.Redis, *, url: str = "redis") -> None:
        pool = getattr(client, "connection_pool", None)
        if pool is not None and pool.connection_kwargs.get("decode_responses"):
            raise ConfigurationError(
                "The Redis client of an idempotency store must return bytes; "
                "got one made with decode_responses=True. Make it without."
            )
        self._client = client
        self._connections = Connections(client, redis.ConnectionError)
        self._url = url

    @classmethod
    def from_url(cls, url: str, **options: Any) -> RedisStore:
        """Return a store on the server that ``url`` names (``redis://``, ``rediss://`` or ``unix://``).

        Arguments:
            url: As redis-py's `from_url` takes it; its query may carry any connection option.
            options: Connection options that the URL does not give.

        Raises:
            ConfigurationError: the URL cannot be parsed.
        """
        try:
            client = redis.Redis.from_url(url, **{**cls.connection_options(), **options})
            pool = client.connection_pool
            pool.connection_class(**pool.connection_kwargs)  # connects nothing, and knows which options there are
            if not url.startswith("unix:"):
                int(
                    unquote(urlsplit(url).path).replace("/", "") or 0
                )  # redis-py takes database 0 for what is no number
        except (ValueError, TypeError) as error:
            # A password with a slash in it ends up in the text of the error, as the port that it is not.
            why = f" ({error})" if isinstance(error, TypeError) or "@" not in url else ""
            raise ConfigurationError(
                f"Expected a Redis URL like redis://:password@host:6379/0, got {hide_password(url)!r}{why}. "
                "Write special characters of a password as %2F, %40 and so on."
            ) from None
        return cls(client, url=hide_password(url))

    @staticmethod
    def connection_options() -> dict[str, Any]:
        """Return how lease calls connect: short timeouts, and no retries hidden in the client."""
        return {
            "socket_timeout": TIMEOUT,
            "socket_connect_timeout": TIMEOUT,
            "retry": Retry(NoBackoff(), 0),
            "health_check_interval": 0,
        }

    def acquire(self, claim: Claim) -> Lease | Refusal:
        verdict, now, fence, crashes, took_over, fields = self._call("acquire", (claim.key,), claim_args(claim))
        if verdict == b"lease":
            return Lease(claim, int(fence), taken_over=took_over == 1, crashes=int(crashes))
        if verdict == b"unreadable":
            raise unreadable(claim.key, fields)
        return Refusal(Verdict(verdict.decode()), record_of(claim.key, fields, int(now)))

    def renew(self, leases: Sequence[Lease]) -> Sequence[Lease]:
        lost: list[Lease] = []
        size = BATCH if self._connections.one_node else 1
        for start in range(0, len(leases), size):
            batch = leases[start : start + size]
            args: list[Any] = []
            for lease in batch:
                args += lease_args(lease)
            lost += [batch[index] for index in self._call("renew", [lease.key for lease in batch], args)]
        return lost

    def settle(self, lease: Lease, outcome: Outcome, *, ttl: float) -> None:
        args = (*lease_args(lease), outcome.state.value, outcome.payload, ms(ttl))
        if not self._call("settle", (lease.key,), args):
            raise LeaseLost(
                f"The lease on {lease.key!r} is held by somebody else, or was forgotten: nothing was settled."
            )

    def release(self, lease: Lease, release: Release) -> bool:
        args = (
            lease.owner,
            release.reason.value,
            ms(release.retry_in),
            padded(release.next_attempt),
            ms(lease.claim.keep_ttl),
        )
        return bool(self._call("release", (lease.key,), args))

    def announce(self, key: str, task_id: str) -> bool:
        return bool(self._call("announce", (key,), (task_id,)))

    def get(self, key: str) -> Record | None:
        now, fields = self._call("read", (key,), ())
        return record_of(key, fields, int(now)) if fields else None

    def delete(self, key: str) -> bool:
        return bool(self._command("DEL", key))

    def scan(self, *, prefix: str = "", state: State | None = None) -> Iterator[Record]:
        pattern = "".join(f"\\{letter}" if letter in "*?[]\\^" else letter for letter in prefix) + "*"
        cursor = b"0"
        while True:
            cursor, keys = self._command("SCAN", cursor, "MATCH", pattern, "COUNT", 500, "TYPE", "hash")
            for key in keys:
                try:
                    record = self.get(key.decode())
                except (RecordUnreadable, UnicodeDecodeError):
                    continue  # a hash of somebody else's
                if record is not None and state in (None, record.state):
                    yield record
            if cursor in (b"0", 0):
                return

    def ping(self) -> None:
        self._command("PING")

    def close(self) -> None:
        self._connections.close()

    def _call(self, verb: str, keys: Sequence[str], args: Sequence[Any]) -> Any:
        source, digest = script(verb)
        try:
            return self._command("EVALSHA", digest, len(keys), *keys, *args)
        except NoScriptError:
            return self._command("EVAL", source, len(keys), *keys, *args)

    def _command(self, *command: Any) -> Any:
        execute = self._connections.execute
        try:
            try:
                return execute(*command)
            except redis.ConnectionError as error:
                # A pooled connection that the server has closed meanwhile fails on its first use: every verb may be
                # asked again. Not so a wrong password, which redis-py files under connection errors too.
                if isinstance(error, (*_REFUSALS, redis.BusyLoadingError)):
                    raise
                return execute(*command)
        except NoScriptError:
            raise
        except (RedisError, OSError) as error:
            raise self._translate(error, command) from error

    def _translate(self, error: Exception, command: Sequence[Any]) -> StoreError:
        what = f"{type(error).__name__}: {error}"
        if isinstance(error, _REFUSALS) or any(words in str(error) for words in _REFUSED):
            return StoreRefused(
                f"The idempotency store {self._url} refused us ({what}). "
                "Check the password, the user and its rights, and the number of the database."
            )
        if isinstance(error, ResponseError) and "WRONGTYPE" in str(error):
            return RecordUnreadable(
                f"{command[3]!r} in the idempotency store {self._url} is no record of ours ({what}). "
                f"Does something else use this database? Delete the key, or set idempotency_namespace."
            )
        return StoreUnreachable(
            f"The idempotency store {self._url} cannot serve ({what}). Is it running, and has it memory left?"
        )
