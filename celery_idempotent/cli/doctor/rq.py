# ruff: noqa: D103 - a check is documented by its name, its words where all is well, and its findings
"""Checks of RQ's queues: workers, schedulers, and the jobs that are there with the options of their functions."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import import_module
from importlib.util import find_spec
from itertools import islice
from typing import Any

from rq import Queue
from rq.exceptions import DeserializationError
from rq.job import Job
from rq.registry import DeferredJobRegistry, FailedJobRegistry, ScheduledJobRegistry, StartedJobRegistry
from rq.serializers import JSONSerializer
from rq.utils import current_timestamp
from rq.worker import Worker

from ...core.binding import BINDING
from ...core.policy import Policy
from ...errors import ConfigurationError, IdempotencyError
from ...functions import opened
from ...rq.decorator import JobBinding
from ...rq.job import functions_of, is_scheduled
from ...stores.memory import MemoryStore
from .findings import LONG, SHORT, Checks, Findings, Section, error, failed, info, listed, ok, run_checks, warning

#: Jobs that are read of each queue and of each of its registries.
JOBS = 100
REGISTRIES = (StartedJobRegistry, ScheduledJobRegistry, DeferredJobRegistry, FailedJobRegistry)
#: Seconds between two looks of a worker at its horse, without --job-monitoring-interval.
MONITORING = 30.0
#: Seconds until a worker finds what a dead one left: its maintenance comes every ten minutes, but where it waits for a
#: job not before that has come, or worker_ttl (seven minutes) is nearly over.
ABANDONED = 1080.0

CHECKS = Checks()


@dataclass(frozen=True)
class QueuedJob:
    """A job that is in a queue or a registry.

    Arguments:
        name: The name of its function.
        policy: The options of that; None if it is not guarded, or cannot be imported here.
        problem: Why the function cannot be imported here, or "".
        job: The job.
    """

    name: str
    policy: Policy | None
    problem: str
    job: Job


class RqSite:
    """The queues in one Redis.

    Arguments:
        connection: The client of that Redis.
    """

    def __init__(self, connection: Any) -> None:
        self.connection = connection

    @cached_property
    def queues(self) -> list[Queue]:
        """All queues, by name."""
        return sorted(Queue.all(connection=self.connection), key=lambda queue: queue.name)

    @cached_property
    def workers(self) -> list[Any]:
        """All workers that are registered."""
        return Worker.all(connection=self.connection)

    @cached_property
    def jobs(self) -> list[QueuedJob]:
        """Some jobs of each queue and registry."""
        ids = dict.fromkeys(each for queue in self.queues for each in self._ids(queue))
        jobs = (job for job in Job.fetch_many(list(ids), connection=self.connection) if job is not None)
        return [_read(job) for job in jobs]

    @staticmethod
    def _ids(queue: Queue) -> Iterator[str]:
        yield from queue.get_job_ids(0, JOBS)
        for registry in REGISTRIES:
            found = registry(queue=queue)  # type: ignore[abstract, unused-ignore]
            yield from islice(found.get_job_ids(0, JOBS, cleanup=False), JOBS)

    @property
    def guarded(self) -> list[tuple[QueuedJob, Policy]]:
        """The jobs whose functions are guarded, with their options."""
        return [(each, each.policy) for each in self.jobs if each.policy is not None]


def _read(job: Job) -> QueuedJob:
    try:
        _set_up_django()
        name, functions = _name_of(job), list(functions_of(job))
    except (Exception, SystemExit) as why:  # noqa: BLE001 - what the import of a user's module raises, or its serializer
        return QueuedJob(str(getattr(job, "description", "")).partition("(")[0], None, _words(why), job)
    for function in functions:
        binding = getattr(function, BINDING, None)
        if isinstance(binding, JobBinding):
            return QueuedJob(binding.name if name == "__call__" else name, binding.policy, "", job)
    return QueuedJob(name, None, "", job)


@cache
def _set_up_django() -> None:
    """Set Django up, as `manage.py rqworker` has done when it imports the modules of jobs, which import models."""
    if os.environ.get("DJANGO_SETTINGS_MODULE") and find_spec("django"):
        django: Any = import_module("django")
        django.setup()


def _words(error: BaseException) -> str:
    first, *_ = [*str(error).strip().splitlines(), ""]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def _name_of(job: Job) -> str:
    """Return the name of a job's function; its queue may have either of RQ's serializers."""
    try:
        return job.func_name or ""
    except DeserializationError:
        job.serializer = JSONSerializer
        return job.func_name or ""


def _names(found: list[QueuedJob]) -> str:
    return listed(sorted({each.name for each in found}))


def _many(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


@CHECKS.add()
def no_jobs(site: RqSite) -> Findings:
    if not site.jobs:
        yield info(
            "No job is in a queue, or waits, runs or has failed: nothing shows which functions there are.",
            "Run doctor again while jobs are queued, or after some have failed.",
        )
    yield ok(f"{_many(len(site.jobs), 'job')} of {_many(len(site.queues), 'queue')} read")


@CHECKS.add("the functions of all jobs can be imported here")
def function_not_importable(site: RqSite) -> Findings:
    if found := [each for each in site.jobs if each.problem]:
        yield info(
            f"{_names(found)} cannot be imported here ({found[0].problem}): whether such jobs are guarded is not "
            "known.",
            "Run doctor where the workers run, in their directory and with their Python; with django-rq, give it "
            "DJANGO_SETTINGS_MODULE in its environment.",
        )


@CHECKS.add("the stores that functions name can be shared by all workers")
def job_store_unfit(site: RqSite) -> Findings:
    for each, policy in {each.name: (each, policy) for each, policy in site.guarded if policy.store}.values():
        try:
            alone = isinstance(opened(policy.store), MemoryStore)
        except ConfigurationError as wrong:
            yield error(f"{each.name}: {wrong}", "Every job of it fails until that is corrected.")
            continue
        if alone:
            yield error(
                f'{each.name} has store="memory://", which a worker forgets with the process of each job.',
                'Leave store out for the queue\'s own Redis, or write store="redis://host:6379/1".',
            )


@CHECKS.add("all jobs are guarded")
def plain_jobs(site: RqSite) -> Findings:
    if found := [each for each in site.jobs if not each.problem and each.policy is None]:
        yield info(
            f"Not guarded: {_names(found)}. Such a job runs as often as RQ hands it out.",
            "from celery_idempotent.rq import idempotent, and @idempotent() above the function, where its effect must "
            "happen once",
        )


@CHECKS.add("every queue with jobs has a worker")
def no_workers(site: RqSite) -> Findings:
    served = {name for worker in site.workers for name in worker.queue_names()}
    if idle := [queue.name for queue in site.queues if queue.count and queue.name not in served]:
        yield warning(f"No worker listens to {listed(idle)}, which has jobs.", f"rq worker {' '.join(idle[:3])}")


@CHECKS.add("a scheduler runs for every queue", when=lambda site: bool(site.workers))
def no_scheduler(site: RqSite) -> Findings:
    served = {name for worker in site.workers for name in worker.queue_names()}
    if bare := [name for name in sorted(served) if not is_scheduled(site.connection, name)]:
        yield warning(
            f"No scheduler runs for {listed(bare)}: a duplicate that meets a running job takes a worker for a second, "
            "whenever its turn comes, and retries with an interval do not come back.",
            "rq worker --with-scheduler",
        )


@CHECKS.add("a job whose worker is killed is retried")
def job_not_retried(site: RqSite) -> Findings:
    if found := [each for each, _ in site.guarded if not each.job.retries_left and not each.job.number_of_retries]:
        yield warning(
            f"Jobs of {_names(found)} have no retry: one whose horse or worker is killed goes to the failed jobs, and "
            "nothing runs it again.",
            "queue.enqueue(function, ..., retry=Retry(max=3)); its key keeps it from taking effect twice",
        )


@CHECKS.add("no guarded job failed because its worker died")
def jobs_abandoned(site: RqSite) -> Findings:
    lost = [
        each
        for each, _ in site.guarded
        if "AbandonedJobError" in (info_of := _failure(each.job)) or "Work-horse terminated" in info_of
    ]
    if lost:
        yield warning(
            f"{_many(len(lost), 'job')} of {_names(lost)} failed because the worker or its horse died; nothing runs "
            "such a job again.",
            "rq requeue --all --queue NAME; what had taken effect is replayed, and does not run",
        )


def _failure(job: Job) -> str:
    if not job.is_failed:
        return ""
    result = job.latest_result()
    return str(result.exc_string or "") if result is not None else ""


@CHECKS.add("no job is left by a worker that died")
def jobs_stalled(site: RqSite) -> Findings:
    now, late = current_timestamp(), 0
    for queue in site.queues:
        late += site.connection.zcount(StartedJobRegistry(queue=queue).key, "-inf", f"({now}")
    if late:
        yield info(
            f"{_many(late, 'job')} shown as started have had no heartbeat: their worker died. They are retried or fail "
            "with the next maintenance of a worker.",
            "Wait ten minutes, and seven more where workers are idle; or start workers with a shorter "
            "--maintenance-interval and --worker-ttl.",
        )


@CHECKS.add("no lease is shorter than a worker's looks at its horse allow, and none is longer than 10 min")
def lease_out_of_range(site: RqSite) -> Findings:
    brief = [(each, policy) for each, policy in site.guarded if policy.lease_ttl < 2 * MONITORING]
    if brief:
        least = min(policy.lease_ttl for _, policy in brief)
        kind, seconds = warning if least < SHORT else info, max(1, int(least // 2))
        yield kind(
            f"lease_ttl is {least:g} s ({_names([each for each, _ in brief])}): IdempotentWorker refuses such jobs "
            f"unless it looks at its horse twice in that time, and it does so every {MONITORING:g} s by default.",
            f'lease_ttl="60s", or start IdempotentWorker with --job-monitoring-interval {seconds}',
        )
    if long := [(each, policy) for each, policy in site.guarded if policy.lease_ttl > LONG]:
        most = max(policy.lease_ttl for _, policy in long)
        yield warning(
            f"lease_ttl is {most:g} s ({_names([each for each, _ in long])}): for so long the job of a dead worker "
            "waits. It need not be as long as the job runs, since leases are renewed.",
            'lease_ttl="60s"',
        )


@CHECKS.add("every job has a time limit or a max_lease")
def job_unbounded(site: RqSite) -> Findings:
    free = [each for each, policy in site.guarded if policy.max_lease is None and (each.job.timeout or 1) < 0]
    if free:
        yield info(
            f"Nothing ends a job of {_names(free)} that hangs: it renews its lease and keeps its key for ever.",
            "queue.enqueue(function, ..., job_timeout=600), or max_lease=600 in @idempotent",
        )


@CHECKS.add("no lease ends before the time limit of its job")
def lease_ends_before_limit(site: RqSite) -> Findings:
    early = [
        (each, policy.max_lease, float(each.job.timeout or Queue.DEFAULT_TIMEOUT))
        for each, policy in site.guarded
        if policy.max_lease and 0 < policy.max_lease < float(each.job.timeout or Queue.DEFAULT_TIMEOUT)
    ]
    if early:
        most = max(limit for _, _, limit in early)
        yield warning(
            f"max_lease is shorter than the job_timeout of {_names([each for each, _, _ in early])}: a job that runs "
            "longer than its lease is overtaken by a duplicate.",
            f"max_lease={most + 120:g}, or leave it out: it is the job_timeout + 120 s then",
        )


@CHECKS.add("results are remembered for longer than RQ's own duplicates are late")
def result_ttl_short(site: RqSite) -> Findings:
    short = [
        (each, policy, latest)
        for each, policy in site.guarded
        if 0 < policy.result_ttl < (latest := max(ABANDONED, *map(float, each.job.retry_intervals or (0,))))
    ]
    if short:
        least, latest = min(policy.result_ttl for _, policy, _ in short), max(late for _, _, late in short)
        yield error(
            f"result_ttl is {least:g} s ({_names([each for each, _, _ in short])}), and RQ may hand a job out again "
            f"{latest:g} s later: it is not recognised, and runs again.",
            'result_ttl="24h" in @idempotent. The result_ttl of a job is another matter: that is for how long RQ keeps '
            "the job and its result.",
        )


@CHECKS.add("duplicates find the results that are read")
def results_not_kept(site: RqSite) -> Findings:
    if bare := [each for each, policy in site.guarded if not policy.store_result and each.job.result_ttl != 0]:
        yield info(
            f"store_result is off for {_names(bare)}: a duplicate whose result RQ is to keep fails with "
            "ResultUnavailable.",
            "queue.enqueue(function, ..., result_ttl=0) if no caller reads it, else store_result=True",
        )


def section(store: Any, name: str) -> Section:
    """Return what is found of RQ's queues.

    Arguments:
        store: A `RedisStore` in the database of the queues.
        name: Its name, without a password.
    """
    found = Section(f"RQ queues in {name}")
    try:
        store.ping()
        found.findings += run_checks(CHECKS, RqSite(store._client))
    except IdempotencyError as failure:
        found.findings.append(failed(failure))
    return found
