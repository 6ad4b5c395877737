"""What a user's type checker sees of the public names; pyright checks this file, nothing runs it."""

from __future__ import annotations

from collections.abc import Coroutine
from datetime import timedelta
from typing import Any

from typing_extensions import assert_type

from celery_idempotent import (
    ConfigurationError,
    Event,
    IdempotencyError,
    IdempotentTask,
    Policy,
    Store,
    StoreUnreachable,
    Unique,
    add_hook,
    current_lease,
    idempotent,
    open_store,
    remove_hook,
)
from celery_idempotent.celery.signals import EventSignal, store_failed, task_deferred, task_replayed
from celery_idempotent.core.lease import HeldLease
from celery_idempotent.events import Deferred, Hook, Replayed
from celery_idempotent.http import INSIDE, UNGUARDED, IdempotencyMiddleware, Options, Response, abegin, begin
from celery_idempotent.http import django as http_django
from celery_idempotent.http import wsgi as http_wsgi
from celery_idempotent.metrics import opentelemetry, prometheus
from celery_idempotent.metrics.opentelemetry import OpenTelemetryMetrics, OpenTelemetrySpans, hashed
from celery_idempotent.metrics.prometheus import PrometheusMetrics
from celery_idempotent.stores import Record
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.testing import (
    Crash,
    StandInLease,
    assert_takes_effect_once,
    crash_at,
    inactive,
    is_active,
    lease_for,
    override_store,
    set_active,
)


def by_order(order_id: str) -> str:
    return order_id


policy = Policy(key="order_id", lease_ttl=30, result_ttl="7d", failure_ttl=timedelta(hours=1), on_conflict="wait")
Policy(key=["order_id", "line"], remember_failures=ValueError, fingerprint=["note"], compress_above="4KiB")
Policy(key=by_order, on_store_error="raise")
assert_type(Unique(key="order_id", until="done", for_="2h"), Unique)
Unique(key=by_order, debounce=30, max_wait=timedelta(minutes=5))
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


def choosy(event: Event) -> None:
    match event:
        case Replayed():
            assert_type(event.age, float)
            assert_type(event.original, str)
        case Deferred():
            assert_type(event.copy, int)
        case _:
            assert_type(event.task_id, str)


class Nothing:
    def __contains__(self, kind: object) -> bool:
        return False


add_hook(hook)
add_hook(choosy, {Replayed, Deferred})
add_hook(hook, Nothing())
add_hook(lambda: None)  # pyright: ignore[reportArgumentType]
remove_hook(hook)


def received(event: Replayed, key: str, task_id: str, **kwargs: object) -> None: ...


task_replayed.connect(received)
task_replayed.connect(received, sender=None, weak=False)
assert_type(task_replayed.kind, type[Event])
signals: list[EventSignal] = [task_replayed, task_deferred, store_failed]


@task_deferred.connect
def deferred(event: Deferred, **kwargs: object) -> None: ...


counts = prometheus.install(port=9540)
assert_type(counts, PrometheusMetrics)
counted: list[Hook] = [counts, PrometheusMetrics(), OpenTelemetryMetrics(), OpenTelemetrySpans(hashed)]
remove_hook(counts)
opentelemetry.install(key=hashed)
opentelemetry.install(key=b"no")  # pyright: ignore[reportArgumentType]
assert_type(hashed("key"), str)


def body(task: IdempotentTask) -> None:
    assert_type(task.lease, HeldLease | None)
    if task.lease is not None:
        assert_type(task.lease.fence, int)
        assert_type(task.lease.derived_key("gateway"), str)


@idempotent(store="redis://localhost/1", key="order_id", result_ttl="7d")
def charge(order_id: str, cents: int = 999) -> int:
    lease = current_lease()
    assert_type(lease, HeldLease | None)
    if lease is not None:
        lease.settle(cents, using=None)
    return cents


@idempotent(policy, name="shop.refund", namespace="shop", serializer="pickle")
async def refund(order_id: str, *, cents: int) -> tuple[str, int]:
    return order_id, cents


class Till:
    @idempotent({"store": store, "key": by_order})
    def book(self, order_id: str) -> None: ...

    @classmethod
    @idempotent(policy)
    def of_class(cls, order_id: str) -> str:
        return order_id

    @staticmethod
    @idempotent(policy)
    def static(order_id: str) -> str:
        return order_id


assert_type(charge("ORD-1"), int)
assert_type(charge(order_id="ORD-1", cents=1), int)
charge(1)  # pyright: ignore[reportArgumentType]
charge("ORD-1", crates=1)  # pyright: ignore[reportCallIssue]
assert_type(Till().book("ORD-1"), None)
assert_type(Till.of_class("ORD-1"), str)
assert_type(Till.static("ORD-1"), str)


async def call() -> None:
    assert_type(await refund("ORD-1", cents=1), tuple[str, int])
    later: Coroutine[Any, Any, tuple[str, int]] = refund("ORD-1", cents=1)
    await later
    await refund("ORD-1", 1)  # pyright: ignore[reportCallIssue]


async def asgi(scope: Any, receive: Any, send: Any) -> None:
    assert_type(await abegin(scope, "anna"), HeldLease | None)


def wsgi(environ: dict[str, Any], start_response: Any) -> list[bytes]:
    assert_type(begin(environ, 7), HeldLease | None)
    begin(environ)  # pyright: ignore[reportCallIssue]
    return []


def is_kept(response: Response) -> bool:
    return response.status < 500 or response.header("X-Kept") is not None


guarded = IdempotencyMiddleware(asgi, store="redis://localhost/1", scope=INSIDE, result_ttl="7d", remember=is_kept)
http_wsgi.IdempotencyMiddleware(wsgi, store=store, scope="X-Api-Key", response_max_bytes="1MiB")
http_wsgi.IdempotencyMiddleware("app")  # pyright: ignore[reportArgumentType]
http_django.IdempotencyMiddleware(lambda request: UNGUARDED)
assert_type(guarded.options, Options)
assert_type(http_wsgi.accepted(None, "/jobs/{id}"), tuple[dict[str, str], int, dict[str, str]])

with override_store() as fresh, inactive():
    assert_type(fresh, MemoryStore)
with override_store(store) as own:
    assert_type(own, Store)
override_store("memory://")  # pyright: ignore[reportArgumentType, reportCallIssue]
set_active(False)
assert_type(is_active(), bool)
with crash_at("after_effect", of=charge) as crash:
    assert_type(crash, Crash)
    assert_type(crash.happened, bool)
crash_at("after_efect")  # pyright: ignore[reportArgumentType]
with lease_for(charge, "ORD-1", cents=1) as stand_in:
    assert_type(stand_in, StandInLease)
    assert_type(stand_in.derived_key("charge"), str)
assert_takes_effect_once(charge, ("ORD-1", 1), effects=lambda: 0)
assert_takes_effect_once(charge, ("ORD-1", 1))  # pyright: ignore[reportCallIssue]
