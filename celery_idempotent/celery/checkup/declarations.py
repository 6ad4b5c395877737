"""Whether tasks are declared so that what fails or dies comes again."""

from __future__ import annotations

from ...doctor.finding import Finding, info, ok, warning
from .facts import Facts, listed

__all__ = ["CHECKS"]

#: Options of Celery's that keep a message beyond the failure of its task; the latter two since 5.7.
ACKS = ("acks_on_failure_or_timeout", "acks_on_failure", "acks_on_timeout")


def nothing_idempotent(facts: Facts) -> Finding:
    """See whether the app has an idempotent task at all."""
    if not facts.tasks:
        return warning(
            "No task of the app is idempotent: nothing is protected, and nothing refreshed.",
            "@app.task(base=IdempotentTask), and let the app's imports or include name the modules of its tasks",
        )
    return ok(f"{len(facts.tasks)} idempotent task{'' if len(facts.tasks) == 1 else 's'}")


def plain_tasks(facts: Facts) -> Finding | None:
    """Look for tasks beside idempotent ones that are not."""
    if facts.plain and facts.tasks:
        return info(
            f"Not idempotent: {listed(facts.plain)}. Such a task runs as often as it is delivered.",
            "@app.task(base=IdempotentTask), where its effect must happen once",
        )
    return ok("every task is idempotent")


def early_ack(facts: Facts) -> Finding:
    """Look for tasks whose messages are gone before they run."""
    early = [each.name for each in facts.tasks if not each.task.acks_late]
    if early:
        return warning(
            f"acks_late is off for {listed(early)}: the message is gone before the task runs, and a killed worker "
            "loses it.",
            "Leave out acks_late=False and allow_early_ack.",
        )
    return ok("messages are acked after their task")


def lost_child_fails(facts: Facts) -> Finding:
    """Look for tasks that are not tried again when their process is killed."""
    final = [
        each.name
        for each in facts.tasks
        if each.task.acks_late
        and not each.task.reject_on_worker_lost
        and not getattr(each.task, "retry_on_worker_lost", False)
    ]
    if final:
        return warning(
            f"reject_on_worker_lost is off for {listed(final)}: a process that is killed, by the kernel for its memory "
            "say, is taken for a failure, and the task does not run again.",
            "Leave out reject_on_worker_lost=False; max_crashes ends a task that kills its processes.",
        )
    return ok("a task whose process is killed runs again")


def failure_not_acked(facts: Facts) -> Finding:
    """Look for tasks whose messages outlive their failure."""
    off = {each.name: name for each in facts.tasks for name in ACKS if getattr(each.task, name, None) is False}
    if off:
        return info(
            f"{listed(off.values())} is off for {listed(off)}: the message of a task that fails is rejected, and one "
            "that hits its time limit runs again, up to max_crashes times.",
            f"Leave out {listed(off.values())}=False, unless a dead letter queue takes what is rejected.",
        )
    return ok("the message of a failed task is acked")


def beat_without_key(facts: Facts) -> Finding:
    """Look for tasks that beat publishes, and that nothing but the message tells apart."""
    scheduled = {str(entry["task"]) for entry in facts.scheduled.values()}
    unkeyed = [each.name for each in facts.tasks if each.policy.key is None and each.name in scheduled]
    if unkeyed:
        return info(
            f"The key of {listed(unkeyed)} is the task id, and beat publishes it: two beats, or a publish that is "
            "tried again, make two operations of it.",
            'Give it a key that says which run it is: idempotency={"key": "day"}',
        )
    return ok("what beat publishes has a key of its own")


def runs_unprotected(facts: Facts) -> Finding:
    """Look for tasks that run without a lease while the store is down."""
    bold = [each.name for each in facts.tasks if each.policy.on_store_error == "run"]
    if bold:
        return info(
            f"on_store_error is run for {listed(bold)}: while the store is down a duplicate runs again.",
            'idempotency={"on_store_error": "wait"}, where that must not be',
        )
    return ok("no task runs without its lease")


CHECKS = (
    nothing_idempotent,
    plain_tasks,
    early_ack,
    lost_child_fails,
    failure_not_acked,
    beat_without_key,
    runs_unprotected,
)
