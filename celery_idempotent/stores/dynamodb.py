"""DynamoDB: one item per record, every write under a condition on the item.

What a verb decides is decided in this process, by `rules`; the item's version, or its owner, sees to it that the
decision still holds when it is written. A write that is refused brings back the item in its way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from ..errors import ConfigurationError, LeaseLost, RecordUnreadable, StoreError
from ..notes import Note, Noted
from ..records import Claim, Lease, Outcome, Reason, Record, Refusal, Release, State, Verdict
from . import dynamodb_schema, rules
from .base import Store
from .dynamodb_client import Overtaken
from .dynamodb_expressions import Condition, Update
from .dynamodb_history import Histories
from .dynamodb_items import Item, Kept, fitting, item_of, number, text
from .dynamodb_records import ROUNDS, Records, changes, held, living, marked, renewed, unchanged
from .dynamodb_refusals import code
from .dynamodb_urls import Place
from .rules import SECOND

__all__ = ["DynamoDBStore"]


class DynamoDBStore(Store):
    """Keep the records in a table of DynamoDB.

    No clock is compared with another worker's. A lease has run out when this machine has seen it unrenewed for its full
    length; so a dead worker's task waits for up to one ``lease_ttl`` from when another machine first meets its lease.
    Weaker than the contract where an operator deletes a record and its key is claimed again within a second: the new
    fence may be below the old one.

    Arguments:
        place: Which table, and where.
    """

    keeps_history = True

    def __init__(self, place: Place) -> None:
        self._records = Records(place)
        self._table = self._records.table
        self._histories = Histories(self._table)
        self._last_fence = 0

    @classmethod
    def from_url(cls, url: str) -> DynamoDBStore:
        """Return a store in the table that ``url`` names.

        Arguments:
            url: ``dynamodb://table?region=eu-west-1``, also with ``endpoint_url``, ``profile`` and ``timeout``.
                Credentials are found by boto3: a role, a profile, the environment.

        Raises:
            ConfigurationError: the URL cannot be meant.
        """
        return cls(Place.in_url(url))

    def acquire(self, claim: Claim) -> Lease | Refusal:
        # A copy will find a record, and reading it is cheaper than a write that is refused.
        kept = self._records.read(claim.key) if claim.is_copy else None
        for _ in range(ROUNDS):
            try:
                return self._acquire(claim, kept, self._records.now())
            except Overtaken as overtaken:
                kept = self._records.kept(overtaken.item)
        raise self._records.contended(claim.key)

    def _acquire(self, claim: Claim, kept: Kept | None, now: int) -> Lease | Refusal:
        row = living(kept, now)
        mark = row.waiting.get(claim.task_id) if row else None
        answer, granted = rules.acquire(claim.key, row, claim, now)
        if isinstance(answer, Lease):
            if row is None:  # none of the fences that were here may come again
                granted.fence = max(granted.fence, self._last_fence + 1, kept.row.fence + 1 if kept else 0)
                answer = replace(answer, fence=granted.fence)
            self._records.put(claim.key, self._records.begun(granted, claim), kept)
            self._last_fence = max(self._last_fence, granted.fence)
        elif kept is not None and answer.verdict is Verdict.CRASH_LOOP:
            self._records.put(claim.key, replace(kept, row=granted), kept)
        elif kept is not None and answer.verdict is Verdict.CONFLICT:
            marked(self._records, claim, kept, mark)
        return answer

    def renew(self, leases: Sequence[Lease]) -> Sequence[Lease]:
        lost: list[Lease] = []
        failed: StoreError | None = None
        for lease in leases:
            try:
                if not renewed(self._records, lease):
                    lost.append(lease)
            except StoreError as error:
                failed = error
                if not code(error):  # nobody answers: the next would wait in vain too
                    break
        if failed is not None:
            raise failed
        return lost

    def settle(self, lease: Lease, outcome: Outcome, *, ttl: float) -> None:
        outcome = fitting(lease.key, outcome)
        now = self._records.now()
        item, condition = self._settled(lease, outcome, ttl, now)
        for _ in range(ROUNDS):
            try:
                return self._table.put(item, condition)
            except Overtaken as overtaken:
                kept = self._records.kept(overtaken.item)
            row = living(kept, now)
            settled = rules.settle(row, lease, outcome, ttl, now)
            if settled is None:
                raise LeaseLost(f"The lease on {lease.key!r} is held by somebody else: nothing was settled.")
            if settled is row:
                return None
            item, condition = item_of(lease.key, Kept(settled)), unchanged(kept)
        raise self._records.contended(lease.key)

    def _settled(self, lease: Lease, outcome: Outcome, ttl: float, now: int) -> tuple[Item, Condition]:
        """Return the settled item, and the condition that the lease is still ours, or was forgotten."""
        row = rules.settle(None, lease, outcome, ttl, now)
        assert row is not None
        condition = Condition()
        held(condition, lease)
        condition.given(number(lease.fence), "fence")
        condition.or_gone()
        return item_of(lease.key, Kept(row)), condition

    def transact_item(self, lease: Lease, outcome: Outcome, *, ttl: float) -> dict[str, Any]:
        """Return the write that settles, for your own ``TransactWriteItems``: it is done with your items, or none is.

        The transaction is cancelled if the lease is not ours any more. Pass it to a client (not a resource) of boto3.

        Arguments:
            lease: The lease.
            outcome: How the operation ended.
            ttl: Seconds the record is kept.

        Returns:
            One of the ``TransactItems``.
        """
        item, condition = self._settled(lease, fitting(lease.key, outcome), ttl, self._records.now())
        return {"Put": {"TableName": self._table.place.table, "Item": item, **condition.request()}}

    def settle_within(self, lease: Lease, outcome: Outcome, *, ttl: float, using: Any) -> None:
        if not isinstance(using, list):
            raise ConfigurationError(
                "settle: expected using= to be the list of items that you will pass to TransactWriteItems, got "
                f"{type(using).__module__}.{type(using).__qualname__}. DynamoDB keeps no transaction open: the record "
                "is added to your list, and written with it. Outside of a task, ask the store's transact_item()."
            )
        using.append(self.transact_item(lease, outcome, ttl=ttl))

    def release(self, lease: Lease, release: Release) -> bool:
        for _ in range(ROUNDS):
            item = self._table.read(lease.key)
            kept, now = self._records.kept(item), self._records.now()
            row = living(kept, now)
            if not rules.release(row, lease, release, now):
                return False
            if item is None or kept is None or row is None:
                return True
            update = changes(item, item_of(lease.key, kept))
            if update.empty:
                return True
            try:
                held(update, lease)
                self._table.update(lease.key, update)
            except Overtaken:
                continue
            return True
        raise self._records.contended(lease.key)

    def mark_shutdown(self, lease: Lease) -> bool:
        update = Update()
        update.set(text(Reason.SHUTDOWN.value), "reason")
        held(update, lease)
        try:
            self._table.update(lease.key, update)
        except Overtaken:
            return False
        return True

    def announce(self, key: str, task_id: str) -> bool:
        update = Update()
        update.append(text(task_id), "announcers")
        for unsettled in (State.IN_PROGRESS, State.RELEASED):
            update.given(text(unsettled.value), "state", relation="<>")
        update.given(number(self._records.now() // SECOND), "expires", relation=">")
        update.lacks(text(task_id), "announcers")
        update.room(rules.MOST_ANNOUNCED, "announcers")
        for _ in range(ROUNDS):
            try:
                self._table.update(key, update)
            except Overtaken as overtaken:
                item = overtaken.item
            else:
                return True
            # Nothing to announce, or it is announced; or another has to be forgotten for it.
            kept = self._records.kept(item)
            row = living(kept, self._records.now())
            if item is None or kept is None or row is None or not rules.announce(row, task_id):
                return False
            update = changes(item, item_of(key, kept))
            if update.empty:
                return True
            update.given(text(kept.version), "version")
        raise self._records.contended(key)

    def get(self, key: str) -> Record | None:
        return self._record(key, self._table.read(key))

    def _record(self, key: str, item: Item | None) -> Record | None:
        now = self._records.now()
        row = living(self._records.kept(item), now)
        return None if row is None else rules.view(key, row, now)

    def note(self, notes: Sequence[Note]) -> None:
        self._histories.note(notes, self._records.now())

    def history(self, key: str) -> list[Noted]:
        return self._histories.tell(key, self._records.now())

    def delete(self, key: str) -> bool:
        self._histories.forget(key)
        item = self._table.ask("delete_item", Key={"key": text(key)}, ReturnValues="ALL_OLD").get("Attributes")
        try:
            return living(self._records.kept(item), self._records.now()) is not None
        except RecordUnreadable:
            return True

    def scan(self, *, prefix: str = "", state: State | None = None) -> Iterator[Record]:
        for item in self._table.scan(prefix):
            try:
                record = self._record(item["key"]["S"], item)
            except RecordUnreadable:
                continue
            if record is not None and state in (None, record.state):
                yield record

    def pending_schema(self) -> str:
        return dynamodb_schema.pending(self._table)

    def apply_schema(self) -> None:
        dynamodb_schema.apply(self._table)

    def room(self, sample: Sequence[str] = ()) -> dict[str, int]:
        told = self._table.ask("describe_table").get("Table", {})
        return {"counted_records": int(told.get("ItemCount", 0)), "counted_bytes": int(told.get("TableSizeBytes", 0))}

    def ping(self) -> None:
        self._table.read("celery_idempotent:ping")

    def close(self) -> None:
        self._table.close()
