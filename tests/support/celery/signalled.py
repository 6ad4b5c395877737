"""The shop, with receivers of the library's Celery signals that write down what they are sent."""

from __future__ import annotations

from typing import Any

from celery_idempotent.celery import signals
from tests.support.celery.journal import Journal
from tests.support.celery.shop import app, charge

__all__ = ["app"]


def note(signal: Any, sender: Any, event: Any, key: str, task_id: str, **_: Any) -> None:
    name = getattr(sender, "name", None)
    Journal.from_env().write(signal.name, key, sender=name, task_id=task_id, kind=type(event).__name__)


for name in signals.__all__:
    if name.islower():
        getattr(signals, name).connect(note, weak=False)


@signals.task_replayed.connect(sender=charge, weak=False)
def fail(**_: Any) -> None:
    raise RuntimeError("a receiver that raises")
