"""Propagation: the ids of what a guarded HTTP request publishes, which follow from the request's key.

A request that was killed after it had published is carried out again, and publishes again: under the same ids, so that
its tasks run once and its chains go on once. A call's id follows from the request, the task, and what the call is
about: its key, or its arguments; of equal calls each has its own. A canvas has one such id, from which the ids of
its members follow, by the order in which Celery draws them.

A worker derives nothing, and neither do the bodies of tasks that run in a request's own process.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any
from weakref import WeakKeyDictionary

import celery.canvas
from celery._state import get_current_worker_task
from celery.canvas import Signature, _chain, _chord, group
from kombu.utils.uuid import uuid

from ..core import keys
from ..core.lease import TaskIds, current_lease
from ..errors import MissingKey
from ..events import logger
from ..units import format_duration
from .app import is_guarded
from .canvas import CANVASES
from .message import KEY_HEADER, UNGUARDED, given_key, new_token, read_key

#: The ids that the canvas which is being published draws.
_drawn: ContextVar[Iterator[str] | None] = ContextVar("celery_idempotent_canvas_ids", default=None)
#: By app: about which tasks a warning was logged.
_warned: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()


def request_ids() -> TaskIds | None:
    """Return what derives the ids of tasks that are published here; None where they are random."""
    lease = current_lease()
    if lease is None or lease.task_ids is None or get_current_worker_task() is not None:
        return None
    return lease.task_ids


def publish(task: Any, args: Any, kwargs: Any, options: Mapping[str, Any], send: Callable[[str], Any]) -> Any:
    """Publish a call that has no task id, and return what ``send`` returns.

    Arguments:
        task: The task.
        args: Of the call.
        kwargs: Of the call.
        options: The other options of the call.
        send: Publishes it under the id that it is given, "" for a random one.
    """
    ids = request_ids()
    call = None if ids is None or task.name.startswith(UNGUARDED) else _call(task, args, kwargs, options)
    if ids is None or call is None:
        return send("")
    check_retention(task, ids)
    with ids.next(*call) as task_id:
        result = send(task_id)
    if getattr(result, "id", "") == task_id:  # else another message does its work
        ids.note(task.name, task_id)
    return result


def _call(task: Any, args: Any, kwargs: Any, options: Mapping[str, Any]) -> tuple[str, ...] | None:
    """Return what a call is about; None if that cannot be written down."""
    binding, headers = task._binding, options.get("headers") or {}
    given = read_key(given_key(options))
    args, kwargs = args or (), kwargs or {}
    try:
        if given is None and binding.policy.key is None:
            arguments = keys.bind(binding.signature, args, kwargs)
            return task.name, keys.fingerprint(arguments, defaults=keys.defaults_of(binding.signature))
        # As the store compares them: under a key, arguments may differ that do not count.
        key, named = binding.operation(given, "", args, kwargs, headers)
        return task.name, key, binding.fingerprint(named)
    except TypeError:
        return None  # Celery raises it, or the worker
    except MissingKey as error:
        _report(task.name, error)
        return None


def _report(name: str, error: MissingKey) -> None:
    logger.warning(
        "%s is published under random ids, also where its request is repeated, for it cannot be compared with other "
        "calls: %s. Pass ids or plain data, or an idempotency_key.",
        *(name, error.__cause__ or error),
    )


def sending(task_id: str | None) -> str:
    """Return the id of one sending of a message, for its errbacks."""
    ids = request_ids() if task_id else None
    return new_token() if ids is None else ids.derive("sending", str(task_id))


def check_retention(task: Any, ids: TaskIds) -> None:
    """Log, once for each task, that it is forgotten before a request which publishes it."""
    keep = task._binding.policy.result_ttl
    known = _warned.setdefault(task._get_app(), set())
    if keep >= ids.keep or task.name in known:
        return
    known.add(task.name)
    logger.warning(
        "%s is remembered for %s, and a request that publishes it for %s: a request that is carried out again once the "
        "task is forgotten has it run again. Set result_ttl of the task to that of the request, or more.",
        *(task.name, format_duration(keep), format_duration(ids.keep)),
    )


# Canvases. Celery draws the ids of their members, and of groups, from one function, in an order that only the canvas
# decides; no option of a canvas, and no signal, reaches the group of a chord within a chain. So that function is
# replaced, by one that is itself but for what is drawn while a guarded request publishes a canvas, or freezes it.


def derive_canvas_ids() -> None:
    """Have Celery's canvases draw derived ids within guarded requests; to call twice is the same as once."""
    if not hasattr(celery.canvas.uuid, "derives"):
        celery.canvas.uuid = _drawing(celery.canvas.uuid)
    for kind in (_chain, group, _chord):
        for name in ("apply_async", "freeze"):
            setattr(kind, name, _seeding(getattr(kind, name)))
    setattr(Signature, "freeze", _seeding(Signature.freeze))  # noqa: B010 - mypy knows no other way


def _drawing(draw: Callable[[], str]) -> Callable[[], str]:
    @functools.wraps(draw)
    def drawing() -> str:
        ids = _drawn.get()
        return draw() if ids is None else next(ids)

    drawing.derives = True  # type: ignore[attr-defined]
    return drawing


@contextmanager
def _draw(ids: Iterator[str]) -> Iterator[None]:
    token = _drawn.set(ids)
    try:
        yield
    finally:
        _drawn.reset(token)


def _seeding(method: Any) -> Any:
    """Return a method of a canvas within which ids follow from the request and the canvas."""
    if hasattr(method, "derives"):
        return method

    @functools.wraps(method)
    def seeding(self: Any, *args: Any, **options: Any) -> Any:
        ids = request_ids() if _drawn.get() is None else None
        if ids is None:
            return method(self, *args, **options)
        publishes = method.__name__ == "apply_async"
        call = _canvas_call(self, ids, *(_partial(*args, **options) if publishes else ((), {})))
        if call is None:
            with _draw(iter(uuid, "")):
                return method(self, *args, **options)
        with ids.next(method.__name__, *call) as seed, _draw(ids.derive(seed, str(n)) for n in itertools.count()):
            result = method(self, *args, **options)
        if publishes and getattr(result, "id", None):
            ids.note(self.task, result.id)
        return result

    seeding.derives = True  # type: ignore[attr-defined]
    return seeding


def _canvas_call(signature: Any, ids: TaskIds, args: Any, kwargs: Any) -> tuple[str, ...] | None:
    """Return what a call of a canvas is about: its tasks and their arguments, and not their options."""
    app = signature.app
    kwargs = {name: _form(value, app, ids) if name == "body" else value for name, value in kwargs.items()}
    try:
        return signature.task, keys.fingerprint({"canvas": [_form(signature, app, ids), list(args), kwargs]})
    except MissingKey as error:
        _report(signature.task, error)
        return None


def _partial(args: Any = None, kwargs: Any = None, *_: Any, **__: Any) -> tuple[Any, Any]:
    """Return the arguments with which a canvas is called, of those of ``apply_async``."""
    return args or (), kwargs or {}


def _form(signature: Any, app: Any, ids: TaskIds) -> list[Any]:
    """Return the name of a signature's task and its arguments; of a canvas, those of its members."""
    name, kwargs = signature["task"], signature["kwargs"]
    if signature.get("subtask_type") not in CANVASES:
        task = app.tasks.get(name)
        if is_guarded(task):
            check_retention(task, ids)
        return [name, list(signature["args"]), kwargs, signature["options"].get(KEY_HEADER)]
    members = [kwargs.get(part) or () for part in ("tasks", "header", "body")]
    forms = [_form(m, app, ids) if isinstance(m, dict) else [_form(each, app, ids) for each in m] for m in members]
    return [name, list(signature["args"]), forms, kwargs.get("kwargs")]
