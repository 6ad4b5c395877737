"""Clients of servers that have one event loop: behind a middleware, Django's too, or before a coroutine function."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar, copy_context
from typing import Any

from greenlet import getcurrent

from celery_idempotent import idempotent
from celery_idempotent.core.binding import BINDING
from celery_idempotent.errors import Conflict
from celery_idempotent.http import IdempotencyMiddleware, asgi
from celery_idempotent.http import django as django_middleware

from .asgiref import Executor
from .celery import INFINITE
from .requests import SETTLE_TIMEOUT, Requests, Run, Server
from .world import Process, World

#: What a server does for a client that has gone: nothing, as it does not notice; tells the application; cancels.
GOING = ("unnoticed", "noticed", "cancelled")
#: The exchange in whose context something is done.
exchanging: ContextVar[Exchange | None] = ContextVar("exchanging", default=None)


class Loop(asyncio.BaseEventLoop):
    """An event loop on the simulation's clock, which waits as a process of it does.

    Arguments:
        world: The world.
    """

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world, self._selector, self._waits = world, self, False
        self._threads, self._tasks = Executor(), []
        self.process: Any = None

    def time(self) -> float:
        return self._world.now

    def select(self, timeout: float | None) -> list[Any]:
        """Wait for so many seconds, or until another process has something for this one."""
        if timeout == 0:  # something is to be done at once
            return []
        asyncio._set_running_loop(None)  # for others
        hooks = sys.get_asyncgen_hooks()
        sys.set_asyncgen_hooks(None, None)
        self._waits = True
        try:
            # No earlier by what is rounded: what is left would be slept for in no time, again and again.
            self._world.sleep(INFINITE if timeout is None else timeout + self._clock_resolution)
        finally:
            self._waits = False
            sys.set_asyncgen_hooks(*hooks)
            asyncio._set_running_loop(self)
        return []

    def create_task(self, *args: Any, **options: Any) -> asyncio.Task[Any]:
        task = super().create_task(*args, **options)
        self._tasks.append(task)
        return task

    @property
    def tasks(self) -> list[asyncio.Task[Any]]:
        """Return those that are not done, in the order in which they began; asyncio has a set of those of all loops."""
        self._tasks = [task for task in self._tasks if not task.done()]
        return self._tasks

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:
        return asyncio.wrap_future((executor or self._threads).submit(func, *args), loop=self)

    def _process_events(self, event_list: list[Any]) -> None:
        pass

    def _write_to_self(self) -> None:
        if self._waits:
            self.process.wakes = min(self.process.wakes, self._world.now)

    def __del__(self) -> None:
        pass  # it has nothing that is to be closed

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        pass  # what a task has raised, its exchange has


class Exchange:
    """A request and its answer, on one server.

    Arguments:
        loop: The server's.
        key: The client's.
        answers: Where the answer is to go.
    """

    def __init__(self, loop: Loop, key: str, answers: list[tuple[str, bytes]]) -> None:
        self.loop, self.key, self.answers = loop, key, answers
        self.task: asyncio.Task[None] | None = None
        self.dead = self.read = False
        #: whether its server has been shut down, and whether it has cancelled this one
        self.cut_off = self.cancelled = False
        self.left = asyncio.Event()
        self.status, self.body = "", b""
        #: the last that was carried out for it
        self.run: Any = None


class AsyncServer(Server):
    """A server of one process with an event loop."""

    def __init__(self, name: str, law: Coroutines) -> None:
        super().__init__(name, law)
        self.exchanges: list[Exchange] = []
        self.boot()

    def boot(self) -> None:
        """Start its process."""
        self.loop = Loop(self.law.world)
        self.loop.process = self.law.world.start(self, f"{self.name} loop", self.loop.run_forever)

    def faults(self) -> Iterator[tuple[str, float]]:
        """Return what may happen to it."""
        self.threads = [exchange for exchange in self.exchanges if not exchange.dead]
        yield from super().faults()

    def endings(self) -> Iterator[tuple[str, float]]:
        yield ("shut down", 0.2)

    @property
    def is_idle(self) -> bool:
        return not (any(not exchange.dead for exchange in self.exchanges) or self.loop.tasks or self.works)

    def accept(self, exchange: Exchange, carry_out: Callable[[Exchange], Any]) -> None:
        """Begin a request."""
        context = copy_context()
        context.run(exchanging.set, exchange)
        exchange.task = context.run(self.loop.create_task, carry_out(exchange))

        def end(task: asyncio.Task[None]) -> None:
            exchange.dead = True
            if not task.cancelled():
                task.exception()

        exchange.task.add_done_callback(end)

    def suffer(self, kind: str) -> None:
        """Shut down: cancel what is being done, and end a while later."""
        world = self.law.world
        world.tell(f"{self.name}: shut down")
        for exchange in self.exchanges:
            exchange.cut_off = True
        for run in self.law.runs:
            if run.server is self and self.waits_no_longer_for(run):
                self.law.cut_off(run.process)
        loop, seconds = self.loop, self.law.choices.one_of("a shutdown takes", [0.0, 1.0, 8.0])
        loop.call_soon_threadsafe(lambda: [task.cancel() for task in loop.tasks])

        def end() -> None:
            world.sleep(seconds)
            if self.loop is loop:
                self.ends = True

        world.start(self.law.supervisor, f"{self.name} shutdown", end)

    def waits_no_longer_for(self, run: Run) -> bool:
        # A view goes on in its thread, for a while; of a stream a part may have been sent.
        site = self.law.site
        return run.process.cut_off and site is not None and bool(site.stream or not site.is_async)

    def kill(self, down_for: float) -> None:
        for exchange in self.exchanges:
            self.law.lose(exchange)
            exchange.dead = True
        self.exchanges, loop = [], self.loop
        super().kill(down_for)
        bury(loop)
        self.boot()


class Dead(Process):
    """A process in which coroutines end that were killed: nothing that they do has an effect."""

    def _begin(self) -> None:
        self.killed = True
        self._run()


def bury(loop: Loop) -> None:
    """Close the coroutines of a loop that was killed, which the collector would do anywhere."""

    def close() -> None:
        for task in loop.tasks:
            task._log_destroy_pending = False
            asgi._tasks.discard(task)
            django_middleware._tasks.discard(task)
            try:
                task.get_coro().close()
            except BaseException:  # noqa: BLE001 - it is dead
                continue

    Dead(loop._world, loop.process.host, "grave", close).switch()
    loop._ready.clear()
    loop._scheduled.clear()


class Coroutines(Requests):
    """One effect and one answer for each key, however often a request is sent, and whatever is cancelled."""

    kind = "asyncio"

    def __init__(self) -> None:
        super().__init__()
        self.servers: list[Any] = []

    def begins(self, simulation: Any) -> None:
        for server in self.servers:  # of a schedule that has broken the law
            bury(server.loop)
        self.servers = []
        super().begins(simulation)
        self.impatience = self.choices.one_of("impatience", [0, 0.1, 0.1])

    def server(self, name: str) -> Any:
        return AsyncServer(name, self)

    def made(self, options: dict[str, Any]) -> Any:
        framework = self.choices.one_of("framework", ["", "a function", "Django"])
        self.is_function = framework == "a function"
        if framework == "Django":
            return self.django(options, asynchronous=True)
        if self.is_function:
            charged: Any = idempotent(key="key", **options)(self.charge_customer)
            self.install(getattr(charged, BINDING))
            return charged
        middleware = IdempotencyMiddleware(self.asgi, scope=None, settle_timeout=SETTLE_TIMEOUT, **options)
        self.install(middleware.binding)
        return middleware

    # -- a client ------------------------------------------------------------------------------------------------------

    def send(self, server: Any, key: str, answers: list[tuple[str, bytes]]) -> Any:
        exchange = Exchange(server.loop, key, answers)
        server.exchanges.append(exchange)
        server.loop.call_soon_threadsafe(server.accept, exchange, self.carry_out)
        return exchange

    def go(self, exchange: Any) -> None:
        how = self.choices.one_of("a client that goes is", GOING)
        if exchange.dead or how == "unnoticed":
            return
        exchange.loop.call_soon_threadsafe(exchange.left.set)
        if how == "cancelled" and exchange.task is not None:
            self.world.tell(f"the request of {getcurrent().name} is cancelled")
            exchange.cancelled = True
            exchange.loop.call_soon_threadsafe(exchange.task.cancel)

    # -- a server ------------------------------------------------------------------------------------------------------

    async def carry_out(self, exchange: Exchange) -> None:
        """Answer a request."""
        try:
            if self.is_function:
                body = await self.serving(exchange.key)
                self.answer(exchange, "201 Created", body.encode())
            else:
                await self.serving(self.scope_of(exchange.key), *self.channel_of(exchange))
        except Conflict:
            self.answer(exchange, "409 Conflict", b"")
        except Exception as error:  # noqa: BLE001 - as a server answers it
            self.answer(exchange, "500 Internal Server Error", f"{type(error).__name__} {error}".encode())

    def scope_of(self, key: str) -> dict[str, Any]:
        """Return a request as ASGI has it."""
        headers = [(b"idempotency-key", key.encode()), (b"content-length", b"0")]
        return {"type": "http", "method": "POST", "path": self.path, "headers": headers, "query_string": b""}

    def channel_of(self, exchange: Exchange) -> tuple[Any, Any]:
        """Return what a request is received by, and what its response is sent by."""

        async def receive() -> dict[str, Any]:
            if not exchange.read:
                exchange.read = True
                return {"type": "http.request", "body": b""}
            await exchange.left.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                exchange.status = "201 Created" if message["status"] == 201 else f"{message['status']} for now"
            else:
                exchange.body += message.get("body", b"")
                if not message.get("more_body", False):
                    self.answer(exchange, exchange.status, exchange.body)

        return receive, send

    def answer(self, exchange: Exchange, status: str, body: bytes) -> None:
        """An answer leaves a server."""
        if getattr(getcurrent(), "killed", False):
            return
        self.check_sent(exchange.key, exchange.run, status, body)
        exchange.answers.append((status, body))

    # -- the application -----------------------------------------------------------------------------------------------

    async def asgi(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """Charge a customer, and answer."""
        (key,) = (value.decode() for name, value in scope["headers"] if name == b"idempotency-key")
        body = await self.charge_customer(key)
        status = 503 if not body else 201
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": body.encode()})

    async def charge_customer(self, key: str) -> str:
        """Charge a customer."""
        world, choices = self.world, self.choices
        run = self.begin(key)
        try:
            world.tell(f"run {run.number} of {key} begins")
            await asyncio.sleep(choices.one_of(f"{key}: before", self.long))
            self.charge(run)
            world.tell(f"run {run.number} has charged {key}")
            await asyncio.sleep(choices.one_of(f"{key}: after", self.long))
            if choices.chance(f"{key}: fails", self.fails):
                run.ending = "failed"
                if self.is_function or choices.chance(f"{key}: raises", 0.5):
                    raise ValueError("no")
                return ""
        except BaseException:
            run.ending = "failed"
            raise
        self.returned(run)
        return f"receipt {run.number}"

    def begin(self, key: str) -> Run:
        run = exchanging.get().run = super().begin(key)
        return run

    def working_for(self, process: Process) -> Any:
        return exchanging.get()

    def lose(self, exchange: Exchange) -> None:
        """A request is lost with its server."""
        for run in self.runs:
            if run.process is exchange and (run.held.open or not exchange.dead):
                run.ending, run.excused = run.ending or "killed", True
