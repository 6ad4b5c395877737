"""How a run ends in the store: settled, released, or committed by the task's own transaction.

Each of these is tried for as long as that can help, and none raises: what the body did counts, and the user's exception
wins.
"""

from __future__ import annotations

from enum import Enum
from time import monotonic

from . import events
from .answers import Delivery
from .errors import LeaseLost
from .holding import Holding
from .pauses import Pauses, uninterrupted
from .records import Outcome, Release, State

__all__ = ["STORE_PAUSE", "Commit", "committed", "release", "settle"]

#: Pauses in seconds between tries while the store cannot serve.
STORE_PAUSE = (0.1, 5.0)
#: Least time to try to settle, also where the lease is in doubt: an effect without a record may happen again.
SETTLE_PATIENCE = 5.0


class Commit(Enum):
    """What became of a settle within the task's own transaction."""

    YES = "committed"
    NO = "the lease is as it was before"
    LOST = "another delivery has the key"


def settle(delivery: Delivery, holding: Holding, outcome: Outcome, *, ttl: float) -> bool:
    """Settle, and tell whether the lease was still ours, as far as anybody knows."""
    pauses = _patience(holding)
    while True:
        try:
            uninterrupted(lambda: holding.store.settle(holding.lease, outcome, ttl=ttl))
        except LeaseLost:
            return False
        except Exception as error:  # noqa: BLE001 - the store's own, or a second interruption
            if uninterrupted(pauses.wait):
                continue
            # The effect has happened: to run again for want of a record is the one thing we are here to prevent.
            delivery.event(events.SettleFailed, error=str(error))
            return not holding.lost
        if outcome.state is State.COMPLETED:
            delivery.event(events.Completed, fence=holding.fence)
        else:
            delivery.event(events.Failed)
        return True


def release(delivery: Delivery, holding: Holding, release: Release) -> bool:
    """Release, and tell whether the lease was still ours, as far as anybody knows."""
    try:
        ours: bool = uninterrupted(lambda: holding.store.release(holding.lease, release))
    except Exception as error:  # noqa: BLE001 - the user's exception wins; the lease runs out by itself
        events.logger.error("The lease on %s could not be released: %s", holding.key, error)
        return not holding.lost
    if ours:
        delivery.event(events.Released, reason=release.reason.value)
    return ours


def committed(delivery: Delivery, holding: Holding) -> Commit | None:
    """Look whether the transaction in which the body settled was committed; None if the store cannot tell."""
    pauses = _patience(holding)
    while True:
        try:
            record = uninterrupted(lambda: holding.store.get(holding.key))
        except Exception as error:  # noqa: BLE001 - the store's own, or a second interruption
            if uninterrupted(pauses.wait):
                continue
            delivery.event(events.SettleFailed, error=str(error))
            return None
        if record is None:
            return Commit.NO
        if record.fence != holding.fence:
            return Commit.LOST
        if record.state is State.COMPLETED:
            delivery.event(events.Completed, fence=holding.fence)
            return Commit.YES
        ours = record.state is State.IN_PROGRESS and record.owner == holding.lease.owner
        return Commit.NO if ours else Commit.LOST


def _patience(holding: Holding) -> Pauses:
    limit = max(holding.deadline - monotonic(), SETTLE_PATIENCE)
    return Pauses(STORE_PAUSE, limit, lambda: False)  # a stopping worker waits for this
