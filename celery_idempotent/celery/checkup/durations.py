"""Whether leases, limits and retention fit one another."""

from __future__ import annotations

from ...doctor.finding import Finding, error, info, ok, warning
from .facts import Facts, listed

__all__ = ["CHECKS"]

#: Seconds below which a lease is short, and above which it is long.
SHORT, LONG = 5.0, 600.0
GOOD = '"lease_ttl": "30s"'


def lease_short(facts: Facts) -> Finding:
    """Look for leases that a process loses as soon as it stalls."""
    short = [each for each in facts.tasks if each.policy.lease_ttl < SHORT]
    if short:
        least = min(each.policy.lease_ttl for each in short)
        return warning(
            f"lease_ttl is {least:g} s ({listed(each.name for each in short)}): a process that pauses for longer loses "
            "its lease though it is well, and a duplicate runs beside it.",
            f"idempotency={{{GOOD}}}",
        )
    return ok("no lease is shorter than 5 s")


def lease_long(facts: Facts) -> Finding:
    """Look for leases that outlive a dead worker for long."""
    long = [each for each in facts.tasks if each.policy.lease_ttl > LONG]
    if long:
        most = max(each.policy.lease_ttl for each in long)
        return warning(
            f"lease_ttl is {most:g} s ({listed(each.name for each in long)}): for so long the task of a dead worker "
            "waits. It need not be as long as the task runs, since leases are renewed.",
            f"idempotency={{{GOOD}}}",
        )
    return ok("no lease is longer than 10 min")


def lease_unbounded(facts: Facts) -> Finding:
    """Look for tasks that keep their key for as long as they hang."""
    free = [each.name for each in facts.tasks if each.policy.max_lease is None and facts.limit(each.task) is None]
    if free:
        return info(
            f"Nothing ends a process that hangs in {listed(free)}: it renews its lease and keeps its key for ever.",
            "app.conf.task_time_limit = 600 (or longer than your longest task), or a max_lease in the policy",
        )
    return ok("every task has a time limit or a max_lease")


def limits_not_enforced(facts: Facts) -> Finding | None:
    """Look for time limits that the pool does not keep."""
    pool = str(facts.conf.worker_pool)
    if pool == "prefork":
        return ok("the pool ends what runs into its time limit")
    limited = [each.name for each in facts.tasks if each.policy.max_lease is None and facts.limit(each.task)]
    if not limited:
        return None
    return info(
        f"A pool of {pool} ends no body at its time limit ({listed(limited)}): one that hangs keeps its key for ever.",
        'idempotency={"max_lease": 900} (or longer than your longest task)',
    )


def lease_ends_before_limit(facts: Facts) -> Finding:
    """Look for leases that end while their task may still run."""
    early = [
        (each, limit)
        for each in facts.tasks
        if each.policy.max_lease and (limit := facts.limit(each.task)) and each.policy.max_lease < limit
    ]
    if early:
        most = max(limit for _, limit in early)
        return warning(
            f"max_lease is shorter than the time limit ({listed(each.name for each, _ in early)}): a task that runs "
            "longer than its lease is overtaken by a duplicate.",
            f'idempotency={{"max_lease": {most + 60:g}}}, or leave it out: it is the time limit + 60 s then',
        )
    return ok("no lease ends before its task's time limit")


def result_ttl_short(facts: Facts) -> Finding:
    """Look for results that are forgotten before their duplicates can come."""
    what, wait = facts.longest_wait
    visibility = facts.visibility or 0.0
    latest = max(wait, visibility)
    source = what if wait > visibility else "the visibility_timeout of the broker"
    short = [each for each in facts.tasks if each.policy.result_ttl < latest]
    if short:
        least = min(each.policy.result_ttl for each in short)
        return error(
            f"result_ttl is {least:g} s ({listed(each.name for each in short)}), and a duplicate may come {latest:g} s "
            f"late ({source}): it is not recognised, and runs again.",
            'idempotency={"result_ttl": "24h"}',
        )
    return ok("results are remembered for longer than duplicates are known to be late")


def failure_ttl_short(facts: Facts) -> Finding:
    """Look for crash counts that are forgotten before the message comes again."""
    visibility = facts.visibility or 0.0
    short = [each for each in facts.tasks if each.policy.failure_ttl < visibility]
    if short:
        least = min(each.policy.failure_ttl for each in short)
        return warning(
            f"failure_ttl is {least:g} s ({listed(each.name for each in short)}), and a dead worker's message comes "
            f"again after {visibility:g} s: its crash is forgotten by then, and max_crashes never reached.",
            'idempotency={"failure_ttl": "24h"}',
        )
    return ok("crashes are remembered until the message comes again")


CHECKS = (
    lease_short,
    lease_long,
    lease_unbounded,
    limits_not_enforced,
    lease_ends_before_limit,
    result_ttl_short,
    failure_ttl_short,
)
