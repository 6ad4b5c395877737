"""What becomes of an operation under twelve faults, with five packages: `python -m benchmarks.faults`.

Needs `pip install celery-singleton celery-once`. Real workers, a Redis for each package, the same faults at the same
moments: a seed draws how long after its trigger a fault comes. For each fault and package it prints, added up over the
rounds: runs of the body, effects beyond the first, operations that have no effect in the end, and callers that get no
answer, an error, or another receipt than that of the first effect.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from celery import Celery, chord

from tests.support.celery.apps import close_app, load_app
from tests.support.servers import RedisServer
from tests.support.waiting import WaitTimeout, wait_until

from .worker import BROKER_DB, Worker, environment

__all__ = ["FAULTS", "main"]

MODULE = "benchmarks.faults_app"
ARMS = ("keyed", "setting", "singleton", "once", "plain")
#: How long an operation may take to settle down after its fault, in seconds: twelve visibility timeouts.
PATIENCE = 60.0
GATES = ("before", "after", "returned gate")


class Arm:
    """A package, with a Redis of its own as broker, result backend and store.

    Arguments:
        name: Its task.
        server: Its Redis.
        journal: Where its bodies note what they do.
    """

    def __init__(self, name: str, server: RedisServer, journal: RedisServer) -> None:
        database = ARMS.index(name)
        self.name, self.server = name, server
        self.env = {**environment(server), "JOURNAL_URL": journal.url(database), "ARM": name}
        self.notes = journal.client(database)
        self.app: Celery = load_app(MODULE, self.env)


class Trial:
    """One package under one fault.

    Arguments:
        arm: The package.
        delay: Seconds from the trigger to the fault.
    """

    def __init__(self, arm: Arm, delay: float) -> None:
        self.server, self.delay, self.arm, self.env = arm.server, delay, arm.name, arm.env
        self.notes, self.broker = arm.notes, arm.server.client(BROKER_DB)
        self.app = arm.app
        self.task = self.app.tasks["charge"]
        self.callers: list[tuple[str, Any]] = []
        self.operations = {"ORD-1"}
        self.workers: list[Worker] = []
        self._stack = ExitStack()

    def run(self, fault: Callable[[Trial], object]) -> Counter[str]:
        """Bring the fault about, wait until all is quiet, and count."""
        self.notes.flushdb()
        for database in range(16):
            self.server.client(database).flushdb()
        with self._stack:
            fault(self)
            self.open(*GATES)
            self.settle_down()
            return self.count()

    # -- what a fault does ---------------------------------------------------------------------------------------------

    def worker(self) -> Worker:
        """Start a worker."""
        worker = Worker(self.server, MODULE, pool="prefork", concurrency=2, env=self.env)
        self._stack.enter_context(_killed_in_the_end(worker))
        self.workers.append(worker)
        return worker

    def call(self, order: str = "ORD-1", **options: Any) -> None:
        """Call the task, as one more caller."""
        self.callers.append((order, self.task.apply_async((order,), **options)))

    def close(self, gate: str) -> None:
        self.notes.set(gate, 1)

    def open(self, *gates: str) -> None:
        self.notes.delete(*gates)

    def seen(self, what: str, times: int = 1) -> int:
        """Wait until bodies have noted something, and the drawn delay; return the process that noted it first."""
        wait_until(lambda: self.notes.llen(what) >= times, PATIENCE, f"{what} of {self.arm}")
        time.sleep(self.delay)
        return int(self.notes.lindex(what, 0))

    # -- what becomes of it --------------------------------------------------------------------------------------------

    def settle_down(self) -> None:
        """Wait until no message is left, and no body runs, for longer than a retry waits."""
        quiet_since = time.monotonic()
        end = quiet_since + PATIENCE
        while time.monotonic() < min(end, quiet_since + 2.0):
            if self.broker.llen("celery") or self.broker.hlen("unacked"):
                quiet_since = time.monotonic()
            time.sleep(0.1)

    def count(self) -> Counter[str]:
        effects = {name: int(self.notes.llen(f"effects of {name}")) for name in self.operations}
        return Counter(
            runs=int(self.notes.llen("begun")),
            duplicates=sum(max(0, times - 1) for times in effects.values()),
            lost=sum(not times for times in effects.values()),
            wrong=sum(not self._is_right(order, result) for order, result in self.callers),
        )

    def _is_right(self, order: str, result: Any) -> bool:
        if result is None:  # celery-once, gracefully
            return False
        try:
            return bool(result.get(timeout=1) == f"{order}: 1")
        except Exception:  # noqa: BLE001 - an error is no answer, whichever it is
            return False


@contextmanager
def _killed_in_the_end(worker: Worker) -> Iterator[None]:
    worker.__enter__()
    try:
        yield
    finally:
        for number in (signal.SIGCONT, signal.SIGKILL):
            worker.signal(number)
        worker.__exit__(None, None, None)


# -- the faults --------------------------------------------------------------------------------------------------------


def visibility_timeout_while_it_runs(trial: Trial) -> None:
    """The body runs for three visibility timeouts; two workers."""
    trial.close("after")
    trial.worker(), trial.worker()
    trial.call()
    trial.seen("charged")
    time.sleep(15)


def eta_past_the_visibility_timeout(trial: Trial) -> None:
    """The message is due in three visibility timeouts; two workers."""
    trial.worker(), trial.worker()
    trial.call(countdown=15)
    trial.seen("begun")


def child_killed_before_the_effect(trial: Trial) -> None:
    """SIGKILL to the child, as the kernel does it when memory runs out."""
    _kill_child(trial, "before", "begun")


def child_killed_after_the_effect(trial: Trial) -> None:
    """The same between the effect and the return."""
    _kill_child(trial, "after", "charged")


def child_killed_after_the_task(trial: Trial) -> None:
    """The same once the result is stored, before the message is acked."""
    _kill_child(trial, "returned gate", "returned")


def _kill_child(trial: Trial, gate: str, noted: str) -> None:
    trial.close(gate)
    trial.worker()
    trial.call()
    os.kill(trial.seen(noted), signal.SIGKILL)


def worker_killed_in_the_body(trial: Trial) -> None:
    """SIGKILL to the worker and its children before the effect; another worker is there."""
    trial.close("before")
    worker = trial.worker()
    trial.call()
    trial.seen("begun")
    worker.signal(signal.SIGKILL)
    trial.open("before")
    trial.worker()


def hundred_equal_calls(trial: Trial) -> None:
    """A hundred calls before a worker starts."""
    for _ in range(100):
        trial.call()
    trial.worker()
    trial.seen("begun")


def retry(trial: Trial) -> None:
    """The body retries once."""
    trial.worker()
    trial.callers.append(("ORD-1", trial.task.apply_async(("ORD-1", True))))
    trial.seen("begun")


def chord_with_a_redelivered_member(trial: Trial) -> None:
    """A message of a chord's header is delivered again, while it runs, as after a visibility timeout."""
    trial.operations = {"ORD-1", "ORD-2", "total"}
    trial.close("after")
    trial.callers.append(
        ("total", chord([trial.task.si("ORD-1"), trial.task.si("ORD-2")], trial.app.tasks["total"].s()).apply_async())
    )
    messages = [json.loads(raw) for raw in trial.broker.lrange("celery", 0, -1)]
    trial.worker()
    trial.seen("charged", 2)
    first = messages[0]
    first["headers"]["redelivered"] = first["properties"]["delivery_info"]["redelivered"] = True
    trial.broker.lpush("celery", json.dumps(first))
    trial.open("after")


def connection_cut_while_it_runs(trial: Trial) -> None:
    """Redis closes all connections."""
    trial.close("after")
    trial.worker()
    trial.call()
    trial.seen("charged")
    for kind in ("normal", "pubsub"):
        trial.broker.client_kill_filter(_type=kind, skipme=True)
    time.sleep(3)


def redis_restarted(trial: Trial) -> None:
    """Redis is killed while the body runs, and is back after a second with its data; a supervisor restarts workers."""
    trial.close("after")
    worker = trial.worker()
    trial.call()
    trial.seen("charged")
    trial.server.kill()
    time.sleep(1)
    trial.server.start()
    trial.open("after")
    try:
        wait_until(lambda: worker.ended, 10)
    except WaitTimeout:
        return
    trial.worker()


def holder_paused(trial: Trial) -> None:
    """The holder is paused before its effect, for longer than its lease and its visibility timeout; a second worker."""
    trial.close("before")
    paused = trial.worker()
    trial.call()
    trial.seen("begun")
    paused.signal(signal.SIGSTOP)
    trial.open("before")
    trial.worker()
    time.sleep(15)
    paused.signal(signal.SIGCONT)
    time.sleep(2)


FAULTS: tuple[Callable[[Trial], None], ...] = (
    visibility_timeout_while_it_runs,
    eta_past_the_visibility_timeout,
    child_killed_before_the_effect,
    child_killed_after_the_effect,
    child_killed_after_the_task,
    worker_killed_in_the_body,
    hundred_equal_calls,
    retry,
    chord_with_a_redelivered_member,
    connection_cut_while_it_runs,
    redis_restarted,
    holder_paused,
)


def main() -> None:
    """Run the faults in turn, the packages side by side, and print a line for each fault."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", help="the name of one fault")
    options = parser.parse_args()
    faults = [fault for fault in FAULTS if options.only in (None, fault.__name__)]
    print(f"{'runs, duplicate effects, lost, wrong':36}{''.join(f'{arm:>16}' for arm in ARMS)}")
    with ExitStack() as stack:
        journal = stack.enter_context(RedisServer())
        durable = {"appendonly": "yes", "appendfsync": "always"}
        arms = [Arm(name, stack.enter_context(RedisServer(**durable)), journal) for name in ARMS]
        for arm in arms:
            stack.callback(close_app, arm.app)
        threads = stack.enter_context(ThreadPoolExecutor(len(ARMS)))
        for fault in faults:
            found = list(threads.map(partial(_rounds, fault, options.rounds, options.seed), arms))
            cells = [f"{c['runs']}, {c['duplicates']}, {c['lost']}, {c['wrong']}" for c in found]
            print(f"{fault.__name__:36}{''.join(f'{cell:>16}' for cell in cells)}", flush=True)


def _rounds(fault: Callable[[Trial], None], rounds: int, seed: int, arm: Arm) -> Counter[str]:
    counts: Counter[str] = Counter()
    for number in range(rounds):
        delay = random.Random(f"{seed} {number} {fault.__name__}").uniform(0.0, 0.5)
        counts += Trial(arm, delay).run(fault)
    return counts


if __name__ == "__main__":
    main()
