"""The middleware for ASGI applications on asyncio: Starlette, FastAPI, Litestar, Quart, Django.

The application runs in a task of its own, which a client that goes away does not cancel: its request is carried out,
and its repetition gets the response. What the application sends is held back until it is recorded.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from time import monotonic
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from ..core.lease import LeaseSlot, current_lease, running
from ..errors import ConfigurationError
from ..events import logger
from ..functions import running_loop
from . import problems
from .delivery import Fact, HttpBinding, HttpDelivery
from .inside import ENTRY, Pending, pass_by
from .options import INSIDE, UNGUARDED, HttpOptions, Options, check_application, takes
from .problems import Problem
from .request import REST, Request
from .response import PATIENCE, Response, poll_at

if TYPE_CHECKING:
    from typing_extensions import Unpack

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

#: What a server could send by itself, past this middleware.
HIDDEN = {"http.response.pathsend", "http.response.zerocopysend", "http.response.trailers"}

#: Requests that are carried out, also those whose client has gone: asyncio itself forgets tasks that none waits for.
_tasks: set[asyncio.Task[None]] = set()


class IdempotencyMiddleware:
    """Carry out each request with an Idempotency-Key once, and replay its response.

    Put it inside authentication, rate limits, CORS and compression: what is outside sees every request.

    Arguments:
        app: The application.
        options: Those of `celery_idempotent.http.HttpOptions`; ``scope``, and ``store`` or ``celery_app`` must be among
            them.

    Raises:
        ConfigurationError: an option is wrong or missing, or the application is one for WSGI, or none.

    Example::

        app.add_middleware(IdempotencyMiddleware, store="redis://localhost/1", scope=lambda scope: scope["user"].id)
    """

    def __init__(self, app: App, **options: Unpack[HttpOptions]) -> None:
        check_application(app)
        if _is_wsgi(app):
            raise ConfigurationError(
                f"Expected an application for ASGI, got {app!r}, which is one for WSGI. Write from "
                "celery_idempotent.http.wsgi import IdempotencyMiddleware."
            )
        self.app, self.options = app, Options.of(options)
        self.binding = HttpBinding(self.options)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request, or pass on what is none that is guarded."""
        if self.options.scope is INSIDE:
            pass_by(scope)
        prefix = scope.get("root_path", "")
        if scope["type"] != "http" or not self.options.guards(scope["method"], scope["path"], prefix):
            await self.app(scope, receive, send)
            return
        exchange = _Exchange(self.app, self.binding, scope, receive, send)
        try:
            delivery = await exchange.begin()
        except Problem as problem:
            await exchange.answer(problem.response(self.options.docs_url))
            return
        if delivery is None:
            return
        task = asyncio.ensure_future(exchange.carry_out(delivery))
        _tasks.add(task)
        task.add_done_callback(_tasks.discard)
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            exchange.gone = exchange.passing or not _is_stopping()
            if not exchange.gone:
                await asyncio.wait([task])
            raise


def _is_stopping() -> bool:
    """Return whether the server is Daphne, which stops: its loop waits for no task but those that it has cancelled.

    The one that carries a request out would be left behind with its lease, and the process would never end where AnyIO
    runs the view in a thread. Other servers run asyncio's own runner, which cancels all tasks.
    """
    reactor = sys.modules.get("twisted.internet.reactor")
    # Of these, the second is true of a reactor that never ran, too.
    return bool(getattr(reactor, "running", False) and getattr(reactor, "_stopped", False))


def _is_wsgi(app: Any) -> bool:
    """Return whether an application takes environ and start_response, and so cannot take three arguments."""
    return takes(app, 2) and not takes(app, 3)


class _Incomplete(Exception):
    """The application returned without a whole response, which its server reports."""


def _outside(receive: Receive, send: Send) -> tuple[Receive, Send]:
    """Return these with the lease that is held here, outside of the middleware, which is none as a rule.

    A server may do more within them than its caller asks for: read on, and begin the next request of the connection.
    What it begins gets the context of the caller, and with it for good the lease of a request that has ended.
    """
    here = LeaseSlot()
    here.lease = current_lease()

    async def receive_outside() -> Message:
        with running(here):
            return await receive()

    async def send_outside(message: Message) -> None:
        with running(here):
            await send(message)

    return receive_outside, send_outside


class _Exchange:
    """One request and its response.

    Arguments:
        app, scope, receive, send: As ASGI has them.
        binding: The middleware's.
    """

    def __init__(self, app: App, binding: HttpBinding, scope: Scope, receive: Receive, send: Send) -> None:
        self.app, self.binding, self.scope = app, binding, scope
        self.receive, self.send = _outside(receive, send)
        self.options = binding.options
        #: what the application is given: with less in it where the server could send something by itself
        self.scope_within = scope
        self.request = _request(scope)
        #: whether the body was left for the application to read, which has not read all of it
        self.is_unread = False
        #: where the view takes the lease
        self.pending: Pending | None = None
        #: what the application has sent and the client has not
        self.held_back: list[Message] = []
        self.status, self.body = 0, b""
        self.headers: tuple[tuple[bytes, bytes], ...] = ()
        self.first_part = 0.0
        #: whether parts are passed on as they come
        self.passing = False
        self.sending = asyncio.Lock()
        self.complete, self.answered = asyncio.Event(), asyncio.Event()
        #: whether the client has gone, and when the application may learn that
        self.gone, self.listening = False, asyncio.Event()
        #: until the response is complete, or the application has returned
        self.waiting: asyncio.Future[None] = running_loop().create_future()
        self.flushing: asyncio.Task[None] | None = None
        self.running: asyncio.Task[None] | None = None

    # -- before the application is called ------------------------------------------------------------------------------

    async def begin(self) -> HttpDelivery | Pending | None:
        """Return the delivery of the request; None where it passed by, or its client has gone.

        Raises:
            Problem: it is refused.
        """
        key = self.binding.key_of(self.request)
        if key is None:
            await self.app(self.scope, self.receive, self.send)
            return None
        account = self.binding.scope_of(self.request)
        account = self.binding.account_of(await account if inspect.isawaitable(account) else account)
        if account is UNGUARDED:
            await self.app(self.scope, self.receive, self.send)
            return None
        self.binding.check_length(self.request)
        body = await self._read() if self.binding.reads_body else b""
        if body is None:
            return None
        self.receive = self._given_back(body if self.binding.reads_body else None, self.receive)
        if account is INSIDE:
            outer = self.scope.get(ENTRY)
            self.pending = self.scope[ENTRY] = Pending(self.binding, self.request, key, body, outer)
            return self.pending
        delivery = self.binding.delivery(self.request, key, account, body)
        if delivery.is_running:
            self.listening.set()
            await self.app(self.scope, self.receive, self.send)
            return None
        return delivery

    async def _read(self) -> bytes | None:
        parts, size = [], 0
        while True:
            message = await self.receive()
            if message["type"] == "http.disconnect":
                return None
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > self.options.request_max_bytes:
                raise problems.too_large(self.options.request_max_bytes)
            if not message.get("more_body", False):
                return b"".join(parts)

    def _given_back(self, body: bytes | None, receive: Receive) -> Receive:
        """Return what hands the body on, read before or not, and then what comes once the response is out."""
        left: list[Message] = [] if body is None else [{"type": "http.request", "body": body, "more_body": False}]
        self.is_unread = body is None

        async def again() -> Message:
            if left:
                await asyncio.sleep(0)  # who but looks whether its client has gone is cancelled here, and takes nothing
            if left:
                return left.pop()
            if not self.is_unread:
                await self.listening.wait()  # before, frameworks would cancel the work of a client that has gone
            message = await receive()
            self.is_unread = self.is_unread and bool(message.get("more_body", False))
            self.gone = self.gone or message["type"] == "http.disconnect"
            return message

        return again

    # -- under the lease -----------------------------------------------------------------------------------------------

    async def carry_out(self, delivery: HttpDelivery | Pending) -> None:
        """Have the request carried out, or answer it with what is known of it; send the response."""
        try:
            try:
                response = await delivery.response_of(lambda: self._run(delivery))
            except _Incomplete:
                await self._flush()
                return
            except Exception as error:  # noqa: BLE001 - raised again if it is the application's
                response = delivery.answer_error(error)
            await self._respond(response)
        finally:
            del self.receive  # it refers to this: request and response would wait for Python's collector
            self.answered.set()
            self.listening.set()
            await self._leave()

    async def _run(self, delivery: HttpDelivery | Pending) -> Response | Fact:
        """Run the application until its response is complete, and return what is to be recorded."""
        extensions = self.scope.get("extensions") or {}
        if HIDDEN & extensions.keys():
            left = {name: each for name, each in extensions.items() if name not in HIDDEN}
            self.scope_within = {**self.scope, "extensions": left}
        running = self.running = asyncio.ensure_future(self.app(self.scope_within, self.receive, self._take))
        running.add_done_callback(lambda _: self._end_waiting())
        try:
            await self.waiting
        except asyncio.CancelledError:  # the server ends
            if not self.complete.is_set() or self.options.settle_at == "return":
                running.cancel()
                await asyncio.wait([running])
                raise
            # The response is whole: what was done is recorded, whether or not a client gets it.
        self._share_notes()
        if self._is_left():
            return delivery.result_of(Response(self.status, self.headers), sent=True)
        if running.done() and (self.options.settle_at == "return" or not self.complete.is_set()):
            error = running.exception()
            if isinstance(error, Exception):
                return delivery.result_of_error(error)
            if error is not None:
                raise error
            if not self.complete.is_set() and not self._is_answered():
                raise _Incomplete
        return delivery.result_of(Response(self.status, self.headers, self.body), sent=self.passing)

    def _is_answered(self) -> bool:
        return self.pending is not None and self.pending.answered is not None

    def _is_left(self) -> bool:
        """Whether its client has left a response that it had begun to get; that client has had what was done."""
        return self.gone and self.listening.is_set() and not self.complete.is_set()

    def _share_notes(self) -> None:
        """Let middlewares outside find what the application has noted in its scope, as the route it has found."""
        if self.scope_within is not self.scope:
            self.scope.update({**self.scope_within, "extensions": self.scope["extensions"]})

    def _end_waiting(self) -> None:
        if not self.waiting.done():
            self.waiting.set_result(None)

    async def _take(self, message: Message) -> None:
        """Take what the application sends."""
        kind = message["type"]
        self._share_notes()
        if self._is_answered():
            return
        if kind not in ("http.response.start", "http.response.body"):
            await self.send(message)  # early hints and the like, which are no part of the response
            return
        async with self.sending:
            if self.passing:
                await self._send(message)
                if message.get("more_body", False) and self._is_left():
                    raise ConnectionResetError("The client has gone, which ends a stream of events.")
            else:
                self._hold_back(message)
        if self.held_back and not self.complete.is_set() and self._is_due():
            await self._flush()
        if kind == "http.response.body" and not message.get("more_body", False):
            self.complete.set()
            if self.options.settle_at == "response":
                self._end_waiting()
                await self.answered.wait()

    def _hold_back(self, message: Message) -> None:
        message = {**message}  # its application may send it again with the next part in it
        self.held_back.append(message)
        if message["type"] == "http.response.start":
            self.status, self.headers = message["status"], tuple((n, v) for n, v in message.get("headers", ()))
            message["headers"] = list(self.headers)  # what was an iterator is read by now
            return
        self.body += message.get("body", b"")
        if not message.get("more_body", False):
            self.complete.set()
        elif not self.first_part:
            self.first_part = monotonic()
            self.flushing = asyncio.ensure_future(self._flush_later())

    def _is_due(self) -> bool:
        if self.pending is not None and not self.pending.is_begun:
            return True
        if self._is_stream():  # also before its first event, for which it may wait for hours
            return True
        if not self.first_part:
            return False
        return len(self.body) > self.options.response_max_bytes or monotonic() > self.first_part + PATIENCE

    def _is_stream(self) -> bool:
        return Response(self.status, self.headers).is_stream

    async def _flush_later(self) -> None:
        await asyncio.sleep(PATIENCE)
        if not self.complete.is_set():
            await self._flush()

    async def _flush(self) -> None:
        """Send what was held back, and from now on what comes, when it comes."""
        if self.pending is not None and not self.pending.is_begun:
            self.pending.close()
            self.listening.set()  # a client that goes may end what has no lease
        async with self.sending:
            self.passing, left, self.held_back = True, self.held_back, []
            self.body = b""
            if self._is_stream():  # which may have no end but that its client goes
                self.listening.set()
            for message in left:
                await self._send(message)

    async def _send(self, message: Message) -> None:
        if self.gone:
            return
        try:
            await self.send(message)
        except OSError as error:  # the client has gone, and the request is carried out all the same
            self.gone = True
            logger.debug("A response was not sent: %r", error)

    # -- the response --------------------------------------------------------------------------------------------------

    async def _respond(self, response: Response) -> None:
        if self.passing:
            return
        if self.complete.is_set() and response.headers is self.headers:
            await self._flush()
        else:
            await self.answer(response)

    async def answer(self, response: Response) -> None:
        """Send a response that is not the application's."""
        await self._read_rest()
        await self._send({"type": "http.response.start", "status": response.status, "headers": response.sent()})
        await self._send({"type": "http.response.body", "body": response.body})

    async def _read_rest(self) -> None:
        """Read what is left of a body that no application reads, as `read_rest` of WSGI does."""
        if not self.request.is_coming or (self.running is not None and not self.running.done()):
            return
        until = monotonic() + REST
        with suppress(asyncio.TimeoutError):
            while self.is_unread:
                await asyncio.wait_for(self.receive(), until - monotonic())

    async def _leave(self) -> None:
        """Wait for what the application does after its response; what it raises then is its server's to report."""
        if self.flushing is not None:
            self.flushing.cancel()
        if self.running is not None and not self.running.done():
            await asyncio.wait([self.running])
        ended = self.complete.is_set() and self.options.settle_at == "response"
        if self.running is not None and (ended or (self.passing and self._is_left())):
            with suppress(asyncio.CancelledError):
                if (error := self.running.exception()) is not None:
                    raise error


def accepted(result: Any, location: object, *, retry_after: int | None = None) -> Any:
    """Return the response to a request whose work a task does: 202, with a Location where its client may poll.

    Ids are no secrets: whatever serves the location must check that its caller is the one whose request it was.

    Arguments:
        result: What ``apply_async`` or ``delay`` returned, of a task, chain, chord or group. That of a group is saved
            in the result backend.
        location: The URL or path; ``{id}`` in it stands for the id of the result.
        retry_after: Seconds after which the client is to poll (default: it may at once).

    Returns:
        A ``JSONResponse`` of Starlette, which FastAPI takes too.
    """
    body, headers = poll_at(result, location, retry_after)
    from starlette.responses import JSONResponse

    return JSONResponse(body, 202, headers)


def path_of(scope: Scope) -> bytes:
    """Return the path of a request as it was sent, where its server has it."""
    return scope.get("raw_path") or quote(scope["path"]).encode()


def _request(scope: Scope) -> Request:
    headers = [(name.lower(), value) for name, value in scope["headers"]]
    return Request(scope["method"].upper(), path_of(scope), scope.get("query_string", b""), headers, scope)
