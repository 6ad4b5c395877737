"""A Celery app for every pool: what the pool tests send orders to."""

from __future__ import annotations

import os
import signal
import threading
from asyncio import CancelledError
from typing import Any

from celery import Celery

from celery_idempotent import IdempotentTask
from celery_idempotent.celery import app as binding
from tests.support.celery.apps import from_env
from tests.support.celery.gates import Gates
from tests.support.celery.journal import Journal

app = from_env(Celery("pooled"))
app.conf.worker_pool_restarts = True
app.conf.idempotency = {"lease_ttl": float(os.environ.get("LEASE_TTL", "60"))}
# Every greenlet that acks or stores a result takes a connection of kombu or Celery; redis-py gives out 100.
app.conf.redis_max_connections = 1000
app.conf.broker_transport_options = {**app.conf.broker_transport_options, "max_connections": 1000}
#: With what a body leaves, the first time.
EXITS = {"exit": SystemExit(3), "interrupt": KeyboardInterrupt()}
binding.GRACE = float(os.environ.get("GRACE", binding.GRACE))


@app.task(base=IdempotentTask, bind=True, idempotency={"key": "order_id"}, max_retries=3)
def charge(self: Any, order_id: str, ending: str = "return", gate: str = "") -> str:
    """Ends as it is told, after waiting at its gate."""
    journal = Journal.from_env()
    journal.write("started", order_id, retries=self.request.retries)
    Gates.from_env().wait(gate or f"gate {order_id}")
    if ending == "raise":
        raise ValueError(f"no {order_id}")
    if ending == "quit":
        os.kill(os.getpid(), signal.SIGQUIT)
        Gates.from_env().wait("quit")
    if ending == "abandon":
        raise CancelledError(order_id)
    if ending in EXITS and journal.count("started", order_id) == 1:
        raise EXITS[ending]
    if ending == "retry" and not self.request.retries:
        raise self.retry(countdown=0)
    journal.write("charged", order_id)
    return f"charged {order_id}"


@app.task(base=IdempotentTask, acks_late=False, idempotency={"key": "order_id", "allow_early_ack": True})
def leave(order_id: str) -> None:
    """Exits, when its message was acked."""
    raise SystemExit(3)


@app.task(base=IdempotentTask, idempotency={"key": "order_id"}, rate_limit="1/m")
def seldom(order_id: str) -> str:
    """May run once a minute in each worker."""
    Journal.from_env().write("charged", order_id)
    return f"charged {order_id}"


class Checked(IdempotentTask):
    """Has a hook that exits the first time."""

    abstract = True

    def before_start(self, task_id: str, args: Any, kwargs: Any) -> None:
        """Exit, unless it has before."""
        journal = Journal.from_env()
        journal.write("checked", args[0])
        if journal.count("checked", args[0]) == 1:
            raise SystemExit(3)


@app.task(base=Checked, idempotency={"key": "order_id"})
def charge_checked(order_id: str) -> str:
    """Runs once its hook lets it."""
    Journal.from_env().write("charged", order_id)
    return f"charged {order_id}"


_barriers: dict[int, threading.Barrier] = {}


@app.task(base=IdempotentTask, idempotency={"key": "order_id"})
def meet(order_id: str, size: int) -> str:
    """Ends when so many are running, all at the same time."""
    Journal.from_env().write("started", order_id)
    _barriers.setdefault(size, threading.Barrier(size)).wait(60)
    return f"met {order_id}"


@app.task
def echo(text: str) -> str:
    """A plain task."""
    return text
