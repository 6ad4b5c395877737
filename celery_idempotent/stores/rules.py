"""What each verb decides, as plain functions over one row.

This is the specification in executable form. Stores that decide in this process (memory, and any whose server can only
compare and set) use it as it is; stores that decide on their server are held against it by a state machine in the
tests.

Times are microseconds of the store's clock. Rules that follow from failures seen in practice are marked.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

from .records import RETRIES_LIMIT, Claim, Lease, Outcome, Reason, Record, Refusal, Release, State, Verdict

__all__ = ["Row", "acquire", "mark_dispatched", "mark_shutdown", "release", "renew", "settle", "view"]


SECOND = 1_000_000
#: A holder that has renewed this often is no crash loop; three renewals make one ttl.
STEADY_RENEWALS = 10
RENEWALS_PER_TTL = 3
#: Marks of tasks that a record keeps, so that no verb costs more with every duplicate. A task that waits is not marked
#: any more from the first limit on, a retry from the second on: it waits and runs all the same, and its copies are not
#: distinguished.
MOST_WAITING = 1000
MOST_MARKS = 1100
#: Tasks of a settled record whose dispatched callbacks are remembered. If the message of a task that was forgotten is
#: delivered again, they are dispatched again, under the ids that they had before.
MOST_DISPATCHED = 250

_KEEPS_CRASHES = {Reason.SHUTDOWN, Reason.REVOKED}
_KEEPS_MARK = {Reason.CRASHED, Reason.SHUTDOWN, Reason.REQUEUED}
_COMES_AGAIN = {*_KEEPS_MARK, Reason.RETRY}


@dataclass(slots=True)
class Row:
    """One record as a store keeps it."""

    state: State
    fence: int = 0
    owner: str = ""
    task_id: str = ""
    holder: str = ""
    lease_end: int = 0
    not_before: int = 0
    crashes: int = 0
    reason: str = ""
    fingerprint: str = ""
    payload: bytes = b""
    ended: int = 0
    expires: int = 0
    #: per waiting task id the (attempt, copy, token) that arrived last
    waiting: dict[str, tuple[int, int, str]] = field(default_factory=dict)
    #: per task id the attempt below which copies are superseded
    attempts: dict[str, int] = field(default_factory=dict)
    #: the task ids whose callbacks were dispatched, the oldest first
    dispatched: list[str] = field(default_factory=list)


def view(key: str, row: Row, now: int, claim: Claim | None = None) -> Record:
    """Return the row as the outside sees it at ``now``.

    Arguments:
        key: The key.
        row: The row.
        now: The store's time.
        claim: The claim that this answers, for which the record lists its own callbacks alone; None for people: all.
    """
    end = row.lease_end if row.state is State.IN_PROGRESS else row.not_before
    return Record(
        key=key,
        state=row.state,
        fence=row.fence,
        owner=row.owner,
        task_id=row.task_id,
        holder=row.holder,
        crashes=row.crashes,
        reason=row.reason,
        fingerprint=row.fingerprint,
        payload=row.payload,
        remaining=max(0, end - now) / SECOND,
        age=max(0, now - row.ended) / SECOND if row.ended else 0.0,
        held_for=max(0, now - row.fence) / SECOND if row.state is State.IN_PROGRESS else 0.0,
        retention=max(0, row.expires - now) / SECOND,
        waiting=len(row.waiting),
        dispatched=frozenset(name for name in row.dispatched if claim is None or name == claim.announcer),
    )


def superseded(row: Row, claim: Claim) -> bool:
    """Return whether a later copy or attempt of the same message has taken the place of this one.

    Only a copy can be: what was published on purpose, as by an operator who sends a failed task again, is never
    dropped.
    """
    if not claim.is_copy:
        return False
    if claim.attempt < row.attempts.get(claim.task_id, 0):
        return True
    if claim.task_id not in row.waiting:
        return False
    attempt, copy, token = row.waiting[claim.task_id]
    if claim.attempt != attempt:
        return claim.attempt < attempt
    return claim.copy < copy or (claim.copy == copy and claim.copy > 0 and claim.token != token)


def acquire(key: str, row: Row | None, claim: Claim, now: int) -> tuple[Lease | Refusal, Row]:
    """Answer a claim, and return the row that is to be stored with the answer."""
    if row is None:
        return _grant(Row(State.RELEASED), claim, now, taken_over=False)
    mine = row.task_id == claim.task_id
    alive = row.state is State.IN_PROGRESS and row.lease_end > now
    settled = row.state in (State.COMPLETED, State.FAILED)
    seen = partial(view, key, row, now, claim)
    reused = claim.fingerprint and row.fingerprint and not mine and row.fingerprint != claim.fingerprint
    if reused and row.state is not State.RELEASED:
        return Refusal(Verdict.KEY_REUSED, seen()), row
    if settled:
        row.waiting.pop(claim.task_id, None)
        return Refusal(Verdict(row.state.value), seen()), row
    if row.state is State.IN_PROGRESS and row.owner == claim.owner:
        # The first reply was lost, perhaps long ago: the asker counts its lease from this request.
        _extend(row, claim, now)
        return Lease(claim, row.fence, crashes=row.crashes), row
    if superseded(row, claim):
        return Refusal(Verdict.SUPERSEDED, seen()), row
    ended_by_publishing = row.state is State.IN_PROGRESS and bool(claim.sender) and claim.sender == row.owner
    # What was replaced by itself goes on as its continuation, which is nested more deeply, and meanwhile as nothing
    # else: a broker need not mark that it delivers a message again.
    goes_on = mine and claim.nesting >= row.attempts.get(claim.task_id, 0) // RETRIES_LIMIT
    retry_due = row.state is State.RELEASED and row.not_before > now and not goes_on
    if (alive and not ended_by_publishing) or retry_due:
        # What claims for a continuation that will not come is no message: that may have come, and its copies count.
        is_message = claim.nesting < RETRIES_LIMIT - 1
        if is_message and (claim.task_id in row.waiting or _marks(row) < MOST_WAITING):
            row.waiting[claim.task_id] = (claim.attempt, claim.copy, claim.token)
        last = row.attempts.get(claim.task_id, 0)
        if claim.attempt < last and claim.nesting == last // RETRIES_LIMIT:
            # It was published again: its copies count from here, also if what runs has died.
            row.attempts[claim.task_id] = claim.attempt
        return Refusal(Verdict.CONFLICT, seen()), row
    lapsed = row.state is State.IN_PROGRESS and not ended_by_publishing
    died = lapsed and row.reason != Reason.SHUTDOWN  # a shutdown that was announced is no crash
    row.crashes += died
    crashed = died or row.reason == Reason.CRASHED
    looping = mine and row.crashes >= claim.max_crashes and (crashed or claim.is_copy)
    # Messages of several task ids may take turns.
    if looping or (crashed and row.crashes >= 2 * claim.max_crashes):
        row.state, row.owner, row.reason, row.not_before = State.RELEASED, "", Reason.CRASH_LOOP.value, 0
        # The task has failed: published again, its message is not one of those that have been superseded.
        row.waiting.pop(claim.task_id, None)
        row.attempts.pop(claim.task_id, None)
        return Refusal(Verdict.CRASH_LOOP, seen()), row
    return _grant(row, claim, now, taken_over=lapsed)


def _grant(row: Row, claim: Claim, now: int, *, taken_over: bool) -> tuple[Lease, Row]:
    row.state, row.owner, row.holder, row.task_id = State.IN_PROGRESS, claim.owner, claim.holder, claim.task_id
    row.fence = max(now, row.fence + 1)
    _extend(row, claim, now)
    row.fingerprint, row.reason, row.not_before = claim.fingerprint, "", 0
    row.waiting.pop(claim.task_id, None)
    row.attempts.pop(claim.task_id, None)
    if claim.attempt:
        _mark_attempt(row, claim.attempt)
    return Lease(claim, row.fence, taken_over=taken_over, crashes=row.crashes), row


def _marks(row: Row) -> int:
    return len(row.waiting) + len(row.attempts)


def _mark_attempt(row: Row, attempt: int) -> None:
    """Remember below which attempt copies of the holder's message are superseded."""
    if row.task_id in row.attempts or _marks(row) < MOST_MARKS:
        row.attempts[row.task_id] = attempt


def _extend(row: Row, claim: Claim, now: int) -> None:
    row.lease_end = now + int(claim.lease_ttl * SECOND)
    row.expires = row.lease_end + int(claim.keep_ttl * SECOND)


def forgotten(lease: Lease) -> Row:
    """Return the row of a lease whose record is gone, although no other claim has been made on the key.

    A store that lost its data in the middle of a run must not make the run a duplicate of nothing: its effect has
    happened or is about to, and would happen again.
    """
    claim = lease.claim
    row = Row(State.IN_PROGRESS, lease.fence, lease.owner, claim.task_id, claim.holder, fingerprint=claim.fingerprint)
    if claim.attempt:
        row.attempts[claim.task_id] = claim.attempt
    return row


def outdated(row: Row, lease: Lease, now: int) -> bool:
    """Return whether a row is from before the lease was granted, and the lease in it, another delivery's, is over.

    A server that was restarted from a snapshot, and a replica that was promoted, know the key and not its last lease.
    """
    over = row.state is State.IN_PROGRESS and row.lease_end <= now and row.owner != lease.owner
    return (over or row.state is State.RELEASED) and row.fence < lease.fence


def renew(row: Row | None, lease: Lease, now: int) -> Row | None:
    """Return the row with the lease extended, or None if the lease is lost."""
    if row is None or outdated(row, lease, now):
        if not lease.claim.revive:
            return None
        row = forgotten(lease)
    if row.state is not State.IN_PROGRESS or row.owner != lease.owner:
        return None
    _extend(row, lease.claim, now)
    if now - row.fence > int(lease.claim.lease_ttl * SECOND) * STEADY_RENEWALS // RENEWALS_PER_TTL:
        row.crashes = 0
    return row


def settle(row: Row | None, lease: Lease, outcome: Outcome, ttl: float, now: int) -> Row | None:
    """Return the settled row, or None if the lease is lost."""
    if row is None or outdated(row, lease, now):
        row = forgotten(lease)
    if row.state is outcome.state and row.fence == lease.fence:
        return row
    if row.state is not State.IN_PROGRESS or row.owner != lease.owner:
        return None
    return Row(
        state=outcome.state,
        fence=row.fence,
        task_id=row.task_id,
        fingerprint=row.fingerprint,
        payload=outcome.payload,
        ended=now,
        expires=now + int(ttl * SECOND),
    )


def mark_shutdown(row: Row | None, lease: Lease) -> bool:
    """Note in the row that its holder's worker is about to end; return whether it still holds the lease."""
    if row is None or row.state is not State.IN_PROGRESS or row.owner != lease.owner:
        return False
    row.reason = Reason.SHUTDOWN.value
    return True


def release(row: Row | None, lease: Lease, release: Release, now: int) -> bool:
    """Free the row in place; return whether the owner still held the lease. A row that the store has lost is free."""
    if row is None or outdated(row, lease, now):
        return True
    if row.owner != lease.owner or row.state not in (State.IN_PROGRESS, State.RELEASED):
        if release.reason not in _COMES_AGAIN:
            _forget_waiting(row, lease.claim, now)
        return False
    if row.state is State.RELEASED:
        return True
    row.state, row.reason, row.holder = State.RELEASED, release.reason.value, ""
    row.expires = now + int(lease.claim.keep_ttl * SECOND)
    if release.reason is Reason.CRASHED:
        row.crashes += 1
    elif release.reason not in _KEEPS_CRASHES:
        row.crashes = 0
    if release.reason is Reason.RETRY:
        _mark_attempt(row, release.next_attempt)
        row.not_before = now + int(release.retry_in * SECOND)
        row.expires += int(release.retry_in * SECOND)
    elif release.reason not in _KEEPS_MARK:
        row.attempts.pop(row.task_id, None)
    return True


def _forget_waiting(row: Row, claim: Claim, now: int) -> None:
    """Forget the marks of a task that has ended while it waited, unless a later copy or attempt of it goes on.

    It may be sent again under its id. If that message is delivered twice before it has asked, it is a copy, which
    would be superseded.
    """
    last = row.waiting.get(claim.task_id, (0, 0, ""))
    if last[:2] < (claim.attempt, claim.copy) or last == (claim.attempt, claim.copy, claim.token):
        row.waiting.pop(claim.task_id, None)
    runs = row.lease_end > now and row.task_id == claim.task_id and row.state is State.IN_PROGRESS
    if not runs and row.attempts.get(claim.task_id, 0) <= claim.attempt:
        row.attempts.pop(claim.task_id, None)


def mark_dispatched(row: Row | None, task_id: str) -> bool:
    """Remember in the row that the callbacks of a task were dispatched; return whether there is a settled row for it.

    The first is kept for good, since it nearly always is the task that did the operation, and of the others the newest.
    """
    if row is None or row.state not in (State.COMPLETED, State.FAILED):
        return False
    if task_id not in row.dispatched:
        row.dispatched.append(task_id)
        del row.dispatched[1 : max(1, 1 + len(row.dispatched) - MOST_DISPATCHED)]
    return True
