"""Workers whose pool is Celery's of greenlets: one thread runs all bodies, and a signal or a limit ends each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Any

import gevent
from celery.concurrency import gevent as concurrency
from celery.concurrency.base import BasePool
from celery.exceptions import TaskRevokedError
from greenlet import GreenletExit, getcurrent

from .celery import POOLS
from .threads import PoolThread, ThreadedWorker, Threads
from .world import Process

#: Seconds that a body may take; a fault ends it sooner.
LIMIT = 1000.0


class Timeout(gevent.Timeout):
    """What is raised in a greenlet within whose block a time is over; gevent has no part in when that is."""

    #: whether the body does not end before it
    due = False

    def __init__(self, seconds: float) -> None:
        BaseException.__init__(self, seconds)

    def __str__(self) -> str:
        return "its time is over"

    def __enter__(self) -> None:
        getcurrent().timeout = self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        getcurrent().timeout = None


class Greenlet:
    """What Celery's pool has of a greenlet; its address is the greenlet's id."""

    def __init__(self) -> None:
        self.process: Any = None
        self._links: list[Callable[[Greenlet], object]] = []

    def link(self, callback: Callable[[Greenlet], object]) -> None:
        self._links.append(callback)

    def ends(self) -> None:
        for callback in self._links:
            callback(self)


class Pool(concurrency.TaskPool):
    """Celery's own pool of greenlets, but for gevent's."""

    def __init__(self, worker: GreenletWorker) -> None:
        self.worker, self.timeout = worker, LIMIT
        BasePool.__init__(self, app=worker.app)
        self.start()

    @staticmethod
    def getpid() -> int:
        return id(getattr(getcurrent(), "greenlet", None))

    def on_start(self) -> None:
        self._pool_map: dict[int, Greenlet] = {}
        self._quick_put = self._spawn

    def _spawn(
        self,
        apply: Callable[..., object],
        target: Any,
        args: Any,
        kwargs: Any,
        callback: Any,
        accept_callback: Any,
        getpid: Any,
        timeout: float,
        timeout_callback: Any,
    ) -> Greenlet:
        worker, request, greenlet = self.worker, callback.__self__, Greenlet()
        answered, over = (partial(worker.finished, request, report) for report in (callback, timeout_callback))
        given = {**kwargs, "app": worker.app}
        limit = {"timeout": timeout, "timeout_callback": over, "Timeout": Timeout}

        def work() -> None:
            process = greenlet.process = getcurrent()
            process.greenlet = greenlet
            try:
                apply(target, args, given, answered, accept_callback, getpid, **limit)
            finally:
                if not process.killed:
                    greenlet.ends()

        free = next(each for each in worker.threads if each.child is None)
        worker.simulation.world.tell(f"{free.name} starts {request.id}")
        free.begin(request, work)
        return greenlet

    def terminate_job(self, pid: int, signal: object = None) -> None:
        if pid in self._pool_map:
            self.worker.throw(self._pool_map[pid].process)


class BodyGreenlet(PoolThread):
    """A greenlet of a pool, with the delivery that it runs."""

    ends_with = ("worker", "limit")

    @property
    def doomed(self) -> Any:
        return self.worker.doomed

    @doomed.setter
    def doomed(self, kind: str) -> None:
        self.worker.doomed, self.child.timeout.due = kind, kind == "limit"


class GreenletWorker(ThreadedWorker):
    """A worker of greenlets: they are to it what threads are to another, but that it can end them."""

    new_pool, new_thread = Pool, BodyGreenlet

    def can_start(self, now: float) -> bool:
        return len(self.busy) < self.size and self.due(now) is not None

    def execute(self) -> None:
        request, _ = self.reserved.pop(self.due(self.simulation.world.now) or 0)
        with suppress(TaskRevokedError):  # which has answered it
            request.execute_using_pool(self.pool)

    # -- faults --------------------------------------------------------------------------------------------------------

    @property
    def limited(self) -> list[Process]:
        """The greenlets in which a time limit may be over."""
        children = [each.child for each in self.busy]
        return [each for each in children if each.timeout is not None and each.interruption is None]

    def faults(self) -> Iterator[tuple[str, float]]:
        yield from super().faults()
        if self.limited:
            yield "hard time limit", 0.4

    def limit_child(self) -> None:
        world = self.simulation.world
        due = [each for each in self.limited if each.timeout.due]
        process = world.choices.one_of(f"{self.name} ends", due or self.limited)
        world.tell(f"{process.name}: hard time limit")
        self.simulation.law.timed_out(process)
        process.timeout, over = None, process.timeout  # it rings once
        world.interrupt(process, over)

    def throw(self, process: Process) -> None:
        """Have a greenlet end at its next step."""
        process.signalled = True
        self.simulation.world.interrupt(process, GreenletExit())

    def cut_off_all(self) -> None:
        """Do as Celery's handler of signals does, which runs in whichever greenlet it meets."""
        world = self.simulation.world
        inside = world.choices.one_of("the signal comes in", [None, *(each.child for each in self.busy)])
        if inside is None:
            super().cut_off_all()
        else:
            world.tell(f"the signal comes in {inside.name}")
            inside.handler, inside.wakes = super().cut_off_all, min(inside.wakes, world.now)

    def wait_for_threads(self) -> None:
        """Wait for nothing more: greenlets end with their process."""


POOLS["greenlets"] = GreenletWorker


class Greenlets(Threads):
    """The same in one thread for several bodies, each of which can be ended."""

    kind = "greenlets"
    pools = ("greenlets",)
