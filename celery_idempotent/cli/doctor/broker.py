"""Checks of the broker: whether it keeps messages, how many it hands out, and when it hands them out again."""

from __future__ import annotations

from math import ceil

from .app_config import HOUR, AppConfig, listed
from .findings import Finding, error, info, ok, warning

#: Seconds of time limit from which on a task is long, and what RabbitMQ lets a message be held by default.
LONG_LIMIT, CONSUMER_TIMEOUT = 300.0, 1800.0


def broker_forgets(facts: AppConfig) -> Finding:
    """See whether the broker keeps what a killed worker held."""
    if facts.broker == "memory":
        return warning(
            "The broker is the memory of one process: no worker of another process gets a task, and all end with it.",
            'app.conf.broker_url = "redis://host:6379/0"',
        )
    if facts.broker == "filesystem":
        return warning(
            "The broker is a folder, which forgets what a worker held that was killed: nothing runs again.",
            'app.conf.broker_url = "redis://host:6379/0"',
        )
    return ok(f"the broker is {facts.broker}")


def redelivered_unknown(facts: AppConfig) -> Finding | None:
    """Report that SQS marks no message as handed out before."""
    if facts.broker != "sqs":
        return None
    return info(
        "SQS marks no message as handed out before. Idempotent tasks do not need it; plain tasks that read "
        "request.redelivered, and worker_deduplicate_successful_tasks, do.",
        "Make tasks whose effect must happen once idempotent.",
    )


def publishes_unconfirmed(facts: AppConfig) -> Finding | None:
    """See whether RabbitMQ answers a publish."""
    if facts.broker != "rabbitmq":
        return None
    if not facts.broker_options.get("confirm_publish"):
        return info(
            "RabbitMQ does not confirm what you publish: a message may be lost unnoticed in a connection that breaks.",
            'app.conf.broker_transport_options = {"confirm_publish": True}',
        )
    return ok("publishes are confirmed")


def consumer_timeout(facts: AppConfig) -> Finding | None:
    """See whether RabbitMQ may close the channel under a long task, and what the worker does then."""
    if facts.broker != "rabbitmq":
        return None
    long = [each.name for each in facts.tasks if (facts.limit(each.task) or 0.0) > CONSUMER_TIMEOUT]
    if long and not facts.conf.get("broker_channel_error_retry"):
        return warning(
            f"{listed(long)} may run for longer than RabbitMQ lets a message be held (consumer_timeout, 1800 s by "
            "default): the worker ends then.",
            "app.conf.broker_channel_error_retry = True, or consumer_timeout in rabbitmq.conf longer than the task",
        )
    return ok("no task outlives RabbitMQ's consumer_timeout, or the worker reconnects")


def prefetch_long(facts: AppConfig) -> Finding:
    """See whether messages wait behind long tasks."""
    multiplier = facts.conf.worker_prefetch_multiplier
    remedy = "app.conf.worker_prefetch_multiplier = 1"
    if multiplier == 0:
        return warning(
            "worker_prefetch_multiplier is 0: one worker takes the whole queue, and all of it comes again if it is "
            "killed.",
            remedy,
        )
    long = [each.name for each in facts.tasks if (facts.limit(each.task) or 0.0) >= LONG_LIMIT]
    if long and multiplier > 1:
        return info(
            f"worker_prefetch_multiplier is {multiplier}, and {listed(long)} may run for minutes: up to "
            f"{multiplier - 1} messages of each process wait behind them while other workers are idle.",
            remedy,
        )
    return ok(f"worker_prefetch_multiplier is {multiplier}")


def cancels_on_connection_loss(facts: AppConfig) -> Finding:
    """See whether a lost connection ends what runs well."""
    if facts.conf.get("worker_cancel_long_running_tasks_on_connection_loss"):
        return info(
            "worker_cancel_long_running_tasks_on_connection_loss is on: a lost connection ends tasks that run well. "
            "Without it their copies wait for them.",
            "app.conf.worker_cancel_long_running_tasks_on_connection_loss = False",
        )
    return ok("tasks outlive a lost connection")


def deduplicates_twice(facts: AppConfig) -> Finding:
    """See whether Celery's own look for duplicates is on."""
    if facts.conf.get("worker_deduplicate_successful_tasks"):
        return info(
            "worker_deduplicate_successful_tasks is on: it reads the result backend for each redelivery, which "
            "idempotent tasks do not need.",
            "app.conf.worker_deduplicate_successful_tasks = False, unless plain tasks rely on it",
        )
    return ok("worker_deduplicate_successful_tasks is off")


def runs_eagerly(facts: AppConfig) -> Finding:
    """See whether anything is published at all."""
    if facts.conf.task_always_eager:
        return error(
            "task_always_eager is on: tasks run where they are called, and no worker gets one.",
            "app.conf.task_always_eager = False, except in tests",
        )
    return ok("tasks are published")


BROKER_CHECKS = (
    broker_forgets,
    redelivered_unknown,
    publishes_unconfirmed,
    consumer_timeout,
    prefetch_long,
    cancels_on_connection_loss,
    deduplicates_twice,
    runs_eagerly,
)

#: Seconds below which a stall is enough to lose messages, and above which a dead worker's are missed.
SHORT_TIMEOUT, LONG_TIMEOUT = 10.0, 600.0
#: The most that SQS takes.
SQS_MOST = 12 * HOUR
#: kombu's own, which can be set since 5.7: a look every so many seconds, times so many.
INTERVAL, THROTTLE = 10, 10
#: Pools whose workers have no time to look, with our step and without it: a busy solo worker looks for nothing.
SELDOM_LOOKING = {True: {"solo"}, False: {"gevent", "eventlet", "solo"}}
#: Seconds between two looks from which on there is a finding, where the timeout itself is short.
SELDOM = 60
GOOD = 'app.conf.broker_transport_options = {"visibility_timeout": 30}'
OFTEN = GOOD.replace("}", ', "unacked_restore_interval": 5, "unacked_restore_throttle": 1}')


def _longer(seconds: float) -> str:
    rounded = ceil(seconds * 1.2 / 60) * 60
    return f'app.conf.broker_transport_options = {{"visibility_timeout": {min(rounded, int(SQS_MOST))}}}'


def visibility_long(facts: AppConfig) -> Finding | None:
    """See how long the task of a killed worker is missed."""
    if not facts.refreshed or facts.visibility is None:
        return None
    if facts.visibility > LONG_TIMEOUT:
        return warning(
            f"visibility_timeout is {facts.visibility:g} s: so long it takes until the task of a killed worker is "
            "delivered again. Our workers refresh it, so that a short one is safe.",
            f"{GOOD}, where every worker of the broker's database is of an app with idempotent tasks",
        )
    return ok(f"visibility_timeout is {facts.visibility:g} s, and refreshed")


def visibility_short(facts: AppConfig) -> Finding | None:
    """See whether a stall is enough to have messages handed out again."""
    if facts.visibility is None:
        return None
    if facts.visibility < SHORT_TIMEOUT:
        return warning(
            f"visibility_timeout is {facts.visibility:g} s: a machine that pauses for most of it is taken for dead, "
            "and what it holds is handed out again.",
            'app.conf.broker_transport_options = {"visibility_timeout": 30}',
        )
    return ok("visibility_timeout outlasts a stall")


def visibility_shorter_than_eta(facts: AppConfig) -> Finding | None:
    """See whether what waits for its time is handed out again while it waits."""
    if facts.visibility is None or facts.refreshed:
        return None
    what, wait = facts.longest_wait
    if wait > facts.visibility:
        return warning(
            f"visibility_timeout is {facts.visibility:g} s, and {what} waits {wait:g} s: each timeout makes one more "
            "copy. Idempotent tasks defer it, plain ones run it.",
            _longer(wait),
        )
    return ok("visibility_timeout is longer than every countdown that is known")


def visibility_shorter_than_tasks(facts: AppConfig) -> Finding | None:
    """See whether what runs is handed out again while it runs."""
    if facts.visibility is None or facts.refreshed:
        return None
    long = {each.name: limit for each in facts.tasks if (limit := facts.limit(each.task) or 0.0) > facts.visibility}
    if long:
        most = max(long.values())
        return warning(
            f"visibility_timeout is {facts.visibility:g} s, and {listed(long)} may run for {most:g} s: each timeout "
            "makes one more copy, which waits.",
            _longer(most),
        )
    return ok("visibility_timeout is longer than every time limit")


def visibility_not_refreshed(facts: AppConfig) -> Finding | None:
    """See whether the refresh is switched off."""
    if facts.broker != "redis" or facts.refreshed:
        return None
    return info(
        "idempotency_visibility_refresh is off: what runs or waits for longer than the visibility_timeout is handed "
        "out again.",
        "app.conf.idempotency_visibility_refresh = True",
    )


def soft_shutdown_long(facts: AppConfig) -> Finding | None:
    """See whether a worker that stops lets the timeout pass."""
    soft = float(facts.conf.get("worker_soft_shutdown_timeout") or 0.0)
    if not facts.refreshed or facts.visibility is None or not soft:
        return None
    if soft >= facts.visibility:
        return warning(
            f"worker_soft_shutdown_timeout is {soft:g} s, in which nothing is refreshed, and visibility_timeout "
            f"{facts.visibility:g} s: what a stopping worker still runs is handed out again.",
            f"app.conf.worker_soft_shutdown_timeout = {facts.visibility / 2:g}",
        )
    return ok("worker_soft_shutdown_timeout is shorter than the visibility_timeout")


def restore_seldom(facts: AppConfig) -> Finding | None:
    """See how often a worker looks for what timed out."""
    if facts.broker != "redis" or facts.visibility is None or facts.refreshed:  # its step looks every second
        return None
    options = facts.broker_options
    every = float(options.get("unacked_restore_interval", INTERVAL)) * options.get("unacked_restore_throttle", THROTTLE)
    if every > SELDOM and facts.visibility <= SELDOM:
        return info(
            f"Workers look every {every:g} s for what timed out after {facts.visibility:g} s.",
            f"{OFTEN} (kombu 5.7 or newer)",
        )
    return ok(f"workers look every {every:g} s for what timed out")


def nobody_restores(facts: AppConfig) -> Finding | None:
    """See whether a worker of this pool looks for what timed out."""
    if facts.broker != "redis":
        return None
    pool = str(facts.conf.worker_pool)
    if pool in SELDOM_LOOKING[facts.refreshed]:
        return warning(
            f"worker_pool is {pool}: such workers hardly ever look for what timed out, and the task of a killed worker "
            "may stay where it is.",
            "Run one prefork or threads worker on the broker's database: celery -A proj worker --pool prefork -c 1",
        )
    return ok(f"workers of the pool {pool} look for what timed out")


def sqs_visibility(facts: AppConfig) -> Finding | None:
    """See whether SQS and kombu know the same timeout."""
    if facts.broker != "sqs" or facts.visibility is None:
        return None
    if facts.visibility > SQS_MOST:
        return error(
            f"visibility_timeout is {facts.visibility:g} s, and SQS takes 43200 s (12 h) at most.",
            'app.conf.broker_transport_options = {"visibility_timeout": 43200}',
        )
    if "visibility_timeout" not in facts.broker_options:
        return warning(
            "visibility_timeout is not set, and 1800 s are assumed: if the queue has less, copies wait too long in "
            "flight and come again.",
            'app.conf.broker_transport_options = {"visibility_timeout": ...}  # what the queue has',
        )
    return ok("visibility_timeout is set")


VISIBILITY_CHECKS = (
    visibility_long,
    visibility_short,
    visibility_shorter_than_eta,
    visibility_shorter_than_tasks,
    visibility_not_refreshed,
    soft_shutdown_long,
    restore_seldom,
    nobody_restores,
    sqs_visibility,
)
