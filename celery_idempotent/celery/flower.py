"""`format_task` for ``flowerconfig.py``: what became of a delivery, in Flower's list of tasks and on a task's page.

Flower has no columns of its own making. What is known goes into two that it has: the state of a task that was
answered without running, and the text of its result.

To import this module has the tasks of Celery's monitoring state keep the facts of the library's events when they are
copied, as Flower copies each before it is formatted. Import it in Flower's process alone.
"""

from __future__ import annotations

import logging
from typing import Any

from celery.events.state import Task

from .monitoring import FIELD

__all__ = ["format_task"]


logger = logging.getLogger("celery_idempotent.flower")

_TITLES = {
    "taken_over": "taken over: the lease of the run before ran out",
    "replayed": "replayed: answered with the outcome of an earlier run",
    "deferred": "deferred: a duplicate of what is being done, tried again later",
    "resumed": "resumed: was deferred, and had to run itself",
    "superseded": "superseded: a later copy of this message took its place",
    "key_reused": "key reused: the same key came with other arguments",
    "crash_looped": "crash loop: refused because its holders keep dying",
    "lease_lost": "lease lost: another delivery took over",
    "settle_failed": "settle failed: the effect happened and is not recorded",
    "ran_unprotected": "ran unprotected: without a lease, as its policy allows",
}
#: How the facts are called, in their order.
_LABELS = {
    "key": "key",
    "original": "original task",
    "age": "seconds since it was done",
    "delay": "seconds until it is tried again",
    "copy": "copy",
    "crashes": "holders that died in a row",
    "fence": "fence",
    "error": "error",
    "holder": "sent by",
}

if FIELD not in Task._fields:
    setattr(Task, FIELD, None)
    Task._fields = (*Task._fields, FIELD)


def format_task(task: Any) -> Any:
    """Return what Flower shows of a task; first runs and tasks of others are left as they are.

    Arguments:
        task: Flower's copy of the task (`celery.events.state.Task`), which is changed.
    """
    try:
        facts = getattr(task, FIELD, None)
        if isinstance(facts, dict) and facts.get("outcome") in _TITLES:
            shown = _text(facts)
            task.result = f"{task.result}\n\n{shown}" if task.result not in (None, "") else shown
            setattr(task, FIELD, None)  # Flower would show it once more, as a mapping
            if facts["outcome"] == "replayed" and task.state == "SUCCESS":
                task.state = "REPLAYED"
    except Exception:  # a monitor must go on
        logger.exception("A task could not be formatted for Flower")
    return task


def _text(facts: dict[str, Any]) -> str:
    lines = [_TITLES[facts["outcome"]]]
    for name, label in _LABELS.items():
        value = facts.get(name)
        if name == "age":
            value = int(value or 0)  # stores remember the second
        if value not in (None, "", 0):
            lines.append(f"{label}: {value:.1f}" if isinstance(value, float) else f"{label}: {value}")
    return "\n".join(lines)
