"""How the facts speak to a store."""

from __future__ import annotations

import time
from typing import Any

from ..stores.base import Store
from ..stores.records import Claim, Lease, Outcome, Reason, Record, Refusal, Release, State, Verdict, new_owner

KEY = "idem:shop.charge:ORD-1"
#: The durations in the claims of the facts, in seconds.
LEASE, KEEP, RESULT = 60.0, 3600.0, 900.0

DONE = Outcome(State.COMPLETED, b"json:42")
BROKEN = Outcome(State.FAILED, b"json:broken")
OUTCOMES = [DONE, BROKEN]


class Ages:
    """What the facts need of the class that they become part of."""

    #: How many leases are more than fit into one request, of any store.
    many = 1100

    def age(self, store: Store, key: str, seconds: float) -> None:
        raise NotImplementedError


def frozen() -> bool:
    """Return whether a test has stopped the clock."""
    before = time.time()
    time.sleep(0.01)
    return time.time() == before


def claim(key: str = KEY, **changes: Any) -> Claim:
    """Return the claim of a new delivery of task "a", with these changes."""
    return Claim(**{"key": key, "owner": new_owner(), "lease_ttl": LEASE, "keep_ttl": KEEP, "task_id": "a", **changes})


def copy(number: int, token: str) -> dict[str, Any]:
    """Return how the n-th copy that deferring published differs from the message itself."""
    return {"copy": number, "token": token}


def take(store: Store, key: str = KEY, **changes: Any) -> Lease:
    """Acquire, and return the lease that this must bring."""
    answer = store.acquire(claim(key, **changes))
    assert isinstance(answer, Lease)
    return answer


def refused(store: Store, key: str = KEY, **changes: Any) -> tuple[Verdict, Record]:
    """Acquire, and return why there was no lease, and the record in the way."""
    answer = store.acquire(claim(key, **changes))
    assert isinstance(answer, Refusal)
    return answer.verdict, answer.record


def verdict(store: Store, key: str = KEY, **changes: Any) -> Verdict | None:
    """Acquire, and return why there was no lease, or None for a lease."""
    answer = store.acquire(claim(key, **changes))
    return answer.verdict if isinstance(answer, Refusal) else None


def known(store: Store, key: str = KEY) -> Record:
    """Return the record that must be there."""
    record = store.get(key)
    assert record is not None
    return record


def free(store: Store, lease: Lease, reason: Reason, **details: Any) -> None:
    """Release, and see that the lease was still held."""
    assert store.release(lease, Release(reason, **details))


def retry(store: Store, lease: Lease, retry_in: float = 300.0) -> None:
    """Release for the retry after this attempt."""
    free(store, lease, Reason.RETRY, retry_in=retry_in, next_attempt=lease.claim.attempt + 1)
