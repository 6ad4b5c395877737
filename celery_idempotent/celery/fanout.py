"""What a task sets off when it ends: its callbacks and the rest of its chain, or its errbacks.

A task that is answered twice must not set them off twice. They get ids that follow from the parent's id and their
place, so that a second dispatch (after a crash in the middle of the first) carries the same ids; and once they are
dispatched, the record says so.
"""

from __future__ import annotations

import uuid
from typing import Any

from celery.canvas import maybe_signature

from .identity import STATE, DeliveryState

__all__ = ["chord_claim", "clear", "give_errback_ids", "give_ids", "has_reader", "ignores_result"]

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


def chord_claim(task: Any, request: Any) -> float:
    """Return for how many seconds a process claims to be setting off the body of the request's chord; 0 if none does.

    A Redis backend of Celery >= 5.7 has the process that completes a chord claim its body. If that one dies, nobody
    looks again once the claim has expired, unless a member's part is returned anew.
    """
    backend = task.backend
    if not (request.chord and request.group) or request.is_eager:
        return 0.0
    if not hasattr(type(backend), "_chord_claim_extend_script"):
        return 0.0
    try:
        claim = backend.get_key_for_group(request.group, ".c")
        if backend.client.get(claim) in (None, b"done", "done"):
            return 0.0
        return float(max(backend.client.pttl(claim), 1)) / 1000
    except Exception:  # noqa: BLE001 - the backend's own; Celery meets the same outage next, and says so
        return 0.0


def give_ids(request: Any, app: Any) -> None:
    """Give every callback that will be dispatched an id that follows from the request's id and its place.

    The steps of a chain have had their ids since it was published, the groups of its chords among them.
    """
    state: DeliveryState | None = request.__dict__.get(STATE)
    if state is not None:
        state.fans_out = bool(request.callbacks or request.chain)
    if request.callbacks:
        request.callbacks = _placed(request.callbacks, f"{_run(request)}/callbacks", app)


def give_errback_ids(request: Any, app: Any) -> None:
    """Give the errbacks of a task that fails ids that follow from this sending of its message, and their places.

    Unlike a success, a failure is not the end: who sends the message again under its id has the task run again, and is
    told again if it fails.
    """
    state: DeliveryState | None = request.__dict__.get(STATE)
    sending = state.identity.sending if state else ""
    if request.errbacks and sending:
        request.errbacks = _placed(request.errbacks, f"{_run(request)}/{sending}/errbacks", app)


def _run(request: Any) -> str:
    """Return what names a run of a task: its id, and the worker where all of them run it."""
    state: DeliveryState | None = request.__dict__.get(STATE)
    return f"{request.id}@{state.identity.place}" if state is not None and state.identity.place else str(request.id)


def _placed(signatures: Any, place: str, app: Any) -> list[Any]:
    return [_with_ids(maybe_signature(sig, app=app), f"{place}/{i}") for i, sig in enumerate(signatures)]


def _derived(place: str) -> str:
    return str(uuid.uuid5(NAMESPACE, place))


def _with_ids(signature: Any, place: str) -> Any:
    signature = signature.clone()
    signature.options.setdefault("task_id", _derived(place))
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
