"""A store in Redis, Valkey, and whatever speaks their protocol with Lua scripts.

One hash per record, one script per verb, one round trip per verb; the server's TIME is the clock. Field names are the
words of the project, so that ``HGETALL`` explains itself; ids and digests are packed, see `records.packed`.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import logging
import re
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib import resources
from typing import Any
from urllib.parse import unquote, urlsplit
from weakref import WeakSet

import redis
from redis.backoff import NoBackoff
from redis.exceptions import NoScriptError, RedisError, ResponseError
from redis.retry import Retry
from redis.sentinel import MasterNotFoundError, SentinelConnectionPool, SentinelManagedConnection

from ...errors import ConfigurationError, LeaseLost, RecordUnreadable, StoreError, StoreRefused, StoreUnreachable
from .. import hide_password
from ..base import Store, pass_by_unreadable
from ..history import expiry, grouped, past_events
from ..records import (
    HISTORY_LIMIT,
    Claim,
    HistoryEntry,
    Lease,
    Outcome,
    PastEvent,
    Reason,
    Record,
    Refusal,
    Release,
    State,
    Verdict,
)
from ..rules import SECOND
from .connections import (
    ESCAPING,
    OPTION,
    PARSE,
    REFUSALS,
    Connections,
    as_redis,
    check_parameters,
    is_read_only,
    translate_error,
)
from .records import (
    ANSWERED,
    PEEKED,
    answered,
    by_name,
    claim_args,
    lease_args,
    ms,
    record_of,
    release_args,
    renewal_args,
    unreadable,
)

logger = logging.getLogger("celery_idempotent.stores")

#: Seconds a connection attempt and a command may take. A lease call must answer or fail long before a lease ends;
#: redis-py's own defaults keep a caller waiting for tens of seconds.
TIMEOUT = 2.0
BATCH = 1000
#: Connection errors that a second call at once would meet again.
NOT_AGAIN = (*REFUSALS, redis.BusyLoadingError, MasterNotFoundError)


class RedisStore(Store):
    """Keep the records in Redis.

    Weaker than the contract where a failover loses writes that were not replicated, or where the server evicts keys.

    Arguments:
        client: A redis-py client, or anything with its ``execute_command``, that returns bytes. Of one with the pools
            and connections of redis-py itself, server, database and credentials are taken: the store has connections of
            its own, with its own timeouts (or shorter ones of the client's) and retries. Any other, as a Cluster
            client, is used as it is, with what it waits and tries again.
        url: What to call the server in messages; no password in it.
        wait_replicas: How many replicas must have a claim before it counts; one that too few have is given back and
            raised as `StoreUnreachable`. 0 waits for none.

    Raises:
        ConfigurationError: it is no such client, or one for coroutines; it decodes replies, which would break binary
            results; or it is a Cluster client, and ``wait_replicas`` is set.
    """

    keeps_history = True
    #: for callers that must not wait for this one, see `bounded`
    _bounded: RedisStore | None = None

    def __init__(self, client: redis.Redis, *, url: str = "redis", wait_replicas: int = 0) -> None:
        execute = getattr(client, "execute_command", None)
        if isinstance(client, type) or not callable(execute) or inspect.iscoroutinefunction(execute):
            kind = client if isinstance(client, type) else type(client)
            raise ConfigurationError(
                "Expected a synchronous client for an idempotency store, as redis.Redis(host=...), got "
                f"{kind.__module__}.{kind.__qualname__}. Coroutines call the store in threads. For a URL, write "
                "RedisStore.from_url(url)."
            )
        encoder = getattr(client, "get_encoder", None)  # which a Cluster client has too
        if encoder is not None and encoder().decode_responses:
            raise ConfigurationError(
                "The Redis client of an idempotency store must return bytes; "
                "got one made with decode_responses=True. Make it without."
            )
        self._client = client = apart(client)
        self._connections = Connections(client, redis.ConnectionError)
        self._replicas = Replicas(wait_replicas)
        #: whether no call may name several keys
        self._one_by_one = not self._connections.one_node
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
        plain, in_url = Replicas.in_url(as_redis(url))
        wanted = options.pop(OPTION, 0)
        check_parameters(url, _kind_of(plain), ("max_connections",))
        try:
            PARSE(f"redis://host/?{plain.partition('?')[2]}")  # its error names the value, and no password
        except ValueError as error:
            raise ConfigurationError(
                f"Expected a Redis URL like redis://:password@host:6379/0, got {hide_password(url)!r}: {error}"
            ) from None
        try:
            client = redis.Redis.from_url(plain, **{**cls.connection_options(), **options})
            pool = client.connection_pool
            pool.connection_class(**pool.connection_kwargs)  # connects nothing, and knows which options there are
            parts = urlsplit(url)
            if not url.startswith("unix:"):
                int(unquote(parts.path).replace("/", "") or 0)  # redis-py takes database 0 for what is no number
            elif parts.netloc and "@" not in parts.netloc and "@" in parts.path:
                raise ValueError("what follows a slash in a password would be the path, and in messages")
        except (TypeError, RedisError) as error:
            raise ConfigurationError(
                f"Expected a Redis URL like redis://:password@host:6379/0, got {hide_password(url)!r}: {error}"
            ) from None
        except ValueError as error:
            # A password with a slash in it ends up in the text of the error, as the port that it is not.
            why = "" if "@" in url else f" ({error})"
            advice = ESCAPING if "@" in url else "Write numbers for the port and the database."
            raise ConfigurationError(
                f"Expected a Redis URL like redis://:password@host:6379/0, got {hide_password(url)!r}{why}. {advice}"
            ) from None
        return cls(made_for_a_store(client), url=hide_password(url), wait_replicas=wanted if in_url is None else in_url)

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
        for start in range(0, len(leases), BATCH):
            batch, missing = leases[start : start + BATCH], ""
            if len(batch) > 1 and not self._one_by_one:
                gone, batch, missing = self._renew_together(batch)
                lost += gone
            if batch:
                lost += self._renew_at(self._connections, batch)
            if missing:
                raise self._unreplicated(missing)
        return lost

    def _renew_together(self, leases: Sequence[Lease]) -> tuple[Sequence[Lease], Sequence[Lease], str]:
        """Renew leases by one call of the script; return those lost, those left, and which replicas did not get it.

        A node of a Cluster refuses it, for their slots differ. A proxy that distributes keys sends it to the server of
        the first, which has no record of the others, or an old one: what is not held there is asked for alone.
        """
        args = [arg for lease in leases for arg in renewal_args(lease)]
        try:
            (lost, left), missing = self._replicated("renew", [lease.key for lease in leases], args, urgent=True)
        except StoreUnreachable as error:
            if not isinstance(error.__cause__, ResponseError) or "slot" not in str(error.__cause__):
                raise
            self._one_by_one = True
            return (), leases, ""
        return [leases[place] for place in lost], [leases[place] for place in left], missing

    def _renew_at(self, place: Any, leases: Sequence[Lease]) -> list[Lease]:
        """Renew leases in one round trip, by a call of the script for each, and return those that are lost."""
        wait = self._replicas.command
        calls = [(lease.key, *renewal_args(lease)) for lease in leases]
        replies = together(partial(self._at, place.pipeline, urgent=True), "renew", calls, wait)
        lost: list[Lease] = []
        for lease, reply in zip(leases, replies, strict=False):
            if isinstance(reply, Exception):  # as when it has moved
                reply, missing = self._replicated("renew", (lease.key,), renewal_args(lease), urgent=True)
                if missing:
                    raise self._unreplicated(missing)
            lost += [lease] * len(reply[0])
        missing = self._replicas.missing(replies[-1]) if wait else ""
        if missing:
            raise self._unreplicated(missing)
        return lost

    def settle(self, lease: Lease, outcome: Outcome, *, ttl: float) -> None:
        args = (*lease_args(lease), outcome.state.value, outcome.payload, ms(ttl))
        if not self._call("settle", (lease.claim.key,), args):
            raise LeaseLost(
                f"The lease on {lease.key!r} is held by another holder, or was deleted: nothing was settled."
            )

    def release(self, lease: Lease, release: Release) -> bool:
        return bool(self._call("release", (lease.key,), release_args(lease, release)))

    def mark_shutdown(self, lease: Lease) -> bool:
        return bool(self._call("mark_shutdown", (lease.key,), (lease.owner,)))

    def mark_dispatched(self, key: str, task_id: str) -> bool:
        return bool(self._call("mark_dispatched", (key,), (task_id,)))

    def get(self, key: str) -> Record | None:
        now, found, kept = self._call("read", (key,), ())
        return record_of(key, by_name(found), int(now), int(kept)) if found else None

    def peek(self, key: str) -> Record | None:
        # No script: half of its cost. The time comes last, so that what remains is never taken for more than it is.
        replies = self._at(self._connections.pipeline, [("HMGET", key, *PEEKED), ("PTTL", key), ("TIME",)])
        for reply in replies:
            if isinstance(reply, Exception):
                raise translate_error(reply, ("", "", 1, key), self._url) from reply
        values, kept, (seconds, microseconds) = replies
        found = answered(PEEKED, values, "")
        return record_of(key, found, int(seconds) * SECOND + int(microseconds), int(kept)) if found else None

    def delete(self, key: str) -> bool:
        self._command("DEL", history_key(key))  # first: after a failure the caller deletes both again
        return bool(self._command("DEL", key))

    def append_history(self, entries: Sequence[HistoryEntry]) -> None:
        calls = history_calls(entries)
        for call, reply in zip(calls, self._noted(calls), strict=True):
            if isinstance(reply, Exception):
                raise translate_error(reply, ("", "", 1, *call), self._url) from reply

    def _noted(self, calls: list[tuple[Any, ...]]) -> list[Any]:
        return together(partial(self._at, self._connections.pipeline), "append_history", calls) if calls else []

    def history(self, key: str) -> list[PastEvent]:
        return noted(key, *self._call("history", (history_key(key),), ()))

    def scan(self, *, prefix: str = "", state: State | None = None) -> Iterator[Record]:
        for place in self._places():
            for keys in pages(partial(self._at, place.execute), prefix):
                for record in records(partial(self._at, place.pipeline), self.get, keys):
                    if state in (None, record.state):
                        yield record

    def usage(self, sample: Sequence[str] = ()) -> dict[str, int]:
        return room([self._at(place.pipeline, usage_commands(sample)) for place in self._places()])

    def warnings(self) -> list[str]:
        replies = [self._at(place.pipeline, usage_commands(())) for place in self._places()]
        policies = {_evicts(info) for [info] in replies if isinstance(info, bytes)} - {""}
        return [
            f"The idempotency store {self._url} forgets operations when it is full, and their duplicates run: its "
            f"maxmemory-policy is {policy}. Set it to noeviction."
            for policy in sorted(policies)
        ]

    def ping(self) -> None:
        self._command("PING")

    def bounded(self, seconds: float) -> RedisStore | None:
        """Return a store with connections of its own, where the client's pool is one of a single server."""
        pool: Any = getattr(getattr(self, "_client", None), "connection_pool", None)
        if self._bounded is None and type(pool) in (redis.ConnectionPool, redis.BlockingConnectionPool):
            options = {**pool.connection_kwargs, "socket_timeout": seconds}
            if "socket_connect_timeout" in options:
                options["socket_connect_timeout"] = seconds
            client = redis.Redis(
                connection_pool=redis.ConnectionPool(connection_class=pool.connection_class, **options)
            )
            client.auto_close_connection_pool = True  # no other client uses it
            self._bounded = RedisStore(made_for_a_store(client), url=self._url)
        return None if self._replicas.wanted else self._bounded

    def close(self) -> None:
        if self._bounded is not None:
            self._bounded.close()
        self._connections.close()

    def _replicated(self, verb: str, keys: Sequence[str], args: Sequence[Any], **options: Any) -> tuple[Any, str]:
        """Call a verb; return its reply, and in words which replicas did not get it, if it is to wait for any."""
        if not self._replicas.wanted:
            return self._call(verb, keys, args, **options), ""
        reply, confirmed = self._call(verb, keys, args, then=self._replicas.command, **options)
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
            return self._at(self._connections.execute, "EVALSHA", digest, len(keys), *keys, *args, **options)
        except NoScriptError:
            return self._command("EVAL", source, len(keys), *keys, *args, **options)

    def _places(self) -> Iterable[Any]:
        """Return what has `execute` and `pipeline`, for each server that has records."""
        if not hasattr(self._client, "get_primaries"):
            return (self._connections,)
        return [PrimaryOfClient(self._client, node) for node in self._client.get_primaries()]

    def _command(self, *command: Any, **options: Any) -> Any:
        return self._at(self._connections.execute, *command, **options)

    def _at(self, execute: Callable[..., Any], *command: Any, **options: Any) -> Any:
        """Execute a command, once more if the connection was lost, and raise what that means to a store."""
        try:
            try:
                return execute(*command, **options)
            except redis.ConnectionError as error:
                # A pooled connection that the server has closed meanwhile fails on its first use: every verb may be
                # called again. Not so a wrong password, which redis-py files under connection errors too, nor a name
                # that is not found: a resolver that does not answer takes many seconds each time.
                if isinstance(error, NOT_AGAIN) or isinstance(error.__context__, socket.gaierror):
                    raise
            except ResponseError as error:
                if not is_read_only(error):
                    raise
            return execute(*command, **options)  # out there: the error keeps the connection alive that was lost
        except NoScriptError:
            raise
        except (RedisError, OSError) as error:
            raise translate_error(error, command, self._url) from error


class PrimaryOfClient(Connections):
    """One primary of a caller's Cluster client: the client asks all of them, and merges their replies.

    Arguments:
        client: The Cluster client.
        node: The primary, as the client has it.
    """

    def __init__(self, client: Any, node: Any) -> None:
        super().__init__(apart(client.get_redis_connection(node)), redis.ConnectionError)
        self.address = (node.host, node.port)


def _kind_of(url: str) -> type[Any]:
    kinds = {"rediss": redis.SSLConnection, "unix": redis.UnixDomainSocketConnection}
    return kinds.get(url.partition("://")[0].lower(), redis.Connection)


#: Scripts that ask whether a record is older than a lease.
ASK_OUTDATED = ("renew", "settle", "release")


#: The text of each file. Read with this module, and not when a verb is first called: then the process may have as many
#: files open as it may, or an upgrade have put another version's files in their place.
_LUA = {
    file.name.removesuffix(".lua"): file.read_text(encoding="utf-8")
    for file in (resources.files(__package__) / "lua").iterdir()
    if file.name.endswith(".lua")
}


@cache
def script(verb: str) -> tuple[str, str]:
    """Return the source of a verb's script and its digest, under which the server caches it."""
    source = _LUA["outdated"] + _LUA[verb] if verb in ASK_OUTDATED else _LUA[verb]
    return source, hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()


def together(
    pipeline: Callable[[list[tuple[Any, ...]]], list[Any]],
    verb: str,
    calls: Sequence[tuple[Any, ...]],
    last: tuple[Any, ...] | None = None,
) -> list[Any]:
    """Call a verb for many keys in one round trip, and return the replies; two where the server forgot the script.

    Arguments:
        pipeline: Sends commands and returns their replies, errors among them.
        verb: One that may be called again.
        calls: For each call its key and the script's arguments.
        last: A command to send behind them all, whose reply is the last.
    """
    source, digest = script(verb)
    tail = [] if last is None else [last]
    replies = pipeline([*(("EVALSHA", digest, 1, *call) for call in calls), *tail])
    if any(isinstance(reply, NoScriptError) for reply in replies):
        rest = (("EVALSHA", digest, 1, *call) for call in calls[1:])
        replies = pipeline([("EVAL", source, 1, *calls[0]), *rest, *tail])
    return replies


#: How many names the server scans for a page. It serves no other client meanwhile, so that it must not take long.
COUNT = 500


def pages(command: Callable[..., Any], prefix: str) -> Iterator[list[str]]:
    """Yield the names of hashes that begin with a prefix, page by page; some may come twice.

    Arguments:
        command: Sends a command to one server and returns its reply.
        prefix: What the names begin with.

    Raises:
        StoreRefused: it was not one server that answered.
    """
    pattern = "".join(f"\\{letter}" if letter in "*?[]\\^" else letter for letter in prefix) + "*"
    cursor = b"0"
    while True:
        reply = command("SCAN", cursor, "MATCH", pattern, "COUNT", COUNT, "TYPE", "hash")
        if len(reply) != 2:
            raise StoreRefused(
                f"Expected one Redis to answer SCAN with a cursor and names, got a reply of {len(reply)} parts: a "
                "proxy distributes keys over several. Name each of its servers by its own URL."
            )
        cursor, names = reply
        yield [name.decode() for name in names if _is_text(name)]  # another program's, if it is no text
        if cursor in (b"0", 0):
            return


def _is_text(name: bytes) -> bool:
    try:
        name.decode()
    except UnicodeDecodeError:
        return False
    return True


def records(
    pipeline: Callable[[list[tuple[Any, ...]]], list[Any]], get: Callable[[str], Record | None], keys: list[str]
) -> Iterator[Record]:
    """Yield the records of these keys; what is no record, or has gone meanwhile, is passed by.

    Arguments:
        pipeline: Sends commands to the server that has the keys, and returns their replies.
        get: Reads one record, wherever it is; it is called for those that the server answered with an error.
        keys: The keys of the records.
    """
    replies = together(pipeline, "read", [(key,) for key in keys]) if keys else []
    for key, reply in zip(keys, replies, strict=True):
        try:
            if isinstance(reply, Exception):
                record = get(key)
            else:
                now, found, kept = reply
                record = record_of(key, by_name(found), int(now), int(kept)) if found else None
        except RecordUnreadable:
            pass_by_unreadable(key)
            continue
        if record is not None:
            yield record


def history_key(key: str) -> str:
    """Return the name of the list; it begins as the record's, so that one ACL rule allows both.

    No record has it, also where a task id is the scope of another operation: a given key has a tilde before its
    canonical form alone.
    """
    return f"{key}:~history"


def history_calls(entries: Iterable[HistoryEntry]) -> list[tuple[Any, ...]]:
    """Return for each key its list and the arguments of append_history.lua."""
    calls = []
    for key, mine in grouped(entries).items():
        pairs = [(round(entry.ago * SECOND), entry.text) for entry in mine]
        keep = max(1, ms(expiry(mine, 0) / SECOND))
        calls.append((history_key(key), HISTORY_LIMIT, keep, *(word for pair in pairs for word in pair)))
    return calls


def noted(key: str, now: int, entries: Sequence[bytes]) -> list[PastEvent]:
    """Return what a list holds, seen at the server's time `now` in microseconds.

    Raises:
        RecordUnreadable: it was not written by celery_idempotent.
    """
    try:
        return past_events(
            [(int(at), text.decode()) for at, _, text in (entry.partition(b" ") for entry in entries)], now
        )
    except ValueError as error:
        raise RecordUnreadable(
            f"The list {history_key(key)!r} is not the history of {key!r} ({error}). Delete it if it is garbage."
        ) from error


def usage_commands(sample: Sequence[str]) -> list[tuple[Any, ...]]:
    """Return the commands for one server, each answered in about the time of a GET.

    Arguments:
        sample: Keys of which to measure those that the server has.
    """
    return [("INFO", "memory"), *(("MEMORY", "USAGE", key) for key in sample)]


def room(replies: Sequence[Sequence[Any]]) -> dict[str, int]:
    """Return the memory of all servers, of all that is in them, and the mean of the records that were measured.

    What a server did not answer, as for want of a right, is left out.

    Arguments:
        replies: For each server its replies to `usage_commands`, errors among them.
    """
    found: dict[str, int] = {}
    used = [_used_memory(info) for info, *_ in replies if isinstance(info, bytes)]
    if used:
        found["memory_bytes"] = sum(used)
    sizes = [size for _, *measured in replies for size in measured if isinstance(size, int)]
    if sizes:
        found["record_bytes"] = round(sum(sizes) / len(sizes))
    return found


def _used_memory(info: bytes) -> int:
    return int(_lines(info).get(b"used_memory", b"0"))


def _evicts(info: bytes) -> str:
    """Return by which policy a server makes room for what is written, or "" if it does not."""
    lines = _lines(info)
    policy = lines.get(b"maxmemory_policy", b"noeviction").decode()
    return policy if policy != "noeviction" and int(lines.get(b"maxmemory", b"0")) else ""


def _lines(info: bytes) -> dict[bytes, bytes]:
    return dict(line.partition(b":")[::2] for line in info.splitlines())


# How many replicas must have a claim before it counts: Redis's WAIT, sent along with the script.
#
# Redis replicates after it has replied. A server that is cut off from its replicas goes on granting leases which the
# replica that is promoted in its place never received. WAIT (redis.io/commands/wait) returns how many replicas have
# what this connection wrote; a claim that too few have is refused. That narrows the window of a failover and does not
# close it: the replica that is promoted need not be one of those that answered.

#: Seconds that replicas have to confirm; well within the time a lease call may take.
PATIENCE = 0.5


@dataclass(frozen=True, slots=True)
class Replicas:
    """Replicas that must confirm a claim.

    Arguments:
        wanted: How many; 0 waits for none.

    Raises:
        ConfigurationError: that is no number of replicas.
    """

    wanted: int = 0

    def __post_init__(self) -> None:
        if type(self.wanted) is not int or self.wanted < 0:  # True is an int too
            raise ConfigurationError(f"Expected {OPTION} to be a number of replicas (0 or more), got {self.wanted!r}.")

    @classmethod
    def in_url(cls, url: str) -> tuple[str, int | None]:
        """Return a URL without the option, and the option's value there, or None."""
        base, mark, query = url.partition("?")
        parts = query.split("&")
        values = [part.partition("=")[2] for part in parts if part.partition("=")[0] == OPTION]
        if not values:
            return url, None
        if not values[-1].isdecimal():
            raise ConfigurationError(f"Expected {OPTION} to be a number of replicas (0 or more), got {values[-1]!r}.")
        rest = "&".join(part for part in parts if part.partition("=")[0] != OPTION)
        return f"{base}{mark if rest else ''}{rest}", int(values[-1])

    @property
    def command(self) -> tuple[Any, ...] | None:
        """What to send along with a claim, or None."""
        return ("WAIT", self.wanted, int(PATIENCE * 1000)) if self.wanted else None

    def missing(self, reply: Any) -> str:
        """Return what is missing by the reply to the command, in words; "" if enough replicas have the claim."""
        if isinstance(reply, int) and reply >= self.wanted:
            return ""
        got = f"{reply} confirmed" if isinstance(reply, int) else f"the server replied: {reply}"
        return (
            f"{OPTION}={self.wanted} needs {self.wanted}, and {got} within {PATIENCE:g} s. "
            f"Are the replicas connected? INFO replication shows it."
        )


_LEASE_CALL_OPTIONS = (
    "max_connections",
    "retry_on_timeout",
    "client_name",
    "driver_info",
    "lib_name",
    "lib_version",
    "decode_responses",
    "health_check_interval",
)
#: The options of a client's connections that name their server and their user.
_IDENTITY = (
    "credential_provider",
    "db",
    "host",
    "password",
    "path",
    "port",
    "protocol",
    "redis_connect_func",
    "socket_keepalive",
    "socket_keepalive_options",
    "socket_type",
    "username",
)


def merged(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of a connection with those of a lease call in place of its user's."""
    kept = {name: value for name, value in params.items() if name not in _LEASE_CALL_OPTIONS and value is not None}
    kept.pop("virtual_host", None)
    return {**kept, **RedisStore.connection_options()}


def direct(params: dict[str, Any], url: str) -> Store:
    """Return a store on the server that ``params`` name, as `merged` returns them."""
    if issubclass(params.get("connection_class", redis.Connection), redis.UnixDomainSocketConnection):
        params.pop("socket_connect_timeout", None)
    if not params.get("password"):
        url = re.sub(r"//[^/@]*@", "//", url)
    return RedisStore(
        made_for_a_store(redis.Redis(connection_pool=redis.ConnectionPool(**params))), url=hide_password(url)
    )


#: Pools of connections that were made for stores, and are no one else's.
_pools: WeakSet[Any] = WeakSet()


def made_for_a_store(client: redis.Redis) -> redis.Redis:
    """Return a client that was made for a store, which uses it as it is."""
    _pools.add(client.connection_pool)
    return client


def apart(client: Any) -> Any:
    """Return a client like the caller's with connections of its own; the caller's, where it makes its own kind of them.

    The caller's pool may have few connections, which its own requests need, and retries that go on for a minute.
    """
    pool: Any = getattr(client, "connection_pool", None)
    kinds = (redis.ConnectionPool, redis.BlockingConnectionPool, SentinelConnectionPool)
    if type(pool) not in kinds or pool in _pools or not pool.connection_class.__module__.startswith("redis."):
        return client
    given = {name: pool.connection_kwargs.get(name) for name in ("socket_timeout", "socket_connect_timeout")}
    return _like(client, **{name: value for name, value in given.items() if value and value < TIMEOUT})


def _like(client: redis.Redis, **options: Any) -> redis.Redis:
    """Return a client of the same server, or behind the same sentinels, with connections for lease calls.

    Arguments:
        client: A redis-py client.
        options: How it connects otherwise than lease calls do.
    """
    pool: Any = client.connection_pool
    own = {name: value for name, value in pool.connection_kwargs.items() if name in _IDENTITY or name[:4] == "ssl_"}
    params = {**merged(own), **_beside_redis_pys(pool), **options, "connection_class": pool.connection_class}
    if service := _service_of(pool):
        make: Any = SentinelConnectionPool
        manager = copy.copy(service.sentinel_manager)
        manager.sentinels = [_like(sentinel) for sentinel in manager.sentinels]
        sentinels = make(service.service_name, manager, is_master=service.is_master, **params)
        return made_for_a_store(redis.Redis(connection_pool=sentinels))
    if issubclass(pool.connection_class, redis.UnixDomainSocketConnection):
        params.pop("socket_connect_timeout", None)
    return made_for_a_store(redis.Redis(connection_pool=redis.ConnectionPool(**params)))


def _service_of(pool: Any) -> Any:
    """Return what knows the service and its sentinels, if the connections of a pool find their server by them."""
    if not issubclass(pool.connection_class, SentinelManagedConnection):
        return None
    return pool.connection_kwargs["connection_pool"]  # in a worker of RQ's worker-pool, all that it has of sentinels


def _beside_redis_pys(pool: Any) -> dict[str, Any]:
    """Return the arguments that only the connections of a caller's own kind take: they may name the server."""
    kind = pool.connection_class
    if kind.__module__.startswith("redis."):
        return {}
    theirs = {"connection_pool"}  # that of sentinels, which each of their pools adds
    for base in kind.__mro__:
        if base.__module__.startswith("redis.") and "__init__" in vars(base):
            theirs.update(inspect.signature(base.__init__).parameters)
    return {name: value for name, value in pool.connection_kwargs.items() if name not in theirs}


def store_like(client: redis.Redis) -> Store:
    """Return a store on the server, or behind the sentinels, that a redis-py client uses, in the same database."""
    pool: Any = client.connection_pool
    known = pool.connection_kwargs
    if service := _service_of(pool):
        return RedisStore(_like(client), url=f"redis+sentinel://{service.service_name}")
    place = known.get("path") or f"{known.get('host', 'localhost')}:{known.get('port', 6379)}"
    scheme = "unix" if known.get("path") else "redis"
    return RedisStore(_like(client), url=f"{scheme}://{place}/{known.get('db') or 0}")
