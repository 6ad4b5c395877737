"""What a user's type checker sees of the public names; mypy and pyright check this file, nothing runs it."""

from __future__ import annotations

import sqlite3
from collections.abc import Coroutine
from datetime import timedelta
from typing import Any

import psycopg
from typing_extensions import assert_type

from celery_idempotent import (
    ConfigurationError,
    Event,
    IdempotencyError,
    IdempotencyOptions,
    IdempotentTask,
    NoLease,
    Policy,
    Store,
    StoreUnreachable,
    Unique,
    UniqueOptions,
    add_hook,
    current_lease,
    idempotent,
    open_store,
    remove_hook,
)
from celery_idempotent.celery.signals import EventSignal, store_failed, task_deferred, task_replayed
from celery_idempotent.core.lease import HeldLease
from celery_idempotent.events import Deferred, Hook, Replayed
from celery_idempotent.http import (
    INSIDE,
    UNGUARDED,
    HttpOptions,
    IdempotencyMiddleware,
    Options,
    Response,
    abegin,
    begin,
)
from celery_idempotent.http import django as http_django
from celery_idempotent.http import wsgi as http_wsgi
from celery_idempotent.metrics import opentelemetry, prometheus
from celery_idempotent.metrics.opentelemetry import OpenTelemetryMetrics, OpenTelemetrySpans, hashed
from celery_idempotent.metrics.prometheus import PrometheusMetrics
from celery_idempotent.rq import idempotent as idempotent_job
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
assert_type(policy.lease_ttl, float)
assert_type(policy.remember_failures, tuple[type[Exception], ...])

shared: IdempotencyOptions = {"result_ttl": "7d", "lease_ttl": timedelta(minutes=1), "remember_failures": [ValueError]}
waiting: UniqueOptions = {"key": "order_id", "until": "done", "for": "2h", "on_duplicate": "raise"}
assert_type(Policy(**shared), Policy)
assert_type(Unique(**waiting), Unique)


class Charge(IdempotentTask):
    name = "shop.charge"
    idempotency = {"key": ["order_id", "line"], "scope": "tenant", "fingerprint": False}
    unique = {"key": by_order, "debounce": 30}

    def run(self, order_id: str, line: int) -> str:
        return self.lease.derived_key("gateway")


class Refund(IdempotentTask):
    idempotency = Policy(key="order_id")
    unique = True


class Ship(IdempotentTask):
    idempotency = shared
    unique = "order_id"


store = open_store("redis://localhost/1")
assert_type(store, Store)
assert_type(store.get("key"), Record | None)

errors: list[type[IdempotencyError]] = [ConfigurationError, StoreUnreachable, NoLease]


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
assert_type(hashed("key"), str)


def body(task: IdempotentTask) -> None:
    assert_type(task.lease, HeldLease)
    assert_type(task.lease.fence, int)
    assert_type(task.lease.derived_key("gateway"), str)
    assert_type(task.lease.check(), None)
    assert_type(current_lease(), HeldLease | None)
    assert_type(task.key_for("ORD-1", idempotency_key="req-42"), str)


@idempotent(store="redis://localhost/1", key="order_id", result_ttl="7d")
def charge(order_id: str, cents: int = 999) -> int:
    lease = current_lease()
    assert_type(lease, HeldLease | None)
    if lease is not None:
        lease.settle(cents, using="default")
        lease.settle(cents, using=sqlite3.connect("shop.db"))
        with psycopg.connect("") as connection:
            lease.settle(cents, using=connection)
        items: list[dict[str, object]] = []
        lease.settle(cents, using=items)
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


@idempotent_job(key="order_id", result_ttl="7d", on_conflict="raise", name="shop.book")
def book(order_id: str, cents: int = 999) -> int:
    return cents


@idempotent_job(policy)
async def unbook(order_id: str) -> str:
    return order_id


assert_type(book("ORD-1"), int)
assert_type(charge("ORD-1"), int)
assert_type(charge(order_id="ORD-1", cents=1), int)
assert_type(Till().book("ORD-1"), None)
assert_type(Till.of_class("ORD-1"), str)
assert_type(Till.static("ORD-1"), str)


async def call() -> None:
    assert_type(await refund("ORD-1", cents=1), tuple[str, int])
    later: Coroutine[Any, Any, tuple[str, int]] = refund("ORD-1", cents=1)
    await later
    assert_type(await unbook("ORD-1"), str)


async def asgi(scope: Any, receive: Any, send: Any) -> None:
    assert_type(await abegin(scope, "anna"), HeldLease | None)


def wsgi(environ: dict[str, Any], start_response: Any) -> list[bytes]:
    assert_type(begin(environ, 7), HeldLease | None)
    return []


def is_kept(response: Response) -> bool:
    return response.status < 500 or response.header("X-Kept") is not None


guarded = IdempotencyMiddleware(asgi, store="redis://localhost/1", scope=INSIDE, result_ttl="7d", remember=is_kept)
http_wsgi.IdempotencyMiddleware(wsgi, store=store, scope="X-Api-Key", response_max_bytes="1MiB")
http_django.IdempotencyMiddleware(lambda request: UNGUARDED)
http_settings: HttpOptions = {"store": "redis://localhost/1", "scope": INSIDE, "lease_ttl": "30s", "paths": ["/orders"]}
assert_type(guarded.options, Options)
assert_type(http_wsgi.accepted(None, "/jobs/{id}"), tuple[dict[str, str], int, dict[str, str]])

with override_store() as fresh, inactive():
    assert_type(fresh, MemoryStore)
with override_store(store) as own:
    assert_type(own, Store)
set_active(False)
assert_type(is_active(), bool)
with crash_at("after_effect", of=charge) as crash:
    assert_type(crash, Crash)
    assert_type(crash.happened, bool)
with lease_for(charge, "ORD-1", cents=1) as stand_in:
    assert_type(stand_in, StandInLease)
    assert_type(stand_in.derived_key("charge"), str)
assert_takes_effect_once(charge, ("ORD-1", 1), effects=lambda: 0)
