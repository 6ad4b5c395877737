"""A worker in this process: real messages from a real broker, the library's request, Celery's tracer, no child.

What a worker does by chance of time (hand a message out twice, deliver a copy early) happens here when a test says so.
"""

from __future__ import annotations

from typing import Any

from celery import Celery

from celery_idempotent.celery import IdempotentRequest

QUEUE = "celery"


class Consumer:
    """Takes messages from the queue of an app, and runs them here.

    Arguments:
        app: Whose broker is read. Its tasks are run.
    """

    def __init__(self, app: Celery) -> None:
        self.app = app
        self.connection = app.connection_for_read()
        self.channel = self.connection.default_channel

    def receive(self) -> Any:
        """Take the next message; it is held, unacked, until a delivery of it has ended."""
        message = self.channel.basic_get(QUEUE)
        assert message is not None, "the queue is empty"
        return message

    def waiting(self) -> int:
        """Return how many messages wait in the queue."""
        return int(self.channel._size(QUEUE))

    def deliver(self, message: Any, *, redelivered: bool = False) -> None:
        """Run one delivery of a message to its end, and ack it; an ETA is not waited for.

        To deliver the same message again is what a broker does that believes its consumer dead.
        """
        message.delivery_info["redelivered"] = redelivered

        def done(*_: Any) -> None:
            if not message.acknowledged:
                message.ack()

        IdempotentRequest(message, app=self.app, on_ack=done, on_reject=done).execute()

    def work(self, limit: int = 100) -> None:
        """Deliver what waits, and what that publishes, until nothing waits."""
        for _ in range(limit):
            if not self.waiting():
                return
            self.deliver(self.receive())
        raise AssertionError(f"the queue was not empty after {limit} deliveries")

    def close(self) -> None:
        self.connection.close()
