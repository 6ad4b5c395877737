"""What is left when a task has ended: the record, the result, the messages, the effects."""

from __future__ import annotations

from typing import Any

from celery import Celery
from celery.result import AsyncResult, EagerResult

from celery_idempotent.stores import Record, State
from celery_idempotent.stores.redis import RedisStore
from celery_idempotent.stores.redis.records import packed
from tests.support.celery.apps import messages
from tests.support.celery.journal import Journal
from tests.support.servers import open_client
from tests.support.waiting import wait_until

PARTING = "tests.support.celery.parting"


class Aftermath:
    """Looks at all four at once, for operations of one task: `part` of `parting.py`, unless another is named."""

    def __init__(self, app: Celery, store_url: str, journal: Journal, task: str = f"{PARTING}.part") -> None:
        self.app = app
        self.task = task
        self.store = RedisStore.from_url(store_url)
        self.store_url = store_url
        self.journal = journal

    def record(self, order: str = "ORD-1") -> Record | None:
        """Return the record of an order."""
        return self.store.get(self._key(order))

    def of(self, result: AsyncResult, order: str = "ORD-1") -> dict[str, Any]:
        """Return what is left of the task behind a result, as words and numbers."""
        record = self.record(order)
        with open_client(self.store_url) as client:
            mark = client.hget(self._key(order), b"attempt:" + packed(result.id))
        left: dict[str, Any] = {
            "record": str(record.state) if record else "none",
            "reason": record.reason if record else "",
            "crashes": record.crashes if record else 0,
            "attempt": int(mark or 0),
        }
        return left | {
            # A result that was final once is not asked for again.
            "result": str(result.state if isinstance(result, EagerResult) else self.app.AsyncResult(result.id).state),
            "messages": messages(self.app.conf.broker_url),
            "effects": self.journal.count("charged", order),
        }

    def expect(
        self,
        result: AsyncResult,
        outcome: str,
        record: State | None,
        reason: str = "",
        *,
        order: str = "ORD-1",
        crashes: int = 0,
        attempt: int = 0,
        messages: int = 0,
        effects: int = 1,
        timeout: float = 30.0,
    ) -> None:
        """Wait until all is as expected, and fail with what is not.

        Args:
            result: of the task.
            outcome: its state in the result backend.
            record: the state of its record, or None where there is to be none.
            reason: why it was released.
            order: the operation.
            crashes: how many holders in a row died.
            attempt: the attempt mark of the task.
            messages: what the broker still holds: 0 is acked.
            effects: how often the order was charged.
            timeout: seconds.
        """
        wanted = {"record": str(record) if record else "none", "reason": reason, "crashes": crashes}
        wanted |= {"attempt": attempt, "result": outcome, "messages": messages, "effects": effects}
        wait_until(
            lambda: self.of(result, order) == wanted,
            timeout,
            lambda: f"\n  {wanted}, got\n  {self.of(result, order)}\n{self.journal}",
        )

    def _key(self, order: str) -> str:
        return f"idem:{self.task}::{order}"
