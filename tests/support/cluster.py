"""A real Redis Cluster of three primaries on free loopback ports, started when it is entered."""

from __future__ import annotations

import socket
import time
from contextlib import suppress
from types import TracebackType
from typing import Any

from redis.crc import key_slot

from tests.support.servers import RedisServer
from tests.support.waiting import wait_until

PRIMARIES = 3
SLOTS = 16384
#: The cluster bus listens there, counted from the port; servers before 7.0 cannot be told another one.
BUS = 10_000
READY_SECONDS = 60.0
Address = tuple[str, int]


def free_pair() -> int:
    """Return a loopback port that was free a moment ago, and so was the one for the cluster bus."""
    for _ in range(1000):
        with socket.socket() as probe, socket.socket() as bus:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
            low = port if port + BUS <= 65535 else port - 2 * BUS  # the kernel hands out high ones
            with suppress(OSError):
                bus.bind(("127.0.0.1", low + BUS))
                if low == port:
                    return port
                with socket.socket() as other:
                    other.bind(("127.0.0.1", low))
                    return low
    raise RuntimeError("no pair of ports is free")


class ClusterNode(RedisServer):
    """One server of a cluster; a restart finds its slots again in its directory."""

    databases = 1

    def __init__(self, **config: object) -> None:
        super().__init__(
            port=free_pair(),
            cluster_enabled="yes",
            cluster_config_file="nodes.conf",
            repl_diskless_sync="yes",
            repl_diskless_sync_delay=0,
            **config,
        )

    @property
    def address(self) -> Address:
        return "127.0.0.1", self.port

    def says(self, *command: Any) -> Any:
        """Send a command to this very node, and return its reply."""
        with self.client() as client:
            return client.execute_command(*command)

    def id(self) -> str:
        """Return what the nodes of the cluster call this one."""
        return text(self.says("CLUSTER", "MYID"))

    def state(self) -> dict[str, str]:
        """Return what the node thinks of the cluster."""
        with self.client() as client:
            return dict(client.execute_command("CLUSTER INFO"))


def text(reply: Any) -> str:
    return reply.decode() if isinstance(reply, bytes) else str(reply)


class Cluster:
    """Primaries that share the slots evenly, and as many replicas as wanted, of the first one first.

    Arguments:
        replicas: How many.
        primaries: How many.
        config: Of every node.
    """

    def __init__(self, replicas: int = 0, *, primaries: int = PRIMARIES, **config: object) -> None:
        config.setdefault("cluster_node_timeout", 1500)
        self.primaries = [ClusterNode(**config) for _ in range(primaries)]
        self.replicas = [ClusterNode(**config) for _ in range(replicas)]

    def __enter__(self) -> Cluster:
        try:
            for node in self.nodes:
                start(node)
            self._join()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def nodes(self) -> list[ClusterNode]:
        return [*self.primaries, *self.replicas]

    def url(self, query: str = "") -> str:
        """Return the URL of a store on this cluster."""
        hosts = ",".join(f"127.0.0.1:{node.port}" for node in self.primaries)
        return f"redis+cluster://{hosts}{query and '?' + query}"

    def stop(self) -> None:
        for node in self.nodes:
            node.stop()

    def empty(self) -> None:
        """Forget every key."""
        for node in self.primaries:
            node.says("FLUSHALL")

    def owner(self, key: str) -> ClusterNode:
        """Return which of the primaries has a key, unless slots have been moved."""
        return self.primaries[key_slot(key.encode()) * len(self.primaries) // SLOTS]

    def keys_of(self, node: ClusterNode, count: int) -> list[str]:
        """Return keys that are this primary's."""
        found: list[str] = []
        number = 0
        while len(found) < count:
            key = f"idem:key-{number}"
            found += [key] * (self.owner(key) is node)
            number += 1
        return found

    def move(self, key: str, target: ClusterNode) -> None:
        """Give the slot of a key to another primary, with all that is in it."""
        source, slot = self.begin_move(key, target)
        while names := source.says("CLUSTER", "GETKEYSINSLOT", slot, 100):
            for name in names:
                self.move_key(text(name), source, target)
        for node in (target, source, *self.primaries):
            node.says("CLUSTER", "SETSLOT", slot, "NODE", target.id())

    def begin_move(self, key: str, target: ClusterNode) -> tuple[ClusterNode, int]:
        """Begin to give a slot away: from now on its keys are here or there, and new ones are there."""
        slot, source = key_slot(key.encode()), self.owner(key)
        target.says("CLUSTER", "SETSLOT", slot, "IMPORTING", source.id())
        source.says("CLUSTER", "SETSLOT", slot, "MIGRATING", target.id())
        return source, slot

    def move_key(self, key: str, source: ClusterNode, target: ClusterNode) -> None:
        source.says("MIGRATE", "127.0.0.1", target.port, key, 0, 5000)

    def wait_until_whole(self) -> None:
        """Wait until every node that runs says that all slots are served."""
        wait_until(self._is_whole, READY_SECONDS, self._seen)

    def _join(self) -> None:
        first, *others = self.nodes
        for number, node in enumerate(self.nodes):
            node.says("CLUSTER", "SET-CONFIG-EPOCH", number + 1)  # or the nodes would have to agree on who is who
        many = len(self.primaries)
        share = [range(-(-SLOTS * at // many), -(-SLOTS * (at + 1) // many)) for at in range(many)]
        for node, slots in zip(self.primaries, share, strict=True):
            node.says("CLUSTER", "ADDSLOTS", *slots)  # ADDSLOTSRANGE is of 7.0
        for node in others:
            first.says("CLUSTER", "MEET", "127.0.0.1", node.port)
        wait_until(lambda: all(self._knows_all(node) for node in self.nodes), READY_SECONDS, self._seen)
        for number, replica in enumerate(self.replicas):
            replica.says("CLUSTER", "REPLICATE", self.primaries[number % len(self.primaries)].id())
        self.wait_until_whole()
        for number, _ in enumerate(self.replicas):
            primary = self.primaries[number % len(self.primaries)]
            wait_until(lambda primary=primary: primary.says("WAIT", 1, 100) >= 1, READY_SECONDS, "a replica")  # type: ignore[misc]

    def _knows_all(self, node: ClusterNode) -> bool:
        return int(node.state()["cluster_known_nodes"]) == len(self.nodes)

    def _is_whole(self) -> bool:
        return all(node.state()["cluster_state"] == "ok" for node in self.nodes if node.running)

    def _seen(self) -> str:
        states = [node.state() if node.running else "down" for node in self.nodes]
        return f"the cluster to be whole, it is {states}"


def start(node: ClusterNode) -> None:
    """Start a node, on another pair of ports if somebody else was quicker."""
    for _ in range(5):
        try:
            node.start()
        except RuntimeError:
            if "in use" not in node.logs() and "Failed listening" not in node.logs():
                raise
            node.port = free_pair()
        else:
            return
    raise RuntimeError(f"a node found no ports:\n{node.logs()}")


if __name__ == "__main__":
    began = time.monotonic()
    with Cluster(replicas=1) as cluster:
        print(cluster.url(), f"{time.monotonic() - began:.2f} s")
