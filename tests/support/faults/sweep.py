"""Runs kill sweeps, and counts what came of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from celery import Celery

from celery_idempotent.core.lease import HeldLease
from celery_idempotent.stores import Claim, Lease, State
from celery_idempotent.stores.redis import RedisStore
from tests.support.celery.apps import messages
from tests.support.celery.journal import Journal
from tests.support.faults.failpoints import POINTS, FailPoints
from tests.support.waiting import wait_until

MODULE = "tests.support.faults.sweep_app"
#: Everything must be over by then. What is measured is reported; what is asserted may take as long as this.
DEADLINE = 60.0


@dataclass
class Operation:
    """One published operation, and what its caller waits for."""

    name: str
    point: str
    result: Any
    last: Any

    @property
    def done(self) -> bool:
        return bool(self.last.ready())


@dataclass
class Row:
    """What the kills at one point led to."""

    point: str
    operations: int = 0
    killed: int = 0
    runs: int = 0
    effects: int = 0
    paid: int = 0
    sent: int = 0
    callbacks: int = 0
    callback_ids: int = 0
    shipped: int = 0
    lost: int = 0
    states: set[State | None] = field(default_factory=set)
    #: from the moment that Celery (child) or anybody (group) could act, to the next delivery or answer, in seconds
    recovery: list[float] = field(default_factory=list)

    def __str__(self) -> str:
        ms = f"{median(self.recovery) * 1000:6.0f} ms, worst {max(self.recovery) * 1000:.0f}" if self.recovery else "-"
        counts = (
            self.operations,
            self.killed,
            self.runs,
            self.effects,
            self.paid,
            self.sent,
            self.callbacks,
            self.lost,
        )
        return f"{self.point:36}" + "".join(f"{count:>8}" for count in counts) + f"   {ms}"


def table(title: str, rows: Sequence[Row]) -> str:
    names = ("operations", "killed", "runs", "effects", "paid", "sent", "links", "lost")
    head = f"{'point':36}" + "".join(f"{name[:7]:>8}" for name in names) + "   recovery: median"
    return "\n".join(["", title, head, *map(str, rows)])


@dataclass
class Sweep:
    """A worker that is killed at fail points, and everything that tells what happened.

    Arguments:
        app: What publishes.
        points: Arms the fail points.
        journal: What the tasks wrote.
        gateway: A directory with one file per payment that was taken.
        store: The worker's store.
        task: Name of the task in the app module.
    """

    app: Celery
    points: FailPoints
    journal: Journal
    gateway: Path
    store: RedisStore
    task: str = "charge"

    def publish(self, point: str, n: int = 0, *, group: bool = False) -> Operation:
        """Arm the point for a new operation, and send it."""
        name = f"{self.task}-{POINTS.index(point)}-{n}"
        self.points.arm(point, name, group=group)
        module = self.app.module
        if self.task == "plain":
            result = module.plain.delay(name)
            return Operation(name, point, result, result)
        first = module.charge.s(name)
        first.link(module.notify.s(name))
        last = (first | module.ship.s(name)).apply_async()
        return Operation(name, point, last.parent, last)

    def finish(self, operations: Sequence[Operation], *, answered: bool = False) -> None:
        """Wait until every operation is done and the broker is empty.

        Arguments:
            operations: What was published.
            answered: Wait for an answer after the kill, too. A message that is just handed out is nowhere in the broker
                for a moment.
        """
        wait_until(
            lambda: (
                all(operation.done and (not answered or self._is_answered(operation)) for operation in operations)
                and self._broker_is_empty()
            ),
            DEADLINE,
            lambda: (
                f"every caller to be answered; not yet: {[(o.name, o.point) for o in operations if not o.done]}, "
                f"{messages(self.app.conf.broker_url)} messages left; the journal:\n{self.journal}"
            ),
        )

    def _is_answered(self, op: Operation) -> bool:
        return any(self._next("answered", op, killed.at) for killed in self.journal.entries("killed", op.name))

    def _broker_is_empty(self) -> bool:
        return messages(self.app.conf.broker_url) == 0

    def row(self, point: str, operations: Sequence[Operation], recovery: Callable[[Operation], float | None]) -> Row:
        """Count what the operations of one point led to."""
        row = Row(point)
        for op in operations:
            row.operations += 1
            row.killed += self.journal.count("killed", op.name)
            row.runs += self.journal.count("started", op.name)
            row.effects += self.journal.count("charged", op.name)
            row.lost += op.result.get(timeout=5) != f"charged {op.name}"
            seconds = recovery(op)
            if seconds is not None:
                row.recovery.append(seconds)
            if self.task == "plain":
                continue
            row.lost += op.last.get(timeout=5) != f"shipped, charged {op.name}"
            row.paid += (self.gateway / self._derived_key(op.name)).exists()
            row.sent += self.journal.count("sent callback", op.name)
            notified = self.journal.entries("notified", op.name)
            row.callbacks += len(notified)
            row.callback_ids += len({entry.fields["id"] for entry in notified})
            row.shipped += self.journal.count("shipped", op.name)
            record = self.store.get(self._key(op.name))
            row.states.add(record.state if record else None)
        return row

    def after_the_child(self, op: Operation) -> float | None:
        """Seconds from Celery's notice of the lost child to the next delivery; None if Celery needed none."""
        noticed = self.journal.entries("noticed", op.result.id)
        return self._next("delivered", op, noticed[0].at) if noticed else None

    def after_the_worker(self, op: Operation, lease: float) -> float | None:
        """Seconds from the later of the broker's redelivery and the lease's end to the answer."""
        [killed] = self.journal.entries("killed", op.name)
        redelivered, answered = self._next("delivered", op, killed.at), self._next("answered", op, killed.at)
        assert redelivered is not None
        assert answered is not None
        return max(0.0, answered - max(redelivered, lease))

    def _next(self, event: str, op: Operation, after: float) -> float | None:
        """Return how long after a point in time the next event of an operation came."""
        return min((e.at - after for e in self.journal.entries(event, op.result.id) if e.at > after), default=None)

    def _key(self, name: str) -> str:
        return f"idem:{MODULE}.charge::{name}"

    def _derived_key(self, name: str) -> str:
        lease = Lease(Claim(self._key(name), "", 1, 1), 0)
        return HeldLease(self.store, lease, time.monotonic()).derived_key("charge")
