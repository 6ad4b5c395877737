"""Coming back later: a job that cannot run now returns a `Retry`, with which RQ schedules it, or enqueues it anew.

RQ counts what a job returns as `Retry` against the ``max`` that it names. A deferral is none of the job's own retries,
so the count is set back by as much as RQ is about to add.
"""

from __future__ import annotations

import inspect
import math
import random

from rq.job import Job, Retry

from .jobs import META

__all__ = ["FIRST_DELAY", "TURN", "Unspent", "can_be_put_off", "deferrals", "delay_before", "put_off"]

#: Seconds to wait at first and at most.
FIRST_DELAY, LONGEST_DELAY = 1.0, 60.0
#: Seconds for which a job waits where it is, whenever its turn comes, if nobody would enqueue it later.
TURN = 1.0
#: Least ttl in seconds of a job that can be put off: RQ's scheduler looks once a second, and counts in whole ones.
LEAST_TTL = 4
#: How often a job may be put off: for ever.
ALWAYS = 2**31
#: Whether RQ counts a returned Retry that it schedules; each that it enqueues at once it counts, also before 2.8.
_COUNTS = "retry" in inspect.signature(Job._handle_retry_result).parameters


class Unspent(float):
    """A number of retries left of a job that would fail again: none now, and as many as it says once it is requeued.

    A subclass of int is what hiredis refuses to write.
    """

    def __gt__(self, other: object) -> bool:
        return False

    def __repr__(self) -> str:
        return str(int(self))


def deferrals(job: Job) -> int:
    """Return how often the job was put off."""
    said = job.meta.get(META)
    return int(said.get("deferrals") or 0) if isinstance(said, dict) else 0


def can_be_put_off(job: Job) -> bool:
    """Tell whether RQ will still know the job when its delay is over."""
    return job.ttl is None or job.ttl >= LEAST_TTL


def delay_before(number: int, remaining: float, ttl: int | None) -> int:
    """Return the whole seconds, as RQ's scheduler takes them, that a job waits which was put off ``number`` times.

    Arguments:
        number: How often it was.
        remaining: Seconds until the lease in its way runs out, unless it is renewed.
        ttl: Seconds after which RQ forgets a job that is scheduled, or None.
    """
    delay: float = FIRST_DELAY * 2 ** min(number, 10) * random.uniform(0.75, 1.25)
    longest = min(max(remaining, FIRST_DELAY), LONGEST_DELAY, ttl / 2 if ttl else LONGEST_DELAY)
    return max(1, math.ceil(min(delay, longest)))


def put_off(job: Job, delay: int) -> Retry:
    """Return what the job is to return, so that it comes back in ``delay`` seconds with all its own retries.

    Arguments:
        job: The job.
        delay: Whole seconds after which a scheduler is to enqueue it; 0 to have it enqueued now, behind all others.
    """
    if _COUNTS or not delay:
        job.number_of_retries = (job.number_of_retries or 0) - 1
    return Retry(max=ALWAYS, interval=delay)
