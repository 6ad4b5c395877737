"""What a user's type checker sees of the public names; pyright checks this file, nothing runs it."""

from __future__ import annotations

from datetime import timedelta

from typing_extensions import assert_type

from celery_idempotent import (
    ConfigurationError,
    Event,
    IdempotencyError,
    IdempotentTask,
    Policy,
    Store,
    StoreUnreachable,
    add_hook,
    open_store,
    remove_hook,
)
from celery_idempotent.holding import Holding
from celery_idempotent.records import Record


def by_order(order_id: str) -> str:
    return order_id


policy = Policy(key="order_id", lease_ttl=30, result_ttl="7d", failure_ttl=timedelta(hours=1), on_conflict="wait")
Policy(key=["order_id", "line"], remember_failures=ValueError, fingerprint=["note"], compress_above="4KiB")
Policy(key=by_order, on_store_error="raise")
Policy(on_conflict="wiat")  # pyright: ignore[reportArgumentType]
Policy(lese_ttl=30)  # pyright: ignore[reportCallIssue]
assert_type(policy.lease_ttl, float)
assert_type(policy.remember_failures, tuple[type[Exception], ...])

store = open_store("redis://localhost/1")
assert_type(store, Store)
assert_type(store.get("key"), Record | None)

errors: list[type[IdempotencyError]] = [ConfigurationError, StoreUnreachable]


def hook(event: Event) -> None:
    assert_type(event.key, str)


add_hook(hook)
remove_hook(hook)


def body(task: IdempotentTask) -> None:
    assert_type(task.lease, Holding | None)
    if task.lease is not None:
        assert_type(task.lease.fence, int)
        assert_type(task.lease.derived_key("gateway"), str)
