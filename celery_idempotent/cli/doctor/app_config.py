"""The configuration of an app, as the checks read it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import Any

from celery.schedules import crontab, maybe_schedule, solar

from ...celery.message import UNGUARDED
from ...celery.task import IdempotentTask
from ...core.policy import Policy

HOUR, DAY = 3600.0, 86400.0
#: How many occurrences of a crontab are looked at: more than a week of any that comes a few times a day.
OCCURRENCES = 64
#: Seconds that kombu assumes where no visibility_timeout is set.
ASSUMED = {"redis": 3600.0, "sqs": 1800.0}
#: What kombu calls the brokers that one name is enough for here.
_BROKERS = {
    **dict.fromkeys(("rediss", "sentinel", "valkey"), "redis"),
    **dict.fromkeys(("amqp", "amqps", "pyamqp"), "rabbitmq"),
    "sqla": "sqlalchemy",
}


@dataclass(frozen=True, slots=True)
class DeclaredTask:
    """An idempotent task and its options."""

    task: Any
    policy: Policy

    @property
    def name(self) -> str:
        """What the task is called."""
        return str(self.task.name)

    @property
    def is_unique(self) -> bool:
        """Whether its calls are skipped while a message waits."""
        return self.task._binding.unique is not None


class AppConfig:
    """An app with its tasks, its broker, its schedule.

    Arguments:
        app: A Celery app whose tasks are loaded.

    Raises:
        ConfigurationError: a task is declared wrongly.
    """

    def __init__(self, app: Any) -> None:
        self.app, self.conf = app, app.conf
        self.tasks: list[DeclaredTask] = []
        self.plain: list[str] = []
        for name, task in sorted(app.tasks.items()):
            if name.startswith(UNGUARDED):
                continue
            if isinstance(task, IdempotentTask):
                self.tasks.append(DeclaredTask(task, task._binding.policy))
            else:
                self.plain.append(name)

    @cached_property
    def broker(self) -> str:
        """What the broker is: redis, rabbitmq, sqs, memory, filesystem, or kombu's name for another."""
        # Not by its class, whose driver may be missing on this machine.
        named = str(self._connection.transport_cls).lower().partition("+")[0]
        return _BROKERS.get(named, named)

    @cached_property
    def _connection(self) -> Any:
        return self.app.connection_for_write()

    @property
    def broker_options(self) -> dict[str, Any]:
        """The broker's transport options."""
        return dict(self._connection.transport_options or {})

    @property
    def visibility(self) -> float:
        """Seconds after which the broker hands out again what is not acked; 0 where it has no such timeout."""
        if self.broker not in ASSUMED:
            return 0.0
        return float(self.broker_options.get("visibility_timeout", ASSUMED[self.broker]))

    @property
    def refreshed(self) -> bool:
        """Whether workers with idempotent tasks keep the broker from handing out what they hold."""
        return self.broker == "redis" and self.conf.get("idempotency_visibility_refresh") is not False

    @cached_property
    def own_methods(self) -> dict[type, str]:
        """The classes of the app's own task class that do something, each with one method that does."""
        found = {}
        for cls in self.app.Task.__mro__:
            methods = [name for name, value in vars(cls).items() if callable(value) and _is_used(name)]
            if methods and not issubclass(IdempotentTask, cls) and not cls.__module__.startswith("celery."):
                found[cls] = "__call__" if "__call__" in methods else methods[0]
        return found

    def limit(self, task: Any) -> float | None:
        """Return after how many seconds a task is ended at the latest; None if never."""
        limits = (task.time_limit or self.conf.task_time_limit, task.soft_time_limit or self.conf.task_soft_time_limit)
        return next((float(limit) for limit in limits if limit), None)

    @property
    def scheduled(self) -> dict[str, dict[str, Any]]:
        """The entries of beat's schedule, by name."""
        return {name: dict(entry) for name, entry in (self.conf.beat_schedule or {}).items() if "task" in entry}

    @property
    def waits(self) -> Iterator[tuple[str, float]]:
        """What is known to be published with a countdown, and its seconds."""
        for name, entry in self.scheduled.items():
            countdown = (entry.get("options") or {}).get("countdown")
            if countdown:
                yield f"the beat entry {name!r}", float(countdown)
        for declared in self.tasks:
            task = declared.task
            if getattr(task, "autoretry_for", ()):
                backoff = getattr(task, "retry_backoff", False)
                longest = getattr(task, "retry_backoff_max", 600) if backoff else task.default_retry_delay
                yield f"a retry of {task.name}", float(longest)
            elif task.default_retry_delay != IdempotentTask.default_retry_delay:
                yield f"a retry of {task.name}", float(task.default_retry_delay)

    @property
    def longest_wait(self) -> tuple[str, float]:
        """What has the longest countdown, and its seconds; ("", 0) if none is known."""
        return max(self.waits, key=lambda wait: wait[1], default=("", 0.0))

    @property
    def result_expires(self) -> float | None:
        """Seconds for which the result backend keeps a result; None for ever."""
        expires = self.conf.result_expires
        seconds = expires.total_seconds() if isinstance(expires, timedelta) else expires
        return float(seconds) if seconds else None


def _is_used(method: str) -> bool:
    return method == "__call__" or not method.startswith("_")


def shortest_interval(when: Any, app: Any) -> float | None:
    """Return the shortest time in seconds between two messages of a beat entry; None where it cannot be computed.

    Arguments:
        when: The entry's schedule: seconds, a timedelta, or one of Celery's schedules.
        app: Its app, whose time zone a crontab is in.
    """
    try:
        when = maybe_schedule(when, app=app)
        if isinstance(when, solar):
            return DAY  # give or take minutes; to compute it wants ephem
        if isinstance(when, crontab):
            return min(_gaps(when))
        return float(when.run_every.total_seconds())
    except Exception:  # noqa: BLE001 - a schedule of the app's own, or one that never comes
        return None


def _gaps(when: crontab) -> Iterator[float]:
    last = None
    at = when.now()
    for _ in range(OCCURRENCES):
        local, delta, _ = when.remaining_delta(at)
        at = local + delta
        if last is not None:
            yield (at - last).total_seconds()
        last = at
