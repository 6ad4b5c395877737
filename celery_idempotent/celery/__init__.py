"""Celery: a task base class, its request, and nothing else to set up."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .app import schedule_purge
from .delivery import TaskLeaseLost
from .task import IdempotentTask

if TYPE_CHECKING:
    from .request import IdempotentRequest

__all__ = ["IdempotentRequest", "IdempotentTask", "TaskLeaseLost", "schedule_purge"]


def __getattr__(name: str) -> Any:
    if name != "IdempotentRequest":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .request import IdempotentRequest  # which imports Celery's worker

    return IdempotentRequest
