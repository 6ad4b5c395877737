"""Holders that sleep past their lease and wake: whatever they do then, the result is the one that was recorded."""

from __future__ import annotations

from typing import Any

import psutil
import pytest
from celery import Celery

from celery_idempotent.stores import State
from tests.support.celery.aftermath import PARTING, Aftermath
from tests.support.celery.apps import wait_for_no_reader
from tests.support.celery.fixtures import StartWorker
from tests.support.celery.gates import Gates
from tests.support.waiting import wait_until


@pytest.mark.ending("paused past its lease, then wakes")
@pytest.mark.parametrize("ending", ["return", "check", "raise", "retry", "reject", "be killed"])
def test_a_holder_that_wakes_after_its_lease_has_become_a_duplicate_however_it_ends(
    parting: Celery, start_worker: StartWorker, aftermath: Aftermath, gates: Gates, ending: str
) -> None:
    gate = gates.close("after ORD-1")
    options: dict[str, Any] = {"visibility_timeout": 1, "concurrency": 1, "env": {"LEASE_TTL": "1.5"}}
    zombie = start_worker(PARTING, **options)
    result = parting.module.part.delay("ORD-1", f"{ending} at first")
    [pid] = gate.reached()
    zombie.pause()
    wait_for_no_reader(parting.conf.broker_url)
    gate.open()
    start_worker(PARTING, **options)
    aftermath.expect(result, "SUCCESS", State.COMPLETED, effects=2)
    settled = aftermath.record()
    if ending == "be killed":
        psutil.Process(pid).kill()
    zombie.resume()
    # What it wanted to say is logged, and no more; a retry is not even published.
    sign = {"be killed": "exited with", "check": "LeaseLost: ", "retry": "LeaseLost: "}.get(ending, "LeaseLost key=")
    wait_until(lambda: sign in zombie.logs(), 30, lambda: f"the zombie to learn of it; its log:\n{zombie.logs()}")
    aftermath.expect(result, "SUCCESS", State.COMPLETED, effects=2)
    other = parting.module.part.delay("ORD-1", f"{ending} at first")
    aftermath.expect(other, "SUCCESS", State.COMPLETED, effects=2)
    after = aftermath.record()
    assert settled is not None
    assert after is not None
    assert (after.payload, after.fence) == (settled.payload, settled.fence)
    assert parting.AsyncResult(result.id).get(timeout=20) == other.get(timeout=20) == "ORD-1 charged again"
    assert aftermath.journal.count("started") == 2


@pytest.mark.ending("paused past its lease, then wakes")
def test_a_holder_that_wakes_after_its_lease_and_finds_nobody_in_its_place_has_not_lost_it(
    parting: Celery, start_worker: StartWorker, aftermath: Aftermath, gates: Gates
) -> None:
    gate = gates.close("after ORD-1")
    node = start_worker(PARTING, concurrency=1, env={"LEASE_TTL": "1"})
    result = parting.module.part.delay("ORD-1", "check")
    gate.reached()
    node.pause()
    gate.open()
    held = aftermath.record()
    wait_until(lambda: (record := aftermath.record()) and not record.remaining, message="the lease to run out")
    node.resume()
    aftermath.expect(result, "SUCCESS", State.COMPLETED)
    after = aftermath.record()
    assert held is not None
    assert after is not None
    assert after.fence == held.fence
    assert aftermath.journal.count("started") == 1


@pytest.mark.ending("paused past its lease, then wakes")
def test_a_holder_that_wakes_at_its_hard_limit_does_not_end_what_its_heir_does(
    parting: Celery, start_worker: StartWorker, aftermath: Aftermath, gates: Gates
) -> None:
    gate = gates.close("before ORD-1")
    options: dict[str, Any] = {"visibility_timeout": 1, "concurrency": 1, "env": {"LEASE_TTL": "1"}}
    zombie = start_worker(PARTING, extra_args=["--time-limit=2"], **options)
    result = parting.module.part.delay("ORD-1")
    [pid] = gate.reached()
    zombie.pause()
    wait_for_no_reader(parting.conf.broker_url)
    start_worker(PARTING, **options)
    wait_until(lambda: aftermath.journal.count("started") == 2, message="the heir to run")
    zombie.resume()
    sign = "hit its hard time limit after it had lost its lease"
    wait_until(lambda: sign in zombie.logs(), 30, lambda: f"the limit; its log:\n{zombie.logs()}")
    wait_until(lambda: pid not in zombie.children(), message="the body to be killed, which Celery does after it told")
    gate.open()
    aftermath.expect(result, "SUCCESS", State.COMPLETED)
    assert aftermath.journal.count("started") == 2
