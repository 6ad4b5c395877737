"""The middleware for Django, sync and async: ``MIDDLEWARE``, and the setting ``IDEMPOTENCY_HTTP`` with its options.

Put it after the middlewares that authenticate and limit. What a view commits under ``ATOMIC_REQUESTS`` is committed
before its response is recorded.
"""

from __future__ import annotations

import _thread
import asyncio
import inspect
import re
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain
from time import monotonic
from typing import Any

from ..core.lease import HeldLease, running
from ..errors import ConfigurationError
from ..functions import finish_within
from . import problems
from .asgi import path_of
from .delivery import Fact, HttpBinding, HttpDelivery
from .inside import ENTRY, Pending, pass_by
from .options import INSIDE, UNGUARDED, Options
from .problems import Problem
from .request import Request
from .response import PATIENCE, Response, cookies_of, poll_at
from .wsgi import read_rest, request_of, whole

__all__ = ["IdempotencyMiddleware", "accepted"]

#: Requests that are carried out, also those whose client has gone: asyncio itself forgets tasks that none waits for.
_tasks: set[asyncio.Task[Any]] = set()


class IdempotencyMiddleware:
    """Carry out each request with an Idempotency-Key once, and replay its response.

    The callables of its options get the ``HttpRequest``.

    Arguments:
        get_response: What comes next, as Django has it.

    Raises:
        ConfigurationError: the setting is missing, or an option is wrong.

    Example::

        IDEMPOTENCY_HTTP = {"store": "redis://localhost/1", "scope": lambda request: request.user.pk}
    """

    sync_capable = async_capable = True

    def __init__(self, get_response: Callable[[Any], Any]) -> None:
        from asgiref.sync import iscoroutinefunction, markcoroutinefunction
        from django.conf import settings

        given = getattr(settings, "IDEMPOTENCY_HTTP", None)
        if not isinstance(given, dict):
            raise ConfigurationError(
                f"Expected the setting IDEMPOTENCY_HTTP, a dict of options, got {given!r}: "
                'write IDEMPOTENCY_HTTP = {"store": "redis://localhost/1", "scope": lambda request: request.user.pk}.'
            )
        self.get_response, self.options = get_response, Options.of(given)
        self.binding = HttpBinding(self.options)
        self.is_async = iscoroutinefunction(get_response)
        if self.is_async:
            markcoroutinefunction(self)

    def __call__(self, request: Any) -> Any:
        """Serve a request, or pass on what is none that is guarded."""
        return self._serve_async(request) if self.is_async else self._serve(request)

    # -- before the view -----------------------------------------------------------------------------------------------

    def _given(self, request: Any) -> tuple[Request, str] | None:
        if self.options.scope is INSIDE:
            pass_by(request.META)
        if not self.options.guards(request.method, request.path, request.META.get("SCRIPT_NAME", "").rstrip("/")):
            return None
        scope = getattr(request, "scope", None)  # of ASGI
        sent = None if scope is None else (path_of(scope), request.META["QUERY_STRING"].encode())
        found = request_of(request.META, request, sent)
        key = self.binding.key_of(found)
        return None if key is None else (found, key)

    def _delivery(self, request: Any, found: Request, key: str, account: Any) -> HttpDelivery | Pending | None:
        account = self.binding.account_of(account)
        if account is UNGUARDED:
            return None
        self.binding.check_length(found)
        if account is INSIDE:
            body, outer = self._body(request, found), request.META.get(ENTRY)
            request.META[ENTRY] = pending = Pending(self.binding, found, key, body, outer)
            return pending
        delivery = self.binding.delivery(found, key, account, self._body(request, found))
        return None if delivery.is_running else delivery

    def _body(self, request: Any, found: Request) -> bytes:
        from django.conf import settings
        from django.core.exceptions import RequestDataTooBig
        from django.http import RawPostDataException, UnreadablePostError

        if not self.binding.reads_body:
            if found.length and not hasattr(request, "scope"):  # of ASGI, whose bodies are whole
                self._watch(request, found.length)
            return b""
        most = self.options.request_max_bytes
        try:
            body: bytes = request.body
        except RequestDataTooBig:  # which Django applies to uploads of files too, where the body is read as a whole
            limit = settings.DATA_UPLOAD_MAX_MEMORY_SIZE
            raise problems.too_large(limit, "Django's DATA_UPLOAD_MAX_MEMORY_SIZE") from None
        except UnreadablePostError:
            raise problems.cut_off() from None
        except RawPostDataException as error:  # with which Django names no culprit
            raise ConfigurationError(
                "Expected the body of a request with an idempotency key to be unread, got one that a middleware before "
                "this one has taken apart, as by request.POST of a multipart form. Put that middleware after this one, "
                'or have it read request.body first; or set fingerprint="headers", which compares no bodies.'
            ) from error
        if len(body) > most:
            raise problems.too_large(most)
        if len(body) < (found.length or 0):
            raise problems.cut_off()
        return body

    def _watch(self, request: Any, length: int) -> None:
        """Refuse a body that its client has cut off, where that is read by now; else have its view's reading fail."""
        if not getattr(request, "_read_started", True):
            request._stream = whole(request._stream, length)
        elif hasattr(request, "_body") and len(request._body) < length:
            raise problems.cut_off()

    # -- sync ----------------------------------------------------------------------------------------------------------

    def _serve(self, request: Any) -> Any:
        try:
            if (given := self._given(request)) is None:
                return self.get_response(request)
            delivery = self._delivery(request, *given, self.binding.scope_of(given[0]))
        except Problem as problem:
            return _as_django(problem.response(self.options.docs_url))
        if delivery is None:
            return self.get_response(request)
        if isinstance(delivery, Pending):
            carry_out: Callable[[], Any] = partial(self._carry_out_inside, delivery, request)
        else:
            carry_out = partial(self._carry_out, delivery, request)
        if not (hasattr(request, "scope") and _cancels_threads()):
            return carry_out()
        from asgiref.sync import async_to_sync

        return async_to_sync(_to_its_end)(carry_out)

    def _carry_out_inside(self, pending: Pending, request: Any) -> Any:
        """Call the view, which takes the lease."""
        response: Any = None
        own, failure = Response(0), None
        try:
            with running(pending.slot):
                response = self.get_response(request)
            own = _from_django(response)
        except BaseException as error:  # noqa: BLE001 - recorded, and raised again
            failure = error
        if failure is None and pending.delivery is not None and pending.slot.lease is not None:
            return self._conclude(pending.delivery, pending.slot.lease, response)
        answer = pending.finish(own, failure)
        return response if answer is own else self._instead(answer, request)

    def _carry_out(self, delivery: HttpDelivery, request: Any) -> Any:
        try:
            held = self.binding.guard.begin(delivery)
            if not isinstance(held, HeldLease):
                return self._instead(delivery.answer(held), request)
        except Exception as error:  # noqa: BLE001 - raised again if it is the application's
            return self._instead(delivery.answer_error(error), request)
        response = self._call_view(delivery, held, request)
        return self._conclude(delivery, held, response)

    def _instead(self, answer: Response, request: Any) -> Any:
        """Return what is to be sent in place of a view's response."""
        if not (self.binding.reads_body or hasattr(request, "scope")):  # of ASGI, whose bodies are read by now
            read_rest(request.META, getattr(request, "_stream", None))
        return _as_django(answer)

    def _conclude(self, delivery: HttpDelivery, held: HeldLease, response: Any) -> Any:
        """Record the response of a view, and return what is to be sent."""
        if not held.fence:
            return response
        value: object = None
        failure: BaseException | None = None
        own = Response(0)
        try:
            own = _from_django(response)
            if response.streaming:
                with running(held):
                    parts = _parts_of(response)
                body, left = _gather(_under(held, parts), own, self.options.response_max_bytes)
                if left is not None:
                    end = _End(self, delivery, held, own)
                    response.streaming_content = end.after(chain(body, left))
                    response._resource_closers.append(end)
                    return response
                response.streaming_content, own = iter(body), replace(own, body=b"".join(body))
            value = delivery.result_of(own)
        except Exception as error:  # noqa: BLE001 - recorded, and raised again
            value, failure = delivery.ended_by(error)
        except BaseException as error:  # noqa: BLE001 - recorded, and raised again
            failure = error
        try:
            timeout = self.options.settle_timeout
            answer = delivery.answer(finish_within(timeout, self.binding.guard, delivery, held, value, failure))
        except Exception as error:  # noqa: BLE001 - raised again if it is the application's
            answer = delivery.answer_error(error)
        return response if answer is own else _as_django(answer)

    def _call_view(self, delivery: HttpDelivery, held: HeldLease, request: Any) -> Any:
        try:
            with running(held):
                return self.get_response(request)
        except BaseException as error:  # a server that ends; of all others Django has made a response
            if held.fence:
                self.binding.guard.finish(delivery, held, error=error)
            raise

    # -- async ---------------------------------------------------------------------------------------------------------

    async def _serve_async(self, request: Any) -> Any:
        try:
            if (given := self._given(request)) is None:
                return await self.get_response(request)
            account = await self._scope_of(given[0])
            delivery = self._delivery(request, *given, account)
        except Problem as problem:
            return _as_django(problem.response(self.options.docs_url))
        if delivery is None:
            return await self.get_response(request)
        passed: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()
        task = asyncio.ensure_future(self._carry_out_async(delivery, request, passed))
        _tasks.add(task)
        task.add_done_callback(_tasks.discard)
        try:
            await asyncio.wait([task, passed], return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:  # the client has gone
            await self._end_alone(task, passed)
            raise
        return passed.result().pop() if passed.done() else task.result()

    async def _scope_of(self, found: Request) -> Any:
        from asgiref.sync import sync_to_async
        from django.core.exceptions import SynchronousOnlyOperation

        scope_of: Callable[[Request], Any] = self.binding.scope_of
        try:
            account = scope_of(found)
        except SynchronousOnlyOperation:  # of what reads the database, as request.user does
            account = await sync_to_async(scope_of)(found)
        return await account if inspect.isawaitable(account) else account

    async def _end_alone(self, task: asyncio.Task[Any], passed: asyncio.Future[list[Any]]) -> None:
        """Wait for the end of a request whose client has gone: what it does in threads ends with Django's context."""
        from asgiref.sync import sync_to_async

        await asyncio.wait([task, passed], return_when=asyncio.FIRST_COMPLETED)
        if passed.done():
            demand, response = passed.result()
            passed.result().clear()
            demand.outer_waits = True
            await sync_to_async(response.close)()
        await asyncio.wait([task])

    async def _carry_out_async(
        self, delivery: HttpDelivery | Pending, request: Any, passed: asyncio.Future[list[Any]]
    ) -> Any:
        """Return the response; give one to ``passed`` whose parts are passed on, and wait for its end.

        Its reader alone keeps that response, so that one that is dropped, as a middleware does that fails, has ended.
        """
        found: list[tuple[Any, Response]] = []

        async def body() -> Response | Fact:
            response = await self.get_response(request)
            own = _from_django(response)
            if response.streaming:
                parts, left = await _gather_async(response, own, self.options.response_max_bytes)
                in_loop = hasattr(request, "scope")  # else of WSGI, whose server reads on once this loop has ended
                if left is not None and not in_loop:
                    parts, left = [*parts, *[part async for part in left]], None
                if left is not None:
                    demand = _Demand()
                    reader = _Reader(demand)
                    response.streaming_content = reader.read(parts)
                    response._resource_closers.append(reader)
                    passed.set_result([demand, response])
                    del response, reader, parts
                    await demand.serve(left)
                    return delivery.result_of(own, sent=True)
                own = replace(own, body=b"".join(parts))
                response.streaming_content = _again(parts) if response.is_async and in_loop else iter(parts)
            found.append((response, own))
            return delivery.result_of(own)

        async def ended() -> Response | Fact:
            try:
                return await body()
            except Exception as error:  # noqa: BLE001 - raised again unless it is to be remembered
                return delivery.result_of_error(error)

        try:
            answer = await delivery.response_of(ended)
        except Exception as error:  # noqa: BLE001 - raised again if it is the application's
            if passed.done():  # the server has it already
                return None
            answer = delivery.answer_error(error)
        return found[0][0] if found and answer is found[0][1] else _as_django(answer)


def accepted(result: Any, location: object, *, retry_after: int | None = None) -> Any:
    """Return the response to a request whose work a task does: 202, with a Location where its client may poll.

    Ids are no secrets: whatever serves the location must check that its caller is the one whose request it was.

    Arguments:
        result: What ``apply_async`` or ``delay`` returned, of a task, chain, chord or group. That of a group is saved
            in the result backend.
        location: The URL or path; ``{id}`` in it stands for the id of the result.
        retry_after: Seconds after which the client is to poll (default: it may at once).

    Returns:
        A ``JsonResponse`` of Django.
    """
    body, headers = poll_at(result, location, retry_after)
    from django.http import JsonResponse

    return JsonResponse(body, status=202, headers=headers)


def _cancels_threads() -> bool:
    """Return whether asgiref cancels what a thread waits for; before, it did not find that thread again in a task."""
    import asgiref

    return tuple(map(int, re.findall(r"\d+", asgiref.__version__)[:2])) >= (3, 8)


async def _to_its_end(carry_out: Callable[[], Any]) -> Any:
    """Carry a request out in the thread that waits for this, on ASGI, also if its client goes.

    A middleware that is sync alone, within this one, has both called in a thread. Django cancels the view then as its
    client goes, and asgiref the next coroutine that such a thread waits for: that is this one, and not the view.
    """
    from asgiref.sync import sync_to_async

    task = asyncio.ensure_future(sync_to_async(carry_out)())
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        if not task.cancelled() and task.exception() is None and task.result().streaming:
            await sync_to_async(task.result().close)()
        raise


# -- streams -----------------------------------------------------------------------------------------------------------


def _gather(left: Iterator[bytes], own: Response, most: int) -> tuple[list[bytes], Iterator[bytes] | None]:
    """Return the parts of a stream, and its other parts where they are to be passed on as they come.

    Arguments:
        left: The parts.
        own: The response without them.
        most: Bytes of the largest that is not passed on.
    """
    parts: list[bytes] = []
    until = monotonic() + PATIENCE
    if own.is_stream:
        return parts, left
    for part in left:
        parts.append(part)
        if sum(map(len, parts)) > most or monotonic() > until:
            return parts, left
    return parts, None


def _parts_of(response: Any) -> Iterator[bytes]:
    """Return the parts of a stream, in what does not refer to its response: one that is dropped ends there."""
    if response.is_async:
        return iter(list(response))  # Django makes all of them here
    return map(partial(_encoded, response.charset), response._iterator)


def _under(held: HeldLease, parts: Iterator[bytes]) -> Iterator[bytes]:
    """Yield parts that are made with a lease to be found, which their reader does not find."""
    while True:
        with running(held):
            part = next(parts, None)
        if part is None:
            return
        yield part


async def _gather_async(response: Any, own: Response, most: int) -> tuple[list[bytes], AsyncIterator[bytes] | None]:
    # Of what the response reads, and not of the response: who makes the parts must not keep that.
    encode = partial(_encoded, response.charset)
    if not response.is_async:
        from asgiref.sync import sync_to_async

        # In the thread of the request, as Django itself does: another has other connections to its databases.
        found, rest = await sync_to_async(_gather)(map(encode, response._iterator), own, most)
        return found, None if rest is None else _in_thread(rest)
    parts: list[bytes] = []
    left, until = _mapped(encode, response._iterator), monotonic() + PATIENCE
    if own.is_stream:
        return parts, left
    async for part in left:
        parts.append(part)
        if sum(map(len, parts)) > most or monotonic() > until:
            return parts, left
    return parts, None


def _encoded(charset: str, part: object) -> bytes:
    """Return a part of a body as Django's responses encode it."""
    return bytes(part) if isinstance(part, (bytes, memoryview)) else str(part).encode(charset)


async def _mapped(encode: Callable[[object], bytes], parts: AsyncIterator[object]) -> AsyncIterator[bytes]:
    try:
        async for part in parts:
            yield encode(part)
    finally:
        if (close := getattr(parts, "aclose", None)) is not None:
            await close()


async def _in_thread(parts: Iterator[bytes]) -> AsyncIterator[bytes]:
    from asgiref.sync import sync_to_async

    following = sync_to_async(lambda: next(parts, None))
    while (part := await following()) is not None:
        yield part


def _leave_outer_thread() -> None:
    """Have what this task runs in threads run in the request's from now on.

    A middleware around this one that is not async waits in that thread for this one, and runs there what is to be run,
    until it has the response. Then its executor is of no use, and stays where asgiref looks first.
    """
    from asgiref.sync import AsyncToSync

    AsyncToSync.executors.current = None


async def _again(parts: list[bytes]) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


class _End:
    """The end of a response whose parts are passed on, which is recorded.

    Arguments:
        middleware: The middleware.
        delivery, held: Of the request.
        response: Without its body.
    """

    def __init__(
        self, middleware: IdempotencyMiddleware, delivery: HttpDelivery, held: HeldLease, response: Response
    ) -> None:
        self._middleware, self._delivery, self._held, self._response = middleware, delivery, held, response
        self._open = True

    def after(self, parts: Iterable[bytes]) -> Iterator[bytes]:
        """Yield the parts, and record the end."""
        try:
            yield from parts
        except GeneratorExit:  # its client has gone, or its server, which close the response
            raise
        except BaseException as error:
            self(error)
            raise
        self()

    def __del__(self) -> None:
        """Record the end of a response that was dropped, in a thread that needs no lock to be started."""
        if self._open:
            with suppress(RuntimeError):  # the interpreter ends
                _thread.start_new_thread(self, ())

    def __call__(self, failure: BaseException | None = None) -> None:
        """Record how it ended, once; a client that has gone has had what was done."""
        if not self._open:
            return
        self._open, value = False, None
        try:
            if failure is None:
                value = self._delivery.result_of(self._response, sent=True)
        except Exception as error:  # noqa: BLE001 - recorded
            failure = error
        if isinstance(failure, Exception):
            value, failure = self._delivery.ended_by(failure)
        middleware = self._middleware
        with suppress(Exception):  # the view's own is raised by who calls this
            timeout = middleware.options.settle_timeout
            finish_within(timeout, middleware.binding.guard, self._delivery, self._held, value, failure)


class _Demand:
    """What the reader of a response asks for, one part after the other, of the task that makes them.

    That task makes them all: a time limit in a generator, or a group of tasks, belongs to the task that has begun it.
    """

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._asked: asyncio.Queue[asyncio.Future[bytes | None] | None] = asyncio.Queue()
        self._making: asyncio.Task[Any] | None = None
        self._closed = False
        #: whether a middleware around this one that is not async goes on to wait, as the client has gone
        self.outer_waits = False
        #: once nothing is made any more, and what made the parts has cleaned up
        self.ended = asyncio.Event()

    async def next_part(self) -> bytes | None:
        """Return the next part, None at the end; raise what is raised in its place."""
        if self.ended.is_set():  # before the last part: to return None would pass the rest off as all
            raise asyncio.CancelledError
        part: asyncio.Future[bytes | None] = self.loop.create_future()
        self._asked.put_nowait(part)
        return await part

    async def serve(self, parts: AsyncIterator[bytes]) -> None:
        """Make the parts that are asked for, until the end or until the reader has gone; raise what they raise."""
        try:
            await self._serve(parts)
        finally:
            self.ended.set()

    async def _serve(self, parts: AsyncIterator[bytes]) -> None:
        try:
            asked = await self._asked.get()
        finally:
            if not self.outer_waits:
                _leave_outer_thread()
        while asked is not None:
            self._making = asyncio.current_task()
            try:
                part = await anext(parts, None)
            except BaseException as error:
                if self._closed and isinstance(error, asyncio.CancelledError):
                    break
                if not asked.done():
                    asked.set_exception(error)
                raise
            finally:
                self._making = None
            if not asked.done():
                asked.set_result(part)
            if part is None:
                return
            asked = await self._asked.get()
        if (close := getattr(parts, "aclose", None)) is not None:
            await close()

    def close(self) -> None:
        """Make no more, and break off what is being made, as Django does when its client has gone."""
        if not self._closed:
            self._closed = True
            self._asked.put_nowait(None)
            if self._making is not None:
                self._making.cancel()


class _Reader:
    """The reader of a response whose parts are passed on.

    Arguments:
        demand: Where it asks for them.
    """

    def __init__(self, demand: _Demand) -> None:
        self._demand = demand

    async def read(self, parts: list[bytes]) -> AsyncIterator[bytes]:
        """Yield the parts, and those that are left."""
        try:
            for part in parts:
                yield part
            while (following := await self._demand.next_part()) is not None:
                yield following
        finally:
            # In the time of the request: Django ends the thread of its queries with it.
            self._demand.close()
            await self._demand.ended.wait()

    def __call__(self) -> None:
        """Ask for no more; Django closes a response in any thread."""
        with suppress(RuntimeError):  # the loop has ended
            self._demand.loop.call_soon_threadsafe(self._demand.close)

    def __del__(self) -> None:
        """Do the same where the response was dropped."""
        self()


def _from_django(response: Any) -> Response:
    headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in response.items()]
    headers += cookies_of(response)
    return Response(response.status_code, tuple(headers), b"" if response.streaming else response.content)


def _as_django(response: Response) -> Any:
    from django.http import HttpResponse

    answer = HttpResponse(response.body, status=response.status)
    del answer.headers["Content-Type"]
    for name, value in response.sent():
        if name.lower() == b"set-cookie":  # of which there may be several
            answer.cookies.load(value.decode("latin-1"))
        else:
            answer.headers[name.decode("latin-1")] = value.decode("latin-1")
    return answer
