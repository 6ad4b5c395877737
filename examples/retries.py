"""Retries: what should be tried again, what failed for good, and what a duplicate gets in either case.

celery -A examples.retries worker --concurrency 2
python -c 'from examples.retries import charge; print(charge.delay("ORD-1", 999).get(timeout=30))'
"""

import os
from pathlib import Path

from celery import Celery

from celery_idempotent import IdempotentTask

LEDGER = Path(os.environ.get("LEDGER", "ledger.txt"))

app = Celery(
    "retries",
    broker=os.environ.get("BROKER_URL", "redis://localhost/0"),
    backend=os.environ.get("RESULT_URL", "redis://localhost/0"),
)
app.conf.broker_connection_retry_on_startup = True
app.conf.idempotency_store = os.environ.get("STORE_URL", "redis://localhost/1")


class BankBusy(Exception):
    """The bank asks to be called again later."""


class CardDeclined(Exception):
    """The bank says no, and will say no again."""


def call_bank(order_id: str, cents: int, attempt: int) -> str:
    """Charge a card at a bank that is busy for the first two calls, and declines large sums."""
    with LEDGER.open("a") as ledger:
        ledger.write(f"called {order_id} {attempt}\n")
    if cents > 100_000:
        raise CardDeclined(f"{order_id} is above the limit")
    if attempt < 2:
        raise BankBusy("call again")
    return f"receipt for {order_id}"


@app.task(
    bind=True,
    base=IdempotentTask,
    max_retries=5,
    idempotency={"key": "order_id", "remember_failures": CardDeclined},
)
def charge(self, order_id: str, cents: int) -> str:
    """Charge an order; try again while the bank is busy, and never again once it has declined."""
    try:
        return call_bank(order_id, cents, self.request.retries)
    except BankBusy as error:
        raise self.retry(exc=error, countdown=0.5) from error


@app.task(
    bind=True,
    base=IdempotentTask,
    autoretry_for=(BankBusy,),
    max_retries=5,
    default_retry_delay=0.5,
    idempotency={"key": "order_id"},
)
def refund(self, order_id: str, cents: int) -> str:
    """Refund an order; Celery retries it by itself."""
    return call_bank(order_id, cents, self.request.retries)
