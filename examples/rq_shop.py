"""RQ: one job whose key is the order, and who dies while it runs.

With a Redis on localhost, in one terminal:

    rq worker --with-scheduler -w celery_idempotent.rq.IdempotentWorker

and in another, as often as you like:

    python -m examples.rq_shop ORD-1 999

While a job runs, kill the horse that the worker's log names: `kill -9 PID`. The job is retried at once. Every charge is
a line in ledger.txt. There will be one.
"""

import os
import sys
import time
from pathlib import Path

from redis import Redis
from rq import Queue, Retry
from rq.job import Job

from celery_idempotent.rq import idempotent

LEDGER = Path(os.environ.get("LEDGER", "ledger.txt"))
SECONDS = float(os.environ.get("SECONDS", "10"))
URL = os.environ.get("RQ_REDIS_URL", "redis://localhost:6379/0")


class CardDeclined(Exception):
    """Final: the card will not be better at the next try."""


@idempotent(key="order_id", result_ttl="7d", remember_failures=[CardDeclined])
def charge(order_id: str, cents: int) -> str:
    """Charge an order once, however often it is enqueued or run within a week."""
    if cents > 100_000:
        raise CardDeclined(f"{order_id} is above the limit")
    print(f"process {os.getpid()} charges {order_id}", flush=True)
    time.sleep(SECONDS)
    with LEDGER.open("a") as ledger:
        ledger.write(f"charged {order_id} {cents}\n")
    return f"receipt for {order_id}"


def order(order_id: str, cents: int) -> Job:
    """Enqueue a charge, which RQ is to try again if its horse dies."""
    queue = Queue(connection=Redis.from_url(URL))
    return queue.enqueue("examples.rq_shop.charge", order_id, cents, retry=Retry(max=3))


def wait(job: Job) -> str:
    """Return how a job has ended, and what it returned."""
    while not (job.get_status() and (job.is_finished or job.is_failed)):
        time.sleep(0.1)
    said = job.get_meta().get("idempotency", {})
    return f"{job.get_status().value}, {said.get('outcome', 'not run')}: {job.return_value(refresh=True)}"


if __name__ == "__main__":
    print(wait(order(sys.argv[1], int(sys.argv[2]))))
