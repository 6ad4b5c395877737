"""Coverage of the tests' own processes and of those that they start.

Coverage takes half as long again, so `this_process` pauses it for tests that reach no line of their own. To measure a
process's coverage makes its start take twice as long, so only those are measured that reach lines which no test reaches
in its own process: `children` leaves the others out.

A killed process writes no coverage data. Where coverage is measured, the harness first asks each process of the group
to save what it has (SIGURG, which whoever does not know it ignores), and waits for the answers.
"""

from __future__ import annotations

import os
import posix
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from tests.support import processes
from tests.support.waiting import WaitTimeout, wait_until

SAVE = signal.SIGURG
FOLDER = "COVERAGE_SAVED"
SAVE_SECONDS = 3.0
#: In the folder, once a worker has said that it will answer; examples do not, and are killed without delay.
ANSWERS = "answers"
#: By its file, how the tests' names begin whose processes reach lines that no test reaches in its own. A process takes
#: twice as long to start if it is measured, so those of all other tests are not.
MEASURED_PROCESSES: dict[str, tuple[str, ...]] = {
    "celery/test_broadcast.py": ("test_a_worker_defers_and_retries_its_own_delivery_and_no_other_workers",),
    "celery/test_canvas_kills.py": ("test_what_follows_a_task_whose_child_is_killed_after_it_settled_runs_once",),
    "celery/test_inspection.py": ("test_a_worker_says_which_leases_it_holds",),
    "celery/test_kills_and_revokes.py": (
        "test_a_copy_that_the_broker_has_no_room_for_is_neither_acked_nor_failed",
        "test_a_retry_that_overtakes_its_publisher_leaves_no_copy_of_the_attempt_before",
        "test_what_expires_before_it_starts_leaves_no_record",
        "test_what_is_revoked_while_it_runs_is_found_also_beside_and_after_copies_of_its_message",
    ),
    "celery/test_pools.py": (
        "test_a_body_that_exits_is_run_again[solo",
        "test_a_body_that_exits_when_its_message_was_acked_fails[prefork",
        "test_a_body_that_exits_when_its_message_was_acked_fails[threads",
        "test_a_cold_shutdown_frees_all_keys_also_where_it_interrupts_one_of_the_bodies[gevent",
        "test_a_cold_shutdown_loses_no_task[solo",
        "test_a_limit_that_ends_the_body_frees_the_key[prefork",
        "test_a_task_whose_hook_exits_is_tried_again[solo",
        "test_duplicates_that_wait_or_replay_use_up_nothing_of_a_rate_limit[solo",
        "test_many_greenlets_share_a_few_connections[gevent",
    ),
    "celery/test_producers_key.py": (
        "test_a_key_given_by_a_producer_that_does_not_know_us_counts",
        "test_a_retry_after_a_lost_child_keeps_the_producers_key",
    ),
    "celery/test_replace.py": (
        "test_a_replacement_with_another_operations_arguments_is_that_operation",
        "test_a_task_replaced_by_what_contains_it_ends_as_it_does_with_celery_itself",
    ),
    "celery/test_unique.py": (
        "test_a_call_that_inherits_a_priority_stands_for_calls_of_that_priority",
        "test_a_message_that_is_due_after_the_newer_one_has_run_does_not_run",
        "test_a_message_that_its_worker_cannot_decode_stands_for_none",
        "test_a_message_whose_delivery_ends_before_its_task_is_called_stands_for_none",
        "test_a_retry_that_differs_in_its_priority_or_result_stands_for_no_call_of_the_first",
        "test_a_skipped_call_joins_the_trail_of_its_parent",
        "test_a_stream_of_calls_does_not_put_a_debounced_task_off_for_ever",
        "test_a_task_that_schedules_itself_goes_on",
        "test_an_older_message_that_goes_on_does_not_run_after_the_newer_one",
        "test_one_runs_and_one_waits_where_celery_stores_that_a_deferred_message_has_started",
    ),
    "celery/test_unique_publishers.py": (
        "test_a_call_that_is_made_while_the_interpreter_ends_is_published",
        "test_a_process_that_gevent_patches_late_publishes",
    ),
    "cli/test_commands.py": (
        "test_a_closed_output_is_no_terminal",
        "test_a_closed_standard_error_is_no_terminal_either",
        "test_an_output_that_cannot_be_written_is_an_error_in_words",
    ),
    "cli/test_demo.py": (
        "test_a_redis_server_that_does_not_start_is_quoted",
        "test_a_signal_in_the_middle_leaves_nothing",
        "test_plain_celery_charges_customers_twice_and_idempotent_tasks_charge_each_once",
    ),
    "cli/test_list.py": ("test_who_wants_no_colours_gets_none",),
    "cli/test_watch.py": (
        "test_a_slow_search_shows_that_it_goes_on_and_ctrl_c_ends_it",
        "test_it_goes_on_while_the_store_is_away",
        "test_it_shows_what_begins_and_what_ends",
        "test_more_than_fits_the_screen_is_told",
        "test_without_rich_it_says_how_to_install_it",
    ),
    "cli/test_web.py": ("test_sigterm_ends_it_as_ctrl_c_does",),
    "docs/test_http_inside_page.py": ("test_the_django_application_takes_an_order_once",),
    "faults/test_unique_outages.py": (
        "test_a_child_that_ends_before_the_store_answers_leaves_the_reservation_to_a_message",
    ),
    "functions/test_coroutines.py": ("test_a_loop_in_a_thread_goes_on_when_the_main_thread_has_ended",),
    "http/test_conformance.py": ("TestConformance",),
    "http/test_edges.py": (
        "test_django_is_told_which_setting_is_missing",
        "test_django_on_its_own_limits_and_without_a_store",
    ),
    "http/test_faults.py": ("test_a_server_that_is_killed_in_a_handler_leaves_the_request_to_its_repetition",),
    "http/test_gone.py": ("test_django_keeps_to_it",),
    "rq/test_idempotent_worker.py": (
        "test_a_horse_that_is_killed_before_it_hears_of_its_lease_leaves_none",
        "test_a_horse_that_slept_past_its_lease_comes_back_for_what_its_heir_has_settled",
        "test_a_job_that_is_stopped_is_revoked_and_its_crashes_are_not_counted",
        "test_a_lease_that_the_worker_would_renew_too_late_is_refused_and_no_retry_is_spent",
        "test_a_look_at_the_horse_that_falls_due_in_a_cold_shutdown_does_not_undo_it",
        "test_a_program_that_a_job_starts_is_not_taken_for_its_horse",
    ),
    "testing/test_plugin.py": (
        "test_a_worker_in_a_thread_uses_what_the_test_has",
        "test_the_kit_needs_no_pytest",
    ),
    "unit/test_keys.py": (
        "test_a_value_is_compared_alike_in_every_process_and_after_the_trip_through_pickle",
        "test_frozen_keys_are_the_same_in_every_process",
    ),
    "unit/test_metrics_prometheus.py": (
        "test_processes_that_share_a_folder_are_added_up_and_a_dead_one_holds_nothing",
    ),
    "unit/test_metrics_short_lived.py": ("test_processes_that_live_at_the_same_time_have_a_place_each",),
}


def measured() -> bool:
    """Say whether this process's children measure their coverage."""
    return "COVERAGE_PROCESS_CONFIG" in os.environ or "COVERAGE_PROCESS_START" in os.environ


def unmeasured() -> dict[str, str]:
    """Return the environment for a child that runs nothing of the library, and would be slow if it were measured."""
    return {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_PROCESS")}


@contextmanager
def this_process(*, is_measured: bool) -> Iterator[None]:
    """Have the coverage of this process measured meanwhile, if it was, or not; what it forks is treated alike."""
    current = sys.modules["coverage"].Coverage.current() if "coverage" in sys.modules else None
    if is_measured or current is None:
        yield
        return
    saving, os._exit = os._exit, posix._exit  # a forked child would save what all tests before it have reached
    current.stop()
    try:
        yield
    finally:
        current.start()
        os._exit = saving


@contextmanager
def children(*, are_measured: bool) -> Iterator[None]:
    """Have processes that are started meanwhile measured, if this one is, or not."""
    kept = {} if are_measured else {name: os.environ.pop(name) for name in os.environ.keys() - unmeasured().keys()}
    try:
        yield
    finally:
        os.environ.update(kept)


def answer_saves() -> None:
    """Save on request, in a worker and in what it forks. Does nothing where no coverage is measured."""
    if FOLDER in os.environ:
        signal.signal(SAVE, _save)
        (Path(os.environ[FOLDER]) / ANSWERS).touch()


def save(pgid: int, folder: Path) -> None:
    """Have every process of a group save its coverage; one that does not answer loses it, and nothing else."""
    if not measured() or not (folder / ANSWERS).exists():
        return
    for mark in folder.iterdir():
        if mark.name != ANSWERS:
            mark.unlink()
    asked = processes.members(pgid)
    for process in asked:
        os.kill(process.pid, SAVE)
    try:
        wait_until(
            lambda: all((folder / str(process.pid)).exists() or not process.is_running() for process in asked),
            SAVE_SECONDS,
        )
    except WaitTimeout:
        pass


def _save(number: int, frame: FrameType | None) -> None:
    from coverage import Coverage

    current = Coverage.current()
    if current is not None:
        current.save()
    (Path(os.environ[FOLDER]) / str(os.getpid())).touch()
