"""Renewals by the worker's main process, for children that cannot: C code that holds the GIL stops a child's own.

The main process has no lease itself. It asks the store whether a delivery that runs in a child holds its key, and if so
lets that lease last; the proof is the owner that it gave the delivery. What takes less than a third of a ttl is never
asked about.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass
from time import monotonic, sleep
from typing import Any
from weakref import WeakKeyDictionary

from celery import bootsteps
from celery.worker import state as worker_state

from .. import deputy
from ..errors import IdempotencyError
from ..holding import RENEWALS_PER_TTL
from ..hooks import logger
from ..stores.base import Store
from .request import IdempotentRequest
from .visibility import copied
from .worker import idempotent_tasks

__all__ = ["OPTION", "MainRenewal", "RenewalStep"]

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
            if not isinstance(request, IdempotentRequest) or request.task._binding.guard.store is not store:
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
        deputy.renew(request.task._binding.guard.store, request.claim())
    except (IdempotencyError, TypeError) as error:
        logger.warning("%s[%s]: its lease was not renewed for it: %s", request.name, request.id, error)


class RenewalStep(bootsteps.StartStopStep):
    """Renew from the main process, where ``idempotency_renew_from_main`` asks for it and the pool has children."""

    name = "celery_idempotent.renewal"
    requires = ("celery.worker.components:Pool",)

    def include_if(self, worker: Any) -> bool:
        """Tell whether it is asked for, and of use."""
        forks = worker.pool_cls.__module__ == "celery.concurrency.prefork"
        return bool(forks and worker.app.conf.get(OPTION) and _leases(worker.app))

    def create(self, worker: Any) -> MainRenewal:
        """Return what the worker starts once its pool has its children."""
        stores = {task._binding.guard.store for task in idempotent_tasks(worker.app)}
        return MainRenewal(min(_leases(worker.app)) / RENEWALS_PER_TTL, stores)


def _leases(app: Any) -> list[float]:
    return [task._binding.policy.lease_ttl for task in idempotent_tasks(app)]
