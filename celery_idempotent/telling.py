"""What the guard tells of a delivery, for people: each decision as the event that has its facts."""

from __future__ import annotations

import sys
import traceback
from typing import Any

from . import events
from .answers import Delivery
from .holding import Holding
from .records import Record, Refusal, State, Verdict

__all__ = ["begins", "breaks_off", "conflicts", "ends", "loses", "refused", "replays"]


def begins(delivery: Delivery, holding: Holding) -> None:
    """Tell that the body is about to run."""
    claim, lease = holding.lease.claim, holding.lease
    data: dict[str, Any] = {
        "fence": lease.fence,
        "retries": claim.retries,
        "copy": claim.copy,
        "redelivered": claim.redelivered,
        "asked": holding.asked,
        "waited": delivery.waited,
    }
    if lease.taken_over:
        delivery.event(events.TakenOver, crashes=lease.crashes, **data)
    else:
        delivery.event(events.Acquired, **data)
    holding.open = True


def ends(delivery: Delivery, holding: Holding, kind: type[events.Event], **data: Any) -> None:
    """Tell how a run ended; not where none began, and not a second time."""
    if holding.open:
        holding.open = False
        delivery.event(kind, fence=holding.fence, **{"ran": holding.ran, **data})


def conflicts(delivery: Delivery, record: Record) -> None:
    """Tell that the operation is being done, or that its retry is awaited."""
    held_for = _other(delivery, record)
    delivery.event(events.Conflicted, held_by=record.holder, held_for=held_for, remaining=record.remaining)


def replays(delivery: Delivery, record: Record) -> None:
    """Tell that the delivery is answered with what is settled."""
    original, state = _other(delivery, record), record.state.value
    delivery.event(events.Replayed, age=record.age, original=original, state=state, waited=delivery.waited)


def refused(delivery: Delivery, refusal: Refusal) -> None:
    """Tell that the delivery may neither run nor be answered."""
    match refusal.verdict:
        case Verdict.SUPERSEDED:
            delivery.event(events.Superseding)
        case Verdict.KEY_REUSED:
            delivery.event(events.Reused, original=_other(delivery, refusal.record))
        case _:
            delivery.event(events.CrashLooped, crashes=refusal.record.crashes)


def loses(delivery: Delivery, holding: Holding, error: BaseException | None = None) -> None:
    """Tell that the lease was lost by a body that returned, or that raised ``error``."""
    text = State.COMPLETED.value if error is None else "".join(traceback.format_exception_only(error)).strip()
    ends(delivery, holding, events.LeaseMissed, ending=text)


def breaks_off(delivery: Delivery, holding: Holding) -> None:
    """Tell, of a run that nothing was told of, that whatever interrupted it kept it from being recorded."""
    if holding.open:
        error = sys.exc_info()[1]
        ends(delivery, holding, events.SettleFailed, error=f"interrupted by {error!r}")


def _other(delivery: Delivery, record: Record) -> str:
    return record.task_id if record.task_id != delivery.claim.task_id else ""
