"""Tasks with ``result_ttl=0`` on real workers: those that share a key take turns, and every one of them runs."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
from celery import Celery

from tests.support.celery.fixtures import StartWorker
from tests.support.celery.gates import Gates
from tests.support.celery.journal import Journal

TURNS = "tests.support.celery.turns_app"


@pytest.fixture
def app(client_app: Callable[..., Celery]) -> Celery:
    return client_app(TURNS)


def most_at_once(journal: Journal, customer: str) -> int:
    """Return how many bodies of a customer ran at the same time."""
    most = now = 0
    for entry in journal.entries(key=customer):
        now += {"begin": 1, "end": -1}.get(entry.event, 0)
        most = max(most, now)
    return most


def test_those_of_one_key_run_one_after_the_other_and_each_returns_its_own(
    app: Celery, start_worker: StartWorker, journal: Journal, gates: Gates
) -> None:
    first, other = gates["ann 0"].close(), gates["bob 0"].close()
    start_worker(TURNS, concurrency=4)
    results = [app.module.invoice.delay(customer, number) for number in range(4) for customer in ("ann", "bob")]
    first.reached()
    other.reached()  # another customer waits for none of them
    first.open()
    other.open()
    assert [result.get(timeout=30) for result in results] == [0, 0, 1, 1, 2, 2, 3, 3]
    for customer in ("ann", "bob"):
        assert most_at_once(journal, customer) == 1
        assert journal.count("begin", customer) == 4


def test_what_is_published_again_runs_again(app: Celery, start_worker: StartWorker, journal: Journal) -> None:
    start_worker(TURNS)
    for _ in range(2):
        assert app.module.invoice.delay("ann", 1).get(timeout=20) == 1
    for _ in range(2):
        with pytest.raises(ValueError, match="ann"):
            app.module.fail.delay("ann").get(timeout=20)
    assert (journal.count("begin", "ann"), journal.count("failed", "ann")) == (2, 2)


def test_a_retry_that_is_due_later_holds_nobody_up(app: Celery, start_worker: StartWorker, journal: Journal) -> None:
    start_worker(TURNS)
    app.module.remind.delay("ann")
    journal.wait_for_count(1, "reminded")
    assert app.module.remind.apply_async(("ann",), retries=1).get(timeout=20) == "ann"


@pytest.mark.nightly
def test_a_killed_run_comes_back_and_keeps_the_others_waiting(
    app: Celery, start_worker: StartWorker, journal: Journal, gates: Gates
) -> None:
    gate = gates["ann 0"].close()
    start_worker(TURNS, concurrency=2)
    killed: Any = app.module.invoice.delay("ann", 0)
    (pid,) = gate.reached()
    waiting = app.module.invoice.delay("ann", 1)
    os.kill(pid, signal.SIGKILL)
    gate.open()
    assert [killed.get(timeout=30), waiting.get(timeout=30)] == [0, 1]
    numbers = [entry.fields["number"] for entry in journal.entries("end", "ann")]
    assert sorted(numbers) == [0, 1]
