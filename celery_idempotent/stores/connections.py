"""A connection of its own for every thread, so that a call borrows none from redis-py's pool and gives none back.

Half of what a command costs in redis-py is the pool's locks, a look whether stray data is waiting, and the wrapping of
retries, which lease calls do not use. What the look is for is done here by closing whatever was interrupted.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import Any

from redis.exceptions import ResponseError

__all__ = ["Connections"]


class Connections:
    """Execute commands, each thread on its own connection out of the client's pool.

    Arguments:
        client: A redis-py client. What has only its ``execute_command`` (a Cluster client) is asked by that.
    """

    def __init__(self, client: Any) -> None:
        self._client = client
        #: false for a Cluster client, whose keys live on different nodes
        self.one_node = hasattr(client, "connection_pool") and hasattr(client, "client")
        self._own = threading.local()

    def execute(self, *command: Any, then: Sequence[Any] | None = None) -> Any:
        """Send a command and return its reply; raise what redis-py raises.

        Arguments:
            command: What to send.
            then: A command to send with it, on the same connection and in one round trip; the reply is a pair.
        """
        if not self.one_node:
            return self._client.execute_command(*command)
        own = self._own.__dict__
        if own.get("pid") != os.getpid():  # what came through a fork is our parent's
            own.update(client=self._client.client(), pid=os.getpid())
        connection = own["client"].connection
        try:
            connection.connect()  # if it is not; to send would do it too, without asking a sentinel who is the main one
            if then is not None:
                connection.send_packed_command(connection.pack_commands([command, then]))
                return _both(connection)
            connection.send_command(*command)
            return connection.read_response()
        except BaseException:
            connection.disconnect()  # a reply that is still on its way must not answer the next command
            raise

    def close(self) -> None:
        """Close every connection, those of other threads too; whoever calls next opens a new one."""
        if self.one_node:
            self._client.connection_pool.disconnect()
        self._client.close()


def _both(connection: Any) -> tuple[Any, Any]:
    """Read two replies; the second one may be an error, the first one's is raised once both are read."""
    replies: list[Any] = []
    for _ in range(2):
        try:
            replies.append(connection.read_response())
        except ResponseError as error:
            replies.append(error)
    if isinstance(replies[0], ResponseError):
        raise replies[0]
    return replies[0], replies[1]
