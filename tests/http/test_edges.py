"""Applications that do what few do, and clients that go: what is recorded then, and what their server gets."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import io
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from celery_idempotent.errors import (
    Conflict,
    CrashLoop,
    KeyReused,
    RecordUnreadable,
    ResultUnavailable,
    SettleNotCommitted,
    StoreUnreachable,
)
from celery_idempotent.http import IdempotencyMiddleware, asgi, problems, wsgi
from celery_idempotent.stores import Claim, Lease, Outcome, State
from celery_idempotent.stores.memory import MemoryStore
from tests.support.http.inproc import request_asgi, request_wsgi
from tests.support.stores.benches import known
from tests.support.waiting import wait_until

START = {"type": "http.response.start", "status": 201, "headers": []}
LAST = {"type": "http.response.body", "body": b"done"}


class AsgiApp:
    """An application that sends messages, and ends by an error."""

    def __init__(self, *messages: dict[str, Any], error: BaseException | None = None) -> None:
        self.messages, self.error, self.runs = messages, error, 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.runs += 1
        assert "http.response.pathsend" not in scope["extensions"]
        for message in self.messages:
            await send(message)
        if self.error is not None:
            raise self.error


async def exchange(app: Any, gone: bool = False) -> list[Any]:
    """Return what a server is given to send; a client that has gone cannot be sent anything."""
    sent = []

    async def send(message: Any) -> None:
        sent.append(message)
        if gone:
            raise ConnectionResetError

    async def receive() -> Any:
        return {"type": "http.request", "body": b""}

    headers = [(b"idempotency-key", b"k")]
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/",
        "headers": headers,
        "extensions": {"http.response.pathsend": {}},
    }
    await app(scope, receive, send)
    return sent


def guarded(app: Any, **options: Any) -> IdempotencyMiddleware:
    return IdempotencyMiddleware(app, **{"store": MemoryStore(), "scope": None, **options})


@pytest.mark.parametrize("messages", [[], [START], [START, {**LAST, "more_body": True}]], ids=["none", "start", "part"])
def test_a_response_that_is_not_complete_is_passed_on_and_not_recorded(messages: list[dict[str, Any]]) -> None:
    app = AsgiApp(*messages)
    middleware = guarded(app)
    assert [asyncio.run(exchange(middleware)) for _ in range(2)] == [messages, messages]
    assert app.runs == 2


class SparingApp(AsgiApp):
    """An application that makes its headers as they are read, and one message for all parts of its body."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        pairs = {b"content-type": b"text/plain", b"location": b"/orders/1"}
        await send({**START, "headers": ((name, value) for name, value in pairs.items())})
        message = {"type": "http.response.body", "more_body": True}
        for part in (b"one ", b"two"):
            message["body"] = part
            await send(message)
        await send({"type": "http.response.body"})


def test_the_first_response_is_as_it_was_sent_however_sparing_its_application_is() -> None:
    middleware = guarded(SparingApp())
    for _ in range(2):
        start, *parts = asyncio.run(exchange(middleware))
        assert dict(start["headers"]).items() >= {b"content-type": b"text/plain", b"location": b"/orders/1"}.items()
        assert b"".join(part.get("body", b"") for part in parts) == b"one two"


@pytest.mark.parametrize("error", [None, ValueError("after its route was found")], ids=["answers", "raises"])
def test_middlewares_outside_find_what_the_application_notes(error: Exception | None) -> None:
    seen = []

    class Routed(AsgiApp):
        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            scope["route"] = "/orders/{number}"
            await super().__call__(scope, receive, send)

    middleware = guarded(Routed(*([] if error else [START, LAST]), error=error))

    async def outer(scope: Any, receive: Any, send: Any) -> None:
        async def send_noted(message: Any) -> None:
            seen.append(scope.get("route"))
            await send(message)

        try:
            await middleware(scope, receive, send_noted)
        finally:
            seen.append((scope["route"], scope["extensions"]))

    with suppress(ValueError):
        asyncio.run(exchange(outer))
    sent = 0 if error else 2
    assert seen == ["/orders/{number}"] * sent + [("/orders/{number}", {"http.response.pathsend": {}})]


def test_who_looks_whether_the_client_has_gone_takes_no_body() -> None:
    async def place(request: Request) -> PlainTextResponse:
        gone = await request.is_disconnected()
        return PlainTextResponse(f"{gone} {await asyncio.wait_for(request.body(), 5)!r}")

    middleware = guarded(Route("/orders", place, methods=["POST"]).app)
    assert asyncio.run(request_asgi(middleware)).body == b"False b'body'"


def test_early_hints_are_passed_on_at_once() -> None:
    hint = {"type": "http.response.early_hint", "links": []}
    assert asyncio.run(exchange(guarded(AsgiApp(hint, START, LAST))))[0] == hint


def test_a_client_that_has_gone_is_no_reason_to_forget() -> None:
    app = AsgiApp(START, LAST)
    middleware = guarded(app)
    asyncio.run(exchange(middleware, gone=True))
    assert asyncio.run(exchange(middleware))[1]["body"] == b"done"
    assert app.runs == 1


@pytest.mark.parametrize("settle_at", ["response", "return"])
def test_what_an_application_raises_after_its_response_is_its_servers_to_report(settle_at: str) -> None:
    app = AsgiApp(START, LAST, error=ValueError("in a background task"))
    middleware = guarded(app, settle_at=settle_at)
    with pytest.raises(ValueError, match="background"):
        asyncio.run(exchange(middleware))
    if settle_at == "response":  # recorded before
        assert asyncio.run(exchange(middleware))[1]["body"] == b"done"
        assert app.runs == 1
    else:
        assert app.runs == 1
        with pytest.raises(ValueError, match="background"):
            asyncio.run(exchange(middleware))
        assert app.runs == 2


def test_a_request_that_the_end_of_its_server_cuts_off_is_free() -> None:
    runs = []

    async def forever(scope: Any, receive: Any, send: Any) -> None:
        runs.append(1)
        await asyncio.sleep(0 if len(runs) > 1 else 3600)
        await send(START)
        await send(LAST)

    middleware = IdempotencyMiddleware(forever, store=MemoryStore(), scope=None)

    async def serve() -> None:
        task = asyncio.ensure_future(exchange(middleware))
        while not runs:
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.wait([task])

    asyncio.run(serve())  # which cancels all tasks when it ends
    assert asyncio.run(exchange(middleware))[1]["body"] == b"done"
    assert len(runs) == 2


@pytest.mark.parametrize("stops", [True, False])
def test_a_reactor_of_twisted_that_stops_waits_for_requests(stops: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Daphne's does, whose loop waits for nothing else; one that never ran is not taken for it."""
    monkeypatch.setitem(sys.modules, "twisted.internet.reactor", SimpleNamespace(running=stops, _stopped=True))
    runs: list[int] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        runs.append(1)
        await asyncio.sleep(0.01)
        await send(START)
        await send(LAST)

    async def serve() -> bool:
        task = asyncio.ensure_future(exchange(IdempotencyMiddleware(app, store=MemoryStore(), scope=None)))
        while not runs:
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        return len(asyncio.all_tasks()) == 1

    assert asyncio.run(serve()) is stops


@pytest.mark.parametrize("cuts_off", ["before its response", "as its response is complete"])
def test_what_the_end_of_a_server_cuts_off_is_recorded_if_its_response_was_complete(cuts_off: str) -> None:
    runs, store = [], MemoryStore()

    def end() -> None:
        for task in asyncio.all_tasks():
            task.cancel()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        runs.append(1)
        if len(runs) == 1:
            asyncio.get_running_loop().call_soon(end)
            if cuts_off == "before its response":
                await asyncio.sleep(0)
        await send(START)
        await send(LAST)

    async def serve() -> None:
        task = asyncio.ensure_future(exchange(middleware))
        with suppress(asyncio.CancelledError):  # of this task too
            await asyncio.wait([task])
        await asyncio.wait([task])

    middleware = IdempotencyMiddleware(app, store=store, scope=None)
    asyncio.run(serve())
    wait_until(
        lambda: known(store, "idem:http::k").state is not State.IN_PROGRESS
    )  # the thread goes on that records it
    assert asyncio.run(exchange(middleware))[1]["body"] == b"done"
    assert len(runs) == (2 if cuts_off == "before its response" else 1)


def test_other_scopes_are_passed_on() -> None:
    seen = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["type"])

    middleware: Any = IdempotencyMiddleware(app, store="memory://", scope=None)
    for kind in ("lifespan", "websocket"):
        asyncio.run(middleware({"type": kind}, None, None))
    assert seen == ["lifespan", "websocket"]


# -- WSGI --------------------------------------------------------------------------------------------------------------


class WsgiApp:
    """An application whose body is a generator over ``start_response``; it counts runs and closings."""

    def __init__(self, body: Any) -> None:
        self.body, self.runs, self.closed = body, 0, 0

    def __call__(self, environ: Any, start_response: Any) -> Any:
        self.runs += 1
        parts = self.body(start_response)
        outer = self

        class Parts:
            def __iter__(self) -> Iterator[bytes]:
                return iter(parts)

            def close(self) -> None:
                outer.closed += 1

        return Parts()


def late(start: Any) -> Iterator[bytes]:
    write = start("201 Created", [])
    write(b"written ")
    yield b"yielded"


def twice(start: Any) -> Iterator[bytes]:
    start("201 Created", [])
    start("201 Created", [])
    yield b""


def never(start: Any) -> Iterator[bytes]:
    yield b""


def mended(start: Any) -> Iterator[bytes]:
    start("201 Created", [])
    try:
        raise ValueError("half-way")
    except ValueError:
        start("404 Not Found", [], sys.exc_info())
    yield b"not found"


def large(start: Any, status: str = "201 Created") -> Iterator[bytes]:
    start(status, [])
    yield b"x" * 2000
    yield b"end"


def failing(start: Any) -> Iterator[bytes]:
    yield from large(start, "500 Internal Server Error")


def breaking(start: Any) -> Iterator[bytes]:
    start("201 Created", [])
    yield b"x" * 2000
    try:
        raise ValueError("in mid-stream")
    except ValueError:
        start("500 X", [], sys.exc_info())


def small_breaking(start: Any) -> Iterator[bytes]:
    start("201 Created", [("Content-Length", "100")])
    yield b"id,cents"
    try:
        raise ValueError("in mid-stream")
    except ValueError:
        start("404 Not Found", [("Content-Length", "9")], sys.exc_info())
    yield b"not found"


def write_breaking(start: Any) -> Iterator[bytes]:
    start("201 Created", [])(b"written")
    try:
        raise ValueError("in mid-stream")
    except ValueError:
        start("404 Not Found", [], sys.exc_info())
    yield b"not found"


def app_of(body: Any, **options: Any) -> tuple[WsgiApp, wsgi.IdempotencyMiddleware]:
    app = WsgiApp(body)
    given = {"store": MemoryStore(), "scope": None, "response_max_bytes": 1000, **options}
    return app, wsgi.IdempotencyMiddleware(app, **given)


@pytest.mark.parametrize(
    ("body", "status", "content", "runs"),
    [(late, 201, b"written yielded", 1), (mended, 404, b"not found", 1), (failing, 500, b"x" * 2000 + b"end", 2)],
)
def test_a_body_of_any_kind_is_sent_whole_and_closed_once(body: Any, status: int, content: bytes, runs: int) -> None:
    app, middleware = app_of(body)
    replies = [request_wsgi(middleware) for _ in range(2)]
    assert [(reply.status, reply.body) for reply in replies] == [(status, content)] * 2
    assert (app.runs, app.closed) == (runs, runs)


@pytest.mark.parametrize(("body", "said"), [(twice, "called twice"), (never, "without calling start_response")])
def test_an_application_that_breaks_the_protocol_is_reported(body: Any, said: str) -> None:
    app, middleware = app_of(body)
    for _ in range(2):
        with pytest.raises(AssertionError, match=said):
            request_wsgi(middleware)
    assert (app.runs, app.closed) == (2, 2)


@pytest.mark.parametrize("body", [breaking, small_breaking, write_breaking])
def test_a_stream_that_breaks_is_reported_and_free(body: Any) -> None:
    app, middleware = app_of(body)
    for _ in range(2):
        with pytest.raises(ValueError, match="in mid-stream"):
            request_wsgi(middleware)
    assert (app.runs, app.closed) == (2, 2)


def test_an_exception_in_mid_stream_may_be_remembered() -> None:
    app, middleware = app_of(breaking, remember=lambda response: True)
    with pytest.raises(ValueError, match="in mid-stream"):
        request_wsgi(middleware)
    assert (request_wsgi(middleware).status, app.runs) == (500, 1)
    part = {"type": "http.response.body", "body": b"x" * 2000, "more_body": True}
    stream = AsgiApp(START, part, error=ValueError("in mid-stream"))
    outer = guarded(stream, remember=lambda response: True, response_max_bytes=1000)
    assert asyncio.run(exchange(outer)) == [START, part]
    assert (asyncio.run(exchange(outer))[0]["status"], stream.runs) == (500, 1)


def test_a_client_that_goes_in_mid_response_has_had_what_was_done() -> None:
    app, middleware = app_of(large)
    environ = {"REQUEST_METHOD": "POST", "PATH_INFO": "/orders", "HTTP_IDEMPOTENCY_KEY": "k"}
    parts: Any = middleware(environ, lambda *_: None)
    assert next(parts) == b"x" * 2000
    parts.close()
    assert request_wsgi(middleware, body=b"").status == 409
    assert (app.runs, app.closed) == (1, 1)


def test_a_length_that_a_server_hands_on_twice_is_one() -> None:
    def echo(environ: Any, start: Any) -> list[bytes]:
        start("201 Created", [])
        return [environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"]))]

    middleware = wsgi.IdempotencyMiddleware(echo, store=MemoryStore(), scope=None)
    twice = {"CONTENT_TYPE": "text/plain", "HTTP_CONTENT_TYPE": "text/plain", "HTTP_CONTENT_LENGTH": "4"}
    assert request_wsgi(middleware, **twice).body == b"body"
    assert request_wsgi(middleware, body=b"xxxx", **twice).status == 422


@pytest.mark.parametrize(
    "value", [UUID(int=7), 7, None, "\u0160", b"raw", object()], ids=["UUID", "int", "None", "text", "bytes", "object"]
)
def test_a_middleware_outside_may_put_what_it_likes_among_the_headers(value: object) -> None:
    def serve(environ: Any, start: Any) -> list[bytes]:
        start("201 Created", [])
        return [b"done"]

    middleware = wsgi.IdempotencyMiddleware(serve, store=MemoryStore(), scope=None)
    assert [request_wsgi(middleware, HTTP_X_TENANT=value).status for _ in range(2)] == [201, 201]
    by_tenant = wsgi.IdempotencyMiddleware(serve, store=MemoryStore(), scope="X-Tenant")
    is_account = isinstance(value, (UUID, int, str, bytes))
    assert request_wsgi(by_tenant, HTTP_X_TENANT=value).status == (201 if is_account else 401)


def test_a_server_may_ask_again_after_the_end() -> None:
    _, middleware = app_of(large)
    environ = {"REQUEST_METHOD": "POST", "PATH_INFO": "/orders", "HTTP_IDEMPOTENCY_KEY": "k"}
    parts: Any = middleware(environ, lambda *_: None)
    assert len(list(parts)) == 2
    assert list(parts) == []


def test_a_status_without_a_name_is_replayed() -> None:
    app, middleware = app_of(lambda start: [start("299 Special", []) and b"special"])
    assert [request_wsgi(middleware).status for _ in range(2)] == [299, 299]
    assert app.runs == 1


# -- what is in the store ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("payload", "status", "kind"),
    [
        (b"garbage", 500, b"record-unreadable"),
        (b"json:7", 500, b"record-unreadable"),
        (b"!unavailable:x", 409, b"not-kept"),
    ],
)
def test_a_record_that_cannot_be_replayed_is_no_reason_to_run(payload: bytes, status: int, kind: bytes) -> None:
    store, app = MemoryStore(), AsgiApp(START, LAST)
    lease = store.acquire(Claim("idem:http::k", "owner", 30, 30))
    assert isinstance(lease, Lease)
    store.settle(lease, Outcome(State.COMPLETED, payload), ttl=60)
    middleware = IdempotencyMiddleware(app, store=store, scope=None)
    body = WsgiApp(late)
    replies = [
        asyncio.run(request_asgi(middleware, body=b"")),
        request_wsgi(wsgi.IdempotencyMiddleware(body, store=store, scope=None), body=b""),
    ]
    assert (app.runs, body.runs) == (0, 0)
    for reply in replies:
        assert reply.status == status
        assert kind in reply.body


def test_a_crash_loop_is_refused_once_as_its_answer_says() -> None:
    answers: list[Any] = []
    store = MemoryStore()

    def killed(start: Any) -> Iterator[bytes]:
        start("201 Created", [])
        if app.runs == 1:  # as after a kill of its process: the lease runs out
            store.offset += 60
            answers.extend(contextvars.Context().run(request_wsgi, middleware) for _ in range(2))
        yield b"done"

    app, middleware = app_of(killed, store=store, max_crashes=1)
    request_wsgi(middleware)
    assert [reply.status for reply in answers] == [500, 201]
    assert b"not carried out this time. Sent again, it will be." in answers[0].body
    assert app.runs == 2


@pytest.mark.parametrize(
    ("error", "status", "again"),
    [
        (KeyReused("x"), 422, False),
        (Conflict("x"), 409, True),
        (ResultUnavailable("x"), 409, False),
        (CrashLoop("x"), 500, False),
        (SettleNotCommitted("x"), 500, False),
        (RecordUnreadable("x"), 500, False),
        (StoreUnreachable("x"), 503, True),
    ],
)
def test_each_error_has_a_problem_of_which_clients_know_whether_to_come_again(
    error: Exception, status: int, again: bool
) -> None:
    problem = problems.of_error("k", error)
    assert problem is not None
    assert problem.status == status
    assert (problem.response(None).header("retry-after") is not None) == again
    assert problem.response(None).body != b"x"


def test_an_error_of_the_application_has_none() -> None:
    assert problems.of_error("k", ValueError()) is None


def test_django_is_told_which_setting_is_missing() -> None:
    code = (
        "from django.conf import settings\n"
        "settings.configure()\n"
        "from celery_idempotent.http.django import IdempotencyMiddleware\n"
        "IdempotencyMiddleware(lambda request: None)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "Expected the setting IDEMPOTENCY_HTTP, a dict of options, got None" in done.stderr


@pytest.mark.nightly
def test_django_on_its_own_limits_and_without_a_store() -> None:
    code = """
from io import BytesIO
from django.conf import settings
settings.configure(ALLOWED_HOSTS=["*"], DATA_UPLOAD_MAX_MEMORY_SIZE=10)
import django
django.setup()
from django.http import HttpResponse, UnreadablePostError
from django.test import RequestFactory
from celery_idempotent.errors import ConfigurationError
from celery_idempotent.http.django import IdempotencyMiddleware

def post(body, **options):
    settings.IDEMPOTENCY_HTTP = {"scope": None, "store": "memory://", **options}
    runs = []
    middleware = IdempotencyMiddleware(lambda request: runs.append(1) or HttpResponse("run", status=201))
    headers = {"HTTP_IDEMPOTENCY_KEY": "k"}
    request = lambda: RequestFactory().post("/", body, content_type="text/plain", **headers)
    return [middleware(request()).status_code for _ in range(2)], len(runs)

class Cut(BytesIO):  # which Django 6.1 asks whether it may be read again
    def read(self, *_):
        raise OSError("the client has gone")
    def close(self):
        pass

assert post(b"short") == ([201, 201], 1)
assert post(b"x" * 11, name="large") == ([413, 413], 0)
request = RequestFactory().post("/", b"x" * 11, content_type="text/plain", HTTP_IDEMPOTENCY_KEY="large")
settings.IDEMPOTENCY_HTTP = {"scope": None, "store": "memory://"}
refusal = IdempotencyMiddleware(lambda request: None)(request).content
assert b"at most 10 bytes with an idempotency key, by Django's DATA_UPLOAD_MAX_MEMORY_SIZE, got more" in refusal
assert post(b"x" * 11, name="headers", fingerprint="headers") == ([201, 201], 1)
assert post(b"short", store="redis://127.0.0.1:1/0", on_store_error="run") == ([201, 201], 2)

def leave(request):
    raise SystemExit

settings.IDEMPOTENCY_HTTP["on_store_error"] = "raise"
settings.IDEMPOTENCY_HTTP["store"] = "memory://"
def later(leaving):
    request = RequestFactory().post("/", b"x", content_type="text/plain", HTTP_IDEMPOTENCY_KEY="left")
    return IdempotencyMiddleware(leave if leaving else lambda request: HttpResponse("run", status=201))(request)
try:
    later(True)
except SystemExit:
    pass
assert later(False).status_code == 201
request = RequestFactory().post("/", b"short", content_type="text/plain", HTTP_IDEMPOTENCY_KEY="cut")
request._stream = Cut()
assert IdempotencyMiddleware(lambda request: None)(request).status_code == 400

def upload(sent, early=False):
    settings.IDEMPOTENCY_HTTP = {"scope": None, "store": "memory://", "fingerprint": "headers"}
    request = RequestFactory().post("/", b"whole", content_type="text/plain", HTTP_IDEMPOTENCY_KEY="upload")
    request._stream = BytesIO(sent)
    if early:  # by a middleware that comes before
        request.body
    def take(request):
        try:
            return HttpResponse(request.body, status=201)
        except UnreadablePostError:
            return HttpResponse(status=500)
    return IdempotencyMiddleware(take)(request)

assert upload(b"who").status_code == 500
assert upload(b"who", early=True).status_code == 400
assert upload(b"whole").content == upload(b"whole", early=True).content == b"whole"

settings.IDEMPOTENCY_HTTP = {"scope": None, "store": "memory://", "fingerprint": "headers"}
unread = IdempotencyMiddleware(lambda request: HttpResponse(status=201))
first, again = (RequestFactory().post("/", b"whole", "text/plain", HTTP_IDEMPOTENCY_KEY="unread") for _ in range(2))
assert unread(first).status_code == unread(again).status_code == 201
assert (first.read(), again.read()) == (b"whole", b"")  # that of a replay is read before it is sent

def form(name, **options):
    settings.IDEMPOTENCY_HTTP = {"scope": None, "store": "memory://", "name": name, **options}
    request = RequestFactory().post("/", {"a": "1"}, HTTP_IDEMPOTENCY_KEY="form")
    request.POST  # by a middleware that comes before
    return IdempotencyMiddleware(lambda request: HttpResponse(request.POST["a"], status=201))(request)

try:
    form("taken apart")
except ConfigurationError as error:
    assert "a middleware before this one has taken apart" in str(error)
else:
    raise AssertionError("it ran")
assert form("not compared", fingerprint="headers").content == b"1"
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("expect", [b"", b"100-continue"], ids=["comes", "is waited for"])
@pytest.mark.parametrize("rest", [5.0, 0.05], ids=["ends", "does not end"])
def test_a_body_is_read_before_a_replay_that_does_not_wait_for_it(
    monkeypatch: pytest.MonkeyPatch, expect: bytes, rest: float
) -> None:
    """nginx answers 502 where a server closes its connection before that has sent all."""
    monkeypatch.setattr(asgi, "REST", rest)
    middleware, steps = guarded(PlainTextResponse("done", 201), fingerprint="headers"), list[str]()

    async def post() -> None:
        left = 3

        async def receive() -> Any:
            nonlocal left
            if not left:
                await asyncio.Event().wait()
            left -= 1
            steps.append("part")
            return {"type": "http.request", "body": b"part", "more_body": left > 0 or rest < 1}

        async def send(message: Any) -> None:
            steps.append(message["type"].rpartition(".")[2])

        headers = [(b"idempotency-key", b"k"), (b"expect", expect)]
        await middleware({"type": "http", "method": "POST", "path": "/", "headers": headers}, receive, send)

    asyncio.run(post())
    assert steps == ["start", "body"]  # it is the application's to read
    asyncio.run(post())
    assert steps[2:] == ["part"] * (0 if expect else 3) + ["start", "body"]


class CutOff(io.BytesIO):
    """A body of which uWSGI, mod_wsgi and gevent raise once its client has gone."""

    def read(self, size: int | None = -1) -> bytes:
        part = super().read(min(size or 0, 3))
        if not part:
            raise OSError("request data read error")
        return part


@pytest.mark.parametrize(
    ("stream", "announced"),
    [(io.BytesIO, {}), (CutOff, {}), (CutOff, {"CONTENT_LENGTH": "", "wsgi.input_terminated": True})],
    ids=["ends", "raises", "raises in chunks"],
)
def test_a_body_that_its_client_cuts_off_is_refused_before_a_lease_is_taken(
    stream: type[io.BytesIO], announced: dict[str, Any]
) -> None:
    app, middleware = app_of(large)
    reply = request_wsgi(middleware, body=b"whole body", **{"wsgi.input": stream(b"whole"), **announced})
    assert (reply.status, b"body-incomplete" in reply.body, app.runs) == (400, True, 0)
    assert request_wsgi(middleware, body=b"another").status == 201


def test_a_body_that_its_client_cuts_off_is_none_also_where_the_application_reads_it() -> None:
    """Of gunicorn such a body ends as a whole one does."""
    taken: list[bytes] = []

    class Slow(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            return super().read(min(size or 0, 3))

    def take(environ: Any, start_response: Any) -> list[bytes]:
        stream = environ["wsgi.input"]
        taken.append(stream.readline() + stream.read(1) + stream.read() + stream.read())
        start_response("201 Created", [])
        return [taken[-1]]

    app = wsgi.IdempotencyMiddleware(take, store=MemoryStore(), scope=None, fingerprint="headers")
    whole = b"line\nand more"
    for sent in (b"", b"li", b"line\n", b"line\nand"):
        with pytest.raises(ConnectionResetError, match=f"Expected 13 bytes of body, as announced, got {len(sent)}"):
            request_wsgi(app, body=whole, **{"wsgi.input": Slow(sent)})
    for _ in range(2):
        assert request_wsgi(app, body=whole, **{"wsgi.input": Slow(whole + b"another request")}).body == whole
    assert taken == [whole]


# -- many --------------------------------------------------------------------------------------------------------------


def kept() -> int:
    """Return how many objects of this library Python keeps, those among them that its collector is to find."""
    return sum(str(type(each).__module__).startswith("celery_idempotent") for each in gc.get_objects())


def left_in_memory() -> int:
    """Return how many objects of this library live."""
    gc.collect()
    return kept()


@pytest.mark.parametrize("kind", ["asgi", "wsgi"])
def test_what_a_request_had_is_gone_when_it_was_answered(kind: str, redis_url: str) -> None:
    """A server may answer a thousand large requests before the collector looks for cycles among old objects."""
    asgi = guarded(AsgiApp(START, LAST), store=redis_url)
    wsgi = app_of(late, store=redis_url)[1]

    async def send(key: str) -> None:
        reply = request_wsgi(wsgi, key) if kind == "wsgi" else await request_asgi(asgi, key, extensions={})
        assert reply.status == 201

    asyncio.run(send("first"))  # which opens what is kept open
    gc.collect()
    gc.disable()
    try:
        before = kept()
        asyncio.run(send("second"))
        wait_until(lambda: kept() <= before)
    finally:
        gc.enable()


@pytest.mark.parametrize("number", [300, pytest.param(10_000, marks=pytest.mark.soak)])
@pytest.mark.parametrize("kind", ["asgi", "wsgi"])
def test_many_keys_leave_nothing_in_the_servers_memory(kind: str, number: int, redis_url: str) -> None:
    asgi = guarded(AsgiApp(START, LAST), store=redis_url)
    wsgi = app_of(late, store=redis_url)[1]

    async def send(keys: range) -> None:
        for key in map(str, keys):
            reply = request_wsgi(wsgi, key) if kind == "wsgi" else await request_asgi(asgi, key, extensions={})
            assert reply.status == 201

    asyncio.run(send(range(50)))
    before = left_in_memory()
    asyncio.run(send(range(50, number)))
    # One object in twelve keys would be too many; another connection, or notes that are yet to be written, are a few.
    wait_until(lambda: left_in_memory() < before + 20, message=lambda: f"{before} to grow no more: {left_in_memory()}")
