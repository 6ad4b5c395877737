"""What a job says of itself: which function it runs, as which operation, and who will read what it returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rq import get_current_job
from rq.job import Job
from rq.queue import Queue
from rq.scheduler import RQScheduler
from rq.serializers import DefaultSerializer
from rq.utils import now
from rq.worker import Worker

__all__ = [
    "KEY",
    "META",
    "has_reader",
    "has_scheduler",
    "id_of",
    "is_synchronous",
    "job_running",
    "note",
    "occurrence",
    "seconds_allowed",
    "seconds_running",
    "serializer_of",
]

#: Entry of a job's meta with the key that its producer gave.
KEY = "idempotency_key"
#: Entry of a job's meta in which this library says what became of the job.
META = "idempotency"
#: Least seconds to which a scheduler renews its lock each time it has looked for what is due.
LOCK_TTL = 60
#: Seconds after which a scheduler that did not renew it is taken for dead.
SILENCE = 20


def job_running(function: Callable[..., Any]) -> Job | None:
    """Return the job that is being performed here, if it is ``function`` that it runs."""
    job: Any = get_current_job()
    return job if job is not None and _runs(job, function) else None


def _runs(job: Job, function: Callable[..., Any]) -> bool:
    # Other decorators may lie around ours, and a method is found bound to what it is a method of.
    found: Any = job.func
    while found is not None:
        found = getattr(found, "__func__", found)
        if found is function:
            return True
        found = getattr(found, "__wrapped__", None)
    return job.instance is None and job.func_name == f"{function.__module__}.{function.__qualname__}"


def occurrence(job: Job) -> str:
    """Return what tells this enqueuing of a job, and this occurrence of one that repeats, from all others.

    Retries and what RQ hands out twice are the same occurrence. An id alone is not: it may be used again, and each
    occurrence of a ``Repeat`` has it.
    """
    made = job.created_at.strftime("%Y%m%dT%H%M%S.%f")
    return f"{job.id}@{made}" + (f"-{job.repeats_left}" if job.repeats_left else "")


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
    """Tell whether somebody can read what the job returns: RQ keeps it, or a callback is given it."""
    return job.result_ttl != 0 or bool(job._success_callback_name)


def serializer_of(job: Job) -> str:
    """Return kombu's name for the serializer of a job; of one that kombu does not have, for the nearest."""
    return "pickle" if job.serializer is DefaultSerializer else "json"


def is_synchronous(job: Job) -> bool:
    """Tell whether the job runs where it was enqueued (``is_async=False``), so that nobody would deliver it again."""
    # That is what RQ calls the worker then; a real one may be called so, too, and is registered.
    return job.worker_name == "sync" and not job.connection.exists(Worker.redis_worker_namespace_prefix + "sync")


def has_scheduler(job: Job) -> bool:
    """Tell whether somebody enqueues what is scheduled for the job's queue."""
    # Redis answers with a negative number where there is none.
    return int(job.connection.ttl(RQScheduler.get_locking_key(job.origin))) > LOCK_TTL - SILENCE


def note(job: Job, said: dict[str, Any]) -> None:
    """Write what becomes of the job into its meta.

    Raises:
        Exception: what is there cannot be read, and is left as it is; or the server does not answer.
    """
    # Others may have written to it since the job was fetched, while it was waiting, say.
    job.meta = {**job.meta, **job.get_meta(refresh=True), META: said}
    job.save_meta()  # type: ignore[no-untyped-call]
