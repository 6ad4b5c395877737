"""What we hear from Celery: a message is about to be published, a task has set off what follows it, a process ends."""

from __future__ import annotations

from typing import Any

from celery import signals

from ..errors import StoreError
from ..hooks import logger
from .declarations import mistaken_key
from .identity import KEY, STATE, DeliveryState

__all__ = ["connect"]


def connect() -> None:
    """Listen; to ask twice is the same as once."""
    signals.before_task_publish.connect(move_key_into_headers, dispatch_uid="celery_idempotent.key", weak=False)
    # Sent once the callbacks, the chain, the result and the chord's part are all out, and only then: task_postrun comes
    # with state SUCCESS also where Celery failed to publish them.
    signals.task_success.connect(mark_announced, dispatch_uid="celery_idempotent.announced", weak=False)
    # No task of the app need be idempotent: that may be what is wrong with it.
    signals.celeryd_init.connect(check_when_started, dispatch_uid="celery_idempotent.declarations", weak=False)
    # Likewise, with the errbacks: they are published, or called, before it is sent.
    signals.task_failure.connect(mark_failure_announced, dispatch_uid="celery_idempotent.failed", weak=False)
    for ending in (signals.worker_process_shutdown, signals.worker_shutdown):  # children leave without Python's atexit
        ending.connect(write_history, dispatch_uid="celery_idempotent.history", weak=False)


def move_key_into_headers(sender: Any = None, headers: Any = None, properties: Any = None, **_: Any) -> None:
    """Let ``apply_async(idempotency_key=...)`` travel with the message; Celery makes properties of unknown options."""
    stamps = (headers or {}).get("stamped_headers")
    wrong = mistaken_key({**(properties or {}), "stamped_headers": stamps}, guarded=False)
    if wrong:  # Celery logs what a receiver raises, and publishes all the same
        logger.error("Expected options that Celery or %s= knows for a message of %s, %s", KEY, sender, wrong)
    if properties and KEY in properties:
        key = properties.pop(KEY)
        if key is not None:
            headers[KEY] = key


def check_when_started(instance: Any = None, **_: Any) -> None:
    """Have a worker check what its app declares; Celery would log what is raised here, and go on."""
    from .worker import DeclarationStep

    instance.app.steps["worker"].add(DeclarationStep)


def write_history(**_: Any) -> None:
    """Have the last notes of this process written before it ends."""
    from ..binding import history

    history.flush()


def mark_announced(sender: Any = None, **_: Any) -> None:
    """Record that Celery has dispatched the callbacks and the chain of a task that succeeded, and returned its part."""
    request = sender.request_stack.top
    delivery: DeliveryState | None = None if request is None else request.__dict__.get(STATE)
    if delivery is not None and delivery.fans_out and delivery.key:
        delivery.fans_out = False  # once: a task's own on_success comes before the signal
        _announce(sender, request, delivery.key)


def mark_failure_announced(sender: Any = None, **_: Any) -> None:
    """Remember that Celery has dispatched the errbacks of a task that failed for good."""
    # Celery sends it for lost children too, from the worker's main process, where no request is pushed.
    request = sender.request_stack.top
    delivery: DeliveryState | None = None if request is None else request.__dict__.get(STATE)
    if delivery is not None and delivery.fans_out_failed and delivery.key:
        _announce(sender, request, delivery.key)


def _announce(task: Any, request: Any, key: str) -> None:
    try:
        task._binding.guard.store.announce(key, request.id)
    except StoreError as error:
        logger.warning(
            "%s[%s] has dispatched what follows it, and the store could not be told: %s", task.name, request.id, error
        )
