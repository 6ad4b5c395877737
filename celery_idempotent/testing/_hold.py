"""Facts: what a holder may do while it holds, what one that lost its lease may not, and how a lease ends."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ..errors import ConfigurationError, LeaseLost
from ..stores.base import Store
from ..stores.records import Lease, Outcome, Reason, Record, Release, State, Verdict
from ._facts import BROKEN, DONE, KEEP, KEY, LEASE, OUTCOMES, RESULT, Ages, claim, free, known, retry, take, verdict


class HoldingFacts(Ages):
    """Promises 2 and 4."""

    def test_a_renewed_lease_lasts_its_full_time_from_then_on(self, store: Store) -> None:
        lease = take(store)
        self.age(store, KEY, LEASE - 10)
        assert store.renew([lease]) == []
        self.age(store, KEY, LEASE - 10)
        assert verdict(store, task_id="b") is Verdict.CONFLICT
        self.age(store, KEY, 11)
        assert take(store, task_id="b").taken_over

    def test_a_renewed_lease_is_kept_longer_too(self, store: Store) -> None:
        lease = take(store)
        self.age(store, KEY, LEASE - 10)
        store.renew([lease])
        self.age(store, KEY, LEASE + KEEP - 10)
        assert known(store).owner == lease.owner

    def test_a_lease_that_ran_out_and_was_not_taken_over_can_be_renewed(self, store: Store) -> None:
        lease = take(store)
        self.age(store, KEY, LEASE + 1)
        assert store.renew([lease]) == []
        assert verdict(store, task_id="b") is Verdict.CONFLICT
        assert known(store).crashes == 0

    def test_of_many_renewed_at_once_those_that_are_lost_come_back(self, store: Store) -> None:
        long = 100 * LEASE  # some stores renew them one after the other
        leases = [take(store, f"{KEY}-{number}", lease_ttl=long) for number in range(self.many)]
        for lease in leases:
            if int(lease.key.rpartition("-")[2]) % 100 == 7:
                store.delete(lease.key)
                take(store, lease.key, lease_ttl=long)
        aged = long / 2 - 10  # twice, where a store ages as a whole
        self.age(store, leases[0].key, aged)
        self.age(store, leases[-1].key, aged)
        lost = store.renew(leases)
        assert {lease.key for lease in lost} == {f"{KEY}-{number}" for number in range(7, self.many, 100)}
        assert set(lost) <= set(leases)
        for key in (leases[0].key, leases[-1].key):
            assert known(store, key).remaining > long - aged  # more than was left of it; the others may be slow

    def test_renewing_nothing_loses_nothing(self, store: Store) -> None:
        assert list(store.renew([])) == []

    def test_one_process_may_renew_two_leases_of_different_lengths(self, store: Store) -> None:
        short, long = take(store, "short", lease_ttl=30), take(store, "long", lease_ttl=600)
        assert store.renew([short, long]) == []
        assert known(store, "short").remaining <= 30
        assert known(store, "long").remaining > 590

    @pytest.mark.parametrize("ttl", [10 * LEASE, LEASE / 10])
    def test_a_renewal_may_change_how_long_a_lease_lasts(self, store: Store, ttl: float) -> None:
        lease = take(store)
        other = replace(lease, claim=replace(lease.claim, lease_ttl=ttl, revive=False))
        assert store.renew([other]) == []
        assert ttl - 5 < known(store).remaining <= ttl
        self.age(store, KEY, ttl + KEEP - 5)
        assert known(store).owner == lease.owner

    def test_a_renewal_that_is_not_to_revive_makes_no_record(self, store: Store) -> None:
        """Its holder may have released it long ago, and would not release it again."""
        lease, other = take(store, revive=False), take(store, "other")
        store.delete(KEY)
        store.delete("other")
        assert store.renew([lease, other]) == [lease]
        assert store.get(KEY) is None
        assert known(store, "other").owner == other.owner

    def test_a_renewal_that_is_not_to_revive_leaves_a_release_as_it_is(self, store: Store) -> None:
        lease = take(store, revive=False)
        free(store, lease, Reason.STARTED)
        before = known(store)
        assert store.renew([lease]) == [lease]
        assert still(known(store)) == still(before)
        self.age(store, KEY, KEEP + 1)
        assert store.renew([lease]) == [lease]
        assert store.get(KEY) is None

    def bounces(self, store: Store, zombie: Lease) -> None:
        """See that nothing which the zombie writes changes the record."""
        before = store.get(zombie.key)
        assert store.renew([zombie]) == [zombie]
        for outcome in (*OUTCOMES, Outcome(State.COMPLETED, b"json:zombie")):
            with pytest.raises(LeaseLost, match="nothing was settled"):
                store.settle(zombie, outcome, ttl=RESULT)
        for reason in Reason:
            assert not store.release(zombie, Release(reason, retry_in=60, next_attempt=9))
        assert still(store.get(zombie.key)) == still(before)

    def test_a_holder_that_was_taken_over_writes_nothing(self, store: Store) -> None:
        zombie = take(store)
        self.age(store, KEY, LEASE + 1)
        lease = take(store, redelivered=True)
        self.bounces(store, zombie)
        assert store.renew([lease]) == []

    def test_a_holder_that_ended_by_publishing_its_retry_writes_nothing_more(self, store: Store) -> None:
        zombie = take(store)
        take(store, retries=1, sender=zombie.owner)
        self.bounces(store, zombie)

    @pytest.mark.parametrize("outcome", OUTCOMES, ids=lambda outcome: str(outcome.state))
    def test_a_holder_writes_nothing_once_another_has_settled(self, store: Store, outcome: Outcome) -> None:
        zombie = take(store)
        self.age(store, KEY, LEASE + 1)
        store.settle(take(store, redelivered=True), outcome, ttl=RESULT)
        self.bounces(store, zombie)

    def test_a_holder_writes_nothing_once_another_has_released(self, store: Store) -> None:
        zombie = take(store)
        self.age(store, KEY, LEASE + 1)
        retry(store, take(store, redelivered=True))
        self.bounces(store, zombie)

    def test_a_lease_whose_record_the_store_lost_is_restored_when_it_is_renewed(self, store: Store) -> None:
        """Else the run would become a duplicate of nothing, and its effect happen again."""
        lease = take(store, retries=1, fingerprint="f", holder="host:1")
        before = known(store)
        store.delete(KEY)
        assert store.renew([lease]) == []
        assert still(known(store)) == still(before)
        assert verdict(store, redelivered=True) is Verdict.SUPERSEDED
        assert verdict(store, retries=1, redelivered=True) is Verdict.CONFLICT
        assert verdict(store, task_id="b", fingerprint="g") is Verdict.KEY_REUSED
        self.age(store, KEY, LEASE + KEEP - 10)
        assert take(store, retries=1, redelivered=True).taken_over

    def test_of_two_holders_whose_record_the_store_lost_the_first_restores_it(self, store: Store) -> None:
        zombie = take(store)
        self.age(store, KEY, LEASE + 1)
        lease = take(store, redelivered=True)
        store.delete(KEY)
        assert store.renew([lease]) == []
        self.bounces(store, zombie)
        assert store.renew([lease]) == []

    @pytest.mark.parametrize("outcome", OUTCOMES, ids=lambda outcome: str(outcome.state))
    def test_an_outcome_whose_record_the_store_lost_is_settled_all_the_same(
        self, store: Store, outcome: Outcome
    ) -> None:
        lease = take(store, fingerprint="f")
        store.delete(KEY)
        store.settle(lease, outcome, ttl=RESULT)
        record = known(store)
        assert (record.state, record.payload, record.fence) == (outcome.state, outcome.payload, lease.fence)
        assert (record.task_id, record.fingerprint) == ("a", "f")
        assert verdict(store, task_id="b") == outcome.state.value
        self.age(store, KEY, RESULT + 1)
        assert store.get(KEY) is None

    def lost_alone(self, store: Store, reason: Reason | None) -> Lease:
        """Return a lease that the store has granted and lost, while it has the record from before."""
        before = take(store)
        if reason is None:
            self.age(store, KEY, LEASE + 1)
        elif reason is Reason.RETRY:
            retry(store, before)
        else:
            free(store, before, reason)
        return Lease(claim(retries=1, fingerprint="f", holder="host:1"), before.fence + 1)

    @pytest.mark.parametrize("reason", [Reason.RETRY, Reason.FAILED, None])
    def test_a_lease_that_the_store_lost_alone_is_restored_when_it_is_renewed(
        self, store: Store, reason: Reason | None
    ) -> None:
        """As after a restart from a snapshot, or when a replica is promoted."""
        lease = self.lost_alone(store, reason)
        assert store.renew([lease]) == []
        record = known(store)
        assert (record.state, record.owner, record.fence) == (State.IN_PROGRESS, lease.owner, lease.fence)
        assert (record.holder, record.fingerprint, record.crashes, record.reason) == ("host:1", "f", 0, "")
        assert verdict(store, task_id="b", fingerprint="f") is Verdict.CONFLICT
        store.settle(lease, DONE, ttl=RESULT)

    def test_a_lease_of_the_owner_that_had_one_before_is_restored_among_others(self, store: Store) -> None:
        before, other = take(store), take(store, "another key")
        free(store, before, Reason.FAILED)
        assert store.renew([other, Lease(before.claim, before.fence + 1)]) == []
        assert known(store).state is State.IN_PROGRESS

    @pytest.mark.parametrize("reason", [Reason.RETRY, Reason.FAILED, None])
    def test_an_outcome_whose_lease_the_store_lost_alone_is_settled_all_the_same(
        self, store: Store, reason: Reason | None
    ) -> None:
        lease = self.lost_alone(store, reason)
        store.settle(lease, DONE, ttl=RESULT)
        record = known(store)
        assert (record.state, record.payload, record.fence) == (DONE.state, DONE.payload, lease.fence)
        assert verdict(store, task_id="b", fingerprint="f") is Verdict.COMPLETED

    @pytest.mark.parametrize("reason", [Reason.RETRY, Reason.FAILED, None])
    def test_a_lease_that_the_store_lost_alone_is_free_when_it_is_released(
        self, store: Store, reason: Reason | None
    ) -> None:
        lease = self.lost_alone(store, reason)
        before = known(store)
        assert store.release(lease, Release(Reason.FAILED))
        assert (known(store).state, known(store).fence) == (before.state, before.fence)
        take(store, retries=1, redelivered=True)

    def test_a_lease_that_the_store_lost_alone_takes_the_key_from_no_holder(self, store: Store) -> None:
        holder = take(store)
        lost = Lease(claim(task_id="b"), holder.fence + 1)
        assert store.renew([lost]) == [lost]
        assert not store.release(lost, Release(Reason.FAILED))
        with pytest.raises(LeaseLost):
            store.settle(lost, DONE, ttl=RESULT)
        assert store.renew([holder]) == []

    def test_a_lease_that_the_store_lost_alone_and_is_not_to_revive_is_lost(self, store: Store) -> None:
        free(store, before := take(store), Reason.FAILED)
        lost = Lease(claim(revive=False), before.fence + 1)
        assert store.renew([lost]) == [lost]
        assert known(store).state is State.RELEASED

    def test_a_lease_whose_record_the_store_lost_is_free_when_it_is_released(self, store: Store) -> None:
        lease = take(store)
        store.delete(KEY)
        assert store.release(lease, Release(Reason.FAILED))
        assert store.get(KEY) is None

    def test_a_holder_whose_record_was_replaced_writes_nothing(self, store: Store) -> None:
        zombie = take(store)
        store.delete(KEY)
        take(store)
        self.bounces(store, zombie)

    def test_a_holder_that_never_held_writes_nothing(self, store: Store) -> None:
        lease = take(store)
        self.bounces(store, replace(lease, claim=replace(lease.claim, owner="another")))

    def test_who_released_holds_no_more(self, store: Store) -> None:
        lease = take(store)
        free(store, lease, Reason.SHUTDOWN)
        assert store.renew([lease]) == [lease]
        with pytest.raises(LeaseLost):
            store.settle(lease, DONE, ttl=RESULT)
        assert known(store).state is State.RELEASED

    def test_who_settled_holds_no_more(self, store: Store) -> None:
        lease = take(store)
        store.settle(lease, DONE, ttl=RESULT)
        assert store.renew([lease]) == [lease]
        assert not store.release(lease, Release(Reason.FAILED))
        assert known(store).payload == DONE.payload

    def test_the_fences_of_a_key_only_rise(self, store: Store) -> None:
        fences = [take(store).fence]
        self.age(store, KEY, LEASE + 1)
        fences.append(take(store, redelivered=True).fence)  # taken over
        lease = take(store, retries=1, sender=known(store).owner)  # handed over
        fences.append(lease.fence)
        free(store, lease, Reason.FAILED)
        fences.append(take(store).fence)  # after a release
        self.age(store, KEY, LEASE + KEEP + 1)
        lease = take(store)  # after it was forgotten
        assert not lease.taken_over
        fences.append(lease.fence)
        store.settle(lease, DONE, ttl=RESULT)
        self.age(store, KEY, RESULT + 1)
        fences.append(take(store).fence)  # after its outcome was forgotten
        for _ in range(20):
            store.delete(KEY)
            fences.append(take(store).fence)
        assert fences == sorted(set(fences))
        assert fences[0] > 0

    @pytest.mark.parametrize("end", ["lapsed", "handed over", "released"])
    def test_a_fence_ahead_of_the_clock_is_exceeded_too(self, store: Store, end: str) -> None:
        """As after the clock of the server was set back, or another server has taken its place."""
        day = 86_400 * 10**6
        ahead = Lease(claim(), take(store, "another").fence + day)
        assert store.renew([ahead]) == []  # the store has lost it, and has it again
        assert known(store).fence == ahead.fence
        if end == "lapsed":
            self.age(store, KEY, LEASE + 1)
        elif end == "released":
            free(store, ahead, Reason.FAILED)
        lease = take(store, retries=1, sender=ahead.owner if end == "handed over" else "")
        assert lease.fence > ahead.fence
        assert known(store).fence == lease.fence
        self.bounces(store, ahead)
        store.settle(lease, DONE, ttl=RESULT)


def still(record: Record | None) -> Record | None:
    """Return the record without what changes by itself as time passes."""
    return record and replace(record, remaining=0, age=0)


PAYLOADS = [b"", b"\0", b"\xff\xfe\0\r\n", "ü".encode(), bytes(range(256)) * 1024]


class EndingFacts(Ages):
    """Promises 3 and 5."""

    @pytest.mark.parametrize("payload", PAYLOADS, ids=lambda payload: f"{len(payload)}-bytes")
    @pytest.mark.parametrize("state", [State.COMPLETED, State.FAILED])
    def test_what_was_settled_comes_back_byte_for_byte(self, store: Store, state: State, payload: bytes) -> None:
        lease = take(store, fingerprint="f", holder="host:1")
        store.settle(lease, Outcome(state, payload), ttl=RESULT)
        record = known(store)
        assert (record.state, record.payload) == (state, payload)
        assert (record.task_id, record.fingerprint, record.fence) == ("a", "f", lease.fence)
        assert (record.remaining, record.crashes) == (0, 0)
        assert 0 <= record.age < 10

    def test_a_lease_that_ran_out_and_was_not_taken_over_can_be_settled(self, store: Store) -> None:
        lease = take(store)
        self.age(store, KEY, LEASE + 1)
        store.settle(lease, DONE, ttl=RESULT)
        assert known(store).state is State.COMPLETED

    @pytest.mark.parametrize("outcome", OUTCOMES, ids=lambda outcome: str(outcome.state))
    def test_a_settle_whose_reply_was_lost_may_be_repeated(self, store: Store, outcome: Outcome) -> None:
        lease = take(store)
        for _ in range(3):
            store.settle(lease, outcome, ttl=RESULT)
        assert known(store).payload == outcome.payload

    def test_a_repeated_settle_does_not_keep_the_record_longer(self, store: Store) -> None:
        lease = take(store)
        store.settle(lease, DONE, ttl=RESULT)
        self.age(store, KEY, RESULT - 10)
        store.settle(lease, DONE, ttl=RESULT)
        self.age(store, KEY, 11)
        assert store.get(KEY) is None

    @pytest.mark.parametrize(("first", "second"), [(DONE, BROKEN), (BROKEN, DONE)])
    def test_what_is_settled_is_not_settled_the_other_way(self, store: Store, first: Outcome, second: Outcome) -> None:
        lease = take(store)
        store.settle(lease, first, ttl=RESULT)
        with pytest.raises(LeaseLost):
            store.settle(lease, second, ttl=RESULT)
        assert (known(store).state, known(store).payload) == (first.state, first.payload)

    @pytest.mark.parametrize("outcome", OUTCOMES, ids=lambda outcome: str(outcome.state))
    def test_what_is_settled_keeps_its_first_payload(self, store: Store, outcome: Outcome) -> None:
        lease = take(store)
        store.settle(lease, outcome, ttl=RESULT)
        store.settle(lease, replace(outcome, payload=b"json:other"), ttl=RESULT)
        assert known(store).payload == outcome.payload

    def test_a_settle_repeated_after_the_record_was_replaced_is_refused(self, store: Store) -> None:
        lease = take(store)
        store.settle(lease, DONE, ttl=RESULT)
        self.age(store, KEY, RESULT + 1)
        store.settle(take(store, task_id="b"), Outcome(State.COMPLETED, b"json:new"), ttl=RESULT)
        with pytest.raises(LeaseLost):
            store.settle(lease, DONE, ttl=RESULT)
        assert known(store).payload == b"json:new"

    @pytest.mark.parametrize("reason", [reason for reason in Reason if reason is not Reason.CRASH_LOOP])
    def test_a_release_whose_reply_was_lost_may_be_repeated(self, store: Store, reason: Reason) -> None:
        lease = take(store)
        release = Release(reason, retry_in=300, next_attempt=1)
        assert store.release(lease, release)
        record = known(store)
        assert store.release(lease, release)
        again = known(store)
        assert again.crashes == (1 if reason is Reason.CRASHED else 0)
        assert (again.state, again.reason, again.fence) == (record.state, record.reason, record.fence)
        assert again.remaining <= record.remaining

    def test_a_release_repeated_after_the_retry_has_begun_changes_nothing(self, store: Store) -> None:
        before = take(store)
        retry(store, before)
        lease = take(store, retries=1)
        assert not store.release(before, Release(Reason.RETRY, next_attempt=1))
        assert store.renew([lease]) == []

    def test_a_lease_that_ran_out_and_was_not_taken_over_can_be_released(self, store: Store) -> None:
        lease = take(store)
        self.age(store, KEY, LEASE + 1)
        free(store, lease, Reason.FAILED)
        lease = take(store)
        assert (lease.taken_over, lease.crashes) == (False, 0)

    def test_a_process_that_never_saw_the_lease_can_release_for_a_dead_one(self, store: Store) -> None:
        """The main process of a worker knows key and owner, not the fence."""
        lease = take(store)
        assert store.release(Lease(lease.claim, 0), Release(Reason.CRASHED))
        assert known(store).state is State.RELEASED

    def test_nothing_is_settled_within_what_is_no_transaction(self, store: Store) -> None:
        """A store that can settle in a transaction wants one, and the others cannot."""
        lease = take(store)
        with pytest.raises(ConfigurationError):
            store.settle_within(lease, DONE, ttl=RESULT, using=object())
        assert known(store).owner == lease.owner
