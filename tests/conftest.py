"""Fixtures for every test: servers that are started once, databases that nobody else uses."""

from __future__ import annotations

import gc
import logging
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from importlib import import_module
from itertools import chain, islice
from pathlib import Path

import pytest
import redis

from celery_idempotent import events
from celery_idempotent.celery import pool
from celery_idempotent.core.history import history
from celery_idempotent.stores.postgres import PostgresStore
from celery_idempotent.stores.sqlite import SqliteStore
from tests.support import preloaded, processes
from tests.support.celery.measuring import MEASURED_PROCESSES, children, this_process
from tests.support.cluster import Cluster
from tests.support.proxy import Proxy
from tests.support.servers import Databases, ExternalRedis, Pools, RedisServer, ServerMissing, open_client, start_redis
from tests.support.stores.server_contract import FACTS

pytest_plugins = [
    "pytester",
    "tests.support.disorder",
    "tests.support.celery.fixtures",
    "tests.support.stores.sqlite_fixtures",
    "tests.support.stores.dynamodb_fixtures",
    "tests.support.stores.postgres",
]

# Of a test that waited in vain one wants to see what its processes did: they print it when they are aborted.
os.environ["PYTHONFAULTHANDLER"] = "1"

POOLS = Pools()
WORKER_DIRECTORIES = ("celery", "faults", "flower", "gauntlet", "rq")
#: What can differ between versions of Python: pools, pipes and forks among the tests of workers.
PYTHONS = (
    "unit/test_compression.py",
    "unit/test_files.py",
    "unit/test_keys.py",
    "unit/test_keys_properties.py",
    "unit/test_metrics_prometheus.py",
    "unit/test_public_names.py",
    "unit/test_results.py",
    "functions",
    "stores/test_sqlite_connections.py",
)
#: The folders and files whose tests marked `smoke` are run on other Pythons too.
WORKERS_ON_PYTHONS = (
    "celery/test_counts.py",
    "celery/test_crashes.py",
    "celery/test_duplicates.py",
    "celery/test_endings.py",
    "celery/test_large_results.py",
    "celery/test_within.py",
    "flower",
    "rq/test_deaths.py",
    "rq/test_endings.py",
    "rq/test_workers.py",
)
#: What can differ between versions of Celery, kombu, RQ and redis-py, beside all tests that are marked `smoke`.
LIBRARIES = (
    "unit/test_flower_format.py",
    "unit/test_public_names.py",
    "stores/test_cluster.py",
    "stores/test_redis_connections.py",
    "stores/test_redis_outages.py",
    "celery/test_copies.py",
    "celery/test_in_process.py",
    "http/test_task_ids.py",
)
#: What the line does not run, and what it does; `line` of tox.ini has the same.
BESIDE = ("nightly", "soak")
LINE = "not nightly and not soak"
CONTRACT = "stores/test_contract.py"
#: Stores that leave the rules to another one's code: of the contract, the line has what a server or a driver can spoil.
BY_OTHERS = ("cached", "cluster", "dynamodb")
#: By file, or file and test: of what is tried on several stores, servers or pools, those that `nightly` alone has.
#: Such a fact has a row in the line, unless it is marked `nightly` itself.
ROWS_OF_NIGHTLY: dict[str, tuple[str, ...]] = {
    "celery/test_broadcast.py": ("rabbitmq",),
    "celery/test_canvas_duplicates.py": (
        "a step of a chain",
        "the body of a chord",
        "a member of a group that a chain goes on from",
    ),
    "celery/test_canvas_kills.py::test_what_follows_a_task_whose_child_is_killed_after_it_settled_runs_once": (
        "before a callback",
        "in the middle of a chord",
        "in the middle of a callback's canvas",
        "before it said so",
        "before it said so of a chord",
        "after it said so",
        "in its own on_success",
        "before its chord went on",
        "after a callback, before the chain",
    ),
    "celery/test_counts.py": ("gevent",),
    "celery/test_history.py": ("gevent",),
    "celery/test_inspection.py": ("gevent",),
    "celery/test_kills_and_revokes.py::test_a_child_that_somebody_kills_counts_as_a_crash_and_its_task_runs_again": (
        "15",
    ),
    "celery/test_long_tasks.py": ("threads", "solo"),
    "celery/test_metrics.py::test_a_pool_without_children_needs_no_folder": ("gevent",),
    "celery/test_pools.py::test_a_cold_shutdown_loses_no_task": ("eventlet", "gevent", "solo"),
    "celery/test_pools.py::test_a_pool_that_grows_under_load_runs_each_task_once": ("gevent",),
    "celery/test_pools.py::test_a_task_runs_once_fails_retries_and_ends_before_its_worker": ("eventlet",),
    "celery/test_rabbitmq.py::test_a_call_is_skipped_once_the_broker_has_confirmed_the_message_that_waits": (
        "classic-direct",
        "quorum-direct",
    ),
    "celery/test_rabbitmq.py::test_after_the_kill_of_a_child_its_message_runs_once_more": ("classic-direct",),
    "celery/test_rabbitmq.py::test_duplicates_get_the_same_result_while_it_runs_and_afterwards": (
        "classic-direct",
        "quorum-direct",
    ),
    "celery/test_release.py": ("celery -A",),
    "celery/test_replace.py": ("in its continuation",),
    "celery/test_replace.py::test_a_duplicate_of_what_is_being_replaced_waits_for_its_end_and_gets_its_result": (
        "its arguments",
    ),
    "celery/test_replace.py::test_a_replaced_message_that_is_delivered_again_runs_nothing_again": ("not flagged",),
    "celery/test_shutdowns.py::test_a_shutdown_by_a_signal_that_comes_to_the_children_too_is_no_crash": ("0.3",),
    "celery/test_shutdowns.py::test_what_outlasts_the_grace_of_a_shutdown_costs_its_lease_and_is_no_crash": ("15-0",),
    "celery/test_task_events.py": ("gevent", "solo"),
    "celery/test_unique.py::test_a_child_that_is_lost_with_its_message_holds_up_no_call": ("lost_early-kill",),
    "celery/test_unique.py::test_an_older_message_that_goes_on_does_not_run_after_the_newer_one": (
        "True-replace",
        "False-retry",
    ),
    "celery/test_unique_publishers.py::test_a_call_that_is_made_while_the_interpreter_ends_is_published": ("sqlite",),
    "celery/test_visibility.py": ("solo", "not refreshed"),
    "celery/test_within.py::test_what_was_not_committed_runs_again_after_a_kill": (
        "postgres_url-settled ORD-1",
        "sqlite_url-settled ORD-1",
    ),
    "celery/test_zombies.py": ("check", "retry", "reject", "be killed"),
    "cli/test_demo.py::test_a_signal_in_the_middle_leaves_nothing": ("SIGTERM",),
    "cli/test_list.py::test_a_terminal_gets_colours_and_lines_that_fit": ("celery -A",),
    "cli/test_list.py::test_who_wants_no_colours_gets_none": ("celery -A",),
    "cli/test_watch.py::test_a_slow_search_shows_that_it_goes_on_and_ctrl_c_ends_it": (
        "celery -A",
        "celery-idempotent-list",
        "celery-idempotent-stats",
    ),
    "cli/test_watch.py::test_it_shows_what_begins_and_what_ends": ("celery -A",),
    "cli/test_watch.py::test_without_rich_it_says_how_to_install_it": ("celery -A",),
    "cli/test_web.py::test_every_store_is_shown_and_changed": ("dynamodb_url", "cluster_url"),
    "cli/test_web.py::test_the_command_prints_a_url_that_works_and_ends_well_with_ctrl_c": ("celery -A",),
    "django_app/test_admin.py": ("postgres-{id}", "postgres-orders.charge", "postgres-idem:orders", "sqlite"),
    "django_app/test_migrations.py": ("two-second", "one:6432-pooled"),
    "docs/test_command_lines.py::test_the_first_examples_of_the_readme_are_modules_that_a_worker_runs": ("the bug",),
    "docs/test_examples.py::test_a_retried_payment_settles_and_its_duplicate_gets_the_result": ("refund",),
    "docs/test_shop_api.py": (
        "before the commit",
        "while the response is sent",
        "after the charge, before its commit",
        "after the commit",
    ),
    "faults/test_clocks.py::test_a_duplicate_meets_a_live_lease_whatever_the_clocks_say": (
        "the holder-ahead",
        "the duplicate's worker-behind",
        "the holder-behind",
    ),
    "faults/test_clocks.py::test_a_worker_with_a_wrong_clock_takes_over_when_the_lease_ends_by_the_stores_clock": (
        "ahead",
    ),
    "faults/test_lost_replies.py::test_every_reply_of_every_verb_may_be_lost_and_each_task_runs_once": (
        "three times, which is more than a client's own second try",
    ),
    "faults/test_store_outages.py::test_a_network_fault_at_every_verb_at_once_is_survived": (
        "reset",
        "delay",
        "partition",
    ),
    "faults/test_store_outages.py::test_a_store_that_loses_its_data_gets_it_back_from_the_holders": (
        "restarted without its data",
    ),
    "faults/test_unique_outages.py::test_a_body_whose_start_the_store_cannot_note_misses_no_change": ("run",),
    "functions/test_calls.py::test_a_child_that_a_body_forks_ends_nothing_of_its_parent": ("sqlite_url", "raises"),
    "functions/test_calls.py::test_a_lease_is_kept_for_as_long_as_the_body_runs": ("sqlite_url", "postgres_url"),
    "functions/test_coroutines.py::test_a_lease_is_kept_for_as_long_as_the_body_runs": ("sqlite_url", "postgres_url"),
    "http/test_conformance.py": ("drf", "inside", "starlette"),
    "http/test_conformance.py::test_of_many_at_once_one_runs_and_the_others_come_again": ("flask", "django"),
    "http/test_faults.py::test_a_server_that_is_killed_in_a_handler_leaves_the_request_to_its_repetition": (
        "flask",
        "django-asgi",
        "django",
    ),
    "http/test_faults.py::test_a_store_that_goes_away_holds_up_no_response_for_long": ("django", "flask"),
    "http/test_faults.py::test_an_order_settled_in_its_transaction_is_placed_once_whenever_its_server_is_killed": (
        "flask",
    ),
    "http/test_gone.py::test_a_client_that_goes_before_its_stream_begins_leaves_no_lease": ("text/event-stream",),
    "http/test_gone.py::test_django_keeps_to_it": (
        "raw query",
        "cookies",
        "dropped async",
        "ends in mid-stream",
        "lease in a stream",
        "stream in one task",
        "left in mid-stream",
        "within a sync middleware",
        "cleans up in its thread",
        "fails in mid-stream",
        "its server ends",
        "stream in one thread",
        "scope of the database",
    ),
    "http/test_inside.py::test_a_caller_whom_the_view_does_not_know_is_refused": ("inside-drf-asgi",),
    "http/test_inside.py::test_a_key_is_the_callers_own": ("inside-drf-asgi",),
    "http/test_inside.py::test_each_way_to_begin_runs_once_under_a_lease_and_is_replayed": ("inside-drf",),
    "http/test_requests.py::test_a_request_that_takes_longer_than_its_lease_runs_once": ("django", "starlette"),
    "http/test_responses.py::test_a_response_that_is_not_kept_is_known_to_have_been_sent": (
        "flask-/async/orders",
        "starlette-/orders",
        "django-asgi",
    ),
    "http/test_responses.py::test_a_response_without_content_is_replayed_without_a_length": ("django", "django-asgi"),
    "http/test_responses.py::test_a_stream_that_breaks_leaves_the_key_free": (
        "django-asgi",
        "flask-/async/orders",
        "starlette-/orders",
        "flask-/orders",
        "django-/async/orders",
    ),
    "rq/test_idempotent_worker.py": ("spawn",),
    "rq/test_idempotent_worker.py::test_a_horse_that_slept_past_its_lease_comes_back_for_what_its_heir_has_settled": (
        "stock",
    ),
    "rq/test_run_events.py::test_every_run_that_began_ends_once_or_dies_with_its_horse": ("stock",),
    "stores/test_contract.py::test_a_key_may_be_any_text": ("dynamodb",),
    "stores/test_contract.py::test_a_release_whose_reply_was_lost_may_be_repeated": ("dynamodb",),
    "stores/test_contract.py::test_a_store_is_used_on_both_sides_of_a_fork": ("dynamodb",),
    "stores/test_contract.py::test_more_records_are_found_than_fit_one_answer": ("dynamodb",),
    "stores/test_contract.py::test_of_many_renewed_at_once_those_that_are_lost_come_back": ("dynamodb",),
    "stores/test_contract.py::test_threads_share_a_store": ("dynamodb",),
    "stores/test_crowds.py::test_of_a_crowd_that_retries_a_thousand_attempts_are_remembered": (
        "postgres_url",
        "sqlite_url",
    ),
    "stores/test_crowds.py::test_of_a_crowd_that_waits_a_thousand_are_told_apart": ("sqlite_url", "postgres_url"),
    "stores/test_linearizability.py": (*BY_OTHERS, "postgres"),
    "stores/test_model.py": (*BY_OTHERS, "postgres", "sqlite"),
    "stores/test_races.py": BY_OTHERS,
    "stores/test_races.py::test_a_settle_and_a_take_over_never_make_two_outcomes": ("sqlite",),
    "stores/test_races.py::test_leases_that_follow_each_other_never_overlap": ("postgres", "sqlite"),
    "stores/test_races.py::test_of_eight_processes_one_gets_the_lease": ("sqlite",),
    "stores/test_races.py::test_of_eight_processes_one_takes_over_a_lease_that_ran_out": ("sqlite", "postgres"),
    "stores/test_races.py::test_of_fifty_threads_one_gets_the_lease": ("sqlite",),
    "stores/test_races.py::test_of_fifty_threads_one_takes_over_a_lease_that_ran_out": ("sqlite", "postgres"),
    "stores/test_reservations.py": BY_OTHERS[:2],
    "stores/test_redis_tls.py::test_it_is_understood_in_the_url_of_any_servers": ("rediss+cluster://host",),
    "testing/test_overrides.py::test_a_worker_whose_code_switches_the_guards_off_does_not_run": ("solo",),
    "testing/test_plugin.py": ("options1",),
    "unit/test_round_trips.py": ("json", "yaml"),
    "unit/test_windows.py": ("solo",),
}
#: What reaches every line of the core; the line measures these alone, `nightly` all.
CORE = ("unit", "functions", CONTRACT)
#: What reaches (almost) no line that others do not. Coverage takes half as long again, so it pauses for these, and for
#: most of the contract over stores other than memory.
UNMEASURED = (
    "celery/test_broadcast.py",
    "celery/test_canvas.py",
    "celery/test_canvas_as_celery.py",
    "celery/test_canvas_duplicates.py",
    "celery/test_canvas_kills.py",
    "celery/test_cluster.py",
    "celery/test_crashes.py",
    "celery/test_duplicates.py",
    "celery/test_endings.py",
    "celery/test_failover.py",
    "celery/test_history.py",
    "celery/test_kills_and_revokes.py",
    "celery/test_large_results.py",
    "celery/test_limits.py",
    "celery/test_long_tasks.py",
    "celery/test_metrics.py",
    "celery/test_moving.py",
    "celery/test_nodes.py",
    "celery/test_one_at_a_time.py",
    "celery/test_other_brokers.py",
    "celery/test_outages.py",
    "celery/test_pools.py",
    "celery/test_purging.py",
    "celery/test_rabbitmq.py",
    "celery/test_release.py",
    "celery/test_replace.py",
    "celery/test_sqlite_store.py",
    "celery/test_within.py",
    "celery/test_zombies.py",
    "cli/test_commands.py",
    "cli/test_watch.py",
    "django_app/test_worker.py",
    "docs/test_command_lines.py",
    "docs/test_django_page.py",
    "docs/test_endings_table.py",
    "docs/test_examples.py",
    "docs/test_http_contract.py",
    "docs/test_pages.py",
    "docs/test_rq_example.py",
    "docs/test_runbook.py",
    "docs/test_shop_api.py",
    "faults/test_broker_file.py",
    "faults/test_clocks.py",
    "faults/test_kill_sweep.py",
    "faults/test_lost_replies.py",
    "faults/test_many_duplicates.py",
    "faults/test_settle_kills.py",
    "faults/test_soak.py",
    "faults/test_store_outages.py",
    "faults/test_unique_changes.py",
    "flower",
    "functions/test_run_events.py",
    "gauntlet",
    "http/test_faults.py",
    "http/test_gone.py",
    "http/test_inside.py",
    "http/test_middlewares.py",
    "http/test_propagation.py",
    "http/test_requests.py",
    "http/test_responses.py",
    "model/test_real.py",
    "rq/test_deaths.py",
    "rq/test_run_events.py",
    "rq/test_twice.py",
    "rq/test_unchanged.py",
    "simulation",
    "stores/test_cached_faults.py",
    "stores/test_crowds.py",
    "stores/test_dynamodb_transact.py",
    "stores/test_histories.py",
    "stores/test_linearizability.py",
    "stores/test_pgbouncer.py",
    "stores/test_postgres_within.py",
    "stores/test_races.py",
    "stores/test_redis_acl.py",
    "stores/test_redis_connections.py",
    "stores/test_redis_tls.py",
    "stores/test_reservations.py",
    "stores/test_statistics.py",
    "stores/test_valkey.py",
    "test_architecture.py",
    "testing/test_frozen_time.py",
    "unit/test_benchmarks.py",
    "unit/test_keys_properties.py",
    "unit/test_records.py",
    "unit/test_reservation_model.py",
)
#: Folders and files whose tests take long. Several processes begin with these, so that what each of them has left at
#: the end, which the others then share, is short.
LONG = (
    "simulation",
    "unit/test_keys_properties.py",
    "unit/test_reservation_model.py",
    "stores/test_linearizability.py",
    "stores/test_model.py",
    "faults",
    ("celery/test_rabbitmq.py", "celery/test_broadcast.py", "celery/test_unique_publishers.py"),  # share a RabbitMQ
    "celery",
    "docs",
    "rq",
    "http",
    "cli",
    "testing",
    "flower",
    "django_app",
    "stores/test_races.py",
)


def pytest_configure() -> None:
    # A shell has its jobs in the background ignore Ctrl-C, and they what they start.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files without a test of this run: to collect all of them takes each process 4 s."""
    part = config.option.markexpr
    if part not in PARTS or not collection_path.name.startswith("test_"):
        return None
    return None if has_tests_of(part, collection_path) else True


def pytest_sessionstart(session: pytest.Session) -> None:
    """Have each of several processes import a part of the files first.

    All processes collect all files at the same time, so that in a fresh tree each would rewrite the assertions of each
    file: half of what it takes to collect. What one of them has rewritten, it caches for the others.
    """
    config = session.config
    worker, part = getattr(config, "workerinput", None), config.option.markexpr
    if worker is None or part not in PARTS or config.args != config.getini("testpaths"):
        return
    here, number = Path(__file__).parent, int(worker["workerid"].removeprefix("gw"))
    files = sorted(path for path in here.rglob("test_*.py") if has_tests_of(part, path))
    for path in files[number :: worker["workercount"]]:
        # Collection reports what cannot be imported, or is left out on this machine.
        with suppress(Exception, pytest.skip.Exception):
            import_module(".".join((here.name, *path.relative_to(here).with_suffix("").parts)))


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    """Measure in one of several processes what is reached by an import: all of them import the same."""
    worker = getattr(session.config, "workerinput", {"workerid": "gw0"})
    with this_process(is_measured=worker["workerid"] == "gw0"):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    mark(items)
    if config.args == config.getini("testpaths") and config.option.markexpr not in PARTS.keys() - {LINE}:
        check_rows(items)
    yield  # here those without the marks of this run are left out
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "0"))
    if workers:
        items[:] = long_first(items, workers)


def long_first(items: list[pytest.Item], workers: int) -> list[pytest.Item]:
    """Return the tests in an order of which each of several processes gets a stretch that begins with long ones."""
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(place_of(item.path), []).append(item)
    stretches: list[list[pytest.Item]] = [[] for _ in range(workers)]
    for part in LONG:
        paths = [path for path in files if is_in(path, part if isinstance(part, tuple) else (part,))]
        for together in [paths] if isinstance(part, tuple) else [[path] for path in paths]:
            min(stretches, key=len).extend(chain.from_iterable(map(files.pop, together)))
    short = chain.from_iterable(files.values())
    left = len(items)
    for number, stretch in enumerate(stretches):
        share = left // (workers - number)  # as pytest-xdist deals them out with `--dist worksteal`
        stretch.extend(islice(short, max(0, share - len(stretch))))
        left -= share
    return [*chain.from_iterable(stretches), *short]


def mark_row(item: pytest.Item, path: Path) -> None:
    """Mark a test by its store, server or pool."""
    if rows_of_nightly(item, path):
        item.add_marker(pytest.mark.nightly(row=True))
    if path != Path(CONTRACT):
        return
    if is_of(item, path, *BY_OTHERS) and not is_fact_of(item, path, *BY_OTHERS):
        item.add_marker(pytest.mark.nightly)
    if not is_of(item, path, "memory") and not is_fact_of(item, path, "dynamodb"):
        item.add_marker(pytest.mark.unmeasured)


def rows_of_nightly(item: pytest.Item, path: Path) -> list[tuple[str, str]]:
    """Return the entries of `ROWS_OF_NIGHTLY`, each with its row, that leave a test to nightly."""
    case = f"-{item.name.partition('[')[2].removesuffix(']')}-"
    entries = (path.as_posix(), f"{path.as_posix()}::{item.name.partition('[')[0]}")
    return [(entry, row) for entry in entries for row in ROWS_OF_NIGHTLY.get(entry, ()) if f"-{row}-" in case]


def check_rows(items: list[pytest.Item]) -> None:
    """Refuse a row of `ROWS_OF_NIGHTLY` that leaves nothing out by itself, or a fact without any row in the line."""
    idle = {(entry, row) for entry, rows in ROWS_OF_NIGHTLY.items() for row in rows}
    left: dict[str, bool] = {}  # whether a fact has a row in the line, or is one of nightly or soak by itself
    for item in items:
        fact, marks = item.nodeid.partition("[")[0], [*item.iter_markers("nightly"), *item.iter_markers("soak")]
        alone = any(not mark.kwargs for mark in marks)
        left[fact] = left.get(fact, False) or not marks or alone
        if not alone:
            idle.difference_update(rows_of_nightly(item, place_of(item.path)))
    if idle or not all(left.values()):
        lost = [fact for fact in left if not left[fact]]
        raise pytest.UsageError(f"ROWS_OF_NIGHTLY: leaves nothing out {sorted(idle)}; no row left {lost}")


def mark(items: list[pytest.Item]) -> None:
    for item in items:
        path = place_of(item.path)
        if path.parts[0] in WORKER_DIRECTORIES:
            item.add_marker(pytest.mark.worker)
        if is_in(path, UNMEASURED):
            item.add_marker(pytest.mark.unmeasured)
        mark_row(item, path)
        if any(map(item.get_closest_marker, BESIDE)):
            check_beside(item, path)
        else:
            mark_parts(item, path)


def check_beside(item: pytest.Item, path: Path) -> None:
    """Refuse to leave out what shows an ending of a task or a fault of the gauntlet, but for a row of it."""
    shown = [name for name in ("ending", "fault") if item.get_closest_marker(name)]
    if shown and item.get_closest_marker("nightly") and not rows_of_nightly(item, path):
        raise pytest.UsageError(f"Expected the line to have what is marked {shown[0]}, got nightly: {item.nodeid}")


def mark_parts(item: pytest.Item, path: Path) -> None:
    """Mark a test of the line by the environments, beside `line`, that run it too."""
    once, smoke = item.get_closest_marker("thorough"), item.get_closest_marker("smoke")
    if (smoke and is_in(path, WORKERS_ON_PYTHONS)) or (
        not once and (is_in(path, PYTHONS) or is_fact_of(item, path, "memory", "sqlite"))
    ):
        item.add_marker(pytest.mark.compat)
    if smoke or (not once and (is_in(path, LIBRARIES) or is_fact_of(item, path, "redis"))):
        item.add_marker(pytest.mark.oldest)
    if smoke or (not once and is_quick(item, path)):
        item.add_marker(pytest.mark.quick)
    for part in ("compat", "oldest"):
        if item.get_closest_marker(part) and not has_tests_of(part, item.path):
            raise pytest.UsageError(f"Expected no test of {part} in {path} by PARTS, got {item.name}: add it.")


def pytest_collection_finish() -> None:
    """Leave what was imported and collected out of every later collection of garbage.

    Each would take 0.2 s of a processor for it, and stop a test that measures time for seconds beside other processes.
    """
    gc.collect()
    gc.freeze()


@cache
def has_tests_of(part: str, path: Path) -> bool:
    """Return whether a file has tests of this part of the line, a key of `PARTS`."""
    here = Path(__file__).parent
    return not path.is_relative_to(here) or PARTS[part](path.relative_to(here), path.read_text(encoding="utf-8"))


#: By the part of the line: whether a file has tests of it, given its path and its text.
PARTS: dict[str, Callable[[Path, str], bool]] = {
    "compat": lambda path, text: (
        is_in(path, (*PYTHONS, CONTRACT)) or (is_in(path, WORKERS_ON_PYTHONS) and "mark.smoke" in text)
    ),
    "oldest": lambda path, text: is_in(path, (*LIBRARIES, CONTRACT)) or "mark.smoke" in text,
    "compat or oldest": lambda path, text: PARTS["compat"](path, text) or PARTS["oldest"](path, text),
    LINE: lambda path, text: True,
}


def is_of(item: pytest.Item, path: Path, *stores: str) -> bool:
    """Return whether a test is of the contract over these stores."""
    return path == Path(CONTRACT) and re.split("[]-]", item.name.partition("[")[2])[0] in stores


def is_fact_of(item: pytest.Item, path: Path, *stores: str) -> bool:
    """Return whether a test is of the contract over these stores, and what a server or a driver can spoil."""
    return is_of(item, path, *stores) and item.name.partition("[")[0] in FACTS


def is_quick(item: pytest.Item, path: Path) -> bool:
    """Return whether a test is of a contributor's loop, for which tox.ini names the files."""
    if path.parts[0] == "stores":
        return item.name.endswith("]") and item.name.partition("[")[2].startswith(("memory", "redis"))
    return path.parts[0] in ("unit", "test_architecture.py")


@cache
def place_of(path: Path) -> Path:
    """Return a file's path below this folder, or as it is."""
    here = Path(__file__).parent
    return path.relative_to(here) if path.is_relative_to(here) else path


@cache
def is_in(path: Path, parts: tuple[str, ...]) -> bool:
    return any(path.is_relative_to(part) for part in parts)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Measure the coverage of a test, and of the processes that it starts if it is one of `MEASURED_PROCESSES`."""
    name, path = item.nodeid.partition("::")[2], place_of(item.path)
    counts = item.config.option.markexpr != LINE or is_in(path, CORE)
    measured = MEASURED_PROCESSES.get(path.as_posix(), ()) if counts else ()
    own = counts and not item.get_closest_marker("unmeasured")
    with this_process(is_measured=own), children(are_measured=name.startswith(measured)):
        return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown() -> None:
    """Write what a test noted while its stores are there: later, a failure would be logged into another test."""
    history.flush()


def pytest_sessionfinish() -> None:
    preloaded.celery.close()
    preloaded.rq.close()
    preloaded.http.close()
    processes.watchdog.close()


def missing(error: ServerMissing, *, optional: str = "") -> pytest.fail.Exception | pytest.skip.Exception:
    """Return what a missing server means: a failure in CI, a skipped test on a contributor's machine.

    Args:
        error: says what is missing.
        optional: the name of a server that CI has only where CI_PROMISES, which `.ci/run` sets, names it.
    """
    promised = not optional or optional in os.environ.get("CI_PROMISES", "").split()
    outcome = pytest.fail if os.environ.get("CI") == "true" and promised else pytest.skip
    return outcome.Exception(str(error))


@pytest.fixture(autouse=True)
def no_connection_left() -> Iterator[None]:
    """Close what a test leaves open to Redis, as Celery does of its result backend."""
    yield
    POOLS.close()


@pytest.fixture(autouse=True)
def no_message_left() -> Iterator[None]:
    """Drop what a test leaves in the broker in memory, which is one for all apps of a process."""
    yield
    memory = sys.modules.get("kombu.transport.memory")
    for queue in list(memory.Channel.queues.values()) if memory else ():
        queue.queue.clear()


@pytest.fixture(autouse=True)
def nothing_purged_in_passing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Records that have expired are there until a test purges them; a test of purging in passing asks for it."""
    monkeypatch.setattr(SqliteStore, "purge_every", 0)
    monkeypatch.setattr(PostgresStore, "purge_every", 0)


@pytest.fixture(autouse=True)
def what_workers_set() -> Iterator[None]:
    """What a worker in this process has set, once for all: later tests could not see warnings, or had no limits."""
    level, enforces_limits = logging.root.level, pool.enforces_limits
    yield
    logging.root.setLevel(level)
    pool.enforces_limits = enforces_limits


@pytest.fixture(autouse=True)
def no_hook_left() -> Iterator[None]:
    """Refuse a test that leaves a hook behind, which would hear the events of those after it."""
    before = list(events._hooks)
    yield
    left = [hook for hook in events._hooks if hook not in before and not _is_own(hook[0])]
    for hook in left:
        events._hooks.remove(hook)
    assert not left, left


def _is_own(hook: object) -> bool:
    """Return whether the library adds a hook itself, as modules do that are imported."""
    return str(getattr(hook, "__module__", "")).startswith("celery_idempotent.")


@pytest.fixture(scope="session")
def redis_databases() -> Iterator[Databases]:
    """The databases of the session's server, which is started when the first test asks."""
    try:
        server = start_redis()
    except ServerMissing as error:
        raise missing(error) from None
    yield Databases(server)
    server.stop()


@pytest.fixture(scope="session")
def redis_server(redis_databases: Databases) -> RedisServer | ExternalRedis:
    """The session's server. It is shared, and REDIS_URL may name it: never kill, pause, configure or flush it."""
    return redis_databases.server


@pytest.fixture
def fresh_redis(redis_databases: Databases) -> Iterator[Callable[[], str]]:
    """A function that returns the URL of an empty database, which is this test's alone."""
    taken: list[int] = []

    def fresh() -> str:
        taken.append(redis_databases.take())
        return redis_databases.server.url(taken[-1])

    yield fresh
    for db in taken:
        redis_databases.give_back(db)


@pytest.fixture
def redis_url(fresh_redis: Callable[[], str]) -> str:
    """The URL of an empty database, which is this test's alone."""
    return fresh_redis()


@pytest.fixture
def redis_client(redis_url: str) -> Iterator[redis.Redis]:
    """A client of the database at `redis_url`, that neither retries nor waits long."""
    with open_client(redis_url) as client:
        yield client


@pytest.fixture(scope="session")
def shared_cluster() -> Iterator[Cluster]:
    """The session's Redis Cluster, which is started when the first test asks: never kill or reshape it."""
    try:
        cluster = Cluster()
    except ServerMissing as error:
        raise missing(error) from None
    with cluster:
        yield cluster


@pytest.fixture
def cluster_url(shared_cluster: Cluster) -> str:
    """The URL of an empty Redis Cluster, which is this test's alone."""
    shared_cluster.empty()
    return shared_cluster.url()


@pytest.fixture
def own_redis() -> Iterator[Callable[..., RedisServer]]:
    """A function that starts a server for this test alone, to be killed, paused, restarted, configured.

    `own_redis(requirepass="x", maxmemory="2mb")`: options become its configuration.
    """
    started: list[RedisServer] = []

    def start(**config: object) -> RedisServer:
        try:
            started.append(RedisServer(**config))  # type: ignore[arg-type]
        except ServerMissing as error:
            raise missing(error) from None
        return started[-1].start()

    yield start
    for server in started:
        server.stop()


@pytest.fixture
def proxied() -> Iterator[Callable[[int], Proxy]]:
    """A function that puts a `Proxy` before a port: `proxy = proxied(server.port)`, then `proxy.url(db)`."""
    proxies: list[Proxy] = []

    def start(port: int) -> Proxy:
        proxies.append(Proxy(port).__enter__())
        return proxies[-1]

    yield start
    for proxy in proxies:
        proxy.close()
