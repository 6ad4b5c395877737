"""Facts: an outcome that is settled in the caller's own transaction lives and dies with it."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest

from ..core.lease import HeldLease
from ..errors import ConfigurationError, LeaseLost, StoreError
from ..stores.base import Store
from ..stores.records import Lease, Outcome, Reason, Release, State, Verdict
from ._facts import BROKEN, DONE, KEY, LEASE, OUTCOMES, RESULT, Ages, claim, free, known, take, verdict


class RolledBack(Exception):
    """What the facts raise to leave a transaction without committing it."""


class WithinFacts(Ages):
    """Semantics, section 10: the record and the effect are committed together, or not at all."""

    #: What another's write raises while such a transaction is open, or None where no write waits for it.
    stalls: type[StoreError] | None = None

    def begin(self, store: Store) -> AbstractContextManager[Any]:
        raise NotImplementedError

    def insert(self, using: Any, name: str) -> None:
        raise NotImplementedError

    def inserted(self, store: Store) -> set[str]:
        raise NotImplementedError

    def bare(self, store: Store) -> AbstractContextManager[Any]:
        raise NotImplementedError

    def within(self, store: Store, lease: Lease, outcome: Outcome = DONE, *, commit: bool = True) -> None:
        """Insert "effect" and settle, in one transaction."""
        try:
            with self.begin(store) as using:
                self.insert(using, "effect")
                store.settle_within(lease, outcome, ttl=RESULT, using=using)
                if not commit:
                    raise RolledBack
        except RolledBack:
            pass

    def meanwhile(self, write: Callable[[], Any], expected: Any) -> None:
        """See what another client gets whose write would have to wait for a transaction that is open."""
        if self.stalls is None:
            assert write() == expected
        else:
            with pytest.raises(self.stalls):
                write()

    @pytest.mark.parametrize("outcome", OUTCOMES, ids=lambda outcome: str(outcome.state))
    def test_what_is_settled_in_a_transaction_counts_when_that_commits(self, store: Store, outcome: Outcome) -> None:
        lease = take(store, fingerprint="f")
        self.within(store, lease, outcome)
        record = known(store)
        assert (record.state, record.payload, record.fence) == (outcome.state, outcome.payload, lease.fence)
        assert (record.task_id, record.fingerprint) == ("a", "f")
        assert self.inserted(store) == {"effect"}
        for delivery in ({"redelivered": True}, {"task_id": "b"}):
            assert verdict(store, **delivery) == outcome.state.value

    def test_what_is_settled_in_a_transaction_is_kept_for_its_ttl_and_not_longer(self, store: Store) -> None:
        self.within(store, take(store))
        self.age(store, KEY, RESULT - 10)
        assert known(store).payload == DONE.payload
        self.age(store, KEY, 11)
        assert store.get(KEY) is None

    def test_a_rollback_leaves_the_lease_as_it_was(self, store: Store) -> None:
        lease = take(store)
        self.within(store, lease, commit=False)
        record = known(store)
        assert (record.state, record.owner, record.fence) == (State.IN_PROGRESS, lease.owner, lease.fence)
        assert self.inserted(store) == set()
        assert store.renew([lease]) == []
        assert verdict(store, task_id="b") is Verdict.CONFLICT
        self.within(store, lease)
        assert known(store).payload == DONE.payload

    def test_a_lease_whose_transaction_was_rolled_back_can_be_released(self, store: Store) -> None:
        lease = take(store)
        self.within(store, lease, commit=False)
        free(store, lease, Reason.FAILED)
        assert not take(store, task_id="b").taken_over

    def test_no_other_client_sees_the_outcome_before_it_is_committed(self, store: Store) -> None:
        lease = take(store)
        with self.begin(store) as using:
            self.insert(using, "effect")
            store.settle_within(lease, DONE, ttl=RESULT, using=using)
            record = known(store)
            assert (record.state, record.owner, record.payload) == (State.IN_PROGRESS, lease.owner, b"")
        assert known(store).state is State.COMPLETED

    def test_others_conflict_while_the_transaction_is_open(self, store: Store) -> None:
        lease = take(store)
        with self.begin(store) as using:
            self.insert(using, "effect")
            store.settle_within(lease, DONE, ttl=RESULT, using=using)
            self.meanwhile(lambda: verdict(store, task_id="b"), Verdict.CONFLICT)
        assert verdict(store, task_id="b") is Verdict.COMPLETED

    def test_the_lease_is_not_lost_while_the_transaction_is_open(self, store: Store) -> None:
        lease = take(store)
        with self.begin(store) as using:
            self.insert(using, "effect")
            store.settle_within(lease, DONE, ttl=RESULT, using=using)
            self.meanwhile(lambda: list(store.renew([lease])), [])
        assert known(store).state is State.COMPLETED

    def test_a_lease_that_ran_out_is_not_taken_over_while_the_transaction_is_open(self, store: Store) -> None:
        """It may commit: a body that runs beside it could do the same effect again."""
        lease = take(store)
        self.age(store, KEY, LEASE + 1)
        with self.begin(store) as using:
            self.insert(using, "effect")
            store.settle_within(lease, DONE, ttl=RESULT, using=using)
            self.meanwhile(lambda: verdict(store, task_id="b"), Verdict.CONFLICT)
        assert verdict(store, task_id="b") is Verdict.COMPLETED

    def test_a_holder_that_was_taken_over_settles_nothing_and_its_transaction_is_sound(self, store: Store) -> None:
        zombie = take(store)
        self.age(store, KEY, LEASE + 1)
        lease = take(store, redelivered=True)
        with self.begin(store) as using:
            self.insert(using, "before")
            with pytest.raises(LeaseLost, match="nothing was settled"):
                store.settle_within(zombie, DONE, ttl=RESULT, using=using)
            self.insert(using, "after")
        assert self.inserted(store) == {"before", "after"}
        assert (known(store).state, known(store).owner) == (State.IN_PROGRESS, lease.owner)
        self.within(store, lease)
        assert known(store).fence == lease.fence

    def test_a_holder_whose_successor_has_settled_rolls_its_effect_back(self, store: Store) -> None:
        zombie = take(store)
        self.age(store, KEY, LEASE + 1)
        store.settle(take(store, redelivered=True), Outcome(State.COMPLETED, b"json:new"), ttl=RESULT)
        with pytest.raises(LeaseLost):
            self.within(store, zombie)
        assert self.inserted(store) == set()
        assert known(store).payload == b"json:new"

    def test_who_released_settles_nothing(self, store: Store) -> None:
        lease = take(store)
        free(store, lease, Reason.SHUTDOWN)
        with pytest.raises(LeaseLost):
            self.within(store, lease)
        assert known(store).state is State.RELEASED

    def test_who_never_held_settles_nothing(self, store: Store) -> None:
        lease = take(store)
        with pytest.raises(LeaseLost):
            self.within(store, Lease(claim(), lease.fence))
        assert known(store).owner == lease.owner

    def test_to_settle_twice_in_a_transaction_changes_nothing(self, store: Store) -> None:
        lease = take(store)
        with self.begin(store) as using:
            self.insert(using, "effect")
            for payload in (DONE.payload, b"json:other"):
                store.settle_within(lease, Outcome(State.COMPLETED, payload), ttl=RESULT, using=using)
        assert known(store).payload == DONE.payload

    def test_to_settle_again_after_the_commit_changes_nothing(self, store: Store) -> None:
        """As the guard does when the body has returned, and a body whose commit was not answered."""
        lease = take(store)
        self.within(store, lease)
        store.settle(lease, Outcome(State.COMPLETED, b"json:other"), ttl=RESULT)
        with self.begin(store) as using:
            self.insert(using, "more")
            store.settle_within(lease, Outcome(State.COMPLETED, b"json:other"), ttl=RESULT, using=using)
        assert known(store).payload == DONE.payload
        assert self.inserted(store) == {"effect", "more"}

    def test_a_run_that_repeats_its_transaction_after_the_commit_has_it_rolled_back(self, store: Store) -> None:
        """The commit got no reply: its effect is there, and must not be there twice."""
        held = HeldLease(store, take(store), time.monotonic(), encode=lambda result: DONE, result_ttl=RESULT)
        with self.begin(store) as using:
            self.insert(using, "effect")
            held.settle("paid", using=using)

        def again() -> None:
            with self.begin(store) as using:
                self.insert(using, "effect again")
                held.settle("paid again", using=using)

        with pytest.raises(LeaseLost, match="earlier transaction"):
            again()
        assert self.inserted(store) == {"effect"}
        assert (held.result(None), held.lost) == ("paid", False)

    @pytest.mark.parametrize(("first", "second"), [(DONE, BROKEN), (BROKEN, DONE)])
    def test_what_is_settled_is_not_settled_the_other_way_in_a_transaction(
        self, store: Store, first: Outcome, second: Outcome
    ) -> None:
        lease = take(store)
        self.within(store, lease, first)
        with pytest.raises(LeaseLost):
            self.within(store, lease, second)
        assert known(store).payload == first.payload

    def test_who_settled_in_a_transaction_holds_no_more(self, store: Store) -> None:
        lease = take(store)
        self.within(store, lease)
        assert store.renew([lease]) == [lease]
        assert not store.release(lease, Release(Reason.FAILED))
        assert known(store).payload == DONE.payload

    def test_an_outcome_whose_record_the_store_lost_is_settled_in_a_transaction(self, store: Store) -> None:
        lease = take(store, fingerprint="f")
        store.delete(KEY)
        self.within(store, lease)
        record = known(store)
        assert (record.payload, record.fence, record.fingerprint) == (DONE.payload, lease.fence, "f")

    def test_one_transaction_may_settle_several_operations(self, store: Store) -> None:
        leases = [take(store, key) for key in ("one", "two")]
        with self.begin(store) as using:
            self.insert(using, "effect")
            for lease in leases:
                store.settle_within(lease, DONE, ttl=RESULT, using=using)
        assert {known(store, key).state for key in ("one", "two")} == {State.COMPLETED}

    def test_without_a_transaction_nothing_is_settled(self, store: Store) -> None:
        lease = take(store)
        with self.bare(store) as using, pytest.raises(ConfigurationError, match="in an open transaction, and"):
            store.settle_within(lease, DONE, ttl=RESULT, using=using)
        assert known(store).state is State.IN_PROGRESS

    @pytest.mark.parametrize("using", [None, 7, object()], ids=lambda using: type(using).__name__)
    def test_what_is_no_transaction_at_all_is_refused_by_its_type(self, store: Store, using: object) -> None:
        lease = take(store)
        with pytest.raises(ConfigurationError, match=type(using).__name__):
            store.settle_within(lease, DONE, ttl=RESULT, using=using)
        assert known(store).state is State.IN_PROGRESS
