"""The functions that the jobs of `test_regressions` run."""

from __future__ import annotations

from rq import get_current_job

from celery_idempotent.rq import idempotent

EFFECTS = "effects"


def happens(name: str) -> None:
    """Write down in the queue's Redis that something happened."""
    job = get_current_job()
    assert job is not None
    job.connection.rpush(EFFECTS, name)


@idempotent(key="order_id")
def charge(order_id: str, cents: int) -> str:
    happens(f"{order_id} {cents}")
    return f"{order_id} charged {cents}"
