"""Publishers that stop between their steps, and clocks that are wrong: no change waits for them, and none is missed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest
from celery import Celery

from tests.support.celery.apps import messages
from tests.support.celery.fixtures import StartWorker
from tests.support.celery.journal import Journal
from tests.support.faults.documents import Documents
from tests.support.processes import end, spawn
from tests.support.waiting import wait_until

MODULE = "tests.support.faults.changes_app"
WRONG = "tests.support.faults.shifted_changes"
#: Seconds within which a change is indexed whose message waits for nothing.
SOON = 15.0


class Publisher:
    """A process that publishes calls of the tasks, one at a time."""

    def __init__(self, env: dict[str, str]) -> None:
        command = [sys.executable, "-m", "tests.support.faults.publisher"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process: subprocess.Popen[str] = spawn(command, env={**os.environ, **env}, **pipes)  # type: ignore[assignment]

    def begin(self, task: str, number: int, **options: object) -> None:
        """Have it publish a call."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{task} {number} {json.dumps(options)}\n")
        self.process.stdin.flush()

    def end(self) -> str:
        """Return the id of the message that stands for the call."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def call(self, task: str, number: int, **options: object) -> str:
        """Publish a call; return the id of the message that stands for it."""
        self.begin(task, number, **options)
        return self.end()

    @property
    def stopped(self) -> bool:
        return psutil.Process(self.process.pid).status() == psutil.STATUS_STOPPED

    def close(self) -> None:
        end(self.process)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


@pytest.fixture
def env(worker_env: dict[str, str], fresh_redis: Callable[[], str]) -> dict[str, str]:
    return {**worker_env, "DOCUMENTS": fresh_redis()}


@pytest.fixture
def documents(env: dict[str, str]) -> Documents:
    return Documents(env["DOCUMENTS"])


@pytest.fixture
def app(client_app: Callable[..., Celery], env: dict[str, str]) -> Celery:
    return client_app(MODULE, DOCUMENTS=env["DOCUMENTS"])


@pytest.fixture
def publisher(env: dict[str, str]) -> Iterator[Callable[..., Publisher]]:
    """A function that starts a publisher with more environment."""
    started: list[Publisher] = []

    def start(**more: str) -> Publisher:
        started.append(Publisher({**env, **more}))
        return started[-1]

    yield start
    for each in started:
        each.close()


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seconds", [15, 90])
def test_nobody_waits_for_a_publisher_that_stops_between_its_steps(
    app: Celery,
    env: dict[str, str],
    publisher: Callable[..., Publisher],
    documents: Documents,
    start_worker: StartWorker,
    broker_url: str,
    seconds: int,
) -> None:
    """Before the broker has the message, and after: 12 of them at once, of which half are killed in the end."""
    start_worker(MODULE, concurrency=2, env={"DOCUMENTS": env["DOCUMENTS"]})
    steps = ["before", "after", "before", "after"]
    stopped = [
        (10 * n + place, task, publisher(STOP_AT=step))
        for place, task in enumerate(app.module.TASKS)
        for n, step in enumerate(steps)
    ]
    for number, task, each in stopped:
        documents.change(number)
        each.begin(task.name, number)
    wait_until(lambda: all(each.stopped for _, _, each in stopped), 60, "all to have stopped")
    end, took = time.monotonic() + seconds, []
    while time.monotonic() < end:
        took.append(_change(stopped, documents))
    assert all(each.stopped for _, _, each in stopped)
    for number, _, each in stopped:
        each.process.send_signal(signal.SIGKILL if number >= 20 else signal.SIGCONT)
    assert all(each.end() for number, _, each in stopped if number < 20)
    _change(stopped, documents)
    wait_until(lambda: not messages(broker_url), 60, "the rest to be done")
    calls = len(took) * len(stopped)
    print(f"\n12 publishers stopped for {seconds} s: {calls} calls, each indexed within {max(took):.1f} s")


def _change(stopped: list[tuple[int, Any, Publisher]], documents: Documents) -> float:
    """Change each document, publish a call for it, and return the seconds until all are indexed."""
    began = time.monotonic()
    for number, task, _ in stopped:
        documents.change(number)
        task.delay(number)
    wait_until(lambda: not documents.behind(), SOON, "each change to be indexed")
    took = time.monotonic() - began
    time.sleep(max(0.0, 1.0 - took))
    return took


@pytest.mark.soak
@pytest.mark.parametrize("shift", [3600.0, -3600.0], ids=["ahead", "behind"])
@pytest.mark.parametrize("wrong", ["the publisher", "the worker"])
def test_a_clock_that_is_an_hour_wrong_swallows_no_change(
    env: dict[str, str],
    publisher: Callable[..., Publisher],
    documents: Documents,
    start_worker: StartWorker,
    journal: Journal,
    app: Celery,
    shift: float,
    wrong: str,
) -> None:
    """Two publishers, whose messages are due at once, soon, or within an hour by the other's clock, and may expire."""
    shifted = {"CLOCK_SHIFT": str(shift), "TZ": "UTC"}
    module, more = (WRONG, shifted) if wrong == "the worker" else (MODULE, {})
    start_worker(module, concurrency=2, env={"DOCUMENTS": env["DOCUMENTS"], **more})
    publishers = [publisher(**(shifted if wrong == "the publisher" else {})), publisher()]
    options: list[dict[str, object]] = [{}, {"countdown": 1}, {"expires": 7200}, {"countdown": 1, "expires": 7200}]
    calls = 0
    for place, task in enumerate(app.module.TASKS):
        for turn in range(12):
            number = 10 * (turn % 3) + place
            for each in publishers if turn % 2 else reversed(publishers):
                documents.change(number)
                each.call(task.name, number, **options[turn % 4])
                calls += 1
            # What is due in an hour by its worker's clock must not stand for a call that is due now.
            documents.change(number)
            publishers[1].call(task.name, number)
            calls += 1
            wait_until(lambda: not documents.behind(), SOON, "each change to be indexed")
    [entry, *_] = journal.wait_for_count(1, "clock")
    assert entry.fields["wall"] - time.time() == pytest.approx(shift, abs=60), "the clock is not wrong"
    print(f"\n{wrong} {shift:+.0f} s: {calls} calls, {documents.runs()} runs, none missed")
