"""One thread per process that renews the leases whose work is running.

A lease is trusted until a deadline on this process's monotonic clock, counted from *before* the last request that the
store granted, less a margin: the store cannot have let it run out by then, however long the reply travelled. Past the
deadline the lease is in doubt, not lost: the store's next answer decides (the idea of river's leader election and of
Gray and Cheriton, "Leases", SOSP 1989).
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
from collections import defaultdict
from time import monotonic

from .errors import LeaseLost
from .records import Lease, State
from .stores.base import Store

__all__ = ["Heartbeat", "Holding"]

logger = logging.getLogger("celery_idempotent.heartbeat")

RENEWALS_PER_TTL = 3
#: Part of a ttl by which trust ends before the lease does, for clocks that tick at different speeds.
MARGIN = 0.1
#: Longest pause between two tries, in seconds, while the store does not answer.
RETRY_PAUSE = 1.0


class Holding:
    """A lease while its work runs: what a task sees as ``self.lease``.

    Arguments:
        store: Where the lease was acquired.
        lease: The lease.
        since: Monotonic time before the request that was granted.
        max_lease: Seconds after which it is not renewed any more, or None.
        lost_error: Which `LeaseLost` the methods raise.
    """

    __slots__ = ("deadline", "due", "lease", "lost", "lost_error", "store", "until")

    def __init__(
        self,
        store: Store,
        lease: Lease,
        since: float,
        *,
        max_lease: float | None = None,
        lost_error: type[LeaseLost] = LeaseLost,
    ) -> None:
        self.store = store
        self.lease = lease
        self.lost = False
        self.lost_error = lost_error
        self.until = since + max_lease if max_lease is not None else float("inf")
        self.trust(since)

    @property
    def key(self) -> str:
        """The key of the operation."""
        return self.lease.key

    @property
    def fence(self) -> int:
        """The fencing token: rises with every lease of the key; 0 if the task runs unprotected."""
        return self.lease.fence

    def trust(self, since: float) -> None:
        """Trust the lease for its ttl from ``since`` on."""
        ttl = self.lease.claim.lease_ttl
        self.deadline = since + ttl * (1 - MARGIN)
        self.due = since + ttl / RENEWALS_PER_TTL

    def check(self) -> None:
        """Return if the lease is ours; ask the store where that is in doubt.

        Raises:
            LeaseLost: somebody else may run the operation now, or has.
            StoreUnreachable: it is in doubt, and the store does not answer.
        """
        if not self.lost and self.fence and monotonic() >= self.deadline:
            self._ask()
        if self.lost:
            raise self.lost_error(
                f"The lease on {self.key!r} (fence {self.fence}) was lost: its time ran out and another delivery may "
                "have taken over. Stop here; what this run does from now on is a duplicate's work."
            )

    def _ask(self) -> None:
        since = monotonic()
        if since < self.until:
            if self.store.renew([self.lease]):
                self.lost = True
            else:
                self.trust(since)
        else:  # to ask must not prolong what was to end, and the answer holds for now alone
            record = self.store.get(self.key)
            # A record that is gone is nobody else's.
            if record and (record.state is not State.IN_PROGRESS or record.owner != self.lease.owner):
                self.lost = True

    def derived_key(self, name: str) -> str:
        """Return a key for another system (a payment gateway, say), the same on every run of this operation.

        Arguments:
            name: Tells several calls of one task apart.

        Returns:
            32 hexadecimal digits.
        """
        return hashlib.sha256(f"{self.key}\n{name}".encode("utf-8", "surrogatepass")).hexdigest()[:32]


class Heartbeat:
    """Renew every holding that is watched, in batches, three times per ttl.

    The thread is started by the first holding and again after a fork. It sleeps in steps of a third of the shortest ttl
    it has seen, so that a task shorter than that costs it nothing, not even a wake-up.
    """

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._wake = threading.Condition()
        self._holdings: dict[int, Holding] = {}
        self._thread: threading.Thread | None = None
        self._step = float("inf")
        self._pid = os.getpid()  # last: until then another thread of a forked child must not use what it inherited

    def watch(self, holding: Holding) -> Holding:
        """Renew the lease until `forget` is called."""
        if self._pid != os.getpid():  # our thread stayed behind in the parent
            self._reset()
        step = holding.lease.claim.lease_ttl / RENEWALS_PER_TTL
        with self._wake:
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
            with self._wake:
                self._wake.wait(min(pause, self._step))

    def beat(self, now: float) -> float:
        """Renew what is due at ``now``, and return the seconds until the next is due."""
        due: dict[tuple[Store, str], list[Holding]] = defaultdict(list)
        for holding in self.holdings():
            if holding.due <= now < holding.until and not holding.lost:
                due[holding.store, holding.store.part(holding.key)].append(holding)
        for (store, _), holdings in due.items():
            self._renew(store, holdings)
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
            elif id(holding) in self._holdings:  # not forgotten meanwhile, when it was settled by its own work
                holding.lost = True
                logger.warning("The lease on %s (fence %d) is lost: it was taken over", holding.key, holding.fence)
