"""A store in Redis Cluster, and Valkey's: a record is one key on one node, so that every verb is as atomic as on one
server.
"""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from collections.abc import Iterable, Sequence
from time import monotonic
from typing import Any, NamedTuple

import redis
from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot
from redis.exceptions import AskError, ClusterDownError, ClusterError, MovedError, RedisError, ResponseError

from ...errors import StoreError
from .. import hide_password
from ..records import Lease, Record
from .connections import OPTION, REFUSALS, Addresses, Connections, as_redis, translate_error
from .store import BATCH, RedisStore, Replicas

EXAMPLE = "redis+cluster://:password@host1:6379,host2:6379"


class ClusterStore(RedisStore):
    """Keep the records in a Redis Cluster.

    Weaker than the contract as one Redis is; and where a slot moves to a node whose clock differs, what has run out is
    decided by that clock from then on.

    Arguments:
        seeds: Hosts and ports of some nodes, which list the others.
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
        self._connections: Any = ClusterRouter(seeds, {**self.connection_options(), **(options or {})})
        self._replicas = Replicas(wait_replicas)
        self._one_by_one = True
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
        plain, in_url = Replicas.in_url(as_redis(url))
        wanted = options.pop(OPTION, 0)
        places = Addresses.of(plain, port=6379, example=EXAMPLE)
        if places.path:
            raise places.error("A cluster has one database, 0, and no number after a slash")
        own = places.connection({**cls.connection_options(), **options})
        return cls(places.hosts, own, url=hide_password(url), wait_replicas=wanted if in_url is None else in_url)

    def shard(self, key: str) -> str:
        return str(self._connections.known(key))

    def renew(self, leases: Sequence[Lease]) -> Sequence[Lease]:
        lost: list[Lease] = []
        by_node, failure = self._by_node(leases)
        for node, there in by_node:
            for start in range(0, len(there), BATCH):
                try:
                    lost += self._renew_at(node, there[start : start + BATCH])
                except StoreError as error:  # a node that is down: the leases on the others need not run out for it
                    failure = error
        if failure is not None:
            raise failure
        return lost

    def peek(self, key: str) -> Record | None:
        return self.get(key)

    def _by_node(self, leases: Sequence[Lease]) -> tuple[list[tuple[ClusterNode, list[Lease]]], StoreError | None]:
        """Return the nodes with their leases, and the error for those whose slots no node serves, if there are any."""
        nodes: dict[Any, ClusterNode] = {}
        grouped: dict[Any, list[Lease]] = defaultdict(list)
        failure: StoreError | None = None
        for lease, node in zip(leases, self._at(self._connections.nodes_of, leases), strict=True):
            if isinstance(node, ClusterError):
                failure = translate_error(node, ("", lease.key), self._url)
                continue
            nodes.setdefault(node.address, node)
            grouped[node.address].append(lease)
        return [(nodes[address], there) for address, there in grouped.items()], failure

    def _noted(self, calls: list[tuple[Any, ...]]) -> list[Any]:
        replies: list[Any] = []
        for list_key, *args in calls:  # a round trip for each: no caller waits for them
            try:
                replies.append(self._call("append_history", (list_key,), args))
            except StoreError as error:  # nor do the keys of other nodes wait for one that is down
                replies.append(error)
        return replies

    def ping(self) -> None:
        for node in self._places():
            self._at(node.execute, "PING")

    def _places(self) -> Iterable[Any]:
        nodes: list[ClusterNode] = self._at(self._connections.primaries)
        return nodes


# The nodes of a Redis Cluster: each command goes to the one that has its key, wherever that has moved.
#
# redis-py's own cluster client would do that too, and more than a lease call can bear: it connects when it is made,
# tries again for many seconds while a node is down, and its locks and pools do not survive a fork. So it is done here,
# on the `Connections` of each node; redis-py opens them, speaks to them and computes slots.


#: Seconds that one node may take to list the slots, and after which no other node is tried.
ANSWER, PATIENCE = 1.0, 2.0
#: How often a command is sent on to yet another node.
REDIRECTS = 5


class ClusterNode:
    """One primary, as a place to list and to renew at.

    Arguments:
        nodes: Where it belongs.
        address: Its host and port.
    """

    def __init__(self, nodes: ClusterRouter, address: Address) -> None:
        self._nodes, self.address = nodes, address

    def execute(self, *command: Any) -> Any:
        """Send it a command, whatever the key, and return the reply."""
        [reply] = self.pipeline([command])
        if isinstance(reply, ResponseError):
            raise reply
        return reply

    def pipeline(self, commands: Sequence[Sequence[Any]], *, urgent: bool = False) -> list[Any]:
        """Send it commands in one round trip, and return their replies, of which each may be a `ResponseError`."""
        return self._nodes.send(self.address, commands, urgent=urgent)


class ClusterRouter:
    """All nodes of a cluster; to be used like the `Connections` of one server.

    Arguments:
        seeds: Hosts and ports of some of them.
        options: How redis-py connects to each; also ``connection_class``.
    """

    one_node = False

    def __init__(self, seeds: Sequence[Address], options: dict[str, Any]) -> None:
        self._seeds, self._options = seeds, options
        self._slots: list[Address | None] = []  # empty until it is needed, and while it is in doubt
        self._last: list[Address | None] = []
        self._suspect: Address | None = None
        self._opened: dict[Address, Connections] = {}
        self._looks = 0
        self._reset()

    def _reset(self) -> None:
        self._looking = threading.Lock()
        self._pid = os.getpid()

    def execute(self, *command: Any, then: Sequence[Any] | None = None, urgent: bool = False) -> Any:
        """Send a command to the node that has its key and return the reply; raise what redis-py raises.

        Arguments:
            command: What to send; the key is where the commands of `RedisStore` have it.
            then: A command to send with it, on the same connection and in one round trip; the reply is a pair.
            urgent: As in `Connections.execute`.
        """
        slot = slot_of(command)
        address, sent = self._owner(slot), [command] if then is None else [command, then]
        asking = False
        for _ in range(REDIRECTS):
            replies = self.send(address, [("ASKING",), *sent] if asking else sent, urgent=urgent)[asking:]
            error = replies[0]
            if not isinstance(error, ResponseError):
                return replies[0] if then is None else tuple(replies)
            elsewhere = redirect(error, address)
            if elsewhere is None:
                raise error
            address, asking = elsewhere.address, not elsewhere.moved
            if elsewhere.moved:
                self._moved(slot, address)
        raise ClusterError(f"slot {slot} is on none of the {REDIRECTS} nodes that we were sent to")

    def send(self, address: Address, commands: Sequence[Sequence[Any]], *, urgent: bool = False) -> list[Any]:
        """Send commands to one node in one round trip, and return their replies, errors among them."""
        try:
            replies = self._connections(address).pipeline(commands, urgent=urgent)
        except (RedisError, OSError):
            self._doubt(address)  # it may be down, and another one have its slots
            raise
        if any(isinstance(reply, ResponseError) and is_down(reply) for reply in replies):
            self._doubt(address)
        return replies

    def primaries(self) -> list[ClusterNode]:
        """Return every node that has slots."""
        known = dict.fromkeys(address for address in self._table() if address is not None)
        return [ClusterNode(self, address) for address in known]

    def nodes_of(self, leases: Sequence[Lease]) -> list[ClusterNode | ClusterError]:
        """Return for each lease the node that has its key, or the error where none has."""
        table = self._table()
        slots = [slot_of(("", lease.key)) for lease in leases]
        return [self._unserved(slot) if (at := table[slot]) is None else ClusterNode(self, at) for slot in slots]

    def known(self, key: str) -> str:
        """Return the name of the node that has a key, by the last known table of slots; "" before the first."""
        table = self._slots or self._last
        address = table[slot_of(("", key))] if table else None
        return "{}:{}".format(*address) if address else ""

    def close(self) -> None:
        """Close every connection of this process; the next call opens new ones."""
        for connections in list(self._opened.values()):
            connections.close()

    def _connections(self, address: Address) -> Connections:
        found = self._opened.get(address)
        if found is None:
            # Two threads may make one each: nothing is connected yet, and the first one stays.
            found = self._opened.setdefault(address, connections_to(address, self._options))
        return found

    def _owner(self, slot: int) -> Address:
        address = self._table()[slot]
        if address is None:
            raise self._unserved(slot)
        return address

    def _unserved(self, slot: int) -> ClusterError:
        self._slots = []  # the next call looks again: by then it may be served
        return ClusterError(f"no node of the cluster serves slot {slot}: is it being repaired?")

    def _table(self) -> list[Address | None]:
        """Return the primary of each slot; query the cluster if that is not known or in doubt."""
        slots = self._slots
        if slots:
            return slots
        if self._pid != os.getpid():  # a thread that our parent had and we have not may have been looking
            self._reset()
        if not self._looking.acquire(timeout=2 * PATIENCE):
            raise ClusterError("another thread has been looking for the nodes of the cluster for too long")
        try:
            if not self._slots:
                self._last = self._slots = self._look()
                for address in self._opened.keys() - set(self._slots):
                    self._opened.pop(address).close()
            return self._last
        finally:
            self._looking.release()

    def _look(self) -> list[Address | None]:
        """Query the nodes one by one for the slots, the one that failed last; return the first full answer."""
        end = monotonic() + PATIENCE
        largest: list[Address | None] = []
        error: Exception = ClusterError("none of its nodes could be reached")
        for address in self._candidates():
            try:
                found = self._table_of(address)
            except REFUSALS:
                raise
            except (RedisError, OSError) as failure:
                error = failure
            else:
                if None not in found:
                    return found
                largest = max(largest, found, key=lambda each: len(each) - each.count(None))
            if monotonic() > end:
                break
        if any(largest):
            return largest
        raise ClusterError(f"no node lists the slots, the last error was: {error}") from error

    def _candidates(self) -> list[Address]:
        known = list(dict.fromkeys([*(address for address in self._last if address), *self._seeds]))
        self._looks += 1
        turn = self._looks % len(known)  # a node that is cut off knows an old table: not always the same first
        return sorted(known[turn:] + known[:turn], key=lambda address: address == self._suspect)

    def _table_of(self, address: Address) -> list[Address | None]:
        hasty = {
            name: min(self._options.get(name) or ANSWER, ANSWER)
            for name in ("socket_timeout", "socket_connect_timeout")
        }
        connections = connections_to(address, {**self._options, **hasty})  # new ones: nothing in them is stale
        try:
            return owners(connections.execute("CLUSTER", "SLOTS"), address)
        finally:
            connections.close()

    def _moved(self, slot: int, address: Address) -> None:
        slots = self._slots
        if address not in slots:  # a replica that was promoted, or a node that is new: more will have moved
            self._slots = []
        elif slots:
            slots[slot] = address

    def _doubt(self, address: Address) -> None:
        self._suspect = address
        self._slots = []


def connections_to(address: Address, options: dict[str, Any]) -> Connections:
    """Return the connections to one node; nothing is connected yet."""
    host, port = address
    client = redis.Redis(connection_pool=redis.ConnectionPool(**{**options, "host": host, "port": port}))
    return Connections(client, redis.ConnectionError)


# Which node of a Redis Cluster has which key: a key belongs to one of 16,384 slots, a slot to one primary.
#
# See https://redis.io/docs/latest/operate/oss_and_stack/reference/cluster-spec/ for what nodes reply.


Address = tuple[str, int]


class Redirect(NamedTuple):
    """The redirection that a node replies for a key which it does not have.

    Arguments:
        address: The node that has it.
        moved: For good, with its whole slot; if not, it is the one key that is on its way.
    """

    address: Address
    moved: bool


def slot_of(command: Sequence[Any]) -> int:
    """Return the slot of the key that a command is about."""
    key = command[3] if command[0] in ("EVALSHA", "EVAL") else command[1]
    return key_slot(key.encode() if isinstance(key, str) else key)


def owners(reply: Sequence[Any], node: Address) -> list[Address | None]:
    """Return the primary of each slot, or None where there is none, by a node's reply to CLUSTER SLOTS.

    Arguments:
        reply: Ranges of slots: first, last, the primary, its replicas.
        node: The node that replied; it may not know its own name.
    """
    found: list[Address | None] = [None] * REDIS_CLUSTER_HASH_SLOTS
    for first, last, primary, *_ in reply:
        host = primary[0].decode() if primary[0] else node[0]
        if host != "?":  # a node that is configured to announce its name, and has none
            found[first : last + 1] = [(host, int(primary[1]))] * (last + 1 - first)
    return found


def redirect(error: ResponseError, node: Address) -> Redirect | None:
    """Return the redirection in a node's error, or None."""
    words = str(error).split()
    if isinstance(error, AskError):
        moved = isinstance(error, MovedError)
    elif len(words) == 3 and words[0] in ("MOVED", "ASK"):  # what redis-py before 7 parses for its cluster client alone
        moved = words[0] == "MOVED"
    else:
        return None
    host, _, port = words[-1].rpartition(":")
    return Redirect((host or node[0], int(port)), moved)


def is_down(error: ResponseError) -> bool:
    """Return whether a node's error is that its cluster does not serve the slot, or any."""
    return isinstance(error, ClusterDownError) or str(error).startswith("CLUSTERDOWN")
