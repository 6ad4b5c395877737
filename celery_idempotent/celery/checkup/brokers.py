"""Whether the broker keeps messages, and hands each worker no more than it should."""

from __future__ import annotations

from ...doctor.finding import Finding, error, info, ok, warning
from .facts import Facts, listed

__all__ = ["CHECKS"]

#: Seconds of time limit from which on a task is long, and what RabbitMQ lets a message be held by default.
LONG, CONSUMER_TIMEOUT = 300.0, 1800.0


def broker_forgets(facts: Facts) -> Finding:
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


def redelivered_unknown(facts: Facts) -> Finding | None:
    """Say that SQS marks no message as handed out before."""
    if facts.broker != "sqs":
        return None
    return info(
        "SQS marks no message as handed out before. Idempotent tasks do not need it; plain tasks that ask for "
        "request.redelivered, and worker_deduplicate_successful_tasks, do.",
        "Make tasks whose effect must happen once idempotent.",
    )


def publishes_unconfirmed(facts: Facts) -> Finding | None:
    """See whether RabbitMQ answers a publish."""
    if facts.broker != "rabbitmq":
        return None
    if not facts.broker_options.get("confirm_publish"):
        return info(
            "RabbitMQ does not confirm what you publish: it may be lost in a connection that breaks, and nobody hears.",
            'app.conf.broker_transport_options = {"confirm_publish": True}',
        )
    return ok("publishes are confirmed")


def consumer_timeout(facts: Facts) -> Finding | None:
    """See whether RabbitMQ may close the channel under a long task, and what the worker does then."""
    if facts.broker != "rabbitmq":
        return None
    long = [each.name for each in facts.tasks if (facts.limit(each.task) or 0.0) > CONSUMER_TIMEOUT]
    if long and not facts.conf.get("broker_channel_error_retry"):
        return warning(
            f"{listed(long)} may run for longer than RabbitMQ lets a message be held (consumer_timeout, 1800 s unless "
            "the server says otherwise): the worker ends then.",
            "app.conf.broker_channel_error_retry = True, or consumer_timeout in rabbitmq.conf longer than the task",
        )
    return ok("no task outlives RabbitMQ's consumer_timeout, or the worker reconnects")


def prefetch_long(facts: Facts) -> Finding:
    """See whether messages wait behind long tasks."""
    multiplier = facts.conf.worker_prefetch_multiplier
    remedy = "app.conf.worker_prefetch_multiplier = 1"
    if multiplier == 0:
        return warning(
            "worker_prefetch_multiplier is 0: one worker takes the whole queue, and all of it comes again if it is "
            "killed.",
            remedy,
        )
    long = [each.name for each in facts.tasks if (facts.limit(each.task) or 0.0) >= LONG]
    if long and multiplier > 1:
        return info(
            f"worker_prefetch_multiplier is {multiplier}, and {listed(long)} may run for minutes: up to "
            f"{multiplier - 1} messages of each process wait behind them while other workers are idle.",
            remedy,
        )
    return ok(f"worker_prefetch_multiplier is {multiplier}")


def cancels_on_connection_loss(facts: Facts) -> Finding:
    """See whether a lost connection ends what runs well."""
    if facts.conf.get("worker_cancel_long_running_tasks_on_connection_loss"):
        return info(
            "worker_cancel_long_running_tasks_on_connection_loss is on: a lost connection ends tasks that run well. "
            "Without it their copies wait for them.",
            "app.conf.worker_cancel_long_running_tasks_on_connection_loss = False",
        )
    return ok("tasks outlive a lost connection")


def deduplicates_twice(facts: Facts) -> Finding:
    """See whether Celery's own look for duplicates is on."""
    if facts.conf.get("worker_deduplicate_successful_tasks"):
        return info(
            "worker_deduplicate_successful_tasks is on: it asks the result backend about each redelivery, which "
            "idempotent tasks do not need.",
            "app.conf.worker_deduplicate_successful_tasks = False, unless plain tasks rely on it",
        )
    return ok("worker_deduplicate_successful_tasks is off")


def runs_eagerly(facts: Facts) -> Finding:
    """See whether anything is published at all."""
    if facts.conf.task_always_eager:
        return error(
            "task_always_eager is on: tasks run where they are called, and no worker gets one.",
            "app.conf.task_always_eager = False, except in tests",
        )
    return ok("tasks are published")


CHECKS = (
    broker_forgets,
    redelivered_unknown,
    publishes_unconfirmed,
    consumer_timeout,
    prefetch_long,
    cancels_on_connection_loss,
    deduplicates_twice,
    runs_eagerly,
)
