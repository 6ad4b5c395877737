"""Kills at every step between delivery and ack: what is lost, what happens twice, how soon it goes on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from celery_idempotent.stores import State
from tests.support.celery.fixtures import StartWorker
from tests.support.celery.nodes import WorkerNode
from tests.support.faults.failpoints import BETWEEN_DISPATCH_AND_MARK, BETWEEN_EFFECT_AND_SETTLE, POINTS
from tests.support.faults.sweep import MODULE, Operation, Row, Sweep, table
from tests.support.waiting import wait_until

#: With a lease this long, recovery that waited for it would miss every deadline.
LONG_LEASE = {"LEASE_TTL": "600"}
LEASE = 2.0
#: A worker that has one message at a time. A second child might be at the callback already, and be killed with the
#: first between effect and settle. And a main process that is killed as it fetches the next message loses it, whatever
#: its tasks are: kombu takes it off the queue with BRPOP, and notes it as unacked in a second round trip.
ONE_MESSAGE: dict[str, Any] = {"concurrency": 1, "prefetch": 1, "visibility_timeout": 1}
#: From here on the next delivery replays, and waits for no lease.
SETTLED = frozenset(POINTS[POINTS.index("settle applied, reply not used") :])
GROUP_POINTS = (
    "after acquire, before the body",
    "in the body, after the effect",
    "settle applied, reply not used",
    "after the callback is published",
    "before the child tells its parent",
)


def assert_kept(row: Row) -> None:
    """Assert what is promised for a kill at this point."""
    n = row.operations
    assert (row.killed, row.lost) == (n, 0), "the point must have been reached once, and nothing be lost"
    twice = row.point in BETWEEN_EFFECT_AND_SETTLE
    assert row.effects == (2 * n if twice else n)
    assert row.runs == (2 * n if twice or row.point == "in the body, before the effect" else n)
    assert row.paid == n
    assert (row.callbacks, row.callback_ids, row.shipped) == (n, n, n)
    assert n <= row.sent <= (2 * n if row.point in BETWEEN_DISPATCH_AND_MARK else n)
    assert row.states == {State.COMPLETED}


def sweep_children(sweep: Sweep, points: Sequence[str] = POINTS, times: int = 1, at_once: int = 100) -> list[Row]:
    """Kill one child per operation, several at once, and return a row per point."""
    waiting = [(point, n) for n in range(times) for point in points]
    operations: list[Operation] = []
    while waiting:
        batch = [sweep.publish(*each) for each in waiting[:at_once]]
        sweep.finish(batch)
        operations += batch
        del waiting[:at_once]
    return [sweep.row(point, [o for o in operations if o.point == point], sweep.after_the_child) for point in points]


def test_a_child_that_is_killed_at_any_step_loses_nothing_and_repeats_only_what_was_not_settled(
    sweep: Sweep, sweep_env: dict[str, str], start_worker: StartWorker
) -> None:
    node = start_worker(MODULE, concurrency=4, env={**sweep_env, **LONG_LEASE})
    rows = sweep_children(sweep)
    print(table("one child killed at each step", rows))
    for row in rows:
        assert_kept(row)
    assert "runs out by itself" not in node.logs()


def sweep_workers(sweep: Sweep, node: WorkerNode, points: Sequence[str], times: int = 1) -> list[Row]:
    """Kill the whole worker per operation, one after the other, and return a row per point."""
    rows = []
    for point in points:
        operations = []
        for n in range(times):
            operations.append(sweep.publish(point, n, group=True))
            wait_until(lambda: not node.running, 30, "the worker to be killed")
            node.container.wait_until_gone()
            node.start()
            sweep.finish(operations, answered=True)
        lease = 0.0 if point in SETTLED else LEASE
        rows.append(sweep.row(point, operations, partial(sweep.after_the_worker, lease=lease)))
    return rows


def test_a_worker_that_is_killed_whole_loses_nothing_and_repeats_only_what_was_not_settled(
    sweep: Sweep, sweep_env: dict[str, str], start_worker: StartWorker
) -> None:
    env = {**sweep_env, "LEASE_TTL": str(LEASE)}
    node = start_worker(MODULE, **ONE_MESSAGE, env=env)
    rows = sweep_workers(sweep, node, GROUP_POINTS)
    print(table("a whole worker killed", rows))
    for row in rows:
        assert_kept(row)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_the_kill_sweep_of_children_many_times(
    sweep: Sweep, sweep_env: dict[str, str], start_worker: StartWorker
) -> None:
    start_worker(MODULE, concurrency=4, env={**sweep_env, **LONG_LEASE})
    rows = sweep_children(sweep, times=3, at_once=1)
    [plain] = sweep_children(replace(sweep, task="plain"), ["in the body, before the effect"], times=10, at_once=1)
    plain.point = "plain Celery: in the body"
    print(table("children killed one at a time; recovery: from Celery's notice to the next delivery", [*rows, plain]))
    for row in rows:
        assert_kept(row)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_the_kill_sweep_of_whole_workers_many_times(
    sweep: Sweep, sweep_env: dict[str, str], start_worker: StartWorker
) -> None:
    env = {**sweep_env, "LEASE_TTL": str(LEASE)}
    node = start_worker(MODULE, **ONE_MESSAGE, env=env)
    rows = sweep_workers(sweep, node, POINTS, 2)
    title = "workers killed; recovery: from the later of the broker's redelivery and the lease's end to the answer"
    print(table(title, rows))
    for row in rows:
        assert_kept(row)
