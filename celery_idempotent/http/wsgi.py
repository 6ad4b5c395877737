"""The middleware for WSGI applications, as Flask's. What the application returns is held back until it is recorded."""

from __future__ import annotations

import _thread
import contextvars
import io
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from http import HTTPStatus
from inspect import iscoroutinefunction
from time import monotonic
from typing import TYPE_CHECKING, Any
from urllib.parse import quote
from uuid import UUID

from ..core.lease import HeldLease, LeaseSlot, running
from ..errors import ConfigurationError
from ..functions import finish_within
from . import problems
from .delivery import HttpBinding, HttpDelivery
from .inside import ENTRY, Pending, pass_by
from .options import INSIDE, UNGUARDED, HttpOptions, Options, check_application
from .problems import Problem
from .request import PART, REST, Request
from .response import PATIENCE, Response, poll_at

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["IdempotencyMiddleware", "accepted"]

Environ = dict[str, Any]
StartResponse = Callable[..., Any]
App = Callable[[Environ, StartResponse], Iterable[bytes]]


class IdempotencyMiddleware:
    """Carry out each request with an Idempotency-Key once, and replay its response.

    Put it inside authentication and rate limits: what is outside sees every request. A request that waits, with
    ``on_conflict="wait"``, holds its thread of the server.

    Arguments:
        app: The application.
        options: Those of `celery_idempotent.http.HttpOptions`; ``scope``, and ``store`` or ``celery_app`` must be among
            them.

    Raises:
        ConfigurationError: an option is wrong or missing, or the application is one for ASGI, or none.

    Example::

        app.wsgi_app = IdempotencyMiddleware(app.wsgi_app, store="redis://localhost/1", scope="X-Api-Key")
    """

    def __init__(self, app: App, **options: Unpack[HttpOptions]) -> None:
        check_application(app)
        if iscoroutinefunction(app) or iscoroutinefunction(type(app).__call__):
            raise ConfigurationError(
                f"Expected an application for WSGI, got {app!r}, which is one for ASGI. Write from "
                "celery_idempotent.http import IdempotencyMiddleware."
            )
        self.app, self.options = app, Options.of(options)
        self.binding = HttpBinding(self.options)

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        """Serve a request, or pass on what is none that is guarded."""
        prefix, path = (
            environ.get(name, "").encode("latin-1").decode("utf-8", "replace") for name in ("SCRIPT_NAME", "PATH_INFO")
        )
        if self.options.scope is INSIDE:
            pass_by(environ)
        if not self.options.guards(environ["REQUEST_METHOD"], prefix + path, prefix):
            return self.app(environ, start_response)
        try:
            delivery = self._begin(environ)
            if delivery is None:
                return self.app(environ, start_response)
            if isinstance(delivery, Pending):
                return _Exchange(self.app, delivery, delivery.slot, environ, start_response).run()
            return self._carry_out(delivery, environ, start_response)
        except Problem as problem:
            return _send(problem.response(self.options.docs_url), start_response)

    def _begin(self, environ: Environ) -> HttpDelivery | Pending | None:
        """Return the delivery of a request; None if it is to pass by.

        Raises:
            Problem: it is refused.
        """
        request = request_of(environ, environ)
        key = self.binding.key_of(request)
        if key is None:
            return None
        account = self.binding.account_of(self.binding.scope_of(request))
        if account is UNGUARDED:
            return None
        self.binding.check_length(request)
        body = b""
        if self.binding.reads_body:
            body = self._read(environ, request)
            environ.update({"wsgi.input": io.BytesIO(body), "CONTENT_LENGTH": str(len(body))})
        elif request.length:
            environ["wsgi.input"] = whole(environ["wsgi.input"], request.length)
        if account is INSIDE:
            environ[ENTRY] = pending = Pending(self.binding, request, key, body, environ.get(ENTRY))
            return pending
        delivery = self.binding.delivery(request, key, account, body)
        return None if delivery.is_running else delivery

    def _read(self, environ: Environ, request: Request) -> bytes:
        most, length = self.options.request_max_bytes, request.length
        if length is None and not environ.get("wsgi.input_terminated"):
            return b""
        parts, left = [], most + 1 if length is None else length
        try:
            while left > 0 and (part := environ["wsgi.input"].read(left)):
                parts.append(part)
                left -= len(part)
        except OSError:  # of uWSGI, mod_wsgi and gevent, once the client has gone
            raise problems.cut_off() from None
        body = b"".join(parts)
        if len(body) > most:
            raise problems.too_large(most)
        if length is not None and len(body) < length:
            raise problems.cut_off()
        return body

    def _carry_out(self, delivery: HttpDelivery, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        try:
            held = self.binding.guard.begin(delivery)
            answer = held if isinstance(held, HeldLease) else delivery.answer(held)
        except Exception as error:  # noqa: BLE001 - raised again if it is the application's
            answer = delivery.answer_error(error)
        if isinstance(answer, Response):
            if not self.binding.reads_body:
                read_rest(environ, environ["wsgi.input"])
            return _send(answer, start_response)
        held = answer
        exchange = _Exchange(self.app, delivery, held, environ, start_response)
        if not held.fence:
            return exchange.run_unguarded()
        return exchange.run()


def accepted(
    result: Any, location: object, *, retry_after: int | None = None
) -> tuple[dict[str, str], int, dict[str, str]]:
    """Return the response to a request whose work a task does: 202, with a Location where its client may poll.

    Ids are no secrets: whatever serves the location must check that its caller is the one whose request it was.

    Arguments:
        result: What ``apply_async`` or ``delay`` returned, of a task, chain, chord or group. That of a group is saved
            in the result backend.
        location: The URL or path; ``{id}`` in it stands for the id of the result.
        retry_after: Seconds after which the client is to poll (default: it may at once).

    Returns:
        A tuple of body, status and headers, as views of Flask and Quart return it.
    """
    body, headers = poll_at(result, location, retry_after)
    return body, 202, headers


class _Exchange:
    """One request and its response, under a lease.

    Arguments:
        app, environ, start_response: As WSGI has them.
        delivery: Of the request.
        held: Its lease, or where its view puts that.
    """

    def __init__(
        self,
        app: App,
        delivery: HttpDelivery | Pending,
        held: HeldLease | LeaseSlot,
        environ: Environ,
        start_response: StartResponse,
    ) -> None:
        self.app, self.delivery, self.held = app, delivery, held
        self.environ, self.start_response = environ, start_response
        self.binding = delivery.binding
        self.started: tuple[Any, ...] = ()
        self.written: list[bytes] = []
        #: whether a part of the body came, and with it, as the application sees it, the headers were sent
        self.begun = False
        self.returned: Iterable[bytes] = ()
        self.passing = False
        #: in which the application finds its lease, also where its server reads on
        self.context = contextvars.copy_context()
        self.context.run(running(held).__enter__)

    def run_unguarded(self) -> Iterable[bytes]:
        """Return what the application does, without a lease."""
        return self.context.run(self.app, self.environ, self.start_response)

    def run(self) -> Iterable[bytes]:
        """Run the application until its response is complete, record that, and return what its server is to send."""
        value: object = None
        failure: BaseException | None = None
        try:
            try:
                body, left = self._gather(self._parts())
                if left is not None:
                    return self._pass_on(body, left)
                if self.binding.options.settle_at == "return":
                    self._close()
                value = self.delivery.result_of(self._response(body))
            except Exception as error:  # noqa: BLE001 - recorded, and raised again
                value = self.delivery.result_of_error(error)
        except BaseException as error:  # noqa: BLE001 - recorded, and raised again
            failure = error
        try:
            answer = self._answer(value, failure)
        except BaseException:
            self._close()
            raise
        return self._respond(answer)

    # -- what the application sends ------------------------------------------------------------------------------------

    def _start(self, status: str, headers: list[tuple[str, str]], exc_info: Any = None) -> Callable[[bytes], None]:
        if exc_info and (self.begun or any(self.written)):
            raise exc_info[1].with_traceback(exc_info[2])
        if self.started and not exc_info:
            raise AssertionError("start_response was called twice, the second time without exc_info")
        self.started = (status, list(headers))
        if isinstance(self.delivery, Pending):
            self.delivery.close()
        return self.written.append

    def _parts(self) -> Iterator[bytes]:
        """Call the application, and return its response's parts."""
        self.returned = self.context.run(self.app, self.environ, self._start)
        return self.context.run(iter, self.returned)

    def _next(self, parts: Iterator[bytes]) -> bytes | None:
        """Return the next part with what was written before it; None at the end."""
        part = self.context.run(next, parts, None)
        written, self.written[:] = b"".join(self.written), []
        self.begun = self.begun or bool(written or part)
        return written + (part or b"") if written else part

    def _gather(self, parts: Iterator[bytes]) -> tuple[bytes, Iterator[bytes] | None]:
        """Return the body, and its other parts where they are to be passed on as they come."""
        body, first = b"", None
        while (part := self._next(parts)) is not None:
            body += part
            first = first or (monotonic() if part else None)
            if isinstance(self.delivery, Pending) and self.delivery.answered is not None:
                return b"", None
            if body and self._is_due(len(body), first or monotonic()):
                return body, parts
        return body, None

    def _is_due(self, size: int, first: float) -> bool:
        stream = self._response(b"").is_stream or not self.delivery.is_begun
        return stream or size > self.binding.options.response_max_bytes or monotonic() > first + PATIENCE

    def _response(self, body: bytes) -> Response:
        if not self.started:
            raise AssertionError("the application returned without calling start_response")
        status, headers = self.started
        pairs = tuple((name.encode("latin-1"), value.encode("latin-1")) for name, value in headers)
        return Response(int(status.split(" ", 1)[0]), pairs, body)

    def _close(self) -> None:
        close, self.returned = getattr(self.returned, "close", None), ()
        if close is not None:
            self.context.run(close)

    # -- how it ends ---------------------------------------------------------------------------------------------------

    def _finish(self, value: object = None, error: BaseException | None = None) -> Response:
        delivery, held = self.delivery, self.held
        if isinstance(delivery, Pending):
            return delivery.finish(value, error)
        assert isinstance(held, HeldLease)
        timeout = self.binding.options.settle_timeout
        return delivery.answer(finish_within(timeout, self.binding.guard, delivery, held, value, error))

    def _answer(self, value: object, failure: BaseException | None) -> Response:
        try:
            return self._finish(value, failure)
        except Exception as error:  # noqa: BLE001 - raised again if it is the application's
            return self.delivery.answer_error(error)

    def _respond(self, answer: Response) -> Iterable[bytes]:
        """Return what the server is to send; it closes what the application returned, after the last byte."""
        try:
            if self.started and self._is_own(answer):
                self.start_response(*self.started)
                return _Closing([answer.body], self._close)
            if not self.binding.reads_body:
                read_rest(self.environ, self.environ["wsgi.input"])
            return _Closing(_send(answer, self.start_response), self._close)
        except BaseException:
            self._close()
            raise

    def _is_own(self, answer: Response) -> bool:
        return not answer.replayed and answer == self._response(answer.body)

    def _pass_on(self, body: bytes, left: Iterator[bytes]) -> Iterable[bytes]:
        self.passing = True
        self.start_response(*self.started)
        return _Passed(self, body, left)

    def end_passed(self, failure: BaseException | None = None) -> None:
        """Record how a response ended that was passed on; the server has it already, whatever the guard answers."""
        value = None
        try:
            if failure is None:
                value = self.delivery.result_of(self._response(b""), sent=True)
            elif isinstance(failure, Exception):
                value, failure = self.delivery.result_of_error(failure), None
        except Exception as error:  # noqa: BLE001 - recorded
            failure = error
        with suppress(Exception):  # the application's own is raised by who calls this
            self._finish(value, failure)


class _Closing:
    """Parts of a response, whose server closes what the application returned.

    Arguments:
        parts: The parts.
        close: Called once.
    """

    def __init__(self, parts: Iterable[bytes], close: Callable[[], None]) -> None:
        self._parts, self.close = parts, close

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._parts)


class _Passed:
    """A response whose parts are passed on as they come; its end is recorded.

    Arguments:
        exchange: Of the request.
        body: What came so far.
        left: The other parts.
    """

    def __init__(self, exchange: _Exchange, body: bytes, left: Iterator[bytes]) -> None:
        self._exchange, self._body, self._left, self._open = exchange, body, left, True

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        if self._body:
            body, self._body = self._body, b""
            return body
        if not self._open:
            raise StopIteration
        try:
            part = self._exchange._next(self._left)
        except BaseException as error:
            self._open = False
            self._exchange.end_passed(error)
            raise
        if part is None:
            self._open = False
            self._exchange.end_passed()
            raise StopIteration
        return part

    def close(self) -> None:
        """Record that the response ended, where its client has gone; the application has done its work by then."""
        try:
            self._exchange._close()
        finally:
            if self._open:
                self._open = False
                self._exchange.end_passed()

    def __del__(self) -> None:
        """Do the same where a middleware has dropped the response, which generators around it do as their client goes.

        In a thread that needs no lock to be started, since the garbage collector may be called wherever one is held.
        """
        if self._open:
            with suppress(RuntimeError):  # the interpreter ends
                _thread.start_new_thread(self.close, ())


def whole(stream: Any, length: int) -> io.BufferedReader:
    """Return a body that its application reads, and that raises `ConnectionResetError` where its client cuts it off.

    Of some servers such a body ends as a whole one does. What is made of a part would be replayed to whom sends it all.

    Arguments:
        stream: The body, as its server or framework gives it.
        length: The bytes that were announced.
    """
    return io.BufferedReader(_Whole(stream, length))


class _Whole(io.RawIOBase):
    def __init__(self, stream: Any, length: int) -> None:
        self._stream, self._length, self._left = stream, length, length

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        most = min(len(buffer), self._left)
        part = self._stream.read(most) if most else b""
        if most and not part:
            raise ConnectionResetError(
                f"Expected {self._length} bytes of body, as announced, got {self._length - self._left}: the client has "
                "gone. It may send the request again."
            )
        buffer[: len(part)] = part
        self._left -= len(part)
        return len(part)


def read_rest(environ: Environ, stream: Any) -> None:
    """Read what is left of a body that no application reads, before its request is answered.

    Servers close the connection of a client that still sends. nginx, which sends on, then answers 502 to a repetition
    whose response is known, and so it does to the next one.

    Arguments:
        environ: As WSGI has it.
        stream: The body, as its server or framework gives it; None where it has none.
    """
    request = request_of(environ, environ)
    if stream is None or not request.is_coming or not (request.length or environ.get("wsgi.input_terminated")):
        return
    until = monotonic() + REST
    with suppress(OSError, ValueError):  # the client has gone; the application has closed it
        while monotonic() < until and stream.read(PART):
            pass


def _send(response: Response, start_response: StartResponse) -> list[bytes]:
    try:
        phrase = HTTPStatus(response.status).phrase
    except ValueError:
        phrase = "Unknown"
    headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in response.sent()]
    start_response(f"{response.status} {phrase}", headers)
    return [response.body]


def request_of(environ: Environ, native: Any, sent: tuple[bytes, bytes] | None = None) -> Request:
    """Return what is read of a request.

    Arguments:
        environ: As WSGI has it.
        native: What its framework has.
        sent: Path and query as they were sent, where these are known (default: what the server has of them).
    """
    path, query = sent or _sent(environ)
    # nginx hands these two on to uWSGI a second time, among the other headers.
    names = {name: name.removeprefix("HTTP_") for name in environ if name.startswith("HTTP_")}
    names = {name: short for name, short in names.items() if short not in ("CONTENT_TYPE", "CONTENT_LENGTH")}
    names |= {name: name for name in ("CONTENT_TYPE", "CONTENT_LENGTH") if environ.get(name)}
    found = [(n.replace("_", "-").lower().encode(), _bytes_of(environ[name])) for name, n in names.items()]
    headers = [(name, value) for name, value in found if value is not None]
    return Request(environ["REQUEST_METHOD"].upper(), path, query, headers, native)


def _bytes_of(value: object) -> bytes | None:
    """Return a header as it was sent; None for what is none, which middlewares of Django put among the others."""
    if isinstance(value, (str, int, UUID)):
        return str(value).encode("latin-1", "backslashreplace")
    return value if isinstance(value, bytes) else None


def _sent(environ: Environ) -> tuple[bytes, bytes]:
    target = environ.get("REQUEST_URI") or environ.get("RAW_URI")
    if target is None:
        target = quote((environ.get("SCRIPT_NAME", "") + environ.get("PATH_INFO", "")).encode("latin-1"))
    return target.partition("?")[0].encode("latin-1"), environ.get("QUERY_STRING", "").encode("latin-1")
