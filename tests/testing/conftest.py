"""An app whose store is nowhere, so that only what the kit puts in force can serve its tasks; and a gateway."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import Celery

from celery_idempotent import IdempotentTask


@pytest.fixture
def app() -> Iterator[Celery]:
    app = Celery("shop", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.idempotency_store = "redis://127.0.0.1:1/0"
    yield app
    app.close()


@pytest.fixture
def charges() -> list[Any]:
    """The keys under which a gateway was called, which refuses none."""
    return []


@pytest.fixture
def declare(app: Celery) -> Callable[..., Any]:
    """A function that declares a task of the app; its key is the order unless options say otherwise."""

    def declare(body: Callable[..., Any], options: dict[str, Any] | None = None, **more: Any) -> Any:
        idempotency = {"key": "order_id"} if options is None else options
        return app.task(base=IdempotentTask, bind=True, shared=False, idempotency=idempotency, **more)(body)

    return declare


@pytest.fixture
def charge(declare: Callable[..., Any], charges: list[Any]) -> Any:
    """A task that charges without a key that the gateway would know."""

    def charge(self: Any, order_id: str, cents: int = 1) -> int:
        charges.append(order_id)
        return cents

    return declare(charge)


@pytest.fixture
def keyed(declare: Callable[..., Any], charges: list[Any]) -> Any:
    """A task that charges once for each key."""

    def keyed(self: Any, order_id: str, cents: int = 1) -> int:
        key = self.lease.derived_key("charge")
        if key not in charges:
            charges.append(key)
        return cents

    return declare(keyed)
