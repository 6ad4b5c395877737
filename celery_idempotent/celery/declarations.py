"""Declarations that would protect less than they say, found when a task is declared or a worker starts."""

from __future__ import annotations

import functools
import inspect
from typing import Any

from ..errors import ConfigurationError

__all__ = ["UNFINISHED", "check_body"]

#: What to do about a body that returns before its work is done.
UNFINISHED = (
    "Write a plain function that runs it to its end: asyncio.run(...) for a coroutine, a loop or list(...) for a "
    "generator."
)


def check_body(task: Any, call: Any) -> None:
    """Refuse a task whose body has done nothing yet when it returns.

    Celery neither awaits nor iterates what a body returns. A decorator may do both, so what it wraps is not examined
    (``__wrapped__`` is not followed); what a body returns is checked once more when it has returned.

    Arguments:
        task: The task, bound to its app.
        call: The ``__call__`` that its class puts around ``run``, or None.

    Raises:
        ConfigurationError: it is a coroutine function or a generator function.
    """
    # With a __call__ of its own, a class may run coroutines to their end. Where `pydantic=True` hides the function
    # behind a wrapper of Celery's, that is known not to.
    bodies = [call] if call else [getattr(task, "_orig_run", task.run), getattr(task, "_decorated_fun", None)]
    for body in bodies:
        kind = _kind_of(body)
        if kind is None:
            continue
        advice = (
            "Write a plain function whose body is asyncio.run(...) of the coroutine. Outside Celery, @idempotent "
            "guards coroutine functions as they are."
            if kind == "a coroutine function"
            else "Return a list, or publish a task for each item."
        )
        raise ConfigurationError(
            f"Expected {task.name} to do its work before it returns, got {kind}: Celery does not run what it returns, "
            f"and the operation would be recorded as done before it began. {advice}"
        )


def _kind_of(body: Any) -> str | None:
    while isinstance(body, functools.partial):
        body = body.func
    # A callable object may have an async __call__; that of a plain function is none of these.
    for function in (body, type(body).__call__ if callable(body) else None):
        if inspect.isasyncgenfunction(function):
            return "an asynchronous generator function"
        if inspect.iscoroutinefunction(function):
            return "a coroutine function"
        if inspect.isgeneratorfunction(function):
            return "a generator function"
    return None
