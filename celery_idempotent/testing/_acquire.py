"""Facts: which claim gets the lease; retries and copies of one message; how many holders in a row may die."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from time import monotonic
from typing import Any

import pytest

from ..stores.base import Store
from ..stores.records import (
    RETRIES_LIMIT,
    Claim,
    Lease,
    Outcome,
    Reason,
    Refusal,
    Release,
    State,
    Verdict,
    attempt_number,
)
from ._facts import (
    DONE,
    KEEP,
    KEY,
    LEASE,
    OUTCOMES,
    RESULT,
    Ages,
    claim,
    copy,
    free,
    frozen,
    known,
    refused,
    retry,
    take,
    verdict,
)


class AcquiringFacts(Ages):
    """Promises 1, 3 and 6, and what an acquire meets, in its order."""

    def test_the_first_claim_gets_the_lease(self, store: Store) -> None:
        sent = claim(holder="host:1", fingerprint="f")
        lease = store.acquire(sent)
        assert isinstance(lease, Lease)
        assert (lease.claim, lease.taken_over, lease.crashes) == (sent, False, 0)
        record = known(store)
        assert (record.key, record.state, record.fence) == (KEY, State.IN_PROGRESS, lease.fence)
        assert (record.owner, record.task_id, record.holder) == (sent.owner, "a", "host:1")
        assert (record.fingerprint, record.crashes, record.payload) == ("f", 0, b"")
        assert LEASE - 10 < record.remaining <= LEASE

    def test_of_many_claims_at_once_one_gets_the_lease(self, store: Store) -> None:
        crowd = 16
        barrier = Barrier(crowd)

        def acquire(one: Claim) -> Lease | Refusal:
            barrier.wait(30)
            return store.acquire(one)

        with ThreadPoolExecutor(crowd) as threads:
            answers = list(threads.map(acquire, [claim(task_id=str(number)) for number in range(crowd)]))
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

    def test_a_retry_that_another_published_does_not_take_over(self, store: Store) -> None:
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
        sent = claim()
        first, again = store.acquire(sent), store.acquire(sent)
        assert isinstance(first, Lease)
        assert isinstance(again, Lease)
        assert (again.owner, again.fence, again.crashes) == (first.owner, first.fence, 0)

    def test_a_lease_that_is_claimed_again_lasts_its_full_time_from_then_on(self, store: Store) -> None:
        """The caller never received the first, and counts from the request that was answered."""
        sent = claim()
        store.acquire(sent)
        self.age(store, KEY, LEASE - 10)
        store.acquire(sent)
        self.age(store, KEY, LEASE - 10)
        assert verdict(store, task_id="b") is Verdict.CONFLICT
        self.age(store, KEY, 10 + KEEP - 10)
        assert known(store).owner == sent.owner

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


class CopyFacts(Ages):
    """Which deliveries have had their place taken, and which wait for a retry."""

    def test_a_retry_that_is_not_due_makes_other_tasks_wait(self, store: Store) -> None:
        """Else a thousand duplicates would run a failing body a thousand times."""
        retry(store, take(store), 300)
        for other in ("b", "A", "aa", ""):
            assert verdict(store, task_id=other) is Verdict.CONFLICT
        record = known(store)
        assert (record.state, record.reason) == (State.RELEASED, Reason.RETRY)
        assert 290 < record.remaining <= 300

    def test_a_retry_runs_though_it_is_early(self, store: Store) -> None:
        """The broker decides when; the retry's eta and the store's clock need not agree."""
        before = take(store)
        retry(store, before, 300)
        lease = take(store, retries=1)
        assert (lease.taken_over, lease.fence > before.fence) == (False, True)
        assert verdict(store, task_id="b") is Verdict.CONFLICT

    def test_a_retry_that_is_overdue_lets_other_tasks_run(self, store: Store) -> None:
        retry(store, take(store), 300)
        self.age(store, KEY, 301)
        assert known(store).remaining == 0
        take(store, task_id="b")

    def test_a_wait_for_a_retry_ends_with_the_retry(self, store: Store) -> None:
        retry(store, take(store), 300)
        free(store, take(store, retries=1), Reason.FAILED)
        take(store, task_id="b")

    @pytest.mark.parametrize("attempt", [{}, {"retries": 3}])
    def test_what_was_replaced_by_itself_waits_for_its_continuation_under_its_own_id_too(
        self, store: Store, attempt: dict[str, Any]
    ) -> None:
        """A broker need not mark that it delivers a message again; what precedes the continuation may take long."""
        free(store, take(store, retries=2), Reason.RETRY, retry_in=300, next_attempt=attempt_number(1, 0))
        assert verdict(store, **attempt) is Verdict.CONFLICT
        assert verdict(store, **attempt, **copy(1, "x")) is Verdict.SUPERSEDED
        assert verdict(store, task_id="b", nesting=1) is Verdict.CONFLICT
        take(store, nesting=1)

    def test_what_was_replaced_by_itself_runs_again_once_nothing_goes_on_with_it(self, store: Store) -> None:
        free(store, take(store), Reason.RETRY, retry_in=300, next_attempt=attempt_number(1, 0))
        free(store, take(store, nesting=2, retries=5), Reason.FAILED)
        take(store)

    def test_what_was_replaced_by_itself_runs_again_once_its_continuation_is_overdue(self, store: Store) -> None:
        free(store, take(store), Reason.RETRY, retry_in=300, next_attempt=attempt_number(1, 0))
        self.age(store, KEY, 301)
        take(store)

    def test_a_copy_with_a_lower_number_is_superseded(self, store: Store) -> None:
        take(store)
        assert verdict(store, task_id="b", **copy(2, "x")) is Verdict.CONFLICT
        assert verdict(store, task_id="b", **copy(1, "y")) is Verdict.SUPERSEDED
        assert verdict(store, task_id="b", redelivered=True) is Verdict.SUPERSEDED

    def test_a_second_copy_with_the_same_number_is_superseded(self, store: Store) -> None:
        """Two workers held one message, and both deferred it: without this, each conflict doubles the copies."""
        take(store)
        assert verdict(store, task_id="b", **copy(1, "x")) is Verdict.CONFLICT
        for other in ("y", "w", "X", "xx"):
            assert verdict(store, task_id="b", **copy(1, other)) is Verdict.SUPERSEDED
        assert verdict(store, task_id="b", **copy(1, "x")) is Verdict.CONFLICT

    def test_the_same_copy_restored_is_not_superseded(self, store: Store) -> None:
        """It is the only one there is: to drop it would lose the message."""
        take(store)
        for _ in range(3):
            assert verdict(store, task_id="b", redelivered=True, **copy(1, "x")) is Verdict.CONFLICT

    def test_the_original_restored_is_not_superseded(self, store: Store) -> None:
        take(store)
        for _ in range(3):
            assert verdict(store, task_id="b", redelivered=True) is Verdict.CONFLICT

    def test_the_next_copy_takes_the_place_of_the_one_before(self, store: Store) -> None:
        take(store)
        for number in (1, 2, 10, 200):
            assert verdict(store, task_id="b", **copy(number, "x")) is Verdict.CONFLICT
        assert verdict(store, task_id="b", **copy(10, "x")) is Verdict.SUPERSEDED

    def test_a_later_attempt_takes_the_place_of_the_copies_of_an_earlier_one(self, store: Store) -> None:
        take(store)
        assert verdict(store, task_id="b", **copy(9, "x")) is Verdict.CONFLICT
        assert verdict(store, task_id="b", retries=1, **copy(1, "y")) is Verdict.CONFLICT
        assert verdict(store, task_id="b", **copy(10, "z")) is Verdict.SUPERSEDED
        assert verdict(store, task_id="b", nesting=1, **copy(1, "z")) is Verdict.CONFLICT
        assert verdict(store, task_id="b", retries=7, **copy(2, "z")) is Verdict.SUPERSEDED

    def test_what_claims_for_a_continuation_that_will_not_come_takes_the_place_of_no_copy(self, store: Store) -> None:
        """It has come all the same: its copies may be the only ones there are, and nothing else publishes one."""
        take(store, nesting=1)
        for _ in range(2):
            assert verdict(store, nesting=RETRIES_LIMIT - 1) is Verdict.CONFLICT
            assert verdict(store, nesting=1, **copy(1, "x")) is Verdict.CONFLICT

    def test_copies_of_one_task_are_not_those_of_another(self, store: Store) -> None:
        take(store)
        assert verdict(store, task_id="b", **copy(5, "x")) is Verdict.CONFLICT
        assert verdict(store, task_id="c", **copy(1, "y")) is Verdict.CONFLICT
        assert verdict(store, task_id="a", **copy(1, "z")) is Verdict.CONFLICT
        assert verdict(store, task_id="b", **copy(4, "x")) is Verdict.SUPERSEDED

    def test_a_superseded_copy_changes_nothing(self, store: Store) -> None:
        take(store)
        assert verdict(store, task_id="b", **copy(2, "x")) is Verdict.CONFLICT
        assert verdict(store, task_id="b", **copy(1, "y")) is Verdict.SUPERSEDED
        assert verdict(store, task_id="b", **copy(2, "x")) is Verdict.CONFLICT

    def test_a_superseded_copy_does_not_run_once_the_lease_is_free(self, store: Store) -> None:
        lease = take(store)
        assert verdict(store, task_id="b", **copy(2, "x")) is Verdict.CONFLICT
        free(store, lease, Reason.FAILED)
        assert verdict(store, task_id="b", **copy(1, "x")) is Verdict.SUPERSEDED
        take(store, task_id="b", **copy(2, "x"))

    def test_the_copies_are_forgotten_when_their_task_runs(self, store: Store) -> None:
        lease = take(store)
        assert verdict(store, task_id="b", **copy(5, "x")) is Verdict.CONFLICT
        free(store, lease, Reason.FAILED)
        free(store, take(store, task_id="b", **copy(5, "x")), Reason.REQUEUED)
        take(store, task_id="b", **copy(1, "y"))

    def test_what_was_published_again_is_never_superseded(self, store: Store) -> None:
        """The copy that it would lose to may have been purged from the broker; its own copies count from here."""
        lease = take(store)
        assert verdict(store, task_id="b", **copy(5, "x")) is Verdict.CONFLICT
        assert verdict(store, task_id="b") is Verdict.CONFLICT
        assert verdict(store, task_id="b", **copy(1, "y")) is Verdict.CONFLICT
        free(store, lease, Reason.FAILED)
        take(store, task_id="b")

    def test_what_was_published_again_beside_a_later_attempt_has_copies_of_its_own(self, store: Store) -> None:
        """An operator sends a task again that has failed; the lease of its last attempt has not run out yet."""
        retry(store, take(store))
        retry(store, take(store, retries=1))
        take(store, retries=2)
        assert verdict(store, retries=1) is Verdict.CONFLICT
        assert verdict(store, **copy(1, "x")) is Verdict.SUPERSEDED
        assert verdict(store) is Verdict.CONFLICT
        assert verdict(store, **copy(1, "x")) is Verdict.CONFLICT
        self.age(store, KEY, LEASE + 1)
        assert take(store, **copy(2, "x")).taken_over

    def test_the_next_attempt_takes_the_place_of_what_was_published_again(self, store: Store) -> None:
        retry(store, take(store))
        lease = take(store, retries=1)
        assert verdict(store) is Verdict.CONFLICT
        retry(store, lease)
        assert verdict(store, **copy(1, "x")) is Verdict.SUPERSEDED
        take(store, retries=2)
        assert verdict(store, **copy(1, "x")) is Verdict.SUPERSEDED

    def test_what_was_published_again_does_not_go_before_what_replaced_it(self, store: Store) -> None:
        free(store, take(store), Reason.RETRY, next_attempt=attempt_number(1, 0))
        take(store, nesting=1)
        assert verdict(store) is Verdict.CONFLICT
        assert verdict(store, **copy(1, "x")) is Verdict.SUPERSEDED

    @pytest.mark.parametrize("delivery", [{"redelivered": True}, {"copy": 3, "token": "x"}])
    def test_a_copy_of_an_attempt_before_the_retry_is_superseded(self, store: Store, delivery: dict[str, Any]) -> None:
        retry(store, take(store, retries=1))
        assert verdict(store, retries=1, **delivery) is Verdict.SUPERSEDED
        assert verdict(store, **delivery) is Verdict.SUPERSEDED
        take(store, retries=2, **delivery)

    @pytest.mark.parametrize("delivery", [{"redelivered": True}, {"copy": 3, "token": "x"}])
    def test_a_copy_of_an_attempt_before_the_running_one_is_superseded(
        self, store: Store, delivery: dict[str, Any]
    ) -> None:
        retry(store, take(store))
        take(store, retries=1)
        assert verdict(store, **delivery) is Verdict.SUPERSEDED
        assert verdict(store, retries=1, **delivery) is Verdict.CONFLICT

    def test_a_replacement_outranks_every_retry(self, store: Store) -> None:
        """`self.replace()` keeps the task id, raises the nesting, and starts again at no retries."""
        free(store, take(store, retries=7), Reason.RETRY, next_attempt=1_000_000)
        assert verdict(store, retries=8, redelivered=True) is Verdict.SUPERSEDED
        take(store, nesting=1, redelivered=True)

    def test_an_attempt_published_again_runs_and_counts_from_there(self, store: Store) -> None:
        """An operator sends a failed task again."""
        retry(store, take(store, retries=4))
        free(store, take(store), Reason.CRASHED)
        take(store, retries=1, redelivered=True)

    @pytest.mark.parametrize("reason", [Reason.DONE, Reason.STARTED, Reason.FAILED, Reason.REJECTED, Reason.REVOKED])
    def test_an_ending_forgets_the_attempts_of_its_task(self, store: Store, reason: Reason) -> None:
        retry(store, take(store, retries=1))
        free(store, take(store, retries=2), reason)
        take(store, redelivered=True)

    @pytest.mark.parametrize(
        ("ended", "reason"),
        [(copy(1, "x"), Reason.FAILED), (copy(2, "y"), Reason.REJECTED), ({"retries": 1}, Reason.REVOKED)],
    )
    def test_a_task_that_ends_while_it_waits_has_no_copies(
        self, store: Store, ended: dict[str, Any], reason: Reason
    ) -> None:
        """Sent again under its id, and delivered twice before it has asked, it would be dropped for nothing."""
        take(store)
        assert verdict(store, task_id="b", **copy(1, "x")) is Verdict.CONFLICT
        assert not store.release(Lease(claim(task_id="b", **ended), 0), Release(reason))
        assert verdict(store, task_id="b", redelivered=True) is Verdict.CONFLICT

    @pytest.mark.parametrize("reason", [Reason.CRASHED, Reason.SHUTDOWN, Reason.REQUEUED, Reason.RETRY])
    def test_a_task_that_will_come_again_keeps_its_copies(self, store: Store, reason: Reason) -> None:
        take(store)
        assert verdict(store, task_id="b", **copy(1, "x")) is Verdict.CONFLICT
        assert not store.release(Lease(claim(task_id="b", **copy(1, "x")), 0), Release(reason))
        assert verdict(store, task_id="b", redelivered=True) is Verdict.SUPERSEDED

    @pytest.mark.parametrize("ended", [{}, copy(1, "x"), copy(2, "z"), {"task_id": "c", **copy(3, "y")}])
    def test_the_copies_of_a_task_are_forgotten_by_none_that_is_superseded_and_no_other(
        self, store: Store, ended: dict[str, Any]
    ) -> None:
        take(store)
        assert verdict(store, task_id="b", **copy(2, "y")) is Verdict.CONFLICT
        assert not store.release(Lease(claim(**{"task_id": "b", **ended}), 0), Release(Reason.FAILED))
        assert verdict(store, task_id="b", redelivered=True) is Verdict.SUPERSEDED

    @pytest.mark.parametrize("attempt", [{"retries": 1}, {"nesting": 1}])
    def test_an_attempt_that_ends_while_it_waits_is_forgotten(self, store: Store, attempt: dict[str, Any]) -> None:
        """The last one of its task, which had run before; and what it was replaced by."""
        following = claim(task_id="b", **attempt)
        free(store, take(store, task_id="b"), Reason.RETRY, next_attempt=following.attempt)
        take(store)
        assert verdict(store, task_id="b", redelivered=True) is Verdict.SUPERSEDED
        assert not store.release(Lease(claim(task_id="b"), 0), Release(Reason.FAILED))
        assert verdict(store, task_id="b", redelivered=True) is Verdict.SUPERSEDED
        assert not store.release(Lease(following, 0), Release(Reason.FAILED))
        assert verdict(store, task_id="b", redelivered=True) is Verdict.CONFLICT

    def test_an_attempt_that_runs_is_forgotten_by_no_copy_of_it_that_ends(self, store: Store) -> None:
        retry(store, take(store))
        take(store, retries=1)
        assert not store.release(Lease(claim(retries=1, redelivered=True), 0), Release(Reason.FAILED))
        assert verdict(store, redelivered=True) is Verdict.SUPERSEDED
        self.age(store, KEY, LEASE + 1)
        assert not store.release(Lease(claim(retries=1, redelivered=True), 0), Release(Reason.FAILED))
        assert take(store, redelivered=True).taken_over

    @pytest.mark.parametrize("reason", [Reason.CRASHED, Reason.SHUTDOWN, Reason.REQUEUED])
    def test_an_attempt_that_will_be_delivered_again_keeps_its_place(self, store: Store, reason: Reason) -> None:
        retry(store, take(store, retries=1))
        free(store, take(store, retries=2), reason)
        assert verdict(store, retries=1, redelivered=True) is Verdict.SUPERSEDED
        take(store, retries=2, redelivered=True)

    def test_a_lease_that_ran_out_keeps_the_place_of_its_attempt(self, store: Store) -> None:
        retry(store, take(store))
        take(store, retries=1)
        self.age(store, KEY, LEASE + 1)
        assert verdict(store, redelivered=True) is Verdict.SUPERSEDED
        assert take(store, retries=1, redelivered=True).taken_over

    def test_an_attempt_whose_record_is_new_has_its_place_too(self, store: Store) -> None:
        """The store has forgotten those before, and a broker need not have."""
        lease = take(store, retries=1)
        assert verdict(store, redelivered=True) is Verdict.SUPERSEDED
        free(store, lease, Reason.SHUTDOWN)
        assert verdict(store, redelivered=True) is Verdict.SUPERSEDED
        take(store, retries=1, redelivered=True)

    def test_the_attempts_of_one_task_are_not_those_of_another(self, store: Store) -> None:
        retry(store, take(store, retries=4), 0)
        take(store, task_id="b", redelivered=True)


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

    @pytest.mark.parametrize("reason", [Reason.DONE, Reason.FAILED, Reason.RETRY, Reason.REJECTED, Reason.REQUEUED])
    def test_an_ending_that_a_living_holder_recorded_resets_the_count(self, store: Store, reason: Reason) -> None:
        free(store, take(store), Reason.CRASHED)
        free(store, take(store, redelivered=True), reason)
        assert known(store).crashes == 0
        assert take(store, retries=1).crashes == 0

    def test_a_settled_operation_has_no_crashes(self, store: Store) -> None:
        free(store, take(store), Reason.CRASHED)
        store.settle(take(store, redelivered=True), DONE, ttl=RESULT)
        assert known(store).crashes == 0

    @pytest.mark.parametrize("reason", [Reason.SHUTDOWN, Reason.REVOKED])
    def test_an_end_on_purpose_leaves_the_count_as_it_is(self, store: Store, reason: Reason) -> None:
        free(store, take(store), Reason.CRASHED)
        free(store, take(store, redelivered=True), reason)
        assert known(store).crashes == 1
        assert take(store, redelivered=True).crashes == 1

    def test_a_lease_that_runs_out_after_an_announced_shutdown_is_no_crash(self, store: Store) -> None:
        """The worker was stopped, and was killed before its body had ended."""
        free(store, take(store), Reason.CRASHED)
        lease = take(store, redelivered=True)
        assert store.mark_shutdown(lease)
        assert store.mark_shutdown(lease)  # sent again: the reply may have been lost
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

    def test_no_shutdown_is_announced_of_what_others_hold_or_no_one_does(self, store: Store) -> None:
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

    def test_a_holder_that_lives_for_ten_renewals_resets_the_count(self, store: Store) -> None:
        """Renewals come three to a ttl: here the ttl is short enough to see it happen."""
        if frozen():
            pytest.skip("needs time that passes, and a test has stopped it")
        free(store, take(store), Reason.CRASHED)
        lease = take(store, redelivered=True, lease_ttl=0.03)
        patience = monotonic() + 30
        while known(store).crashes and monotonic() < patience:
            assert store.renew([lease]) == []
        assert known(store).crashes == 0

    def test_a_holder_that_has_just_begun_does_not_reset_the_count(self, store: Store) -> None:
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

    @pytest.mark.parametrize("reported", [True, False])
    def test_tasks_that_take_turns_in_killing_their_workers_are_a_crash_loop(
        self, store: Store, reported: bool
    ) -> None:
        for turn in range(4):
            lease = take(store, task_id="ab"[turn % 2], max_crashes=2, redelivered=turn > 1)
            assert lease.crashes == turn
            if reported:
                free(store, lease, Reason.CRASHED)
            else:
                self.crash(store, lease)
        why, record = refused(store, task_id="a", max_crashes=2, redelivered=True)
        assert (why, record.crashes, record.reason) == (Verdict.CRASH_LOOP, 4, Reason.CRASH_LOOP)
        assert verdict(store, task_id="b", max_crashes=2, redelivered=True) is Verdict.CRASH_LOOP
        assert take(store, task_id="c", max_crashes=2, redelivered=True).crashes == 4

    @pytest.mark.parametrize("reason", [Reason.SHUTDOWN, Reason.REQUEUED, Reason.FAILED])
    def test_no_crash_is_no_loop_also_where_one_would_be(self, store: Store, reason: Reason) -> None:
        free(store, take(store, max_crashes=1), reason)
        take(store, max_crashes=1, redelivered=True)

    def test_another_task_may_try_what_looped(self, store: Store) -> None:
        self.crash(store, take(store))
        assert verdict(store, max_crashes=1) is Verdict.CRASH_LOOP
        assert take(store, task_id="b", max_crashes=1).crashes == 1

    def test_another_task_may_take_over_what_would_have_looped(self, store: Store) -> None:
        self.crash(store, take(store))
        lease = take(store, task_id="b", max_crashes=1)
        assert (lease.crashes, lease.taken_over) == (1, True)

    def test_what_looped_may_be_published_again_and_tries_once(self, store: Store) -> None:
        self.crash(store, take(store))
        assert verdict(store, max_crashes=1, redelivered=True) is Verdict.CRASH_LOOP
        self.crash(store, take(store, max_crashes=1))
        why, record = refused(store, max_crashes=1)
        assert (why, record.crashes) == (Verdict.CRASH_LOOP, 2)

    @pytest.mark.parametrize("attempt", [0, 1])
    def test_what_looped_and_is_published_again_may_be_delivered_again_before_it_asks(
        self, store: Store, attempt: int
    ) -> None:
        lease = take(store, retries=attempt)
        earlier: dict[str, Any] = {"copy": 4, "token": "x"}
        if not attempt:
            assert verdict(store, **earlier) is Verdict.CONFLICT
        free(store, lease, Reason.CRASHED)
        newest: dict[str, Any] = {"retries": 1, "redelivered": True} if attempt else {"copy": 5, "token": "y"}
        assert verdict(store, max_crashes=1, **newest) is Verdict.CRASH_LOOP
        assert verdict(store, max_crashes=1, redelivered=True) is Verdict.CRASH_LOOP

    def test_what_looped_does_not_belong_to_its_last_holder(self, store: Store) -> None:
        dead = take(store)
        self.crash(store, dead)
        why, record = refused(store, max_crashes=1)
        assert why is Verdict.CRASH_LOOP
        assert store.renew([dead]) == [dead]
        assert known(store) == record
