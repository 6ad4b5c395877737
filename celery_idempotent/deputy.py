"""Speaking for a process that cannot: its parent renews and releases the lease that it took.

The proof is the owner that the parent gave the delivery. A parent asks the store whether its child holds the key, since
a delivery that waits for its turn holds nothing.
"""

from __future__ import annotations

from dataclasses import replace

from .records import Claim, Lease, Reason, Record, Release, State
from .stores.base import Store

__all__ = ["release", "renew"]


def renew(store: Store, claim: Claim) -> bool:
    """Let the lease last that the claim's owner holds, and tell whether there is one.

    Raises:
        StoreError: the store does not answer.
    """
    record = store.get(claim.key)
    if record is None or not _holds(record, claim):  # to renew would bring a record back that is gone
        return False
    known = replace(claim, holder=record.holder, task_id=record.task_id, fingerprint=record.fingerprint)
    return not store.renew([Lease(known, record.fence)])


def release(store: Store, claim: Claim, reason: Reason) -> Record | None:
    """Release the lease of a child that is gone; return what the record said, or None if it held nothing any more.

    Raises:
        StoreError: the store does not answer.
    """
    record = store.get(claim.key)
    # What the child has released itself, or never held, can be released as well, and is nobody's news.
    released = store.release(Lease(claim, 0), Release(reason))
    return record if released and record is not None and _holds(record, claim) else None


def _holds(record: Record, claim: Claim) -> bool:
    return record.state is State.IN_PROGRESS and record.owner == claim.owner
