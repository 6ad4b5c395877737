"""The middleware among others: compression, CORS and such as read the response, outside of it and inside."""

from __future__ import annotations

import asyncio
import gzip
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from celery_idempotent.http import IdempotencyMiddleware
from celery_idempotent.http.response import Response as Reply
from celery_idempotent.stores.memory import MemoryStore
from tests.support.http.inproc import request_asgi

BROWSER = [(b"accept-encoding", b"gzip"), (b"origin", b"https://shop.test")]


class Stamp(BaseHTTPMiddleware):
    """Add a header, and see the request's body, as such middlewares do."""

    async def dispatch(self, request: Request, call_next: RequestResponseEndpoint) -> Response:
        assert await request.body() in (b"body", b"other")
        response = await call_next(request)
        response.headers["X-Stamp"] = "1"
        return response


MIDDLEWARES = {
    "gzip": Middleware(GZipMiddleware),
    "CORS": Middleware(CORSMiddleware, allow_origins=["https://shop.test"], allow_methods=["POST"]),
    "BaseHTTPMiddleware": Middleware(Stamp),
}
ALL = list(MIDDLEWARES.values())

Place = Callable[[list[Middleware], list[Middleware]], tuple[Starlette, list[bytes]]]


@pytest.fixture
def place() -> Place:
    """A function that makes an application with middlewares outside and inside of the one under test."""

    def make(outside: list[Middleware], inside: list[Middleware]) -> tuple[Starlette, list[bytes]]:
        runs: list[bytes] = []

        async def serve(request: Request) -> Response:
            runs.append(await request.body())
            return PlainTextResponse(f"run {len(runs)} ".ljust(1000, "."), 201)

        tested = Middleware(IdempotencyMiddleware, store=MemoryStore(), scope=None)
        app = Starlette(
            routes=[Route("/orders", serve, methods=["POST"])], middleware=[*outside, tested, *inside]
        )  # fmt: skip
        return app, runs

    return make


def send(app: Starlette, *requests: dict[str, Any]) -> list[Reply]:
    """Send requests one after another."""

    async def all_of_them() -> list[Reply]:
        return [await request_asgi(app, **{"headers": list(BROWSER), **each}) for each in requests]

    return asyncio.run(all_of_them())


def text(reply: Reply) -> bytes:
    """Return the body of a reply as it was before it was compressed."""
    return gzip.decompress(reply.body) if reply.header("content-encoding") == "gzip" else reply.body


@pytest.mark.parametrize("outside", [[], *([each] for each in ALL), ALL], ids=["-", *MIDDLEWARES, "all"])
@pytest.mark.parametrize("inside", [[], *([each] for each in ALL), ALL], ids=["-", *MIDDLEWARES, "all"])
def test_a_request_runs_once_and_is_replayed_whole_on_either_side(
    place: Place, outside: list[Middleware], inside: list[Middleware]
) -> None:
    app, runs = place(outside, inside)
    first, second, other = send(app, {}, {}, {"body": b"other"})
    assert runs == [b"body"]
    assert (first.status, second.status, other.status) == (201, 201, 422)
    assert (first.header("idempotent-replayed"), second.header("idempotent-replayed")) == (None, "true")
    assert text(first) == text(second) == b"run 1 ".ljust(1000, b".")
    for name in ("content-encoding", "access-control-allow-origin", "x-stamp", "content-type"):
        assert first.header(name) == second.header(name)


def test_outside_compression_each_client_gets_what_it_accepts(place: Place) -> None:
    plain: dict[str, Any] = {"headers": []}
    for outside, inside, encodings in [
        (ALL[:1], [], ["gzip", None, "gzip"]),
        ([], ALL[:1], ["gzip", "gzip", "gzip"]),  # the first client's: why the place is inside of compression
    ]:
        app, _ = place(outside, inside)
        assert [reply.header("content-encoding") for reply in send(app, {}, plain, {})] == encodings


def test_only_outside_of_it_cors_lets_a_browser_read_refusals(place: Place) -> None:
    for outside, inside, origin in [(ALL[1:2], [], "https://shop.test"), ([], ALL[1:2], None)]:
        app, _ = place(outside, inside)
        _, refused = send(app, {}, {"body": b"other"})
        assert (refused.status, refused.header("access-control-allow-origin")) == (422, origin)


def test_a_preflight_passes_on_either_side(place: Place) -> None:
    preflight = {"method": "OPTIONS", "headers": [*BROWSER, (b"access-control-request-method", b"POST")]}
    for outside, inside in [(ALL[1:2], []), ([], ALL[1:2])]:
        app, runs = place(outside, inside)
        assert [reply.status for reply in send(app, {}, preflight, preflight)] == [201, 200, 200]
        assert runs == [b"body"]


def test_a_client_that_goes_is_answered_later_with_such_a_middleware_on_both_sides(place: Place) -> None:
    """It would cancel what it has begun, were the work not in a task of its own."""
    app, runs = place([MIDDLEWARES["BaseHTTPMiddleware"]], [MIDDLEWARES["BaseHTTPMiddleware"]])

    async def leave() -> None:
        task = asyncio.ensure_future(request_asgi(app))
        while not runs:
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])

    async def leave_and_come_again() -> Reply:
        await leave()
        reply = await request_asgi(app)
        while reply.status == 409:
            await asyncio.sleep(0.01)
            reply = await request_asgi(app)
        return reply

    reply = asyncio.run(leave_and_come_again())
    assert (reply.status, reply.header("idempotent-replayed")) == (201, "true")
    assert runs == [b"body"]


def test_djangos_compression_may_be_on_either_side() -> None:
    code = """
import gzip
from django.conf import settings
settings.configure(ALLOWED_HOSTS=["*"], IDEMPOTENCY_HTTP={"scope": None, "store": "memory://"})
import django
django.setup()
from django.http import HttpResponse, StreamingHttpResponse
from django.middleware.gzip import GZipMiddleware
from django.test import RequestFactory
from celery_idempotent.http.django import IdempotencyMiddleware

def view(request):
    runs.append(1)
    content = (b"run %d " % len(runs)).ljust(1000, b".")
    parts = StreamingHttpResponse([content, b"end"]) if "stream" in request.GET else None
    return parts or HttpResponse(content + b"end")

def text(response):
    body = b"".join(response) if response.streaming else response.content
    return gzip.decompress(body) if response.headers.get("Content-Encoding") == "gzip" else body

outer, inner = GZipMiddleware(IdempotencyMiddleware(view)), IdempotencyMiddleware(GZipMiddleware(view))
for number, app in enumerate([outer, inner]):
    for target in ("/", "/?stream=1"):
        runs = []
        request = lambda **more: RequestFactory().post(
            target, b"x", content_type="text/plain", HTTP_IDEMPOTENCY_KEY=f"{number}{target}", **more)
        first, second = (app(request(HTTP_ACCEPT_ENCODING="gzip")) for _ in range(2))
        plain = app(request())
        assert text(first) == text(second) == text(plain) == b"run 1 ".ljust(1000, b".") + b"end"
        assert (second.headers["Idempotent-Replayed"], len(runs)) == ("true", 1)
        encodings = [each.headers.get("Content-Encoding") for each in (first, second, plain)]
        assert encodings == ["gzip", "gzip", None if app is outer else "gzip"], (target, encodings)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
