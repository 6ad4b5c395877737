"""Checks of the configuration of an app and its tasks.

No server is called here: the checks read the app's configuration. A check is a small function that looks at one
thing; its name is the code of what it finds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from inspect import signature
from typing import Any

from celery.backends.base import DisabledBackend
from celery.backends.rpc import RPCBackend

from ...celery.app import PURGE, default_namespace, store_of, store_of_backend, store_of_broker, used_stores
from ...celery.declarations import mistaken_key, mistaken_settings, unprotected
from ...celery.message import KEY_HEADER
from ...core import keys
from ...core.binding import BACKEND
from ...errors import ConfigurationError, IdempotencyError
from ...stores import hide_password
from ...stores.maintenance import NamedStore
from . import broker
from .app_config import AppConfig, DeclaredTask, listed, shortest_interval
from .findings import Check, Finding, Section, error, failed, info, ok, run_checks, warning

#: Options of Celery's that keep a message beyond the failure of its task; the latter two since 5.7.
ACKS = ("acks_on_failure_or_timeout", "acks_on_failure", "acks_on_timeout")


def nothing_idempotent(facts: AppConfig) -> Finding:
    """See whether the app has an idempotent task at all."""
    if not facts.tasks:
        return warning(
            "No task of the app is idempotent: nothing is protected, and nothing refreshed.",
            "@app.task(base=IdempotentTask), and let the app's imports or include name the modules of its tasks",
        )
    return ok(f"{len(facts.tasks)} idempotent task{'' if len(facts.tasks) == 1 else 's'}")


def base_missing(facts: AppConfig) -> Finding:
    """Look for tasks that have options and not the class that reads them."""
    found = dict(unprotected(facts.app))
    if found:
        return error(
            f"{listed(found)} ({listed(f'{name}=' for name in found.values())}) has idempotency options and not the "
            "base class: it is not protected at all.",
            "@app.task(base=IdempotentTask, idempotency={...})",
        )
    return ok("every task with idempotency options has the base class")


def setting_unknown(facts: AppConfig) -> Finding:
    """Look for settings that are meant for the library, and that nothing reads."""
    wrong = mistaken_settings(facts.app)
    if wrong:
        meant = [f"{name}: did you mean {near}?" if near else f"{name}: leave it out." for name, near in wrong.items()]
        return error(f"Nothing reads {listed(wrong)}: it has no effect.", " ".join(meant))
    return ok("every setting of idempotency is one")


def plain_tasks(facts: AppConfig) -> Finding | None:
    """Look for tasks beside idempotent ones that are not."""
    if facts.plain and facts.tasks:
        return info(
            f"Not idempotent: {listed(facts.plain)}. Such a task runs as often as it is delivered.",
            "@app.task(base=IdempotentTask), where its effect must happen once",
        )
    return ok("every task is idempotent")


def early_ack(facts: AppConfig) -> Finding:
    """Look for tasks whose messages are gone before they run."""
    early = [each.name for each in facts.tasks if not each.task.acks_late]
    if early:
        return warning(
            f"acks_late is off for {listed(early)}: the message is gone before the task runs, and a killed worker "
            "loses it.",
            "Leave out acks_late=False and allow_early_ack.",
        )
    return ok("messages are acked after their task")


def lost_child_fails(facts: AppConfig) -> Finding:
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
            f"reject_on_worker_lost is off for {listed(final)}: a process that is killed, as by the kernel for its "
            "memory, is taken for a failure, and the task does not run again.",
            "Leave out reject_on_worker_lost=False; max_crashes ends a task that kills its processes.",
        )
    return ok("a task whose process is killed runs again")


def failure_not_acked(facts: AppConfig) -> Finding:
    """Look for tasks whose messages outlive their failure."""
    off = {each.name: name for each in facts.tasks for name in ACKS if getattr(each.task, name, None) is False}
    if off:
        return info(
            f"{listed(off.values())} is off for {listed(off)}: the message of a task that fails is rejected, and one "
            "that hits its time limit runs again, up to max_crashes times.",
            f"Leave out {listed(off.values())}=False, unless a dead letter queue takes what is rejected.",
        )
    return ok("the message of a failed task is acked")


def beat_without_key(facts: AppConfig) -> Finding:
    """Look for tasks that beat publishes, and that only their message id distinguishes."""
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


def beat_key_fixed(facts: AppConfig) -> Finding:
    """Look for entries of beat whose messages are all the same operation, for longer than until the next one."""
    for name, each, key, seconds in _fixed(facts):
        computed = callable(each.policy.key) and key != f"{KEY_HEADER}="
        what = (
            f"The beat entry {name!r} publishes {each.name} every {seconds:g} s with the same key ({key}), which is "
            f"remembered for {each.policy.result_ttl:g} s: the runs between are answered with the result of the first."
        )
        option = '"key": ..., ' if computed or key == f"{KEY_HEADER}=" else f'"key": {_written(each.policy.key)}, '
        remedy = (
            f'idempotency={{{option}"result_ttl": {seconds * 0.8:g}}}, shorter than the interval; or leave the key '
            "out, so that each message is an operation of its own"
        )
        if computed:
            return warning(f"{what} Unless its key function looks at more than its arguments.", remedy)
        return error(what, remedy)
    return ok("no entry of beat has one key for several runs")


def _fixed(facts: AppConfig) -> Iterator[tuple[str, DeclaredTask, str, float]]:
    """Yield entries whose key is remembered for longer than their interval: name, task, key, interval in seconds."""
    tasks = {each.name: each for each in facts.tasks}
    for name, entry in facts.scheduled.items():
        each = tasks.get(str(entry["task"]))
        key = _fixed_key(each, entry) if each else ""
        seconds = shortest_interval(entry.get("schedule"), facts.app) if key else None
        # A record that was made by one tick of the clock is still there at the tick that comes as long after it.
        if each and seconds is not None and seconds <= each.policy.result_ttl:
            yield name, each, key, seconds


def _fixed_key(each: DeclaredTask, entry: dict[str, Any]) -> str:
    """Return what fixes the key of all messages of an entry; "" if nothing does, or they do not fit the task."""
    policy, binding = each.policy, each.task._binding
    if (entry.get("options") or {}).get(KEY_HEADER) is not None:
        return f"{KEY_HEADER}="
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


def beat_option_unknown(facts: AppConfig) -> Finding:
    """Look for options of beat's entries that are meant for the library, and that nothing reads."""
    for name, entry in facts.scheduled.items():
        wrong = mistaken_key(entry.get("options") or {})
        if wrong:
            return error(
                f"The beat entry {name!r} has an option that nothing reads: {wrong}", f"{KEY_HEADER}=, or no key"
            )
    return ok("the options of beat's entries are Celery's or idempotency_key")


def runs_unprotected(facts: AppConfig) -> Finding:
    """Look for tasks that run without a lease while the store is down."""
    bold = [each.name for each in facts.tasks if each.policy.on_store_error == "run"]
    if bold:
        return info(
            f"on_store_error is run for {listed(bold)}: while the store is down a duplicate runs again.",
            'idempotency={"on_store_error": "wait"}, where that must not be',
        )
    return ok("no task runs without its lease")


DECLARATION_CHECKS = (
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

#: Seconds below which a lease is short, and above which it is long.
SHORT, LONG = 5.0, 600.0
GOOD = '"lease_ttl": "30s"'


def lease_short(facts: AppConfig) -> Finding:
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


def lease_long(facts: AppConfig) -> Finding:
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


def lease_unbounded(facts: AppConfig) -> Finding:
    """Look for tasks that keep their key for as long as they hang."""
    free = [each.name for each in facts.tasks if each.policy.max_lease is None and facts.limit(each.task) is None]
    if free:
        return info(
            f"Nothing ends a process that hangs in {listed(free)}: it renews its lease and keeps its key for ever.",
            "app.conf.task_time_limit = 600 (or longer than your longest task), or a max_lease in the policy",
        )
    return ok("every task has a time limit or a max_lease")


def limits_not_enforced(facts: AppConfig) -> Finding | None:
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


def lease_ends_before_limit(facts: AppConfig) -> Finding:
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


def result_ttl_short(facts: AppConfig) -> Finding:
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


def failure_ttl_short(facts: AppConfig) -> Finding:
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


DURATION_CHECKS = (
    lease_short,
    lease_long,
    lease_unbounded,
    limits_not_enforced,
    lease_ends_before_limit,
    result_ttl_short,
    failure_ttl_short,
)


def _read(facts: AppConfig) -> list[DeclaredTask]:
    return [each for each in facts.tasks if not each.task.ignore_result]


def result_backend_missing(facts: AppConfig) -> Finding:
    """See whether results go anywhere."""
    read = [each.name for each in _read(facts)]
    if read and isinstance(facts.app.backend, DisabledBackend):
        return info(
            f"There is no result backend, and {listed(read)} returns results: no caller can have them.",
            'app.conf.result_backend = "redis://host:6379/0", or app.conf.task_ignore_result = True',
        )
    return ok("results go to a backend, or are ignored")


def results_not_kept(facts: AppConfig) -> Finding:
    """Look for tasks whose duplicates have readers and get nothing to read."""
    bare = [each.name for each in _read(facts) if not each.policy.store_result]
    if bare and not isinstance(facts.app.backend, DisabledBackend):
        return info(
            f"store_result is off for {listed(bare)}: a duplicate that has a reader (a caller, a chain, a chord) fails "
            "with ResultUnavailable.",
            "ignore_result=True for the task if no caller reads it, else store_result=True",
        )
    return ok("duplicates find the results that are read")


def large_results_expire(facts: AppConfig) -> Finding:
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


RESULT_CHECKS = (result_backend_missing, results_not_kept, large_results_expire)

Address = tuple[str, str, int]
LOCAL = {"localhost", "::1", "0.0.0.0"}  # noqa: S104 - nothing is bound to it


def address(store: Any) -> Address | None:
    """Return host, port (or the path of a socket) and database of a store that is one Redis; None for any other."""
    pool = getattr(getattr(store, "_client", None), "connection_pool", None)
    if pool is None:
        return None
    options = pool.connection_kwargs
    named = getattr(pool, "service_name", "")
    host = str(named or options.get("path") or options.get("host") or "localhost")
    port = "" if named or options.get("path") else str(options.get("port") or 6379)
    return "127.0.0.1" if host in LOCAL else host, port, int(options.get("db") or 0)


def store_shared(facts: AppConfig) -> Finding | None:
    """See whether a flush of something else forgets operations.

    Raises:
        ConfigurationError: there is no store, or its URL is wrong.
    """
    places = {address(used.store) for used in used_stores(facts.app)} - {None}
    if not places:
        return None
    brokers = store_of_broker(facts.app) if facts.broker == "redis" else None
    others = {"the broker": brokers, "the result backend": store_of_backend(facts.app)}
    shared = {name: where for name, other in others.items() if (where := address(other)) in places and where}
    if shared:
        host, port, number = next(iter(shared.values()))
        return warning(
            f"A store is in the same Redis database as {' and '.join(shared)}: to flush it, or let it evict, "
            "forgets operations.",
            f'app.conf.idempotency_store = "redis://{host}:{port or 6379}/{number + 1}", or a server of its own',
        )
    return ok("no store shares a database with the broker or the result backend")


def store_unsaid(facts: AppConfig) -> Finding:
    """See whether the app names its store."""
    if not facts.conf.get("idempotency_store") and any(each.policy.store is None for each in facts.tasks):
        return info(
            "idempotency_store is not set: the store is the Redis of the result backend, or else of the broker, and "
            "moves with it.",
            'app.conf.idempotency_store = "redis://host:6379/1"',
        )
    return ok("the app names its store")


PLACE_CHECKS = (store_unsaid, store_shared)

CHECKS: tuple[Check, ...] = (
    *DECLARATION_CHECKS,
    *DURATION_CHECKS,
    *broker.VISIBILITY_CHECKS,
    *broker.BROKER_CHECKS,
    *RESULT_CHECKS,
    *PLACE_CHECKS,
)


@dataclass(frozen=True, slots=True)
class Checkup:
    """What was found of an app, and what else is to be examined.

    Arguments:
        section: What was found.
        stores: The stores that the app uses, as far as they are known.
        purged: Whether beat purges them.
    """

    section: Section
    stores: list[NamedStore]
    purged: bool


def checkup(app: Any, load: Callable[[], object] = lambda: None) -> Checkup:
    """Look at an app.

    Arguments:
        app: A Celery app.
        load: Imports the modules of its tasks.
    """
    section = Section(f"app {app.main or '(without a name)'}")
    try:
        load()
        facts = AppConfig(app)
        section.findings += run_checks(CHECKS, facts)
        stores = used_stores(app)
    except ConfigurationError as error:
        if not any(found.error for found in section.findings):
            section.findings.append(failed(error))
        return Checkup(section, _own_store(app), False)
    return Checkup(section, stores, any(entry["task"] == PURGE for entry in facts.scheduled.values()))


def _own_store(app: Any) -> list[NamedStore]:
    """Return the store that the app names, where its tasks do not let us see which they use."""
    wanted = app.conf.get("idempotency_store")
    if not wanted:
        return []
    try:
        store = store_of(app, wanted)
    except ConfigurationError:
        return []
    name = hide_password(wanted) if isinstance(wanted, str) else type(store).__name__
    return [NamedStore(name, store, (default_namespace(app, None),))]
