"""What we hear from Celery: messages about to be published, tasks that have set off what follows them."""

from __future__ import annotations

from typing import Any

from celery import signals

from ..errors import StoreError
from ..events import logger
from .identity import KEY, MESSAGE, STATE, DeliveryState, new_token

__all__ = ["connect"]


#: Names of the tasks that are ours, as far as this process has bound them.
names: set[str] = set()


def connect() -> None:
    """Listen; to ask twice is the same as once."""
    signals.before_task_publish.connect(complete_headers, dispatch_uid="celery_idempotent.headers", weak=False)
    # Sent once the callbacks, the chain, the result and the chord's part are all out, and only then: task_postrun comes
    # with state SUCCESS also where Celery failed to publish them.
    signals.task_success.connect(mark_announced, dispatch_uid="celery_idempotent.announced", weak=False)


def complete_headers(
    sender: Any = None, body: Any = None, headers: Any = None, properties: Any = None, **_: Any
) -> None:
    """Move the key into the headers, and name this sending of a message whose failure sets something off.

    ``apply_async(idempotency_key=...)`` travels with the message; Celery makes properties of unknown options.
    """
    if properties and KEY in properties:
        key = properties.pop(KEY)
        if key is not None:
            headers[KEY] = key
    if sender in names and isinstance(body, tuple) and body[2].get("errbacks"):
        headers[MESSAGE] = {"sending": new_token(), **(headers.get(MESSAGE) or {})}


def mark_announced(sender: Any = None, **_: Any) -> None:
    """Remember that Celery has dispatched the callbacks and the chain of a task that succeeded."""
    request = sender.request_stack.top
    delivery: DeliveryState | None = None if request is None else request.__dict__.get(STATE)
    if delivery is None or not delivery.fans_out or not delivery.key:
        return
    try:
        sender._binding.guard.store.announce(delivery.key, request.id)
    except StoreError as error:
        logger.warning(
            "%s[%s] has dispatched its callbacks, and the store could not be told: %s", sender.name, request.id, error
        )
