"""Facts: retries that are waited for, and copies of one message that must not multiply."""

from __future__ import annotations

from typing import Any

import pytest

from ..records import Reason, State, Verdict, attempt_number
from ..stores.base import Store
from ._asking import KEY, LEASE, Ages, copy, free, known, retry, take, verdict


class CopyFacts(Ages):
    """Which deliveries have had their place taken, and who waits for a retry."""

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
        """A broker need not say that it delivers a message again; what precedes the continuation may take long."""
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

    def test_what_somebody_published_anew_is_never_superseded(self, store: Store) -> None:
        """The copy that it would lose to may have been purged from the broker; its own copies count from here."""
        lease = take(store)
        assert verdict(store, task_id="b", **copy(5, "x")) is Verdict.CONFLICT
        assert verdict(store, task_id="b") is Verdict.CONFLICT
        assert verdict(store, task_id="b", **copy(1, "y")) is Verdict.CONFLICT
        free(store, lease, Reason.FAILED)
        take(store, task_id="b")

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

    def test_an_attempt_published_anew_runs_and_counts_from_there(self, store: Store) -> None:
        """An operator sends a failed task again."""
        retry(store, take(store, retries=4))
        free(store, take(store), Reason.CRASHED)
        take(store, retries=1, redelivered=True)

    @pytest.mark.parametrize("reason", [Reason.FAILED, Reason.REJECTED, Reason.REVOKED])
    def test_an_ending_forgets_the_attempts_of_its_task(self, store: Store, reason: Reason) -> None:
        retry(store, take(store, retries=1))
        free(store, take(store, retries=2), reason)
        take(store, redelivered=True)

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

    def test_the_attempts_of_one_task_are_not_those_of_another(self, store: Store) -> None:
        retry(store, take(store, retries=4), 0)
        take(store, task_id="b", redelivered=True)
