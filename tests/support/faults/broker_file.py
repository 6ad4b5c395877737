"""What became of each message, by the append-only file of a Redis broker.

Celery's client takes a message off its queue with BRPOP, and notes it as unacked in a second round trip. What a client
took that was gone before the second is nowhere any more, and only the server's own file knows of it.
"""

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

__all__ = ["PERSISTED", "BrokerFile", "Message"]

#: The configuration of a server whose file is to be read.
PERSISTED = {"appendonly": "yes", "appendfsync": "no", "auto_aof_rewrite_percentage": "0"}
UNACKED = b"unacked"


@dataclass
class Message:
    """What was done with one message; what is given back to its queue keeps its delivery tag.

    Arguments:
        task_id: Of its task.
    """

    task_id: str
    queued: int = 0
    taken: int = 0
    noted: int = 0
    given_back: int = 0
    acked: int = 0

    @property
    def vanished(self) -> bool:
        """Whether a client took it, and was gone before it noted that; or is just about to."""
        return self.taken > self.noted


@dataclass
class BrokerFile:
    """The account of a broker's messages, from its first command on.

    Arguments:
        directory: The server's; it was started as `PERSISTED` says, and has one database in use.
    """

    directory: Path
    #: by delivery tag
    messages: dict[str, Message] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._queues: dict[bytes, deque[str]] = defaultdict(deque)
        #: the tags that a transaction has taken out of the unacked ones
        self._removed: set[str] = set()
        for command, *args in _commands(self.directory):
            self._play(command.upper(), args)

    def vanished(self) -> set[str]:
        """Return the ids of the tasks of which a client took a message and was gone before it noted that."""
        return {message.task_id for message in self.messages.values() if message.vanished}

    def of(self, task_id: str) -> list[Message]:
        """Return the messages of a task."""
        return [message for message in self.messages.values() if message.task_id == task_id]

    def _play(self, command: bytes, args: list[bytes]) -> None:
        match command:
            case b"LPUSH" | b"RPUSH":
                for value in args[1:]:
                    self._push(args[0], value, left=command == b"LPUSH")
            case b"RPOP":  # which is also what a client gets that has waited with BRPOP
                self.messages[self._queues[args[0]].pop()].taken += 1
            case b"HSET" if args[0] == UNACKED:
                self.messages[args[1].decode()].noted += 1
            case b"HDEL" if args[0] == UNACKED:
                self._removed.update(tag.decode() for tag in args[1:])
            case b"EXEC":
                for tag in self._removed:
                    self.messages[tag].acked += 1
                self._removed.clear()

    def _push(self, queue: bytes, value: bytes, *, left: bool) -> None:
        message = json.loads(value)
        tag = str(message["properties"]["delivery_tag"])
        self.messages.setdefault(tag, Message(str(message["headers"]["id"]))).queued += 1
        (self._queues[queue].appendleft if left else self._queues[queue].append)(tag)
        if tag in self._removed:  # the same transaction gives it back
            self._removed.discard(tag)
            self.messages[tag].given_back += 1


def _commands(directory: Path) -> Iterator[list[bytes]]:
    """Yield what changed data, each command as its words."""
    # Before Redis 7 it is one file.
    for path in sorted(directory.rglob("*.incr.aof")) or sorted(directory.rglob("appendonly.aof")):
        with path.open("rb") as file, suppress(EOFError):
            while True:
                yield [_word(file) for _ in range(_number(file))]


def _number(file: BinaryIO) -> int:
    line = file.readline()
    if not line.endswith(b"\n"):  # the end, or what is being written
        raise EOFError
    return int(line[1:])


def _word(file: BinaryIO) -> bytes:
    size = _number(file)
    word = file.read(size + 2)
    if len(word) < size + 2:
        raise EOFError
    return word[:size]
