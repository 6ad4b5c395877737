"""RQ's ways to run a job twice: each is staged, with and without the decorator.

`python -m tests.support.rq.twice` prints the table of docs/rq-twice.md, and `--write` puts it there. Where RQ waits a
minute or more before it acts, the stage calls what RQ would call then, with a time that lies ahead.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from rq import Callback, Retry, Worker
from rq.job import Job
from rq.registry import ScheduledJobRegistry, StartedJobRegistry
from rq.scheduler import RQScheduler

from tests.support.rq import shop
from tests.support.rq.desk import PATIENCE, Desk
from tests.support.rq.nodes import OURS, OURS_SPAWNED, ROOT, STOCK_SPAWNED, RqNode
from tests.support.servers import RedisServer
from tests.support.waiting import wait_until

PAGE = ROOT / "docs" / "rq-twice.md"
HEAD = """\
| runs / charges | RQ alone | with the decorator | with `IdempotentWorker` |
|---|---|---|---|
"""
#: Seconds for which a dead holder keeps the others away.
LEASE_TTL = 3
#: Seconds from now at which RQ is sure that a worker is gone.
LATER = 3600.0
ORDER = "A"
#: The gates of its body.
BEFORE, AFTER = f"before {ORDER}", f"after {ORDER}"
WARM = "tests.support.rq.held.WarmWorker"
HELD = "tests.support.rq.held.HeldWorker"
HELD_OURS = "tests.support.rq.held.HeldIdempotentWorker"


@dataclass(frozen=True)
class Mode:
    """One column: which function on which workers."""

    name: str
    function: Callable[[str], str]
    worker: str
    spawned: str
    held: str


MODES = [
    Mode("RQ alone", shop.plain, WARM, STOCK_SPAWNED, HELD),
    Mode("with the decorator", shop.charge, WARM, STOCK_SPAWNED, HELD),
    Mode("with IdempotentWorker", shop.charge, OURS, OURS_SPAWNED, HELD_OURS),
]


@dataclass(frozen=True)
class Count:
    """What came of it.

    Arguments:
        runs: How often the body was begun.
        effects: How often the card was charged.
        seconds: From the fault until the job had its result, where there is a fault to recover from.
    """

    runs: int
    effects: int
    seconds: float | None = None

    def __str__(self) -> str:
        text = f"{self.runs} / {self.effects}"
        return text if self.seconds is None else f"{text}; {self.seconds:.1f} s"


class Stage(Desk):
    """The queue of one cell of the table."""

    def __init__(self, mode: Mode, url: str, directory: Path) -> None:
        super().__init__(url, directory)
        self.env["LEASE_TTL"] = str(LEASE_TTL)
        self.mode = mode
        self.began: float | None = None

    def open(self, worker: str = "", *options: str) -> RqNode:
        """Start a worker, by default the mode's, that looks at its horse every second."""
        return self.start(worker=worker or self.mode.worker, options=["--job-monitoring-interval", "1", *options])

    def enqueue(self, **options: Any) -> Job:
        return self.queue.enqueue(self.mode.function, ORDER, **options)

    def enqueue_later(self) -> Job:
        """Schedule the job for a time that has come."""
        return self.queue.enqueue_at(datetime.now(timezone.utc) - timedelta(seconds=1), self.mode.function, ORDER)

    def enqueue_and_hold(self, gate: str, **options: Any) -> tuple[Job, RqNode, int]:
        """Start a worker, and have its horse come to a gate."""
        worker = self.open()
        self.gates.close(gate)
        job = self.enqueue(**options)
        [horse] = self.gates[gate].reached(timeout=PATIENCE)
        return job, worker, horse

    def fault(self) -> None:
        """Begin to count the seconds of the recovery."""
        self.began = time.monotonic()

    def clean_up(self, *, times: int = 1) -> None:
        """Do what a worker does every ten minutes, or a dashboard that counts jobs: find those that were abandoned.

        Arguments:
            times: How many do so at once.
        """

        def another(*_: Any) -> bool:  # asked between finding a job and enqueuing it again
            if times > 1:
                self.clean_up(times=times - 1)
            return True

        registry = StartedJobRegistry(queue=self.queue)
        registry.cleanup(timestamp=time.time() + LATER, exception_handlers=[another])

    def counted(self, *jobs: Job) -> Count:
        """Return what came of it, once the jobs are answered and no horse is at work."""
        for job in jobs:
            self.finish(job)
        seconds = None if self.began is None else time.monotonic() - self.began
        self.gates.open_all()
        # In this order: a job goes from the queue to the intermediate one, and from there to a horse.
        wait_until(lambda: self.queue.is_empty() and not self.taken() and not self.at_work(), PATIENCE, self.logs)
        return Count(self.runs(ORDER), self.charges(ORDER), seconds)

    def finish(self, job: Job) -> None:
        """Wait until a job has succeeded."""
        wait_until(lambda: self.status(job) in ("finished", "failed"), PATIENCE, self.logs)
        assert self.status(job) == "finished", self.logs()

    def taken(self) -> list[bytes]:
        """Return the jobs that a worker has taken, and no horse begun."""
        return self.connection.lrange(self.queue.intermediate_queue_key, 0, -1)  # type: ignore[return-value]

    def at_work(self) -> list[int]:
        """Return the horses of all workers, also of those that are gone."""
        return [horse for node in self.nodes for horse in node.horses()]


def killed_horse(stage: Stage) -> Count:
    job, worker, horse = stage.enqueue_and_hold(AFTER, retry=Retry(max=3))
    stage.gates.open_all()
    worker.kill_horse(horse)
    stage.fault()
    return stage.counted(job)


def killed_after_the_body(stage: Stage) -> Count:
    job, worker, horse = stage.enqueue_and_hold("succeeded", retry=Retry(max=3), on_success=Callback(shop.succeeded))
    worker.kill_horse(horse)
    stage.fault()
    stage.gates.open_all()
    return stage.counted(job)


def killed_worker(stage: Stage) -> Count:
    job, worker, horse = stage.enqueue_and_hold(BEFORE, retry=Retry(max=3))
    worker.kill()
    stage.clean_up()
    second = stage.open()
    wait_until(second.horses, PATIENCE, stage.logs)
    if stage.mode.function is shop.plain:
        stage.gates[BEFORE].reached(2, timeout=PATIENCE)
    stage.gates.open_all()
    wait_until(lambda: horse not in worker.members(), PATIENCE, stage.logs)
    return stage.counted(job)


def killed_both(stage: Stage) -> Count:
    job, worker, horse = stage.enqueue_and_hold(AFTER, retry=Retry(max=3))
    stage.open()
    worker.kill()
    worker.kill_horse(horse)
    stage.fault()
    stage.gates.open_all()
    stage.clean_up()
    return stage.counted(job)


def stopped(stage: Stage) -> Count:
    job, worker, horse = stage.enqueue_and_hold(BEFORE, retry=Retry(max=3))
    stage.open()
    for pid in (worker.pid, horse):
        worker.pause(pid)
    stage.fault()
    stage.gates.open_all()
    stage.clean_up()
    stage.finish(job)
    seconds = time.monotonic() - (stage.began or 0.0)
    for pid in (worker.pid, horse):
        worker.resume(pid)
    wait_until(lambda: horse not in worker.members(), PATIENCE, stage.logs)
    count = stage.counted(job)
    return Count(count.runs, count.effects, seconds)


def killed_before_it_began(stage: Stage) -> Count:
    # A horse that is spawned takes its time to begin, and this one more.
    held = "if 'RQ_EXECUTION_ID' in __import__('os').environ: from tests.support.celery.gates import Gates as G; "
    (stage.directory / "sitecustomize.py").write_text(held + "G.from_env().wait('spawned')\n")
    paths = (str(stage.directory), str(ROOT), os.environ.get("PYTHONPATH"))
    stage.env["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    worker = stage.open(stage.mode.spawned)
    stage.gates.close("spawned")
    job = stage.enqueue(retry=Retry(max=3))
    [horse] = stage.gates["spawned"].reached(timeout=PATIENCE)
    worker.kill_horse(horse)
    stage.gates.open_all()
    stage.finish(job)
    assert stage.taken() == [job.id.encode()], "the entry of the horse that was killed is left"
    clean_intermediate(stage)
    return stage.counted(job)


def held_up(stage: Stage) -> Count:
    slow = stage.open(stage.mode.held)
    stage.gates.close("taken")
    job = stage.enqueue(retry=Retry(max=3))
    stage.gates["taken"].reached(timeout=PATIENCE)
    clean_intermediate(stage)
    stage.open()
    stage.finish(job)
    stage.gates.open_all()
    wait_until(lambda: "Job OK" in slow.logs(), PATIENCE, stage.logs)
    return stage.counted(job)


def clean_intermediate(stage: Stage) -> None:
    """Do what a worker does every ten minutes: see to jobs that somebody took and did not begin for a minute."""
    cleaner = Worker([stage.queue], connection=stage.connection)
    for _ in range(2):
        stage.queue.intermediate_queue.cleanup(cleaner, stage.queue)
        for key in stage.connection.keys(f"{stage.queue.intermediate_queue_key}:first_seen:*"):
            stage.connection.set(key, time.time() - LATER)


def cleaned_up_twice(stage: Stage) -> Count:
    job, worker, horse = stage.enqueue_and_hold(BEFORE, retry=Retry(max=3))
    worker.kill()
    worker.kill_horse(horse)
    stage.gates.open_all()
    stage.clean_up(times=2)
    stage.open()
    return stage.counted(job)


def failing_callback(stage: Stage) -> Count:
    stage.open()
    return stage.counted(stage.enqueue(retry=Retry(max=1), on_success=Callback(shop.broken_at_first)))


def requeued(stage: Stage) -> Count:
    stage.open()
    job = stage.enqueue(on_success=Callback(shop.broken_at_first))
    stage.wait_for(job, "failed")
    job.requeue()
    return stage.counted(job)


def id_used_again(stage: Stage) -> Count:
    stage.open()
    first = stage.enqueue(job_id="order-A")
    stage.finish(first)
    return stage.counted(stage.enqueue(job_id="order-A"))


def two_schedulers(stage: Stage) -> Count:
    class Late(ScheduledJobRegistry):
        """What is due, read by a scheduler that is held up before it enqueues it."""

        def get_jobs_to_schedule(self, *args: Any, **options: Any) -> list[str]:
            due: list[str] = super().get_jobs_to_schedule(*args, **options)
            scheduler([ScheduledJobRegistry(queue=stage.queue)])
            return due

    def scheduler(registries: list[ScheduledJobRegistry]) -> None:
        one = RQScheduler([stage.queue], connection=stage.connection)
        one._scheduled_job_registries = registries
        one.enqueue_scheduled_jobs()

    job = stage.enqueue_later()
    scheduler([Late(queue=stage.queue)])
    stage.open()
    return stage.counted(job)


@dataclass(frozen=True)
class Way:
    """One row.

    Arguments:
        text: What happens.
        play: Stages it.
    """

    text: str
    play: Callable[[Stage], Count]

    @property
    def name(self) -> str:
        return self.play.__name__.replace("_", "-")


WAYS = [
    Way("The horse is killed after the effect; the job has a `Retry`", killed_horse),
    Way("The horse is killed after the body, before RQ records it", killed_after_the_body),
    Way("The worker is killed, its horse goes on", killed_worker),
    Way("Worker and horse are killed after the effect", killed_both),
    Way("Worker and horse sleep past the heartbeat, and wake", stopped),
    Way("A horse of `SpawnWorker` is killed before it begins", killed_before_it_began),
    Way("A worker is held up for a minute before it begins a job it took", held_up),
    Way("Two processes clean up started jobs at once", cleaned_up_twice),
    Way("The success callback fails; the job has a `Retry`", failing_callback),
    Way("A failed job whose effect had happened is requeued", requeued),
    Way("A `job_id` is used again", id_used_again),
    Way("Two schedulers find the same job due", two_schedulers),
]


def play(way: Way, mode: Mode, url: str, directory: Path) -> Count:
    """Stage one cell of the table."""
    with closing(Stage(mode, url, directory)) as stage:
        return way.play(stage)


def rows() -> Iterator[str]:
    """Stage every way, and return the table's rows."""
    with RedisServer() as server:
        for number, way in enumerate(WAYS):
            cells = []
            for column, mode in enumerate(MODES):
                print(f"{number + 1:>2} of {len(WAYS)}: {way.name}, {mode.name}", file=sys.stderr)
                with tempfile.TemporaryDirectory(prefix="rq-") as directory:
                    cells.append(str(play(way, mode, server.url(number * len(MODES) + column), Path(directory))))
            yield f"| {way.text} | {' | '.join(cells)} |\n"


def written() -> dict[str, list[str]]:
    """Return the page's rows: the cells of each way."""
    lines = [line.strip("| \n").split(" | ") for line in parts()[1].splitlines()[2:]]
    return {text: cells for text, *cells in lines}


def parts() -> tuple[str, str, str]:
    """Return the page before its table, the table, and what comes after it."""
    before, head, rest = PAGE.read_text(encoding="utf-8").partition(HEAD)
    assert head, f"{PAGE} has lost its table"
    table, gap, after = rest.partition("\n\n")
    return before, head + table + "\n", gap[1:] + after


def main() -> None:
    """Print the table; with --write, put it into the page too."""
    table = HEAD + "".join(rows())
    print(table)
    if "--write" in sys.argv:
        before, _, after = parts()
        PAGE.write_text(before + table + after, encoding="utf-8")


if __name__ == "__main__":
    main()
