"""Code that Python runs at the start of every process of a suite, also of the workers that its tests start.

It is on PYTHONPATH for those processes alone (`tests/suites/__main__.py`). It guards tasks or jobs where the run asks
for that, counts what runs, and directs connections to Redis's usual port to the server of this run.
"""

from __future__ import annotations

import importlib
import os
import socket
from typing import Any

USUAL_PORT = 6379


def redirect_redis(port: int) -> None:
    """Connect to `port` wherever code asks for Redis's usual port on this machine."""
    connect, connect_ex = socket.socket.connect, socket.socket.connect_ex

    def actual(address: Any) -> Any:
        if isinstance(address, tuple) and address[1] == USUAL_PORT and address[0] in ("127.0.0.1", "::1", "localhost"):
            return ("127.0.0.1" if len(address) == 2 else "::1", port, *address[2:])
        return address

    socket.socket.connect = lambda self, address: connect(self, actual(address))  # type: ignore[method-assign]
    socket.socket.connect_ex = lambda self, address: connect_ex(self, actual(address))  # type: ignore[method-assign]


if os.environ.get("SUITE_REDIS_PORT"):
    redirect_redis(int(os.environ["SUITE_REDIS_PORT"]))
if os.environ.get("SUITE_PATCH"):
    importlib.import_module(os.environ["SUITE_PATCH"])
