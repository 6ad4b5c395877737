"""A job: the function that it runs as an operation, the readers of its result, its store, and its deferral."""

from __future__ import annotations

import inspect
import math
import random
import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

from redis.connection import ConnectionPool
from rq import get_current_job
from rq.exceptions import InvalidJobOperation
from rq.job import Job, JobStatus, Retry
from rq.queue import Queue
from rq.scheduler import RQScheduler
from rq.serializers import DefaultSerializer
from rq.utils import now
from rq.worker import Worker

from ..errors import ConfigurationError
from ..functions import opened
from ..stores.base import Store
from ..stores.memory import MemoryStore
from ..stores.redis.store import store_like

#: Entry of a job's meta with the key that its producer gave.
KEY = "idempotency_key"
#: Entry of a job's meta in which this library writes what became of the job.
META = "idempotency"
#: Where rq-scheduler (not RQ's own) keeps the jobs that are due later.
RQ_SCHEDULER = "rq:scheduler:scheduled_jobs"
#: Least seconds to which a scheduler renews its lock each time it has looked for what is due.
LOCK_TTL = 60
#: Seconds after which a scheduler that did not renew it is taken for dead.
SILENCE = 10


def job_running(function: Callable[..., Any]) -> Job | None:
    """Return the job that is being performed here, if it is ``function`` that it runs."""
    job: Any = get_current_job()
    return job if job is not None and _runs(job, function) else None


def _runs(job: Job, function: Callable[..., Any]) -> bool:
    if any(found is function for found in functions_of(job)):
        return True
    return job.instance is None and job.func_name == f"{function.__module__}.{function.__qualname__}"


def functions_of(job: Job) -> Iterator[Any]:
    """Yield the function that a job names, and what it wraps, from the outermost on."""
    # Other decorators may lie around this one, and a method is found bound to what it is a method of.
    found: Any = job.instance if isinstance(job.instance, partial) else job.func
    while found is not None:
        while isinstance(found, partial):  # perhaps of a method
            found = found.func
        found = getattr(found, "__func__", found)
        yield found
        found = getattr(found, "__wrapped__", None)


def occurrence(job: Job) -> str:
    """Return an id of this enqueuing of a job, and of this occurrence of one that repeats.

    Retries and what RQ hands out twice are the same occurrence. An id alone is not: it may be used again, and each
    occurrence of a ``Repeat`` has it.
    """
    made = job.created_at.strftime("%Y%m%dT%H%M%S.%f")
    return f"{job.id}@{made}" + (f"-{job.repeats_left}" if job.repeats_left else "")


def is_periodic(job: Job) -> bool:
    """Return whether rq-scheduler enqueues this very job again, as the same at each occurrence."""
    named = job.meta.keys() & {"interval", "cron_string"}
    return bool(named) and job.connection.zscore(RQ_SCHEDULER, job.id) is not None


def has_readable_meta(job: Job) -> bool:
    """Return whether this worker can read the job's meta; RQ puts something else in its place."""
    return job.meta.keys() != {"unserialized"}


def id_of(occurrence: str) -> str:
    """Return the id of the job that this is an occurrence of."""
    return occurrence.rpartition("@")[0]


def seconds_allowed(job: Job) -> float:
    """Return the job's time limit."""
    timeout = float(job.timeout or Queue.DEFAULT_TIMEOUT)
    return timeout if timeout > 0 else float("inf")


def seconds_running(job: Job) -> float:
    """Return the seconds since RQ began to perform the job."""
    return max(0.0, (now() - job.started_at).total_seconds()) if job.started_at else 0.0


def has_reader(job: Job) -> bool:
    """Return whether the job's result can be read: RQ keeps it, or a callback is given it."""
    return job.result_ttl != 0 or bool(job._success_callback_name)


def serializer_of(job: Job) -> str:
    """Return kombu's name for the serializer of a job; of one that kombu does not have, for the nearest."""
    return "pickle" if job.serializer is DefaultSerializer else "json"


def is_synchronous(job: Job) -> bool:
    """Return whether the job runs where it was enqueued (``is_async=False``), and is never delivered again."""
    # That is what RQ calls the worker then; a real one may be called so, too, and is registered.
    return job.worker_name == "sync" and not job.connection.exists(Worker.redis_worker_namespace_prefix + "sync")


def has_scheduler(job: Job) -> bool:
    """Return whether a scheduler enqueues what is scheduled for the job's queue."""
    return is_scheduled(job.connection, job.origin)


def is_scheduled(connection: Any, queue: str) -> bool:
    """Return whether a scheduler enqueues what is scheduled for a queue, by its name."""
    # Redis answers with a negative number where there is none.
    return int(connection.ttl(RQScheduler.get_locking_key(queue))) > LOCK_TTL - SILENCE


def write_meta(job: Job, facts: dict[str, Any]) -> None:
    """Write what becomes of the job into its meta.

    Raises:
        Exception: what is there cannot be read, and is left as it is; or the server does not answer.
    """
    # Others may have written to it since the job was fetched, as while it was waiting.
    job.meta = {**job.meta, **job.get_meta(refresh=True), META: facts}
    job.save_meta()  # type: ignore[no-untyped-call]


# Coming back later: a job that cannot run now returns a `Retry`, with which RQ schedules it, or enqueues it again.
#
# RQ counts what a job returns as `Retry` against the ``max`` that it names. A deferral is none of the job's own
# retries, so the count is set back by as much as RQ is about to add.


#: Seconds to wait at first and at most.
FIRST_DELAY, LONGEST_DELAY = 1.0, 60.0
#: Seconds for which a job waits where it is, whenever its turn comes, if no scheduler would enqueue it later.
QUEUE_PAUSE = 1.0
#: Least ttl in seconds of a job that can be put off: RQ's scheduler looks once a second, and counts in whole ones.
LEAST_TTL = 4
#: How often a job may be put off: for ever.
ALWAYS = 2**31
#: Whether RQ counts a returned Retry that it schedules; each that it enqueues at once it counts, also before 2.8.
_COUNTS = "retry" in inspect.signature(Job._handle_retry_result).parameters


class RetriesOnHold(float):
    """A number of retries left of a job that would fail again: none now, and the number's value once it is requeued.

    A subclass of int is what hiredis refuses to write.
    """

    def __gt__(self, other: object) -> bool:
        return False

    def __repr__(self) -> str:
        return str(int(self))


def deferrals(job: Job) -> int:
    """Return how often the job was put off."""
    facts = job.meta.get(META)
    number = facts.get("deferrals") if isinstance(facts, dict) else 0
    return max(0, number) if type(number) is int else 0  # of an entry that is the user's own


def can_defer(job: Job) -> bool:
    """Return whether RQ will still know the job when its delay is over."""
    return job.ttl is None or job.ttl >= LEAST_TTL


def is_withdrawn(job: Job) -> bool:
    """Return whether the job was cancelled or deleted while it waited where it is; RQ would put it off all the same."""
    try:
        return job.get_status() is JobStatus.CANCELED
    except InvalidJobOperation:
        return True


def deferral_delay(number: int, remaining: float, ttl: int | None) -> int:
    """Return the whole seconds, as RQ's scheduler takes them, that a job waits which was put off ``number`` times.

    Arguments:
        number: How often it was.
        remaining: Seconds until the lease in its way runs out, unless it is renewed; 0 where it has, and an open
            transaction is in the way.
        ttl: Seconds after which RQ forgets a job that is scheduled, or None.
    """
    delay: float = FIRST_DELAY * 2 ** min(number, 10) * random.uniform(0.75, 1.25)
    lease = max(remaining, FIRST_DELAY) if remaining else LONGEST_DELAY
    longest = min(lease, LONGEST_DELAY, ttl / 2 if ttl else LONGEST_DELAY)
    return max(1, math.ceil(min(delay, longest)))


def defer(job: Job, delay: int) -> Retry:
    """Return what the job is to return, so that it comes back in ``delay`` seconds with all its own retries.

    Arguments:
        job: The job.
        delay: Whole seconds after which a scheduler is to enqueue it; 0 to have it enqueued now, behind all others.
    """
    # RQ calls this where a job returned anything but a Retry, before it takes the job for finished.
    job._success_callback = partial(_fail_as_dropped, job.number_of_retries)
    if _COUNTS or not delay:
        job.number_of_retries = (job.number_of_retries or 0) - 1
    return Retry(max=ALWAYS, interval=delay)


def schedule_at_once(job: Job) -> None:
    """Have RQ write that a job is scheduled, for a retry or as it was put off, together with what schedules it.

    RQ writes it before, from 2.8 on. A worker that is killed in between would leave a job that is in no registry, and
    which RQ's maintenance does not take for abandoned.
    """
    job.set_status = partial(_set_status_as_scheduled, job.set_status, job)  # type: ignore[method-assign]


def _set_status_as_scheduled(write: Any, job: Job, status: JobStatus, pipeline: Any = None) -> None:
    if pipeline is None and status is JobStatus.SCHEDULED:
        job._status = status
    else:
        write(status, pipeline=pipeline)


def _fail_as_dropped(number_of_retries: int | None, job: Job, connection: Any, result: object) -> None:
    """Have a job fail whose deferral a decorator around `@idempotent` dropped: it would end without a run."""
    job.number_of_retries = number_of_retries
    raise ConfigurationError(
        f"Expected {job.func_name} to return the Retry with which @idempotent puts this job off, got {result!r} from a "
        "decorator around it. The job has not run: put @idempotent outermost, or return what the function returns; "
        "then requeue the job."
    )


_inherited: WeakKeyDictionary[ConnectionPool, Store] = WeakKeyDictionary()


def _is_horse() -> bool:
    """Return whether this process is a worker's that ends with its job; RQ gives a job no way to ask."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_name != "main_work_horse":
        frame = frame.f_back
    return frame is not None


def store_of(wanted: object, connection: Any) -> Store:
    """Return the store of a policy, or by default one on the Redis that a queue uses; the same object every time.

    Arguments:
        wanted: A store or a URL that a policy names, or None.
        connection: The queue's connection.

    Raises:
        ConfigurationError: the URL is none, or this is a horse, and the store is in its own memory.
    """
    if wanted is not None:
        store = opened(wanted)
        if isinstance(store, MemoryStore) and _is_horse():
            raise ConfigurationError(
                "Expected a store that all processes share, got memory:// in a worker that has a process of its own "
                "for each job, which would remember nothing. Leave store out for the queue's own Redis, or write "
                'store="redis://host:6379/1".'
            )
        return store
    pool = connection.connection_pool
    if pool not in _inherited:
        _inherited[pool] = store_like(connection)
    return _inherited[pool]
