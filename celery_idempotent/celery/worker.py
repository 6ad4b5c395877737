"""What we add to a worker: a look at the store before it takes work, and word of its end to its children."""

from __future__ import annotations

import mmap
import threading
from typing import Any

from celery import bootsteps, signals

from ..errors import ConfigurationError, StoreUnreachable
from ..hooks import logger
from ..stores.memory import MemoryStore
from . import declarations, notices, observing, purging
from .identity import PLAIN
from .observing import ObservingStep
from .visibility import VisibilityStep

__all__ = ["IdempotencyStep", "announce_stop", "install", "is_stopping", "outlive"]

_stopping: mmap.mmap | None = None
#: Set once a worker has stopped that this process outlives.
_stopped: threading.Event | None = None
#: The hard and the soft time limit of this worker's pool, for tasks and messages that have none.
limits: tuple[float | None, float | None] = (None, None)
#: Whether the pool ends a body at its hard limit.
enforces_limits = True


def is_stopping() -> bool:
    """Tell, in the worker's main process and in its children, whether the worker is about to stop."""
    return _stopping is not None and _stopping[0] == 1 and not (_stopped is not None and _stopped.is_set())


def announce_stop(**_: Any) -> None:
    """Let the worker's main process and its children know that it is about to stop; safe in a signal's handler."""
    if _stopping is not None:
        _stopping[0] = 1


def outlive(stopped: threading.Event) -> None:
    """Forget that the worker stops once it has: a test, say, runs it in a thread, and the process goes on."""
    global _stopped
    _stopped = stopped


def install(app: Any) -> None:
    """Add our steps to the app's workers."""
    from .renewal import RenewalStep
    from .shutdown import ShutdownStep

    app.steps["worker"].update({IdempotencyStep, RenewalStep, ShutdownStep})
    app.steps["consumer"].update({VisibilityStep, ObservingStep})


def check_declarations(app: Any) -> None:
    """Refuse an app whose declarations would protect less than they say.

    Raises:
        ConfigurationError: a task is declared wrongly, or a setting is none of this library's.
    """
    from .task import check_declaration

    declarations.check_settings(app)
    declarations.check_unprotected(app)
    for task in idempotent_tasks(app):  # whoever caught what was raised when it was declared
        check_declaration(task)


class DeclarationStep(bootsteps.Step):
    """Check what an app declares before its worker takes work, also where no task of it is idempotent."""

    name = "celery_idempotent.declarations"

    def __init__(self, worker: Any, **options: Any) -> None:
        super().__init__(worker, **options)

    def create(self, worker: Any) -> None:
        """Check the declarations.

        Raises:
            ConfigurationError: one of them would protect less than it says.
        """
        check_declarations(worker.app)


class IdempotencyStep(bootsteps.Step):
    """Check every idempotent task and its store before the worker takes work."""

    name = "celery_idempotent"

    def __init__(self, worker: Any, **options: Any) -> None:
        super().__init__(worker, **options)

    def create(self, worker: Any) -> None:
        """Look once at every store in use.

        Raises:
            ConfigurationError: a task is declared wrongly, or there is no store.
            StoreRefused: a store answers that it will not serve us.
        """
        global _stopping, _stopped, limits, enforces_limits
        check_declarations(worker.app)
        limits = (worker.time_limit, worker.soft_time_limit)
        enforces_limits = worker.pool_cls.__module__ == "celery.concurrency.prefork"
        purging.register(worker.app)
        _stopping = mmap.mmap(-1, 1)  # shared with the children, which are forked later
        _stopped = None
        notices.prepare()
        observing.prepare(children=enforces_limits)
        signals.worker_shutting_down.connect(announce_stop, weak=False, dispatch_uid="celery_idempotent.stop")
        for store in {task._binding.guard.store for task in idempotent_tasks(worker.app)}:
            if isinstance(store, MemoryStore) and enforces_limits:
                raise ConfigurationError(
                    "Expected a store that all processes share, got memory:// with a pool of processes, each of which "
                    'would remember its own tasks alone. Set app.conf.idempotency_store = "redis://host:6379/1".'
                )
            try:
                store.ping()
            except StoreUnreachable as error:
                logger.error("%s Tasks will do as their on_store_error says until it can.", error)


def idempotent_tasks(app: Any) -> list[Any]:
    """Return the app's tasks that are guarded."""
    from .task import IdempotentTask

    return [task for name, task in app.tasks.items() if isinstance(task, IdempotentTask) and not name.startswith(PLAIN)]
