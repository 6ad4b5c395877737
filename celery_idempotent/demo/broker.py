"""The broker as the demo sees it: how much is on its way, and whose visibility timeout has passed."""

from __future__ import annotations

import threading
import time
from typing import Any

from .scenario import Order
from .shop import TASK, VISIBILITY_TIMEOUT

__all__ = ["Broker"]


class Broker:
    """A Redis broker.

    Arguments:
        app: The shop's Celery app.
    """

    def __init__(self, app: Any) -> None:
        self._app = app
        self._connection = app.connection_for_write()
        self._channel = self._connection.default_channel

    def close(self) -> None:
        """Close every connection to it."""
        self._connection.close()
        self._app.close()

    def publish(self, order: Order) -> None:
        """Publish an order, as often as its fault wants and then at once."""
        if order.copies == 1:
            self._send(order)
            return
        start = threading.Barrier(order.copies)

        def send() -> None:
            start.wait()
            self._send(order)

        threads = [threading.Thread(target=send) for _ in range(order.copies)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def on_its_way(self) -> int:
        """Return how many messages wait, or are with a worker and not acked."""
        with self._channel.conn_or_acquire() as client:
            return int(client.llen(self._app.conf.task_default_queue)) + int(client.hlen(self._channel.unacked_key))

    def sweep(self) -> int:
        """Put back into the queue what was not acked within the visibility timeout, and return its number.

        Every worker does this, with this very method, about every 100 seconds; a demo cannot wait that long.
        """
        with self._channel.conn_or_acquire() as client:
            late = int(client.zcount(self._channel.unacked_index_key, "-inf", time.time() - VISIBILITY_TIMEOUT))
        if late:
            self._channel.qos.restore_visible(num=None, interval=1)
        return late

    def _send(self, order: Order) -> None:
        self._app.send_task(TASK, (order.id, order.amount))
