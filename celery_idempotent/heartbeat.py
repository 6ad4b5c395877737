"""One thread per process that renews the leases whose work is running.

What it renews are `Holding`s: leases with the time until which they are trusted.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import defaultdict
from collections.abc import Callable
from time import monotonic

from .holding import RENEWALS_PER_TTL, Holding
from .stores.base import Store

__all__ = ["Heartbeat"]

logger = logging.getLogger("celery_idempotent.heartbeat")

#: Longest pause between two tries, in seconds, while the store does not answer.
RETRY_PAUSE = 1.0


class Heartbeat:
    """Renew every holding that is watched, in batches, three times per ttl.

    The thread is started by the first holding and again after a fork. It sleeps in steps of a third of the shortest ttl
    it has seen, so that a task shorter than that costs it nothing, not even a wake-up.

    Arguments:
        renewed: Called after each round in which leases were due (default: nothing is).
    """

    def __init__(self, renewed: Callable[[], object] = lambda: None) -> None:
        self.renewed = renewed
        self._reset()

    def _reset(self) -> None:
        # Taken by itself: a time limit that rings within the condition's own methods would leave it locked.
        self._lock = threading.RLock()
        self._wake = threading.Condition(self._lock)
        self._holdings: dict[int, Holding] = {}
        self._thread: threading.Thread | None = None
        self._step = float("inf")
        self._pid = os.getpid()  # last: until then another thread of a forked child must not use what it inherited

    def watch(self, holding: Holding) -> Holding:
        """Renew the lease until `forget` is called."""
        if self._pid != os.getpid():  # our thread stayed behind in the parent
            self._reset()
        step = holding.lease.claim.lease_ttl / RENEWALS_PER_TTL
        with self._lock:
            self._holdings[id(holding)] = holding
            if self._thread is None or not self._thread.is_alive():
                self._step = step
                self._thread = threading.Thread(target=self._run, name="celery-idempotent-heartbeat", daemon=True)
                self._thread.start()
            elif step < self._step:
                self._step = step
                self._wake.notify()
        return holding

    def forget(self, holding: Holding) -> None:
        """Stop renewing; an answer that is still on its way is not looked at."""
        self._holdings.pop(id(holding), None)

    def holdings(self) -> list[Holding]:
        """Return what is being renewed in this process."""
        return list(self._holdings.values()) if self._pid == os.getpid() else []

    def _run(self) -> None:
        while True:
            try:
                pause = self.beat(monotonic())
            except Exception:  # whatever it was, the leases of this process need their thread
                logger.exception("A heartbeat failed; the next one is due in %s s", RETRY_PAUSE)
                pause = RETRY_PAUSE
            with self._lock:
                self._wake.wait(min(pause, self._step))

    def beat(self, now: float) -> float:
        """Renew what is due at ``now``, and return the seconds until the next is due."""
        due: dict[tuple[Store, str], list[Holding]] = defaultdict(list)
        for holding in self.holdings():
            if holding.due <= now < holding.until and not holding.lost:
                due[holding.store, holding.store.part(holding.key)].append(holding)
        for (store, _), holdings in due.items():
            self._renew(store, holdings)
        if due:
            self.renewed()
        after = monotonic()
        waiting = [h.due for h in self.holdings() if max(h.due, after) < h.until and not h.lost]
        return max(0.001, min(waiting, default=float("inf")) - after)

    def _renew(self, store: Store, holdings: list[Holding]) -> None:
        since = monotonic()
        try:
            lost = {(lease.key, lease.owner) for lease in store.renew([holding.lease for holding in holdings])}
        except Exception as error:  # noqa: BLE001 - none may keep the leases in other stores from being renewed
            logger.warning("%d leases could not be renewed, trying again: %r", len(holdings), error)
            for holding in holdings:
                holding.due = monotonic() + min(RETRY_PAUSE, holding.lease.claim.lease_ttl / 10)
            return
        for holding in holdings:
            if (holding.lease.key, holding.lease.owner) not in lost:
                holding.trust(since)
            elif holding.within is not None:  # its own transaction was committed, most likely; the guard will look
                self.forget(holding)
            elif id(holding) in self._holdings:  # not forgotten meanwhile, when it was settled by its own work
                holding.lost = True
                logger.warning("The lease on %s (fence %d) is lost: it was taken over", holding.key, holding.fence)
