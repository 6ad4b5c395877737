"""Bootsteps of a worker: the start-up check, renewal for children, statistics, and its shutdown."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic, sleep
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from billiard.process import current_process
from celery import bootsteps, signals
from celery.worker import state as worker_state

from ..core import binding as bindings
from ..core import lease as leases
from ..core.backoff import never
from ..core.binding import heartbeat
from ..core.lease import RENEWALS_PER_TTL
from ..errors import ConfigurationError, IdempotencyError, RecordUnreadable, StoreError, StoreUnreachable
from ..events import logger
from ..stores.base import Store
from ..stores.memory import MemoryStore
from ..stores.records import Lease
from . import app, declarations, inspect, monitoring, pool, unique
from .app import idempotent_tasks
from .pool import announce_stop
from .request import IdempotentRequest, cut_off
from .visibility import copied


class DeclarationStep(bootsteps.Step):
    """Check what an app declares before its worker takes work, also where no task of it is idempotent."""

    name = "celery_idempotent.declarations"

    def __init__(self, worker: Any, **options: Any) -> None:
        super().__init__(worker, **options)

    def create(self, worker: Any) -> None:
        """Check the declarations.

        Raises:
            ConfigurationError: one of them would protect less than it promises.
        """
        declarations.check_declarations(worker.app)


class IdempotencyStep(bootsteps.StartStopStep):
    """Check every idempotent task and its store before the worker takes work."""

    name = "celery_idempotent"

    def __init__(self, worker: Any, **options: Any) -> None:
        super().__init__(worker, **options)

    def create(self, worker: Any) -> None:
        """Look once at every store in use.

        Raises:
            ConfigurationError: a task is declared wrongly, there is no store, or the pool goes round the guard.
            StoreRefused: a store answers that it will not serve us.
        """
        declarations.check_declarations(worker.app)
        declarations.check_pool(worker.pool_cls)
        pool.limits = (worker.time_limit, worker.soft_time_limit)
        pool.enforces_limits = pool.is_prefork(worker.pool_cls)
        pool.is_green = worker.pool_cls.is_green
        app.register(worker.app)
        for task in idempotent_tasks(worker.app):  # before there are children
            app.keep_ended(task.backend)
        inspect.register()
        pool.prepare()
        monitoring.prepare(children=pool.enforces_limits)
        signals.worker_shutting_down.connect(announce_stop, weak=False, dispatch_uid="celery_idempotent.stop")
        for store in {task._binding.guard.store for task in idempotent_tasks(worker.app)}:
            try:
                store.ping()
                for warning in store.warnings():
                    logger.warning("%s", warning)
            except StoreUnreachable as error:
                logger.error("%s Tasks follow their on_store_error until it can.", error)
            if isinstance(store, MemoryStore) and pool.enforces_limits:
                _refuse_switched_off()
                raise ConfigurationError(
                    "Expected a store that all processes share, got memory:// with a pool of processes, each of which "
                    'would remember its own tasks alone. Set app.conf.idempotency_store = "redis://host:6379/1".'
                )

    def start(self, worker: Any) -> None:
        """Refuse to work unguarded, but in a thread of a test.

        Raises:
            ConfigurationError: this process has switched its guards off.
        """
        if threading.current_thread() is threading.main_thread():
            _refuse_switched_off()


def _refuse_switched_off() -> None:
    if bindings.switched_off:
        raise ConfigurationError(
            "Expected a worker whose tasks are guarded, got one in which celery_idempotent.testing has switched that "
            "off. Remove set_active(False) from what the worker imports; a test may start a worker in a thread."
        )


# Renewals by the worker's main process, for children that cannot: C code that holds the GIL stops a child's own.
#
# The main process has no lease itself. It reads in the store whether a delivery that runs in a child holds its key, and
# if so renews that lease; the proof is the owner that it gave the delivery. What takes less than a third of a ttl is
# never looked up.


#: The setting that switches it on.
OPTION = "idempotency_renew_from_main"


@dataclass(slots=True)
class _Watch:
    """When a delivery that runs is due, and until when it is renewed at all."""

    due: float
    until: float


class MainRenewal:
    """Renew the leases of deliveries that run in children, in a thread of the main process for each store.

    Arguments:
        step: Seconds between two looks.
        stores: The stores of the worker's tasks; one that hangs holds up the renewals in no other.
    """

    def __init__(self, step: float, stores: Iterable[Store]) -> None:
        self._step = step
        self._watched: dict[Store, WeakKeyDictionary[IdempotentRequest, _Watch]] = {
            store: WeakKeyDictionary() for store in stores
        }

    def start(self) -> None:
        """Start the threads, which end with the process: a worker that stops may wait for its last bodies."""
        for store in self._watched:
            threading.Thread(target=self._run, args=(store,), name="celery-idempotent-renewal", daemon=True).start()

    def stop(self) -> None:
        """Go on; see `start`."""

    def _run(self, store: Store) -> None:
        while True:
            sleep(self._step)
            try:
                self.beat(store, monotonic())
            except Exception:  # noqa: BLE001 - whatever it was, the children need this thread
                logger.exception("The leases of children could not be renewed; the next look is in %s s", self._step)

    def beat(self, store: Store, now: float) -> None:
        """Renew what is due at ``now`` in one store."""
        watched = self._watched[store]
        for request in copied(worker_state.active_requests):
            if not isinstance(request, IdempotentRequest) or request.store is not store:
                continue
            watch = watched.get(request)
            if watch is None:
                max_lease = request.max_lease()
                end = float("inf") if max_lease is None else now - self._step + max_lease
                watched[request] = _Watch(now + _pause(request), end)
            elif watch.due <= now < watch.until:
                watch.due = now + _pause(request)
                _renew(request)


def _pause(request: IdempotentRequest) -> float:
    return float(request.task._binding.policy.lease_ttl) / RENEWALS_PER_TTL


def _renew(request: IdempotentRequest) -> None:
    try:
        leases.renew(request.task._binding.guard.store, request.claim())
    except (IdempotencyError, TypeError) as error:
        logger.warning("%s[%s]: its lease was not renewed for it: %s", request.name, request.id, error)


class RenewalStep(bootsteps.StartStopStep):
    """Renew from the main process, if ``idempotency_renew_from_main`` is set and the pool has children."""

    name = "celery_idempotent.renewal"
    requires = ("celery.worker.components:Pool",)

    def include_if(self, worker: Any) -> bool:
        """Return whether it is set, and of use.

        Raises:
            ConfigurationError: the setting is neither True nor False.
        """
        wanted = worker.app.conf.get(OPTION)
        if wanted not in (None, True, False):
            raise ConfigurationError(
                f"Expected {OPTION} to be True or False, got {wanted!r}. Write True, or leave it out."
            )
        forks = pool.is_prefork(worker.pool_cls)
        return bool(forks and wanted and _leases(worker.app))

    def create(self, worker: Any) -> MainRenewal:
        """Return what the worker starts once its pool has its children."""
        stores = {task._binding.guard.store for task in idempotent_tasks(worker.app)}
        return MainRenewal(min(_leases(worker.app)) / RENEWALS_PER_TTL, stores)


def _leases(app: Any) -> list[float]:
    return [task._binding.policy.lease_ttl for task in idempotent_tasks(app)]


#: The section of ``celery inspect stats``.
SECTION = "idempotency"


class ObservingStep(bootsteps.StartStopStep):
    """Let monitors see what a worker's deliveries have come to, and free what a message holds that it cannot decode."""

    name = "celery_idempotent.observing"
    requires = ("celery.worker.consumer.events:Events",)

    def __init__(self, c: Any, **options: Any) -> None:
        super().__init__(c, **options)
        on_decode_error = c.on_decode_error

        def acknowledge_and_release(message: Any, error: Exception) -> None:
            on_decode_error(message, error)
            unique.release_unrun(c, message)

        c.on_decode_error = acknowledge_and_release  # Celery sends no signal of it

    def start(self, c: Any) -> None:
        """Begin with the event dispatcher of a new connection, and note the limits that Celery has read for it."""
        monitoring.attach(c)
        pool.task_limits = {task.name: task.time_limit for task in idempotent_tasks(c.app)}

    def register_with_event_loop(self, c: Any, hub: Any) -> None:
        """Have the event loop forward what children send."""
        reader = monitoring.reader()
        if reader is not None:
            hub.add_reader(reader, monitoring.flush)

    def stop(self, c: Any) -> None:
        """Go on: bodies that still run have events to send."""

    def info(self, c: Any) -> dict[str, dict[str, int]]:
        """Return the section of the worker's statistics: live leases, then events by kind since it started."""
        return {SECTION: {"leases": len(pool.leases()), **pool.counts()}}


# The shutdown of a worker, however it comes: its slots wait no longer, and what it cuts off is no crash.
#
# Celery announces a warm shutdown when SIGTERM comes. A cold one it announces only when it has waited for the bodies
# (``worker_soft_shutdown_timeout``) and cut them off, and ``celery control shutdown``, a broker that is lost for good,
# or a worker that a test stops, not at all. They are seen where Celery begins with them.
#
# A body may run for longer than a supervisor waits for the worker. When the worker is killed, no process is left to
# release the lease. So the main process marks the shutdown in the stores as soon as it begins. A body that ends in
# time is settled as ever. What a body itself holds, by calling guarded functions or ``apply()``, is known to its own
# process alone: a child marks that itself.


#: Seconds between two looks whether the worker stops, and while it does, at what runs. No thread is woken instead: a
#: handler of signals must take no lock.
LOOK_EVERY = 0.5


class ShutdownMarks:
    """The marks of a shutdown in one store.

    Arguments:
        store: The store; one that hangs holds up no other, for each has a thread.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._marked: WeakSet[IdempotentRequest] = WeakSet()
        #: the owners of the leases of this process that are marked
        self._held: set[str] = set()
        self._failing = False

    def mark_running(self) -> None:
        """Mark each delivery that runs and holds a lease; each once."""
        for request in copied(worker_state.active_requests):
            if not isinstance(request, IdempotentRequest) or request.store is not self._store:
                continue
            if request not in self._marked and self._mark(request):  # one that waits for its lease is tried again
                self._marked.add(request)

    def mark_held(self) -> None:
        """Mark each lease that this process renews and that is none of its deliveries'; each once."""
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
        """Mark each delivery that this worker has stopped, and that Celery has done with."""
        for _ in range(len(cut_off)):
            try:
                request = cut_off.popleft()
            except IndexError:  # another store's thread has taken it for a moment
                return
            if request.store is not self._store:
                cut_off.append(request)
                continue
            try:
                marked = self._mark(request)
            except StoreError:
                cut_off.append(request)
                raise
            if not marked and pool.is_stopping():  # its child may be deep within a call, and yet be granted its lease
                cut_off.append(request)

    def _mark(self, request: IdempotentRequest) -> bool:
        """Mark one delivery; return whether that is done for good."""
        try:
            claim = request.claim()
        except (IdempotencyError, TypeError):
            return True  # it has no key, and so no lease
        try:
            return self._store.mark_shutdown(Lease(claim, 0))
        except RecordUnreadable:
            return True

    def look(self) -> None:
        """Mark what is to be marked now; an error is logged once, and never raised."""
        try:
            self.mark_cut_off()
            if pool.is_stopping():
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
        ended: Returns whether the worker has ended.
    """
    watched: set[Store] = set()
    while not ended():
        if pool.is_stopping():
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
    if current_process().daemon:  # the pool solo announces the worker's own process, which `ShutdownStep` watches
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
            pool.outlive(stopped)
        wait = getattr(worker, "wait_for_soft_shutdown", None)  # the first that a cold shutdown calls; since Celery 5.5
        if wait is not None:

            def announce_and_wait() -> None:
                pool.announce_stop()
                wait()

            worker.wait_for_soft_shutdown = announce_and_wait
        ended = stopped.is_set if outlived else never  # bodies in threads may outlast the parts of their worker
        _start_watch({task._binding.guard.store for task in app.idempotent_tasks(worker.app)}, ended)

    def close(self, worker: Any) -> None:
        """Announce the end: Celery comes here first, before it waits for anything."""
        pool.announce_stop()

    def stop(self, worker: Any) -> None:
        """Go on: bodies may still run."""

    def terminate(self, worker: Any) -> None:
        """Go on, as `stop` does."""
