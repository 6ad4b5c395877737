"""What a test does with a queue: enqueue, start workers, work it off, look what is left."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rq import Queue
from rq.job import Job
from rq.registry import ScheduledJobRegistry, StartedJobRegistry
from rq.scheduler import RQScheduler

from celery_idempotent import events
from celery_idempotent.stores import Claim, Lease, Reason, Record, Release, State
from celery_idempotent.stores.records import new_owner
from celery_idempotent.stores.redis import RedisStore
from tests.support.celery.gates import Gates
from tests.support.celery.journal import Journal
from tests.support.rq.nodes import RqNode, burst
from tests.support.servers import open_client
from tests.support.stores.kinds import age_redis
from tests.support.waiting import wait_until

FAR = 10**6
#: Seconds for whatever a test waits for; no test needs them.
PATIENCE = 60.0


class Desk:
    """A queue, its workers, the store in the same database, and what was written down of its jobs.

    Args:
        url: of an empty database.
        directory: for logs, journal and gates.
    """

    def __init__(self, url: str, directory: Path) -> None:
        self.url, self.directory, self.connection = url, directory, open_client(url)
        self.journal, self.gates = Journal(directory / "journal"), Gates(directory / "gates")
        self.env = {"JOURNAL": str(self.journal.path), "GATES": str(self.gates.directory)}
        self.queue = Queue(connection=self.connection)
        self.store = RedisStore.from_url(url)
        self.nodes: list[RqNode] = []

    def close(self) -> None:
        """End the workers, and let go of the database."""
        self.gates.open_all()
        for node in self.nodes:
            node.teardown()
        self.store.close()
        self.connection.close()

    def start(self, *, ready: bool = True, **options: Any) -> RqNode:
        """Start a worker, and wait until it is ready; the other arguments are `RqNode`'s."""
        options.setdefault("name", f"worker{len(self.nodes) + 1}")
        env = {**self.env, **options.pop("env", {})}
        self.nodes.append(RqNode(self.url, directory=self.directory, env=env, **options).start())
        return self.nodes[-1].ready() if ready else self.nodes[-1]

    def logs(self) -> str:
        """Return what the workers have logged."""
        return "\n".join(f"--- {node.name}\n{node.logs()}" for node in self.nodes)

    def burst(self, jobs: int | None = None) -> None:
        """Work off what is in the queue, or so many jobs of it, in this process."""
        burst(self.queue, jobs=jobs)

    def run(self, function: Callable[..., Any] | str, *args: Any, **options: Any) -> Job:
        """Enqueue a job, work the queue off, and return the job as it is then."""
        job = self.queue.enqueue(function, *args, **options)
        self.burst()
        return self.again(job)

    def again(self, job: Job) -> Job:
        """Return a job as Redis has it now."""
        return Job.fetch(job.id, connection=self.connection, serializer=self.queue.serializer)

    def status(self, job: Job) -> str:
        return str(getattr(self.again(job).get_status(), "value", None))

    def wait_for(self, job: Job, status: str, timeout: float = PATIENCE) -> Job:
        """Wait until a job has this status, and return it."""
        wait_until(
            lambda: self.status(job) == status, timeout, lambda: f"{status}, not {self.status(job)}, of {job.id}"
        )
        return self.again(job)

    def meta(self, job: Job) -> dict[str, Any]:
        """Return what the library says of a job in its meta."""
        return dict(self.again(job).meta["idempotency"])

    def deferrals(self, job: Job) -> int:
        """Return how often a job was put off so far."""
        return int(self.again(job).meta.get("idempotency", {}).get("deferrals", 0))

    def error(self, job: Job) -> str:
        """Return the last line of what RQ keeps of a failure."""
        latest = self.again(job).latest_result()
        text = str(latest.exc_string if latest is not None else "")
        return text.strip().splitlines()[-1] if text.strip() else ""

    def runs(self, order: str) -> int:
        """Return how often the body of an order was begun."""
        return len(self.gates[f"before {order}"].arrivals)

    def effects(self, order: str) -> int:
        return self.journal.count("charged", order)

    def charges(self, order: str) -> int:
        """Return how often a gateway that honours idempotency keys charged the card of an order."""
        return len({entry.fields["intent"] for entry in self.journal.entries("charged", order)})

    def fence(self, order: str) -> int:
        """Return that of the last run of an order."""
        return int(self.journal.entries("charged", order)[-1].fields["fence"])

    def records(self) -> list[Record]:
        return list(self.store.scan())

    def record(self) -> Record:
        """Return the only record."""
        [record] = self.records()
        return record

    def lapse(self) -> None:
        """Have the only lease run out, and what is released for a retry be free."""
        record = self.record()
        age_redis(self.store, record.key, record.remaining + 0.001)

    def hold(self, key: str, task_id: str = "") -> Callable[[], None]:
        """Hold an operation, as another worker would; return what releases it."""
        lease = self.store.acquire(
            Claim(key, new_owner(), lease_ttl=60.0, keep_ttl=3600.0, task_id=task_id or new_owner())
        )
        assert isinstance(lease, Lease)

        def release() -> None:
            self.store.release(lease, Release(Reason.FAILED))

        return release

    def conflict(self) -> None:
        """Wait until a worker meets the holder of the only operation."""
        self.journal.wait_for_count(1, "conflicted", self.record().key, timeout=30)

    def settled(self) -> bool:
        return self.record().state is State.COMPLETED

    @contextmanager
    def scheduler(self) -> Iterator[RQScheduler]:
        """Be the scheduler of the queue; what it would wait for comes when the test says so, see `bring_back`."""
        # Its lock lasts for a minute longer than it sleeps: it is not renewed while a test takes its time.
        scheduler = RQScheduler([self.queue], connection=self.connection, interval=60, logging_level="CRITICAL")
        assert scheduler.acquire_locks()
        try:
            yield scheduler
        finally:
            scheduler.release_locks()
            scheduler.connection.connection_pool.disconnect()

    def bring_back(self, scheduler: RQScheduler) -> None:
        """Enqueue what is scheduled, however late it is due."""
        scheduler.heartbeat()
        registry = ScheduledJobRegistry(queue=self.queue)
        for job_id in registry.get_job_ids():
            self.connection.zadd(registry.key, {job_id: 1})
        scheduler.enqueue_scheduled_jobs()

    def scheduled(self, job: Job) -> bool:
        return job.id in ScheduledJobRegistry(queue=self.queue).get_job_ids()

    def clean_up(self) -> None:
        """Have RQ look after executions whose worker is gone, as it does a minute or more after their last sign."""
        StartedJobRegistry(queue=self.queue).cleanup(time.time() + FAR)


@contextmanager
def hearing(
    *kinds: type[events.Event], then: Callable[[events.Event], object] = lambda event: None
) -> Iterator[list[events.Event]]:
    """Collect the events of this process, and do something at each."""
    heard: list[events.Event] = []

    def hear(event: events.Event) -> None:
        heard.append(event)
        then(event)

    events.add_hook(hear, kinds or None)
    try:
        yield heard
    finally:
        events.remove_hook(hear)
