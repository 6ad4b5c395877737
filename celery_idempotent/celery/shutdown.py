"""The shutdown of a worker, however it comes: its slots wait no longer, and what it cuts off is no crash.

Celery announces a warm shutdown when SIGTERM comes. A cold one it announces only when it has waited for the bodies
(``worker_soft_shutdown_timeout``) and cut them off, and ``celery control shutdown``, a broker that is lost for good, or
a worker that a test stops, not at all. They are seen where Celery begins with them.

A body may run for longer than whoever stops the worker is patient. When the worker is killed, nobody is left to release
the lease. So the main process tells the stores as soon as it knows. Of a body that ends in time they hear the end as
ever. What a body itself holds, by calling guarded functions or ``apply()``, is known to its own process alone: a child
tells the stores of that.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from time import sleep
from typing import Any
from weakref import WeakSet

from celery import bootsteps, signals
from celery.worker import state as worker_state

from ..binding import heartbeat
from ..errors import IdempotencyError, RecordUnreadable, StoreError
from ..hooks import logger
from ..pauses import never
from ..records import Lease
from ..stores.base import Store
from . import worker as stopping
from .request import IdempotentRequest, cut_off
from .visibility import copied

__all__ = ["ShutdownMarks", "ShutdownStep", "keep_watch"]

#: Seconds between two looks whether the worker stops, and while it does, at what runs. No thread is woken instead: a
#: handler of signals must take no lock.
LOOK_EVERY = 0.5


class ShutdownMarks:
    """What one store was told of the shutdown.

    Arguments:
        store: The store; one that hangs holds up no other, for each has a thread.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._marked: WeakSet[IdempotentRequest] = WeakSet()
        #: the owners of the leases of this process that it was told of
        self._held: set[str] = set()
        self._failing = False

    def mark_running(self) -> None:
        """Tell the store of each delivery that runs and holds a lease; of each once."""
        for request in copied(worker_state.active_requests):
            if not isinstance(request, IdempotentRequest) or request in self._marked or not self._is_ours(request):
                continue
            if self._mark(request):  # one that waits for its lease is asked about again
                self._marked.add(request)

    def mark_held(self) -> None:
        """Tell the store of each lease that this process renews, and that is no delivery's of it; of each once."""
        deliveries = {request._owner for request in copied(worker_state.active_requests) if hasattr(request, "_owner")}
        held = {holding.lease.owner: holding.lease for holding in heartbeat.holdings() if holding.store is self._store}
        self._held &= held.keys()
        for owner, lease in held.items():
            if owner in deliveries or owner in self._held:
                continue
            with suppress(RecordUnreadable):
                self._store.mark_shutdown(lease)
            self._held.add(owner)

    def mark_cut_off(self) -> None:
        """Tell the store of each delivery that this worker has told to end, and that Celery has done with."""
        for _ in range(len(cut_off)):
            try:
                request = cut_off.popleft()
            except IndexError:  # another store's thread has taken it for a moment
                return
            if not self._is_ours(request):
                cut_off.append(request)
                continue
            try:
                self._mark(request)
            except StoreError:
                cut_off.append(request)
                raise

    def _is_ours(self, request: IdempotentRequest) -> bool:
        return request.task._binding.guard.store is self._store

    def _mark(self, request: IdempotentRequest) -> bool:
        """Tell the store of one delivery, and whether there is nothing more to tell."""
        try:
            claim = request.claim()
        except (IdempotencyError, TypeError):
            return True  # it has no key, and so no lease
        try:
            return self._store.mark_shutdown(Lease(claim, 0))
        except RecordUnreadable:
            return True

    def look(self) -> None:
        """Tell the store what it is to know now; an error is logged once, and never raised."""
        try:
            self.mark_cut_off()
            if stopping.is_stopping():
                self.mark_running()
                self.mark_held()
        except Exception as error:  # noqa: BLE001 - whatever it was, other deliveries need this thread
            if not self._failing:
                logger.warning("A shutdown could not be announced to the store, trying again: %r", error)
            self._failing = True
        else:
            self._failing = False

    def keep_looking(self, ended: Callable[[], bool]) -> None:
        """Look again and again, until the worker has ``ended``."""
        while not ended():
            self.look()
            sleep(LOOK_EVERY)


def keep_watch(stores: set[Store], ended: Callable[[], bool] = never) -> None:
    """Start a thread for each store, and later for each other one in which this process holds a lease.

    Arguments:
        stores: Those to begin with.
        ended: Tells whether the worker has ended.
    """
    watched: set[Store] = set()
    while not ended():
        if stopping.is_stopping():
            stores = stores | {holding.store for holding in heartbeat.holdings()}
        for store in stores - watched:
            looking = ShutdownMarks(store).keep_looking
            threading.Thread(target=looking, args=(ended,), name="celery-idempotent-shutdown", daemon=True).start()
        watched |= stores
        sleep(LOOK_EVERY)


def _start_watch(stores: set[Store], ended: Callable[[], bool] = never) -> None:
    watch = threading.Thread(target=keep_watch, args=(stores, ended), name="celery-idempotent-shutdown", daemon=True)
    watch.start()


def watch_in_child(**_: Any) -> None:
    """Watch the leases of a pool's child, which has the stores that its bodies use and no others."""
    _start_watch(set())


class ShutdownStep(bootsteps.StartStopStep):
    """Let slots that wait know of the shutdown, and the stores whose leases may be cut off by it."""

    name = "celery_idempotent.shutdown"
    requires = ("celery.worker.components:Pool",)

    def __init__(self, worker: Any, **options: Any) -> None:
        super().__init__(worker, **options)
        signals.worker_process_init.connect(watch_in_child, weak=False, dispatch_uid="celery_idempotent.shutdown")

    def start(self, worker: Any) -> None:
        """Start a thread for each store; they end with the process, or with a worker that the process outlives."""
        stopped = worker.blueprint.shutdown_complete
        outlived = threading.current_thread() is not threading.main_thread()
        if outlived:
            stopping.outlive(stopped)
        wait = getattr(worker, "wait_for_soft_shutdown", None)  # the first that a cold shutdown calls; since Celery 5.5
        if wait is not None:

            def announce_and_wait() -> None:
                stopping.announce_stop()
                wait()

            worker.wait_for_soft_shutdown = announce_and_wait
        ended = stopped.is_set if outlived else never  # bodies in threads may outlast the parts of their worker
        _start_watch({task._binding.guard.store for task in stopping.idempotent_tasks(worker.app)}, ended)

    def close(self, worker: Any) -> None:
        """Announce the end: Celery comes here first, before it waits for anything."""
        stopping.announce_stop()

    def stop(self, worker: Any) -> None:
        """Go on: bodies may still run."""

    def terminate(self, worker: Any) -> None:
        """Go on, as `stop` does."""
