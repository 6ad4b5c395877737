"""Facts: who gets the lease, and what the others are told."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest

from ..records import Claim, Lease, Outcome, Reason, Refusal, State, Verdict
from ..stores.base import Store
from ._asking import DONE, KEEP, KEY, LEASE, OUTCOMES, RESULT, Ages, claim, free, known, refused, take, verdict


class AcquiringFacts(Ages):
    """Promises 1, 3 and 6, and what an acquire meets, in its order."""

    def test_the_first_to_ask_gets_the_lease(self, store: Store) -> None:
        asked = claim(holder="host:1", fingerprint="f")
        lease = store.acquire(asked)
        assert isinstance(lease, Lease)
        assert (lease.claim, lease.taken_over, lease.crashes) == (asked, False, 0)
        record = known(store)
        assert (record.key, record.state, record.fence) == (KEY, State.IN_PROGRESS, lease.fence)
        assert (record.owner, record.task_id, record.holder) == (asked.owner, "a", "host:1")
        assert (record.fingerprint, record.crashes, record.payload) == ("f", 0, b"")
        assert LEASE - 10 < record.remaining <= LEASE

    def test_of_all_who_ask_at_once_one_gets_the_lease(self, store: Store) -> None:
        crowd = 16
        barrier = Barrier(crowd)

        def ask(asked: Claim) -> Lease | Refusal:
            barrier.wait(30)
            return store.acquire(asked)

        with ThreadPoolExecutor(crowd) as threads:
            answers = list(threads.map(ask, [claim(task_id=str(number)) for number in range(crowd)]))
        (lease,) = [answer for answer in answers if isinstance(answer, Lease)]
        others = [answer for answer in answers if isinstance(answer, Refusal)]
        assert {(other.verdict, other.record.owner) for other in others} == {(Verdict.CONFLICT, lease.owner)}

    def test_a_live_lease_is_in_the_way_of_another_task(self, store: Store) -> None:
        lease = take(store, holder="host:1")
        why, record = refused(store, task_id="b")
        assert why is Verdict.CONFLICT
        assert (record.owner, record.task_id, record.holder) == (lease.owner, "a", "host:1")
        assert (record.state, record.fence) == (State.IN_PROGRESS, lease.fence)
        assert LEASE - 10 < record.remaining <= LEASE

    @pytest.mark.parametrize("redelivered", [False, True])
    def test_a_live_lease_is_in_the_way_of_its_own_task_too(self, store: Store, *, redelivered: bool) -> None:
        lease = take(store)
        assert verdict(store, redelivered=redelivered) is Verdict.CONFLICT
        assert known(store).owner == lease.owner

    @pytest.mark.parametrize("attempt", [{"retries": 1}, {"nesting": 1}])
    def test_a_higher_attempt_of_its_own_task_does_not_take_over_a_live_lease(
        self, store: Store, attempt: dict[str, Any]
    ) -> None:
        """A zombie may have published it."""
        lease = take(store)
        assert verdict(store, **attempt) is Verdict.CONFLICT
        assert known(store).owner == lease.owner

    def test_a_retry_that_the_holder_published_takes_over_at_once(self, store: Store) -> None:
        """It may arrive before the holder's release does; the holder has ended by publishing it."""
        ended = take(store)
        lease = take(store, retries=1, sender=ended.owner)
        assert (lease.taken_over, lease.crashes) == (False, 0)
        assert lease.fence > ended.fence
        assert known(store).owner == lease.owner

    def test_a_retry_that_somebody_else_published_does_not_take_over(self, store: Store) -> None:
        zombie = take(store)
        self.age(store, KEY, LEASE + 1)
        lease = take(store, redelivered=True)
        assert verdict(store, retries=1, sender=zombie.owner) is Verdict.CONFLICT
        assert known(store).owner == lease.owner

    @pytest.mark.parametrize("outcome", OUTCOMES, ids=lambda outcome: str(outcome.state))
    def test_a_settled_operation_is_answered_with_its_outcome(self, store: Store, outcome: Outcome) -> None:
        lease = take(store)
        store.settle(lease, outcome, ttl=RESULT)
        for delivery in ({"task_id": "b"}, {"redelivered": True}, {"retries": 3}, {"copy": 2, "token": "x"}):
            why, record = refused(store, **delivery)
            assert why == outcome.state.value
            assert (record.state, record.payload, record.fence) == (outcome.state, outcome.payload, lease.fence)

    @pytest.mark.parametrize("outcome", OUTCOMES, ids=lambda outcome: str(outcome.state))
    def test_a_settled_operation_is_no_lease_again_for_its_own_owner(self, store: Store, outcome: Outcome) -> None:
        lease = take(store)
        store.settle(lease, outcome, ttl=RESULT)
        assert verdict(store, owner=lease.owner) == outcome.state.value

    def test_the_same_owner_gets_the_same_lease_again(self, store: Store) -> None:
        asked = claim()
        first, again = store.acquire(asked), store.acquire(asked)
        assert isinstance(first, Lease)
        assert isinstance(again, Lease)
        assert (again.owner, again.fence, again.crashes) == (first.owner, first.fence, 0)

    def test_a_lease_that_is_asked_for_again_lasts_its_full_time_from_then_on(self, store: Store) -> None:
        """The asker never heard of the first, and counts from the request that was answered."""
        asked = claim()
        store.acquire(asked)
        self.age(store, KEY, LEASE - 10)
        store.acquire(asked)
        self.age(store, KEY, LEASE - 10)
        assert verdict(store, task_id="b") is Verdict.CONFLICT
        self.age(store, KEY, 10 + KEEP - 10)
        assert known(store).owner == asked.owner

    def test_a_lease_that_ran_out_is_taken_over(self, store: Store) -> None:
        dead = take(store, holder="host:1")
        self.age(store, KEY, LEASE + 1)
        assert known(store).remaining == 0
        lease = take(store, task_id="b", holder="host:2")
        assert lease.taken_over
        assert lease.fence > dead.fence
        record = known(store)
        assert (record.owner, record.task_id, record.holder) == (lease.owner, "b", "host:2")
        assert record.remaining > LEASE - 10

    def test_a_lease_is_not_taken_over_before_it_runs_out(self, store: Store) -> None:
        take(store)
        self.age(store, KEY, LEASE - 10)
        why, record = refused(store, task_id="b")
        assert why is Verdict.CONFLICT
        assert 0 < record.remaining <= 10

    @pytest.mark.parametrize("wrong_by", [-7200, 7200])
    def test_a_worker_whose_clock_is_wrong_takes_nothing_early(
        self, store: Store, monkeypatch: pytest.MonkeyPatch, wrong_by: int
    ) -> None:
        take(store)
        now, now_ns = time.time, time.time_ns
        monkeypatch.setattr(time, "time", lambda: now() + wrong_by)
        monkeypatch.setattr(time, "time_ns", lambda: now_ns() + wrong_by * 10**9)
        assert verdict(store, task_id="b") is Verdict.CONFLICT
        take(store, "another")
        monkeypatch.undo()
        record = known(store, "another")
        assert LEASE - 10 < record.remaining <= LEASE

    @pytest.mark.parametrize("reason", [reason for reason in Reason if reason not in (Reason.RETRY, Reason.CRASH_LOOP)])
    def test_what_was_released_may_run_at_once(self, store: Store, reason: Reason) -> None:
        before = take(store, holder="host:1")
        free(store, before, reason)
        record = known(store)
        assert (record.state, record.reason, record.holder) == (State.RELEASED, reason, "")
        assert (record.remaining, record.age, record.fence) == (0, 0, before.fence)
        lease = take(store, task_id="b")
        assert not lease.taken_over
        assert lease.fence > before.fence
        assert known(store).reason == ""

    def test_keys_do_not_disturb_each_other(self, store: Store) -> None:
        first, second = take(store, "a"), take(store, "a:b")
        store.settle(first, DONE, ttl=RESULT)
        assert known(store, "a:b").owner == second.owner
        assert known(store, "a").state is State.COMPLETED

    @pytest.mark.parametrize(
        "key",
        ["a b", "a\nb", "a\0b", "*", "[a-z]?", "{tag}:x", "%s%d", "'; --", "ключ\N{SNOWMAN}", "k" * 512],
    )
    def test_a_key_may_be_any_text(self, store: Store, key: str) -> None:
        lease = take(store, key)
        assert store.renew([lease]) == []
        store.settle(lease, DONE, ttl=RESULT)
        assert known(store, key).payload == DONE.payload
        assert [record.key for record in store.scan(prefix=key)] == [key]
        assert store.delete(key)

    @pytest.mark.parametrize("state", [State.IN_PROGRESS, State.COMPLETED, State.FAILED])
    def test_a_key_that_comes_with_other_arguments_is_reused(self, store: Store, state: State) -> None:
        lease = take(store, fingerprint="f")
        if state is not State.IN_PROGRESS:
            store.settle(lease, Outcome(state, b""), ttl=RESULT)
        why, record = refused(store, task_id="b", fingerprint="g")
        assert (why, record.task_id, record.fingerprint) == (Verdict.KEY_REUSED, "a", "f")
        assert verdict(store, task_id="b", fingerprint="f") not in (None, Verdict.KEY_REUSED)
        assert known(store).owner == ("" if state is not State.IN_PROGRESS else lease.owner)

    def test_a_task_may_come_back_with_other_arguments(self, store: Store) -> None:
        """As `self.retry(args=...)` and `self.replace()` do."""
        lease = take(store, fingerprint="f")
        assert verdict(store, fingerprint="g", redelivered=True) is Verdict.CONFLICT
        store.settle(lease, DONE, ttl=RESULT)
        assert verdict(store, fingerprint="g") is Verdict.COMPLETED

    @pytest.mark.parametrize(("first", "second"), [("f", ""), ("", "f")])
    def test_no_arguments_are_compared_where_one_side_has_none(self, store: Store, first: str, second: str) -> None:
        take(store, fingerprint=first)
        assert verdict(store, task_id="b", fingerprint=second) is Verdict.CONFLICT

    def test_what_was_released_takes_other_arguments(self, store: Store) -> None:
        """A corrected call after a failure is legitimate."""
        free(store, take(store, fingerprint="f"), Reason.FAILED)
        take(store, task_id="b", fingerprint="g")
        assert known(store).fingerprint == "g"
        assert verdict(store, task_id="c", fingerprint="f") is Verdict.KEY_REUSED

    def test_what_was_released_forgets_its_arguments_for_a_task_that_compares_none(self, store: Store) -> None:
        free(store, take(store, fingerprint="f"), Reason.FAILED)
        take(store, task_id="", fingerprint="")
        assert (known(store).task_id, known(store).fingerprint) == ("", "")
