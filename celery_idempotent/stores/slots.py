"""Which node of a Redis Cluster has which key: a key belongs to one of 16,384 slots, a slot to one primary.

See https://redis.io/docs/latest/operate/oss_and_stack/reference/cluster-spec/ for what nodes reply.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot
from redis.exceptions import AskError, ClusterDownError, MovedError, ResponseError

__all__ = ["Address", "Redirect", "is_down", "owners", "redirect", "slot_of"]

Address = tuple[str, int]


class Redirect(NamedTuple):
    """What a node answers who does not have a key.

    Arguments:
        address: Who has it.
        moved: For good, with its whole slot; if not, it is the one key that is on its way.
    """

    address: Address
    moved: bool


def slot_of(command: Sequence[Any]) -> int:
    """Return the slot of the key that a command is about."""
    key = command[3] if command[0] in ("EVALSHA", "EVAL") else command[1]
    return key_slot(key.encode() if isinstance(key, str) else key)


def owners(reply: Sequence[Any], asked: Address) -> list[Address | None]:
    """Return the primary of each slot, or None where there is none, by a node's reply to CLUSTER SLOTS.

    Arguments:
        reply: Ranges of slots: first, last, the primary, its replicas.
        asked: The node that replied: who knows no name for itself is where it was asked.
    """
    found: list[Address | None] = [None] * REDIS_CLUSTER_HASH_SLOTS
    for first, last, primary, *_ in reply:
        host = primary[0].decode() if primary[0] else asked[0]
        if host != "?":  # a node that was told to say its name, and has none
            found[first : last + 1] = [(host, int(primary[1]))] * (last + 1 - first)
    return found


def redirect(error: ResponseError, asked: Address) -> Redirect | None:
    """Return where a node sends us, if that is what its error says."""
    words = str(error).split()
    if isinstance(error, AskError):
        moved = isinstance(error, MovedError)
    elif len(words) == 3 and words[0] in ("MOVED", "ASK"):  # what redis-py before 7 tells its cluster client alone
        moved = words[0] == "MOVED"
    else:
        return None
    host, _, port = words[-1].rpartition(":")
    return Redirect((host or asked[0], int(port)), moved)


def is_down(error: ResponseError) -> bool:
    """Tell whether a node says that its cluster does not serve the slot, or any."""
    return isinstance(error, ClusterDownError) or str(error).startswith("CLUSTERDOWN")
