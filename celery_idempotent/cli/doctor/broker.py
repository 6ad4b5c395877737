# ruff: noqa: D103 - a check is documented by its name, its words where all is well, and its findings
"""Checks of the broker: whether it keeps messages, how many it hands out, and when it hands them out again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import ceil
from typing import Any

from .app_config import ASSUMED, HOUR, AppConfig
from .findings import Checks, Findings, error, info, listed, ok, warning

CHECKS = Checks()
#: Messages of a Redis broker that are read at most, and with one command.
MOST, CHUNK = 50_000, 500
#: Seconds below which a stall is enough to lose messages, and above which a dead worker's are missed.
SHORT_TIMEOUT, LONG_TIMEOUT = 10.0, 600.0
#: The most that SQS takes.
SQS_MOST = 12 * HOUR
#: kombu's own, which can be set since 5.7: a look every so many seconds, times so many.
INTERVAL, THROTTLE = 10, 10
#: Pools whose workers have no time to look, with the refresh and without it: a busy solo worker looks for nothing.
SELDOM_LOOKING = {True: {"solo"}, False: {"gevent", "eventlet", "solo"}}
#: Seconds between two looks from which on there is a finding, where the timeout itself is short.
SELDOM = 60
GOOD = {"visibility_timeout": 30}
OFTEN = {**GOOD, "unacked_restore_interval": 5, "unacked_restore_throttle": 1}


def messages(app: Any, queues: set[str]) -> set[str] | None:
    """Return the task ids of the messages that a Redis broker has, waiting and handed out; None if it has too many.

    Arguments:
        app: The app.
        queues: The queues to read.
    """
    with app.connection_for_read() as connection:
        channel = connection.default_channel
        with channel.conn_or_acquire() as client:
            lists = [channel._q_for_pri(queue, step) for queue in queues for step in channel.priority_steps]
            if client.hlen(channel.unacked_key) + sum(client.llen(name) for name in lists) > MOST:
                return None
            found = set()
            for name in lists:
                for start in range(0, MOST, CHUNK):
                    chunk = client.lrange(_named(client, "LRANGE", name), start, start + CHUNK - 1)
                    found |= {_task_id(json.loads(text)) for text in chunk}
                    if len(chunk) < CHUNK:
                        break
            # After the queues: what is handed out meanwhile is seen here.
            handed_out = client.hvals(_named(client, "HVALS", channel.unacked_key))
            found |= {_task_id(json.loads(text)[0]) for text in handed_out}
            return found


def _named(client: Any, command: str, key: str) -> str:
    """Return a key as a command needs it: the client puts `global_keyprefix` before those of kombu's own commands."""
    prefixed = command in getattr(client, "PREFIXED_SIMPLE_COMMANDS", ())
    return key if prefixed else f"{getattr(client, 'global_keyprefix', '')}{key}"


def _task_id(message: Any) -> str:
    return str((message.get("headers") or {}).get("id"))


def _times_out(config: AppConfig) -> bool:
    return config.broker in ASSUMED and not config.refreshed


def _with(config: AppConfig, options: Mapping[str, object]) -> str:
    """Return how to set options of the broker beside those that the app has: without its prefix it loses its queues."""
    others = set(config.conf.get("broker_transport_options") or {}) - set(options)
    written = [*(["**app.conf.broker_transport_options"] if others else []), *map(_entry, options.items())]
    return f"app.conf.broker_transport_options = {{{', '.join(written)}}}"


def _entry(item: tuple[str, object]) -> str:
    return f'"{item[0]}": {item[1]}'


def _longer(config: AppConfig, seconds: float) -> str:
    rounded = ceil(seconds * 1.2 / 60) * 60
    return _with(config, {"visibility_timeout": min(rounded, int(SQS_MOST))})


@CHECKS.add(when=lambda config: config.refreshed)
def visibility_long(config: AppConfig) -> Findings:
    if config.visibility > LONG_TIMEOUT:
        yield warning(
            f"visibility_timeout is {config.visibility:g} s: so long it takes until the task of a killed worker is "
            "delivered again. Workers with idempotent tasks refresh it, so that a short one is safe.",
            f"{_with(config, GOOD)}, where every worker of the broker's database is of an app with idempotent tasks",
        )
    yield ok(f"visibility_timeout is {config.visibility:g} s, and refreshed")


@CHECKS.add("visibility_timeout outlasts a stall", when=lambda config: config.broker in ASSUMED)
def visibility_short(config: AppConfig) -> Findings:
    if config.visibility < SHORT_TIMEOUT:
        yield warning(
            f"visibility_timeout is {config.visibility:g} s: a machine that pauses for most of it is taken for dead, "
            "and what it holds is handed out again.",
            _with(config, GOOD),
        )


@CHECKS.add("visibility_timeout is longer than every countdown that is known", when=_times_out)
def visibility_shorter_than_eta(config: AppConfig) -> Findings:
    what, wait = config.longest_wait
    if wait > config.visibility:
        yield warning(
            f"visibility_timeout is {config.visibility:g} s, and {what} waits {wait:g} s: each timeout makes one more "
            "copy. Idempotent tasks defer it, plain ones run it.",
            _longer(config, wait),
        )


@CHECKS.add("visibility_timeout is longer than every time limit", when=_times_out)
def visibility_shorter_than_tasks(config: AppConfig) -> Findings:
    long = {each.name: limit for each in config.tasks if (limit := config.limit(each.task) or 0.0) > config.visibility}
    if long:
        most = max(long.values())
        yield warning(
            f"visibility_timeout is {config.visibility:g} s, and {listed(long)} may run for {most:g} s: each timeout "
            "makes one more copy, which waits.",
            _longer(config, most),
        )


@CHECKS.add(when=lambda config: config.broker == "redis" and not config.refreshed)
def visibility_not_refreshed(config: AppConfig) -> Findings:
    yield info(
        "idempotency_visibility_refresh is off: what runs or waits for longer than the visibility_timeout is handed "
        "out again.",
        "app.conf.idempotency_visibility_refresh = True",
    )


@CHECKS.add(
    "worker_soft_shutdown_timeout is shorter than the visibility_timeout",
    when=lambda config: config.refreshed and config.conf.get("worker_soft_shutdown_timeout"),
)
def soft_shutdown_long(config: AppConfig) -> Findings:
    soft = float(config.conf.worker_soft_shutdown_timeout)
    if soft >= config.visibility:
        yield warning(
            f"worker_soft_shutdown_timeout is {soft:g} s, in which nothing is refreshed, and visibility_timeout "
            f"{config.visibility:g} s: what a stopping worker still runs is handed out again.",
            f"app.conf.worker_soft_shutdown_timeout = {config.visibility / 2:g}",
        )


@CHECKS.add(when=lambda config: config.broker == "redis" and not config.refreshed)
def restore_seldom(config: AppConfig) -> Findings:
    options = config.broker_options
    every = float(options.get("unacked_restore_interval", INTERVAL)) * options.get("unacked_restore_throttle", THROTTLE)
    if every > SELDOM and config.visibility <= SELDOM:
        yield info(
            f"Workers look every {every:g} s for what timed out after {config.visibility:g} s.",
            f"{_with(config, OFTEN)} (kombu 5.7 or newer)",
        )
    yield ok(f"workers look every {every:g} s for what timed out")


@CHECKS.add(when=lambda config: config.broker == "redis")
def nobody_restores(config: AppConfig) -> Findings:
    pool = str(config.conf.worker_pool)
    if pool in SELDOM_LOOKING[config.refreshed]:
        yield warning(
            f"worker_pool is {pool}: such workers hardly ever look for what timed out, and the task of a killed worker "
            "may stay where it is.",
            "Run one prefork or threads worker on the broker's database: celery -A proj worker --pool prefork -c 1",
        )
    yield ok(f"workers of the pool {pool} look for what timed out")


@CHECKS.add("visibility_timeout is set", when=lambda config: config.broker == "sqs")
def sqs_visibility(config: AppConfig) -> Findings:
    if config.visibility > SQS_MOST:
        yield error(
            f"visibility_timeout is {config.visibility:g} s, and SQS takes 43200 s (12 h) at most.",
            _with(config, {"visibility_timeout": int(SQS_MOST)}),
        )
    if "visibility_timeout" not in config.broker_options:
        yield warning(
            "visibility_timeout is not set, and 1800 s are assumed: if the queue has less, copies wait too long in "
            "flight and come again.",
            f"{_with(config, {'visibility_timeout': '...'})}  # what the queue has",
        )


#: Seconds of time limit from which on a task is long, and what RabbitMQ lets a message be held by default.
LONG_LIMIT, CONSUMER_TIMEOUT = 300.0, 1800.0
#: Brokers out of which kombu takes a message as it hands it out, by its names; of Kafka, it acks all with the first.
FORGETFUL = {
    "azurestoragequeues": "Azure Queue Storage",
    "confluentkafka": "Kafka",
    "consul": "Consul",
    "etcd": "etcd",
    "filesystem": "a folder",
    "kafka": "Kafka",
    "mongodb": "MongoDB",
    "pyro": "Pyro",
    "sqlalchemy": "a SQL database",
    "zookeeper": "ZooKeeper",
}


@CHECKS.add()
def broker_forgets(config: AppConfig) -> Findings:
    if config.broker == "memory":
        yield warning(
            "The broker is the memory of one process: no worker of another process gets a task, and all end with it.",
            'app.conf.broker_url = "redis://host:6379/0"',
        )
    if config.broker in FORGETFUL:
        yield warning(
            f"The broker is {FORGETFUL[config.broker]}, where kombu loses what a worker held that was killed: it never "
            "runs again.",
            'app.conf.broker_url = "redis://host:6379/0"',
        )
    yield ok(f"the broker is {config.broker}")


@CHECKS.add(when=lambda config: config.broker == "sqs")
def redelivered_unknown(config: AppConfig) -> Findings:
    yield info(
        "SQS marks no message as handed out before. Idempotent tasks do not need it; plain tasks that read "
        "request.redelivered, and worker_deduplicate_successful_tasks, do.",
        "Make tasks whose effect must happen once idempotent.",
    )


@CHECKS.add("publishes are confirmed", when=lambda config: config.broker == "rabbitmq")
def publishes_unconfirmed(config: AppConfig) -> Findings:
    if not config.broker_options.get("confirm_publish"):
        yield info(
            "RabbitMQ does not confirm what you publish: a message may be lost unnoticed in a connection that breaks.",
            _with(config, {"confirm_publish": True}),
        )


@CHECKS.add(
    "no task outlives RabbitMQ's consumer_timeout, or the worker reconnects",
    when=lambda config: config.broker == "rabbitmq",
)
def consumer_timeout(config: AppConfig) -> Findings:
    long = [each.name for each in config.tasks if (config.limit(each.task) or 0.0) > CONSUMER_TIMEOUT]
    if long and not config.conf.get("broker_channel_error_retry"):
        yield warning(
            f"{listed(long)} may run for longer than RabbitMQ lets a message be held (consumer_timeout, 1800 s by "
            "default): the worker ends then.",
            "app.conf.broker_channel_error_retry = True, or consumer_timeout in rabbitmq.conf longer than the task",
        )


@CHECKS.add()
def prefetch_long(config: AppConfig) -> Findings:
    multiplier = config.conf.worker_prefetch_multiplier
    remedy = "app.conf.worker_prefetch_multiplier = 1"
    if multiplier == 0:
        yield warning(
            "worker_prefetch_multiplier is 0: one worker takes the whole queue, and all of it comes again if it is "
            "killed.",
            remedy,
        )
    long = [each.name for each in config.tasks if (config.limit(each.task) or 0.0) >= LONG_LIMIT]
    if long and multiplier > 1:
        yield info(
            f"worker_prefetch_multiplier is {multiplier}, and {listed(long)} may run for minutes: up to "
            f"{multiplier - 1} messages of each process wait behind them while other workers are idle.",
            remedy,
        )
    yield ok(f"worker_prefetch_multiplier is {multiplier}")


@CHECKS.add("tasks outlive a lost connection")
def cancels_on_connection_loss(config: AppConfig) -> Findings:
    if config.conf.get("worker_cancel_long_running_tasks_on_connection_loss"):
        yield info(
            "worker_cancel_long_running_tasks_on_connection_loss is on: a lost connection ends tasks that run well. "
            "Without it their copies wait for them.",
            "app.conf.worker_cancel_long_running_tasks_on_connection_loss = False",
        )


@CHECKS.add("worker_deduplicate_successful_tasks is off")
def deduplicates_twice(config: AppConfig) -> Findings:
    if config.conf.get("worker_deduplicate_successful_tasks"):
        yield info(
            "worker_deduplicate_successful_tasks is on: it reads the result backend for each redelivery, which "
            "idempotent tasks do not need.",
            "app.conf.worker_deduplicate_successful_tasks = False, unless plain tasks rely on it",
        )


@CHECKS.add("tasks are published")
def runs_eagerly(config: AppConfig) -> Findings:
    if config.conf.task_always_eager:
        yield error(
            "task_always_eager is on: tasks run where they are called, and no worker gets one.",
            "app.conf.task_always_eager = False, except in tests",
        )
