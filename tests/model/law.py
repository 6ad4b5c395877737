"""What must hold: of every step of the store, in every state, and of every answer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from celery_idempotent.stores import rules
from celery_idempotent.stores.records import Reason, State

if TYPE_CHECKING:
    from .programs import Hold, Points
    from .protocol import Core, Message, Row, Worker

RUNNING, DONE, FREE = State.IN_PROGRESS.value, State.COMPLETED.value, State.RELEASED.value


def of_store(  # noqa: C901 - a list
    before: Row | None, call: tuple[Any, ...], owner: int, message: Message, fence: int, after: Row | None, told: Any
) -> str:
    """Return what is wrong with a step of the store, or ""."""
    verb = call[1]
    if before is None:
        return ""
    if before.state == DONE and (after is None or after.state != DONE or after.payload != before.payload):
        return f"{verb} changed an outcome that was settled"
    if after is None:
        return f"{verb} removed the record"
    if after.fence < before.fence:
        return f"{verb} took the fence back"
    mine = before.owner == owner and before.state in (RUNNING, FREE)
    if verb == "acquire":
        return _acquired(before, owner, message, told)
    if verb in ("renew", "settle", "release") and not mine:
        known = verb == "settle" and before.state == DONE and before.fence == fence
        if told[0] and not known:
            return f"the store accepted a {verb} of one that does not hold the lease"
        if after != before:
            return f"a {verb} of one that does not hold the lease changed the record"
    if verb in ("renew", "settle") and mine and before.state == RUNNING and not told[0]:
        return f"the store refused a {verb} of the holder"
    if verb == "release" and mine and not told[0]:
        return "the store refused a release of the holder"
    if verb == "settle" and told[0] and (after.state != DONE or after.fence != fence):
        return "a result was settled under another fence than its run's"
    if verb == "release" and mine and after.state != FREE:
        return "a lease that was released is held"
    return ""


def _acquired(before: Row, owner: int, message: Message, told: Any) -> str:  # noqa: C901 - a list
    alive = before.state == RUNNING and before.lease > 0
    mine = before.owner == owner
    ended = before.state == RUNNING and message.sender == before.owner
    awaited = before.state == FREE and before.not_before > 0
    if told[0] == "lease":
        if before.state == DONE:
            return "a lease was given on what is settled"
        if alive and not mine and not ended:
            return "a lease was given while another one holds"
        again = before.state == FREE and before.reason == Reason.RETRY and before.task == message.task
        if again and not message.retries and (message.copy or message.redelivered):
            return "an attempt that was retried runs again"
        if awaited and message.task != before.task:
            return "a duplicate got the lease before the retry that is due later"
        return ""
    verdict = told[1]
    if before.state == DONE and verdict != DONE:
        return f"what is settled was answered with {verdict}"
    if verdict == "superseded" and not (message.copy or message.redelivered):
        return "a message that was published on purpose was dropped"
    if verdict == "conflict":
        if before.state == RUNNING and mine:
            return "a delivery waits for its own lease"
        if ended:
            return "a retry waits for the lease of the run that published it"
        if not alive and not awaited:
            return "a delivery waits, and nothing holds the key"
        if awaited and message.task == before.task and not message.copy and message.retries:
            return "a retry waits for itself"
    return ""


def of_step(
    before: tuple[tuple[Any, ...], Hold | None],
    told: tuple[Any, ...],
    after: tuple[tuple[Any, ...], Hold | None],
    emitted: tuple[str, ...],
) -> str:
    """Return what is wrong with what a program makes of an input, or "".

    Arguments:
        before: What it waited for, and what its holder believed.
        told: The input.
        after: The same afterwards.
        emitted: The names of its events.
    """
    (waited, believed), (what, believes) = before, after
    if "SettleFailed" in emitted and believed is not None and believed.trust and not believed.lost:
        return "a result is given up before its lease has run out"
    if {"Acquired", "TakenOver"} & {*emitted} and believes is not None and not believes.trust:
        return "a body begins under a lease that is in doubt"
    match waited, told, what:
        case ("call", "acquire"), ("refused", _, seen), ("dispatch", _) if seen.dispatched:
            return "callbacks are dispatched again that are known to have been dispatched"
        case ("call", "release", *_), (False,), ("end", "failed", *_):
            return "a run that has lost its lease fails its task"
        case ("call", "get"), ("found", seen), ("end", "requeue") if seen is not None and seen.holds:
            return "a dead child's lease is not given back"
        case ("body",), ("raises",), (verb, *rest) if (verb, *rest[:1]) != ("call", "release"):
            return "a body has raised, and its lease is not given back"
        case ("publish", "retry"), ("published",), (verb, *rest) if (verb, *rest[:1]) != ("call", "release"):
            return "a retry is published, and the lease is not given back"
    return ""


def fence(after: Row | None, others: Iterable[int]) -> str:
    """Return what is wrong with the fence of a new lease, or ""."""
    if after is not None and after.fence <= max(others, default=0):
        return "the fence of a new lease is not above those before it"
    return ""


def kept(row: rules.Row, now: int, keep: float) -> str:
    """Return what is wrong with how long a record is kept, or ""."""
    end = max(now, row.lease_end if row.state is State.IN_PROGRESS else row.not_before)
    if row.expires < end + int(keep * rules.SECOND):
        return "a record is not kept for as long as it should be"
    return ""


def of_core(core: Core, points: Points) -> tuple[str, bool]:
    """Return what is wrong in a state, and whether meddling excuses it."""
    trusting = 0
    for worker in core.workers:
        hold = worker.hold
        if hold is None or hold.lost or not points.known[worker.point].in_body:
            continue
        trusting += hold.trust > 0
        if hold.trust and hold.due >= hold.trust:
            return "a lease is not renewed before its trust ends", False
        renews = points.known[worker.point].watched and points.sends(hold)
        if not hold.due and worker.beat is None and not renews:
            return "a body runs, and its lease is not renewed", False
    if trusting > 1:
        return "two bodies run, and both rely on their leases", True
    return "", False


def answer(row: Row | None, value: int, unsettled: bool) -> str:
    """Return what is wrong with a value that a caller gets, or ""."""
    if unsettled or (row is not None and row.state == DONE and row.payload == value):
        return ""
    return "a caller is answered with another value than the one that is settled"


def failure(error: str) -> str:
    """Return what is wrong with an error that a caller gets, or ""."""
    return "" if error in ("Boom", "CrashLoop") else f"a caller gets {error}, and no body raised it"


def dispatch(core: Core, worker: Worker, whose: str, unsettled: bool) -> str:
    """Return what is wrong with the ids of callbacks, or "".

    Where a result could not be recorded for as long as that was tried, its callbacks have the ids of its own run.
    """
    row = core.row
    if row is None or row.state != DONE or unsettled:
        return ""
    if whose == "own":
        same = row.fence == worker.fence
        return "" if same else "callbacks get other ids than those of the settled run"
    return "" if whose == "theirs" else "callbacks are dispatched under ids that follow from nothing"


def messages(core: Core, points: Points) -> list[str]:
    """Return the tasks of the messages there are, without those whose workers have published another in their place."""
    leaving = {
        worker.message[:6]
        for worker in core.workers
        if points.known[worker.point].what in (("end", "ignored"), ("end", "retried"))
    }
    return [entry.message.task for entry in core.entries if entry.queued or entry.message[:6] not in leaving]


def converged(core: Core, points: Points) -> bool:
    """Return whether no two messages of one task wait for a body that runs."""
    waiting = messages(core, points)
    bodies = sum(points.known[worker.point].in_body for worker in core.workers)
    return bodies != 1 or len(waiting) == len(set(waiting))
