"""Clients that keep their connections to a server, and look at the clock; one thread has them all."""

from __future__ import annotations

import selectors
import socket
from collections import deque
from itertools import count
from time import perf_counter
from types import TracebackType

__all__ = ["Clients"]

BODY = b'{"item": "chair", "count": 2, "price": "49.90"}'
_numbers = count()


def request(key: str | None = None) -> bytes:
    """Return an order; of a new operation, where no key is given."""
    key = key or f"order-{next(_numbers)}"
    head = (
        "POST /orders HTTP/1.1\r\nHost: shop.test\r\nContent-Type: application/json\r\nX-Api-Key: anna\r\n"
        f"Idempotency-Key: {key}\r\nContent-Length: {len(BODY)}\r\n\r\n"
    )
    return head.encode() + BODY


class _Connection:
    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), 30)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.since, self.received = 0.0, b""

    def send(self, content: bytes, since: float) -> None:
        self.since, self.received = since, b""
        self.socket.sendall(content)

    def take(self) -> int:
        """Take what came; return the status once the response is whole, 0 before."""
        part = self.socket.recv(65536)
        if not part:
            raise ConnectionError(f"The server closed a connection after {self.received!r}.")
        self.received += part
        head, end, body = self.received.partition(b"\r\n\r\n")
        if not end:
            return 0
        length = head.lower().partition(b"content-length:")[2].split(b"\r\n", 1)[0]
        return int(head.split(b" ", 2)[1]) if len(body) >= int(length) else 0


class Clients:
    """So many connections to a port of this machine.

    Arguments:
        port: Of the server.
        number: Of connections.
    """

    def __init__(self, port: int, number: int) -> None:
        self._selector = selectors.DefaultSelector()
        self._connections = [_Connection(port) for _ in range(number)]
        for connection in self._connections:
            self._selector.register(connection.socket, selectors.EVENT_READ, connection)

    def __enter__(self) -> Clients:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._selector.close()
        for connection in self._connections:
            connection.socket.close()

    def run(self, requests: int, *, key: str | None = None, rate: float | None = None) -> list[float]:
        """Send requests, and return what each took, in seconds.

        Arguments:
            requests: How many.
            key: Of all of them (default: each has its own).
            rate: Requests per second: each is timed from the moment at which it is due, whether or not a connection is
                free then. Without one, a connection sends its next request once it has its response.

        Raises:
            RuntimeError: a response is no 201.
        """
        idle, left, took = deque(self._connections), requests, []
        begin = perf_counter()
        while len(took) < requests:
            due = begin + (requests - left) / rate if rate else 0.0
            while left and idle and due <= (now := perf_counter()):
                idle.popleft().send(request(key), due or now)
                left -= 1
                due = begin + (requests - left) / rate if rate else 0.0
            pause = max(0.0, due - perf_counter()) if left and idle else 30.0
            for selected, _ in self._selector.select(pause):
                connection: _Connection = selected.data
                if status := connection.take():
                    took.append(perf_counter() - connection.since)
                    idle.append(connection)
                    if status != 201:
                        raise RuntimeError(f"Expected 201, got {connection.received!r}")
        return took
