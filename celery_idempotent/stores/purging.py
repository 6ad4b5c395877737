"""Remove what has expired, a batch after another, so that nobody waits for it."""

from __future__ import annotations

import time
from collections.abc import Iterator

from .base import Store

__all__ = ["BATCH", "PAUSE", "purge", "purge_in_batches"]

#: Records in one batch.
BATCH = 1000
#: Seconds between two batches, in which others are served.
PAUSE = 0.05


def purge(store: Store, limit: int | None = None, *, batch: int = BATCH, pause: float = PAUSE) -> int:
    """Remove what has expired from a store, and return how much.

    Arguments:
        store: The store; one whose server expires by itself answers 0.
        limit: Remove about so many and no more (default: all).
        batch: How many to ask the store for at a time.
        pause: Seconds to rest between two batches.

    Raises:
        StoreError: the store cannot serve; what was removed before stays removed.
    """
    return sum(purge_in_batches(store, limit, batch=batch, pause=pause))


def purge_in_batches(
    store: Store, limit: int | None = None, *, batch: int = BATCH, pause: float = PAUSE
) -> Iterator[int]:
    """Do as `purge` does, and yield how much each batch removed."""
    left = limit
    while left is None or left > 0:
        wanted = batch if left is None else min(batch, left)
        removed = store.purge(wanted)
        yield removed
        left = None if left is None else left - removed
        # A batch may come back short because others hold some of its rows. Nor is the last record to be chased: while
        # this goes on, more expire, and on a busy store that would never end.
        if removed < wanted / 2 or left == 0:
            return
        time.sleep(pause)
