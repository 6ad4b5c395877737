"""ServerContract: the facts of the contract that a server or a driver could spoil.

Valkey runs the scripts that Redis runs, and PgBouncer passes on what PostgreSQL gets: the rules of the contract come
out the same there. What may not is whether each script and each statement works at all, what becomes of bytes and text
on the way, whose clock counts, and what two clients see at once. `tests/conftest.py` runs the same facts on other
versions of Python and redis-py.
"""

from __future__ import annotations

from celery_idempotent.testing import StoreContract

#: Each script or statement at least once with every kind of reply, and what depends on the connection.
FACTS = {
    # acquire
    "test_the_first_claim_gets_the_lease",
    "test_of_many_claims_at_once_one_gets_the_lease",
    "test_a_live_lease_is_in_the_way_of_another_task",
    "test_a_lease_that_ran_out_is_taken_over",
    "test_a_retry_that_the_holder_published_takes_over_at_once",
    "test_a_retry_that_is_not_due_makes_other_tasks_wait",
    "test_a_superseded_copy_changes_nothing",
    "test_a_settled_operation_is_answered_with_its_outcome",
    "test_a_key_that_comes_with_other_arguments_is_reused",
    "test_too_many_crashes_end_the_operation_for_its_task",
    "test_a_worker_whose_clock_is_wrong_takes_nothing_early",
    # renew, settle, release, and their replies that are lost
    "test_a_renewed_lease_lasts_its_full_time_from_then_on",
    "test_of_many_renewed_at_once_those_that_are_lost_come_back",
    "test_a_lease_whose_record_the_store_lost_is_restored_when_it_is_renewed",
    "test_what_was_settled_comes_back_byte_for_byte",
    "test_a_settle_whose_reply_was_lost_may_be_repeated",
    "test_a_release_whose_reply_was_lost_may_be_repeated",
    "test_a_holder_that_was_taken_over_writes_nothing",
    "test_a_holder_reported_dead_counts_as_a_crash",
    "test_an_announced_shutdown_lets_the_lease_be_as_long_as_it_is",
    # what is kept, found and deleted
    "test_a_record_is_kept_longer_than_its_lease_lasted",
    "test_what_was_settled_is_kept_for_its_ttl_and_not_longer",
    "test_the_callbacks_of_a_task_are_announced_once",
    "test_more_records_are_found_than_fit_one_answer",
    "test_the_records_are_found_by_prefix_and_state",
    "test_a_record_that_is_found_is_the_one_that_is_looked_up",
    "test_a_deleted_key_starts_again",
    "test_purging_removes_what_has_expired_and_nothing_else",
    "test_a_key_may_be_any_text",
    "test_what_was_noted_comes_back_in_its_order",
    "test_the_newest_notes_of_a_key_are_kept",
    "test_any_text_may_be_noted",
    # connections
    "test_threads_share_a_store",
    "test_threads_come_and_go",
    "test_a_store_is_used_on_both_sides_of_a_fork",
    "test_a_closed_store_opens_again_when_it_is_used",
    "test_a_store_that_can_serve_answers_a_ping",
}


class ServerContract(StoreContract):
    """`StoreContract` without the facts that a server cannot change."""


if unknown := FACTS - set(dir(StoreContract)):
    raise AssertionError(f"the contract has no such facts: {', '.join(sorted(unknown))}")
for name in dir(StoreContract):
    if name.startswith("test_") and name not in FACTS:
        setattr(ServerContract, name, None)
