"""Celery: a task base class, its request, and nothing else to set up."""

from .app import schedule_purge
from .delivery import TaskLeaseLost
from .request import IdempotentRequest
from .task import IdempotentTask

__all__ = ["IdempotentRequest", "IdempotentTask", "TaskLeaseLost", "schedule_purge"]
