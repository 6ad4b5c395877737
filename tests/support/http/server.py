"""A web server in processes of its own, and a client that sends bytes as they are."""

from __future__ import annotations

import http.client
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlencode
from uuid import uuid4

from celery_idempotent.testing._http_client import Connection, Reply, request_bytes
from tests.support import preloaded
from tests.support.processes import Process, end, spawn
from tests.support.servers import free_port
from tests.support.waiting import wait_until

UVICORN = ["-m", "uvicorn", "--host", "127.0.0.1", "--no-access-log"]
GUNICORN = ["-m", "gunicorn", "--workers", "4", "--threads", "4", "--log-level", "warning"]
SYNC = ["--workers", "2", "--threads", "1"]
COMMANDS = {
    "starlette": [*UVICORN, "tests.support.http.asgi_app:app", "--port"],
    "fastapi": [*UVICORN, "tests.support.http.fastapi_app:app", "--port"],
    "flask": [*GUNICORN, "tests.support.http.wsgi_app:app", "--bind"],
    "django": [*GUNICORN, *SYNC, "tests.support.http.django_app:application", "--bind"],
    "django-asgi": [*UVICORN, "tests.support.http.django_app:asgi", "--port"],
    "drf": [*GUNICORN, *SYNC, "--preload", "tests.support.http.django_app:application", "--bind"],
    "inside-fastapi": [*UVICORN, "tests.support.http.inside_fastapi:app", "--port"],
    "inside-flask": [*GUNICORN, "--preload", "tests.support.http.inside_flask:app", "--bind"],
    "inside-drf": [*GUNICORN, "--preload", "tests.support.http.inside_django:application", "--bind"],
    "inside-drf-asgi": [*UVICORN, "tests.support.http.inside_django:asgi", "--port"],
    "inside": [*UVICORN, "tests.support.http.asgi_app:inside", "--port"],
    "quart": [*UVICORN, "tests.support.http.quart_app:app", "--port"],
    "litestar": [*UVICORN, "tests.support.http.litestar_app:app", "--port"],
    "gevent": [*GUNICORN, "-k", "gevent", "tests.support.http.wsgi_app:app", "--bind"],
    "eventlet": ["-m", "tests.support.http.eventlet_server", "--port"],
    "hypercorn": ["-m", "hypercorn", "tests.support.http.asgi_app:app", "--bind"],
    "daphne": ["-m", "daphne", "-b", "127.0.0.1", "tests.support.http.asgi_app:app", "-p"],
}
#: Those whose libraries are to be patched before anything else is imported, and those that few tests start.
NEW_INTERPRETER = {"gevent", "eventlet", "hypercorn", "daphne"}


class WebServer:
    """A server of the tests' application."""

    def __init__(self, kind: str, directory: Path, store_url: str, env: Mapping[str, str] | None = None) -> None:
        self.env = env or {}
        self.kind, self.port, self.runs = kind, free_port(), directory / "runs"
        self.runs.touch()
        self.log, self.store_url = directory / "server.log", store_url
        self._start()

    def _start(self) -> None:
        kind = self.kind
        where = str(self.port) if COMMANDS[kind][-1] in ("--port", "-p") else f"127.0.0.1:{self.port}"
        env = {**os.environ, **self.env, "RUNS": str(self.runs), "STORE_URL": self.store_url}
        with self.log.open("ab") as output:
            command = [*COMMANDS[kind], where]
            if kind in NEW_INTERPRETER:
                self.process: Process = spawn([sys.executable, *command], env=env, stdout=output, stderr=output)
            else:
                self.process = preloaded.http.start(command[1:], env, output)
        wait_until(self._answers, 60, lambda: f"the server to listen:\n{self.log.read_text()}")

    def _answers(self) -> bool:
        """Return whether a worker serves; gunicorn listens before it has any."""
        try:
            return self.call(method="GET").status > 0
        except (OSError, http.client.HTTPException):
            return False

    def revive(self) -> None:
        """Start it again if it has ended; gunicorn starts its workers itself."""
        if COMMANDS[self.kind][1] != "gunicorn":
            self.process.wait(10)
            end(self.process)
            self._start()

    def stop(self) -> None:
        end(self.process, grace=5)

    def call(
        self,
        key: str | None = None,
        body: bytes = b"body",
        *,
        method: str = "POST",
        path: str = "/orders",
        caller: str = "anna",
        headers: Mapping[str, str] | None = None,
        **query: object,
    ) -> Reply:
        """Send a request, and return the reply."""
        given = {"X-Api-Key": caller, **({"Idempotency-Key": key} if key is not None else {}), **(headers or {})}
        target = f"{path}?{urlencode(query)}" if query else path
        with self.connect() as connection:
            connection.send(request_bytes(method, target, [(name, v) for name, v in given.items() if v], body))
            return connection.read(method)

    def connect(self) -> Connection:
        """Return a connection of its own."""
        return Connection(f"http://127.0.0.1:{self.port}")

    def count(self, tag: str, how: str = "") -> int:
        """Return how often the application has run for a tag, under a ``lease`` or ``bare``."""
        return sum(line.startswith(f"{tag} {how}") for line in self.runs.read_text().splitlines())


def fresh() -> str:
    """Return a key or a tag that no other request has."""
    return uuid4().hex
