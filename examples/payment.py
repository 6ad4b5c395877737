"""A payment whose gateway honours idempotency keys: the effect happens once even if the body runs twice.

A process that is killed after the gateway has charged the card and before the result is recorded leaves nothing behind
that says so. The task runs again, and hands the gateway the same key as before.

    celery -A examples.payment worker --concurrency 2
    python -c 'from examples.payment import pay; print(pay.delay("ORD-1", 999).get(timeout=60))'

While it runs, kill the process that the worker's log names. `payments/` stands for the gateway's own records: it will
hold one charge.
"""

import os
import time
from pathlib import Path

from celery import Celery

from celery_idempotent import IdempotentTask

GATEWAY = Path(os.environ.get("GATEWAY", "payments"))
SECONDS = float(os.environ.get("SECONDS", "10"))

app = Celery(
    "payment",
    broker=os.environ.get("BROKER_URL", "redis://localhost/0"),
    backend=os.environ.get("RESULT_URL", "redis://localhost/0"),
)
app.conf.broker_connection_retry_on_startup = True
app.conf.idempotency_store = os.environ.get("STORE_URL", "redis://localhost/1")


def gateway_charge(order_id: str, cents: int, idempotency_key: str) -> str:
    """Charge a card as a payment gateway does: a key that it knows gets the first answer, and no second charge."""
    GATEWAY.mkdir(exist_ok=True)
    try:
        with (GATEWAY / idempotency_key).open("x") as charge:
            charge.write(f"{order_id} {cents}")
    except FileExistsError:
        print(f"the gateway knows {idempotency_key}", flush=True)
    return f"receipt {idempotency_key[:8]} for {order_id}"


@app.task(bind=True, base=IdempotentTask, idempotency={"key": "order_id"})
def pay(self, order_id: str, cents: int) -> str:
    """Pay for an order."""
    receipt = gateway_charge(order_id, cents, self.lease.derived_key("gateway"))
    print(f"process {os.getpid()} has paid {order_id}", flush=True)
    time.sleep(SECONDS)  # the window: paid, and not yet recorded
    return receipt
