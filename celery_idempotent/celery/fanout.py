"""What a task sets off when it succeeds: its callbacks and the rest of its chain.

A task that is answered twice must not set them off twice. They get ids that follow from the parent's id and their
place, so that a second dispatch (after a crash in the middle of the first) carries the same ids; and once they are
dispatched, the record says so.
"""

from __future__ import annotations

import uuid
from typing import Any

from celery.canvas import maybe_signature

__all__ = ["clear", "give_ids", "has_reader", "ignores_result"]

NAMESPACE = uuid.UUID("0b2b41ab-7b4a-5c39-9d1a-6c8a3a6a4f0e")


def ignores_result(task: Any, request: Any) -> bool:
    """Tell whether the value is stored nowhere: as the caller said, else as the task says."""
    said = request.__dict__.get("ignore_result")
    return bool(task.ignore_result if said is None else said)


def has_reader(task: Any, request: Any) -> bool:
    """Tell whether somebody gets the value: a caller, a callback, the rest of a chain, a chord."""
    return bool(not ignores_result(task, request) or request.callbacks or request.chain or request.chord)


def clear(request: Any) -> None:
    """Take away what was set off before."""
    request.callbacks = request.errbacks = request.chain = None


def give_ids(request: Any, app: Any) -> None:
    """Give every signature that will be dispatched an id that follows from the request's id and its place."""
    if request.callbacks:
        places = enumerate(request.callbacks)
        request.callbacks = [
            _with_ids(maybe_signature(sig, app=app), f"{request.id}/callbacks/{place}") for place, sig in places
        ]


def _with_ids(signature: Any, place: str) -> Any:
    signature = signature.clone()
    signature.options.setdefault("task_id", str(uuid.uuid5(NAMESPACE, place)))
    if signature.get("subtask_type") not in ("group", "chain", "chord"):
        return signature  # what a plain task calls tasks, header or body are its own arguments
    for name in ("tasks", "header"):
        members = signature.kwargs.get(name)
        if isinstance(members, (list, tuple)):
            signature.kwargs[name] = [
                _with_ids(maybe_signature(m, app=signature.app), f"{place}/{name}/{i}") for i, m in enumerate(members)
            ]
    body = signature.kwargs.get("body")
    if body is not None:
        signature.kwargs["body"] = _with_ids(maybe_signature(body, app=signature.app), f"{place}/body")
    return signature
