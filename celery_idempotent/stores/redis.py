"""Redis, Valkey, and whatever speaks their protocol with Lua scripts.

One hash per record, one script per verb, one round trip per verb; the server's TIME is the clock. Field names are the
words of the project, so that ``HGETALL`` explains itself.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any
from urllib.parse import unquote, urlsplit

import redis
from redis.backoff import NoBackoff
from redis.exceptions import NoScriptError, RedisError
from redis.retry import Retry
from redis.sentinel import MasterNotFoundError

from ..errors import ConfigurationError, LeaseLost, StoreError, StoreUnreachable
from ..notes import Note, Noted
from ..records import Claim, Lease, Outcome, Reason, Record, Refusal, Release, State, Verdict
from . import hide_password
from .addresses import ESCAPING, PARSE, as_redis, check_parameters
from .base import Store
from .connections import Connections
from .hashes import ANSWERED, answered, by_name, claim_args, lease_args, ms, padded, record_of, unreadable
from .redis_history import history_key, note_calls, noted
from .redis_room import asked, room
from .refusals import REFUSALS, translated
from .replicas import OPTION, Replicas
from .scanning import pages, records
from .scripts import script, together

__all__ = ["RedisStore"]

logger = logging.getLogger("celery_idempotent.stores")

#: Seconds a connection attempt and a command may take. A lease call must answer or fail long before a lease ends;
#: redis-py's own defaults keep a caller waiting for tens of seconds.
TIMEOUT = 2.0
BATCH = 1000
#: Connection errors after which to ask again at once would change nothing.
NOT_AGAIN = (*REFUSALS, redis.BusyLoadingError, MasterNotFoundError)


class RedisStore(Store):
    """Keep the records in Redis.

    Weaker than the contract where a failover loses writes that were not replicated, or where the server evicts keys.

    Arguments:
        client: A redis-py client, or anything with its ``execute_command``, that returns bytes.
        url: What to call the server in messages; no password in it.
        wait_replicas: How many replicas must have a claim before it counts; one that too few have is given back and
            the store said to be unreachable. 0 asks none.

    Raises:
        ConfigurationError: the client decodes replies, which would break binary results; or replicas are asked for and
            it is a Cluster client.
    """

    keeps_history = True

    def __init__(self, client: redis.Redis, *, url: str = "redis", wait_replicas: int = 0) -> None:
        pool = getattr(client, "connection_pool", None)
        if pool is not None and pool.connection_kwargs.get("decode_responses"):
            raise ConfigurationError(
                "The Redis client of an idempotency store must return bytes; "
                "got one made with decode_responses=True. Make it without."
            )
        self._client = client
        self._connections = Connections(client, redis.ConnectionError)
        self._replicas = Replicas(wait_replicas)
        self._url = url
        if wait_replicas and not self._connections.one_node:
            raise ConfigurationError(f"Expected no {OPTION} for a client of several nodes, got {wait_replicas}.")

    @property
    def url(self) -> str:
        """What messages call the server; no password is in it."""
        return self._url

    @classmethod
    def from_url(cls, url: str, **options: Any) -> RedisStore:
        """Return a store on the server that ``url`` names (``redis://``, ``rediss://`` or ``unix://``).

        Arguments:
            url: As redis-py's `from_url` takes it; its query may carry any connection option, and ``wait_replicas``.
            options: Connection options that the URL does not give, and ``wait_replicas``.

        Raises:
            ConfigurationError: the URL cannot be parsed.
        """
        plain, said = Replicas.in_url(as_redis(url))
        asked = options.pop(OPTION, 0)
        check_parameters(url, _kind_of(plain), ("max_connections",))
        try:
            PARSE(f"redis://host/?{plain.partition('?')[2]}")  # says which value it is, and nothing of a password
        except ValueError as error:
            raise ConfigurationError(
                f"Expected a Redis URL like redis://:password@host:6379/0, got {hide_password(url)!r}: {error}"
            ) from None
        try:
            client = redis.Redis.from_url(plain, **{**cls.connection_options(), **options})
            pool = client.connection_pool
            pool.connection_class(**pool.connection_kwargs)  # connects nothing, and knows which options there are
            if not url.startswith("unix:"):
                int(
                    unquote(urlsplit(url).path).replace("/", "") or 0
                )  # redis-py takes database 0 for what is no number
        except (TypeError, RedisError) as error:
            raise ConfigurationError(
                f"Expected a Redis URL like redis://:password@host:6379/0, got {hide_password(url)!r}: {error}"
            ) from None
        except ValueError as error:
            # A password with a slash in it ends up in the text of the error, as the port that it is not.
            why = "" if "@" in url else f" ({error})"
            raise ConfigurationError(
                f"Expected a Redis URL like redis://:password@host:6379/0, got {hide_password(url)!r}{why}. {ESCAPING}"
            ) from None
        return cls(client, url=hide_password(url), wait_replicas=asked if said is None else said)

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
        reply, missing = self._replicated("acquire", (claim.key,), claim_args(claim))
        verdict, now, fence, crashes, took_over, found = reply
        if verdict == b"lease":
            lease = Lease(claim, int(fence), taken_over=took_over == 1, crashes=int(crashes))
            if missing:
                self._give_back(lease)
                raise self._unreplicated(missing)
            return lease
        if verdict == b"unreadable":
            raise unreadable(claim.key, by_name(found))
        record = record_of(claim.key, answered(ANSWERED, found, claim.announcer), int(now))
        return Refusal(Verdict(verdict.decode()), record)

    def renew(self, leases: Sequence[Lease]) -> Sequence[Lease]:
        lost: list[Lease] = []
        size = BATCH if self._connections.one_node else 1
        for start in range(0, len(leases), size):
            batch = leases[start : start + size]
            args: list[Any] = []
            for lease in batch:
                args += lease_args(lease)
            positions, missing = self._replicated("renew", [lease.key for lease in batch], args)
            if missing:
                raise self._unreplicated(missing)
            lost += [batch[index] for index in positions]
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

    def mark_shutdown(self, lease: Lease) -> bool:
        return bool(self._call("mark_shutdown", (lease.key,), (lease.owner,)))

    def announce(self, key: str, task_id: str) -> bool:
        return bool(self._call("announce", (key,), (task_id,)))

    def get(self, key: str) -> Record | None:
        now, found = self._call("read", (key,), ())
        return record_of(key, by_name(found), int(now)) if found else None

    def delete(self, key: str) -> bool:
        self._command("DEL", history_key(key))  # first: who is told of a failure will ask for both again
        return bool(self._command("DEL", key))

    def note(self, notes: Sequence[Note]) -> None:
        calls = note_calls(notes)
        for call, reply in zip(calls, self._noted(calls), strict=True):
            if isinstance(reply, Exception):
                raise translated(reply, ("", "", 1, *call), self._url) from reply

    def _noted(self, calls: list[tuple[Any, ...]]) -> list[Any]:
        return together(partial(self._at, self._connections.pipeline), "note", calls) if calls else []

    def history(self, key: str) -> list[Noted]:
        return noted(key, *self._call("history", (history_key(key),), ()))

    def scan(self, *, prefix: str = "", state: State | None = None) -> Iterator[Record]:
        for place in self._places():
            for keys in pages(partial(self._at, place.execute), prefix):
                for record in records(partial(self._at, place.pipeline), self.get, keys):
                    if state in (None, record.state):
                        yield record

    def room(self, sample: Sequence[str] = ()) -> dict[str, int]:
        return room([self._at(place.pipeline, asked(sample)) for place in self._places()])

    def ping(self) -> None:
        self._command("PING")

    def close(self) -> None:
        self._connections.close()

    def _replicated(self, verb: str, keys: Sequence[str], args: Sequence[Any]) -> tuple[Any, str]:
        """Call a verb; return its reply, and in words which replicas did not get it, if any were asked for."""
        wait = self._replicas.command
        if wait is None:
            return self._call(verb, keys, args), ""
        reply, confirmed = self._call(verb, keys, args, then=wait)
        return reply, self._replicas.missing(confirmed)

    def _unreplicated(self, missing: str) -> StoreUnreachable:
        return StoreUnreachable(f"Too few replicas of the idempotency store {self._url} have the claim: {missing}.")

    def _give_back(self, lease: Lease) -> None:
        """Let the next delivery claim what was granted and refused; nothing of it ran, so nothing is counted."""
        try:
            self.release(lease, Release(Reason.SHUTDOWN))
        except StoreError as error:
            logger.warning("The refused lease on %s was not given back and runs out by itself: %s", lease.key, error)

    def _call(self, verb: str, keys: Sequence[str], args: Sequence[Any], **options: Any) -> Any:
        source, digest = script(verb)
        try:
            return self._command("EVALSHA", digest, len(keys), *keys, *args, **options)
        except NoScriptError:
            return self._command("EVAL", source, len(keys), *keys, *args, **options)

    def _places(self) -> Iterable[Any]:
        """Return what has `execute` and `pipeline`, for each server that has records."""
        return (self._connections,)

    def _command(self, *command: Any, **options: Any) -> Any:
        return self._at(self._connections.execute, *command, **options)

    def _at(self, execute: Callable[..., Any], *command: Any, **options: Any) -> Any:
        """Execute a command, once more if the connection was lost, and raise what that means to a store."""
        try:
            try:
                return execute(*command, **options)
            except redis.ConnectionError as error:
                # A pooled connection that the server has closed meanwhile fails on its first use: every verb may be
                # asked again. Not so a wrong password, which redis-py files under connection errors too.
                if isinstance(error, NOT_AGAIN):
                    raise
                return execute(*command, **options)
        except NoScriptError:
            raise
        except (RedisError, OSError) as error:
            raise translated(error, command, self._url) from error


def _kind_of(url: str) -> type[Any]:
    kinds = {"rediss": redis.SSLConnection, "unix": redis.UnixDomainSocketConnection}
    return kinds.get(url.partition("://")[0].lower(), redis.Connection)
