"""What `begin` does, called rightly and wrongly, within the test's own process."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import Depends, FastAPI
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.requests import Request

from celery_idempotent import current_lease, events, idempotent
from celery_idempotent.errors import ConfigurationError
from celery_idempotent.http import INSIDE, UNGUARDED, Answered, IdempotencyMiddleware, abegin, begin, wsgi
from celery_idempotent.stores import Reason, Release
from celery_idempotent.stores.memory import MemoryStore
from tests.support.http.inproc import request_asgi, request_wsgi
from tests.support.waiting import wait_until

DOWN = "redis://127.0.0.1:1/0"
START = {"type": "http.response.start", "status": 201, "headers": []}
LAST = {"type": "http.response.body", "body": b"done"}


class View:
    """An application for WSGI and ASGI that does ``work`` with its request, and counts its runs."""

    def __init__(self, work: Callable[[Any], Any], status: int = 201) -> None:
        self.work, self.status, self.runs = work, status, 0
        self.found: list[Any] = []

    def __call__(self, environ: Any, start_response: Any) -> Iterator[bytes]:
        self.found.append(self.work(environ))
        self.runs += 1
        start_response(f"{self.status} X", [])
        yield b"done"

    async def asgi(self, scope: Any, receive: Any, send: Any) -> None:
        self.found.append(await self.work(scope))
        self.runs += 1
        await send({**START, "status": self.status})
        await send(LAST)


def on_wsgi(work: Callable[[Any], Any], *, status: int = 201, **options: Any) -> tuple[View, Any]:
    view = View(work, status)
    given = {"store": MemoryStore(), "scope": INSIDE, **options}
    return view, wsgi.IdempotencyMiddleware(view, **given)


def on_asgi(work: Callable[[Any], Any], *, status: int = 201, **options: Any) -> tuple[View, Any]:
    view = View(work, status)
    given = {"store": MemoryStore(), "scope": INSIDE, **options}
    return view, IdempotencyMiddleware(view.asgi, **given)


def statuses(app: Any, times: int = 2, **more: Any) -> list[int]:
    send = request_wsgi if isinstance(app, wsgi.IdempotencyMiddleware) else run_asgi
    return [send(app, **more).status for _ in range(times)]


def run_asgi(app: Any, **more: Any) -> Any:
    return asyncio.run(request_asgi(app, **more))


async def abegin_in_its_thread(scope: Any, account: Any) -> Any:
    return await asyncio.to_thread(begin, scope, account)


# -- the lease ---------------------------------------------------------------------------------------------------------


def test_the_lease_is_the_views_from_begin_on_wherever_it_was_taken() -> None:
    async def work(scope: Any) -> Any:
        before = current_lease()
        lease = await abegin_in_its_thread(scope, "anna")
        return before, lease, current_lease(), await asyncio.to_thread(current_lease)

    view, app = on_asgi(work)
    assert statuses(app) == [201, 201]
    ((before, lease, *seen),) = view.found
    assert before is None
    assert lease is not None
    assert all(each is lease for each in seen)


@pytest.mark.parametrize("account", [None, "", type("AnonymousUser", (), {"is_authenticated": False})()])
def test_a_caller_who_is_not_known_is_refused(account: Any) -> None:
    for make, work in ((on_wsgi, partial(begin, account=account)), (on_asgi, partial(abegin, account=account))):
        view, app = make(work)
        assert statuses(app) == [401, 401]
        assert view.runs == 0


def test_a_request_may_pass_unguarded_and_so_do_those_that_are_not_guarded(caplog: pytest.LogCaptureFixture) -> None:
    for make, work in ((on_wsgi, begin), (on_asgi, abegin)):
        view, app = make(partial(work, account=UNGUARDED))
        assert statuses(app) == [201, 201]
        view, app = make(partial(work, account="anna"), exempt=["/orders"])
        assert statuses(app) == [201, 201]
        view, app = make(partial(work, account="anna"))
        assert statuses(app, key=None) == [201, 201]
        assert (view.runs, view.found) == (2, [None, None])
        view, app = make(partial(work, account="anna"), required=True)
        assert statuses(app, key=None) == [400, 400]
        assert view.runs == 0
    assert not caplog.text


def test_a_websocket_has_nothing_to_begin() -> None:
    found = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        found.append(await abegin(scope, "anna"))

    middleware: Any = IdempotencyMiddleware(app, store="memory://", scope=INSIDE)
    asyncio.run(middleware({"type": "websocket", "path": "/"}, None, None))
    assert found == [None]


def test_the_lease_is_renewed_from_begin_on() -> None:
    def work(environ: Any) -> None:
        lease = begin(environ, "anna")
        assert lease is not None
        wait_until(lambda: lease.renewals > 1)

    assert statuses(on_wsgi(work, lease_ttl=0.6)[1], 1) == [201]


@pytest.mark.parametrize("kind", ["middleware", "begin", "abegin", "to_thread"])
def test_a_view_does_no_work_whose_lease_was_taken_over_before_it_began(kind: str) -> None:
    """Its process was stopped meanwhile, or a hook took too long."""

    def overtake(event: events.Event) -> None:
        [held] = app.binding.guard.heartbeat.holdings()
        held.store.release(held.lease, Release(Reason.FAILED))
        held.store.acquire(replace(held.lease.claim, owner="another", token="another"))
        held.deadline = 0.0

    async def abegun(scope: Any) -> None:
        await abegin(scope, "anna")

    works: dict[str, Any] = {"abegin": abegun, "to_thread": lambda scope: abegin_in_its_thread(scope, "anna")}
    if kind in works:
        view, app = on_asgi(works[kind])
    elif kind == "begin":
        view, app = on_wsgi(lambda environ: begin(environ, "anna"))
    else:
        view, app = on_wsgi(lambda environ: None, scope=None)
    events.add_hook(overtake, {events.Acquired})
    try:
        assert statuses(app, 1) == [409]
    finally:
        events.remove_hook(overtake)
    assert view.runs == 0


def test_tasks_that_are_published_after_begin_have_the_ids_of_the_request() -> None:
    @idempotent(store=MemoryStore(), key="order", name="place")
    def place(order: str) -> str:
        return derived()

    def derived() -> str:
        lease = current_lease()
        assert lease is not None
        assert lease.task_ids is not None
        return lease.task_ids.derive("ship")

    def work(environ: Any) -> tuple[str, str]:
        begin(environ, "anna")
        return derived(), place(f"order {len(view.found)}")

    view, app = on_wsgi(work, status=500)
    assert statuses(app) == [500, 500]
    (ids, inner), (again, _) = view.found
    assert (ids, ids != inner) == (again, True)


def test_a_coroutine_may_begin_in_a_wsgi_application() -> None:
    view, app = on_wsgi(lambda environ: asyncio.run(abegin(environ, "anna")))  # type: ignore[arg-type]
    assert statuses(app) == [201, 201]
    assert (view.runs, view.found[0].fence > 0) == (1, True)


@pytest.mark.parametrize("name", ["environ", "META", pytest.param("env", id="env-of-falcon")])
def test_begin_takes_the_requests_of_frameworks(name: str) -> None:
    view, app = on_wsgi(lambda environ: begin(SimpleNamespace(**{name: environ}), "anna"))
    assert statuses(app) == [201, 201]
    assert (view.runs, view.found[0].fence > 0) == (1, True)


def test_the_response_may_be_settled_in_the_views_transaction(tmp_path: Path) -> None:
    def work(environ: Any) -> None:
        lease = begin(environ, "anna")
        with closing(sqlite3.connect(tmp_path / "shop.db")) as connection, connection:
            connection.execute("CREATE TABLE orders (id INTEGER)")
            connection.execute("INSERT INTO orders VALUES (1)")
            assert lease is not None
            lease.settle((202, {}, "settled"), using=connection)

    view, app = on_wsgi(work, store=f"sqlite:///{tmp_path}/shop.db")
    assert [(reply.status, reply.body) for reply in (request_wsgi(app), request_wsgi(app))] == [(202, b"settled")] * 2
    assert view.runs == 1


@pytest.mark.parametrize("settle_at", ["response", "return"])
def test_a_view_that_fails_leaves_the_key_free(settle_at: str) -> None:
    for make, work in ((on_wsgi, begin), (on_asgi, abegin)):
        view, app = make(partial(work, account="anna"), status=500, settle_at=settle_at)
        assert statuses(app) == [500, 500]
        view.status = 201
        assert statuses(app) == [201, 201]
        assert view.runs == 3


def test_without_a_store_nothing_runs_or_all_do() -> None:
    for make, work in ((on_wsgi, begin), (on_asgi, abegin)):
        view, app = make(partial(work, account="anna"), store=DOWN)
        assert statuses(app, 1) == [503]
        assert view.runs == 0
        view, app = make(partial(work, account="anna"), store=DOWN, on_store_error="run")
        assert statuses(app) == [201, 201]
        assert [lease.fence for lease in view.found] == [0, 0]


# -- begin, called twice or wrongly ------------------------------------------------------------------------------------


def test_begin_may_be_called_again_for_the_same_account() -> None:
    def twice(environ: Any) -> Any:
        return begin(environ, "anna") is begin(environ, "anna")

    async def atwice(scope: Any) -> Any:
        return await abegin(scope, "anna") is await abegin(scope, "anna")

    for view, app in (on_wsgi(twice), on_asgi(atwice)):
        assert statuses(app) == [201, 201]
        assert view.found == [True]


def test_what_was_answered_once_is_answered_again() -> None:
    def stubborn(environ: Any) -> None:
        for _ in range(2):
            with pytest.raises(Answered):
                begin(environ, None)
        begin(environ, None)

    assert statuses(on_wsgi(stubborn)[1], 1) == [401]


def test_begin_for_another_account_is_an_error() -> None:
    def two(environ: Any) -> None:
        begin(environ, "anna")
        with pytest.raises(ConfigurationError, match="account of the first begin"):
            begin(environ, "ben")

    assert statuses(on_wsgi(two)[1], 1) == [201]


def test_begin_while_another_begins_is_an_error() -> None:
    async def work(scope: Any) -> None:
        found = await asyncio.gather(abegin(scope, "anna"), abegin(scope, "anna"), return_exceptions=True)
        assert "one begin() at a time" in str(found[1])
        assert found[0] is current_lease()

    assert statuses(on_asgi(work)[1], 1) == [201]


def test_begin_in_an_event_loop_names_the_form_for_coroutines() -> None:
    async def work(scope: Any) -> None:
        begin(scope, "anna")

    _, app = on_asgi(work)
    with pytest.raises(ConfigurationError, match="await abegin"):
        statuses(app, 1)


def test_begin_without_the_middleware_names_it() -> None:
    for request in ({}, object(), Request({"type": "http"})):
        with pytest.raises(ConfigurationError, match="add the middleware with scope=INSIDE"):
            begin(request, "anna")
    _, app = on_wsgi(partial(begin, account="anna"), scope=None)
    with pytest.raises(ConfigurationError, match="mounted in one for ASGI, put the middleware for WSGI"):
        statuses(app, 1)


def test_an_account_that_is_no_id_is_an_error_and_its_id_is_taken_after_it() -> None:
    def work(environ: Any) -> Any:
        with pytest.raises(ConfigurationError, match="return its id"):
            begin(environ, object())
        return begin(environ, 7)

    view, app = on_wsgi(work)
    assert statuses(app) == [201, 201]
    assert view.runs == 1


def test_begin_after_the_response_has_begun_is_an_error() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send(START)
        with pytest.raises(ConfigurationError, match="before the response begins"):
            await abegin(scope, "anna")
        await send(LAST)

    def late(environ: Any, start_response: Any) -> list[bytes]:
        start_response("201 Created", [])
        with pytest.raises(ConfigurationError, match="before the response begins"):
            begin(environ, "anna")
        return [b"done"]

    for middleware in (
        IdempotencyMiddleware(app, store=MemoryStore(), scope=INSIDE),
        wsgi.IdempotencyMiddleware(late, store=MemoryStore(), scope=INSIDE),
    ):
        assert statuses(middleware) == [201, 201]


def test_a_lease_that_comes_when_its_view_has_ended_is_given_back() -> None:
    store, gate = MemoryStore(), threading.Event()
    acquire = store.acquire
    with ThreadPoolExecutor(1) as threads:
        lost = []

        def slow(claim: Any) -> Any:
            found = acquire(claim)
            gate.wait(10)
            return found

        def work(environ: Any) -> None:
            lost.append(threads.submit(begin, environ, "anna"))
            wait_until(lambda: environ["celery_idempotent.pending"]._taking)

        store.acquire = slow  # type: ignore[method-assign]
        assert statuses(on_wsgi(work, store=store)[1], 1) == [201]
        gate.set()
        assert "before the response begins" in str(lost[0].exception(10))
    assert statuses(on_wsgi(partial(begin, account="anna"), store=store)[1], 1) == [201]


def test_a_begin_that_is_cancelled_may_be_called_again() -> None:
    async def work(scope: Any) -> Any:
        task = asyncio.ensure_future(abegin(scope, "anna"))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        return await abegin(scope, "anna")

    view, app = on_asgi(work, on_conflict="wait")
    assert statuses(app) == [201, 201]
    assert view.runs == 1


# -- what becomes of Answered ------------------------------------------------------------------------------------------


async def call_next(request: Request, following: Any) -> Any:
    return await following(request)


@pytest.mark.parametrize("inner", [[], [Middleware(BaseHTTPMiddleware, dispatch=call_next)]], ids=["alone", "grouped"])
def test_the_exit_stack_of_fastapi_is_closed(inner: list[Middleware]) -> None:
    app, log = FastAPI(middleware=inner), []

    async def session() -> AsyncIterator[str]:
        try:
            yield "session"
        except BaseException as error:
            log.append(type(error).__name__)
            raise
        finally:
            log.append("closed")

    def thread() -> Iterator[str]:
        try:
            yield "thread"
        finally:
            log.append("closed in a thread")

    @app.post("/orders", dependencies=[Depends(session), Depends(thread)])
    def place_order(request: Request) -> None:
        begin(request, "anna")
        log.append("run")

    app.add_middleware(IdempotencyMiddleware, store=MemoryStore(), scope=INSIDE)
    assert statuses(app) == [200, 200]
    assert log[:3] == ["run", "closed in a thread", "closed"]
    assert sorted(log[3:]) == ["Answered", "closed", "closed in a thread"]


def cleaning_up(environ: Any) -> None:
    try:
        begin(environ, None)
    finally:
        raise ValueError("while cleaning up")


def going_on(environ: Any) -> None:
    with pytest.raises(Answered):
        begin(environ, None)


async def grouped(scope: Any) -> None:
    try:
        await abegin(scope, None)
    except Answered as error:
        group = ValueError()
        group.exceptions = [RuntimeError(), error]  # type: ignore[attr-defined]
        raise group from None


@pytest.mark.parametrize(
    ("make", "work", "logged"),
    [
        (on_wsgi, cleaning_up, "Discarded what became of Answered: ValueError('while cleaning up')"),
        (on_wsgi, going_on, "The view for POST /orders went on after begin() had raised Answered"),
        (on_asgi, grouped, ""),
    ],
)
def test_what_becomes_of_answered_is_discarded_and_what_is_wrong_with_it_logged(
    make: Any, work: Any, logged: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert statuses(make(work)[1], 1) == [401]
    assert logged in caplog.text if logged else not caplog.text


def test_an_application_that_swallows_answered_and_responds_nothing_is_answered(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        with pytest.raises(Answered):
            await abegin(scope, None)

    assert statuses(IdempotencyMiddleware(app, store=MemoryStore(), scope=INSIDE), 1) == [401]
    assert "went on after begin()" in caplog.text


def test_handlers_of_errors_do_not_see_answered(caplog: pytest.LogCaptureFixture) -> None:
    handled: list[Exception] = []

    def work(environ: Any) -> None:
        try:
            begin(environ, None)
        except Exception as error:  # noqa: BLE001 - as views do
            handled.append(error)

    app = FastAPI()

    @app.post("/orders")
    async def place_order(request: Request) -> None:
        await abegin(request, None)

    @app.exception_handler(Exception)
    async def handle(request: Request, error: Exception) -> None:
        handled.append(error)

    app.add_middleware(IdempotencyMiddleware, store=MemoryStore(), scope=INSIDE)
    for each in (on_wsgi(work)[1], app):
        assert statuses(each, 1) == [401]
    assert not handled
    assert not caplog.text


def test_the_end_of_a_process_is_no_consequence_of_answered() -> None:
    def leave(environ: Any) -> None:
        try:
            begin(environ, None)
        finally:
            raise SystemExit

    with pytest.raises(SystemExit):
        statuses(on_wsgi(leave)[1], 1)


# -- several middlewares -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("inner", "outer"),
    [
        ({}, {"scope": lambda request: "anna"}),
        ({"scope": lambda request: "anna"}, {}),
        ({}, {}),
        ({}, {"name": "outer"}),
        ({"exempt": ["/orders"]}, {}),
        ({}, {"exempt": ["/orders"]}),
    ],
)
def test_a_request_that_passes_two_middlewares_runs_once(
    inner: dict[str, Any], outer: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    for make, kind, work in (
        (on_wsgi, wsgi.IdempotencyMiddleware, begin),
        (on_asgi, IdempotencyMiddleware, abegin),
        (on_asgi, IdempotencyMiddleware, abegin_in_its_thread),
    ):
        store = MemoryStore()
        view, app = make(partial(work, account="anna"), store=store, **inner)
        around = kind(app, **{"store": store, "scope": INSIDE, **outer})
        assert statuses(around, 3) == [201, 201, 201]
        assert [lease is not None for lease in view.found] == [True]
    assert not caplog.text


# -- a view that never begins ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("status", "is_error"), [(201, True), (403, False)])
def test_a_view_that_does_work_and_never_begins_is_an_error(
    status: int, is_error: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def nothing(scope: Any) -> None:
        pass

    for view, app in (on_wsgi(lambda environ: None, status=status), on_asgi(nothing, status=status)):
        caplog.clear()
        assert statuses(app) == [status, status]
        assert view.runs == 2
        assert ("the view for POST /orders did not call begin(request, account)" in caplog.text) == is_error


def test_an_error_of_a_view_that_has_not_begun_is_its_servers_to_report() -> None:
    def work(environ: Any) -> None:
        raise ValueError("before it began")

    async def awork(scope: Any) -> None:
        work(scope)

    for _, app in (on_wsgi(work), on_asgi(awork)):
        with pytest.raises(ValueError, match="before it began"):
            statuses(app, 1)


def test_a_response_without_a_lease_is_not_held_back_and_ends_with_its_client() -> None:
    seen: list[Any] = []

    async def stream(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send(START)
        await send({**LAST, "more_body": True})
        seen.append((await receive())["type"])

    async def exchange() -> None:
        given = [{"type": "http.request", "body": b"x"}, {"type": "http.disconnect"}]
        sent: list[Any] = []

        async def receive() -> Any:
            assert len(given) == 2 or len(sent) == 2
            return given.pop(0)

        async def send(message: Any) -> None:
            sent.append(message)

        headers = [(b"idempotency-key", b"k")]
        scope = {"type": "http", "method": "POST", "path": "/", "headers": headers}
        await IdempotencyMiddleware(stream, store=MemoryStore(), scope=INSIDE)(scope, receive, send)

    asyncio.run(exchange())
    assert seen == ["http.disconnect"]

    def parts(environ: Any, start_response: Any) -> Iterator[bytes]:
        start_response("200 OK", [])
        yield b"first"
        seen.append("second")
        yield b"second"

    middleware = wsgi.IdempotencyMiddleware(parts, store=MemoryStore(), scope=INSIDE)
    environ = {"REQUEST_METHOD": "POST", "PATH_INFO": "/", "HTTP_IDEMPOTENCY_KEY": "k"}
    got = iter(middleware(environ, lambda *_: None))
    assert (next(got), "second" in seen) == (b"first", False)
    assert list(got) == [b"second"]
