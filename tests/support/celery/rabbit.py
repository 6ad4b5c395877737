"""A Celery app on RabbitMQ: its queues, classic or quorum, come from the environment.

QUEUE_TYPE: classic or quorum. EXCHANGE_TYPE: direct, as Celery has it by default, or topic, which its native delayed
delivery needs. PREFIX: how the names of the queues begin. There are three queues: `orders` is the default one, `mails`
another, and `dead` takes what was rejected from `orders`.
"""

from __future__ import annotations

import os
from typing import Any

from celery import Celery
from celery.exceptions import Reject
from kombu import Exchange, Queue

from celery_idempotent import IdempotentTask
from tests.support.celery.apps import from_env
from tests.support.celery.gates import Gates
from tests.support.celery.journal import Journal

app = from_env(Celery("rabbit"))
prefix = os.environ.get("PREFIX", "")
exchange_type = os.environ.get("EXCHANGE_TYPE", "direct")
queue_type = {"x-queue-type": os.environ.get("QUEUE_TYPE", "classic")}


def queue(name: str, **arguments: object) -> Queue:
    """Return a queue with an exchange of its own."""
    own = f"{prefix}{name}"
    return Queue(own, Exchange(own, type=exchange_type), routing_key=own, queue_arguments={**queue_type, **arguments})


app.conf.update(
    broker_write_url=os.environ.get("BROKER_WRITE_URL", app.conf.broker_url),
    broker_transport_options={"confirm_publish": os.environ.get("CONFIRM_PUBLISH") == "1"},
    worker_cancel_long_running_tasks_on_connection_loss=os.environ.get("CANCEL_ON_LOSS") == "1",
    broker_channel_error_retry=os.environ.get("CHANNEL_ERROR_RETRY") == "1",
    task_queues=[
        queue(
            "orders",
            **{"x-dead-letter-exchange": f"{prefix}dead", "x-dead-letter-routing-key": f"{prefix}dead"},
        ),
        queue("mails"),
        queue("dead"),
    ],
    task_default_queue=f"{prefix}orders",
    task_default_exchange=f"{prefix}orders",
    task_default_exchange_type=exchange_type,
    task_default_routing_key=f"{prefix}orders",
    task_publish_retry=True,
    task_publish_retry_policy={"max_retries": 1, "interval_start": 0.1},
)
app.conf.idempotency = {"lease_ttl": float(os.environ.get("LEASE_TTL", "60"))}


@app.task(base=IdempotentTask, bind=True, idempotency={"key": "order_id"})
def charge(self: Any, order_id: str) -> str:
    """Do the work between two gates."""
    info = self.request.delivery_info
    Journal.from_env().write("started", order_id, redelivered=info["redelivered"], routing_key=info["routing_key"])
    Gates.from_env().wait(f"before {order_id}")
    Journal.from_env().write("charged", order_id)
    Gates.from_env().wait(f"after {order_id}")
    return f"charged {order_id}"


@app.task(base=IdempotentTask, unique="document")
def index(document: int) -> int:
    """Is not published while a message waits."""
    Journal.from_env().write("indexed", document)
    return document


@app.task(base=IdempotentTask, unique={"key": "document", "debounce": 0.4})
def settle(document: int, version: int) -> int:
    """Runs once it has been quiet."""
    Journal.from_env().write("settled", document, version=version)
    return version


@app.task(base=IdempotentTask, bind=True, idempotency={"key": "order_id"}, max_retries=3)
def flaky(self: Any, order_id: str, failures: int, countdown: float) -> str:
    """Retries by hand until it has failed often enough."""
    Journal.from_env().write("tried", order_id, retries=self.request.retries)
    if self.request.retries < failures:
        Gates.from_env().wait(f"retry {order_id}")
        raise self.retry(countdown=countdown)
    Journal.from_env().write("charged", order_id)
    return f"{order_id} after {self.request.retries}"


@app.task(base=IdempotentTask, bind=True, idempotency={"key": "order_id"})
def picky(self: Any, order_id: str, requeue: bool) -> str:
    """Rejects what comes for the first time."""
    Journal.from_env().write("tried", order_id)
    if not self.request.delivery_info["redelivered"]:
        raise Reject("not now", requeue=requeue)
    Journal.from_env().write("charged", order_id)
    return f"charged {order_id}"
