"""``GET /metrics`` of a worker: its main process answers for all its children."""

from __future__ import annotations

import os
from typing import Any

from ..hooks import logger
from .prometheus import DIRECTORY, registry

__all__ = ["Endpoint"]


class Endpoint:
    """A worker's ``/metrics``.

    Arguments:
        port: Where it listens.
        address: On which interface.
    """

    def __init__(self, port: int, address: str) -> None:
        self.port = port
        self.address = address
        self._server: Any = None

    def connect(self) -> None:
        """Open when a worker of this process is ready, and close when it ends."""
        from celery import signals

        names = {"worker_ready": self.open, "worker_shutdown": self.close, "worker_process_init": self.leave}
        for name, receiver in names.items():
            uid = f"celery_idempotent.metrics.{name}"
            getattr(signals, name).connect(receiver, weak=False, dispatch_uid=uid)

    def open(self, sender: Any = None, **_: Any) -> None:
        """Listen; a worker whose port is taken works all the same, and says so."""
        from prometheus_client import start_http_server

        forks = type(getattr(sender, "pool", None)).__module__ == "celery.concurrency.prefork"
        if forks and not os.environ.get(DIRECTORY):
            logger.error(
                "/metrics will not show what happens in this worker's children. "
                "Set %s to an empty folder of this worker's own before it starts.",
                DIRECTORY,
            )
        try:
            self._server = start_http_server(self.port, addr=self.address, registry=registry())[0]
        except OSError as error:
            logger.error("/metrics cannot be served at %s:%s: %s", self.address, self.port, error)
        else:
            logger.info("/metrics is served at %s:%s", self.address, self.port)

    def close(self, **_: Any) -> None:
        """Listen no more."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def leave(self, **_: Any) -> None:
        """Close the listening socket that a child inherits: an orphan must not keep the port."""
        if self._server is not None:
            self._server.socket.close()
            self._server = None
