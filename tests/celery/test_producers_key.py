"""The key that a producer gives arrives, whoever the producer is and whatever happens to the child."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pytest
from celery import Celery

from tests.support.celery.apps import messages
from tests.support.celery.fixtures import StartWorker
from tests.support.celery.gates import Gates
from tests.support.celery.journal import Journal
from tests.support.waiting import wait_until

CORNERS = "tests.support.celery.corners"


@pytest.fixture
def app(client_app: Callable[..., Celery]) -> Celery:
    return client_app(CORNERS)


@pytest.mark.nightly
def test_a_key_given_to_send_task_counts_although_no_task_was_bound_before(
    start_worker: StartWorker, journal: Journal, worker_env: dict[str, str]
) -> None:
    start_worker(CORNERS)
    code = (
        "from tests.support.celery.corners import app;"
        "[app.send_task('tests.support.celery.corners.fragile', ('ORD-1',), idempotency_key='req-1') for _ in range(2)]"
    )
    subprocess.run([sys.executable, "-c", code], env={**os.environ, **worker_env}, check=True)
    journal.wait_for_count(1, "started")
    wait_until(lambda: not messages(worker_env["BROKER_URL"]), 30, "both messages to be worked off")
    assert [entry.fields["store_key"] for entry in journal.entries("started")] == [f"idem:{CORNERS}.fragile::req-1"]


def test_a_key_given_by_a_producer_that_does_not_know_us_counts(
    start_worker: StartWorker, journal: Journal, worker_env: dict[str, str]
) -> None:
    start_worker(CORNERS)
    code = (
        "import os; from celery import Celery; app = Celery(broker=os.environ['BROKER_URL']);"
        "app.send_task('tests.support.celery.corners.fragile', ('ORD-1',), idempotency_key='req-1')"
    )
    subprocess.run([sys.executable, "-c", code], env={**os.environ, **worker_env}, check=True)
    [started] = journal.wait_for_count(1, "started")
    assert started.fields["store_key"] == f"idem:{CORNERS}.fragile::req-1"


@pytest.mark.nightly
def test_a_retry_after_a_lost_child_keeps_the_producers_key(
    app: Celery, start_worker: StartWorker, journal: Journal, gates: Gates
) -> None:
    gate = gates.close("before ORD-1")
    node = start_worker(CORNERS)
    result = app.module.fragile.apply_async(("ORD-1",), idempotency_key="req-1")
    [pid] = gate.reached()
    node.kill_child(pid)
    gate.reached(2)
    gate.open()
    assert result.get(timeout=20) == "done ORD-1"
    assert {entry.fields["store_key"] for entry in journal.entries("started")} == {f"idem:{CORNERS}.fragile::req-1"}
