from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.http.server import WebServer

#: Frameworks on the servers that most have; and other servers, which differ in what they do with a socket alone.
KINDS = ["starlette", "flask", "django", "django-asgi"]
OTHERS = [pytest.param(kind, marks=pytest.mark.nightly) for kind in ("hypercorn", "daphne")]


@pytest.fixture(scope="session")
def serve(tmp_path_factory: pytest.TempPathFactory, redis_databases: Any) -> Iterator[Callable[[str], WebServer]]:
    """A function that returns the server of an application, with a store on Redis; each is started once."""
    servers: dict[str, WebServer] = {}
    databases = []

    def start(kind: str) -> WebServer:
        if kind not in servers:
            databases.append(redis_databases.take())
            url = redis_databases.server.url(databases[-1])
            servers[kind] = WebServer(kind, tmp_path_factory.mktemp(kind), url)
        return servers[kind]

    yield start
    for server in servers.values():
        server.stop()
    for db in databases:
        redis_databases.give_back(db)


@pytest.fixture(params=[*KINDS, *OTHERS])
def web(request: pytest.FixtureRequest, serve: Callable[[str], WebServer]) -> WebServer:
    """The application on a server."""
    return serve(request.param)
