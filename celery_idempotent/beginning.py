"""How a delivery comes to its lease, or to its answer: in steps, between which it may have to wait.

A step asks the store and does not wait. Whoever takes the steps sleeps as they say: a thread, or a coroutine, which
must not keep a thread while it does.
"""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING

from . import complaints, events, recording, telling
from .answers import Answer, Busy, Delivery
from .errors import RecordUnreadable, StoreError
from .holding import Holding
from .pauses import Pauses
from .recording import STORE_PAUSE
from .records import Lease, Reason, Record, Refusal, Release, State, Verdict
from .replaying import refused, unreadable

if TYPE_CHECKING:
    from .guard import Guard

__all__ = ["Beginning"]

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
        self.patience = Pauses(STORE_PAUSE, delivery.patience, delivery.stopping)
        self.waiting: Pauses | None = None
        self.least = 0.0

    def step(self) -> Holding | Answer | float:
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
            recording.release(self.delivery, Holding(guard.store, Lease(claim, 0), monotonic()), release)
            raise

    def _store_failed(self, error: StoreError) -> Holding | Answer | float:
        guard, delivery = self.guard, self.delivery
        if isinstance(error, RecordUnreadable):
            return unreadable(guard.policy, error)
        if guard.policy.on_store_error == "raise":
            raise error
        if guard.policy.on_store_error == "run":
            delivery.event(events.RanUnprotected, error=str(error))
            return Holding(guard.store, Lease(delivery.claim, 0), monotonic())
        pause = self.patience.next()
        return Busy(STORE_PAUSE[1], error=error) if pause is None else pause

    def _granted(self, lease: Lease, since: float) -> Holding | Answer | float:
        delivery, claim = self.delivery, self.delivery.claim
        holding = self.guard.holding(delivery, lease, since)
        if holding.doubtful:
            # The answer came so late that another may have the lease by now. Whoever has it is told so again.
            pause = self.patience.next()
            if pause is not None:
                return pause
            recording.release(delivery, holding, Release(Reason.SHUTDOWN))
            return Busy(STORE_PAUSE[1], error=complaints.too_late(holding.key, holding.asked, claim.lease_ttl))
        if delivery.alone and lease.taken_over and lease.crashes >= claim.max_crashes:
            # Stores tell it to a delivery whose task id they know.
            recording.release(delivery, holding, Release(Reason.CRASH_LOOP))
            delivery.event(events.CrashLooped, crashes=lease.crashes)
            raise complaints.crash_loop(lease.key, lease.crashes)
        return holding

    def _conflicts(self, record: Record) -> Answer | float:
        delivery, policy = self.delivery, self.guard.policy
        another = record.task_id != delivery.claim.task_id
        if self.waiting is None:
            telling.conflicts(delivery, record)
            if policy.on_conflict == "raise" and another:
                raise complaints.being_done(record)
            self.least = delivery.least_wait()
            limit = max(self.least, policy.wait_timeout if policy.on_conflict == "wait" else 0.0)
            self.waiting = Pauses(WAIT_PAUSE, min(limit, self.patience.end - monotonic()), delivery.stopping)
        # One that comes again by itself need not wait for the holder it met.
        pause = self.waiting.next() if another or self.least else None
        if pause is not None:
            return pause
        return Busy(record.remaining, record.task_id, awaited=record.state is State.RELEASED)
