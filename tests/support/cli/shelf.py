"""A store in this process that wants a schema and does not expire by itself; and records to put into any store."""

from __future__ import annotations

from celery_idempotent.stores import Claim, Lease, Outcome, Reason, Release, State, Store
from celery_idempotent.stores.memory import MemoryStore


class Shelf(MemoryStore):
    """Asks for a schema once, and notes how large the batches are that it is to purge."""

    def __init__(self) -> None:
        super().__init__()
        self.schema = "CREATE TABLE shelf ();\n"
        self.applied = 0
        self.batches: list[int | None] = []

    def pending_schema(self) -> str:
        return self.schema

    def apply_schema(self) -> None:
        self.schema = ""
        self.applied += 1

    def purge(self, limit: int | None = None) -> int:
        self.batches.append(limit)
        return super().purge(limit)

    def fill_expired(self, number: int) -> None:
        """Put in so many records that have expired."""
        for index in range(number):
            settle(self, f"idem:old::{index}", ttl=1)
        self.offset += 2


def hold(store: Store, key: str, *, lease_ttl: float = 60) -> Lease:
    """Take the lease on a key."""
    lease = store.acquire(Claim(key, f"owner of {key}", lease_ttl, 600, task_id="T1", holder="host:1"))
    assert isinstance(lease, Lease)
    return lease


def settle(store: Store, key: str, *, ttl: float = 600) -> None:
    """Put in a record of a completed operation."""
    store.settle(hold(store, key), Outcome(State.COMPLETED, b"json:1"), ttl=ttl)


def release(store: Store, key: str) -> None:
    """Put in a record of an operation that failed, and may run again."""
    store.release(hold(store, key), Release(Reason.FAILED))


def keys(store: Store) -> set[str]:
    """Return all keys."""
    return {record.key for record in store.scan()}
