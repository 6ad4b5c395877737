"""The orders of a shop whose charges and records are rows of one database, committed together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from celery import states

from celery_idempotent.errors import LeaseLost, StoreUnreachable
from celery_idempotent.stores import Claim, Lease, Outcome, Record, Refusal, Release, Verdict, rules
from celery_idempotent.stores.memory import MemoryStore

from .celery import LEASE_TTL
from .charges import LATER, Charges, Run


class Transaction:
    """A transaction, which a process that dies rolls back.

    Arguments:
        store: The database.
    """

    def __init__(self, store: Database) -> None:
        self.store = store
        self.effects: list[Callable[[], object]] = []
        self.rows: dict[str, rules.Row] = {}

    def commit(self) -> None:
        for effect in self.effects:
            effect()
        self.store._rows.update(self.rows)
        self.rollback()

    def rollback(self) -> None:
        """Let go of the rows that it has locked."""
        for key in self.rows:
            self.store.locked.pop(key, None)
        self.effects, self.rows = [], {}


class Database(MemoryStore):
    """A store that can be written within an open transaction, whose rows nobody waits for, as in PostgreSQL's."""

    def __init__(self) -> None:
        super().__init__()
        self.locked: dict[str, Transaction] = {}

    def settle_within(self, lease: Lease, outcome: Outcome, *, ttl: float, using: Any) -> None:
        self._check_unlocked(lease)
        now = self._now()
        row = rules.settle(self._row(lease.key, now), lease, outcome, ttl, now)
        if row is None:
            raise LeaseLost(f"{lease.key} is held by another holder")
        self.locked[lease.key] = using
        using.rows[lease.key] = row

    def acquire(self, claim: Claim) -> Lease | Refusal:
        if claim.key in self.locked:
            return Refusal(Verdict.CONFLICT, rules.view(claim.key, self._rows[claim.key], self._now(), claim))
        return super().acquire(claim)

    def renew(self, leases: Sequence[Lease]) -> Sequence[Lease]:
        return [lease for lease in leases if lease.key in self.locked and not self._is_owner(lease)] + [
            *super().renew([lease for lease in leases if lease.key not in self.locked])
        ]

    def _is_owner(self, lease: Lease) -> bool:
        return self._rows[lease.key].owner == lease.owner

    def _row(self, key: str, now: int) -> rules.Row | None:
        return self._rows[key] if key in self.locked else super()._row(key, now)  # nothing cleans up what is locked

    def _check_unlocked(self, lease: Lease) -> None:
        if lease.key in self.locked and self._is_owner(lease):
            raise StoreUnreachable(f"another transaction has locked {lease.key}")

    def settle(self, lease: Lease, outcome: Outcome, *, ttl: float) -> None:
        self._check_unlocked(lease)
        super().settle(lease, outcome, ttl=ttl)

    def release(self, lease: Lease, release: Release) -> bool:
        return self._is_owner(lease) if lease.key in self.locked else super().release(lease, release)

    def get(self, key: str) -> Record | None:
        row = self._row(key, self._now())
        return None if row is None else rules.view(key, row, self._now())


class Transactions(Charges):
    """Exactly the effects that are recorded, however its holder dies."""

    kind = "transactions"
    pools = ("prefork", "prefork", "threads", "greenlets")
    store = Database
    later = LATER[:-1]
    tasks = ("charge",)

    def begins(self, simulation: Any) -> None:
        super().begins(simulation)
        self.deadly, self.requeues, self.quietly, self.hands_over = "", 0, False, False
        choices = self.choices
        self.rolls_back, self.forgets = (
            choices.one_of("rolls back", [0, 0, 0.3]),
            choices.one_of("forgets", [0, 0, 0.2]),
        )
        self.raises_late = choices.one_of("raises late", [0, 0, 0.3])
        #: by order: the runs whose effects were committed
        self.committed: dict[str, list[int]] = {}

    def conclude(self, run: Run) -> None:
        choices, name = self.choices, f"run of {run.order}"
        transaction = Transaction(self.simulation.store)
        transaction.effects.append(lambda: self.committed.setdefault(run.order, []).append(run.number))
        try:
            run.held.settle(f"receipt {run.number}", using=transaction)
            open_for = choices.one_of(f"{name}: before it commits", self.long)
            self.world.sleep(open_for, f"run {run.number} has settled")
            if open_for > LEASE_TTL:  # if it is rolled back, another one may be faster to ask for the row it had locked
                self.simulation.calm = False
            if choices.chance(f"{name}: rolls back", self.rolls_back):
                raise ValueError("rolled back")
            if choices.chance(f"{name}: forgets to commit", self.forgets):
                run.excused = True
                return
            transaction.commit()
            self.world.tell(f"run {run.number} commits")
        finally:
            transaction.rollback()
        self.world.step()
        if choices.chance(f"{name}: raises late", self.raises_late):
            raise ValueError("after the commit")

    def asks(self, verb: str, args: Any, host: Any) -> None:
        super().asks(verb, args, host)
        for run in self.runs:
            if verb == "get" and run.worker is host and run.held.within is not None:
                self.settling.setdefault(run.held.lease.owner, self.world.now)

    def faults(self) -> list[Any]:
        return []

    def check(self) -> None:
        super().check()
        for order, runs in self.committed.items():
            if len(runs) > 1:
                self.fail(f"the effects of runs {runs} of {order} are committed")

    def ended(self) -> None:
        super().ended()
        for order, task_id in self.published_calls:
            meta = self.simulation.producer.backend.get_task_meta(task_id)
            # Where the store cannot be asked for long, whether a transaction was committed is not known.
            unsettled = [run.number for run in self.runs if run.order == order and run.unsettled]
            known = [f"receipt {number}" for number in self.committed.get(order, []) + unsettled]
            if meta["status"] == states.SUCCESS and meta["result"] not in known:
                self.fail(f"{task_id} got {meta['result']!r}, and {known} is committed")
            committed = [run for run in self.runs if run.number in self.committed.get(order, []) and not run.unsettled]
            own = [run for run in committed if run.task_id == task_id]
            # Of two deliveries of one message the first may fail, whose answer and ack are the message's.
            failed = [run for run in self.runs if run.task_id == task_id and run.ending == "raised" and run not in own]
            if meta["status"] == states.FAILURE and own and not failed and task_id not in self.time_is_over:
                self.fail(f"{task_id} failed with {meta['result']!r}, and its effect is committed")

    def check_failure(self, order: str, task_id: str, error: object) -> None:
        if type(error).__name__ == "SettleNotCommitted" and self.forgets:
            return
        super().check_failure(order, task_id, error)

    def check_conflict(self, claim: Any, record: Record) -> None:
        if record.key in self.simulation.store.locked:
            self.forget_copies(claim.task_id)  # nothing can be noted in a row that is locked
        else:
            super().check_conflict(claim, record)

    def check_trust(self, run: Run) -> None:
        if run.held.key not in self.simulation.store.locked:
            super().check_trust(run)
