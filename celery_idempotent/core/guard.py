"""The guard: one delivery goes in, one decision comes out.

One delivery in Celery, in the order of the code that it passes:

1. `celery/task.py`: ``IdempotentTask.__call__`` checks whether this call is the delivery.
2. `celery/delivery.py`: ``CeleryDelivery.answer`` makes the claim, and loops over ``Guard.run``.
3. here: ``Guard.run`` acquires the lease, has the body run, and settles or releases.
4. `stores/redis/store.py`: ``acquire``, ``settle`` and ``release``, one script each.
5. `core/lease.py`: ``HeldLease``, what the body sees while it runs.

A duplicate of a running operation gets ``Busy`` from `Guard.run`, and its adapter brings it back later. A duplicate of
a finished one gets ``Replayed``. The lease of a child that was killed is released by `celery/request.py`.

The guard knows no framework and no server. An adapter derives its `Delivery`; a store decides which holds the lease.
"""

from __future__ import annotations

import os
import sys
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from time import monotonic
from types import NoneType
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
from ..stores.base import Store
from ..stores.records import Claim, Lease, Outcome, Reason, Record, Refusal, Release, State, Verdict
from .backoff import Backoff, never, retry_if_interrupted, sleep
from .breaker import Breaker
from .heartbeat import Heartbeat
from .history import DeliveryEvents
from .lease import HeldLease, TaskIds
from .policy import Policy
from .results import Codec, Kind, Origin, Payload

#: Seconds between two tries while the store cannot serve: the first pause, and the longest.
STORE_PAUSE = (0.1, 5.0)
#: Seconds between two looks of a waiter whether the holder has settled: the first pause, and the longest.
WAIT_PAUSE = (0.05, 1.0)
#: Seconds until a record that cannot be read is read again: by then it is repaired, or this worker is upgraded.
UNREADABLE_PAUSE = 60.0
#: Seconds to try to settle at least, also where the lease is in doubt: an effect without a record may happen again.
SETTLE_PATIENCE = 5.0
#: Bytes above which a value may be why a store does not take a record.
LARGE = 65536


# -- what a delivery is answered ---------------------------------------------------------------------------------------


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

    Another delivery does it, perhaps that of ``holder_task_id``; or ``error`` is why the store could not answer. Where
    nothing does it at the moment, and that task is to go on with it, ``awaited`` is the fence of its last run.
    """

    remaining: float
    holder_task_id: str | None = None
    awaited: int = field(default=0, compare=False)
    error: StoreError | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Dropped:
    """A later copy of this message will be answered; this one needs nothing."""


Decision: TypeAlias = Ran | Replayed | Ignored | Busy | Dropped
#: Steps towards a lease: the seconds to sleep in between, and what they come to.
Acquiring: TypeAlias = Generator[float, None, HeldLease | Busy | Refusal]
#: The content of the record once a body has ended.
Ending: TypeAlias = Release | Outcome


# -- what the guard is given -------------------------------------------------------------------------------------------


class Delivery(ABC):
    """One delivery of an operation; every framework derives its own.

    Arguments:
        came: Monotonic time at which it came (default: now).
    """

    #: What it requests of the store; set by `identify`.
    claim: Claim
    #: Emits an event about it, see `DeliveryEvents.emit`; set by `identify`.
    emit: Callable[..., None]
    #: The id of the message or call, for events and large results; set by `identify`.
    task_id: str
    #: Whether a caller, a callback, a chain or a chord reads the value.
    wants_result: bool = True
    #: Longest time in seconds that it may be held before the body runs.
    patience: float = float("inf")
    #: The `LeaseLost` that the methods of its lease raise.
    lost_error: type[LeaseLost] = LeaseLost
    #: Seconds after which its lease is not renewed any more, or None.
    max_lease: float | None = None
    #: Whether the framework keeps the value under the task id, where others can read it.
    published: bool = False
    #: Whether no other delivery has its task id, so that any may learn that the operation kills its holders.
    alone: bool = False
    #: Whether it may have a lease that it does not rely on, since the answer came too late.
    granted_late: bool = False
    #: Derives the ids of the tasks that the body publishes; None where they are random.
    task_ids: TaskIds | None = None
    #: Returns whether this process is about to stop, so that nothing should wait.
    stopping = staticmethod(never)

    def __init__(self, came: float | None = None) -> None:
        self.came = monotonic() if came is None else came

    def identify(self, events: DeliveryEvents) -> None:
        """Set what it requests of the store, and what emits its events."""
        self.claim, self.emit, self.task_id = events.claim, events.emit, events.task_id

    @abstractmethod
    def body(self, held: HeldLease) -> Any:
        """Run the work under a lease, and return its value."""

    @abstractmethod
    def ending(self, error: BaseException) -> Ending:
        """Return the ending to record, given what the body raised."""

    def checked(self, result: object) -> object:
        """Return what the body is to settle itself; raise ConfigurationError for what no caller could get."""
        return result

    def agrees(self, record: Record) -> bool:
        """Return whether its fingerprint may differ from the record's, which it has in its claim from now on."""
        return False

    def min_wait(self) -> float:
        """Return the seconds to wait for a holder whatever the policy; called once it meets one."""
        return 0.0

    def due(self, ignored: Ignored) -> float:
        """Return the seconds within which the result that is referred to may yet come; 0 to answer without it."""
        return 0.0

    def recall(self, record: Record) -> None:  # noqa: B027 - most frameworks have nothing to do then
        """Take note that the failure of this record is about to be raised again."""

    @property
    def waited(self) -> float:
        """Seconds since it came."""
        return monotonic() - self.came

    def emit_start(self, held: HeldLease) -> None:
        """Emit that a run begins under this lease."""
        claim, lease = held.lease.claim, held.lease
        fields: dict[str, Any] = {
            "fence": lease.fence,
            "retries": claim.retries,
            "copy": claim.copy,
            "redelivered": claim.redelivered,
            "asked": held.asked,
            "waited": self.waited,
        }
        held.open = True  # first: some hooks have it when a time limit rings in another, and are to get its end
        if lease.taken_over:
            self.emit(events.TakenOver, crashes=lease.crashes, **fields)
        else:
            self.emit(events.Acquired, **fields)

    def emit_end(self, held: HeldLease, kind: type[events.Event], **fields: Any) -> None:
        """Emit how a run ended; nothing where none began, or where its end was emitted before."""
        if held.open:
            held.open = False
            fields.setdefault("ran", monotonic() - held.began)
            self.emit(kind, fence=held.fence, **fields)


# -- the algorithm -----------------------------------------------------------------------------------------------------


class Commit(Enum):
    """What became of a settle within the task's own transaction."""

    YES = "committed"
    NO = "the lease is as it was before"
    LOST = "another delivery has the key"


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

    def run(self, delivery: Delivery) -> Decision:
        """Answer a delivery: run its body, or replay what an earlier run settled, or decide that it must wait.

        Raises:
            KeyReused, CrashLoop, Conflict, ResultUnavailable: see `celery_idempotent.errors`; the body did not run.
            SettleNotCommitted: the body ran and settled, and did not commit.
            StoreError: the store cannot serve, and the policy is ``on_store_error="raise"``.
            BaseException: what the body raised, or what the settled run raised.
        """
        held = self.acquire_now(delivery)
        if not isinstance(held, HeldLease):
            return held
        if not held.fence:
            return Ran(held.result(delivery.body(held)))
        value = doubt = None
        try:
            try:
                doubt = self._begin(delivery, held)
                if doubt is None:
                    value = delivery.body(held)
            except BaseException as error:
                decision = self._raised(delivery, held, error)
                if decision is None:
                    raise
                return decision
            return self._returned(delivery, held, value) if doubt is None else self._answer_doubt(delivery, doubt)
        finally:
            self._leave(delivery, held)

    def acquire_now(self, delivery: Delivery) -> HeldLease | Decision:
        """Return the lease for the body, or the decision without one; sleep in this thread in between.

        A lease that holds nothing (fence 0) has nothing to finish. Raises what `run` raises before the body.
        """
        steps = self.acquire(delivery)
        while isinstance(found := self.step(delivery, steps), float):
            try:
                sleep(found, delivery.stopping)
            except BaseException as error:
                self.abandon(delivery, error)
                raise
        return found

    def step(self, delivery: Delivery, steps: Acquiring) -> HeldLease | Decision | float:
        """Take a step of `acquire`: return what `acquire_now` returns, or the seconds to sleep before the next.

        Raises what `run` raises before the body.
        """
        try:
            return next(steps)
        except StopIteration as done:
            found: HeldLease | Busy | Refusal = done.value
        # Not within the generator, which cannot raise a StopIteration that a task is remembered to have raised.
        return self._refuse(delivery, found) if isinstance(found, Refusal) else found

    def acquire(self, delivery: Delivery) -> Acquiring:
        """Yield the seconds to sleep before each further request; return the lease, or why there is none."""
        patience, waiting = Backoff(STORE_PAUSE, delivery.patience, delivery.stopping), None
        while True:
            try:
                found = self._request(delivery)
            except StoreError as error:
                if (decided := self._decide_without_store(delivery, error)) is not None:
                    return decided
                if (pause := patience.next()) is None:
                    return Busy(STORE_PAUSE[1], error=error)
                yield pause
                continue
            if isinstance(found, HeldLease):
                if not found.doubtful:
                    return self._check_crashes(delivery, found) if found.lease.crashes else found
                # The answer came so late that another may have the lease by now. Its holder gets the same answer again.
                delivery.granted_late = True
                if (pause := patience.next()) is None:
                    self.release(delivery, found, Release(Reason.SHUTDOWN))
                    return Busy(STORE_PAUSE[1], error=_too_late(found))
            elif found.verdict is Verdict.CONFLICT:
                waiting = waiting or self._meet_holder(delivery, found.record, patience)
                if (pause := waiting.next_for(delivery, found.record)) is None:
                    return _busy_with(found.record)
            else:
                return found
            yield pause

    def begin(self, delivery: Delivery) -> HeldLease | Decision:
        """Return the lease for a body that begins now and that `finish` follows, or the decision without one.

        A lease that holds nothing (fence 0) has nothing to finish. Raises what `run` raises before the body.
        """
        held = self.acquire_now(delivery)
        return self.start(delivery, held) if isinstance(held, HeldLease) and held.fence else held

    def start(self, delivery: Delivery, held: HeldLease) -> HeldLease | Decision:
        """Renew the lease from now on, and emit that the body begins; return the lease, or the decision if it ran out.

        What is raised here, as where no thread can be started, ends the run: the lease is given back.
        """
        try:
            doubt = self._begin(delivery, held)
        except BaseException as error:  # noqa: BLE001 - raised again
            try:
                self.finish(delivery, held, error=error)
            finally:
                raise error
        if doubt is None:
            return held
        try:
            return self._answer_doubt(delivery, doubt)
        finally:
            self._leave(delivery, held)

    def _begin(self, delivery: Delivery, held: HeldLease) -> LeaseLost | StoreError | None:
        """Return why the body may not begin: its lease is lost, or in doubt, or not renewed; it is released then."""
        try:
            self.heartbeat.watch(held)  # first: a hook may take longer than the lease lasts
            delivery.emit_start(held)
            if not held.lost and monotonic() < held.deadline:
                return None
            held.check()  # a hook took too long, or the process was stopped in it
        except (LeaseLost, StoreError) as error:
            self.heartbeat.forget(held)
            self.release(delivery, held, Release(Reason.SHUTDOWN), error)
            return error
        return None

    def _answer_doubt(self, delivery: Delivery, doubt: LeaseLost | StoreError) -> Decision:
        if isinstance(doubt, StoreError):
            return Busy(STORE_PAUSE[1], error=doubt)
        return self._answer_as_duplicate(delivery)

    def finish(
        self, delivery: Delivery, held: HeldLease, value: object = None, error: BaseException | None = None
    ) -> Decision:
        """Answer a delivery whose body returned ``value``, or raised ``error``; raises what `run` raises after it."""
        try:
            if error is None:
                return self._returned(delivery, held, value)
            decision = self._raised(delivery, held, error)
            if decision is None:
                raise error
            return decision
        finally:
            self._leave(delivery, held)
            error = None  # it refers to this frame: what the body had would wait for Python's collector

    def give_up(self, delivery: Delivery, held: HeldLease, release: Release, error: BaseException) -> None:
        """Release the lease of a body that goes on: the message that ``error`` reports carries the operation on.

        What a body settled within its own transaction is decided by the commit, and not given up.
        """
        if not held.fence or held.within is not None:
            return
        self.heartbeat.forget(held)
        held.given_up = True
        retry_if_interrupted(lambda: self.release(delivery, held, release, error))
        held.lost = True

    def release(
        self, delivery: Delivery, held: HeldLease, release: Release, error: BaseException | None = None
    ) -> bool:
        """Release after ``error``, and return whether the lease was still this run's, as far as can be known.

        It raises nothing: what the body did counts, and the user's exception wins.
        """
        if not self.policy.result_ttl:
            release = replace(release, retry_in=0.0)  # what waits for its retry does not run
        since = monotonic()
        reason, ran = release.reason.value, since - held.began
        held.given_back = True  # first: a thread that the body left behind may ask, and who is interrupted asks again
        try:
            released: bool = retry_if_interrupted(lambda: held.store.release(held.lease, release))
        except Exception as failure:  # noqa: BLE001 - the user's exception wins; the lease runs out by itself
            if held.lost:
                return self._lost(delivery, held, error)
            if not held.open:  # no run began under it, so that no event reports this
                events.logger.error("The lease on %s could not be released: %s", held.key, failure)
            delivery.emit_end(held, events.ReleaseFailed, reason=reason, error=str(failure), ran=ran)
            return True
        if not released:
            if release.reason is Reason.RETRY and not (held.lost or held.doubtful):
                # It is published already, and it alone may take a lease that holds.
                delivery.emit_end(held, events.Released, reason=reason, ran=ran)
                return False
            return self._lost(delivery, held, error)
        if release.reason is Reason.DONE:
            delivery.emit_end(held, events.Completed, ran=ran, took=monotonic() - since)
        else:
            delivery.emit_end(held, events.Released, reason=reason, ran=ran)
        return True

    # -- steps of acquire ----------------------------------------------------------------------------------------------

    def _request(self, delivery: Delivery) -> HeldLease | Refusal:
        since = monotonic()
        try:
            found = self.breaker.call(self.store, self.store.acquire, delivery.claim)
            if isinstance(found, Refusal) and found.verdict is Verdict.KEY_REUSED and delivery.agrees(found.record):
                found = self.breaker.call(self.store, self.store.acquire, delivery.claim)
            return self._hold(delivery, found, since) if isinstance(found, Lease) else found
        except StoreError:
            raise
        except BaseException as error:  # interrupted: the store may have granted a lease that would never be released
            self.give_back(delivery, error)
            raise

    def abandon(self, delivery: Delivery, error: BaseException) -> None:
        """Give back what a delivery was granted too late, if it was, since it is ended before it asked again.

        Arguments:
            delivery: It asks no more.
            error: What has ended it.
        """
        if delivery.granted_late:
            self.give_back(delivery, error)

    def give_back(self, delivery: Delivery, error: BaseException, release: Release | None = None) -> None:
        """Give back what the store may have granted a delivery that ``error`` ends before its body.

        Arguments:
            delivery: It asks no more.
            error: What has ended it.
            release: What to record (default: that it failed, or was shut down).
        """
        release = release or Release(Reason.FAILED if isinstance(error, Exception) else Reason.SHUTDOWN)
        self.release(delivery, HeldLease(self.store, Lease(delivery.claim, 0), monotonic()), release)

    def _decide_without_store(self, delivery: Delivery, error: StoreError) -> HeldLease | Busy | None:
        """Return what the policy decides without the store's answer, or None: to wait for it."""
        if isinstance(error, RecordUnreadable):
            return self._unreadable(error)
        if self.policy.on_store_error == "raise":
            raise error
        if self.policy.on_store_error == "run":
            delivery.emit(events.RanUnprotected, error=str(error))
            return HeldLease(self.store, Lease(delivery.claim, 0), monotonic(), task_ids=delivery.task_ids)
        return None

    def _hold(self, delivery: Delivery, lease: Lease, since: float) -> HeldLease:
        return HeldLease(
            self.store,
            lease,
            since,
            max_lease=delivery.max_lease,
            lost_error=delivery.lost_error,
            encode=lambda result: self._completed(delivery, lease, delivery.checked(result)),
            result_ttl=self.policy.result_ttl,
            task_ids=delivery.task_ids,
        )

    def _check_crashes(self, delivery: Delivery, held: HeldLease) -> HeldLease:
        lease = held.lease
        if delivery.alone and lease.crashes >= lease.claim.max_crashes:
            # Stores refuse it themselves where they know the delivery's task id.
            self.release(delivery, held, Release(Reason.CRASH_LOOP))
            delivery.emit(events.CrashLooped, crashes=lease.crashes)
            raise _crash_loop(lease.key, lease.crashes)
        return held

    def _meet_holder(self, delivery: Delivery, record: Record, patience: Backoff) -> _Waiting:
        delivery.emit(
            events.Conflicted,
            held_by=record.holder,
            held_for=_other_task(delivery, record),
            remaining=record.remaining,
        )
        if self.policy.on_conflict == "raise" and _is_anothers(delivery, record):
            conflict = _being_done(record)
            if delivery.claim.attempt or delivery.claim.copy:
                self.give_back(delivery, conflict)  # its task has ended: sent again under its id, it is no copy
            raise conflict
        least = delivery.min_wait()
        limit = max(least, self.policy.wait_timeout if self.policy.on_conflict == "wait" else 0.0)
        return _Waiting(least, Backoff(WAIT_PAUSE, min(limit, patience.end - monotonic()), delivery.stopping))

    def _refuse(self, delivery: Delivery, refusal: Refusal) -> Decision:
        record = refusal.record
        match refusal.verdict:
            case Verdict.COMPLETED | Verdict.FAILED:
                return self._replay(delivery, record)
            case Verdict.KEY_REUSED:
                delivery.emit(events.KeyReused, original=_other_task(delivery, record))
                raise _key_reused(record)
            case Verdict.CRASH_LOOP:
                delivery.emit(events.CrashLooped, crashes=record.crashes)
                raise _crash_loop(record.key, record.crashes)
        delivery.emit(events.Superseded)
        return Dropped()

    # -- replay --------------------------------------------------------------------------------------------------------

    def _replay(self, delivery: Delivery, record: Record) -> Decision:
        completed = record.state is State.COMPLETED
        if completed and self.policy.on_duplicate == "raise" and _is_anothers(delivery, record):
            raise _done_before(record)
        try:
            payload = self.codec.decode(record.payload, age=record.age)
        except StoreError as error:
            return self._unreadable(error)
        ignored = _ignored(payload, record)
        if ignored is not None and (due := delivery.due(ignored)):
            return Busy(due, ignored.reference)
        original, state = _other_task(delivery, record), record.state.value
        delivery.emit(events.Replayed, age=record.age, original=original, state=state, waited=delivery.waited)
        if not completed:
            delivery.recall(record)
            raise self.codec.rebuild_exception(payload, self.policy.remember_failures)
        if payload.kind is Kind.VALUE:
            return Replayed(payload.data, record)
        if ignored is not None:
            return ignored
        if delivery.wants_result:
            raise not_kept(record, payload.reason)
        return Replayed(None, record)

    def _unreadable(self, error: StoreError) -> Busy:
        """Wait for a record that cannot be read, and do not run: the operation may well be done."""
        if self.policy.on_store_error == "raise":
            raise error
        events.logger.error("%s", error)
        return Busy(UNREADABLE_PAUSE, error=error)

    def _answer_as_duplicate(self, delivery: Delivery) -> Decision:
        """Answer a run that lost its lease: with what is settled, or by waiting until something is."""
        try:
            record = retry_if_interrupted(lambda: self.store.get(delivery.claim.key))
        except Exception as error:  # noqa: BLE001 - the store cannot answer, and will be read again
            events.logger.warning("What became of %s is not known yet: %s", delivery.claim.key, error)
            record = None
        if record is None:
            return Busy(STORE_PAUSE[1])
        if not self.policy.result_ttl and not _is_anothers(delivery, record) and _runs_or_ran(record):
            return Dropped()  # a redelivery took over, which has the message's turn
        if record.state in (State.COMPLETED, State.FAILED):
            return self._replay(delivery, record)
        return _busy_with(record)

    # -- how a run ends: settled, released, or committed by the task's own transaction ---------------------------------
    #
    # Each is tried for as long as that can help, and none raises: what the body did counts.

    def _leave(self, delivery: Delivery, held: HeldLease) -> None:
        """Make sure, however the body was left, that nothing renews the lease and that its end was emitted."""
        self.heartbeat.forget(held)
        if held.open and held.pid == os.getpid():
            delivery.emit_end(held, events.SettleFailed, error=f"interrupted by {sys.exc_info()[1]!r}")

    def _returned(self, delivery: Delivery, held: HeldLease, value: object) -> Decision:
        if held.pid != os.getpid():  # of a child that the body has forked: its parent records the end
            return Ran(value)
        if held.given_up:
            events.logger.info("%s: its result is its retry's, and not what this run returned after it", held.key)
            return Dropped()
        if held.within is not None:
            self.heartbeat.forget(held)
            decision = retry_if_interrupted(lambda: self._settled_within(delivery, held))
        else:
            settled = retry_if_interrupted(lambda: self._settle_value(delivery, held, value))
            decision = Ran(value) if settled or not self.policy.result_ttl else None
        return self._answer_as_duplicate(delivery) if decision is None else decision

    def _raised(self, delivery: Delivery, held: HeldLease, error: BaseException) -> Decision | None:
        """Return the decision where the body has raised; None to raise that again."""
        if held.pid != os.getpid():
            return None
        self.heartbeat.forget(held)
        ending = _ending(delivery, error)
        if held.given_up:
            if not isinstance(error, Exception):
                return None
            if not isinstance(ending, Release) or ending.reason in (Reason.FAILED, Reason.CRASHED):
                events.logger.error("%s raised after it had published its retry", held.key, exc_info=error)
            return Dropped()
        recorded = retry_if_interrupted(lambda: self._record_failure(delivery, held, ending, error))
        if isinstance(recorded, Ran):
            return recorded
        # A run that raises LeaseLost may be acked for it: another delivery must be left to answer, also where the store
        # gave no answer.
        if (recorded or not self.policy.result_ttl) and not isinstance(error, LeaseLost):
            return None
        if not isinstance(error, Exception):  # the process is to end, whichever delivery holds the lease
            return None
        if isinstance(ending, Release) and ending.reason is Reason.RETRY:
            return Dropped()  # the retry that it has published goes on in its place, and perhaps was what took over
        return self._answer_as_duplicate(delivery)

    def _record_failure(self, delivery: Delivery, held: HeldLease, ending: Ending, error: BaseException) -> Ran | bool:
        if held.within is not None and self._find_commit(delivery, held, error) is Commit.YES:
            return _committed(held, error)
        if isinstance(ending, Outcome) and not self.policy.result_ttl:
            ending = Release(Reason.DONE)  # an end without a result: none that fails is remembered
        if isinstance(ending, Release):
            recorded = self.release(delivery, held, ending, error)
        else:
            ttl = self.policy.failure_ttl if ending.state is State.FAILED else self.policy.result_ttl
            recorded = self._settle(delivery, held, ending, ttl=ttl, error=error)
        if recorded or held.within is None or self._find_commit(delivery, held, error) is not Commit.YES:
            return recorded
        return _committed(held, error)  # the commit was on its way when we looked

    def _completed(self, delivery: Delivery, lease: Lease, value: object) -> Outcome:
        origin = Origin(lease.claim.key, lease.fence, delivery.task_id, delivery.published)
        payload = self.codec.encode_value(value, store_result=self.policy.store_result, origin=origin)
        return Outcome(State.COMPLETED, payload)

    def _settle_value(self, delivery: Delivery, held: HeldLease, value: object) -> bool:
        if not self.policy.result_ttl:
            self.heartbeat.forget(held)
            return self.release(delivery, held, Release(Reason.DONE))
        outcome = self._completed(delivery, held.lease, value)
        self.heartbeat.forget(held)  # not before: a large result may take longer to write than the lease lasts
        return self._settle(delivery, held, outcome, ttl=self.policy.result_ttl)

    def _settle(
        self,
        delivery: Delivery,
        held: HeldLease,
        outcome: Outcome,
        *,
        ttl: float,
        error: BaseException | None = None,
    ) -> bool:
        """Settle what the body returned or raised; return whether the lease was still this run's, for all it knows."""
        pauses, since = None, monotonic()
        ran = since - held.began
        while True:
            try:
                retry_if_interrupted(partial(held.store.settle, held.lease, outcome, ttl=ttl))
            except LeaseLost:
                return self._lost(delivery, held, error)
            except Exception as failure:  # noqa: BLE001 - the store's own, or a second interruption
                if pauses is not None and monotonic() > pauses.end - STORE_PAUSE[1] - SETTLE_PATIENCE / 2:
                    whole, outcome = outcome, self._without_large_value(held, outcome, failure)
                    if outcome is not whole:
                        continue
                pauses = pauses or _settle_pauses(held, since)
                if retry_if_interrupted(pauses.wait):
                    continue
                if held.lost:
                    return self._lost(delivery, held, error)
                # The effect has happened: to run again for want of a record is the one thing to prevent.
                delivery.emit_end(held, events.SettleFailed, error=str(failure), ran=ran)
                return True
            took = monotonic() - since
            if outcome.state is State.COMPLETED:
                delivery.emit_end(held, events.Completed, ran=ran, took=took)
            else:
                delivery.emit_end(held, events.Failed, error=type(error).__qualname__, ran=ran, took=took)
            return True

    def _without_large_value(self, held: HeldLease, outcome: Outcome, failure: Exception) -> Outcome:
        """Return the outcome without its value, if that may be why a store that answers does not take it."""
        size = len(outcome.payload)
        if outcome.state is not State.COMPLETED or size <= LARGE:
            return outcome
        try:
            retry_if_interrupted(held.store.ping)
        except Exception:  # noqa: BLE001 - the store's own: it may take the value once it is back
            return outcome
        events.logger.error("%s: its result of %d bytes is not kept: %s", held.key, size, failure)
        return Outcome(
            State.COMPLETED, self.codec.encode_unavailable(f"the store did not take {size} bytes: {failure}")
        )

    def _settled_within(self, delivery: Delivery, held: HeldLease) -> Decision | None:
        found = self._find_commit(delivery, held)
        if found is Commit.LOST:
            return None
        if found is Commit.NO:
            error = _not_committed(held.key)
            released = self.release(delivery, held, Release(Reason.FAILED), error)
            # Where it is refused, the commit was perhaps on its way when we looked.
            if released or self._find_commit(delivery, held) is not Commit.YES:
                raise error
        return Ran(held.result(None))

    def _lost(self, delivery: Delivery, held: HeldLease, error: BaseException | None) -> bool:
        """Emit that the lease was lost, unless it is gone since the body's own commit has come; return false."""
        if held.within is not None:
            self._find_commit(delivery, held, error)  # which emits what it finds
        return _emit_lost(delivery, held, error)

    def _find_commit(self, delivery: Delivery, held: HeldLease, error: BaseException | None = None) -> Commit | None:
        """Return whether the transaction in which the body settled was committed; None if the store cannot answer."""
        since = monotonic()
        pauses, ran = _settle_pauses(held, since), since - held.began
        ends = not isinstance(error, (Exception, NoneType))  # then its process does, perhaps, and has no time
        while True:
            try:
                record = retry_if_interrupted(lambda: held.store.get(held.key))
            except Exception as failure:  # noqa: BLE001 - the store's own, or a second interruption
                if ends:
                    return None
                if retry_if_interrupted(pauses.wait):
                    continue
                delivery.emit_end(held, events.SettleFailed, error=str(failure), ran=ran)
                return None
            if record is None and not held.outlived_result:
                return Commit.NO
            if record is None or (record.fence == held.fence and record.state is State.COMPLETED):
                held.keep(record.payload if record is not None else b"")
                delivery.emit_end(held, events.Completed, ran=ran, took=monotonic() - since)
                return Commit.YES
            if record.owner == held.lease.owner and (record.state is State.IN_PROGRESS or held.given_back):
                return Commit.NO
            _emit_lost(delivery, held, error)
            return Commit.LOST


@dataclass(frozen=True, slots=True)
class _Waiting:
    """The pauses of a delivery that met a holder."""

    #: Seconds to wait at least, whichever delivery holds the key.
    least: float
    pauses: Backoff

    def next_for(self, delivery: Delivery, record: Record) -> float | None:
        """Return the next pause; None if it does not wait any longer."""
        # One that comes again by itself need not wait for the holder it met.
        return self.pauses.next() if self.least or _is_anothers(delivery, record) else None


def _is_anothers(delivery: Delivery, record: Record) -> bool:
    return record.task_id != delivery.claim.task_id


def _other_task(delivery: Delivery, record: Record) -> str:
    return record.task_id if _is_anothers(delivery, record) else ""


def _runs_or_ran(record: Record) -> bool:
    return record.state is State.IN_PROGRESS or record.reason == Reason.DONE


def _ignored(payload: Payload, record: Record) -> Ignored | None:
    """Return the answer for an operation that left no result of its own; None for what left one."""
    if payload.kind is not Kind.IGNORED:
        return None
    return Ignored(payload.reason, record, payload.data if isinstance(payload.data, int) else None)


def _busy_with(record: Record) -> Busy:
    # What was released for nothing that is to come, as after too many crashes, waits for no task.
    awaited = record.state is State.RELEASED and record.remaining > 0
    return Busy(record.remaining, record.task_id, awaited=record.fence if awaited else 0)


def _ending(delivery: Delivery, error: BaseException) -> Ending:
    """Return what the adapter makes of an exception; should that fail, it must not hide the exception."""
    try:
        return retry_if_interrupted(lambda: delivery.ending(error))
    except Exception:  # noqa: BLE001 - the adapter's own
        events.logger.exception("%s: what this error means is not known: %r", delivery.claim.key, type(error))
        return Release(Reason.FAILED)


def _committed(held: HeldLease, error: BaseException) -> Ran | bool:
    """Return what to record of a body that raised, and whose transaction was committed."""
    if not isinstance(error, Exception):
        return True  # it goes on to end what it was to end
    # The effect and its record are there: whatever failed after the commit, the operation has succeeded.
    events.logger.error("%s was committed, and its body raised after that", held.key, exc_info=error)
    return Ran(held.result(None))


def _emit_lost(delivery: Delivery, held: HeldLease, error: BaseException | None) -> bool:
    """Emit that the lease was lost by a body that returned, or that raised ``error``; return false."""
    text = State.COMPLETED.value if error is None else "".join(traceback.format_exception_only(error)).strip()
    delivery.emit_end(held, events.LeaseLost, ending=text)
    return False


def _settle_pauses(held: HeldLease, since: float) -> Backoff:
    limit = max(held.deadline, since + SETTLE_PATIENCE) - monotonic()
    return Backoff(STORE_PAUSE, limit, never)  # a stopping worker waits for this


# -- errors ------------------------------------------------------------------------------------------------------------


def _being_done(record: Record) -> Conflict:
    """Return the error for a duplicate that may not wait for the holder."""
    holder = record.holder or "a retry that is due later"
    error = Conflict(
        f"{record.key!r} is being done by {holder} for another {record.remaining:.1f} s. "
        'Try again later, or let it wait with on_conflict="wait".'
    )
    error.remaining = record.remaining
    return error


def in_progress(key: str, remaining: float) -> Conflict:
    """Return the error for a caller that came while the operation is being done, and will not be called again."""
    error = Conflict(
        f"{key!r} is being done elsewhere, for another {remaining:.1f} s unless that takes longer. "
        'Try again later, or wait for it with on_conflict="wait" and a longer wait_timeout.'
    )
    error.remaining = remaining
    return error


def _done_before(record: Record) -> Conflict:
    """Return the error for a duplicate that may not be answered with the settled result."""
    return Conflict(f'{record.key!r} was done {record.age:.0f} s ago, and the task has on_duplicate="raise".')


def _key_reused(record: Record) -> KeyReused:
    """Return the error for a key that came with other arguments."""
    when = f"{record.age:.0f} s ago" if record.age else "just now"
    return KeyReused(
        f"The key {record.key!r} was used {when} with other arguments (by task {record.task_id}). "
        "Expected the same arguments for the same key: give this call a key of its own, "
        "or leave arguments that may differ out of the comparison with fingerprint=[...]."
    )


def _crash_loop(key: str, crashes: int) -> CrashLoop:
    """Return the error for an operation whose holders keep dying."""
    return CrashLoop(
        f"{key!r} has lost its worker {crashes} times in a row; this message does not run it again. "
        "Look for what kills the worker (memory, a native crash, sys.exit() in the body); publish the task again once "
        "it is fixed."
    )


def not_kept(record: Record, reason: str) -> ResultUnavailable:
    """Return the error for a duplicate that wants a value which was not kept."""
    return ResultUnavailable(
        f"{record.key!r} was done {record.age:.0f} s ago and its result was not kept ({reason}). "
        "The task does not run again; read the result where the first run left it."
    )


def _too_late(held: HeldLease) -> StoreUnreachable:
    """Return the error for a lease that was granted when it had nearly run out."""
    return StoreUnreachable(
        f"The store took {held.asked:.1f} s to grant {held.key!r} for {held.lease.claim.lease_ttl:g} s. "
        "Try again, and check the store and the network; a longer lease_ttl allows slower answers."
    )


def _not_committed(key: str) -> SettleNotCommitted:
    """Return the error for a body that settled within its transaction and left it open, or rolled back the settle."""
    return SettleNotCommitted(
        f"The task settled {key!r} within its own transaction and returned, and that was not committed: there is no "
        "record, and the next delivery runs again. It repeats what was committed without the record, as before settle, "
        "or around a savepoint that was rolled back. Write the effect and settle in one transaction, or one savepoint, "
        "and commit it before the body returns."
    )
