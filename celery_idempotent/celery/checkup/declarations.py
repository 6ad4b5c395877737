"""Whether tasks are declared so that what fails or dies comes again."""

from __future__ import annotations

from collections.abc import Iterator
from inspect import signature
from typing import Any

from ... import keys
from ...doctor.finding import Finding, error, info, ok, warning
from ...errors import IdempotencyError
from ..declarations import mistaken_key, mistaken_settings, unprotected
from ..identity import KEY
from .facts import Declared, Facts, listed, shortest_interval

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


def base_missing(facts: Facts) -> Finding:
    """Look for tasks that have options and not the class that reads them."""
    found = dict(unprotected(facts.app))
    if found:
        return error(
            f"{listed(found)} ({listed(f'{name}=' for name in found.values())}) has idempotency options and not the "
            "base class: it is not protected at all.",
            "@app.task(base=IdempotentTask, idempotency={...})",
        )
    return ok("every task with idempotency options has the base class")


def setting_unknown(facts: Facts) -> Finding:
    """Look for settings that are meant for the library, and that nothing reads."""
    wrong = mistaken_settings(facts.app)
    if wrong:
        meant = [f"{name}: did you mean {near}?" if near else f"{name}: leave it out." for name, near in wrong.items()]
        return error(f"Nothing reads {listed(wrong)}: what it says does not hold.", " ".join(meant))
    return ok("every setting of idempotency is one")


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
            "Where that must not be, give it a key and a result_ttl shorter than its interval: "
            f'idempotency={{"key": lambda: "{unkeyed[0]}", "result_ttl": ...}}',
        )
    return ok("what beat publishes has a key of its own")


def beat_key_fixed(facts: Facts) -> Finding:
    """Look for entries of beat whose messages are all the same operation, for longer than until the next one."""
    for name, each, key, seconds in _fixed(facts):
        computed = callable(each.policy.key) and key != f"{KEY}="
        what = (
            f"The beat entry {name!r} publishes {each.name} every {seconds:g} s with the same key ({key}), which is "
            f"remembered for {each.policy.result_ttl:g} s: the runs between are answered with the result of the first."
        )
        option = '"key": ..., ' if computed or key == f"{KEY}=" else f'"key": {_written(each.policy.key)}, '
        remedy = (
            f'idempotency={{{option}"result_ttl": {seconds * 0.8:g}}}, shorter than the interval; or leave the key '
            "out, so that each message is an operation of its own"
        )
        if computed:
            return warning(f"{what} Unless its key function looks at more than its arguments.", remedy)
        return error(what, remedy)
    return ok("no entry of beat has one key for several runs")


def _fixed(facts: Facts) -> Iterator[tuple[str, Declared, str, float]]:
    """Yield entries whose key is remembered for longer than their interval: name, task, key, interval in seconds."""
    tasks = {each.name: each for each in facts.tasks}
    for name, entry in facts.scheduled.items():
        each = tasks.get(str(entry["task"]))
        key = _fixed_key(each, entry) if each else ""
        seconds = shortest_interval(entry.get("schedule"), facts.app) if key else None
        # A record that was made by one tick of the clock is still there at the tick that comes as long after it.
        if each and seconds is not None and seconds <= each.policy.result_ttl:
            yield name, each, key, seconds


def _fixed_key(each: Declared, entry: dict[str, Any]) -> str:
    """Return what fixes the key of all messages of an entry; "" if nothing does, or they do not fit the task."""
    policy, binding = each.policy, each.task._binding
    if (entry.get("options") or {}).get(KEY) is not None:
        return f"{KEY}="
    if policy.key is None or (callable(policy.key) and not signature(policy.key).parameters):
        return ""  # without arguments it must look at something else, as the clock
    try:
        arguments = binding.arguments(None, entry.get("args") or (), entry.get("kwargs") or {})
        one, other = (keys.resolve(policy.key, arguments) for _ in range(2))
    except (IdempotencyError, TypeError):
        return ""
    return repr(one) if one == other else ""


def _written(key: object) -> str:
    return f'"{key}"' if isinstance(key, str) else repr(key)


def beat_option_unknown(facts: Facts) -> Finding:
    """Look for options of beat's entries that are meant for the library, and that nothing reads."""
    for name, entry in facts.scheduled.items():
        wrong = mistaken_key(entry.get("options") or {})
        if wrong:
            return error(f"The beat entry {name!r} has an option that nothing reads: {wrong}", f"{KEY}=, or no key")
    return ok("the options of beat's entries are Celery's or idempotency_key")


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
    base_missing,
    setting_unknown,
    plain_tasks,
    early_ack,
    lost_child_fails,
    failure_not_acked,
    beat_without_key,
    beat_key_fixed,
    beat_option_unknown,
    runs_unprotected,
)
