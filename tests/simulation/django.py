"""A site of Django's: its handlers and transactions, with views that charge, behind the library's middleware."""

from __future__ import annotations

import asyncio
import gc
import io
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import pytest
from asgiref.sync import markcoroutinefunction, sync_to_async
from django import db
from django.conf import settings
from django.core.handlers import asgi
from django.core.handlers import base as handlers
from django.core.handlers.wsgi import WSGIHandler
from django.db import OperationalError, connection, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.dummy.base import DatabaseWrapper as Dummy
from django.db.utils import ConnectionHandler
from django.http import HttpResponse, StreamingHttpResponse
from django.http import response as responses
from django.urls import path
from greenlet import getcurrent

from celery_idempotent import current_lease
from celery_idempotent.http import INSIDE, abegin, begin
from celery_idempotent.http import django as middleware
from celery_idempotent.stores import Lease, Outcome

from . import celery, transactions
from .asgiref import Local, thread
from .celery import INFINITE, PATCHES

#: The most that is kept of a response; a part of a large one is larger.
KEPT_BYTES = 40
#: What a response is: complete, or a stream of that kind.
STREAMS = ("", "", "", "short", "large", "slow", "events")


class Database(transactions.Database):
    """The database of the site, in which the middleware may keep its records."""

    def settle_within(self, lease: Lease, outcome: Outcome, *, ttl: float, using: Any) -> None:
        super().settle_within(lease, outcome, ttl=ttl, using=using.connection)


class Transaction(transactions.Transaction):
    """A transaction, and the run that it is of."""

    run: Any = None


class Connection(BaseDatabaseWrapper):
    """A connection to the database, whose commit and its reply are steps that may be lost."""

    vendor = display_name = "simulated"
    Database = db
    client_class, creation_class, features_class = Dummy.client_class, Dummy.creation_class, Dummy.features_class
    introspection_class, ops_class = Dummy.introspection_class, Dummy.ops_class

    def get_connection_params(self) -> dict[str, Any]:
        return {}

    def get_new_connection(self, params: Any) -> Transaction:
        return Transaction(celery.current.store)

    def init_connection_state(self) -> None: ...

    def _set_autocommit(self, autocommit: bool) -> None: ...

    def is_usable(self) -> bool:
        return True

    def _close(self) -> None:
        self.connection.rollback()

    def _rollback(self) -> None:
        self.connection.rollback()

    def _commit(self) -> None:
        run = self.connection.run
        try:
            self._send_commit(run)
        except BaseException:
            run.ending = "failed"
            self.connection.rollback()  # of what is not committed
            raise

    def _send_commit(self, run: Any) -> None:
        simulation, host = celery.current, getcurrent().host
        world, choices = simulation.world, simulation.choices
        world.step()
        fate = simulation.fate_of_call(host)
        host.failures += fate not in ("", "slow reply")
        if fate in ("request", "late"):
            world.sleep(choices.one_of("a lost request takes", [0.0, 0.0, 1.0]), "the commit is lost")
            raise OperationalError("the database does not answer")
        self.connection.commit()
        world.sleep(2.0 if fate == "slow reply" else 0.0, f"run {run.number} commits")
        if fate == "reply":
            raise OperationalError("the database's reply was lost")


class Connections(ConnectionHandler):
    """The connections of each thread."""

    def __init__(self) -> None:
        super().__init__({"default": {"ENGINE": "", "NAME": ""}})
        self._connections = Local()

    def all(self, initialized_only: bool = False) -> list[Any]:
        law = celery.current.law
        if getattr(law, "site", None) is not None:  # else the library looks for a transaction
            law.site.own_thread(law.working_for(getcurrent()))  # as each request begins
        return list(super().all(initialized_only))

    def create_connection(self, alias: str) -> Connection:
        return Connection(self.settings[alias], alias)


class Middleware(middleware.IdempotencyMiddleware):
    """The library's middleware, whose guard uses the store as each server does."""

    def __init__(self, get_response: Any) -> None:
        super().__init__(get_response)
        celery.current.law.install(self.binding)
        celery.current.law.site.middleware = self


class Outer:
    """A middleware around that, of which an event loop waits in a thread."""

    sync_capable, async_capable = True, False

    def __init__(self, get_response: Any) -> None:
        self.get_response = get_response

    def __call__(self, request: Any) -> Any:
        response = self.get_response(request)
        try:
            celery.current.world.step()
        except SystemExit:  # its server ends
            celery.current.law.site.drop()
            raise
        celery.current.law.site.pass_on()
        return response


class AsyncOuter(Outer):
    """Likewise, of which it does not."""

    sync_capable, async_capable = False, True

    def __init__(self, get_response: Any) -> None:
        super().__init__(get_response)
        markcoroutinefunction(self)

    async def __call__(self, request: Any) -> Any:
        response = await self.get_response(request)
        try:
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            celery.current.law.site.drop()
            raise
        celery.current.law.site.pass_on()
        return response


AROUND = {"": [], "sync": [f"{__name__}.Outer"], "async": [f"{__name__}.AsyncOuter"]}


class Site:
    """What a schedule has of Django.

    Arguments:
        law: Its law.
        options: Of the middleware.
        asynchronous: Whether its servers have an event loop.
    """

    def __init__(self, law: Any, options: dict[str, Any], *, asynchronous: bool) -> None:
        self.law, self.choices, self.asynchronous = law, law.choices, asynchronous
        one_of = self.choices.one_of
        self.is_async = one_of("a view is", ["sync", "async"] if asynchronous else ["sync"] * 5 + ["async"]) == "async"
        self.path = "/async" if self.is_async else "/sync"
        self.stream = one_of("its response is", STREAMS)
        self.inside = one_of("the view begins", [False, False, True])
        self.is_atomic = not self.is_async and one_of("atomic", [True, True, False])
        self.settles = self.is_atomic and not self.stream and one_of("the view settles", [False, True])
        self.queries = self.is_async and one_of("the view queries", [False, True])
        self.late = one_of("fails on commit", [0, 0, 0.2]) if self.is_atomic else 0
        #: how often a client leaves in mid-stream
        self.leaves = one_of("clients leave", [0, 0.1, 0.3]) if self.stream and not asynchronous else 0
        self.outer_fails, self.failures_left = one_of("a middleware fails", [0, 0, 0.2]), 5
        if self.stream and self.is_async and not asynchronous:
            self.outer_fails = 0  # Django keeps such a response that is dropped, until the collector comes
        self.around = one_of("around it", ["", "sync", "async"] if asynchronous else ["", "sync"])
        scope = INSIDE if self.inside else None
        #: when Python's collector comes next, without which Django keeps what a middleware had that failed
        self.collects_at = INFINITE
        gc.freeze()
        gc.disable()
        law.site = self
        settings.IDEMPOTENCY_HTTP = {**options, "scope": scope, "response_max_bytes": KEPT_BYTES}
        settings.MIDDLEWARE = [*AROUND[self.around], f"{__name__}.Middleware"]
        db.connections.settings["default"]["ATOMIC_REQUESTS"] = self.is_atomic
        self.handler = asgi.ASGIHandler() if asynchronous else WSGIHandler()
        #: by request: its thread
        self.threads: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
        #: by key: the runs whose effects were committed
        self.committed: dict[str, list[int]] = defaultdict(list)

    # -- views ---------------------------------------------------------------------------------------------------------

    def view(self, request: Any) -> Any:
        """Charge a customer."""
        world, law, choices, key = self.law.world, self.law, self.choices, request.headers["idempotency-key"]
        if self.inside:
            begin(request, "anna")
        run = law.begin(key)
        self.check_thread(run)
        with self.ending(run):
            world.sleep(choices.one_of(f"{key}: before", law.long), f"run {run.number} of {key} begins")
            law.charge(run)
            if self.is_atomic:
                self.write(run)
            world.sleep(choices.one_of(f"{key}: after", law.long), f"run {run.number} has charged {key}")
            if (refusal := self.refusal(run)) is not None:
                return refusal
            if not self.stream:
                law.returned(run)
                return HttpResponse(f"receipt {run.number}", status=201)
        return self.streamed(run, self.parts(run))

    async def view_async(self, request: Any) -> Any:
        """Charge a customer."""
        law, choices, key = self.law, self.choices, request.headers["idempotency-key"]
        if self.inside:
            await abegin(request, "anna")
        run = law.begin(key)
        with self.ending(run):
            await self.query(run)
            await asyncio.sleep(choices.one_of(f"{key}: before", law.long))
            law.charge(run)
            await asyncio.sleep(choices.one_of(f"{key}: after", law.long))
            await self.query(run)
            if (refusal := self.refusal(run)) is not None:
                return refusal
            if not self.stream:
                law.returned(run)
                return HttpResponse(f"receipt {run.number}", status=201)
        return self.streamed(run, self.parts_async(run))

    @contextmanager
    def ending(self, run: Any, *, is_stream: bool = False) -> Iterator[None]:
        """Note how a view ends, or its stream."""
        try:
            yield
        except BaseException as error:
            gone = isinstance(error, (GeneratorExit, asyncio.CancelledError))
            # The client of a stream has had what was done.
            run.ending = run.ending or ("left" if gone and is_stream else "failed")
            if isinstance(error, asyncio.CancelledError) and not (is_stream or run.process.cut_off):
                self.law.fail(f"run {run.number} is cancelled, and its server goes on")
            raise

    async def query(self, run: Any) -> None:
        """Query a database from a coroutine."""
        if self.queries:
            await sync_to_async(self.check_thread)(run)

    def write(self, run: Any) -> None:
        """Write the effect of a run, in its transaction."""
        connection.ensure_connection()
        pending: Transaction = connection.connection
        pending.run = run
        pending.effects.append(lambda: self.committed[run.key].append(run.number))
        transaction.on_commit(lambda: self.on_commit(run))
        if self.settles:
            run.held.settle((201, {"Content-Type": "text/plain"}, f"receipt {run.number}"), using=connection)

    def on_commit(self, run: Any) -> None:
        """Publish, say, what the transaction has done."""
        self.check_lease(run)
        try:
            self.law.world.step()
            if self.choices.chance(f"{run.key}: fails on commit", self.late):
                raise ValueError("on commit")
        except BaseException:
            run.ending = "returned" if self.settles else "failed"
            raise

    def refusal(self, run: Any) -> Any:
        """Return a response that says no; raise, perhaps; None to go on."""
        if not self.choices.chance(f"{run.key}: fails", self.law.fails):
            return None
        if self.choices.chance(f"{run.key}: raises", 0.5):
            raise ValueError("no")
        self.law.returned(run)
        run.ending = run.ending if self.settles else "failed"
        return HttpResponse("later", status=503)

    def streamed(self, run: Any, parts: Any) -> Any:
        run.ending = "streams"
        kind = "text/event-stream" if self.stream == "events" else "text/plain"
        return StreamingHttpResponse(parts, status=201, content_type=kind)

    def parts(self, run: Any) -> Iterator[bytes]:
        """Yield the parts of a response."""
        run.ending = ""
        with self.ending(run, is_stream=True):
            for part in self.each_part(run):
                self.law.world.sleep(self.pause())
                self.check_lease(run)
                self.check_thread(run)
                yield part
            self.break_off(run)
            if self.asynchronous:  # whose end is sent before it is recorded
                run.ending = "returned"
            else:
                self.law.returned(run)

    async def parts_async(self, run: Any) -> AsyncIterator[bytes]:
        run.ending = ""
        try:
            with self.ending(run, is_stream=True):
                for part in self.each_part(run):
                    await asyncio.sleep(self.pause())
                    self.check_lease(run)
                    yield part
                self.break_off(run)
                run.ending = "returned"
        finally:
            try:
                for _ in range(3):
                    await self.query(run)
            except asyncio.CancelledError:  # its client has gone, whatever it has raised before
                run.ending = "left"
                raise

    def each_part(self, run: Any) -> list[bytes]:
        more = b"." * 50 if self.stream == "large" else b""
        return [b"receipt ", b"%d" % run.number + more, more]

    def pause(self) -> float:
        return self.choices.one_of("a part takes", [0.6, 0.0, 1.5]) if self.stream in ("slow", "events") else 0.0

    def break_off(self, run: Any) -> None:
        if self.choices.chance(f"{run.key}: breaks off", self.law.fails):
            raise ValueError("in mid-stream")

    def collect(self, _: None) -> None:
        """Have the collector come, and again while there may be something for it."""
        gc.collect()
        law = self.law
        goes_on = law.unanswered or not all(server.is_idle for server in law.servers)
        self.collects_at = law.world.now + 5.0 if goes_on else INFINITE

    # -- what must hold ------------------------------------------------------------------------------------------------

    def pass_on(self) -> None:
        """A middleware passes a response on, or fails."""
        if self.failures_left and self.choices.chance("a middleware fails", self.outer_fails):
            self.failures_left -= 1
            self.drop()
            raise ValueError("of another middleware")

    def drop(self) -> None:
        """A middleware drops a response, of which Django keeps what the collector finds."""
        self.collects_at = self.law.world.now

    def check_lease(self, run: Any) -> None:
        """Check that a view finds its lease, also after it has returned."""
        if current_lease() is not run.held:
            self.law.fail(f"run {run.number} does not find its lease")

    def own_thread(self, asking: Any) -> Any:
        """Return the thread of a request: the first in which something is done for it."""
        return self.threads.setdefault(asking, thread())

    def check_thread(self, run: Any) -> None:
        """Check that what a request does in threads it does in one, which has its connection to the database."""
        if getattr(run.process, "cancelled", False) or run.cut_off or self.collects_at < INFINITE:
            return  # Django has not waited for it, or a middleware has dropped its response
        if self.around == "sync" and self.asynchronous and run.process.left.is_set():
            return  # asgiref drops what a thread returns to who is cancelled
        if self.own_thread(run.process) is not thread():
            self.law.fail(f"run {run.number} is in another thread than it was")

    def check(self) -> None:
        """Check what is committed."""
        for key, runs in self.committed.items():
            if self.settles and len(runs) > 1:
                self.law.fail(f"the effects of runs {runs} of {key} are committed")

    def check_settle(self, run: Any) -> None:
        """Check that a response is recorded once what its view has done is committed, and none that failed."""
        if run.ending == "failed":
            self.law.fail(f"the response of run {run.number} is recorded, which has failed")
        if self.is_atomic and run.number not in self.committed[run.key]:
            self.law.fail(f"the response of run {run.number} is recorded, and its effect is not committed")

    def check_refusal(self, run: Any, body: bytes) -> None:
        """Check that a client is told of what a view has settled, whatever that has returned."""
        if self.settles and body == b"later" and run.number in self.committed[run.key]:
            self.law.fail(f"run {run.number} has settled its response, and its client got {body!r}")

    def check_answer(self, key: str, body: bytes) -> None:
        """Check that a response is whole, and the effect committed of which it tells."""
        runs = [run for run in self.law.runs if run.key == key and b"".join(self.each_part(run)) == body]
        if not runs:
            self.law.fail(f"a client of {key} got {body!r}, which is not a whole response")
        if self.is_atomic and runs[0].number not in self.committed[key]:
            self.law.fail(f"a client of {key} got {body!r}, which is not committed")


# -- what Django finds by its settings ---------------------------------------------------------------------------------


def view(request: Any) -> Any:
    return celery.current.law.site.view(request)


@transaction.non_atomic_requests
async def view_async(request: Any) -> Any:
    return await celery.current.law.site.view_async(request)


def handler500(request: Any) -> HttpResponse:
    """Answer a request whose view has raised."""
    return HttpResponse("raised", status=500)


urlpatterns = [path("sync", view), path("async", view_async)]


def _start_thread(call: Any, args: tuple[Any, ...]) -> None:
    """Start a thread, as a response does that nobody keeps any more."""
    process = getcurrent()
    # Of an earlier schedule is what only the collector has found.
    if getattr(process, "killed", True) or call._middleware is not celery.current.law.site.middleware:
        raise RuntimeError("the interpreter ends")
    works = celery.current.world.start(process.host, f"{process.host.name} end", lambda: call(*args))
    works.works, works.works_for = True, celery.current.law.working_for(process)


def _patch(patch: pytest.MonkeyPatch) -> None:
    if not settings.configured:
        databases = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}}
        settings.configure(DATABASES=databases, LOGGING_CONFIG=None)
    own = {"ROOT_URLCONF": __name__, "IDEMPOTENCY_HTTP": {}, "MIDDLEWARE": [], "ALLOWED_HOSTS": ["*"], "DEBUG": False}
    for name, value in own.items():
        patch.setattr(settings, name, value, raising=False)
    connections = Connections()
    for module in (db, transaction, handlers):
        patch.setattr(module, "connections", connections)
    patch.setitem(vars(connection), "_connections", connections)
    # Of a server that is killed nobody closes the file of a body.
    patch.setattr(asgi, "tempfile", SimpleNamespace(SpooledTemporaryFile=lambda **_: io.BytesIO()))
    # It warns of streams for asyncio that it makes as a whole.
    patch.setattr(responses, "warnings", SimpleNamespace(warn=lambda *_, **__: None))
    patch.setattr(middleware, "monotonic", lambda: celery.current.world.now)
    patch.setattr(middleware, "_thread", SimpleNamespace(start_new_thread=_start_thread))


PATCHES.append(_patch)
