from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.http.server import WebServer

#: Frameworks on the servers that most have; and other servers, which differ in what they do with a socket alone.
KINDS = ["starlette", "flask", "django", "django-asgi"]
OTHERS = [pytest.param(kind, marks=pytest.mark.soak) for kind in ("hypercorn", "daphne")]


@pytest.fixture(scope="module", params=[*KINDS, *OTHERS])
def web(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, redis_databases: Any
) -> Iterator[WebServer]:
    """The application on a server, with a store on Redis."""
    db = redis_databases.take()
    server = WebServer(request.param, tmp_path_factory.mktemp("web"), redis_databases.server.url(db))
    yield server
    server.stop()
    redis_databases.give_back(db)
