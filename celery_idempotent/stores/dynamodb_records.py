"""The records of one table: read, begun anew, and written where they are as they were."""

from __future__ import annotations

from dataclasses import replace

from ..errors import StoreUnreachable
from ..records import Claim, Lease, State, new_owner
from . import rules
from .dynamodb_client import Overtaken, Table
from .dynamodb_clock import Clock
from .dynamodb_expressions import Condition, Update
from .dynamodb_items import Item, Kept, item_of, kept_of, mark_of, named, number, text
from .dynamodb_urls import Place
from .rules import SECOND

__all__ = ["ROUNDS", "Records", "changes", "held", "living", "marked", "renewed", "unchanged"]

#: How often a decision is taken again because somebody else wrote in between.
ROUNDS = 20


class Records:
    """Read and write rows, with the clocks that they are judged by.

    Arguments:
        place: Which table, and where.
    """

    def __init__(self, place: Place) -> None:
        self.clock = Clock()
        self.table = Table(place, self.clock)

    def now(self) -> int:
        """Return the server's time in microseconds; the first time in a store's life, this asks for it."""
        if not self.clock.heard:
            self.table.read("celery_idempotent:clock")
        return self.clock.now()

    def kept(self, item: Item | None) -> Kept | None:
        """Return what an item keeps, as this machine sees it now."""
        return None if item is None else kept_of(item, self.clock)

    def read(self, key: str) -> Kept | None:
        """Return what is kept under a key."""
        return self.kept(self.table.read(key))

    def begun(self, row: rules.Row, claim: Claim) -> Kept:
        """Return the row with its lease beginning now, as seen by this machine."""
        return Kept(row, lease=int(claim.lease_ttl * SECOND), watch={self.clock.machine: self.clock.ticks()})

    def put(self, key: str, new: Kept, old: Kept | None) -> None:
        """Write a row in the place of what was read before, or of nothing.

        Raises:
            Overtaken: somebody else has written since.
        """
        self.table.put(item_of(key, replace(new, version=new_owner())), unchanged(old))

    def contended(self, key: str) -> StoreUnreachable:
        """Return the error for a record that others kept changing."""
        return StoreUnreachable(
            f"The record {key!r} in the idempotency store {self.table.place} was changed by others {ROUNDS} times "
            "while it was being decided on. Ask again later."
        )


def living(kept: Kept | None, now: int) -> rules.Row | None:
    """Return the row unless it has expired; a lease that this machine has not seen run out never has."""
    if kept is None:
        return None
    row = kept.row
    lives = row.expires > now or (row.state is State.IN_PROGRESS and row.lease_end > now)
    return row if lives else None


def unchanged(kept: Kept | None) -> Condition:
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
    """Return what makes one item of the other; not of who waits and watches, which is written by them."""
    update = Update()
    for name in (old.keys() | new.keys()) - {"version", "waiting", "watch"}:
        if name not in new:
            update.remove(name)
        elif old.get(name) != new[name]:
            update.set(new[name], name)
    return update


def renewed(records: Records, lease: Lease) -> bool:
    """Renew a lease, and tell whether it was still ours; in one request, if it was."""
    for _ in range(ROUNDS):
        try:
            _renew(records, lease)
        except Overtaken as overtaken:
            kept, now = records.kept(overtaken.item), records.now()
        else:
            return True
        row = rules.renew(living(kept, now), lease, now)
        if row is None:
            return False
        try:
            records.put(lease.key, records.begun(row, lease.claim), kept)
        except Overtaken:
            continue
        return True
    raise records.contended(lease.key)


def _renew(records: Records, lease: Lease) -> None:
    now, machine = records.now(), records.clock.machine
    row = rules.renew(None, lease, now)
    assert row is not None
    begun = item_of(lease.key, records.begun(row, lease.claim))
    update = Update()
    for name in ("beat", "lease", "watch", "expires"):
        update.set(begun[name], name)
    held(update, lease)
    update.given(number(now // SECOND), "expires", relation=">")
    # A request that was given up may arrive long after; it must not bring back an earlier beginning of the lease.
    update.given(begun["watch"]["M"][machine], "watch", machine, relation="<=")
    item = records.table.update(lease.key, update, ReturnValues="ALL_NEW")
    if item is not None and "crashes" in item:
        row = rules.renew(kept_of(item, records.clock).row, lease, now)
        if row is not None and not row.crashes:  # a holder that has held for so long is well
            update = Update()
            update.remove("crashes")
            held(update, lease)
            records.table.update(lease.key, update)


def marked(records: Records, claim: Claim, kept: Kept, before: tuple[int, int, str] | None) -> None:
    """Write down which copy of a waiting message came last, and since when this machine has seen the lease.

    Each waiting task has a line of its own, and each machine: a crowd does not keep one another from writing.
    """
    row, machine, update = kept.row, records.clock.machine, Update()
    mark = row.waiting.get(claim.task_id)
    if mark is not None and mark != before:
        place = ("waiting", named(claim.task_id))
        update.set(mark_of(mark), *place)
        if before is None:
            update.absent(*place)
        else:
            update.given(mark_of(before), *place)
    if row.state is State.IN_PROGRESS and machine not in kept.watch:
        update.set(number(records.clock.ticks()), "watch", machine)
    if not update.empty:
        # A lease that was renewed meanwhile would be watched from before its renewal.
        update.given(text(kept.beat), "beat")
        update.given(text(row.state.value), "state")
        records.table.update(claim.key, update)
