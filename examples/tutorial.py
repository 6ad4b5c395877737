"""What the tutorial kills by hand: docs/tutorial.md says what to do with it."""

import os
import time
from pathlib import Path

from celery import Celery

from celery_idempotent import IdempotentTask

LEDGER = Path(os.environ.get("LEDGER", "ledger.txt"))
#: Seconds for what takes time here: each half of a charge, and a lease.
SECONDS = float(os.environ.get("SECONDS", "10"))

app = Celery(
    "tutorial",
    broker=os.environ.get("BROKER_URL", "redis://localhost/0"),
    backend=os.environ.get("RESULT_URL", "redis://localhost/0"),
)
app.conf.broker_connection_retry_on_startup = True
app.conf.broker_transport_options = {
    "visibility_timeout": 3 * SECONDS
}  # longer than the tasks, short enough to wait for
app.conf.idempotency_store = os.environ.get("STORE_URL", "redis://localhost/1")


def charge_card(order_id: str, cents: int) -> str:
    """Charge a card, which takes its time before the money moves and after it has moved."""
    print(f"process {os.getpid()} charges {order_id}", flush=True)
    time.sleep(SECONDS)
    with LEDGER.open("a") as ledger:
        ledger.write(f"charged {order_id} {cents}\n")
    print(f"process {os.getpid()} has charged {order_id}", flush=True)
    time.sleep(SECONDS)
    return f"receipt for {order_id}"


@app.task(acks_late=True, reject_on_worker_lost=True)
def plain_charge(order_id: str, cents: int) -> str:
    """Charge an order, on plain Celery."""
    return charge_card(order_id, cents)


@app.task(base=IdempotentTask, idempotency={"key": "order_id", "lease_ttl": SECONDS})
def charge(order_id: str, cents: int) -> str:
    """Charge an order once."""
    return charge_card(order_id, cents)
