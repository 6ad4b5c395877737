"""A few connections that all threads share: a call takes the one that was used last, and gives it back.

Half of what a command costs in redis-py is the pool's locks, a look whether stray data is waiting, and the wrapping of
retries, which lease calls do not use. What the look is for is done here by closing whatever was interrupted.

A connection for every thread would be simpler, but pools of threads and greenlets have hundreds, greenlets new ones for
every task, and redis-py gives out no more than a hundred connections.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from time import monotonic
from typing import Any
from weakref import WeakSet

from redis.connection import HiredisRespSerializer
from redis.exceptions import RedisError, ResponseError

__all__ = ["Connections"]

#: Most connections of one process, unless they do not suffice for so many seconds.
MOST = 32
PATIENCE = 2.0
#: Seconds between two looks whether one was given back.
LOOK_EVERY = 0.002


class Packer(HiredisRespSerializer):
    """Spell commands by hiredis, and their numbers before.

    hiredis (3.5 and before) spells a number by a function that looks for signals, and crashes the process if a handler
    raises there, as that of the soft time limit does.
    """

    def pack(self, *command: Any) -> Any:
        spelled: list[Any] = [str(part) if type(part) in (int, float) else part for part in command]
        return super().pack(*spelled)


#: None for redis-py's own, which spells by itself where there is no hiredis.
PACKER = Packer() if hasattr(sys.modules.get("hiredis"), "pack_command") else None


class Connections:
    """Execute commands, each on a connection that no other command is using.

    Arguments:
        client: A redis-py client. What has only its ``execute_command`` (a Cluster client) is asked by that.
        closed: What it raises when the server has closed a connection.
    """

    def __init__(self, client: Any, closed: type[Exception]) -> None:
        self._client, self._closed = client, closed
        #: false for a Cluster client, whose keys live on different nodes
        self.one_node = hasattr(client, "connection_pool") and hasattr(client, "client")
        self._most = min(MOST, getattr(getattr(client, "connection_pool", None), "max_connections", MOST))
        if self.one_node:
            _let_in_again(client.connection_pool)
            for each in _pools(client.connection_pool):
                each.connection_kwargs.setdefault("command_packer", PACKER)
        self._reset()

    def _reset(self) -> None:
        self._idle: list[Any] = []  # clients of one connection each
        self._opened: WeakSet[Any] = WeakSet()  # these, and those in use; not those that an interruption has lost
        self._opening = threading.Lock()
        self._pid = os.getpid()  # last, as in `Heartbeat`

    def execute(self, *command: Any, then: Sequence[Any] | None = None) -> Any:
        """Send a command and return its reply; raise what redis-py raises.

        Arguments:
            command: What to send.
            then: A command to send with it, on the same connection and in one round trip; the reply is a pair.
        """
        if not self.one_node:
            return self._client.execute_command(*command)
        if then is None:
            return self._lend(_one, command)
        first, second = self._lend(_all, (command, then))
        if isinstance(first, ResponseError):
            raise first
        return first, second

    def pipeline(self, commands: Sequence[Sequence[Any]]) -> list[Any]:
        """Send commands in one round trip, and return their replies, of which each may be a `ResponseError`."""
        if self.one_node:
            replies: list[Any] = self._lend(_all, commands)
            return replies
        return [_caught(self.execute, command) for command in commands]

    def _lend(self, use: Callable[[Any, Any], Any], what: Any) -> Any:
        """Return what `use` makes of a connection and this, on a connection that nobody else is using."""
        if self._pid != os.getpid():  # what came through a fork is our parent's
            _after_fork(self._client.connection_pool)  # first: what is forgotten goes back there
            self._reset()
        idle = self._idle
        try:
            client = idle.pop()
        except IndexError:
            client = self._open()
        connection = client.connection
        try:
            connection.connect()  # if it is not; to send would do it too, without asking a sentinel who is the main one
            return use(connection, what)
        except BaseException as error:
            connection.disconnect()  # a reply that is still on its way must not answer the next command
            if not isinstance(error, (RedisError, OSError)):
                _start_anew(_pools(self._client.connection_pool)[1:])  # a sentinel may have been asked, see `_connect`
            if isinstance(error, self._closed):
                idle.clear()  # the server has closed them too; back in redis-py's pool they are looked at before use
            raise
        finally:
            idle.append(client)

    def _open(self) -> Any:
        """Return a new connection, or one that was given back meanwhile.

        One is opened at a time: when a thousand greenlets start at once, those who wait find what the first of them
        have given back. Who has waited too long opens one all the same, for that must not be what a lease runs out for.
        """
        end = monotonic() + PATIENCE
        first = self._opening.acquire(timeout=PATIENCE)
        try:
            while True:
                try:
                    return self._idle.pop()
                except IndexError:
                    pass
                if len(self._opened) < self._most or monotonic() >= end:
                    client = self._connect()
                    self._opened.add(client)
                    return client
                time.sleep(LOOK_EVERY)
        finally:
            if first:
                self._opening.release()

    def _connect(self) -> Any:
        try:
            return self._client.client()
        except (RedisError, OSError):
            raise
        except BaseException:
            # redis-py puts back into its pool what was interrupted while it said hello, and gives it out again: half
            # made, so that every later opening fails on it, or with a reply on its way that would be taken for the one
            # to our first command. Closed, it starts anew.
            _start_anew(_pools(self._client.connection_pool))
            raise

    def close(self) -> None:
        """Close every connection, those of other threads too; whoever calls next opens a new one."""
        if self.one_node:
            self._client.connection_pool.disconnect()
        self._client.close()


def _pools(pool: Any) -> list[Any]:
    sentinels = getattr(getattr(pool, "sentinel_manager", None), "sentinels", ())
    return [pool, *(sentinel.connection_pool for sentinel in sentinels)]


def _start_anew(pools: Iterable[Any]) -> None:
    """Close the connections of pools that nobody is using."""
    for pool in pools:
        with suppress(TypeError):  # redis-py 5 can close only all connections of a BlockingConnectionPool
            pool.disconnect(inuse_connections=False)


def _let_in_again(pool: Any) -> None:
    """Give a pool of redis-py a lock that a thread which has it may take once more.

    The collector may run while a thread is within the pool, and find a client there, whose end is to give its
    connection back to the same pool. With redis-py 5.0.0, whose lock is a plain one, that thread then waits for itself,
    and all others for it.
    """
    for each in _pools(pool):
        if not hasattr(getattr(each, "_lock", None), "_is_owned"):  # which an RLock has
            each._lock = threading.RLock()


def _after_fork(pool: Any) -> None:
    """Give a pool of redis-py locks of this process.

    It makes one itself after a fork, but waits for the old one before: for ever, if a thread that our parent had and we
    have not was just opening a connection.
    """
    for each in _pools(pool):
        each._lock = threading.RLock()
        getattr(each, "_checkpid", lambda: None)()  # so that it makes its own now, and not later in place of ours
    _let_in_again(pool)


def _one(connection: Any, command: Sequence[Any]) -> Any:
    """Send a command and read its reply."""
    connection.send_command(*command)
    return connection.read_response()


def _all(connection: Any, commands: Sequence[Sequence[Any]]) -> list[Any]:
    """Send commands together and read their replies, of which each may be an error."""
    connection.send_packed_command(connection.pack_commands(commands))
    return [_caught(connection.read_response, ()) for _ in commands]


def _caught(ask: Callable[..., Any], what: Sequence[Any]) -> Any:
    """Return the reply to a command, or the error that the server replied."""
    try:
        return ask(*what)
    except ResponseError as error:
        return error
