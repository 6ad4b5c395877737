"""Clients that leave, and responses that are dropped: no lease is held for what has ended."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Route

from celery_idempotent.http import IdempotencyMiddleware, wsgi
from celery_idempotent.stores.memory import MemoryStore
from tests.support.http.inproc import request_asgi, request_wsgi
from tests.support.http.server import Reply, WebServer, fresh
from tests.support.waiting import wait_until

EVENTS = [(b"content-type", b"text/event-stream")]


@pytest.mark.parametrize("kind", ["text/plain", "text/event-stream"])
def test_a_client_that_goes_before_its_stream_begins_leaves_no_lease(web: WebServer, kind: str) -> None:
    key = fresh()
    query = f"tag={key}&seconds=0.5&parts=40&bytes=900&type={kind}"
    head = f"POST /async/orders?{query} HTTP/1.1\r\nHost: x\r\nX-Api-Key: anna\r\nIdempotency-Key: {key}\r\n"
    with socket.create_connection(("127.0.0.1", web.port), 30) as connection:
        connection.sendall(f"{head}Content-Length: 4\r\n\r\nbody".encode())
        wait_until(lambda: web.count(key) == 1)
    replies: list[Reply] = []

    def is_known() -> bool:
        replies.append(web.call(key, path=f"/async/orders?{query}"))
        return replies[-1].kind != "in-progress"

    wait_until(is_known)
    assert replies[-1].kind == "not-kept" or replies[-1].replayed
    assert web.count(key) == 1


# -- ASGI --------------------------------------------------------------------------------------------------------------


class Client:
    """A client that sends a request, and goes once it has got so many messages."""

    def __init__(self, after: int, *, broken: bool = False) -> None:
        self.after, self.broken = after, broken
        self.sent: list[Any] = []
        self.given = [{"type": "http.request", "body": b"body", "more_body": False}]
        self.gone = asyncio.Event()

    async def receive(self) -> Any:
        if self.given:
            return self.given.pop()
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.sent.append(message)
        if len(self.sent) >= self.after:
            self.gone.set()
            if self.broken:
                raise ConnectionResetError

    async def call(self, app: Any, version: str = "2.3") -> None:
        scope = {
            "type": "http",
            "asgi": {"spec_version": version},
            "method": "POST",
            "path": "/orders",
            "headers": [(b"idempotency-key", b"k")],
            "query_string": b"",
        }
        await app(scope, self.receive, self.send)


async def events(request: Request) -> StreamingResponse:
    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield b"data: 1\n\n"
            await asyncio.sleep(0.01)

    return StreamingResponse(endless(), media_type="text/event-stream")


async def endless_events(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": EVENTS})
    while True:
        await send({"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True})
        await asyncio.sleep(0.01)


async def silent_events(request: Request) -> StreamingResponse:
    async def never() -> AsyncIterator[bytes]:
        await asyncio.Event().wait()
        yield b"data: 1"

    return StreamingResponse(never(), media_type="text/event-stream")


async def until_disconnect(app: Any) -> None:
    await Client(3).call(app)


async def until_it_begins(app: Any) -> None:
    await Client(1).call(app)


async def until_an_error(app: Any) -> None:
    with pytest.raises(ConnectionResetError):
        await Client(3, broken=True).call(app, "2.4")


async def until_cancelled(app: Any) -> None:
    client = Client(3)
    serving = asyncio.ensure_future(client.call(app))
    await client.gone.wait()
    serving.cancel()
    await asyncio.wait([serving])


@pytest.mark.parametrize(
    ("app", "leave"),
    [
        (Starlette(routes=[Route("/orders", events, methods=["POST"])]), until_disconnect),
        (Starlette(routes=[Route("/orders", silent_events, methods=["POST"])]), until_it_begins),
        (
            IdempotencyMiddleware(
                Starlette(routes=[Route("/orders", events, methods=["POST"])]), store=MemoryStore(), scope=None
            ),
            until_disconnect,
        ),
        (endless_events, until_an_error),
        (endless_events, until_cancelled),
    ],
    ids=["disconnect", "before the first event", "guarded twice", "error", "cancelled"],
)
def test_an_endless_stream_of_events_ends_with_its_client(app: Any, leave: Callable[[Any], Awaitable[None]]) -> None:
    middleware = IdempotencyMiddleware(app, store=MemoryStore(), scope=None)

    async def main() -> bytes:
        await asyncio.wait_for(leave(middleware), 10)
        while b"in-progress" in (body := (await request_asgi(middleware)).body):
            await asyncio.sleep(0.01)
        return body

    assert b"not-kept" in asyncio.run(asyncio.wait_for(main(), 10))


def test_a_client_that_goes_cuts_no_work_whose_body_was_not_read_before() -> None:
    runs = []
    client: list[Client] = []

    async def place(request: Request) -> StreamingResponse:
        await request.body()
        runs.append("begun")
        client[0].gone.set()

        async def parts() -> AsyncIterator[bytes]:
            for _ in range(3):
                await asyncio.sleep(0.01)
                yield b"part"
            runs.append("ended")

        return StreamingResponse(parts())

    app = Starlette(routes=[Route("/orders", place, methods=["POST"])])
    middleware = IdempotencyMiddleware(app, store=MemoryStore(), scope=None, fingerprint="headers")

    async def main() -> bytes:
        client.append(Client(9))
        await client[0].call(middleware)
        return (await request_asgi(middleware)).body

    assert asyncio.run(main()) == b"part" * 3
    assert runs == ["begun", "ended"]


def test_middlewares_find_what_an_application_notes_in_the_scope() -> None:
    async def place(request: Request) -> PlainTextResponse:
        return PlainTextResponse("done")

    app = Starlette(routes=[Route("/orders", place, methods=["POST"])])
    guarded = IdempotencyMiddleware(app, store=MemoryStore(), scope=None)
    seen = []

    async def outer(scope: Any, receive: Any, send: Any) -> None:
        await guarded(scope, receive, send)
        seen.append(scope["route"].path)

    asyncio.run(request_asgi(outer))
    assert seen == ["/orders"]


# -- WSGI --------------------------------------------------------------------------------------------------------------

ENVIRON = {"REQUEST_METHOD": "POST", "PATH_INFO": "/orders", "HTTP_IDEMPOTENCY_KEY": "k"}


def large(environ: Any, start: Any) -> Iterator[bytes]:
    write = start("201 Created", [])
    yield b"x" * 2000
    write(b"written ")
    yield b"yielded "
    write(b"last")


def test_a_response_that_is_dropped_has_ended() -> None:
    middleware = wsgi.IdempotencyMiddleware(large, store=MemoryStore(), scope=None, response_max_bytes=1000)

    def outer(environ: Any, start: Any) -> Iterator[bytes]:
        for part in middleware(environ, start):  # noqa: UP028 - as many write it, without close
            yield part

    parts: Any = outer(dict(ENVIRON), lambda *_: None)
    assert next(parts) == b"x" * 2000
    parts.close()
    wait_until(lambda: b"not-kept" in request_wsgi(middleware, body=b"").body)


def test_what_is_written_in_mid_stream_is_sent() -> None:
    middleware = wsgi.IdempotencyMiddleware(large, store=MemoryStore(), scope=None, response_max_bytes=1000)
    assert request_wsgi(middleware).body == b"x" * 2000 + b"written yielded last"


def test_a_response_that_its_server_refuses_is_closed() -> None:
    closed = []

    class Parts(list[bytes]):
        def close(self) -> None:
            closed.append(1)

    def app(environ: Any, start: Any) -> Parts:
        start("201 Created", [])
        return Parts([b"done"])

    def refuse(*_: Any) -> None:
        raise ValueError("a header that the server refuses")

    middleware = wsgi.IdempotencyMiddleware(app, store=MemoryStore(), scope=None)
    with pytest.raises(ValueError, match="refuses"):
        middleware(dict(ENVIRON), refuse)
    assert closed == [1]


# -- Django ------------------------------------------------------------------------------------------------------------

DJANGO = """
import asyncio, gc, threading, time
import anyio
from asgiref.sync import sync_to_async
from django.conf import settings
settings.configure(
    ALLOWED_HOSTS=["*"],
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}},
)
import django
django.setup()
from django.db import connection
from django.http import HttpResponse, StreamingHttpResponse
from django.test import AsyncRequestFactory, RequestFactory
from celery_idempotent import current_lease
from celery_idempotent.http.django import IdempotencyMiddleware

def guard(view, **options):
    settings.IDEMPOTENCY_HTTP = {"scope": None, "store": "memory://", **options}
    return IdempotencyMiddleware(view)

class Outer:
    sync_capable, async_capable = True, False

    def __init__(self, get_response):
        self.get_response = get_response

    def __call__(self, request):
        return self.get_response(request)

def post(**more):
    return RequestFactory().post("/", b"x", content_type="text/plain", HTTP_IDEMPOTENCY_KEY="k", **more)

def post_async(key="k"):
    return AsyncRequestFactory().post("/", b"x", content_type="text/plain", headers={"Idempotency-Key": key})

def is_kept(call):
    until = time.monotonic() + 10
    while b"in-progress" in (body := call().content) and time.monotonic() < until:
        time.sleep(0.01)
    return b"not-kept" not in body
"""


@pytest.mark.parametrize(
    "code",
    [
        """
def database(request):
    with connection.cursor() as cursor:
        return cursor.execute("SELECT 7").fetchone()[0]

async def view(request):
    return HttpResponse("done")

assert asyncio.run(guard(view, scope=database)(post_async())).content == b"done"
""",
        """
async def view(request):
    return HttpResponse("done")

def raw():
    request = post_async()
    request.META["QUERY_STRING"], request.scope["query_string"] = "\\u65e5", "\\u65e5".encode()
    return request

assert asyncio.run(guard(view)(raw())).content == b"done"
""",
        """
def view(request):
    response = HttpResponse("done")
    response.set_cookie("a", "1")
    response.set_cookie("b", "2", httponly=True)
    return response

middleware = guard(view, keep_headers=["Set-Cookie"])
first, second = middleware(post()), middleware(post())
assert second.headers["Idempotent-Replayed"] == "true"
assert second.cookies.output() == first.cookies.output()
""",
        """
gc.disable()
middleware = guard(lambda request: StreamingHttpResponse(iter([b"x" * 2000] * 3)), response_max_bytes=1000)
parts = iter(middleware(post()))
next(parts)
del parts
assert not is_kept(lambda: middleware(post()))
""",
        """
async def view(request):
    async def parts():
        for _ in range(3):
            yield b"x" * 2000
    return StreamingHttpResponse(parts())

middleware = guard(view, response_max_bytes=1000)

async def main():
    response = await middleware(post_async())
    assert response.streaming
    del response
    for _ in range(200):
        gc.collect()
        body = (await middleware(post_async())).content
        if b"in-progress" not in body:
            return body
        await asyncio.sleep(0.02)

assert b"not-kept" in asyncio.run(main())
""",
        """
class Killed(BaseException):
    pass

def broken():
    yield b"x"
    raise Killed

streams = [broken(), iter([b"done"])]
middleware = guard(lambda request: StreamingHttpResponse(streams.pop(0)))
try:
    middleware(post())
except Killed:
    pass
assert b"".join(middleware(post())) == b"done"
""",
        """
def ending():
    yield b"x" * 2000
    raise SystemExit(1)

streams = [ending(), iter([b"done"])]
middleware = guard(lambda request: StreamingHttpResponse(streams.pop(0)), response_max_bytes=1000)
response = middleware(post())
try:
    list(response)
except SystemExit:
    response.close()
assert b"".join(middleware(post())) == b"done"
""",
        """
def parts():
    for _ in range(4):
        yield current_lease().key.encode() + b" " * 600

async def parts_async():
    for part in parts():
        yield part

middleware = guard(lambda request: StreamingHttpResponse(parts()), response_max_bytes=1000)
assert [part.strip() for part in middleware(post())] == [b"idem:http::k"] * 4
middleware = guard(lambda request: StreamingHttpResponse(parts_async()), response_max_bytes=1000, name="asyncio")
assert [part.strip() for part in middleware(post())] == [b"idem:asyncio::k"] * 4
assert current_lease() is None
""",
        """
threads = []

def parts():
    for _ in range(4):
        threads.append(threading.get_ident())
        yield current_lease().key.encode() + b" " * 600

def noted(request):
    threads.append(threading.get_ident())
    return StreamingHttpResponse(parts())

async def main():
    response = await guard(sync_to_async(noted), response_max_bytes=1000)(post_async())
    await asyncio.gather(*(asyncio.to_thread(time.sleep, 0.01) for _ in range(5)))  # which are there to be used
    return [part.strip() async for part in response]

assert asyncio.run(main()) == [b"idem:http::k"] * 4
assert len(threads) == 5 and len(set(threads)) == 1, threads
""",
        """
async def view(request):
    async def parts():
        async with anyio.create_task_group() as group:
            group.start_soon(anyio.sleep, 0)
            with anyio.move_on_after(30):
                for _ in range(4):
                    yield current_lease().key + " " * 600
                    await asyncio.sleep(0)
    return StreamingHttpResponse(parts())

middleware = guard(view, response_max_bytes=1000)

async def main():
    response = await middleware(post_async())
    assert [part.strip() async for part in response] == [b"idem:http::k"] * 4
    response.close()
    return (await middleware(post_async())).content

assert b"not-kept" in asyncio.run(main())
""",
        """
log = []

async def view(request):
    async def parts():
        try:
            with anyio.move_on_after(30):
                yield b"x" * 2000
                await asyncio.sleep(3600)
                yield b"never"
        finally:
            log.append("ended")
    return StreamingHttpResponse(parts())

middleware = guard(view, response_max_bytes=1000)

async def main(leave):
    log.clear()
    response = await middleware(post_async(leave.__name__))
    reader = aiter(response)
    assert len(await anext(reader)) == 2000
    reading = asyncio.ensure_future(anext(reader))
    await asyncio.sleep(0.05)
    assert b"in-progress" in (await middleware(post_async(leave.__name__))).content
    await leave(response, reading)
    for _ in range(200):
        body = (await middleware(post_async(leave.__name__))).content
        if b"in-progress" not in body:
            return body, list(log)
        await asyncio.sleep(0.02)

async def cancel(response, reading):
    reading.cancel()

async def close(response, reading):
    await asyncio.to_thread(response.close)
    reading.cancel()

for leave in (cancel, close):
    body, ended = asyncio.run(main(leave))
    assert b"not-kept" in body and ended == ["ended"], (body, ended)
""",
        """
threads = []

def query(*_):
    threads.append(threading.get_ident())
    return next(left, None)

async def asynchronous(request):
    async def parts():
        try:
            while (part := await sync_to_async(query)()) is not None:
                yield part
        finally:
            await sync_to_async(query)()
    return StreamingHttpResponse(parts())

def synchronous(request):
    threads.append(threading.get_ident())
    return StreamingHttpResponse(iter(query, None))

import sys
from django.core.asgi import get_asgi_application
from django.urls import path
from tests.support.http.inproc import request_asgi
sys.modules["gone"] = sys.modules["__main__"]
settings.MIDDLEWARE = ["gone.Outer", "celery_idempotent.http.django.IdempotencyMiddleware"]
settings.IDEMPOTENCY_HTTP = {"scope": None, "store": "memory://", "response_max_bytes": 1000}
settings.ROOT_URLCONF = "gone"
urlpatterns = [path("async", asynchronous), path("sync", synchronous)]
for kind in ("async", "sync"):
    left, threads[:] = iter([b"x" * 600] * 4), []
    response = asyncio.run(request_asgi(get_asgi_application(), key=kind, path=f"/{kind}"))
    assert response.body == b"x" * 2400
    assert len(threads) == 6 and len(set(threads)) == 1, threads
""",
        """
import sys
from django.core.wsgi import get_wsgi_application
from django.urls import path
from django.utils.decorators import async_only_middleware
from tests.support.http.inproc import request_wsgi

@async_only_middleware
def inner(get_response):
    async def serve(request):
        return await get_response(request)
    return serve

def synchronous(request):
    return StreamingHttpResponse(iter([b"x" * 600] * 4))

async def asynchronous(request):
    async def parts():
        for _ in range(4):
            yield b"x" * 600
    return StreamingHttpResponse(parts())

sys.modules["gone"] = sys.modules["__main__"]
settings.MIDDLEWARE = ["celery_idempotent.http.django.IdempotencyMiddleware", "gone.inner"]
settings.IDEMPOTENCY_HTTP = {"scope": None, "store": "memory://", "response_max_bytes": 1000}
settings.ROOT_URLCONF = "gone"
urlpatterns = [path("sync", synchronous), path("async", asynchronous)]
application = get_wsgi_application()
for kind in ("sync", "async"):
    first, second = (request_wsgi(application, kind, PATH_INFO=f"/{kind}") for _ in range(2))
    assert first.body == b"x" * 2400 and b"not-kept" in second.body, (kind, first, second)
""",
        """
threads = []

def note():
    time.sleep(0.05)
    threads.append(threading.get_ident())

async def waiting(request):
    async def parts():
        await sync_to_async(note)()
        try:
            yield b"x" * 2000
            await asyncio.sleep(3600)
        finally:
            for _ in range(5):
                await sync_to_async(note)()
    return StreamingHttpResponse(parts())

import sys
from django.core.asgi import get_asgi_application
from django.urls import path
from tests.http.test_gone import Client
from tests.support.http.inproc import request_asgi
sys.modules["gone"] = sys.modules["__main__"]
settings.MIDDLEWARE = ["celery_idempotent.http.django.IdempotencyMiddleware"]
settings.IDEMPOTENCY_HTTP = {"scope": None, "store": "memory://", "response_max_bytes": 1000}
settings.ROOT_URLCONF = "gone"
urlpatterns = [path("orders", waiting)]

async def main():
    application = get_asgi_application()
    await Client(2).call(application)  # which goes after the first part
    for _ in range(200):
        body = (await request_asgi(application, body=b"body")).body
        if b"in-progress" not in body:
            return body
        await asyncio.sleep(0.02)

body = asyncio.run(asyncio.wait_for(main(), 20))
assert b"not-kept" in body, body
assert len(threads) == 6 and len(set(threads)) == 1, threads
""",
        """
threads = []

def note():
    threads.append(threading.get_ident())

async def waiting(request):
    async def parts():
        try:
            yield b"x" * 2000
        finally:
            await sync_to_async(note)()
    await sync_to_async(note)()
    client.gone.set()
    await asyncio.sleep(0.05)
    return StreamingHttpResponse(parts())

import os
import sys
from django.core.asgi import get_asgi_application
from django.urls import path
from tests.http.test_gone import Client
sys.modules["gone"] = sys.modules["__main__"]
settings.MIDDLEWARE = ["gone.Outer", "celery_idempotent.http.django.IdempotencyMiddleware"]
settings.IDEMPOTENCY_HTTP = {"scope": None, "store": "memory://", "response_max_bytes": 1000}
settings.ROOT_URLCONF = "gone"
urlpatterns = [path("orders", waiting)]
client = Client(1)  # which goes before its response begins

async def main():
    await asyncio.wait({asyncio.ensure_future(client.call(get_asgi_application()))}, timeout=5)
    os._exit((len(threads), len(set(threads))) != (2, 1))  # with a thread that would wait for ever, perhaps

asyncio.run(main())
""",
        """
import sys
from django.core.asgi import get_asgi_application
from django.urls import clear_url_caches, path
from celery_idempotent.http import INSIDE, begin
from tests.http.test_gone import Client
from tests.support.http.inproc import request_asgi

runs, urlpatterns = [], []

def ordered(request, account):
    if account is INSIDE:
        begin(request, "anna")
    runs.append(account)
    loop.call_soon_threadsafe(client.gone.set)

def synchronous(request):
    ordered(request, settings.IDEMPOTENCY_HTTP["scope"])
    time.sleep(0.1)
    return HttpResponse("done", status=201)

async def asynchronous(request):
    await sync_to_async(ordered)(request, settings.IDEMPOTENCY_HTTP["scope"])
    await asyncio.sleep(0.1)
    return HttpResponse("done", status=201)

async def streaming(request):
    async def parts():
        yield b"x" * 2000
    await sync_to_async(ordered)(request, settings.IDEMPOTENCY_HTTP["scope"])
    await asyncio.sleep(0.1)
    return StreamingHttpResponse(parts())

sys.modules["gone"] = sys.modules["__main__"]
settings.MIDDLEWARE = ["celery_idempotent.http.django.IdempotencyMiddleware", "gone.Outer"]
settings.ROOT_URLCONF = "gone"

async def main():
    global client, loop
    client, loop, application = Client(1), asyncio.get_running_loop(), get_asgi_application()
    await asyncio.wait({asyncio.ensure_future(client.call(application))})
    for _ in range(200):
        if b"in-progress" not in (again := await request_asgi(application, body=b"body")).body:
            return again
        await asyncio.sleep(0.02)

for scope in (None, INSIDE):
    for view, status in ((synchronous, 201), (asynchronous, 201), (streaming, 409)):
        options = {"scope": scope, "store": "memory://", "response_max_bytes": 1000}
        settings.IDEMPOTENCY_HTTP = {**options, "name": f"{view.__name__} {scope}"}
        urlpatterns[:], runs[:] = [path("orders", view)], []
        clear_url_caches()
        again = asyncio.run(asyncio.wait_for(main(), 20))
        kept = (again.header("idempotent-replayed") == "true") if status == 201 else b"not-kept" in again.body
        assert (again.status, kept, runs) == (status, True, [scope]), (view, again, runs)
""",
        """
from celery_idempotent.http import django as http

async def view(request):
    async def parts():
        for _ in range(3):
            yield b"x" * 2000
    return StreamingHttpResponse(parts())

middleware = guard(view, response_max_bytes=1000)

async def main():
    reader = aiter(await middleware(post_async()))
    assert len(await anext(reader)) == 2000
    for task in list(http._tasks):  # as a server does that ends
        task.cancel()
    await asyncio.sleep(0.1)
    try:
        await anext(reader)
    except asyncio.CancelledError:
        return [len(part) async for part in await middleware(post_async())]

assert asyncio.run(main()) == [2000] * 3
""",
        """
async def view(request):
    async def parts():
        yield b"x" * 2000
        raise ValueError("of the view")
    return StreamingHttpResponse(parts() if fails.pop() else iter([b"done"]))

fails = [False, True]
middleware = guard(view, response_max_bytes=1000)

async def main():
    try:
        [part async for part in await middleware(post_async())]
    except ValueError as error:
        assert str(error) == "of the view"
    # What broke off in mid-stream reaches its client before its key is given back.
    end = time.monotonic() + 20
    while (response := await middleware(post_async())).status_code == 409 and time.monotonic() < end:
        await asyncio.sleep(0.01)
    return b"".join([part async for part in response])

assert asyncio.run(main()) == b"done"
""",
        """
from celery_idempotent.stores.memory import MemoryStore

options = {"response_max_bytes": 1000, "remember": lambda response: True}

def parts(size):
    runs.append(size)
    yield b"x" * size
    raise ValueError("of the view")

def view(request):
    return StreamingHttpResponse(parts(sizes[0]))

async def view_async(request):
    async def parts_async():
        for part in parts(sizes[0]):
            yield part
    return StreamingHttpResponse(parts_async())

async def statuses():
    response = await middleware_async(post_async())
    try:
        [part async for part in response.streaming_content] if response.streaming else None
    except ValueError:
        pass
    # What broke off in mid-stream reaches its client before it is recorded.
    end = time.monotonic() + 20
    while (status := (await middleware_async(post_async())).status_code) == 409 and time.monotonic() < end:
        await asyncio.sleep(0.01)
    return status

for size in (10, 2000):
    runs, sizes = [], [size]
    middleware = guard(view, store=MemoryStore(), **options)
    try:
        list(middleware(post()))
    except ValueError:
        pass
    assert (middleware(post()).status_code, runs) == (500, [size])
    middleware_async = guard(view_async, store=MemoryStore(), **options)
    assert (asyncio.run(statuses()), runs) == (500, [size] * 2)
""",
    ],
    ids=[
        "scope of the database",
        "raw query",
        "cookies",
        "dropped",
        "dropped async",
        "killed",
        "ends in mid-stream",
        "lease in a stream",
        "stream in one thread",
        "stream in one task",
        "left in mid-stream",
        "within a sync middleware",
        "around an async middleware on WSGI",
        "cleans up in its thread",
        "left before it begins, within a sync middleware",
        "left around a sync middleware",
        "its server ends",
        "fails in mid-stream",
        "fails in mid-stream and is remembered",
    ],
)
def test_django_keeps_to_it(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", DJANGO + code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
