"""What the gauntlet's tests are made of: an app on real Redis, tasks declared in the test, a worker in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import Celery

from celery_idempotent import IdempotentTask
from celery_idempotent.stores.redis import RedisStore
from tests.support.celery.apps import close_app
from tests.support.gauntlet.consumer import Consumer


@pytest.fixture
def store(store_url: str) -> Iterator[RedisStore]:
    store = RedisStore.from_url(store_url)
    yield store
    store.close()


@pytest.fixture
def app(broker_url: str, result_url: str, store: RedisStore) -> Iterator[Celery]:
    app = Celery("gauntlet", broker=broker_url, backend=result_url, set_as_current=False)
    app.conf.update(idempotency_store=store, task_publish_retry=False, result_expires=600)
    yield app
    close_app(app)


@pytest.fixture
def consumer(app: Celery) -> Iterator[Consumer]:
    consumer = Consumer(app)
    yield consumer
    consumer.close()


@pytest.fixture
def declare(app: Celery) -> Callable[..., Any]:
    """A function that makes a task of a body, named after it: `declare(charge)` has the records `key_of("A")`.

    The key is the argument `order_id`, unless the options of the policy say otherwise.
    """

    def declare(body: Callable[..., Any], base: type = IdempotentTask, **policy: Any) -> Any:
        options = {"key": "order_id", **policy}
        task = app.task(base=base, bind=True, shared=False, name=body.__name__, idempotency=options)(body)
        app.finalize()
        return task

    return declare


def key_of(order_id: str, task: str = "charge") -> str:
    """Return the store's key of an operation."""
    return f"idem:{task}::{order_id}"
