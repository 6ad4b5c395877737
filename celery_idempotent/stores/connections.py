"""A connection of its own for every thread, so that a call borrows none from redis-py's pool and gives none back.

Half of what a command costs in redis-py is the pool's locks, a look whether stray data is waiting, and the wrapping of
retries, which lease calls do not use. What the look is for is done here by closing whatever was interrupted.
"""

from __future__ import annotations

import os
import threading
from typing import Any

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

    def execute(self, *command: Any) -> Any:
        """Send a command and return its reply; raise what redis-py raises."""
        if not self.one_node:
            return self._client.execute_command(*command)
        own = self._own.__dict__
        if own.get("pid") != os.getpid():  # what came through a fork is our parent's
            own.update(client=self._client.client(), pid=os.getpid())
        connection = own["client"].connection
        try:
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
