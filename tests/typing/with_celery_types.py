"""What type checkers see of tasks where celery-types is installed."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from celery import Celery, shared_task
from celery.canvas import Signature
from celery.exceptions import Retry
from celery.result import AsyncResult, EagerResult
from typing_extensions import assert_type

from celery_idempotent import IdempotentTask, Policy, Unique
from celery_idempotent.core.lease import HeldLease

app = Celery("shop")


@app.task(base=IdempotentTask, idempotency={"key": "order_id"})
def charge(order_id: str, cents: int = 999) -> str:
    return order_id


@app.task(
    bind=True, base=IdempotentTask, idempotency=Policy(key="order_id"), unique=Unique(key="order_id"), queue="money"
)
def refund(self: IdempotentTask, order_id: str) -> str:
    assert_type(self.lease, HeldLease)
    assert_type(self.request.retries, int)
    raise self.retry(countdown=3)


@shared_task(base=IdempotentTask, idempotency=Policy(key="order_id"))
def ship(order_id: str) -> str:
    return order_id


class Book(IdempotentTask):
    idempotency = {"key": "order_id"}

    def run(self, order_id: str) -> str:
        return self.lease.key


book = app.register_task(Book())

assert_type(charge, IdempotentTask)
assert_type(refund, IdempotentTask)
assert_type(ship, IdempotentTask)
assert_type(book, Book)
assert_type(charge.delay("ORD-1"), AsyncResult[Any])
assert_type(charge.apply_async(("ORD-1",), idempotency_key="req-42", countdown=3, queue="money"), AsyncResult[Any])
assert_type(
    charge.apply_async(("ORD-1",), unique={"key": "order_id", "for": "2h"}, eta=datetime.now()), AsyncResult[Any]
)
assert_type(charge.apply_async(unique=False, headers={"tenant": "shop"}, expires=60.0, priority=3), AsyncResult[Any])
assert_type(charge.apply(("ORD-1",), idempotency_key="req-42"), EagerResult[Any])
assert_type(charge.signature(("ORD-1",)), Signature[Any])
assert_type(charge.s("ORD-1"), Signature[Any])
assert_type(charge.retry(), Retry)
assert_type(charge.signature(("ORD-1",), idempotency_key="req-42"), Signature[Any])

charge.apply_async(("ORD-1",), idempotency_key=1)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
charge.apply_async(("ORD-1",), idempotency_kee="req-42")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
charge.apply_async(("ORD-1",), unique="order_id")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
charge.apply_async(("ORD-1",), countdwn=3)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
charge.apply_async(("ORD-1",), queue=3)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


@app.task(base=IdempotentTask, idempotency=Policy(kee="order_id"))  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
def by_name(order_id: str) -> str:
    return order_id


@app.task(base=IdempotentTask, unique=Unique(until="end"))  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
def by_value(order_id: str) -> str:
    return order_id


@app.task(bind=True, base=IdempotentTask)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
def takes_another_task(self: Book, order_id: str) -> str:
    return order_id
