"""The algorithm: acquire, run under the heartbeat, settle or release; or replay; or stand aside.

It knows no framework and no server. An adapter translates its request into a `Claim`, what an exception means into
an `Ending`, and the `Answer` into its own control flow; a store decides who holds the lease.
"""

from __future__ import annotations

from dataclasses import dataclass

from . import complaints, hooks, recording, telling
from .answers import Answer, Delivery, Dropped, Ending, Ran
from .beginning import Beginning
from .errors import LeaseLost
from .heartbeat import Heartbeat
from .holding import Holding
from .pauses import sleep, uninterrupted
from .policy import Policy
from .recording import Commit
from .records import Lease, Outcome, Reason, Release, State
from .replaying import duplicate
from .results import Codec
from .stores.base import Store
from .stores.breaker import Breaker

__all__ = ["Guard"]


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
        return self._hold(delivery, found) if isinstance(found, Holding) else found

    def begin(self, delivery: Delivery) -> Holding | Answer:
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

    def _hold(self, delivery: Delivery, holding: Holding) -> Answer:
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

    def hold(self, delivery: Delivery, holding: Holding) -> None:
        """Renew the lease from now on, and emit the event that the body begins."""
        self.heartbeat.watch(holding)  # first: a hook may take longer than the lease lasts
        telling.begins(delivery, holding)

    def give_up(self, delivery: Delivery, holding: Holding, release: Release, error: BaseException) -> None:
        """Release the lease of a body that goes on: another message, of which ``error`` tells, carries it on.

        What a body settled within its own transaction is decided by the commit, and not given up.
        """
        if not holding.fence or holding.within is not None:
            return
        self.heartbeat.forget(holding)
        holding.given_up = True
        uninterrupted(lambda: recording.release(delivery, holding, release, error))
        holding.lost = True

    def end(self, delivery: Delivery, holding: Holding, value: object, error: BaseException | None) -> Answer:
        """Answer a delivery whose body returned ``value``, or raised ``error``; raises what `run` raises after it."""
        try:
            if error is not None:
                return self._raised(delivery, holding, error)
            return self._returned(delivery, holding, value)
        finally:
            self._leave(delivery, holding)

    def _leave(self, delivery: Delivery, holding: Holding) -> None:
        # However the body was left, nobody may go on to renew the lease, and how the run ended was told.
        self.heartbeat.forget(holding)
        telling.breaks_off(delivery, holding)

    def holding(self, delivery: Delivery, lease: Lease, since: float) -> Holding:
        """Return what a body holds under a lease that was asked for at ``since``."""
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
        if holding.given_up:
            hooks.logger.info("%s: its result is its retry's, and not what this run returned after it", holding.key)
            return Dropped()
        if holding.within is not None:
            self.heartbeat.forget(holding)
            (result,) = holding.within
            answer = uninterrupted(lambda: self._settled_within(delivery, holding, result))
        else:
            answer = Ran(value) if uninterrupted(lambda: self._recorded(delivery, holding, value)) else None
        return duplicate(delivery, self.store, self.policy, self.codec) if answer is None else answer

    def _recorded(self, delivery: Delivery, holding: Holding, value: object) -> bool:
        outcome = self._completed(delivery, holding.lease, value)
        self.heartbeat.forget(holding)  # not before: a large result may take longer to write than the lease lasts
        return recording.settle(delivery, holding, outcome, ttl=self.policy.result_ttl)

    def _settled_within(self, delivery: Delivery, holding: Holding, result: object) -> Answer | None:
        found = recording.committed(delivery, holding)
        if found is Commit.LOST:
            return None
        if found is Commit.NO:
            error = complaints.not_committed(holding.key)
            recording.release(delivery, holding, Release(Reason.FAILED), error)
            raise error
        return Ran(result)

    def _raised(self, delivery: Delivery, holding: Holding, error: BaseException) -> Answer:
        self.heartbeat.forget(holding)
        ending = _ending(delivery, error)
        if holding.given_up:
            if not isinstance(error, Exception):
                raise error
            if not isinstance(ending, Release) or ending.reason is Reason.FAILED:
                hooks.logger.error("%s raised after it had published its retry", holding.key, exc_info=error)
            return Dropped()
        ours = uninterrupted(lambda: self._ended(delivery, holding, ending, error))
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

    def _ended(self, delivery: Delivery, holding: Holding, ending: Ending, error: BaseException) -> Ran | bool:
        within = holding.within if isinstance(error, Exception) else None
        if within and recording.committed(delivery, holding, error) is Commit.YES:
            # The effect and its record are there: whatever failed after the commit, the operation has succeeded.
            hooks.logger.error("%s was committed, and its body raised after that", holding.key, exc_info=error)
            return Ran(within[0])
        if isinstance(ending, Release):
            return recording.release(delivery, holding, ending, error)
        ttl = self.policy.failure_ttl if ending.state is State.FAILED else self.policy.result_ttl
        return recording.settle(delivery, holding, ending, ttl=ttl, error=error)


def _ending(delivery: Delivery, error: BaseException) -> Ending:
    """Ask the adapter what an exception means; should that fail, it must not hide the exception."""
    try:
        return uninterrupted(lambda: delivery.ending(error))
    except Exception:  # noqa: BLE001 - the adapter's own
        hooks.logger.exception("%s: what this error means cannot be told: %r", delivery.claim.key, type(error))
        return Release(Reason.FAILED)
