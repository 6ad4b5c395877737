"""Checks of a Redis, which must forget no operation and refuse none, and its servers' answers about themselves."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import wraps
from typing import Any

from redis.exceptions import ResponseError

from ...errors import IdempotencyError, StoreError
from ...stores.redis.store import RedisStore
from .any_store import claims_refused, compared, slow_store
from .findings import (
    Check,
    CheckSkipped,
    Finding,
    Section,
    Severity,
    Target,
    error,
    failed,
    info,
    ok,
    run_checks,
    warning,
)


class RedisServer:
    """One server of a store.

    Arguments:
        store: The store.
        place: What sends commands to this server.
        name: What to call it among others; "" if it is the only one.
    """

    def __init__(self, store: RedisStore, place: Any, name: str = "") -> None:
        self.store, self.name = store, name
        self._execute = place.execute
        self._info: dict[str, dict[str, str]] = {}

    @property
    def wanted_replicas(self) -> int:
        """How many replicas must confirm a claim."""
        return self.store._replicas.wanted

    def call(self, *command: str) -> Any:
        """Return the reply to a command.

        Raises:
            CheckSkipped: the server refuses the command, or does not know the command.
            StoreError: it does not answer.
        """
        try:
            return self.store._at(self._execute, *command)
        except StoreError as error:
            if not isinstance(error.__cause__, ResponseError):
                raise
            name = " ".join(command[:2] if command[0] in ("CONFIG", "CLUSTER") else command[:1])
            raise CheckSkipped(
                f"The server does not answer {name}.",
                "Managed servers refuse it: read their console. Elsewhere: ACL SETUSER <user> "
                "+info +config|get +cluster|info",
            ) from error

    def info(self, section: str) -> dict[str, str]:
        """Return a section of INFO; raise as `call`."""
        if section not in self._info:
            text = self.call("INFO", section).decode(errors="replace")
            pairs = (line.strip().partition(":") for line in text.splitlines())
            self._info[section] = {name: value for name, mark, value in pairs if mark}
        return self._info[section]

    def number(self, section: str, name: str) -> int:
        """Return a number of INFO, 0 where the server does not know it; raise as `call`."""
        value = self.info(section).get(name, "0")
        return int(value) if value.isdecimal() else 0

    def config(self, name: str) -> str:
        """Return a setting; raise as `call`."""
        reply = self.call("CONFIG", "GET", name)
        found = dict(zip(reply[::2], reply[1::2], strict=False)) if isinstance(reply, list) else reply
        if name.encode() not in found:
            raise CheckSkipped(f"The server does not show its {name}.")
        return str(found[name.encode()].decode(errors="replace"))

    def time(self) -> float:
        """Return the server's clock, in seconds since 1970; raise as `call`."""
        seconds, micros = self.call("TIME")
        return int(seconds) + int(micros) / 1e6


def servers_of(store: RedisStore) -> list[RedisServer]:
    """Return the servers that have a store's records.

    Raises:
        StoreError: they cannot be found.
    """
    places = list(store._places())
    if len(places) == 1:
        return [RedisServer(store, places[0])]
    return [RedisServer(store, place, "{}:{}".format(*place.address)) for place in places]


#: Looks at one thing of one server.
ServerCheck = Callable[[RedisServer], Finding | None]

OLDEST = (6, 0)
#: Parts of the memory, and of the connections, from which on there is a finding.
FILLING, FULL, BUSY = 0.8, 0.95, 0.8
SLOTS = 16384


def server_old(server: RedisServer) -> Finding:
    """Look at the server's version; Valkey names the Redis it is compatible with."""
    about = server.info("server")
    valkey = about.get("valkey_version")
    version = about.get("redis_version", "")
    name = f"Valkey {valkey}" if valkey else f"Redis {version}"
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < OLDEST:
        return warning(f"The server is {name}; the library is tested with 6.2 and newer.", "Upgrade the server.")
    return ok(name)


def store_is_replica(server: RedisServer) -> Finding:
    """See whether the server can be written to."""
    if server.info("replication").get("role") == "slave":
        return error(
            "The server is a replica, which takes no writes: no task can claim its key.",
            "Let the URL name the primary, or the sentinels: redis+sentinel://host1,host2/service",
        )
    return ok("the server is a primary")


def cluster_broken(server: RedisServer) -> Finding | None:
    """See whether a cluster serves all of its slots."""
    if server.store._connections.one_node:
        return None
    text = server.call("CLUSTER", "INFO").decode(errors="replace")
    state = dict(line.strip().partition(":")[::2] for line in text.splitlines())
    good = int(state.get("cluster_slots_ok", 0))
    if state.get("cluster_state") != "ok" or good < SLOTS:
        return error(
            f"The cluster is in state {state.get('cluster_state')!r} and serves {good:,} of {SLOTS:,} slots: tasks "
            "whose keys are in the others wait.",
            "Bring the missing nodes back, or run redis-cli --cluster fix HOST:PORT.",
        )
    return ok(f"the cluster serves all {SLOTS:,} slots")


def evicts_keys(server: RedisServer) -> Finding:
    """See whether a full server would forget operations."""
    memory = server.info("memory")
    policy = memory.get("maxmemory_policy") or server.config("maxmemory-policy")
    if policy == "noeviction":
        return ok("maxmemory-policy is noeviction")
    evicted = server.number("stats", "evicted_keys")
    remedy = "CONFIG SET maxmemory-policy noeviction (and in redis.conf, or the parameter group of a managed server)"
    if not server.number("memory", "maxmemory") and not evicted:
        return info(f"maxmemory-policy is {policy}. It evicts nothing, since maxmemory is 0.", remedy)
    so_far = f" It has evicted {evicted:,} keys since it started." if evicted else ""
    return error(
        f"maxmemory-policy is {policy}: a full server forgets operations, which then run again.{so_far}", remedy
    )


def memory_full(server: RedisServer) -> Finding:
    """Compare the memory in use with what there is."""
    used, most = server.number("memory", "used_memory"), server.number("memory", "maxmemory")
    of = "maxmemory"
    if not most:
        most, of = server.number("memory", "total_system_memory"), "the machine's memory"
    if not most:
        return ok(f"{_mb(used)} in use")
    part = used / most
    used_part = f"{_mb(used)} of {_mb(most)} ({of}) in use, {part:.0%}"
    remedy = f"CONFIG SET maxmemory {2 * most // 2**20}mb (if the machine has it), or shorten result_ttl."
    if of != "maxmemory":
        remedy = "Give the machine more memory, or shorten result_ttl."
    if part >= FULL:
        return error(f"{used_part}: a full server refuses claims, and tasks wait.", remedy)
    if part >= FILLING:
        return warning(f"{used_part}: a full server refuses claims, and tasks wait.", remedy)
    return ok(used_part)


def not_persistent(server: RedisServer) -> Finding:
    """See what a restart of the server would forget."""
    remedy = "CONFIG SET appendonly yes (and in redis.conf)"
    if server.info("persistence").get("aof_enabled") == "1":
        fsync = server.config("appendfsync")
        if fsync == "no":
            return info(
                "appendfsync is no: a machine that crashes forgets what the system had not written, 30 s as a rule.",
                "CONFIG SET appendfsync everysec (and in redis.conf)",
            )
        return ok(f"appendonly is yes, appendfsync {fsync}")
    save = server.config("save")
    if save:
        return info(
            f"The server saves snapshots (save {save}): a crash forgets what was done since the last, which runs again "
            "if it is delivered again.",
            remedy,
        )
    return warning("Nothing is persisted: a restart forgets every operation that was done.", remedy)


def persistence_failing(server: RedisServer) -> Finding:
    """See whether the last attempt to write to the disk went wrong."""
    state = server.info("persistence")
    for name, what in (("aof_last_write_status", "append-only file"), ("rdb_last_bgsave_status", "snapshot")):
        if state.get(name, "ok") != "ok":
            return error(
                f"The last write of the {what} failed; Redis then refuses writes, and tasks wait.",
                "Look into the server's log, most often for a full disk, and fix that.",
            )
    return ok("what was last to be written to disk was written")


def replicas_not_awaited(server: RedisServer) -> Finding:
    """See whether a replica may be promoted that has not seen the last claims."""
    replicas = server.number("replication", "connected_slaves")
    if replicas and not server.wanted_replicas:
        return warning(
            f"The server has {_many(replicas)} and answers before they have a claim: one that is promoted forgets the "
            "last claims, and their tasks may run beside their first holders.",
            "Add wait_replicas=1 to the query of the store's URL.",
        )
    return ok(f"wait_replicas is {server.wanted_replicas}" if replicas else "there is no replica")


def replicas_too_few(server: RedisServer) -> Finding | None:
    """See whether there are enough replicas to confirm a claim, and one to spare."""
    wanted, replicas = server.wanted_replicas, server.number("replication", "connected_slaves")
    if not wanted:
        return None
    if replicas < wanted:
        return error(
            f"wait_replicas is {wanted}, and the server has {_many(replicas)}: no claim counts, and every task waits.",
            f"Connect {_many(wanted - replicas)} more, or set wait_replicas={replicas} in the store's URL.",
        )
    if replicas == wanted:
        return info(
            f"wait_replicas is {wanted}, and the server has no replica to spare: the loss of one stops every task.",
            "Add a replica.",
        )
    return ok(f"{_many(replicas)}, of which {wanted} must confirm a claim")


def connections_full(server: RedisServer) -> Finding:
    """Compare the connections that are open with those there may be."""
    used = server.number("clients", "connected_clients")
    most = server.number("clients", "maxclients") or int(server.config("maxclients"))
    if used >= BUSY * most:
        return warning(
            f"{used:,} of {most:,} connections are open: further workers will be refused.",
            f"CONFIG SET maxclients {2 * most} (and in redis.conf)",
        )
    return ok(f"{used:,} of {most:,} connections are open")


def clocks_differ(server: RedisServer) -> Finding:
    """Compare the server's clock with this machine's."""
    return compared(server.time)


#: What is seen on each server.
SERVER_CHECKS: tuple[ServerCheck, ...] = (
    server_old,
    store_is_replica,
    cluster_broken,
    evicts_keys,
    memory_full,
    not_persistent,
    persistence_failing,
    replicas_not_awaited,
    replicas_too_few,
    connections_full,
    clocks_differ,
)
#: What matters of a cache, which may forget.
CACHE_CHECKS: tuple[ServerCheck, ...] = (server_old, store_is_replica, connections_full)
#: What is seen of the store as a whole.
CHECKS: tuple[Check, ...] = (slow_store, claims_refused)


def sections(patient: Target) -> Iterator[Section]:
    """Yield what is found of a Redis store."""
    assert isinstance(patient.store, RedisStore)
    # What an app inherits from its backend or broker is called by its class alone.
    name = patient.name if "://" in patient.name else f"{patient.name} {patient.store._url}"
    yield Section(name, list(findings(patient, SERVER_CHECKS, CHECKS)))


def findings(
    patient: Target, on_servers: tuple[ServerCheck, ...], on_store: tuple[Check, ...] = CHECKS
) -> Iterator[Finding]:
    """Yield what is found on the servers of a store, and then of the store as a whole."""
    store = patient.store
    assert isinstance(store, RedisStore)
    try:
        store.ping()
        servers = servers_of(store)
    except IdempotencyError as failure:
        yield failed(failure)
        return
    yield from run_checks([*(_everywhere(check, servers) for check in on_servers), *on_store], patient)


def _everywhere(check: ServerCheck, servers: list[RedisServer]) -> Check:
    """Return a check that returns the worst finding of another on several servers, with the server's name."""

    @wraps(check)
    def worst(_: Target) -> Finding | None:
        found = [(finding, server.name) for server in servers if (finding := check(server)) is not None]
        if not found:
            return None
        finding, name = max(found, key=lambda each: each[0].severity)
        alike = sum(other.severity == finding.severity for other, _ in found)
        if not name or finding.severity is Severity.OK:
            return finding
        more = f", and like it {alike - 1} more" if alike > 1 else ""
        return replace(finding, found=f"Node {name}{more}: {finding.found}")

    return worst


def _many(replicas: int) -> str:
    return f"{replicas} replica{'' if replicas == 1 else 's'}"


def _mb(size: int) -> str:
    return f"{size / 2**20:,.1f} MB"
