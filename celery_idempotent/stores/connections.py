"""A few connections that all threads share: a call takes the one that was used last, and gives it back.

Half of what a command costs in redis-py is the pool's locks, a look whether stray data is waiting, and the wrapping of
retries, which lease calls do not use. What the look is for is done here by closing whatever was interrupted.

A connection for every thread would be simpler, but pools of threads and greenlets have hundreds, greenlets new ones for
every task, and redis-py gives out no more than a hundred connections.
"""

from __future__ import annotations

import os
import threading
from typing import Any

import redis

__all__ = ["Connections"]

#: Longest time in seconds to wait for others who are opening a connection, before opening one beside them.
OPENING = 2.0


class Connections:
    """Execute commands, each on a connection that no other command is using.

    Arguments:
        client: A redis-py client. What has only its ``execute_command`` (a Cluster client) is asked by that.
    """

    def __init__(self, client: Any) -> None:
        self._client = client
        #: false for a Cluster client, whose keys live on different nodes
        self.one_node = hasattr(client, "connection_pool") and hasattr(client, "client")
        self._reset()

    def _reset(self) -> None:
        self._idle: list[Any] = []  # clients of one connection each
        self._opening = threading.Lock()
        self._pid = os.getpid()  # last, as in `Heartbeat`

    def execute(self, *command: Any) -> Any:
        """Send a command and return its reply; raise what redis-py raises."""
        if not self.one_node:
            return self._client.execute_command(*command)
        if self._pid != os.getpid():  # what came through a fork is our parent's
            self._reset()
        idle = self._idle
        try:
            client = idle.pop()
        except IndexError:
            client = self._open()
        connection = client.connection
        try:
            connection.send_command(*command)
            return connection.read_response()
        except BaseException as error:
            connection.disconnect()  # a reply that is still on its way must not answer the next command
            if isinstance(error, redis.ConnectionError):
                idle.clear()  # the server has closed them too; back in redis-py's pool they are looked at before use
            raise
        finally:
            idle.append(client)

    def _open(self) -> Any:
        """Return a new connection, or one that was given back meanwhile.

        One is opened at a time: when a thousand greenlets start at once, those who wait find what the first of them
        have given back. Who has waited too long opens one all the same, for a lock must not be what a lease runs out
        for.
        """
        first = self._opening.acquire(timeout=OPENING)
        try:
            return self._idle.pop()
        except IndexError:
            return self._client.client()
        finally:
            if first:
                self._opening.release()

    def close(self) -> None:
        """Close every connection, those of other threads too; whoever calls next opens a new one."""
        if self.one_node:
            self._client.connection_pool.disconnect()
        self._client.close()
