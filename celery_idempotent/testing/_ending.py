"""Facts: how a lease ends, and what is said to those who ask twice."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ..errors import ConfigurationError, LeaseLost
from ..records import Lease, Outcome, Reason, Release, State
from ..stores.base import Store
from ._asking import BROKEN, DONE, KEY, LEASE, OUTCOMES, RESULT, Ages, free, known, retry, take

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

    def test_a_lease_that_ran_out_and_that_nobody_took_can_be_settled(self, store: Store) -> None:
        lease = take(store)
        self.age(store, KEY, LEASE + 1)
        store.settle(lease, DONE, ttl=RESULT)
        assert known(store).state is State.COMPLETED

    @pytest.mark.parametrize("outcome", OUTCOMES, ids=lambda outcome: str(outcome.state))
    def test_a_settle_whose_reply_was_lost_may_be_asked_again(self, store: Store, outcome: Outcome) -> None:
        lease = take(store)
        for _ in range(3):
            store.settle(lease, outcome, ttl=RESULT)
        assert known(store).payload == outcome.payload

    def test_a_settle_asked_again_does_not_keep_the_record_longer(self, store: Store) -> None:
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

    def test_a_settle_asked_again_after_the_record_was_made_anew_is_refused(self, store: Store) -> None:
        lease = take(store)
        store.settle(lease, DONE, ttl=RESULT)
        self.age(store, KEY, RESULT + 1)
        store.settle(take(store, task_id="b"), Outcome(State.COMPLETED, b"json:new"), ttl=RESULT)
        with pytest.raises(LeaseLost):
            store.settle(lease, DONE, ttl=RESULT)
        assert known(store).payload == b"json:new"

    @pytest.mark.parametrize("reason", [reason for reason in Reason if reason is not Reason.CRASH_LOOP])
    def test_a_release_whose_reply_was_lost_may_be_asked_again(self, store: Store, reason: Reason) -> None:
        lease = take(store)
        release = Release(reason, retry_in=300, next_attempt=1)
        assert store.release(lease, release)
        record = known(store)
        assert store.release(lease, release)
        again = known(store)
        assert again.crashes == (1 if reason is Reason.CRASHED else 0)
        assert (again.state, again.reason, again.fence) == (record.state, record.reason, record.fence)
        assert again.remaining <= record.remaining

    def test_a_release_asked_again_after_the_retry_has_begun_changes_nothing(self, store: Store) -> None:
        before = take(store)
        retry(store, before)
        lease = take(store, retries=1)
        assert not store.release(before, Release(Reason.RETRY, next_attempt=1))
        assert store.renew([lease]) == []

    def test_a_lease_that_ran_out_and_that_nobody_took_can_be_released(self, store: Store) -> None:
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
