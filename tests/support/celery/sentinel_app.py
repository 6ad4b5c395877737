"""An app whose store is found through a sentinel: SENTINEL_PORT, and WAIT_REPLICAS for what must confirm a claim."""

from __future__ import annotations

import os

from celery import Celery
from redis.sentinel import Sentinel

from celery_idempotent import IdempotentTask
from celery_idempotent.stores.redis import RedisStore
from tests.support.celery.apps import from_env
from tests.support.celery.shop import work
from tests.support.sentinel import NAME

app = from_env(Celery("failing over"))
sentinel = Sentinel([("127.0.0.1", int(os.environ["SENTINEL_PORT"]))], **RedisStore.connection_options())
app.conf.idempotency_store = RedisStore(
    sentinel.master_for(NAME), wait_replicas=int(os.environ.get("WAIT_REPLICAS", "0"))
)


@app.task(base=IdempotentTask, idempotency={"key": "order_id"})
def charge(order_id: str) -> str:
    return str(work("charged", order_id, f"charged {order_id}"))
