"""The guard: acquire, run under the heartbeat, settle or release; or replay; or stand aside.

It knows no framework and no server. An adapter translates its request into a `Claim`, what an exception means into
an `Ending`, and the `Answer` into its own control flow; a store decides who holds the lease.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from enum import Enum
from time import monotonic
from typing import Any, TypeAlias

from .. import events
from ..errors import (
    Conflict,
    CrashLoop,
    KeyReused,
    LeaseLost,
    RecordUnreadable,
    ResultUnavailable,
    SettleNotCommitted,
    StoreError,
    StoreUnreachable,
)
from ..events import Event, count, emit, has_receivers
from ..stores.base import Store
from ..stores.records import Claim, Lease, Outcome, Reason, Record, Refusal, Release, State, Verdict
from .backoff import Backoff, never, retry_if_interrupted, sleep
from .breaker import Breaker
from .heartbeat import Heartbeat
from .lease import HeldLease
from .policy import Policy
from .results import Codec, Kind, Origin


@dataclass(frozen=True, slots=True)
class Ran:
    """The body ran here, and ``value`` is what it returned."""

    value: Any


@dataclass(frozen=True, slots=True)
class Replayed:
    """The operation was done before; ``value`` is what it returned then."""

    value: Any
    record: Record


@dataclass(frozen=True, slots=True)
class Ignored:
    """The operation was done before and left no result of its own; ``reference`` may name a task that has it.

    ``nesting`` is how often its message had been replaced before others replaced it, or None if they did not.
    """

    reference: str
    record: Record
    nesting: int | None = None


@dataclass(frozen=True, slots=True)
class Busy:
    """The operation cannot be answered now: try again, at the latest in ``remaining`` seconds.

    Somebody does it, perhaps as ``holder_task_id``; or ``error`` says why the store could not tell. It is ``awaited``
    where nobody does it at the moment, and that task is to go on with it.
    """

    remaining: float
    holder_task_id: str | None = None
    awaited: bool = field(default=False, compare=False)
    error: StoreError | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Dropped:
    """A later copy of this message will be answered; this one needs nothing."""


Answer: TypeAlias = Ran | Replayed | Ignored | Busy | Dropped
Ending: TypeAlias = Release | Outcome


@dataclass(frozen=True, slots=True)
class Delivery:
    """One delivery as an adapter hands it to the guard.

    Arguments:
        claim: What it asks of the store.
        body: Runs the work, given what it holds.
        ending: What an exception of the body means for the record.
        task: The task's name, for events.
        task_id: The message's id, for events.
        wants_result: Whether somebody reads the value: a caller, a callback, a chain, a chord.
        patience: Longest time in seconds that the delivery may be held before the body runs.
        least_wait: Tells for how long in seconds it waits for whoever holds the key, whatever the policy says; asked
            once it meets somebody.
        stopping: Tells whether this process is about to stop, so that nobody should wait.
        lost_error: Which `LeaseLost` the body's holding raises.
        max_lease: Seconds after which its lease is not renewed any more, or None.
        published: Whether the framework will keep the value under ``task_id``, where others can read it.
        tell: What hears of this delivery's events; `events.emit`, or what calls it.
        noted: Kinds of events that it wants even where no hook does.
        came: Monotonic time at which the delivery came.
        recalls: Hears of the record of a failure before that is raised again.
        alone: Whether no other delivery has its task id, so that any may be told that the operation kills its holders.
    """

    claim: Claim
    body: Callable[[HeldLease], Any]
    ending: Callable[[BaseException], Ending]
    task: str = ""
    task_id: str = ""
    wants_result: bool = True
    patience: float = float("inf")
    least_wait: Callable[[], float] = lambda: 0.0
    stopping: Callable[[], bool] = never
    lost_error: type[LeaseLost] = LeaseLost
    max_lease: float | None = None
    published: bool = False
    tell: Callable[[Event], None] = emit
    noted: Container[type[Event]] = ()
    came: float = field(default_factory=lambda: monotonic())  # looked up anew, for tests
    recalls: Callable[[Record], None] = lambda record: None
    alone: bool = False

    @property
    def waited(self) -> float:
        """Seconds since it came."""
        return monotonic() - self.came

    def origin(self, lease: Lease) -> Origin:
        """Return which run the value is of that the body returns under this lease."""
        return Origin(lease.key, lease.fence, self.task_id, self.published)

    def event(self, kind: type[Event], **data: Any) -> None:
        """Tell of an event about this delivery; one that nobody is to hear is counted, and not made."""
        if kind in self.noted or has_receivers(kind):
            self.tell(kind(self.claim.key, self.task, self.task_id, holder=self.claim.holder, **data))
        else:
            count(kind)


@dataclass(eq=False)
class Guard:
    """Make each operation of one task take effect once.

    Arguments:
        store: Remembers the operations.
        policy: The task's options.
        codec: Turns values into payloads and back.
        heartbeat: Renews the leases of this process.
        breaker: Spares a store that cannot serve.
    """

    store: Store
    policy: Policy
    codec: Codec
    heartbeat: Heartbeat
    breaker: Breaker

    def run(self, delivery: Delivery) -> Answer:
        """Answer a delivery: run its body, or replay what an earlier run settled, or say that it must wait.

        Raises:
            KeyReused, CrashLoop, Conflict, ResultUnavailable: see `celery_idempotent.errors`; the body did not run.
            SettleNotCommitted: the body ran and settled, and did not commit.
            StoreError: the store cannot serve, and the policy is ``on_store_error="raise"``.
            BaseException: what the body raised, or what the settled run raised.
        """
        found = self.begin(delivery)
        return self._hold(delivery, found) if isinstance(found, HeldLease) else found

    def begin(self, delivery: Delivery) -> HeldLease | Answer:
        """Return what the body is to run under, or the answer to a delivery whose body is not to run.

        For who runs the body itself, between `hold` and `end`. What holds nothing (fence 0) has nothing to end.
        Raises what `run` raises before the body.
        """
        beginning = self.beginning(delivery)
        while isinstance(found := beginning.step(), float):
            sleep(found, delivery.stopping)
        return found

    def beginning(self, delivery: Delivery) -> Beginning:
        """Return the steps of `begin`, for who must not wait in between."""
        return Beginning(self, delivery)

    def _hold(self, delivery: Delivery, holding: HeldLease) -> Answer:
        if not holding.fence:
            return Ran(delivery.body(holding))
        try:
            try:
                self.hold(delivery, holding)
                value = delivery.body(holding)
            except BaseException as error:  # noqa: BLE001 - every ending is recorded, and raised again
                return self._raised(delivery, holding, error)
            return self._returned(delivery, holding, value)
        finally:
            self._leave(delivery, holding)

    def hold(self, delivery: Delivery, holding: HeldLease) -> None:
        """Renew the lease from now on, and emit the event that the body begins."""
        self.heartbeat.watch(holding)  # first: a hook may take longer than the lease lasts
        begins(delivery, holding)

    def give_up(self, delivery: Delivery, holding: HeldLease, release: Release, error: BaseException) -> None:
        """Release the lease of a body that goes on: another message, of which ``error`` tells, carries it on.

        What a body settled within its own transaction is decided by the commit, and not given up.
        """
        if not holding.fence or holding.within is not None:
            return
        self.heartbeat.forget(holding)
        holding.given_up = True
        retry_if_interrupted(lambda: release_lease(delivery, holding, release, error))
        holding.lost = True

    def end(self, delivery: Delivery, holding: HeldLease, value: object, error: BaseException | None) -> Answer:
        """Answer a delivery whose body returned ``value``, or raised ``error``; raises what `run` raises after it."""
        try:
            if error is not None:
                return self._raised(delivery, holding, error)
            return self._returned(delivery, holding, value)
        finally:
            self._leave(delivery, holding)

    def _leave(self, delivery: Delivery, holding: HeldLease) -> None:
        # However the body was left, nobody may go on to renew the lease, and how the run ended was told.
        self.heartbeat.forget(holding)
        breaks_off(delivery, holding)

    def holding(self, delivery: Delivery, lease: Lease, since: float) -> HeldLease:
        """Return what a body holds under a lease that was asked for at ``since``."""
        return HeldLease(
            self.store,
            lease,
            since,
            max_lease=delivery.max_lease,
            lost_error=delivery.lost_error,
            encode=lambda result: self._completed(delivery, lease, result),
            result_ttl=self.policy.result_ttl,
        )

    def _completed(self, delivery: Delivery, lease: Lease, value: object) -> Outcome:
        payload = self.codec.encode_value(value, store_result=self.policy.store_result, origin=delivery.origin(lease))
        return Outcome(State.COMPLETED, payload)

    def _returned(self, delivery: Delivery, holding: HeldLease, value: object) -> Answer:
        if holding.given_up:
            events.logger.info("%s: its result is its retry's, and not what this run returned after it", holding.key)
            return Dropped()
        if holding.within is not None:
            self.heartbeat.forget(holding)
            (result,) = holding.within
            answer = retry_if_interrupted(lambda: self._settled_within(delivery, holding, result))
        else:
            answer = Ran(value) if retry_if_interrupted(lambda: self._recorded(delivery, holding, value)) else None
        return duplicate(delivery, self.store, self.policy, self.codec) if answer is None else answer

    def _recorded(self, delivery: Delivery, holding: HeldLease, value: object) -> bool:
        outcome = self._completed(delivery, holding.lease, value)
        self.heartbeat.forget(holding)  # not before: a large result may take longer to write than the lease lasts
        return settle(delivery, holding, outcome, ttl=self.policy.result_ttl)

    def _settled_within(self, delivery: Delivery, holding: HeldLease, result: object) -> Answer | None:
        found = committed(delivery, holding)
        if found is Commit.LOST:
            return None
        if found is Commit.NO:
            error = not_committed(holding.key)
            release_lease(delivery, holding, Release(Reason.FAILED), error)
            raise error
        return Ran(result)

    def _raised(self, delivery: Delivery, holding: HeldLease, error: BaseException) -> Answer:
        self.heartbeat.forget(holding)
        ending = _ending(delivery, error)
        if holding.given_up:
            if not isinstance(error, Exception):
                raise error
            if not isinstance(ending, Release) or ending.reason is Reason.FAILED:
                events.logger.error("%s raised after it had published its retry", holding.key, exc_info=error)
            return Dropped()
        ours = retry_if_interrupted(lambda: self._ended(delivery, holding, ending, error))
        if isinstance(ours, Ran):
            return ours
        # Who raises LeaseLost may be acked for it: somebody must be left to answer, also where the store said nothing.
        if ours and not isinstance(error, LeaseLost):
            raise error
        if not isinstance(error, Exception):  # the process is to end, whoever holds the lease
            raise error
        if isinstance(ending, Release) and ending.reason is Reason.RETRY:
            return Dropped()  # the retry that it has published goes on in its place, and perhaps was what took over
        return duplicate(delivery, self.store, self.policy, self.codec)

    def _ended(self, delivery: Delivery, holding: HeldLease, ending: Ending, error: BaseException) -> Ran | bool:
        within = holding.within if isinstance(error, Exception) else None
        if within and committed(delivery, holding, error) is Commit.YES:
            # The effect and its record are there: whatever failed after the commit, the operation has succeeded.
            events.logger.error("%s was committed, and its body raised after that", holding.key, exc_info=error)
            return Ran(within[0])
        if isinstance(ending, Release):
            return release_lease(delivery, holding, ending, error)
        ttl = self.policy.failure_ttl if ending.state is State.FAILED else self.policy.result_ttl
        return settle(delivery, holding, ending, ttl=ttl, error=error)


def _ending(delivery: Delivery, error: BaseException) -> Ending:
    """Ask the adapter what an exception means; should that fail, it must not hide the exception."""
    try:
        return retry_if_interrupted(lambda: delivery.ending(error))
    except Exception:  # noqa: BLE001 - the adapter's own
        events.logger.exception("%s: what this error means cannot be told: %r", delivery.claim.key, type(error))
        return Release(Reason.FAILED)


# How a delivery comes to its lease, or to its answer: in steps, between which it may have to wait.
#
# A step asks the store and does not wait. Whoever takes the steps sleeps as they say: a thread, or a coroutine, which
# must not keep a thread while it does.


#: Pauses in seconds while a waiter looks whether the holder settled.
WAIT_PAUSE = (0.05, 1.0)


class Beginning:
    """One delivery, until its body is to run or it is answered.

    Arguments:
        guard: Whose delivery it is.
        delivery: The delivery.
    """

    def __init__(self, guard: Guard, delivery: Delivery) -> None:
        self.guard, self.delivery = guard, delivery
        self.patience = Backoff(STORE_PAUSE, delivery.patience, delivery.stopping)
        self.waiting: Backoff | None = None
        self.least = 0.0

    def step(self) -> HeldLease | Answer | float:
        """Return what the body is to run under, or the answer, or the seconds to sleep before the next step.

        Raises:
            BaseException: what `Guard.run` raises before the body.
        """
        since = monotonic()
        found = self._acquire()
        if isinstance(found, StoreError):
            return self._store_failed(found)
        if isinstance(found, Lease):
            return self._granted(found, since)
        if found.verdict is Verdict.CONFLICT:
            return self._conflicts(found.record)
        return refused(self.delivery, found, self.guard.policy, self.guard.codec)

    def _acquire(self) -> Lease | Refusal | StoreError:
        guard, claim = self.guard, self.delivery.claim
        try:
            return guard.breaker.call(guard.store, guard.store.acquire, claim)
        except StoreError as error:
            return error
        except BaseException as error:  # interrupted: the store may have granted what nobody would give back
            release = Release(Reason.FAILED if isinstance(error, Exception) else Reason.SHUTDOWN)
            release_lease(self.delivery, HeldLease(guard.store, Lease(claim, 0), monotonic()), release)
            raise

    def _store_failed(self, error: StoreError) -> HeldLease | Answer | float:
        guard, delivery = self.guard, self.delivery
        if isinstance(error, RecordUnreadable):
            return unreadable(guard.policy, error)
        if guard.policy.on_store_error == "raise":
            raise error
        if guard.policy.on_store_error == "run":
            delivery.event(events.RanUnprotected, error=str(error))
            return HeldLease(guard.store, Lease(delivery.claim, 0), monotonic())
        pause = self.patience.next()
        return Busy(STORE_PAUSE[1], error=error) if pause is None else pause

    def _granted(self, lease: Lease, since: float) -> HeldLease | Answer | float:
        delivery, claim = self.delivery, self.delivery.claim
        holding = self.guard.holding(delivery, lease, since)
        if holding.doubtful:
            # The answer came so late that another may have the lease by now. Whoever has it is told so again.
            pause = self.patience.next()
            if pause is not None:
                return pause
            release_lease(delivery, holding, Release(Reason.SHUTDOWN))
            return Busy(STORE_PAUSE[1], error=too_late(holding.key, holding.asked, claim.lease_ttl))
        if delivery.alone and lease.taken_over and lease.crashes >= claim.max_crashes:
            # Stores tell it to a delivery whose task id they know.
            release_lease(delivery, holding, Release(Reason.CRASH_LOOP))
            delivery.event(events.CrashLooped, crashes=lease.crashes)
            raise crash_loop(lease.key, lease.crashes)
        return holding

    def _conflicts(self, record: Record) -> Answer | float:
        delivery, policy = self.delivery, self.guard.policy
        another = record.task_id != delivery.claim.task_id
        if self.waiting is None:
            conflicts(delivery, record)
            if policy.on_conflict == "raise" and another:
                raise being_done(record)
            self.least = delivery.least_wait()
            limit = max(self.least, policy.wait_timeout if policy.on_conflict == "wait" else 0.0)
            self.waiting = Backoff(WAIT_PAUSE, min(limit, self.patience.end - monotonic()), delivery.stopping)
        # One that comes again by itself need not wait for the holder it met.
        pause = self.waiting.next() if another or self.least else None
        if pause is not None:
            return pause
        return Busy(record.remaining, record.task_id, awaited=record.state is State.RELEASED)


#: A record that cannot be read is looked at again after this: by then it was mended, or this worker upgraded.
UNREADABLE_PAUSE = 60.0


def refused(delivery: Delivery, refusal: Refusal, policy: Policy, codec: Codec) -> Answer:
    """Answer a delivery whose claim was refused for good.

    Raises:
        KeyReused, CrashLoop, Conflict, ResultUnavailable: see `celery_idempotent.errors`.
        RecordUnreadable: the record cannot be read, and the policy is ``on_store_error="raise"``.
        BaseException: what the settled run raised.
    """
    record = refusal.record
    if refusal.verdict in (Verdict.COMPLETED, Verdict.FAILED):
        return _replay(delivery, record, policy, codec)
    emit_refused(delivery, refusal)
    if refusal.verdict is Verdict.KEY_REUSED:
        raise key_reused(record)
    if refusal.verdict is Verdict.CRASH_LOOP:
        raise crash_loop(record.key, record.crashes)
    return Dropped()


def duplicate(delivery: Delivery, store: Store, policy: Policy, codec: Codec) -> Answer:
    """Answer a run that lost its lease: with what is settled, or by standing aside until something is."""
    try:
        record = retry_if_interrupted(lambda: store.get(delivery.claim.key))
    except Exception as error:  # noqa: BLE001 - the store cannot tell, and will be asked again
        events.logger.warning("What became of %s cannot be told yet: %s", delivery.claim.key, error)
        record = None
    if record is not None and record.state in (State.COMPLETED, State.FAILED):
        return _replay(delivery, record, policy, codec)
    if record is None:
        return Busy(STORE_PAUSE[1])
    return Busy(record.remaining, record.task_id, awaited=record.state is State.RELEASED)


def unreadable(policy: Policy, error: StoreError) -> Busy:
    """Stand aside from a record that cannot be read, and not run: it may well say that the operation is done."""
    if policy.on_store_error == "raise":
        raise error
    events.logger.error("%s", error)
    return Busy(UNREADABLE_PAUSE, error=error)


def _replay(delivery: Delivery, record: Record, policy: Policy, codec: Codec) -> Answer:
    completed = record.state is State.COMPLETED
    if completed and policy.on_duplicate == "raise" and record.task_id != delivery.claim.task_id:
        raise done_before(record)
    try:
        payload = codec.decode(record.payload, age=record.age)
    except StoreError as error:
        return unreadable(policy, error)
    replays(delivery, record)
    if not completed:
        delivery.recalls(record)
        raise codec.rebuild_exception(payload, policy.remember_failures)
    if payload.kind is Kind.VALUE:
        return Replayed(payload.data, record)
    if payload.kind is Kind.IGNORED:
        return Ignored(payload.reason, record, payload.data if isinstance(payload.data, int) else None)
    if delivery.wants_result:
        raise not_kept(record, payload.reason)
    return Replayed(None, record)


# How a run ends in the store: settled, released, or committed by the task's own transaction.
#
# Each of these is tried for as long as that can help, and none raises: what the body did counts, and the user's
# exception wins.


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
    delivery: Delivery, holding: HeldLease, outcome: Outcome, *, ttl: float, error: BaseException | None = None
) -> bool:
    """Settle what the body returned or raised, and tell whether the lease was still ours, as far as anybody knows."""
    pauses, ran, since = _patience(holding), holding.ran, monotonic()
    while True:
        try:
            retry_if_interrupted(lambda: holding.store.settle(holding.lease, outcome, ttl=ttl))
        except LeaseLost:
            return _lost(delivery, holding, error)
        except Exception as failure:  # noqa: BLE001 - the store's own, or a second interruption
            if retry_if_interrupted(pauses.wait):
                continue
            if holding.lost:
                return _lost(delivery, holding, error)
            # The effect has happened: to run again for want of a record is the one thing we are here to prevent.
            ends(delivery, holding, events.SettleFailed, error=str(failure), ran=ran)
            return True
        data: dict[str, Any] = {"ran": ran, "took": monotonic() - since}
        if outcome.state is State.COMPLETED:
            ends(delivery, holding, events.Completed, **data)
        else:
            ends(delivery, holding, events.Failed, error=type(error).__qualname__, **data)
        return True


def release_lease(delivery: Delivery, holding: HeldLease, release: Release, error: BaseException | None = None) -> bool:
    """Release after ``error``, and tell whether the lease was still ours, as far as anybody knows."""
    reason, ran = release.reason.value, holding.ran
    try:
        ours: bool = retry_if_interrupted(lambda: holding.store.release(holding.lease, release))
    except Exception as failure:  # noqa: BLE001 - the user's exception wins; the lease runs out by itself
        if holding.lost:
            return _lost(delivery, holding, error)
        if not holding.open:  # no run began under it, so that no event tells this
            events.logger.error("The lease on %s could not be released: %s", holding.key, failure)
        ends(delivery, holding, events.ReleaseFailed, reason=reason, error=str(failure), ran=ran)
        return True
    if not ours:
        return _lost(delivery, holding, error)
    ends(delivery, holding, events.Released, reason=reason, ran=ran)
    return True


def committed(delivery: Delivery, holding: HeldLease, error: BaseException | None = None) -> Commit | None:
    """Look whether the transaction in which the body settled was committed; None if the store cannot tell."""
    pauses, ran, since = _patience(holding), holding.ran, monotonic()
    while True:
        try:
            record = retry_if_interrupted(lambda: holding.store.get(holding.key))
        except Exception as failure:  # noqa: BLE001 - the store's own, or a second interruption
            if retry_if_interrupted(pauses.wait):
                continue
            ends(delivery, holding, events.SettleFailed, error=str(failure), ran=ran)
            return None
        if record is None:
            return Commit.NO
        if record.fence == holding.fence and record.state is State.COMPLETED:
            ends(delivery, holding, events.Completed, ran=ran, took=monotonic() - since)
            return Commit.YES
        if record.state is State.IN_PROGRESS and record.owner == holding.lease.owner:
            return Commit.NO
        _lost(delivery, holding, error)
        return Commit.LOST


def _lost(delivery: Delivery, holding: HeldLease, error: BaseException | None) -> bool:
    loses(delivery, holding, error)
    return False


def _patience(holding: HeldLease) -> Backoff:
    limit = max(holding.deadline - monotonic(), SETTLE_PATIENCE)
    return Backoff(STORE_PAUSE, limit, never)  # a stopping worker waits for this


def begins(delivery: Delivery, holding: HeldLease) -> None:
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


def ends(delivery: Delivery, holding: HeldLease, kind: type[events.Event], **data: Any) -> None:
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


def emit_refused(delivery: Delivery, refusal: Refusal) -> None:
    """Tell that the delivery may neither run nor be answered."""
    match refusal.verdict:
        case Verdict.SUPERSEDED:
            delivery.event(events.Superseding)
        case Verdict.KEY_REUSED:
            delivery.event(events.Reused, original=_other(delivery, refusal.record))
        case _:
            delivery.event(events.CrashLooped, crashes=refusal.record.crashes)


def loses(delivery: Delivery, holding: HeldLease, error: BaseException | None = None) -> None:
    """Tell that the lease was lost by a body that returned, or that raised ``error``."""
    text = State.COMPLETED.value if error is None else "".join(traceback.format_exception_only(error)).strip()
    ends(delivery, holding, events.LeaseMissed, ending=text)


def breaks_off(delivery: Delivery, holding: HeldLease) -> None:
    """Tell, of a run that nothing was told of, that whatever interrupted it kept it from being recorded."""
    if holding.open:
        error = sys.exc_info()[1]
        ends(delivery, holding, events.SettleFailed, error=f"interrupted by {error!r}")


def _other(delivery: Delivery, record: Record) -> str:
    return record.task_id if record.task_id != delivery.claim.task_id else ""


def being_done(record: Record) -> Conflict:
    """Return the error for a duplicate that may not wait for the holder."""
    holder = record.holder or "a retry that is due later"
    error = Conflict(
        f"{record.key!r} is being done by {holder} for another {record.remaining:.1f} s. "
        'Try again later, or let it wait with on_conflict="wait".'
    )
    error.remaining = record.remaining
    return error


def in_progress(key: str, remaining: float) -> Conflict:
    """Return the error for a caller who came while the operation is being done, and whom nobody will call again."""
    error = Conflict(
        f"{key!r} is being done elsewhere, for another {remaining:.1f} s unless that takes longer. "
        'Try again later, or wait for it with on_conflict="wait" and a longer wait_timeout.'
    )
    error.remaining = remaining
    return error


def done_before(record: Record) -> Conflict:
    """Return the error for a duplicate that may not be answered with the settled result."""
    return Conflict(f'{record.key!r} was done {record.age:.0f} s ago, and the task says on_duplicate="raise".')


def key_reused(record: Record) -> KeyReused:
    """Return the error for a key that came with other arguments."""
    when = f"{record.age:.0f} s ago" if record.age else "just now"
    return KeyReused(
        f"The key {record.key!r} was used {when} with other arguments (by task {record.task_id}). "
        "Expected the same arguments for the same key: give this call a key of its own, "
        "or leave arguments that may differ out of the comparison with fingerprint=[...]."
    )


def crash_loop(key: str, crashes: int) -> CrashLoop:
    """Return the error for an operation whose holders keep dying."""
    return CrashLoop(
        f"{key!r} has lost its worker {crashes} times in a row; this message does not run it again. "
        "Look for what kills the worker (memory, a native crash); publish the task anew once it is mended."
    )


def not_kept(record: Record, reason: str) -> ResultUnavailable:
    """Return the error for a duplicate that wants a value which was not kept."""
    return ResultUnavailable(
        f"{record.key!r} was done {record.age:.0f} s ago and its result was not kept ({reason}). "
        "The task does not run again; read the result where the first run left it."
    )


def too_late(key: str, took: float, ttl: float) -> StoreUnreachable:
    """Return the error for a lease that was granted when it had nearly run out."""
    return StoreUnreachable(
        f"The store took {took:.1f} s to grant {key!r} for {ttl:g} s. "
        "Try again, and look at the store and the way to it; a longer lease_ttl bears slower answers."
    )


def not_committed(key: str) -> SettleNotCommitted:
    """Return the error for a body that settled within its transaction and left it open, or rolled it back."""
    return SettleNotCommitted(
        f"The task settled {key!r} within its own transaction and returned, and that transaction is not committed: "
        "neither its effect nor its record is there. Commit before the body returns."
    )
