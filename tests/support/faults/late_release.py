"""Unique tasks in a worker whose store lets no slot go, twice, and does all else."""

from __future__ import annotations

from typing import Any

from celery_idempotent.core import reservations
from celery_idempotent.errors import StoreUnreachable
from tests.support.celery.unique_app import app

__all__ = ["app"]

release, failures = reservations.release, [StoreUnreachable("not now"), StoreUnreachable("not yet")]


def failing(*args: Any) -> bool:
    if failures:
        raise failures.pop()
    return release(*args)


reservations.release = failing
