"""How a body ended: from what it raised to what the record is to say."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

from celery.exceptions import Ignore, Reject, Retry

from ..answers import Ending
from ..errors import LeaseLost
from ..records import Outcome, Reason, Release, State, attempt_number
from . import notices, worker
from .identity import DeliveryState

__all__ = ["Expired", "ending_of", "release_for"]


class Expired(Ignore):
    """The message expired, and the operation is neither being done nor done by its task id."""


def ending_of(task: Any, request: Any, error: BaseException) -> Ending:
    """Return what the record of a delivery is to say, given what its body raised."""
    state, policy = DeliveryState.of(request), task._binding.policy
    nesting = state.nesting
    codec = task._binding.guard.codec
    match error:
        case Retry():
            return release_for(request, error)
        case Reject():
            return Release(Reason.REQUEUED if error.requeue else Reason.REJECTED)
        case Expired():
            return Release(Reason.REVOKED)
        case LeaseLost():
            return Release(Reason.REQUEUED)
        case Ignore():
            if state.continued:
                # What comes before the continuation may take long, and no duplicate may run beside it.
                return Release(Reason.RETRY, policy.failure_ttl, attempt_number(nesting + 1, 0))
            return Outcome(State.COMPLETED, codec.encode_ignored(request.id, nesting if state.replaced else None))
        case Exception():
            if task._binding.is_final(error):
                return Outcome(State.FAILED, codec.encode_exception(error))
            # Celery ends the whole worker for want of memory, and the broker hands the message to the next one.
            fatal = isinstance(error, MemoryError) and not request.is_eager
            return Release(Reason.CRASHED if fatal else Reason.FAILED)
        case _:
            return Release(_reason_of_exit(request, state, error))


def release_for(request: Any, retry: Retry) -> Release:
    """Return the release of a run whose retry was published."""
    attempt = attempt_number(DeliveryState.of(request).nesting, (request.retries or 0) + 1)
    return Release(Reason.RETRY, seconds_until(retry.when), attempt)


def _reason_of_exit(request: Any, state: DeliveryState, error: BaseException) -> Reason:
    told = notices.announced(state.identity.owner)
    if told is not None:
        return told
    if worker.is_stopping() or request.is_eager:
        return Reason.SHUTDOWN
    if isinstance(error, (SystemExit, KeyboardInterrupt)):
        # Celery takes it for the loss of a child and puts the message back: that must not go on for ever.
        return Reason.CRASHED
    return Reason.FAILED  # as Celery sees it


def seconds_until(when: Any) -> float:
    """Return the seconds until a retry is due; Celery gives a number or a time."""
    if isinstance(when, datetime):
        aware = when if when.tzinfo else when.replace(tzinfo=timezone.utc)
        return max(0.0, (aware - datetime.now(timezone.utc)).total_seconds())
    return max(0.0, float(when or 0))
