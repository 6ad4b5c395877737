"""What was tried to break it, and once did."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import redis
from rq import Queue, SimpleWorker
from rq.job import Job
from rq.scheduler import RQScheduler

from celery_idempotent.rq import job as jobs
from celery_idempotent.stores import Claim, Lease, Reason, Release
from celery_idempotent.stores.redis import RedisStore
from tests.support.rq import regressions

#: What Redis says of a key that does not expire. RQ 2.6 keeps what is scheduled for a retry, whatever its ttl.
FOR_EVER = -1


@pytest.fixture
def queue(redis_client: redis.Redis) -> Queue:
    """A queue in an empty database."""
    return Queue(connection=redis_client)


@pytest.fixture
def run(queue: Queue) -> Callable[..., Job]:
    """A function that enqueues, and returns once everything in the queue is done."""

    def run(function: Any, *args: Any, **options: Any) -> Job:
        job = queue.enqueue(function, *args, **options)
        SimpleWorker([queue], connection=queue.connection).work(burst=True)
        return Job.fetch(job.id, connection=queue.connection)

    return run


def effects(queue: Queue) -> list[str]:
    return [name.decode() for name in queue.connection.lrange(regressions.EFFECTS, 0, -1)]


def hold(queue: Queue, order_id: str) -> tuple[RedisStore, Lease]:
    """Take the lease on an order, as another job would, until somebody gives it back."""
    store = RedisStore(queue.connection)
    lease = store.acquire(
        Claim(f"idem:tests.support.rq.regressions.charge::{order_id}", "another", 60.0, 60.0, task_id="another")
    )
    assert isinstance(lease, Lease)
    return store, lease


def failure(job: Job) -> str:
    result = job.latest_result()
    return (result and result.exc_string) or ""


def test_a_job_id_that_is_used_again_for_other_arguments_is_not_answered_with_the_first_ones_result(
    queue: Queue, run: Callable[..., Job]
) -> None:
    run(regressions.charge, "ORD-1", 5, job_id="ORD-1")
    again = run(regressions.charge, "ORD-1", 7, job_id="ORD-1")
    assert again.is_failed
    assert "KeyReused" in failure(again)
    assert effects(queue) == ["ORD-1 5"]


def test_a_job_id_that_is_used_again_for_the_same_is_answered_and_tells_whose_result_it_is(
    queue: Queue, run: Callable[..., Job]
) -> None:
    run(regressions.charge, "ORD-1", 5, job_id="first")
    for job_id in ("first", "second"):
        job = run(regressions.charge, "ORD-1", 5, job_id=job_id)
        assert job.return_value() == "ORD-1 charged 5"
        assert (job.meta["idempotency"]["outcome"], job.meta["idempotency"]["original"]) == ("replayed", "first")
    assert effects(queue) == ["ORD-1 5"]


def test_a_job_is_never_put_off_for_longer_than_rq_keeps_it(queue: Queue, run: Callable[..., Job]) -> None:
    hold(queue, "ORD-1")
    queue.connection.set(RQScheduler.get_locking_key(queue.name), "a scheduler", ex=61)
    job = run(regressions.charge, "ORD-1", 5, ttl=jobs.LEAST_TTL)
    for _ in range(4):  # each time for twice as long
        due = queue.scheduled_job_registry.get_expiration_time(job)
        assert (due - job.ended_at).total_seconds() <= jobs.LEAST_TTL / 2
        kept = queue.connection.ttl(job.key)
        assert kept == FOR_EVER or kept > jobs.LEAST_TTL / 2
        queue.scheduled_job_registry.remove(job)
        queue.enqueue_job(job)
        SimpleWorker([queue], connection=queue.connection).work(burst=True)
        job.refresh()
    assert job.meta["idempotency"]["deferrals"] == 5


def test_a_job_that_rq_keeps_for_too_short_waits_where_it_is(queue: Queue, run: Callable[..., Job]) -> None:
    store, lease = hold(queue, "ORD-1")
    queue.connection.set(RQScheduler.get_locking_key(queue.name), "a scheduler", ex=61)
    release = threading.Timer(0.5, store.release, (lease, Release(Reason.FAILED)))
    release.start()
    assert run(regressions.charge, "ORD-1", 5, ttl=1).return_value() == "ORD-1 charged 5"
    release.join()
    assert effects(queue) == ["ORD-1 5"]
