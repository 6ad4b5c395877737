# ruff: noqa: D103 - a check is documented by its name, its words where all is well, and its findings
"""Checks of a Redis store, which must forget no operation and refuse none, by what its servers report."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from redis.exceptions import ResponseError

from ...errors import IdempotencyError, StoreError, StoreUnreachable
from ...stores.redis.store import RedisStore
from .any_store import claims_refused, compared, slow_store
from .findings import (
    Check,
    Checks,
    CheckSkipped,
    Finding,
    Findings,
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
        place: The connection to this server.
        name: Its name among others; "" if it is the only one.
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
            CheckSkipped: the user has no right to the command, or the server does not know it.
            StoreError: the server does not answer.
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
        StoreError: the store cannot list them.
    """
    places = list(store._places())
    if len(places) == 1:
        return [RedisServer(store, places[0])]
    return [RedisServer(store, place, "{}:{}".format(*place.address)) for place in places]


#: The checks of one server.
SERVER_CHECKS = Checks()
OLDEST = (6, 2)
#: Parts of the memory that are a warning and an error, and the part of the connections that is a warning.
FILLING, FULL, BUSY = 0.8, 0.95, 0.8
SLOTS = 16384


@SERVER_CHECKS.add()
def server_old(server: RedisServer) -> Findings:
    about = server.info("server")
    valkey = about.get("valkey_version")
    version = about.get("redis_version", "")
    name = f"Valkey {valkey}" if valkey else f"Redis {version}"
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < OLDEST:
        yield warning(f"The server is {name}; the library is tested with 6.2 and newer.", "Upgrade the server.")
    yield ok(name)


@SERVER_CHECKS.add("the server is a primary")
def store_is_replica(server: RedisServer) -> Findings:
    if server.info("replication").get("role") == "slave":
        yield error(
            "The server is a replica, which takes no writes: no task can claim its key.",
            "Let the URL name the primary, or the sentinels: redis+sentinel://host1,host2/service",
        )


@SERVER_CHECKS.add(when=lambda server: not server.store._connections.one_node)
def cluster_broken(server: RedisServer) -> Findings:
    text = server.call("CLUSTER", "INFO").decode(errors="replace")
    state = dict(line.strip().partition(":")[::2] for line in text.splitlines())
    good = int(state.get("cluster_slots_ok", 0))
    if state.get("cluster_state") != "ok" or good < SLOTS:
        yield error(
            f"The cluster is in state {state.get('cluster_state')!r} and serves {good:,} of {SLOTS:,} slots: tasks "
            "whose keys are in the others wait.",
            "Bring the missing nodes back, or run redis-cli --cluster fix HOST:PORT.",
        )
    yield ok(f"the cluster serves all {SLOTS:,} slots")


@SERVER_CHECKS.add("the URL is that of a server of its own", when=lambda server: server.store._connections.one_node)
def cluster_as_server(server: RedisServer) -> Findings:
    if server.info("server").get("redis_mode") == "cluster":
        yield info(
            "The server is a node of a Cluster, which the URL does not say: where there are more nodes, claims of keys "
            "on the others are refused.",
            "Let the URL name the cluster, as redis+cluster://host, unless this is a proxy that hides its nodes.",
        )


@SERVER_CHECKS.add()
def evicts_keys(server: RedisServer) -> Findings:
    memory = server.info("memory")
    policy = memory.get("maxmemory_policy") or server.config("maxmemory-policy")
    if policy == "noeviction":
        yield ok("maxmemory-policy is noeviction")
    evicted = server.number("stats", "evicted_keys")
    remedy = "CONFIG SET maxmemory-policy noeviction (and in redis.conf, or the parameter group of a managed server)"
    if not server.number("memory", "maxmemory") and not evicted:
        yield info(f"maxmemory-policy is {policy}. It evicts nothing, since maxmemory is 0.", remedy)
    so_far = f" It has evicted {evicted:,} keys since it started." if evicted else ""
    yield error(
        f"maxmemory-policy is {policy}: a full server forgets operations, which then run again.{so_far}", remedy
    )


@SERVER_CHECKS.add()
def memory_full(server: RedisServer) -> Findings:
    used, most = server.number("memory", "used_memory"), server.number("memory", "maxmemory")
    of = "maxmemory"
    if most:  # buffers of the append-only file and of replicas do not count towards it
        used -= server.number("memory", "mem_not_counted_for_evict")
    else:
        most, of = server.number("memory", "total_system_memory"), "the machine's memory"
    if not most:
        yield ok(f"{_mb(used)} in use")
    part = used / most
    in_use = f"{_mb(used)} of {_mb(most)} ({of}) in use, {part:.0%}"
    remedy = f"CONFIG SET maxmemory {2 * most // 2**20}mb (if the machine has it), or shorten result_ttl."
    if of != "maxmemory":
        remedy = "Give the machine more memory, or shorten result_ttl."
    then = "refuses claims, and tasks wait"
    if of == "maxmemory" and server.info("memory").get("maxmemory_policy", "noeviction") != "noeviction":
        then = "evicts keys, and their operations run again"
    if part >= FULL:
        yield error(f"{in_use}: a full server {then}.", remedy)
    if part >= FILLING:
        yield warning(f"{in_use}: a full server {then}.", remedy)
    yield ok(in_use)


@SERVER_CHECKS.add()
def not_persistent(server: RedisServer) -> Findings:
    remedy = "CONFIG SET appendonly yes (and in redis.conf)"
    if server.info("persistence").get("aof_enabled") == "1":
        fsync = server.config("appendfsync")
        if fsync == "no":
            yield info(
                "appendfsync is no: a machine that crashes forgets what the system had not written, 30 s as a rule.",
                "CONFIG SET appendfsync everysec (and in redis.conf)",
            )
        yield ok(f"appendonly is yes, appendfsync {fsync}")
    if save := server.config("save"):
        yield info(
            f"The server saves snapshots (save {save}): a crash forgets what was done since the last, which runs again "
            "if it is delivered again.",
            remedy,
        )
    yield warning("Nothing is persisted: a restart forgets every operation that was done.", remedy)


@SERVER_CHECKS.add("what was last to be written to disk was written")
def persistence_failing(server: RedisServer) -> Findings:
    state = server.info("persistence")
    for name, what in (("aof_last_write_status", "append-only file"), ("rdb_last_bgsave_status", "snapshot")):
        if state.get(name, "ok") != "ok":
            yield error(
                f"The last write of the {what} failed; Redis then refuses writes, and tasks wait.",
                "Look into the server's log, most often for a full disk, and fix that.",
            )


@SERVER_CHECKS.add()
def replicas_not_awaited(server: RedisServer) -> Findings:
    replicas = server.number("replication", "connected_slaves")
    if replicas and not server.wanted_replicas:
        yield warning(
            f"The server has {_many(replicas)} and answers before they have a claim: one that is promoted forgets the "
            "last claims, and their tasks may run beside their first holders.",
            "Add wait_replicas=1 to the query of the store's URL.",
        )
    yield ok(f"wait_replicas is {server.wanted_replicas}" if replicas else "there is no replica")


@SERVER_CHECKS.add(when=lambda server: server.wanted_replicas)
def replicas_too_few(server: RedisServer) -> Findings:
    wanted, replicas = server.wanted_replicas, server.number("replication", "connected_slaves")
    if replicas < wanted:
        yield error(
            f"wait_replicas is {wanted}, and the server has {_many(replicas)}: no claim counts, and every task waits.",
            f"Connect {_many(wanted - replicas)} more, or set wait_replicas={replicas} in the store's URL.",
        )
    if replicas == wanted:
        yield info(
            f"wait_replicas is {wanted}, and the server has no replica to spare: the loss of one stops every task.",
            "Add a replica.",
        )
    yield ok(f"{_many(replicas)}, of which {wanted} must confirm a claim")


@SERVER_CHECKS.add()
def connections_full(server: RedisServer) -> Findings:
    used = server.number("clients", "connected_clients")
    most = server.number("clients", "maxclients") or int(server.config("maxclients"))
    if used >= BUSY * most:
        yield warning(
            f"{used:,} of {most:,} connections are open: further workers will be refused.",
            f"CONFIG SET maxclients {2 * most} (and in redis.conf)",
        )
    yield ok(f"{used:,} of {most:,} connections are open")


@SERVER_CHECKS.add()
def clocks_differ(server: RedisServer) -> Findings:
    yield compared(server.time)


#: The checks of a cache, which may forget.
CACHE_CHECKS = [server_old, store_is_replica, connections_full]
#: The checks of the store as a whole.
CHECKS = [slow_store, claims_refused]


def title(target: Target) -> str:
    """Return the name of the store with its URL, which the name of an app's backend or broker lacks."""
    assert isinstance(target.store, RedisStore)
    return target.name if "://" in target.name else f"{target.name} {target.store._url}"


def findings(target: Target, on_servers: list[Check], on_store: list[Check]) -> Iterator[Finding]:
    """Yield what is found on the servers of a store, and then of the store as a whole."""
    store = target.store
    assert isinstance(store, RedisStore)
    try:
        try:
            store.ping()
        except StoreUnreachable as refusal:  # as on a full disk, where Redis refuses a PING too: the checks say why
            if not isinstance(refusal.__cause__, ResponseError):
                raise
        servers = servers_of(store)
    except IdempotencyError as failure:
        yield failed(failure)
        return
    everywhere = (Check(check.code, partial(_worst, check, servers)) for check in on_servers)
    yield from run_checks([*everywhere, *on_store], target)


def _worst(check: Check, servers: list[RedisServer], _: Target) -> Findings:
    """Yield the worst finding of a check on several servers, with the server's name."""
    found = [(finding, server.name) for server in servers if (finding := check(server)) is not None]
    if not found:
        return
    worst, name = max(found, key=lambda each: each[0].severity)
    alike = sum(other.severity == worst.severity for other, _ in found)
    if name and worst.severity is not Severity.OK:
        more = f", and like it {alike - 1} more" if alike > 1 else ""
        worst = replace(worst, found=f"Node {name}{more}: {worst.found}")
    yield worst


def _many(replicas: int) -> str:
    return f"{replicas} replica{'' if replicas == 1 else 's'}"


def _mb(size: int) -> str:
    return f"{size / 2**20:,.1f} MB"
