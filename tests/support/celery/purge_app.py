"""A Celery app whose store does not expire by itself, and whose task has a store of its own that is away."""

from __future__ import annotations

import os

from celery import Celery

from celery_idempotent import IdempotentTask
from celery_idempotent.celery import schedule_purge
from celery_idempotent.stores.redis import RedisStore
from tests.support.celery.apps import from_env

EXPIRED = "expired"
AWAY = "redis://:secret@127.0.0.1:1/0"


class Expiring(RedisStore):
    """Has in a set what it is to remove."""

    def purge(self, limit: int | None = None) -> int:
        return len(self._command("SPOP", EXPIRED, limit))


app = from_env(Celery("shop", set_as_current=False))
app.conf.idempotency_store = Expiring.from_url(os.environ["STORE_URL"])
if "PURGE_EVERY" in os.environ:
    schedule_purge(app, float(os.environ["PURGE_EVERY"]), limit=int(os.environ["PURGE_LIMIT"]))


@app.task(base=IdempotentTask)
def resize(path: str) -> str:
    """Uses the app's store."""
    return path


@app.task(base=IdempotentTask, idempotency={"store": Expiring.from_url(AWAY)})
def pay(order_id: str) -> str:
    """Uses a store that is not there."""
    return order_id
