"""Apps to be examined: one as the guides have it, and what can be wrong with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from celery import Celery

from celery_idempotent import IdempotentTask

__all__ = ["REDIS", "SHORT", "app_with", "charge", "resize"]

REDIS = "redis://127.0.0.1:6379"
#: As the guide on production has it.
SHORT = {"visibility_timeout": 30, "unacked_restore_interval": 5, "unacked_restore_throttle": 1}


def app_with(
    *,
    broker: str = f"{REDIS}/0",
    options: Mapping[str, Any] | None = None,
    policy: Mapping[str, Any] | None = None,
    task: Mapping[str, Any] | None = None,
    plain: bool = False,
    plain_task: Mapping[str, Any] | None = None,
    beat: Mapping[str, Any] | None = None,
    idempotent: bool = True,
    own_class: type | None = None,
    **conf: Any,
) -> Celery:
    """Return an app that nobody else sees, with one task, as it should be but for what the arguments say."""
    app = Celery("shop", broker=broker, set_as_current=False)
    for name in [name for name in app.tasks if name.startswith("pytest_celery.")]:
        app.tasks.unregister(name)  # a plugin of the tests shares its tasks with every app
    good = {
        "result_backend": f"{REDIS}/2",
        "idempotency_store": f"{REDIS}/1",
        "task_time_limit": 120,
        "broker_transport_options": dict(SHORT if options is None else options),
    }
    app.conf.update({**good, **conf})
    if own_class is not None:
        app.Task = own_class  # as a factory does; `task_cls` is another way
    if idempotent:
        declared = {"idempotency": policy or {"key": "order_id"}, "base": IdempotentTask, **(task or {})}
        app.task(charge, name="charge", shared=False, **declared)
    if plain or not idempotent:
        app.task(resize, name="resize", shared=False, **(plain_task or {}))
    if beat is not None:
        app.conf.beat_schedule = {"nightly": {"task": "charge", "schedule": 60.0, **beat}}
    return app


def charge(order_id: str) -> None:
    """Do what a task does."""


def resize(path: str) -> None:
    """Do what a task does."""
