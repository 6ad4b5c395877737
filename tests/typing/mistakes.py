"""What mypy and pyright find: each line has the error of both. One that is found no more is an ignore without use."""

from __future__ import annotations

import sqlite3
from typing import Any

import psycopg

from celery_idempotent import (
    IdempotencyOptions,
    IdempotentTask,
    Policy,
    Unique,
    UniqueOptions,
    add_hook,
    current_lease,
    idempotent,
)
from celery_idempotent.http import HttpOptions, IdempotencyMiddleware, begin
from celery_idempotent.http import wsgi as http_wsgi
from celery_idempotent.metrics import opentelemetry
from celery_idempotent.rq import idempotent as idempotent_job
from celery_idempotent.testing import assert_takes_effect_once, crash_at, override_store

# -- options by name ---------------------------------------------------------------------------------------------------

Policy(kee="order_id")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
Policy(lese_ttl=30)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
Policy(key=1)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
Policy(on_conflict="wiat")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
Policy(on_duplicate="skip")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
Policy(on_store_error="ignore")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
Policy(lease_ttl=None)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
Policy(lease_ttl=[60])  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
Policy(result_ttl={"days": 7})  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
Policy(max_crashes="5")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
Policy(max_crashes=1.5)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
Policy(remember_failures="ValueError")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
Policy(remember_failures=BaseException)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
Policy(compress_above=1.5)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
Policy(store=6379)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
Policy(fingerprint=1)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
Policy(history="no")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
Unique(kee="order_id")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
Unique(until="end")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
Unique(on_duplicate="replay")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
Unique(debounce=[30])  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
Unique(for_=None)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]

# -- dicts of options --------------------------------------------------------------------------------------------------

key: IdempotencyOptions = {"kee": "order_id"}  # type: ignore[typeddict-unknown-key]  # pyright: ignore[reportAssignmentType]
literal: IdempotencyOptions = {"on_conflict": "wiat"}  # type: ignore[typeddict-item]  # pyright: ignore[reportAssignmentType]
ttl: IdempotencyOptions = {"result_ttl": b"7d"}  # type: ignore[typeddict-item]  # pyright: ignore[reportAssignmentType]
until: UniqueOptions = {"until": "end"}  # type: ignore[typeddict-item]  # pyright: ignore[reportAssignmentType]
name: UniqueOptions = {"keys": ["order_id"]}  # type: ignore[typeddict-unknown-key]  # pyright: ignore[reportAssignmentType]


class Charge(IdempotentTask):
    idempotency = {"kee": "order_id"}  # type: ignore[assignment]  # pyright: ignore[reportAssignmentType]
    unique = {"kee": "order_id"}  # type: ignore[assignment]  # pyright: ignore[reportAssignmentType]


class Refund(IdempotentTask):
    idempotency = {"key": "order_id", "on_conflict": "wiat"}  # type: ignore[assignment]  # pyright: ignore[reportAssignmentType]
    unique = {"until": "end"}  # type: ignore[assignment]  # pyright: ignore[reportAssignmentType]


class Ship(IdempotentTask):
    idempotency = "order_id"  # type: ignore[assignment]  # pyright: ignore[reportAssignmentType]
    unique = 7  # type: ignore[assignment]  # pyright: ignore[reportAssignmentType]


# -- functions and jobs ------------------------------------------------------------------------------------------------


@idempotent(store="redis://localhost/1", kee="order_id")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue, reportUntypedFunctionDecorator]
def by_name(order_id: str) -> str:
    return order_id


@idempotent(store="redis://localhost/1", key="order_id", on_conflict="wiat")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
def by_value(order_id: str) -> str:
    return order_id


@idempotent({"kee": "order_id"})  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
def by_dict(order_id: str) -> str:
    return order_id


@idempotent  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
def bare(order_id: str) -> str:
    return order_id


@idempotent_job(kee="order_id")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue, reportUntypedFunctionDecorator]
def job(order_id: str) -> str:
    return order_id


@idempotent_job(key="order_id", result_ttl=None)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
def job_by_value(order_id: str) -> str:
    return order_id


@idempotent(store="redis://localhost/1", key="order_id")
def charge(order_id: str, cents: int = 999) -> int:
    return cents


@idempotent(store="redis://localhost/1", key="order_id")
async def refund(order_id: str, *, cents: int) -> int:
    return cents


@idempotent_job(key="order_id")
def book(order_id: str) -> int:
    return 1


charge(1)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
charge("ORD-1", crates=1)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
charge("ORD-1").upper()  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
book(1)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


async def call() -> None:
    await refund("ORD-1", 1)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    refund("ORD-1", cents=1).bit_length()  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]


# -- publishing, and the lease -----------------------------------------------------------------------------------------


def publish(task: IdempotentTask) -> None:
    task.apply_async(("ORD-1",), idempotency_key=1)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    task.apply_async(("ORD-1",), idempotency_kee="req-42")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    task.apply_async(("ORD-1",), unique="order_id")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    task.apply_async(("ORD-1",), unique={"kee": "order_id"})  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    task.apply_async(("ORD-1",), unique={"until": "end"})  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    task.apply_async(("ORD-1",), lease_ttl=60)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    task.apply(("ORD-1",), idempotency_key=1)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    task.key_for("ORD-1", idempotency_key=1)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    task.lease.fense()  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
    task.lease.settle("receipt", using=None)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    task.lease.settle("receipt", using=sqlite3.connect("shop.db").cursor())  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    task.lease.settle("receipt")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    task.lease.derived_key()  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]


async def settle_in_coroutine(task: IdempotentTask) -> None:
    connection = await psycopg.AsyncConnection.connect("")
    task.lease.settle("receipt", using=connection)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    await task.lease.asettle("receipt", using=connection)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


current_lease().check()  # type: ignore[union-attr]  # pyright: ignore[reportOptionalMemberAccess]

# -- events, metrics, HTTP ---------------------------------------------------------------------------------------------

add_hook(lambda: None)  # type: ignore[arg-type, misc]  # pyright: ignore[reportArgumentType]
opentelemetry.install(key=b"no")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


async def asgi(scope: Any, receive: Any, send: Any) -> None: ...


def application(environ: dict[str, Any], start_response: Any) -> list[bytes]:
    begin(environ)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    return []


IdempotencyMiddleware(asgi, store="redis://localhost/1")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
IdempotencyMiddleware(asgi, store="redis://localhost/1", scope=None, methds=["POST"])  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
IdempotencyMiddleware(asgi, store="redis://localhost/1", scope=None, on_conflict="defer")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
http_wsgi.IdempotencyMiddleware(application, store="redis://localhost/1", scope=7)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
settings: HttpOptions = {"store": "redis://localhost/1"}  # type: ignore[typeddict-item]  # pyright: ignore[reportAssignmentType]
http_wsgi.IdempotencyMiddleware("app", scope=None)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]

# -- tests -------------------------------------------------------------------------------------------------------------

override_store("memory://")  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
crash_at("after_efect")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
assert_takes_effect_once(asgi, ("ORD-1", 1))  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
