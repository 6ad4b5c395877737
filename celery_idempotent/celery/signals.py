"""What we hear from Celery: messages about to be published, tasks whose fan-out was dispatched."""

from __future__ import annotations

from typing import Any

from celery import signals, states

from ..errors import StoreError
from ..events import logger
from .identity import KEY, STATE

__all__ = ["connect"]


def connect() -> None:
    """Listen; to ask twice is the same as once."""
    signals.before_task_publish.connect(move_key_into_headers, dispatch_uid="celery_idempotent.key", weak=False)
    signals.task_postrun.connect(mark_announced, dispatch_uid="celery_idempotent.announced", weak=False)


def move_key_into_headers(headers: Any = None, properties: Any = None, **_: Any) -> None:
    """Let ``apply_async(idempotency_key=...)`` travel with the message; Celery makes properties of unknown options."""
    if properties and KEY in properties:
        key = properties.pop(KEY)
        if key is not None:
            headers[KEY] = key


def mark_announced(task: Any = None, state: Any = None, **_: Any) -> None:
    """Remember that Celery has dispatched the callbacks and the chain of a task that succeeded."""
    request = task.request_stack.top
    delivery = None if request is None else request.__dict__.get(STATE)
    if delivery is None or state != states.SUCCESS or not (request.callbacks or request.chain) or not delivery.key:
        return
    try:
        task._binding.guard.store.announce(delivery.key, request.id)
    except StoreError as error:
        logger.warning(
            "%s[%s] has dispatched its callbacks, and the store could not be told: %s", task.name, request.id, error
        )
