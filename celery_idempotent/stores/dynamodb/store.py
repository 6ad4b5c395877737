"""A store in DynamoDB: one item per record, every write under a condition on the item.

What a verb decides is decided in this process, by `rules`; the item's version, or its owner, sees to it that the
decision still holds when it is written. A write that is refused brings back the item in its way.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from ...errors import ConfigurationError, LeaseLost, RecordUnreadable, StoreError, StoreUnreachable
from .. import rules
from ..base import Store, pass_by_unreadable
from ..history import Line, expiry, grouped, lines, past_events
from ..records import (
    HISTORY_LIMIT,
    Claim,
    HistoryEntry,
    Lease,
    Outcome,
    PastEvent,
    Reason,
    Record,
    Refusal,
    Release,
    State,
    Verdict,
    new_owner,
)
from ..rules import SECOND
from . import schema
from .connections import Address, ConditionFailed, Table, code
from .records import Clock, Condition, Item, StoredRow, Update, fitting, item_of, kept_of, mark_of, named, number, text


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

    def __init__(self, place: Address) -> None:
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
        return cls(Address.in_url(url))

    def acquire(self, claim: Claim) -> Lease | Refusal:
        # A copy will find a record, and reading it is cheaper than a write that is refused.
        kept = self._records.read(claim.key) if claim.is_copy else None
        for _ in range(ROUNDS):
            try:
                return self._acquire(claim, kept, self._records.now())
            except ConditionFailed as overtaken:
                kept = self._records.kept(overtaken.item)
        raise self._records.contended(claim.key)

    def _acquire(self, claim: Claim, kept: StoredRow | None, now: int) -> Lease | Refusal:
        row = if_not_expired(kept, now)
        before = marks_of(row, claim)
        answer, granted = rules.acquire(claim.key, row, claim, now)
        if isinstance(answer, Lease):
            if row is None:  # none of the fences that were here may come again
                granted.fence = max(granted.fence, self._last_fence + 1, kept.row.fence + 1 if kept else 0)
                answer = replace(answer, fence=granted.fence)
            self._records.put(claim.key, self._records.with_new_lease(granted, claim), kept)
            self._last_fence = max(self._last_fence, granted.fence)
        elif kept is not None and answer.verdict is Verdict.CRASH_LOOP:
            self._records.put(claim.key, replace(kept, row=granted), kept)
        elif kept is not None and answer.verdict is Verdict.CONFLICT:
            write_marks(self._records, claim, kept, before)
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
                if not code(error) and not isinstance(error, RecordUnreadable):
                    break  # no server answers: the next would wait in vain too
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
            except ConditionFailed as overtaken:
                kept = self._records.kept(overtaken.item)
            row = if_not_expired(kept, now)
            settled = rules.settle(row, lease, outcome, ttl, now)
            if settled is None:
                raise LeaseLost(f"The lease on {lease.key!r} is held by another holder: nothing was settled.")
            if settled is row:
                return None
            item, condition = item_of(lease.key, StoredRow(settled)), unchanged(kept)
        raise self._records.contended(lease.key)

    def _settled(self, lease: Lease, outcome: Outcome, ttl: float, now: int) -> tuple[Item, Condition]:
        """Return the settled item, and the condition that the lease is still held, or its record was deleted."""
        row = rules.settle(None, lease, outcome, ttl, now)
        assert row is not None
        condition = Condition()
        held(condition, lease)
        condition.given(number(lease.fence), "fence")
        condition.or_gone()
        return item_of(lease.key, StoredRow(row)), condition

    def transact_item(self, lease: Lease, outcome: Outcome, *, ttl: float) -> dict[str, Any]:
        """Return the write that settles, for your own ``TransactWriteItems``: it is done with your items, or none is.

        The transaction is cancelled if the lease was lost. Pass it to a client (not a resource) of boto3.

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
                "is added to your list, and written with it. Outside of a task, call the store's transact_item()."
            )
        using.append(self.transact_item(lease, outcome, ttl=ttl))

    def release(self, lease: Lease, release: Release) -> bool:
        for _ in range(ROUNDS):
            item = self._table.read(lease.key)
            kept, now = self._records.kept(item), self._records.now()
            row = if_not_expired(kept, now)
            before = marks_of(row, lease.claim)
            free = rules.release(row, lease, release, now)
            if item is None or kept is None or row is None:
                return free
            try:
                if free:
                    self._free(lease, changes(item, item_of(lease.key, kept)))
                else:
                    write_marks(self._records, lease.claim, kept, before)
            except ConditionFailed:
                continue
            return free
        raise self._records.contended(lease.key)

    def _free(self, lease: Lease, update: Update) -> None:
        if not update.empty:
            held(update, lease)
            self._table.update(lease.key, update)

    def mark_shutdown(self, lease: Lease) -> bool:
        update = Update()
        update.set(text(Reason.SHUTDOWN.value), "reason")
        held(update, lease)
        try:
            self._table.update(lease.key, update)
        except ConditionFailed:
            return False
        return True

    def mark_dispatched(self, key: str, task_id: str) -> bool:
        update = Update()
        update.append(text(task_id), "announcers")
        for unsettled in (State.IN_PROGRESS, State.RELEASED):
            update.given(text(unsettled.value), "state", relation="<>")
        update.given(number(self._records.now() // SECOND), "expires", relation=">")
        update.lacks(text(task_id), "announcers")
        update.room(rules.MOST_DISPATCHED, "announcers")
        for _ in range(ROUNDS):
            try:
                self._table.update(key, update)
            except ConditionFailed as overtaken:
                item = overtaken.item
            else:
                return True
            # Nothing to announce, or it is announced; or another has to be forgotten for it.
            kept = self._records.kept(item)
            row = if_not_expired(kept, self._records.now())
            if item is None or kept is None or row is None or not rules.mark_dispatched(row, task_id):
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
        row = if_not_expired(self._records.kept(item), now)
        return None if row is None else rules.view(key, row, now)

    def append_history(self, entries: Sequence[HistoryEntry]) -> None:
        self._histories.append(entries, self._records.now())

    def history(self, key: str) -> list[PastEvent]:
        return self._histories.read(key, self._records.now())

    def delete(self, key: str) -> bool:
        self._histories.forget(key)
        item = self._table.call("delete_item", Key={"key": text(key)}, ReturnValues="ALL_OLD").get("Attributes")
        try:
            return if_not_expired(self._records.kept(item), self._records.now()) is not None
        except RecordUnreadable:
            return True

    def scan(self, *, prefix: str = "", state: State | None = None) -> Iterator[Record]:
        for item in self._table.scan(prefix):
            try:
                record = self._record(item["key"]["S"], item)
            except RecordUnreadable:
                if "lines" not in item:  # which a history has
                    pass_by_unreadable(item["key"]["S"])
                continue
            if record is not None and state in (None, record.state):
                yield record

    def pending_schema(self) -> str:
        return schema.pending(self._table)

    def apply_schema(self) -> None:
        schema.apply(self._table)

    def usage(self, sample: Sequence[str] = ()) -> dict[str, int]:
        table = self._table.call("describe_table").get("Table", {})
        return {
            "counted_records": int(table.get("ItemCount", 0)),
            "counted_bytes": int(table.get("TableSizeBytes", 0)),
        }

    def ping(self) -> None:
        self._table.read("celery_idempotent:ping")

    def close(self) -> None:
        self._table.close()


#: How often a decision is taken again because another client wrote in between.
ROUNDS = 20


class Records:
    """Read and write rows, with the clocks that they are judged by.

    Arguments:
        place: Which table, and where.
    """

    def __init__(self, place: Address) -> None:
        self.clock = Clock()
        self.table = Table(place, self.clock)

    def now(self) -> int:
        """Return the server's time in microseconds; the first call of a store's life sends a request for it."""
        if not self.clock.is_set:
            self.table.read("celery_idempotent:clock")
        return self.clock.now()

    def kept(self, item: Item | None) -> StoredRow | None:
        """Return what an item keeps, as this machine sees it now."""
        return None if item is None else kept_of(item, self.clock)

    def read(self, key: str) -> StoredRow | None:
        """Return what is kept under a key."""
        return self.kept(self.table.read(key))

    def with_new_lease(self, row: rules.Row, claim: Claim) -> StoredRow:
        """Return the row with its lease beginning now, as seen by this machine."""
        return StoredRow(row, lease=int(claim.lease_ttl * SECOND), watch={self.clock.machine: self.clock.ticks()})

    def put(self, key: str, new: StoredRow, old: StoredRow | None) -> None:
        """Write a row in the place of what was read before, or of nothing.

        Raises:
            ConditionFailed: another client has written since.
        """
        self.table.put(item_of(key, replace(new, version=new_owner())), unchanged(old))

    def contended(self, key: str) -> StoreUnreachable:
        """Return the error for a record that others kept changing."""
        return StoreUnreachable(
            f"The record {key!r} in the idempotency store {self.table.place} was changed by others {ROUNDS} times "
            "while it was being decided on. Try again later."
        )


def if_not_expired(kept: StoredRow | None, now: int) -> rules.Row | None:
    """Return the row unless it has expired; a lease that this machine has not seen run out never has."""
    if kept is None:
        return None
    row = kept.row
    lives = row.expires > now or (row.state is State.IN_PROGRESS and row.lease_end > now)
    return row if lives else None


def unchanged(kept: StoredRow | None) -> Condition:
    """Require that an item is what it was, in every detail."""
    condition = Condition()
    if kept is None:
        condition.absent("key")
    else:
        condition.given(text(kept.version), "version")
    return condition


def held(condition: Condition, lease: Lease) -> None:
    """Require that the lease is still its owner's."""
    condition.given(text(lease.owner), "owner")
    condition.given(text(State.IN_PROGRESS.value), "state")


def changes(old: Item, new: Item) -> Update:
    """Return the update that makes one item of the other; those that wait and watch write their own part."""
    update = Update()
    for name in (old.keys() | new.keys()) - {"version", "waiting", "watch"}:
        if name not in new:
            update.remove(name)
        elif old.get(name) != new[name]:
            update.set(new[name], name)
    return update


def renewed(records: Records, lease: Lease) -> bool:
    """Renew a lease, in one request if it is still held; return whether it is."""
    for _ in range(ROUNDS):
        try:
            _renew(records, lease)
        except ConditionFailed as overtaken:
            kept, now = records.kept(overtaken.item), records.now()
        else:
            return True
        row = rules.renew(if_not_expired(kept, now), lease, now)
        if row is None:
            return False
        try:
            records.put(lease.key, records.with_new_lease(row, lease.claim), kept)
        except ConditionFailed:
            continue
        return True
    raise records.contended(lease.key)


def _renew(records: Records, lease: Lease) -> None:
    now, machine = records.now(), records.clock.machine
    row = rules.renew(rules.forgotten(lease), lease, now)
    assert row is not None
    with_new_lease = item_of(lease.key, records.with_new_lease(row, lease.claim))
    update = Update()
    for name in ("beat", "lease", "watch", "expires"):
        update.set(with_new_lease[name], name)
    held(update, lease)
    update.given(number(now // SECOND), "expires", relation=">")
    # A request that was given up may arrive long after; it must not bring back an earlier beginning of the lease.
    update.given(with_new_lease["watch"]["M"][machine], "watch", machine, relation="<=")
    item = records.table.update(lease.key, update, ReturnValues="ALL_NEW")
    if item is not None and "crashes" in item:
        row = rules.renew(kept_of(item, records.clock).row, lease, now)
        if row is not None and not row.crashes:  # a holder that has held for so long is well
            update = Update()
            update.remove("crashes")
            held(update, lease)
            records.table.update(lease.key, update)


def marks_of(row: rules.Row | None, claim: Claim) -> dict[str, Item]:
    """Return what an item has of the claim's task: which copy came last, and from which attempt on its copies count."""
    marks: dict[str, Item] = {}
    if row and claim.task_id in row.waiting:
        marks["waiting"] = mark_of(row.waiting[claim.task_id])
    if row and claim.task_id in row.attempts:
        marks["attempts"] = number(row.attempts[claim.task_id])
    return marks


def write_marks(records: Records, claim: Claim, kept: StoredRow, before: dict[str, Item]) -> None:
    """Write down which copy of a waiting message came last, and since when this machine has seen the lease.

    And from which attempt on copies of it count, where that has changed. Each waiting task has a line of its own, and
    each machine: a crowd does not keep one another from writing.
    """
    row, machine, update, after = kept.row, records.clock.machine, Update(), marks_of(kept.row, claim)
    for name in ("waiting", "attempts"):
        old, new, place = before.get(name), after.get(name), (name, named(claim.task_id))
        if new == old:
            continue
        if new is None:
            update.remove(*place)
        else:
            update.set(new, *place)
        if old is None:
            update.absent(*place)
        else:
            update.given(old, *place)
    if row.state is State.IN_PROGRESS and machine not in kept.watch:
        update.set(number(records.clock.ticks()), "watch", machine)
    if not update.empty:
        # A lease that was renewed meanwhile would be watched from before its renewal.
        update.given(text(kept.beat), "beat")
        update.given(text(row.state.value), "state")
        records.table.update(claim.key, update)


#: Lines beyond the newest that an item may have: to cut them off is a write of its own.
SLACK = 10


def history_key(key: str) -> str:
    """Return the key of the item; it is no record, and is passed by where records are listed."""
    return f"{key}:~history"  # as in Redis, the name of no record


class Histories:
    """The histories in one table.

    Arguments:
        table: The table, which has the records too.
    """

    def __init__(self, table: Table) -> None:
        self._table = table

    def append(self, entries: Iterable[HistoryEntry], now: int) -> None:
        """Add lines, at the server's time `now` in microseconds."""
        for key, mine in grouped(entries).items():
            new, expires = _listed(lines(mine, now)), number(-(-expiry(mine, now) // SECOND))
            try:
                self._add(key, new, expires, now)
            except ConditionFailed:  # there is none, or what is there has expired
                item = {"key": text(history_key(key)), "lines": new, "expires": expires}
                self._table.call("put_item", Item=item)

    def _add(self, key: str, new: Item, expires: Item, now: int) -> None:
        reply = self._table.call(
            "update_item",
            Key={"key": text(history_key(key))},
            UpdateExpression="SET #lines = list_append(#lines, :new), #expires = :expires",
            ConditionExpression="#expires > :now",
            ExpressionAttributeNames={"#lines": "lines", "#expires": "expires"},
            ExpressionAttributeValues={":new": new, ":expires": expires, ":now": number(now // SECOND)},
            ReturnValues="UPDATED_NEW",
        )
        size = len(reply["Attributes"]["lines"]["L"])
        if size > HISTORY_LIMIT + SLACK:
            self._cut(key, size)

    def _cut(self, key: str, size: int) -> None:
        oldest = ", ".join(f"#lines[{place}]" for place in range(size - HISTORY_LIMIT))
        try:
            self._table.call(
                "update_item",
                Key={"key": text(history_key(key))},
                UpdateExpression=f"REMOVE {oldest}",
                ConditionExpression="size(#lines) = :size",
                ExpressionAttributeNames={"#lines": "lines"},
                ExpressionAttributeValues={":size": number(size)},
            )
        except ConditionFailed:
            pass  # another client has added lines since, and will cut

    def read(self, key: str, now: int) -> list[PastEvent]:
        """Return what was noted of a key.

        Raises:
            RecordUnreadable: it was not written by celery_idempotent.
        """
        item = self._table.read(history_key(key))
        try:
            if item is None or int(item["expires"]["N"]) * SECOND <= now:
                return []
            return past_events([_line(line["L"]) for line in item["lines"]["L"]], now)
        except (KeyError, ValueError) as error:
            raise RecordUnreadable(
                f"The item {history_key(key)!r} is not the history of {key!r} ({error}). Delete it if it is garbage."
            ) from error

    def forget(self, key: str) -> None:
        """Delete the history of a key."""
        self._table.call("delete_item", Key={"key": text(history_key(key))})


def _listed(found: Sequence[Line]) -> Item:
    return {"L": [{"L": [number(at), text(line)]} for at, line in found]}


def _line(pair: Sequence[Item]) -> Line:
    return int(pair[0]["N"]), str(pair[1]["S"])
