"""Facts: how many holders in a row have died, and when that is enough."""

from __future__ import annotations

from time import monotonic
from typing import Any

import pytest

from ..records import Lease, Reason, State, Verdict
from ..stores.base import Store
from ._asking import DONE, LEASE, RESULT, Ages, free, known, refused, take, verdict


class CrashFacts(Ages):
    """An operation that kills its workers is stopped; one that was merely interrupted is not."""

    def crash(self, store: Store, lease: Lease) -> None:
        """Let the lease run out."""
        self.age(store, lease.key, LEASE + 1)

    def test_each_lease_that_runs_out_counts_as_a_crash(self, store: Store) -> None:
        lease = take(store)
        for crashes in (1, 2, 3):
            self.crash(store, lease)
            lease = take(store, redelivered=True)
            assert (lease.crashes, lease.taken_over) == (crashes, True)
            assert known(store).crashes == crashes

    def test_a_lease_that_ran_out_counts_once(self, store: Store) -> None:
        self.crash(store, take(store))
        take(store, redelivered=True)
        for _ in range(3):
            assert verdict(store, redelivered=True) is Verdict.CONFLICT
        assert known(store).crashes == 1

    def test_a_holder_reported_dead_counts_as_a_crash(self, store: Store) -> None:
        free(store, take(store), Reason.CRASHED)
        assert known(store).crashes == 1
        lease = take(store, redelivered=True)
        assert (lease.crashes, lease.taken_over) == (1, False)
        free(store, lease, Reason.CRASHED)
        assert take(store, redelivered=True).crashes == 2

    def test_a_retry_that_takes_over_counts_no_crash(self, store: Store) -> None:
        ended = take(store)
        self.crash(store, ended)
        lease = take(store, retries=1, sender=ended.owner)
        assert (lease.crashes, lease.taken_over) == (0, False)

    @pytest.mark.parametrize("reason", [Reason.FAILED, Reason.RETRY, Reason.REJECTED, Reason.REQUEUED])
    def test_an_ending_that_a_living_holder_recorded_starts_the_count_anew(self, store: Store, reason: Reason) -> None:
        free(store, take(store), Reason.CRASHED)
        free(store, take(store, redelivered=True), reason)
        assert known(store).crashes == 0
        assert take(store, retries=1).crashes == 0

    def test_a_settled_operation_has_no_crashes(self, store: Store) -> None:
        free(store, take(store), Reason.CRASHED)
        store.settle(take(store, redelivered=True), DONE, ttl=RESULT)
        assert known(store).crashes == 0

    @pytest.mark.parametrize("reason", [Reason.SHUTDOWN, Reason.REVOKED])
    def test_an_end_that_somebody_meant_leaves_the_count_as_it_is(self, store: Store, reason: Reason) -> None:
        free(store, take(store), Reason.CRASHED)
        free(store, take(store, redelivered=True), reason)
        assert known(store).crashes == 1
        assert take(store, redelivered=True).crashes == 1

    def test_a_lease_that_runs_out_after_an_announced_shutdown_is_no_crash(self, store: Store) -> None:
        """The worker was told to end, and was killed before its body had ended."""
        free(store, take(store), Reason.CRASHED)
        lease = take(store, redelivered=True)
        assert store.mark_shutdown(lease)
        assert store.mark_shutdown(lease)  # asked again: the reply may have been lost
        assert (known(store).state, known(store).reason) == (State.IN_PROGRESS, Reason.SHUTDOWN)
        assert store.renew([lease]) == []
        assert known(store).reason == Reason.SHUTDOWN
        self.crash(store, lease)
        after = take(store, redelivered=True, max_crashes=2)
        assert (after.crashes, after.taken_over) == (1, True)
        assert known(store).reason == ""
        self.crash(store, after)
        assert take(store, redelivered=True).crashes == 2

    def test_an_announced_shutdown_lets_the_lease_be_as_long_as_it_is(self, store: Store) -> None:
        lease = take(store)
        self.age(store, lease.key, LEASE / 2)
        before = known(store).remaining
        assert store.mark_shutdown(lease)
        assert known(store).remaining <= before
        assert verdict(store, redelivered=True) is Verdict.CONFLICT

    def test_a_holder_that_crashes_by_itself_during_a_shutdown_counts_as_a_crash(self, store: Store) -> None:
        lease = take(store)
        assert store.mark_shutdown(lease)
        free(store, lease, Reason.CRASHED)
        assert (known(store).crashes, known(store).reason) == (1, Reason.CRASHED)

    def test_what_ends_in_time_is_settled_as_ever(self, store: Store) -> None:
        lease = take(store)
        assert store.mark_shutdown(lease)
        store.settle(lease, DONE, ttl=RESULT)
        assert (known(store).state, known(store).reason) == (State.COMPLETED, "")
        assert not store.mark_shutdown(lease)
        assert (known(store).state, known(store).reason) == (State.COMPLETED, "")

    def test_no_shutdown_is_announced_of_what_others_hold_or_nobody_does(self, store: Store) -> None:
        dead = take(store)
        self.crash(store, dead)
        lease = take(store, redelivered=True)
        assert not store.mark_shutdown(dead)
        assert known(store).reason == ""
        free(store, lease, Reason.FAILED)
        assert not store.mark_shutdown(lease)
        assert known(store).reason == Reason.FAILED
        store.delete(lease.key)
        assert not store.mark_shutdown(lease)
        assert store.get(lease.key) is None

    def test_a_holder_that_lives_for_ten_renewals_starts_the_count_anew(self, store: Store) -> None:
        """Renewals come three to a ttl: here the ttl is short enough to see it happen."""
        free(store, take(store), Reason.CRASHED)
        lease = take(store, redelivered=True, lease_ttl=0.03)
        patience = monotonic() + 30
        while known(store).crashes and monotonic() < patience:
            assert store.renew([lease]) == []
        assert known(store).crashes == 0

    def test_a_holder_that_has_just_begun_does_not_start_the_count_anew(self, store: Store) -> None:
        free(store, take(store), Reason.CRASHED)
        lease = take(store, redelivered=True)
        for _ in range(20):
            assert store.renew([lease]) == []
        assert known(store).crashes == 1

    def test_too_many_crashes_end_the_operation_for_its_task(self, store: Store) -> None:
        self.crash(store, take(store, max_crashes=2))
        self.crash(store, take(store, max_crashes=2, redelivered=True))
        why, record = refused(store, max_crashes=2, redelivered=True)
        assert (why, record.crashes) == (Verdict.CRASH_LOOP, 2)
        assert (record.state, record.reason, record.owner) == (State.RELEASED, Reason.CRASH_LOOP, "")
        assert known(store) == record

    def test_holders_reported_dead_make_a_crash_loop_too(self, store: Store) -> None:
        free(store, take(store, max_crashes=2), Reason.CRASHED)
        free(store, take(store, max_crashes=2, redelivered=True), Reason.CRASHED)
        why, record = refused(store, max_crashes=2)
        assert (why, record.crashes) == (Verdict.CRASH_LOOP, 2)

    @pytest.mark.parametrize("delivery", [{"redelivered": True}, {"copy": 1, "token": "x"}])
    def test_a_copy_of_what_looped_is_refused_however_often_it_comes(
        self, store: Store, delivery: dict[str, Any]
    ) -> None:
        self.crash(store, take(store))
        for _ in range(3):
            assert verdict(store, max_crashes=1, **delivery) is Verdict.CRASH_LOOP
        assert known(store).crashes == 1

    def test_another_task_may_try_what_looped(self, store: Store) -> None:
        self.crash(store, take(store))
        assert verdict(store, max_crashes=1) is Verdict.CRASH_LOOP
        assert take(store, task_id="b", max_crashes=1).crashes == 1

    def test_another_task_may_take_over_what_would_have_looped(self, store: Store) -> None:
        self.crash(store, take(store))
        lease = take(store, task_id="b", max_crashes=1)
        assert (lease.crashes, lease.taken_over) == (1, True)

    def test_what_looped_may_be_published_anew_and_tries_once(self, store: Store) -> None:
        self.crash(store, take(store))
        assert verdict(store, max_crashes=1, redelivered=True) is Verdict.CRASH_LOOP
        self.crash(store, take(store, max_crashes=1))
        why, record = refused(store, max_crashes=1)
        assert (why, record.crashes) == (Verdict.CRASH_LOOP, 2)

    def test_what_looped_does_not_belong_to_its_last_holder(self, store: Store) -> None:
        dead = take(store)
        self.crash(store, dead)
        why, record = refused(store, max_crashes=1)
        assert why is Verdict.CRASH_LOOP
        assert store.renew([dead]) == [dead]
        assert known(store) == record
