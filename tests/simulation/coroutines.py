"""Clients of servers that have one event loop: behind the middleware for ASGI, or in front of a coroutine function."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextvars import ContextVar, copy_context
from typing import Any

from greenlet import getcurrent

from celery_idempotent import idempotent
from celery_idempotent.core.binding import BINDING
from celery_idempotent.errors import Conflict
from celery_idempotent.http import IdempotencyMiddleware, asgi

from .celery import INFINITE
from .requests import Requests, Server
from .world import Process, World

#: For how long a response that is complete waits until it is recorded.
SETTLE_TIMEOUT = 5.0
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
        self.process: Any = None

    def time(self) -> float:
        return self._world.now

    def select(self, timeout: float | None) -> list[Any]:
        """Wait for so many seconds, or until another process has something for this one."""
        if timeout == 0:  # something is to be done at once
            return []
        asyncio._set_running_loop(None)  # for others
        self._waits = True
        try:
            self._world.sleep(INFINITE if timeout is None else timeout)
        finally:
            self._waits = False
            asyncio._set_running_loop(self)
        return []

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
        self.left = asyncio.Event()
        self.status, self.body = "", b""
        #: when its body returned, and how often the store had failed then
        self.returned: tuple[float, int] = (0.0, -1)


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
        if self.threads:
            yield ("shut down", 0.2)

    @property
    def is_idle(self) -> bool:
        """Whether it does nothing for anybody."""
        asked = any(not exchange.dead for exchange in self.exchanges) or asyncio.all_tasks(self.loop)
        return not asked and not any(each.host is self and each.works for each in self.law.world.processes)

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
        loop, seconds = self.loop, self.law.choices.one_of("a shutdown takes", [0.0, 1.0, 8.0])
        loop.call_soon_threadsafe(lambda: [task.cancel() for task in asyncio.all_tasks(loop)])

        def end() -> None:
            world.sleep(seconds)
            if self.loop is loop:
                self.ends = True

        world.start(self.law.outside, f"{self.name} shutdown", end)

    def kill(self, down_for: float) -> None:
        for exchange in self.exchanges:
            if not exchange.dead:
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
        for task in asyncio.all_tasks(loop):
            task._log_destroy_pending = False
            asgi._tasks.discard(task)
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
        self.outside = Server("outside", self)
        super().begins(simulation)
        self.impatience = self.choices.one_of("impatience", [0, 0.1, 0.1])

    def server(self, name: str) -> Any:
        return AsyncServer(name, self)

    def made(self, options: dict[str, Any]) -> Any:
        self.is_function = self.choices.one_of("a function", [False, True])
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

    @staticmethod
    def scope_of(key: str) -> dict[str, Any]:
        """Return a request as ASGI has it."""
        headers = [(b"idempotency-key", key.encode()), (b"content-length", b"0")]
        return {"type": "http", "method": "POST", "path": "/charges", "headers": headers, "query_string": b""}

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
        since, failures = exchange.returned
        undisturbed = getcurrent().host.failures == failures and self.world.now - since < SETTLE_TIMEOUT
        if status.startswith("201") and undisturbed:
            self.check_recorded(exchange.key)
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
        run, exchange = self.begin(key), exchanging.get()
        run.process = exchange
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
        run.ending = "returned"
        exchange.returned = (world.now, getcurrent().host.failures)
        return f"receipt {run.number}"

    def working_for(self, process: Process) -> Any:
        return exchanging.get()

    def lose(self, exchange: Exchange) -> None:
        """A request is lost with its server."""
        for run in self.runs:
            if run.process is exchange:
                run.ending, run.excused = run.ending or "killed", True

    def check(self) -> None:
        super().check()
        for server in self.servers:
            if server.ends:
                server.ends = False
                server.kill(0.0)
            elif server.heartbeat.holdings() and server.is_idle:
                self.fail(f"{server.name} keeps a lease for nobody")
