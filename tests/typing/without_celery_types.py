"""What type checkers find where celery-types is not installed, once it is written down what `app.task` returns."""

from __future__ import annotations

from typing import Any

from celery import Celery
from typing_extensions import assert_type

from celery_idempotent import IdempotentTask, Policy
from celery_idempotent.core.lease import HeldLease

app: Any = Celery("shop")


def charge_order(order_id: str) -> str:
    return order_id


charge: IdempotentTask = app.task(base=IdempotentTask, idempotency=Policy(key="order_id"))(charge_order)
charge.apply_async(("ORD-1",), idempotency_key="req-42", unique=False, countdown=3)
charge.apply_async(("ORD-1",), idempotency_key=1)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
charge.apply_async(("ORD-1",), countdwn=3)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
charge.delay("ORD-1")  # pyright: ignore[reportUnknownMemberType]


class Book(IdempotentTask):
    idempotency = {"key": "order_id"}

    def run(self, order_id: str) -> str:
        assert_type(self.lease, HeldLease)
        return order_id


book: Book = app.register_task(Book())
book.apply_async(("ORD-1",), unique="order_id")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


@app.task(base=IdempotentTask, idempotency=Policy(kee="order_id"))  # type: ignore[call-arg, untyped-decorator]  # pyright: ignore[reportCallIssue]
def by_name(order_id: str) -> str:
    return order_id
