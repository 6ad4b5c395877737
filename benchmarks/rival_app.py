"""The same no-op task under each plugin, in a worker that has no part of this library."""

from __future__ import annotations

import os

from celery import Celery
from celery_once import QueueOnce
from celery_singleton import Singleton

from .plain_app import configured

__all__ = ["app", "once", "plain", "singleton"]

app = configured(Celery("benchmarks.rival_app"))
app.conf.update(
    singleton_backend_url=os.environ.get("STORE_URL"),
    ONCE={
        "backend": "celery_once.backends.Redis",
        "settings": {"url": os.environ.get("STORE_URL"), "default_timeout": 3600},
    },
)


@app.task(acks_late=True)
def plain(number: int) -> None:
    """Do nothing."""


@app.task(base=Singleton, acks_late=True)
def singleton(number: int) -> None:
    """Do nothing."""


@app.task(base=QueueOnce, acks_late=True)
def once(number: int) -> None:
    """Do nothing."""
