"""Wraps the function of every job that RQ's own suite runs in `celery_idempotent.rq.idempotent`, and counts them."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

from rq.job import Job
from suite_counts import GUARDS, count

execute = Job._execute


def counted_execute(self: Job) -> Any:
    """Count a job whose function was found, so that RQ is about to call it."""
    if self.func:
        count("ran", f"{self.func.__module__}.{self.func.__qualname__}")
    return execute(self)


Job._execute = counted_execute  # type: ignore[method-assign]

if GUARDS:
    from rq import get_current_job

    from celery_idempotent.rq import idempotent
    from celery_idempotent.rq.delivery import RqDelivery

    find = Job.func.fget  # type: ignore[attr-defined]
    answer = RqDelivery.answer

    @functools.cache
    def guarded(function: Callable[..., Any]) -> Callable[..., Any]:
        # By the default key each enqueuing of a job is an operation of its own, as the suite expects.
        return idempotent()(function)

    def guarded_func(self: Job) -> Any:
        """Return the job's function as users declare it: guarded. Outside a job's run, tests compare it with theirs."""
        function = find(self)
        if function is None or get_current_job() is not self:
            return function
        if isinstance(function, types.MethodType):
            return types.MethodType(guarded(function.__func__), function.__self__)
        return guarded(function)

    def counted_answer(self: RqDelivery) -> Any:
        count("guarded", self.binding.name)
        return answer(self)

    Job.func = property(guarded_func)  # type: ignore[assignment]
    RqDelivery.answer = counted_answer  # type: ignore[method-assign]
