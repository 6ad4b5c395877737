"""What a client sees of a request with an Idempotency-Key: the contract that is shipped, on real servers."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from celery_idempotent.testing import HttpContract
from tests.http.conftest import KINDS, OTHERS
from tests.support.http.server import WebServer

#: Frameworks and servers that few have, or that differ in nothing but how they call an application.
MORE = [pytest.param(kind, marks=pytest.mark.nightly) for kind in ("quart", "litestar", "gevent", "eventlet")]


class TestConformance(HttpContract):
    """The keys are those of `tests.support.http.views.caller`."""

    anna: Mapping[str, str] = {"X-Api-Key": "anna"}
    bert: Mapping[str, str] = {"X-Api-Key": "bert"}
    request_max_bytes, response_max_bytes = 10_000, 1000

    @pytest.fixture(params=[*KINDS, "fastapi", "drf", "inside", *OTHERS, *MORE])
    def url(self, request: pytest.FixtureRequest, serve: Callable[[str], WebServer]) -> str:
        kind = request.param
        self.clients = 100 if kind in ("flask", "fastapi") else 20
        # Django on WSGI reads no body without a length, and Flask none where the server does not say that it ends.
        self.reads_chunked = kind not in ("django", "drf", "eventlet")
        if kind == "drf":
            self.path = "/rest/orders"
        if kind not in ("flask", "gevent", "eventlet"):  # whose scope is the name of a header
            self.anna_refreshed, self.revoked = {"X-Api-Key": "anna-2"}, {"X-Api-Key": "revoked"}
        return f"http://127.0.0.1:{serve(kind).port}"
