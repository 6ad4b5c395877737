"""Stores to test, and how their records grow old."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from celery_idempotent.stores import Claim, Lease, Outcome, Reason, Record, Release, State, Store
from celery_idempotent.stores.records import new_owner
from tests.support.stores.kinds import kind_of

KEY = "idem:shop.charge:ORD-1"
DONE = Outcome(State.COMPLETED, b"json:42")
#: A lease of somebody else, on a key that may or may not be there.
NOBODYS = Lease(Claim(KEY, "nobody", 60.0, 60.0), 1)
VERBS = ["acquire", "renew", "settle", "release", "mark_shutdown", "mark_dispatched", "get", "delete", "scan", "ping"]


def age(store: Store, key: str, seconds: float) -> None:
    """Make a record look as if this much more time had passed; the fence stays."""
    kind_of(store).age(store, key, seconds)


def age_fence(store: Store, key: str, seconds: float) -> None:
    """Make the current lease look as if it had been taken so much earlier, for the rule of the ten renewals."""
    kind_of(store).age_fence(store, key, seconds)


def claim(key: str = KEY, **changes: Any) -> Claim:
    return Claim(**{"key": key, "owner": new_owner(), "lease_ttl": 60.0, "keep_ttl": 3600.0, **changes})


def take(store: Store, key: str = KEY, **changes: Any) -> Lease:
    answer = store.acquire(claim(key, **changes))
    assert isinstance(answer, Lease)
    return answer


def known(store: Store, key: str = KEY) -> Record:
    record = store.get(key)
    assert record is not None
    return record


def verb(store: Store, name: str, lease: Lease = NOBODYS) -> Callable[[], object]:
    """Return a call of each verb that goes to a server."""
    calls: dict[str, Callable[[], object]] = {
        "acquire": lambda: store.acquire(claim(lease.key)),
        "renew": lambda: store.renew([lease]),
        "settle": lambda: store.settle(lease, DONE, ttl=60),
        "release": lambda: store.release(lease, Release(Reason.FAILED)),
        "mark_shutdown": lambda: store.mark_shutdown(lease),
        "mark_dispatched": lambda: store.mark_dispatched(lease.key, "a"),
        "get": lambda: store.get(lease.key),
        "delete": lambda: store.delete(lease.key),
        "scan": lambda: list(store.scan()),
        "ping": store.ping,
    }
    return calls[name]
