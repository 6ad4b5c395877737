"""What is measured: a store and a guard on a real server, and the claims that a Celery task would make."""

from __future__ import annotations

import uuid
from dataclasses import replace
from typing import Any, TypeVar

import redis

from celery_idempotent.core.breaker import Breaker
from celery_idempotent.core.guard import Decision, Delivery, Guard
from celery_idempotent.core.heartbeat import Heartbeat
from celery_idempotent.core.history import DeliveryEvents
from celery_idempotent.core.lease import HeldLease
from celery_idempotent.core.policy import Policy
from celery_idempotent.core.results import Codec
from celery_idempotent.stores import Claim, Lease, Outcome, Reason, Release, State, Store
from celery_idempotent.stores.records import new_owner
from celery_idempotent.stores.redis import RedisStore
from tests.support.servers import RedisServer

__all__ = ["HOUR", "OUTCOME", "NoDelivery", "StoreSubject", "Subject", "guard_on"]

HOUR = 3600.0
S = TypeVar("S", bound="StoreSubject")
#: A task that returns an id, say.
OUTCOME = Outcome(State.COMPLETED, b'json:"ch_1N2"')


class NoDelivery(Delivery):
    """A delivery whose body does nothing."""

    def __init__(self, events: DeliveryEvents) -> None:
        super().__init__()
        self.identify(events)

    def body(self, held: HeldLease) -> str:
        return "ch_1N2"

    def ending(self, error: BaseException) -> Release:
        return Release(Reason.FAILED)


class StoreSubject:
    """A store of any kind, and a guard on it.

    Arguments:
        store: It is closed with the subject.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self.guard = guard_on(store)

    def __enter__(self: S) -> S:
        return self

    def __exit__(self, *error: object) -> None:
        self.store.close()

    def claim(self, key: str | None = None, task_id: str = "") -> Claim:
        """Return what a delivery asks for, on a new key if none is given; without a task id, the key is the task id."""
        return Claim(
            key or f"idem:shop.charge:{uuid.uuid4()}",
            new_owner(),
            lease_ttl=60.0,
            keep_ttl=24 * HOUR,
            task_id=task_id,
            holder="worker-7.example.org:4711",
        )

    def order(self) -> Claim:
        """Return what a delivery of a task with ``key="order_id"`` asks for, with the fingerprint of its arguments."""
        key = f"idem:shop.charge::ORD-{uuid.uuid4().int % 10_000_000:07d}"
        return replace(self.claim(key, str(uuid.uuid4())), fingerprint=uuid.uuid4().hex)

    def first_run(self, claim: Claim) -> Claim:
        """Acquire and settle."""
        lease = self.store.acquire(claim)
        assert isinstance(lease, Lease)
        self.store.settle(lease, OUTCOME, ttl=24 * HOUR)
        return claim

    def guarded(self, key: str | None = None, task_id: str = "") -> Decision:
        """Have the guard answer a delivery whose body does nothing."""
        return self.guard.run(NoDelivery(DeliveryEvents(self.claim(key, task_id), "shop.charge", "id")))


class Subject(StoreSubject):
    """A Redis store on one database of one server, and the bare client that it uses."""

    def __init__(self, server: RedisServer, db: int = 0) -> None:
        self.client = redis.Redis.from_url(server.url(db), **RedisStore.connection_options())
        super().__init__(RedisStore(self.client))

    def commands(self) -> dict[str, int]:
        """Return how often the server has executed which command; what a script calls counts too."""
        return {name.removeprefix("cmdstat_"): int(stat["calls"]) for name, stat in self._stats().items()}

    def _stats(self) -> dict[str, Any]:
        stats: dict[str, Any] = self.client.info("commandstats")
        return stats


def guard_on(store: Store) -> Guard:
    """Return a guard with the default policy."""
    policy = Policy()
    codec = Codec(compress_above=int(policy.compress_above), result_max_bytes=int(policy.result_max_bytes))
    return Guard(store, policy, codec, Heartbeat(), Breaker())
