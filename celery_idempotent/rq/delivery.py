"""One execution of a job: from the job to a claim, from the guard's answer to RQ's control flow."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from time import monotonic
from typing import Any

from rq.exceptions import ShutDownImminentException
from rq.job import Job, Retry
from rq.timeouts import BaseTimeoutException

from .. import events
from ..core.backoff import sleep
from ..core.guard import Busy, Decision, Delivery, Dropped, Ending, Ignored, Ran, Replayed, in_progress, not_kept
from ..core.history import history
from ..core.lease import HeldLease, running
from ..errors import ConfigurationError, Conflict, CrashLoop, KeyReused, MissingKey, PreviouslyFailed, ResultUnavailable
from ..events import logger
from ..functions import FunctionBinding, check_returned
from ..stores.records import Claim, Reason, Release, new_owner
from . import job as jobs
from .horse import HorseEnd

#: Part of a job's own time limit that may be spent waiting.
PATIENCE = 0.8
#: Seconds to wait at most of a job without a time limit.
LONGEST_WAIT = 3600.0
#: Seconds after a job's time limit at which RQ kills a horse that did not end by itself, and as many again.
GRACE = 120.0

#: What RQ raises wherever the job happens to be: its time is up, or its dyno is about to be.
_ANYWHERE = (BaseTimeoutException, ShutDownImminentException)
#: What would happen again, however often the job were retried.
_PERMANENT = (ConfigurationError, CrashLoop, KeyReused, MissingKey, PreviouslyFailed, ResultUnavailable)


class _Retried(Exception):
    """A body returned a `Retry`, which is no result."""

    def __init__(self, retry: Retry) -> None:
        super().__init__(retry)
        self.retry = retry


class RqDelivery(Delivery):
    """One execution of a job.

    Arguments:
        binding: Of the job's function.
        job: The job, as RQ performs it.
        run: Runs the body.
        args, kwargs: The job's arguments.
    """

    def __init__(self, binding: FunctionBinding, job: Job, run: Callable[..., Any], args: Any, kwargs: Any) -> None:
        # RQ's time limit began before the module of the job was imported, which may have taken long.
        super().__init__(monotonic() - jobs.seconds_running(job))
        self.binding, self.job, self.run, self.args, self.kwargs = binding, job, run, args, kwargs
        self.given, self.key, self.ran = job.meta.get(jobs.KEY), "", False
        self.handover = HorseEnd.take()
        jobs.schedule_at_once(job)
        for name, value in job.meta.items():
            known = name == jobs.KEY or (name == jobs.META and isinstance(value, dict))
            if str(name).lower().startswith("idempot") and not known:
                logger.error("%s[%s]: nothing reads meta=%r. Did you mean %r?", binding.name, job.id, name, jobs.KEY)

    def answer(self) -> Any:
        """Return what the job returns, now or when it ran before; or a `Retry`, with which it will come back.

        Raises:
            IdempotencyError: the job fails without having run; see `celery_idempotent.errors`.
            Exception: what the body raised.
        """
        try:
            if self.handover is not None:
                self.handover.check(self.binding)
            self._prepare()
            if self.handover is not None:
                self.handover.send(self.binding, self.claim, self.max_lease, self.job.id)
            return self._conclude(self._run_guarded())
        except _Retried as retried:
            return retried.retry
        except Exception as error:
            if not self.ran:
                self._refused(error)
            if self._is_permanent(error) and self.job.retries_left:
                self.job.retries_left = jobs.RetriesOnHold(self.job.retries_left)  # type: ignore[assignment]
            raise
        finally:
            history.flush()  # a horse ends without any further ado

    def emit_start(self, held: HeldLease) -> None:
        """Emit that the run begins, and mark the job: now, as its body may write the job's meta itself."""
        super().emit_start(held)
        self._mark(outcome="ran", key=held.key, fence=held.fence)

    def body(self, held: HeldLease) -> Any:
        """Run the job's function; a `Retry` that it returns is no result."""
        self.ran = True
        if not held.fence:  # it runs unprotected, which `emit_start` does not emit
            self._mark(outcome="ran", key=held.key, fence=0)
        with running(held):
            value = check_returned(self.binding.name, self.run(*self.args, **self.kwargs))
        if isinstance(value, Retry):
            raise _Retried(value)
        return value

    def ending(self, error: BaseException) -> Ending:
        """Return the ending to record: RQ runs again what it retries, so that a duplicate waits for that."""
        job = self.job
        again = job.should_retry and not (self._is_permanent(error) or self._is_synchronous)
        match error:
            case _Retried(retry=retry):
                if self._is_synchronous:  # RQ retries nothing where it was enqueued
                    return Release(Reason.FAILED)
                if job.number_of_retries and job.number_of_retries >= retry.max:
                    return Release(Reason.FAILED)
                return Release(Reason.RETRY, Retry.get_interval(job.number_of_retries or 0, retry.intervals))
            case ShutDownImminentException():
                return Release(Reason.SHUTDOWN)
        ending = self.binding.ending_of(error)
        if again and isinstance(ending, Release) and ending.reason is Reason.FAILED:
            return Release(Reason.RETRY, job.get_retry_interval())
        return ending

    def min_wait(self) -> float:
        """Return the seconds for which the job waits where it is, so that it does not go round in circles."""
        return 0.0 if self._is_synchronous or self._can_be_scheduled else jobs.QUEUE_PAUSE

    def _prepare(self) -> None:
        self.identify(self.binding.events_of(self._claim(), self.job.id))
        self.wants_result, self.max_lease = jobs.has_reader(self.job), self._max_lease()
        self.patience = min(PATIENCE * jobs.seconds_allowed(self.job), LONGEST_WAIT) - self.waited
        if self._is_synchronous:  # the caller waits, and may be serving a request
            self.patience = min(self.patience, self.binding.policy.wait_timeout)

    def _claim(self) -> Claim:
        binding, job = self.binding, self.job
        if jobs.KEY in self.kwargs and jobs.KEY not in binding.signature.parameters:
            raise ConfigurationError(
                f"Expected {jobs.KEY} in the meta of a job, got it among the arguments of {binding.name}, which has "
                "none of that name: enqueue() hands what it does not know to the body. Write "
                f'meta={{"{jobs.KEY}": ...}}.'
            )
        occurrence = jobs.occurrence(job)
        self.key, arguments = binding.operation(self.given, occurrence, self.args, self.kwargs, job.meta)
        if arguments is None and not jobs.has_readable_meta(job):
            raise ConfigurationError(
                f"Expected a meta of job {job.id} that this worker can read, since {binding.name} has no key of its "
                f"arguments, got another: whether it has an {jobs.KEY} is not known. Put into it what the worker can "
                "import, or give the worker the serializer of the queue."
            )
        if arguments is None and jobs.is_periodic(job):
            raise ConfigurationError(
                f"Expected a key of {binding.name}, got none: rq-scheduler enqueues one job again and again, so that "
                "its first run would stand for all. Write a key that names the occurrence, as "
                '@idempotent(key=lambda: f"{get_current_job().enqueued_at:%Y-%m-%dT%H}").'
            )
        return binding.claim(
            self.key,
            self.handover.owner if self.handover is not None else new_owner(),
            task_id="" if arguments is None else occurrence,
            fingerprint=binding.fingerprint(arguments),
        )

    def _max_lease(self) -> float | None:
        allowed = jobs.seconds_allowed(self.job)
        if self._is_synchronous or allowed == float("inf"):  # which nothing ends
            return self.binding.policy.max_lease
        return self.binding.policy.max_lease or allowed + GRACE

    @cached_property
    def _is_synchronous(self) -> bool:
        return jobs.is_synchronous(self.job)

    @cached_property
    def _can_be_scheduled(self) -> bool:
        return jobs.can_defer(self.job) and jobs.has_scheduler(self.job)

    def _run_guarded(self) -> Decision:
        try:
            return self.binding.guard.run(self)
        except _ANYWHERE as error:
            # Also between its grant and its body, where nothing would release.
            ending = self.ending(error)
            self.binding.guard.give_back(self, error, ending if isinstance(ending, Release) else None)
            raise

    def _conclude(self, decision: Decision) -> Any:
        match decision:
            case Ran(value):
                return self.binding.as_replayed(value)
            case Replayed(value, record):
                original = jobs.id_of(record.task_id) if record.task_id != self.claim.task_id else ""
                self._mark(outcome="replayed", key=record.key, fence=record.fence, original=original)
                return value
            case Ignored(_, record):
                raise not_kept(record, "the run that did it left none")
            case Dropped():  # the lease was lost, and its new holder may settle
                return self._stand_aside(Busy(jobs.FIRST_DELAY))
            case Busy() as busy:
                return self._stand_aside(busy)
            case other:  # pragma: no cover
                raise AssertionError(f"the guard decided nothing but {other!r}")

    def _stand_aside(self, busy: Busy) -> Any:
        """Have the job come back later, or fail where nothing would bring it back."""
        job = self.job
        if self._is_synchronous:
            raise busy.error or in_progress(self.key, busy.remaining)
        number = jobs.deferrals(job)
        if self._can_be_scheduled:
            delay = jobs.deferral_delay(number, busy.remaining, job.ttl)
        else:
            delay, turn = 0, min(jobs.QUEUE_PAUSE, PATIENCE * jobs.seconds_allowed(job))
            sleep(max(0.0, turn - self.waited))  # a delivery that waited for a holder has done so
        if jobs.is_withdrawn(job):
            raise Conflict(f"Job {job.id} was cancelled or deleted while it waited for {self.key!r}.")
        self._mark(outcome="deferred", key=self.key, deferrals=number + 1)
        self.emit(events.Deferred, delay=delay, copy=number + 1)
        return jobs.defer(job, delay)

    def _is_permanent(self, error: BaseException) -> bool:
        if isinstance(error, Conflict):
            return not error.remaining
        return isinstance(error, (*_PERMANENT, *self.binding.policy.remember_failures))

    def _refused(self, error: Exception) -> None:
        """Write into the job's meta why it fails without having run."""
        remembered = isinstance(error, (PreviouslyFailed, *self.binding.policy.remember_failures))
        self._mark(outcome="replayed" if remembered else "refused", key=self.key, error=type(error).__name__)

    def _mark(self, **facts: Any) -> None:
        """Write what becomes of the job where RQ's dashboards show it."""
        number = jobs.deferrals(self.job)
        facts = {"deferrals": number, **facts} if number else facts
        try:
            jobs.write_meta(self.job, {name: value for name, value in facts.items() if value != ""})
        except _ANYWHERE:
            raise
        except Exception as error:  # noqa: BLE001 - Redis is away, or the serializer cannot read what is there
            logger.warning("%s[%s]: its meta could not be written: %s", self.binding.name, self.job.id, error)
