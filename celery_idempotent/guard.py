"""The algorithm: acquire, run under the heartbeat, settle or release; or replay; or stand aside.

It knows no framework and no server. An adapter translates its request into a `Claim`, what an exception means into
an `Ending`, and the `Answer` into its own control flow; a store decides who holds the lease.
"""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from time import monotonic

from . import complaints, events, recording
from .answers import Answer, Busy, Delivery, Dropped, Ending, Ignored, Ran, Replayed
from .errors import LeaseLost, RecordUnreadable, StoreError
from .heartbeat import Heartbeat
from .holding import Holding
from .pauses import Pauses, uninterrupted
from .policy import Policy
from .recording import STORE_PAUSE, Commit
from .records import Lease, Outcome, Reason, Record, Refusal, Release, State, Verdict
from .results import Codec, Kind
from .stores.base import Store
from .stores.breaker import Breaker

__all__ = ["Guard"]

#: Pauses in seconds while a waiter looks whether the holder settled.
WAIT_PAUSE = (0.05, 1.0)
#: A record that cannot be read is looked at again after this: by then it was mended, or this worker upgraded.
UNREADABLE_PAUSE = 60.0


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
        patience = Pauses(STORE_PAUSE, delivery.patience, delivery.stopping)
        waiting: Pauses | None = None
        while True:
            since = monotonic()
            found = self._acquire(delivery)
            if isinstance(found, StoreError):
                answer = self._store_failed(delivery, found, patience)
                if answer is not None:
                    return answer
            elif isinstance(found, Lease):
                holding = self._holding(delivery, found, since)
                if not holding.doubtful:
                    return self._hold(delivery, holding)
                # The answer came so late that another may have the lease by now. Whoever has it is told so again.
                if not patience.wait():
                    recording.release(delivery, holding, Release(Reason.SHUTDOWN))
                    return Busy(STORE_PAUSE[1])
            elif found.verdict is not Verdict.CONFLICT:
                return self._refused(delivery, found)
            else:
                if waiting is None:
                    self._conflict(delivery, found.record)
                    limit = min(self.policy.wait_timeout, patience.end - monotonic())
                    waiting = Pauses(WAIT_PAUSE, limit, delivery.stopping)
                wait = self.policy.on_conflict == "wait" and found.record.task_id != delivery.claim.task_id
                if not (wait and waiting.wait()):
                    return Busy(found.record.remaining, found.record.task_id)

    def _acquire(self, delivery: Delivery) -> Lease | Refusal | StoreError:
        try:
            return self.breaker.call(self.store, self.store.acquire, delivery.claim)
        except StoreError as error:
            return error
        except BaseException as error:  # interrupted: the store may have granted what nobody would give back
            release = Release(Reason.FAILED if isinstance(error, Exception) else Reason.SHUTDOWN)
            recording.release(delivery, Holding(self.store, Lease(delivery.claim, 0), monotonic()), release)
            raise

    def _store_failed(self, delivery: Delivery, error: StoreError, patience: Pauses) -> Answer | None:
        if isinstance(error, RecordUnreadable):
            return self._unreadable(error)
        if self.policy.on_store_error == "raise":
            raise error
        if self.policy.on_store_error == "run":
            delivery.event(events.RanUnprotected, error=str(error))
            return Ran(delivery.body(Holding(self.store, Lease(delivery.claim, 0), monotonic())))
        return None if patience.wait() else Busy(STORE_PAUSE[1])

    def _unreadable(self, error: StoreError) -> Busy:
        if self.policy.on_store_error == "raise":
            raise error
        events.logger.error("%s", error)  # and stand aside, not run: it may well say that the operation is done
        return Busy(UNREADABLE_PAUSE)

    def _hold(self, delivery: Delivery, holding: Holding) -> Answer:
        try:
            try:
                if holding.lease.taken_over:
                    delivery.event(events.TakenOver, fence=holding.fence, crashes=holding.lease.crashes)
                else:
                    delivery.event(events.Acquired, fence=holding.fence)
                self.heartbeat.watch(holding)
                value = delivery.body(holding)
            except BaseException as error:  # noqa: BLE001 - every ending is recorded, and raised again
                return self._raised(delivery, holding, error)
            return self._returned(delivery, holding, value)
        finally:  # however this was left, nobody may go on to renew the lease
            self.heartbeat.forget(holding)

    def _holding(self, delivery: Delivery, lease: Lease, since: float) -> Holding:
        return Holding(
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

    def _returned(self, delivery: Delivery, holding: Holding, value: object) -> Answer:
        if holding.within is not None:
            self.heartbeat.forget(holding)
            answer = self._settled_within(delivery, holding, holding.within[0])
        else:
            answer = Ran(value) if uninterrupted(lambda: self._recorded(delivery, holding, value)) else None
        if answer is None:
            delivery.event(events.LeaseMissed, ending=State.COMPLETED.value)
            answer = self._duplicate(delivery)
        return answer

    def _recorded(self, delivery: Delivery, holding: Holding, value: object) -> bool:
        outcome = self._completed(delivery, holding.lease, value)
        self.heartbeat.forget(holding)  # not before: a large result may take longer to write than the lease lasts
        return recording.settle(delivery, holding, outcome, ttl=self.policy.result_ttl)

    def _settled_within(self, delivery: Delivery, holding: Holding, result: object) -> Answer | None:
        found = recording.committed(delivery, holding)
        if found is Commit.LOST:
            return None
        if found is Commit.NO:
            recording.release(delivery, holding, Release(Reason.FAILED))
            raise complaints.not_committed(holding.key)
        return Ran(result)

    def _raised(self, delivery: Delivery, holding: Holding, error: BaseException) -> Answer:
        self.heartbeat.forget(holding)
        within = holding.within
        if within and isinstance(error, Exception) and recording.committed(delivery, holding) is Commit.YES:
            # The effect and its record are there: whatever failed after the commit, the operation has succeeded.
            events.logger.error("%s was committed, and its body raised after that", holding.key, exc_info=error)
            return Ran(within[0])
        ending = _ending(delivery, error)
        if isinstance(ending, Outcome):
            ttl = self.policy.failure_ttl if ending.state is State.FAILED else self.policy.result_ttl
            ours = recording.settle(delivery, holding, ending, ttl=ttl)
        else:
            ours = recording.release(delivery, holding, ending)
        # Who raises LeaseLost may be acked for it: somebody must be left to answer, also where the store said nothing.
        if ours and not isinstance(error, LeaseLost):
            raise error
        delivery.event(events.LeaseMissed, ending="".join(traceback.format_exception_only(error)).strip())
        if not isinstance(error, Exception):  # the process is to end, whoever holds the lease
            raise error
        if isinstance(ending, Release) and ending.reason is Reason.RETRY:
            return Dropped()  # the retry that it has published goes on in its place, and perhaps was what took over
        return self._duplicate(delivery)

    def _duplicate(self, delivery: Delivery) -> Answer:
        """Answer a run that lost its lease: with what is settled, or by standing aside until something is."""
        try:
            record = uninterrupted(lambda: self.store.get(delivery.claim.key))
        except Exception as error:  # noqa: BLE001 - the store cannot tell, and will be asked again
            events.logger.warning("What became of %s cannot be told yet: %s", delivery.claim.key, error)
            record = None
        if record is not None and record.state in (State.COMPLETED, State.FAILED):
            return self._replay(delivery, record)
        return Busy(record.remaining, record.task_id) if record else Busy(STORE_PAUSE[1])

    def _conflict(self, delivery: Delivery, record: Record) -> None:
        delivery.event(events.Conflicted, holder=record.holder, remaining=record.remaining)
        if self.policy.on_conflict == "raise" and record.task_id != delivery.claim.task_id:
            raise complaints.being_done(record)

    def _refused(self, delivery: Delivery, refusal: Refusal) -> Answer:
        record = refusal.record
        match refusal.verdict:
            case Verdict.COMPLETED | Verdict.FAILED:
                return self._replay(delivery, record)
            case Verdict.SUPERSEDED:
                delivery.event(events.Superseding)
                return Dropped()
            case Verdict.KEY_REUSED:
                delivery.event(events.Reused)
                raise complaints.key_reused(record)
            case _:
                delivery.event(events.CrashLooped, crashes=record.crashes)
                raise complaints.crash_loop(record)

    def _replay(self, delivery: Delivery, record: Record) -> Answer:
        completed = record.state is State.COMPLETED
        if completed and self.policy.on_duplicate == "raise" and record.task_id != delivery.claim.task_id:
            raise complaints.done_before(record)
        try:
            payload = self.codec.decode(record.payload, age=record.age)
        except StoreError as error:
            return self._unreadable(error)
        delivery.event(events.Replayed, age=record.age)
        if not completed:
            raise self.codec.rebuild_exception(payload, self.policy.remember_failures)
        if payload.kind is Kind.VALUE:
            return Replayed(payload.data, record)
        if payload.kind is Kind.IGNORED:
            return Ignored(payload.reason, record)
        if delivery.wants_result:
            raise complaints.not_kept(record, payload.reason)
        return Replayed(None, record)


def _ending(delivery: Delivery, error: BaseException) -> Ending:
    """Ask the adapter what an exception means; should that fail, it must not hide the exception."""
    try:
        return uninterrupted(lambda: delivery.ending(error))
    except Exception:  # noqa: BLE001 - the adapter's own
        events.logger.exception("%s: what this error means cannot be told: %r", delivery.claim.key, type(error))
        return Release(Reason.FAILED)
