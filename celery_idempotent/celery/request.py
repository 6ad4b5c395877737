"""The seam in the worker's main process: it names each delivery, and speaks for children that cannot."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from time import monotonic, sleep
from typing import Any

from billiard.einfo import ExceptionInfo, ExceptionWithTraceback
from celery.exceptions import Terminated, WorkerLostError
from celery.utils.imports import symbol_by_name
from celery.worker import state as worker_state
from celery.worker.request import Request

from ..errors import IdempotencyError
from ..events import logger
from ..records import Claim, Lease, Reason, Release, new_owner
from . import worker
from .identity import DELIVERY, KEY, DeliveryState

__all__ = ["IdempotentRequest", "request_class"]

#: Longest time in seconds that the worker's main process waits for a store.
LONGEST_WAIT = 0.2
#: Longest time in seconds that a killed child may take to be gone.
KILL_TIMEOUT = 10.0


class IdempotentRequest(Request):
    """A request that gives its delivery an owner, and releases the lease of a child that died."""

    def __init__(self, message: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(message, *args, **kwargs)
        # Overwritten whatever the message says: an owner is the proof of one delivery and of no other.
        self._owner = new_owner()
        key = (message.properties or {}).get(KEY)
        if key is not None:  # from a producer that has not imported us, so that nothing moved it into the headers
            self._request_dict.setdefault(KEY, key)
        self._request_dict[DELIVERY] = {
            "owner": self._owner,
            "content_type": message.content_type,
            "compression": (message.headers or {}).get("compression"),
        }

    def on_failure(self, exc_info: Any, send_failed_event: bool = True, return_ok: bool = False) -> Any:
        """Release the lease of a child that is gone, then do as Celery does."""
        error = exc_info.exception
        if isinstance(error, ExceptionWithTraceback):
            error = error.exc
        if not return_ok and isinstance(error, (WorkerLostError, Terminated, SystemExit)):
            # The child is gone. Released before Celery puts the message back, so that the next delivery does not wait
            # for the lease.
            terminating = worker_state.should_terminate not in (None, False)
            told = isinstance(error, Terminated) or self._already_cancelled or self._already_revoked
            announced = terminating or told  # and not a body that calls sys.exit() whenever it runs
            self._within_limit(lambda: self._release(Reason.SHUTDOWN if announced else Reason.CRASHED))
            if isinstance(error, SystemExit) and not told:
                exc_info = _lost(error)  # Celery before 5.7 acks it, and cannot store it
        return super().on_failure(exc_info, send_failed_event=send_failed_event, return_ok=return_ok)

    def on_timeout(self, soft: bool, timeout: float) -> Any:
        """Do as Celery does, and release the lease once a child that hit its hard limit is gone."""
        answer = super().on_timeout(soft, timeout)
        if not soft and self.worker_pid:
            # billiard tells first and kills afterwards: free the key when the body has really ended.
            self._in_background(self._release_when_gone)
        return answer

    def claim(self) -> Claim:
        """Return what this delivery asks the store for, as far as it takes to speak for its child.

        Raises:
            TypeError: the arguments do not fit the task.
            MissingKey: the key cannot be told.
        """
        binding = self.task._binding
        identity = DeliveryState.of(self._context).identity
        arguments = binding.arguments(identity, self._args, self._kwargs)
        key = binding.key(identity, self.id, arguments, self._context.headers)
        return Claim(key, self._owner, binding.policy.lease_ttl, binding.policy.failure_ttl)

    def max_lease(self) -> float | None:
        """Return for how long the lease of this delivery is renewed, in seconds, or None: as long as it runs."""
        own = (self.time_limits or (None, None))[0]
        limit: float | None = self.task._binding.max_lease(own or self.task.time_limit or worker.limits[0])
        return limit

    def _release(self, reason: Reason) -> None:
        try:
            self.task._binding.guard.store.release(Lease(self.claim(), 0), Release(reason))
        except (IdempotencyError, TypeError) as error:
            logger.warning(
                "%s[%s]: the lost child's lease was not released and runs out by itself: %s", self.name, self.id, error
            )

    def _release_when_gone(self) -> None:
        if _is_gone(self.worker_pid):
            self._release(Reason.FAILED)

    def _within_limit(self, work: Callable[[], object]) -> None:
        self._in_background(work).join(LONGEST_WAIT)

    def _in_background(self, work: Callable[[], object]) -> threading.Thread:
        thread = threading.Thread(target=work, name="celery-idempotent-release", daemon=True)
        thread.start()
        return thread


def request_class(wanted: Any) -> type:
    """Return the class that a task's ``Request`` attribute names."""
    found: type = symbol_by_name(wanted)
    return found


def _lost(error: SystemExit) -> ExceptionInfo:
    try:
        raise WorkerLostError(f"Worker exited prematurely: exit status {error.code!r}.")
    except WorkerLostError:
        return ExceptionInfo()


def _is_gone(pid: int) -> bool:
    """Wait until a process of that id is gone, and tell whether it is."""
    end = monotonic() + KILL_TIMEOUT
    while monotonic() < end:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:  # the id already names somebody else's process
            return True
        sleep(0.02)
    return False
