# ruff: noqa: D103 - a check is documented by its name, its words where all is well, and its findings
"""Checks of the configuration of an app and its tasks, without a request to any server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from inspect import signature
from typing import Any

from celery.backends.base import DisabledBackend

from ...celery.app import PURGE, default_namespace, is_shared, store_of, store_of_backend, store_of_broker, used_stores
from ...celery.declarations import mistaken_key, mistaken_settings, unprotected
from ...celery.message import KEY_HEADER
from ...core import keys
from ...core.binding import BACKEND
from ...errors import ConfigurationError, IdempotencyError
from ...stores import hide_password
from ...stores.maintenance import NamedStore
from ...stores.memory import MemoryStore
from . import broker
from .app_config import AppConfig, DeclaredTask, shortest_interval
from .findings import (
    LONG,
    SHORT,
    Checks,
    Findings,
    Section,
    Target,
    error,
    failed,
    info,
    listed,
    ok,
    run_checks,
    warning,
)

#: Options of Celery's that keep a message beyond the failure of its task; the latter two since 5.7.
ACKS = ("acks_on_failure_or_timeout", "acks_on_failure", "acks_on_timeout")

CHECKS = Checks()


@CHECKS.add()
def nothing_idempotent(config: AppConfig) -> Findings:
    if not config.tasks:
        yield warning(
            "No task of the app is idempotent: nothing is protected, and nothing refreshed.",
            "@app.task(base=IdempotentTask), and let the app's imports or include name the modules of its tasks",
        )
    yield ok(f"{len(config.tasks)} idempotent task{'' if len(config.tasks) == 1 else 's'}")


@CHECKS.add("every task with idempotency options has the base class")
def base_missing(config: AppConfig) -> Findings:
    if found := dict(unprotected(config.app)):
        yield error(
            f"{listed(found)} ({listed(f'{name}=' for name in found.values())}) has idempotency options and not the "
            "base class: it is not protected at all.",
            "@app.task(base=IdempotentTask, idempotency={...})",
        )


@CHECKS.add("every idempotent task has the app's own class among its bases")
def app_class_left_out(config: AppConfig) -> Findings:
    for cls, method in config.own_methods.items():
        if without := [each.name for each in config.tasks if not isinstance(each.task, cls)]:
            yield warning(
                f"{cls.__name__}.{method} of the app's own task class is not called for {listed(without)}: base= has "
                "taken its place.",
                f"class Base({cls.__name__}, IdempotentTask): abstract = True, and base=Base. Where a factory makes "
                f"{cls.__name__}, derive that from IdempotentTask too, and leave base= out.",
            )


@CHECKS.add("every setting of idempotency is one")
def setting_unknown(config: AppConfig) -> Findings:
    if wrong := mistaken_settings(config.app):
        meant = [f"{name}: did you mean {near}?" if near else f"{name}: leave it out." for name, near in wrong.items()]
        yield error(f"Nothing reads {listed(wrong)}: it has no effect.", " ".join(meant))


@CHECKS.add("every task is idempotent")
def plain_tasks(config: AppConfig) -> Findings:
    if config.plain and config.tasks:
        yield info(
            f"Not idempotent: {listed(config.plain)}. Such a task runs as often as it is delivered.",
            "@app.task(base=IdempotentTask), where its effect must happen once",
        )


@CHECKS.add("messages are acked after their task")
def early_ack(config: AppConfig) -> Findings:
    if early := [each.name for each in config.tasks if not each.task.acks_late]:
        yield warning(
            f"acks_late is off for {listed(early)}: the message is gone before the task runs, and a killed worker "
            "loses it.",
            "Leave out acks_late=False and allow_early_ack.",
        )


@CHECKS.add("a task whose process is killed runs again")
def lost_child_fails(config: AppConfig) -> Findings:
    final = [
        each.name
        for each in config.tasks
        if each.task.acks_late
        and not each.task.reject_on_worker_lost
        and not getattr(each.task, "retry_on_worker_lost", False)
    ]
    if final:
        yield warning(
            f"reject_on_worker_lost is off for {listed(final)}: a process that is killed, as by the kernel for its "
            "memory, is taken for a failure, and the task does not run again.",
            "Leave out reject_on_worker_lost=False; max_crashes ends a task that kills its processes.",
        )


@CHECKS.add("the message of a failed task is acked")
def failure_not_acked(config: AppConfig) -> Findings:
    if off := {each.name: name for each in config.tasks for name in ACKS if getattr(each.task, name, None) is False}:
        yield info(
            f"{listed(off.values())} is off for {listed(off)}: the message of a task that fails is rejected, and one "
            "that hits its time limit runs again, up to max_crashes times.",
            f"Leave out {listed(off.values())}=False, unless a dead letter queue takes what is rejected.",
        )


@CHECKS.add("what beat publishes has a key of its own")
def beat_without_key(config: AppConfig) -> Findings:
    entries = [entry for entry in config.scheduled.values() if not (entry.get("options") or {}).get("task_id")]
    scheduled = {str(entry["task"]) for entry in entries}
    if unkeyed := [each.name for each in config.tasks if each.policy.key is None and each.name in scheduled]:
        yield info(
            f"The key of {listed(unkeyed)} is the task id, and beat publishes it: two beats, or a publish that is "
            "tried again, make two operations of it.",
            "Where that must not be, give it a key and a result_ttl of half its interval: "
            f'idempotency={{"key": lambda: "{unkeyed[0]}", "result_ttl": ...}}',
        )


@CHECKS.add("no entry of beat has one key for several runs")
def beat_key_fixed(config: AppConfig) -> Findings:
    for name, each, key, seconds in _fixed(config):
        by_option = key in (f"{KEY_HEADER}=", "task_id=")
        computed = callable(each.policy.key) and not by_option
        what = (
            f"The beat entry {name!r} publishes {each.name} every {seconds:g} s with the same key ({key}), which is "
            f"remembered for {each.policy.result_ttl:g} s: the runs between are answered with the result of the first."
        )
        option = '"key": ..., ' if computed or by_option else f'"key": {_written(each.policy.key)}, '
        remedy = (
            f'idempotency={{{option}"result_ttl": {seconds / 2:g}}}, half the interval; or leave '
            f"{key if by_option else 'the key'} out, so that each message is an operation of its own"
        )
        if computed:
            yield warning(f"{what} Unless its key function looks at more than its arguments.", remedy)
        yield error(what, remedy)


def _fixed(config: AppConfig) -> Iterator[tuple[str, DeclaredTask, str, float]]:
    """Yield entries whose key is remembered for longer than their interval: name, task, key, interval in seconds."""
    tasks = {each.name: each for each in config.tasks}
    for name, entry in config.scheduled.items():
        each = tasks.get(str(entry["task"]))
        key = _fixed_key(each, entry) if each else ""
        seconds = shortest_interval(entry.get("schedule"), config.app) if key else None
        # A record that was made by one tick of the clock is still there at the tick that comes as long after it.
        if each and seconds is not None and seconds <= each.policy.result_ttl:
            yield name, each, key, seconds


def _fixed_key(each: DeclaredTask, entry: dict[str, Any]) -> str:
    """Return what fixes the key of all messages of an entry; "" if nothing does, or they do not fit the task."""
    policy, binding = each.policy, each.task._binding
    options = entry.get("options") or {}
    if options.get(KEY_HEADER) is not None:
        return f"{KEY_HEADER}="
    if policy.key is None and options.get("task_id"):  # which is the key then
        return "task_id="
    if policy.key is None or (callable(policy.key) and not signature(policy.key).parameters):
        return ""  # without arguments it must look at something else, as the clock
    try:
        arguments = keys.bind(binding.signature, entry.get("args") or (), entry.get("kwargs") or {})
        one, other = (keys.resolve(policy.key, arguments) for _ in range(2))
    except (IdempotencyError, TypeError):
        return ""
    return repr(one) if one == other else ""


def _written(key: object) -> str:
    return f'"{key}"' if isinstance(key, str) else repr(key)


@CHECKS.add("the options of beat's entries are Celery's or idempotency_key")
def beat_option_unknown(config: AppConfig) -> Findings:
    for name, entry in config.scheduled.items():
        wrong = mistaken_key(entry.get("options") or {})
        if wrong:
            yield error(
                f"The beat entry {name!r} has an option that nothing reads: {wrong}", f"{KEY_HEADER}=, or no key"
            )


@CHECKS.add("no task runs without its lease")
def runs_unprotected(config: AppConfig) -> Findings:
    if bold := [each.name for each in config.tasks if each.policy.on_store_error == "run"]:
        yield info(
            f"on_store_error is run for {listed(bold)}: while the store is down a duplicate runs again.",
            'idempotency={"on_store_error": "wait"}, where that must not be',
        )


GOOD = '"lease_ttl": "30s"'


@CHECKS.add("no lease is shorter than 5 s")
def lease_short(config: AppConfig) -> Findings:
    if short := [each for each in config.tasks if each.policy.lease_ttl < SHORT]:
        least = min(each.policy.lease_ttl for each in short)
        yield warning(
            f"lease_ttl is {least:g} s ({listed(each.name for each in short)}): a process that pauses for longer loses "
            "its lease though it is well, and a duplicate runs beside it.",
            f"idempotency={{{GOOD}}}",
        )


@CHECKS.add("no lease is longer than 10 min")
def lease_long(config: AppConfig) -> Findings:
    if long := [each for each in config.tasks if each.policy.lease_ttl > LONG]:
        most = max(each.policy.lease_ttl for each in long)
        yield warning(
            f"lease_ttl is {most:g} s ({listed(each.name for each in long)}): for so long the task of a dead worker "
            "waits. It need not be as long as the task runs, since leases are renewed.",
            f"idempotency={{{GOOD}}}",
        )


@CHECKS.add("every task has a time limit or a max_lease")
def lease_unbounded(config: AppConfig) -> Findings:
    free = [each.name for each in config.tasks if each.policy.max_lease is None and config.limit(each.task) is None]
    if free:
        yield info(
            f"Nothing ends a process that hangs in {listed(free)}: it renews its lease and keeps its key for ever.",
            "app.conf.task_time_limit = 600 (or longer than your longest task), or a max_lease in the policy",
        )


@CHECKS.add()
def limits_not_enforced(config: AppConfig) -> Findings:
    pool = str(config.conf.worker_pool)
    if pool == "prefork":
        yield ok("the pool ends what runs into its time limit")
    if limited := [each.name for each in config.tasks if each.policy.max_lease is None and config.limit(each.task)]:
        yield info(
            f"A pool of {pool} ends no body at its time limit ({listed(limited)}): one that hangs keeps its key for "
            "ever.",
            'idempotency={"max_lease": 900} (or longer than your longest task)',
        )


@CHECKS.add("no lease ends before its task's time limit")
def lease_ends_before_limit(config: AppConfig) -> Findings:
    early = [
        (each, limit)
        for each in config.tasks
        if each.policy.max_lease and (limit := config.limit(each.task)) and each.policy.max_lease < limit
    ]
    if early:
        most = max(limit for _, limit in early)
        yield warning(
            f"max_lease is shorter than the time limit ({listed(each.name for each, _ in early)}): a task that runs "
            "longer than its lease is overtaken by a duplicate.",
            f'idempotency={{"max_lease": {most + 60:g}}}, or leave it out: it is the time limit + 60 s then',
        )


@CHECKS.add("results are remembered for longer than duplicates are known to be late")
def result_ttl_short(config: AppConfig) -> Findings:
    what, wait = config.longest_wait
    latest = max(wait, config.visibility)
    source = what if wait > config.visibility else "the visibility_timeout of the broker"
    if short := [each for each in config.tasks if 0 < each.policy.result_ttl < latest]:
        least = min(each.policy.result_ttl for each in short)
        yield error(
            f"result_ttl is {least:g} s ({listed(each.name for each in short)}), and a duplicate may come {latest:g} s "
            f"late ({source}): it is not recognised, and runs again.",
            'idempotency={"result_ttl": "24h"}',
        )


@CHECKS.add("operations that take turns share a key")
def turns_without_key(config: AppConfig) -> Findings:
    if unkeyed := [each.name for each in config.tasks if each.policy.key is None and not each.policy.result_ttl]:
        yield warning(
            f"{listed(unkeyed)} has result_ttl=0 and no key: each message is an operation of its own, and none waits "
            "for another, unless its producer gives an idempotency_key.",
            'idempotency={"key": "customer_id", "result_ttl": 0}, or "key": lambda: "one" for the task as a whole',
        )


@CHECKS.add("reservations of unique tasks are shared")
def unique_not_shared(config: AppConfig) -> Findings:
    unique = [each for each in config.tasks if each.is_unique]
    if alone := [each.name for each in unique if isinstance(each.task._binding.guard.store, MemoryStore)]:
        yield error(
            f"{listed(alone)} is unique, and its store is the memory of one process: every call is published.",
            'app.conf.idempotency_store = "redis://..."',
        )


@CHECKS.add("unique tasks do not expire")
def unique_expires(config: AppConfig) -> Findings:
    entries = config.scheduled.values()
    expiring = {str(entry["task"]) for entry in entries if (entry.get("options") or {}).get("expires")}
    if brief := [e.name for e in config.tasks if e.is_unique and (e.task.expires or e.name in expiring)]:
        yield info(
            f"{listed(brief)} is unique and has expires: each call would expire later than the message that waits, and "
            "so is published.",
            "Leave expires out; a call that is skipped adds nothing to a queue that is not worked off.",
        )


@CHECKS.add("crashes are remembered until the message comes again")
def failure_ttl_short(config: AppConfig) -> Findings:
    if short := [each for each in config.tasks if each.policy.failure_ttl < config.visibility]:
        least = min(each.policy.failure_ttl for each in short)
        yield warning(
            f"failure_ttl is {least:g} s ({listed(each.name for each in short)}), and a dead worker's message comes "
            f"again after {config.visibility:g} s: its crash is forgotten by then, and max_crashes never reached.",
            'idempotency={"failure_ttl": "24h"}',
        )


CHECKS += broker.CHECKS


def _read(config: AppConfig) -> list[DeclaredTask]:
    return [each for each in config.tasks if not each.task.ignore_result]


@CHECKS.add("results go to a backend, or are ignored")
def result_backend_missing(config: AppConfig) -> Findings:
    read = [each.name for each in _read(config)]
    if read and isinstance(config.app.backend, DisabledBackend):
        yield info(
            f"There is no result backend: no caller can have the results of {listed(read)}.",
            'app.conf.result_backend = "redis://host:6379/0", or app.conf.task_ignore_result = True',
        )


@CHECKS.add("duplicates find the results that are read")
def results_not_kept(config: AppConfig) -> Findings:
    bare = [each.name for each in _read(config) if not each.policy.store_result]
    if bare and not isinstance(config.app.backend, DisabledBackend):
        yield info(
            f"store_result is off for {listed(bare)}: a duplicate that has a reader (a caller, a chain, a chord) fails "
            "with ResultUnavailable.",
            "ignore_result=True for the task if no caller reads it, else store_result=True",
        )


@CHECKS.add("large results are kept as long as their records")
def large_results_expire(config: AppConfig) -> Findings:
    large = [each for each in config.tasks if each.policy.large_results == BACKEND]
    if any(not is_shared(each.task.backend) for each in large):
        yield error(
            f'large_results is "backend" for {listed(each.name for each in large)}, and no result backend keeps them: '
            "duplicates fail with ResultUnavailable.",
            'app.conf.result_backend = "redis://host:6379/0"',
        )
    expires = config.result_expires
    early = [each for each in large if expires is not None and each.policy.result_ttl > expires]
    if early and expires is not None:
        most = max(each.policy.result_ttl for each in early)
        yield warning(
            f"result_expires is {expires:g} s, and the records of {listed(each.name for each in early)} are kept for "
            f"{most:g} s: a duplicate in between fails with ResultUnavailable if the result is large.",
            f"app.conf.result_expires = {most:g}",
        )


Address = tuple[str, str, int]
#: Options of a connection over TLS that a URL has.
CERTIFICATES = ("ssl_cert_reqs", "ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
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


def beside(store: Any) -> str:
    """Return a URL of another database on the server of such a store; no password is in it."""
    import redis

    host, port, number = address(store) or ("", "", 0)
    pool = store._client.connection_pool
    options, secure = pool.connection_kwargs, issubclass(pool.connection_class, redis.SSLConnection)
    scheme = "rediss" if secure else "redis"
    if options.get("path"):
        return f"unix://{host}?db={number + 1}"
    if not port:
        return f"{scheme}+sentinel://sentinel/{host}/{number + 1}"
    given = {name: options[name] for name in CERTIFICATES if options.get(name) is not None}
    tls = "&".join(f"{name}={getattr(value, 'name', value)}" for name, value in given.items())  # of ssl.CERT_NONE
    return f"{scheme}://{host}:{port}/{number + 1}{'?' if tls else ''}{tls}"


@CHECKS.add("the app names its store")
def store_unsaid(config: AppConfig) -> Findings:
    if not config.conf.get("idempotency_store") and any(each.policy.store is None for each in config.tasks):
        yield info(
            "idempotency_store is not set: the store is the Redis of the result backend, or else of the broker, and "
            "moves with it.",
            'app.conf.idempotency_store = "redis://host:6379/1"',
        )


@CHECKS.add()
def store_shared(config: AppConfig) -> Findings:
    places = {address(used.store) for used in used_stores(config.app)} - {None}
    if not places:
        return
    brokers = store_of_broker(config.app) if config.broker == "redis" else None
    others = {"the broker": brokers, "the result backend": store_of_backend(config.app)}
    if shared := [name for name, other in others.items() if address(other) in places]:
        yield warning(
            f"A store is in the same Redis database as {' and '.join(shared)}: to flush it, or let it evict, "
            "forgets operations.",
            f'app.conf.idempotency_store = "{beside(others[shared[0]])}", or a server of its own',
        )
    yield ok("no store shares a database with the broker or the result backend")


def checkup(app: Any, load: Callable[[], object] = lambda: None) -> tuple[Section, list[Target]]:
    """Check an app.

    Arguments:
        app: A Celery app.
        load: Imports the modules of its tasks.

    Returns:
        What was found, and the stores that the app uses as far as its configuration shows them.
    """
    section, messages = Section(f"app {app.main or '(without a name)'}"), None
    try:
        load()
        config = AppConfig(app)
        section.findings += run_checks(CHECKS, config)
        stores, purged = used_stores(app), any(entry["task"] == PURGE for entry in config.scheduled.values())
        if config.broker == "redis" and any(each.is_unique for each in config.tasks):
            messages = partial(broker.messages, app)
    except ConfigurationError as error:
        if not any(found.error for found in section.findings):
            section.findings.append(failed(error))
        stores, purged = _own_store(app), False
    return section, [Target(used.store, used.name, used.namespaces[0], purged, messages) for used in stores]


def _own_store(app: Any) -> list[NamedStore]:
    """Return the store that the app names, where its tasks do not show which they use."""
    wanted = app.conf.get("idempotency_store")
    if not wanted:
        return []
    try:
        store = store_of(app, wanted)
    except ConfigurationError:
        return []
    name = hide_password(wanted) if isinstance(wanted, str) else type(store).__name__
    return [NamedStore(name, store, (default_namespace(app, None),))]
