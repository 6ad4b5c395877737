"""`release`, as somebody on call uses it: the holder hangs, and its lease is long."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from celery import Celery

from celery_idempotent.stores import State
from tests.support.celery.aftermath import PARTING, Aftermath
from tests.support.celery.apps import wait_for_no_reader
from tests.support.celery.fixtures import StartWorker
from tests.support.celery.gates import Gates
from tests.support.waiting import wait_until

KEY = f"idem:{PARTING}.part::ORD-1"
BY_APP = ("-m", "celery", "-A", PARTING, "idempotency", "release", KEY)
BY_URL = ("-m", "celery_idempotent.cli", "release", KEY)


def answered(command: tuple[str, ...], env: dict[str, str], answer: str) -> str:
    """Run a command to which a person says this, and return what it said."""
    done = subprocess.run(
        [sys.executable, *command],
        env={**os.environ, **env, "CELERY_IDEMPOTENT_STORE": env["STORE_URL"]},
        input=answer,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == (0 if answer == "y\n" else 1), done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("command", [BY_APP, BY_URL], ids=["celery -A", "celery-idempotent"])
def test_what_a_paused_holder_holds_is_released_and_it_wakes_as_a_duplicate(
    parting: Celery,
    start_worker: StartWorker,
    aftermath: Aftermath,
    gates: Gates,
    worker_env: dict[str, str],
    command: tuple[str, ...],
) -> None:
    lease_ttl = {"LEASE_TTL": "600"}  # nothing but the release frees the key within this test
    gate = gates.close("after ORD-1")
    paused = start_worker(PARTING, visibility_timeout=1, concurrency=1, env=lease_ttl)
    result = parting.module.part.delay("ORD-1", "return")
    [pid] = gate.reached()
    paused.pause()
    wait_for_no_reader(parting.conf.broker_url)
    gate.open()
    asked = answered(command, {**worker_env, **lease_ttl}, "n\n")
    assert f":{pid}, for " in asked
    assert ("ago, if its lease_ttl is 600 s" in asked) == (command is BY_APP)
    assert (record := aftermath.record()) is not None
    assert record.state is State.IN_PROGRESS
    assert "is released from" in answered(command, {**worker_env, **lease_ttl}, "y\n")
    assert (record := aftermath.record()) is not None
    assert (record.state, record.crashes) == (State.RELEASED, 0)
    start_worker(PARTING, visibility_timeout=1, concurrency=1, env=lease_ttl)
    aftermath.expect(result, "SUCCESS", State.COMPLETED, effects=2)
    settled = aftermath.record()
    paused.resume()
    wait_until(lambda: "LeaseLost key=" in paused.logs(), 30, lambda: f"the holder to learn of it; {paused.logs()}")
    aftermath.expect(result, "SUCCESS", State.COMPLETED, effects=2)
    after = aftermath.record()
    assert settled is not None
    assert after is not None
    assert (after.payload, after.fence) == (settled.payload, settled.fence)
    other = parting.module.part.delay("ORD-1", "return")
    assert result.get(timeout=20) == other.get(timeout=20) == "ORD-1 charged again"
    assert aftermath.journal.count("started") == 2
