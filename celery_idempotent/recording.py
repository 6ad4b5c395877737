"""How a run ends in the store: settled, released, or committed by the task's own transaction.

Each of these is tried for as long as that can help, and none raises: what the body did counts, and the user's exception
wins.
"""

from __future__ import annotations

from enum import Enum
from time import monotonic
from typing import Any

from . import events, hooks, telling
from .answers import Delivery
from .errors import LeaseLost
from .holding import Holding
from .pauses import Pauses, never, uninterrupted
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


def settle(
    delivery: Delivery, holding: Holding, outcome: Outcome, *, ttl: float, error: BaseException | None = None
) -> bool:
    """Settle what the body returned or raised, and tell whether the lease was still ours, as far as anybody knows."""
    pauses, ran, since = _patience(holding), holding.ran, monotonic()
    while True:
        try:
            uninterrupted(lambda: holding.store.settle(holding.lease, outcome, ttl=ttl))
        except LeaseLost:
            return _lost(delivery, holding, error)
        except Exception as failure:  # noqa: BLE001 - the store's own, or a second interruption
            if uninterrupted(pauses.wait):
                continue
            if holding.lost:
                return _lost(delivery, holding, error)
            # The effect has happened: to run again for want of a record is the one thing we are here to prevent.
            telling.ends(delivery, holding, events.SettleFailed, error=str(failure), ran=ran)
            return True
        data: dict[str, Any] = {"ran": ran, "took": monotonic() - since}
        if outcome.state is State.COMPLETED:
            telling.ends(delivery, holding, events.Completed, **data)
        else:
            telling.ends(delivery, holding, events.Failed, error=type(error).__qualname__, **data)
        return True


def release(delivery: Delivery, holding: Holding, release: Release, error: BaseException | None = None) -> bool:
    """Release after ``error``, and tell whether the lease was still ours, as far as anybody knows."""
    reason, ran = release.reason.value, holding.ran
    try:
        ours: bool = uninterrupted(lambda: holding.store.release(holding.lease, release))
    except Exception as failure:  # noqa: BLE001 - the user's exception wins; the lease runs out by itself
        if holding.lost:
            return _lost(delivery, holding, error)
        if not holding.open:  # no run began under it, so that no event tells this
            hooks.logger.error("The lease on %s could not be released: %s", holding.key, failure)
        telling.ends(delivery, holding, events.ReleaseFailed, reason=reason, error=str(failure), ran=ran)
        return True
    if not ours:
        return _lost(delivery, holding, error)
    telling.ends(delivery, holding, events.Released, reason=reason, ran=ran)
    return True


def committed(delivery: Delivery, holding: Holding, error: BaseException | None = None) -> Commit | None:
    """Look whether the transaction in which the body settled was committed; None if the store cannot tell."""
    pauses, ran, since = _patience(holding), holding.ran, monotonic()
    while True:
        try:
            record = uninterrupted(lambda: holding.store.get(holding.key))
        except Exception as failure:  # noqa: BLE001 - the store's own, or a second interruption
            if uninterrupted(pauses.wait):
                continue
            telling.ends(delivery, holding, events.SettleFailed, error=str(failure), ran=ran)
            return None
        if record is None:
            return Commit.NO
        if record.fence == holding.fence and record.state is State.COMPLETED:
            telling.ends(delivery, holding, events.Completed, ran=ran, took=monotonic() - since)
            return Commit.YES
        if record.state is State.IN_PROGRESS and record.owner == holding.lease.owner:
            return Commit.NO
        _lost(delivery, holding, error)
        return Commit.LOST


def _lost(delivery: Delivery, holding: Holding, error: BaseException | None) -> bool:
    telling.loses(delivery, holding, error)
    return False


def _patience(holding: Holding) -> Pauses:
    limit = max(holding.deadline - monotonic(), SETTLE_PATIENCE)
    return Pauses(STORE_PAUSE, limit, never)  # a stopping worker waits for this
