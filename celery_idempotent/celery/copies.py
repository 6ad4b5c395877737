"""Defer: publish the same message again with a delay, so that this delivery of it can be acked.

A copy keeps everything its consumers can see of a message (id, canvas, priority, limits, stamps, encoding, the
shortened argument texts that may hide secrets). It is counted and carries a random token, so that the store can tell it
from other copies of the same message, which would otherwise multiply.
"""

from __future__ import annotations

import math
import random
from datetime import datetime, timezone
from typing import Any

from celery.app.task import Task
from celery.utils.time import maybe_iso8601, maybe_make_aware
from kombu.serialization import registry

from . import brokers, fanout
from .identity import Identity, new_token

__all__ = ["delay_before", "is_expired", "publish"]

FIRST_DELAY = 0.5
LONGEST_DELAY = 60.0
DEFAULT_VISIBILITY = {"redis": 3600.0, "sqs": 1800.0}


def delay_before(app: Any, copy: int, remaining: float) -> float:
    """Return how long the next copy of a message shall wait, in seconds.

    Arguments:
        app: The Celery app; its broker bounds what an ETA may be.
        copy: How often the message has been deferred.
        remaining: Seconds until the lease in its way runs out, unless it is renewed.
    """
    delay: float = FIRST_DELAY * 2 ** min(copy, 10) * random.uniform(0.75, 1.25)
    delay = min(delay, max(remaining, 0.1), LONGEST_DELAY)
    # An ETA sits unacked in a worker: longer than the visibility timeout, and the broker hands out another copy.
    transport = app.connection_for_write().transport.driver_type
    visibility = (app.conf.broker_transport_options or {}).get("visibility_timeout") or DEFAULT_VISIBILITY.get(
        transport
    )
    if visibility:
        delay = min(delay, 0.45 * float(visibility))
    if brokers.delays_natively(app):
        delay = max(1, math.ceil(delay))
    return delay


def publish(task: Any, request: Any, identity: Identity, delay: float) -> int:
    """Publish the next copy of the message that ``request`` came from, and return its number.

    It carries its expiry in a header of ours: a broker that drops what expired in a queue would drop the operation with
    it, if its holder died meanwhile, and nobody would be told.

    Arguments:
        task: The task.
        request: The request of this delivery.
        identity: Who this delivery is.
        delay: Seconds until the copy may be tried.

    Raises:
        kombu.exceptions.OperationalError: the broker cannot be reached.
        kombu.exceptions.EncodeError: the arguments cannot be encoded.
    """
    signature = Task.signature_from_request(task, request, ignore_result=fanout.ignores_result(task, request))
    options = dict(signature.options)
    expires = _text(options.pop("expires", None))
    headers = {**(options.pop("headers", None) or {})}
    copy = identity.copy + 1
    headers.update(
        identity.headers(
            copy=copy, token=new_token(), expires=expires, **({"from": identity.sender} if identity.sender else {})
        )
    )
    options.update(
        countdown=delay,
        headers=headers,
        add_to_parent=False,
        shadow=request.shadow,
        argsrepr=request.get("argsrepr"),
        kwargsrepr=request.get("kwargsrepr"),
        serializer=registry.type_to_name.get(identity.content_type) or options.get("serializer"),
        compression=identity.compression or options.get("compression"),
    )
    for name in ("redelivered", "is_eager"):  # parts of how it came, not of where it goes
        options.pop(name, None)
    app = task._get_app()
    options.update(brokers.destination(app, request.delivery_info), **brokers.kept_properties(request))
    with brokers.publisher(app) as certain:
        options.update(certain)
        app.send_task(
            task.name,
            signature.args,
            signature.kwargs,
            task_type=task,
            **{n: v for n, v in options.items() if v is not None},
        )
    return copy


def is_expired(app: Any, expires: str | datetime | None) -> bool:
    """Tell whether the expiry of a message has passed, as the worker's main process would."""
    if not expires:
        return False
    when: datetime = maybe_make_aware(maybe_iso8601(expires), app.conf.timezone)
    return datetime.now(timezone.utc) > when


def _text(when: Any) -> str | None:
    return when.isoformat() if isinstance(when, datetime) else when
