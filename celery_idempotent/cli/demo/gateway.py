"""A small payment gateway: ``python -m celery_idempotent.cli.demo.gateway LEDGER ORDERS``.

It honours idempotency keys as real ones do: the same key gets the same answer, and the card is charged once. Each
charge is a line of the ledger. What the demo wants to know is a line of JSON on standard output, the port first.

Where an order is to meet a kill, the gateway reports the pid of its caller and keeps it waiting until it is gone.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from .scenario import Fault

#: Seconds that a charge of `Fault.SLOW` takes: longer than the visibility timeout.
SLOW = 8.0
#: Seconds after which the gateway no longer waits for a kill, so that nothing hangs if none comes.
PATIENCE = 20.0


class Gateway(ThreadingHTTPServer):
    """The gateway.

    Arguments:
        ledger: Path of the file that gets a line per charge.
        orders: Per order its latency in seconds and its fault.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, ledger: str, orders: dict[str, tuple[float, str]]) -> None:
        super().__init__(("127.0.0.1", 0), Conversation)
        self._ledger = os.open(ledger, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._orders = orders
        self._lock = threading.Lock()
        self._answers: dict[str, str] = {}
        self._met: set[tuple[str, Fault]] = set()

    def report(self, event: str, **facts: Any) -> None:
        """Write one line for the demo."""
        # The monotonic clock is the machine's, so that the demo can compare. One write: lines of threads must not mix.
        os.write(1, (json.dumps({"event": event, "at": time.monotonic(), **facts}) + "\n").encode())

    def meets(self, order: str, fault: Fault) -> bool:
        """Return whether this is the first time that the fault can strike the order it is meant for."""
        with self._lock:
            if self._orders[order][1] != fault or (order, fault) in self._met:
                return False
            self._met.add((order, fault))
            return True

    def latency(self, order: str) -> float:
        """Return the seconds that an ordinary charge of the order takes."""
        return self._orders[order][0]

    def charge(self, order: str, amount: int, key: str | None) -> str:
        """Charge a card, once per key, and return the receipt."""
        with self._lock:
            if key is not None and key in self._answers:
                self.report("known_key", order=order)
                return self._answers[key]
            receipt = os.urandom(6).hex()
            os.write(self._ledger, f"{order} {amount} {receipt}\n".encode())
            if key is not None:
                self._answers[key] = receipt
        self.report("charged", order=order)
        return receipt

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing: callers are killed here on purpose."""


class Conversation(BaseHTTPRequestHandler):
    """One call of the gateway."""

    server: Gateway

    def do_POST(self) -> None:
        """Answer ``/charges`` and ``/notes``."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/charges":
            self._charge(body["order"], body["amount"], body["pid"], self.headers.get("Idempotency-Key"))
        else:
            self._note(body)

    def _charge(self, order: str, amount: int, pid: int, key: str | None) -> None:
        gateway = self.server
        gateway.report("called", order=order, pid=pid)
        if gateway.meets(order, Fault.FLAKY):
            return self._answer(503, {"error": "busy, try again"})
        if gateway.meets(order, Fault.KILL_BEFORE) and self._lose_caller(order, pid, Fault.KILL_BEFORE):
            return None
        time.sleep(SLOW if gateway.meets(order, Fault.SLOW) else gateway.latency(order))
        receipt = gateway.charge(order, amount, key)
        if gateway.meets(order, Fault.KILL_AFTER) and self._lose_caller(order, pid, Fault.KILL_AFTER):
            return None
        gateway.report("receipt", order=order)
        return self._answer(200, {"receipt": receipt})

    def _note(self, body: dict[str, Any]) -> None:
        """Take a note that a process of the shop gives the demo; a real gateway has nothing like it."""
        self.server.report(**body)
        if body.get("state") == "SUCCESS" and self.server.meets(body["order"], Fault.KILL_UNACKED):
            self._lose_caller(body["order"], body["pid"], Fault.KILL_UNACKED)
        self._answer(200, {})

    def _lose_caller(self, order: str, pid: int, fault: Fault) -> bool:
        """Report the caller to be killed, and wait for its end; return whether it came."""
        self.server.report("held", order=order, pid=pid, fault=fault)
        self.connection.settimeout(PATIENCE)
        try:
            return not self.connection.recv(1)  # nothing more is to come from it but its end
        except TimeoutError:
            return False
        except OSError:
            return True

    def _answer(self, status: int, body: dict[str, Any]) -> None:
        payload = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def log_message(self, *args: Any) -> None:
        """Log nothing: standard output is for the demo."""


def main() -> None:
    """Serve until killed."""
    ledger, orders = sys.argv[1:]
    with open(orders, encoding="utf-8") as file:
        gateway = Gateway(ledger, json.load(file))
    gateway.report("listening", port=gateway.server_address[1])
    gateway.serve_forever()


if __name__ == "__main__":
    main()
