"""Redis Cluster, and Valkey's: a record is one key on one node, so that every verb is as atomic as on one server."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from ..errors import StoreError
from ..records import Lease
from . import hide_password
from .addresses import Addresses
from .hashes import lease_args
from .nodes import Node, Nodes
from .redis import BATCH, RedisStore
from .replicas import OPTION, Replicas
from .scripts import together

__all__ = ["ClusterStore"]

EXAMPLE = "redis+cluster://:password@host1:6379,host2:6379"


class ClusterStore(RedisStore):
    """Keep the records in a Redis Cluster.

    Weaker than the contract as one Redis is; and where a slot moves to a node whose clock differs, what has run out is
    decided by that clock from then on.

    Arguments:
        seeds: Hosts and ports of some nodes; they tell of the others.
        options: How redis-py connects to each node.
        url: What to call the cluster in messages; no password in it.
        wait_replicas: How many replicas of its node must have a claim before it counts.
    """

    def __init__(
        self,
        seeds: Sequence[tuple[str, int]],
        options: dict[str, Any] | None = None,
        *,
        url: str = "redis+cluster",
        wait_replicas: int = 0,
    ) -> None:
        self._connections: Any = Nodes(seeds, {**self.connection_options(), **(options or {})})
        self._replicas = Replicas(wait_replicas)
        self._url = url

    @classmethod
    def from_url(cls, url: str, **options: Any) -> ClusterStore:
        """Return a store on the cluster that ``url`` names (``redis+cluster://`` or ``rediss+cluster://``).

        Arguments:
            url: Nodes with commas between them; its query may carry any connection option, and ``wait_replicas``.
            options: Connection options that the URL does not give, and ``wait_replicas``.

        Raises:
            ConfigurationError: the URL cannot be parsed.
        """
        plain, said = Replicas.in_url(url)
        asked = options.pop(OPTION, 0)
        places = Addresses.of(plain, port=6379, example=EXAMPLE)
        if places.path:
            raise places.error("A cluster has one database, 0, and no number after a slash")
        own = places.connection({**cls.connection_options(), **options})
        return cls(places.hosts, own, url=hide_password(url), wait_replicas=asked if said is None else said)

    def part(self, key: str) -> str:
        return str(self._connections.known(key))

    def renew(self, leases: Sequence[Lease]) -> Sequence[Lease]:
        lost: list[Lease] = []
        failure: StoreError | None = None
        for node, ours in self._by_node(leases):
            for start in range(0, len(ours), BATCH):
                try:
                    lost += self._renew_at(node, ours[start : start + BATCH])
                except StoreError as error:  # a node that is down: the leases on the others need not run out for it
                    failure = error
        if failure is not None:
            raise failure
        return lost

    def _by_node(self, leases: Sequence[Lease]) -> Iterable[tuple[Node, list[Lease]]]:
        nodes: dict[Any, Node] = {}
        grouped: dict[Any, list[Lease]] = defaultdict(list)
        for lease in leases:
            node = self._at(self._connections.node_of, lease.key)
            nodes.setdefault(node.address, node)
            grouped[node.address].append(lease)
        return [(nodes[address], ours) for address, ours in grouped.items()]

    def _renew_at(self, node: Node, leases: Sequence[Lease]) -> list[Lease]:
        """Renew leases on one node in one round trip: a call of the script for each, for their slots differ."""
        wait = self._replicas.command
        calls = [(lease.key, *lease_args(lease)) for lease in leases]
        replies = together(lambda commands: self._at(node.pipeline, commands), "renew", calls, wait)
        missing = self._replicas.missing(replies[-1]) if wait else ""
        if missing:
            raise self._unreplicated(missing)
        lost: list[Lease] = []
        for lease, reply in zip(leases, replies, strict=False):
            if isinstance(reply, Exception):  # it has moved, say
                reply, missing = self._replicated("renew", (lease.key,), lease_args(lease))
                if missing:
                    raise self._unreplicated(missing)
            lost += [lease] * len(reply)
        return lost

    def _noted(self, calls: list[tuple[Any, ...]]) -> list[Any]:
        replies: list[Any] = []
        for list_key, *args in calls:  # a round trip for each: nobody waits for them
            try:
                replies.append(self._call("note", (list_key,), args))
            except StoreError as error:  # nor do the keys of other nodes wait for one that is down
                replies.append(error)
        return replies

    def ping(self) -> None:
        for node in self._places():
            self._at(node.execute, "PING")

    def _places(self) -> Iterable[Any]:
        nodes: list[Node] = self._at(self._connections.primaries)
        return nodes
