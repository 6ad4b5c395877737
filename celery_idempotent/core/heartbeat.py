"""Threads that renew the leases of a process while their work runs: one for each server that has any.

A server that hangs holds up the renewal of its own leases and of no others. What is renewed are `HeldLease` objects:
leases with the time until which they are trusted.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import defaultdict
from collections.abc import Callable
from functools import cache
from time import monotonic
from weakref import WeakSet

from ..errors import StoreUnreachable
from ..stores.base import Store
from .lease import RENEWALS_PER_TTL, HeldLease

logger = logging.getLogger("celery_idempotent.heartbeat")

#: Longest pause between two tries, in seconds, while the store does not answer.
RETRY_PAUSE = 1.0

#: Every heartbeat of this process, for the fork.
_HEARTBEATS: WeakSet[Heartbeat] = WeakSet()


class Heartbeat:
    """Renew every holding that is watched, in batches, three times per ttl.

    The first lease on a server (a store, or one node of a cluster) starts its thread, also after a fork. The thread
    sleeps in steps of a third of the shortest ttl it has seen, so that a shorter task costs no wake-up, and ends
    after a step without any lease.

    Arguments:
        renewed: Called after each round in which leases were due (default: nothing is).
    """

    def __init__(self, renewed: Callable[[], object] = lambda: None) -> None:
        self.renewed = renewed
        self._reset()
        _watch_forks()
        _HEARTBEATS.add(self)

    def _reset(self) -> None:
        # Taken by itself: a time limit that rings within a condition's own methods would leave it locked.
        self._lock = threading.RLock()
        self._servers: dict[tuple[Store, str], _Server] = {}
        #: whether the last thread that was needed could not be started, which was logged
        self.short = False
        self._pid = os.getpid()  # last: until then another thread of a forked child must not use what it inherited

    def watch(self, holding: HeldLease) -> HeldLease:
        """Renew the lease until `forget` is called.

        Raises:
            StoreUnreachable: no thread can be started that would renew it.
        """
        if self._pid != os.getpid():  # forked by a server in C, which calls no hooks of Python's
            self._reset()
        address = (holding.store, holding.store.shard(holding.key))
        with self._lock:
            server = self._servers.get(address)
            if server is None:
                server = self._servers[address] = _Server(self, address)
            server.watch(holding)
        return holding

    def short_of_threads(self, error: RuntimeError) -> StoreUnreachable:
        """Return the error for a lease that no thread can renew; of many, the first is logged."""
        unreachable = StoreUnreachable(
            f"No lease can be renewed in this process ({error}). Allow it more threads, by pids.max, TasksMax or "
            "ulimit -u, or have fewer processes and threads."
        )
        logger.log(logging.DEBUG if self.short else logging.ERROR, "%s No body begins until it can.", unreachable)
        self.short = True
        return unreachable

    def forget(self, holding: HeldLease) -> None:
        """Stop renewing; an answer that is still on its way is not looked at."""
        for server in list(self._servers.values()):
            server.holdings.pop(id(holding), None)

    def end(self, store: Store) -> None:
        """End the threads of a store that is not used any more, and not only after a step without a lease."""
        with self._lock:
            for server in list(self._servers.values()):
                if server.address[0] is store:
                    server.end()

    def holdings(self) -> list[HeldLease]:
        """Return what is being renewed in this process."""
        if self._pid != os.getpid():
            return []
        return [holding for server in list(self._servers.values()) for holding in list(server.holdings.values())]

    def beat(self, now: float) -> float:
        """Renew in this thread what is due at ``now`` on any server, and return the seconds until the next is due."""
        pauses = [server.beat(now) for server in list(self._servers.values())] if self._pid == os.getpid() else []
        return min(pauses, default=float("inf"))

    def _drop(self, server: _Server) -> None:
        """Forget a server that has no leases; called with the lock held."""
        self._servers = {address: each for address, each in self._servers.items() if each is not server}


@cache
def _watch_forks() -> None:
    """Have each child begin again, before it has threads: two that did so at once would forget each other's leases."""
    getattr(os, "register_at_fork", dict)(after_in_child=_begin_again)  # on Windows nothing forks


def _begin_again() -> None:
    for heartbeat in list(_HEARTBEATS):
        heartbeat._reset()


class _Server:
    """The leases of this process on one server, and the thread that renews them.

    Arguments:
        heartbeat: The heartbeat of the process.
        address: A store and the part of it.
    """

    def __init__(self, heartbeat: Heartbeat, address: tuple[Store, str]) -> None:
        self.heartbeat, self.address = heartbeat, address
        self.holdings: dict[int, HeldLease] = {}
        self.step = float("inf")
        #: whether a lease came since the thread began its last step
        self.used = False
        #: whether the last renewal failed, which was logged
        self.failing = False
        self.thread: threading.Thread | None = None
        self._lock = heartbeat._lock
        self._wake = threading.Condition(self._lock)

    def watch(self, holding: HeldLease) -> None:
        """Renew a lease; called with the lock held."""
        step = holding.lease.claim.lease_ttl / RENEWALS_PER_TTL
        self.holdings[id(holding)] = holding
        self.used = True
        shorter, self.step = step < self.step, min(step, self.step or step)
        if self.thread is None or not self.thread.is_alive():
            self.thread = threading.Thread(target=self.run, name="celery-idempotent-heartbeat", daemon=True)
            try:
                self.thread.start()
            except RuntimeError as error:
                del self.holdings[id(holding)]
                raise self.heartbeat.short_of_threads(error) from error
            self.heartbeat.short = False
        elif shorter:
            self._wake.notify()

    def end(self) -> None:
        """Have the thread end if it has no leases; called with the lock held."""
        if not self.holdings:
            self.used, self.step = False, 0.0
            self._wake.notify()

    def run(self) -> None:
        """Renew until there is nothing left to renew."""
        while True:
            try:
                pause = self.beat(monotonic())
            except Exception:  # whatever it was, the leases of this process need their thread
                logger.exception("A heartbeat failed; the next one is due in %s s", RETRY_PAUSE)
                pause = RETRY_PAUSE
            with self._lock:
                self.used = bool(self.holdings)
                self._wake.wait(min(pause, self.step))
                if not (self.used or self.holdings):
                    self.heartbeat._drop(self)
                    return

    def beat(self, now: float) -> float:
        """Renew what is due at ``now``, and return the seconds until the next is due."""
        due: dict[str, list[HeldLease]] = defaultdict(list)
        store = self.address[0]
        for holding in list(self.holdings.values()):
            if holding.due <= now < holding.until and not holding.lost:
                due[store.shard(holding.key)].append(holding)  # by now it may be another part's
        for holdings in due.values():
            self._renew(store, holdings)
        if due:
            self.heartbeat.renewed()
        after = monotonic()
        waiting = [h.due for h in list(self.holdings.values()) if max(h.due, after) < h.until and not h.lost]
        return max(0.001, min(waiting, default=float("inf")) - after)

    def _renew(self, store: Store, holdings: list[HeldLease]) -> None:
        since, sent = monotonic(), [holding.lease for holding in holdings]
        try:
            lost = {(lease.key, lease.owner) for lease in store.renew(sent)}
            changed = [h.lease for h, lease in zip(holdings, sent, strict=True) if h.lease is not lease]
            if changed:  # to a longer one, meanwhile, which the old renewal may have cut short
                store.renew(changed)
        except Exception as error:  # noqa: BLE001 - none may keep the leases in other stores from being renewed
            level = logging.DEBUG if self.failing else logging.WARNING
            logger.log(level, "%d leases could not be renewed, trying again: %r", len(holdings), error)
            self.failing = True
            for holding in holdings:
                holding.due = monotonic() + min(RETRY_PAUSE, holding.lease.claim.lease_ttl / 10)
            return
        self.failing = False
        for holding in holdings:
            if (holding.lease.key, holding.lease.owner) not in lost:
                holding.trust(since)
            elif holding.within is not None:  # its own transaction was committed, most likely; the guard will look
                self.heartbeat.forget(holding)
            elif id(holding) in self.holdings:  # not forgotten meanwhile, when it was settled by its own work
                holding.lost = True
                level = logging.WARNING if holding.lease.claim.revive else logging.DEBUG  # a reservation: as it goes
                logger.log(level, "The lease on %s (fence %d) is lost: it was taken over", holding.key, holding.fence)
