"""Whether results can be had by those who wait for them."""

from __future__ import annotations

from celery.backends.base import DisabledBackend
from celery.backends.rpc import RPCBackend

from ...binding import BACKEND
from ...doctor.finding import Finding, error, info, ok, warning
from .facts import Declared, Facts, listed

__all__ = ["CHECKS"]


def _read(facts: Facts) -> list[Declared]:
    return [each for each in facts.tasks if not each.task.ignore_result]


def result_backend_missing(facts: Facts) -> Finding:
    """See whether results go anywhere."""
    read = [each.name for each in _read(facts)]
    if read and isinstance(facts.app.backend, DisabledBackend):
        return info(
            f"There is no result backend, and {listed(read)} returns results: no caller can have them.",
            'app.conf.result_backend = "redis://host:6379/0", or app.conf.task_ignore_result = True',
        )
    return ok("results go to a backend, or are ignored")


def results_not_kept(facts: Facts) -> Finding:
    """Look for tasks whose duplicates have readers and get nothing to read."""
    bare = [each.name for each in _read(facts) if not each.policy.store_result]
    if bare and not isinstance(facts.app.backend, DisabledBackend):
        return info(
            f"store_result is off for {listed(bare)}: a duplicate that has a reader (a caller, a chain, a chord) fails "
            "with ResultUnavailable.",
            "ignore_result=True for the task if nobody reads it, else store_result=True",
        )
    return ok("duplicates find the results that are read")


def large_results_expire(facts: Facts) -> Finding:
    """Look for large results that the backend forgets before their records are."""
    large = [each for each in facts.tasks if each.policy.large_results == BACKEND]
    if any(isinstance(each.task.backend, (DisabledBackend, RPCBackend)) for each in large):
        return error(
            f'large_results is "backend" for {listed(each.name for each in large)}, and no result backend keeps them: '
            "duplicates fail with ResultUnavailable.",
            'app.conf.result_backend = "redis://host:6379/0"',
        )
    expires = facts.result_expires
    early = [each for each in large if expires is not None and each.policy.result_ttl > expires]
    if early and expires is not None:
        most = max(each.policy.result_ttl for each in early)
        return warning(
            f"result_expires is {expires:g} s, and the records of {listed(each.name for each in early)} are kept for "
            f"{most:g} s: a duplicate in between fails with ResultUnavailable if the result is large.",
            f"app.conf.result_expires = {most:g}",
        )
    return ok("large results are kept as long as their records")


CHECKS = (result_backend_missing, results_not_kept, large_results_expire)
