"""The first example: one task whose key is the order, one whose key is the task id.

With a Redis on localhost, in one terminal:

    celery -A examples.shop worker --concurrency 2

and in another, as often as you like:

    python -c 'from examples.shop import charge; print(charge.delay("ORD-1", 999).get(timeout=10))'

Every charge is a line in ledger.txt. There will be one.
"""

import os
from pathlib import Path

from celery import Celery

from celery_idempotent import IdempotentTask

LEDGER = Path(os.environ.get("LEDGER", "ledger.txt"))

app = Celery(
    "shop",
    broker=os.environ.get("BROKER_URL", "redis://localhost/0"),
    backend=os.environ.get("RESULT_URL", "redis://localhost/0"),
)
app.conf.broker_connection_retry_on_startup = True
app.conf.idempotency_store = os.environ.get("STORE_URL", "redis://localhost/1")


@app.task(base=IdempotentTask, idempotency={"key": "order_id", "result_ttl": "7d"})
def charge(order_id: str, cents: int) -> str:
    """Charge an order once, however often it is published or delivered within a week."""
    with LEDGER.open("a") as ledger:
        ledger.write(f"charged {order_id} {cents}\n")
    return f"receipt for {order_id}"


@app.task(base=IdempotentTask)
def resize(path: str) -> str:
    """Resize an image once per call: without a key, the task id is the key, and redeliveries are absorbed."""
    with LEDGER.open("a") as ledger:
        ledger.write(f"resized {path}\n")
    return f"small {path}"
