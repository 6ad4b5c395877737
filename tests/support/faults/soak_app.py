"""The tasks of the soak: every run writes down what it held, when, and what it did."""

from __future__ import annotations

import functools
import os
import random
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from celery import Celery, signals, states

from celery_idempotent import IdempotentTask, events
from celery_idempotent.stores import Lease
from celery_idempotent.stores.redis import RedisStore
from tests.support.celery.apps import from_env
from tests.support.celery.journal import Journal
from tests.support.faults.ledger import LEASE_TTL
from tests.support.faults.run_account import TOLD, write_down

app = from_env(Celery("soak"))
# A machine under load loses children faster than crashes could be forgotten: the loop breaker is not what is tested.
app.conf.idempotency = {"lease_ttl": LEASE_TTL, "max_crashes": 1000}


@contextmanager
def run(task: Any, order_id: str) -> Iterator[Journal]:
    journal, fence = Journal.from_env(), task.lease.fence
    journal.write("started", order_id, fence=fence, retries=task.request.retries)
    try:
        yield journal
    finally:
        journal.write("ended", order_id, fence=fence)


def take_effect(task: Any, order_id: str, journal: Journal) -> dict[str, str]:
    """Do something once more than it should be done, and ask a gateway that knows better."""
    journal.write("charged", order_id, fence=task.lease.fence)
    payment = Path(os.environ["GATEWAY"]) / task.lease.derived_key("charge")
    try:
        payment.touch(exist_ok=False)
        journal.write("paid", order_id)
    except FileExistsError:
        journal.write("paid before", order_id)
    time.sleep(random.uniform(0, 0.05))  # what a kill may fall into
    return {"order": order_id, "run": uuid.uuid4().hex}


@app.task(base=IdempotentTask, bind=True, idempotency={"key": "order_id"})
def charge(self: Any, order_id: str, seconds: float = 0.02) -> dict[str, str]:
    with run(self, order_id) as journal:
        time.sleep(seconds)
        return take_effect(self, order_id, journal)


@app.task(base=IdempotentTask, bind=True, idempotency={"key": "order_id"}, max_retries=None)
def flaky(self: Any, order_id: str) -> dict[str, str]:
    """Retries by hand, twice."""
    with run(self, order_id) as journal:
        if self.request.retries < 2:
            # The retry takes over as soon as it is published, which may be before this run has left its body.
            journal.write("ended", order_id, fence=self.lease.fence)
            raise self.retry(countdown=random.uniform(0, 0.5))
        return take_effect(self, order_id, journal)


@app.task(
    base=IdempotentTask,
    bind=True,
    idempotency={"key": "order_id"},
    autoretry_for=(OSError,),
    retry_kwargs={"countdown": 0.2},
)
def shaky(self: Any, order_id: str) -> dict[str, str]:
    """Fails once, and is retried for it."""
    with run(self, order_id) as journal:
        if self.request.retries < 1:
            raise OSError("not yet")
        return take_effect(self, order_id, journal)


@app.task(base=IdempotentTask, bind=True)
def ship(self: Any, receipt: dict[str, str]) -> dict[str, str]:
    """The rest of a chain."""
    Journal.from_env().write("shipped", receipt["order"], id=self.request.id)
    return receipt


def answered(task_id: str = "", state: str = "", **_: Any) -> None:
    if state == states.SUCCESS:
        Journal.from_env().write("answered", task_id)


def confirm(key: str, fence: int, sent: float) -> None:
    Journal.from_env().write("confirmed", key, fence=fence, sent=sent)


def tell(event: events.Event) -> None:
    if isinstance(event, (events.SettleFailed, events.LeaseLost)):
        Journal.from_env().write(type(event).__name__, event.key)


def watch_the_store() -> None:
    """Write down when the store was asked for what it granted."""
    acquire, renew, settle = RedisStore.acquire, RedisStore.renew, RedisStore.settle

    @functools.wraps(acquire)
    def acquired(self: Any, claim: Any) -> Any:
        sent, found = time.monotonic(), acquire(self, claim)
        if isinstance(found, Lease):
            confirm(found.key, found.fence, sent)
        return found

    @functools.wraps(renew)
    def renewed(self: Any, leases: Any) -> Any:
        sent, lost = time.monotonic(), renew(self, leases)
        for lease in leases:
            if lease not in lost:
                confirm(lease.key, lease.fence, sent)
        return lost

    @functools.wraps(settle)
    def settled(self: Any, lease: Any, *args: Any, **kwargs: Any) -> None:
        settle(self, lease, *args, **kwargs)
        Journal.from_env().write("settled", lease.key, fence=lease.fence)

    for method in (acquired, renewed, settled):
        setattr(RedisStore, method.__name__, method)


if "SOAK" in os.environ:  # in workers, and never in the test's own process
    watch_the_store()
    events.add_hook(tell)
    events.add_hook(write_down, TOLD)
    signals.task_postrun.connect(answered, weak=False)
