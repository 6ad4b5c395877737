"""Workers that look after the leases of their horses: `rq worker -w celery_idempotent.rq.IdempotentWorker`.

Stock workers are correct. These recover at once from a horse that was killed, where a stock worker has its lease run
out; and they renew the lease of a horse that cannot, as C code holds its interpreter.
"""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress
from time import monotonic
from typing import Any

from rq.worker import SpawnWorker, Worker

from ..core import lease
from ..core.binding import current_holder
from ..core.history import history
from ..errors import IdempotencyError
from ..events import Released, emit, logger
from ..stores.records import Claim, Lease, Reason
from .horse import HorseClaim, WorkerEnd
from .job import schedule_at_once, store_of

#: Seconds between two looks whether the worker is to stop. No thread is woken instead: a handler of signals must
#: take no lock.
LOOK_EVERY = 0.5


class _Leases:
    """What both add to RQ's worker."""

    connection: Any
    job_monitoring_interval: int
    _horse_pid: int

    _offer: WorkerEnd | None = None
    _reaped: tuple[Any, ...] | None = None
    _began = 0.0
    _reported = False
    _watch: tuple[threading.Thread, threading.Event] | None = None

    def fork_work_horse(self, job: Any, queue: Any) -> None:
        """Start the horse, which is given the owner of its delivery."""
        self._reaped, self._began, self._reported = None, monotonic(), False
        schedule_at_once(job)
        self._close()
        self._offer = WorkerEnd(self.job_monitoring_interval)
        with self._offer.made():
            super().fork_work_horse(job, queue)  # type: ignore[misc]
        gone = threading.Event()
        # After the fork, and over before the next one: a child must find no lock that a thread of its parent has taken.
        thread = threading.Thread(
            target=self._announce_shutdown, args=(gone,), name="celery-idempotent-shutdown", daemon=True
        )
        try:
            thread.start()
        except RuntimeError as error:  # there are too many; the horse runs, and has to be waited for
            logger.warning("A shutdown would not be announced for %s: %s", job.id, error)
        else:
            self._watch = (thread, gone)

    def maintain_heartbeats(self, *args: Any) -> None:
        """Renew the lease of the horse, after RQ's own heartbeats."""
        super().maintain_heartbeats(*args)  # type: ignore[misc]
        self._act("renewed", self._renew)

    def wait_for_horse(self) -> tuple[Any, ...]:
        """Wait until the horse is gone, and release what it held."""
        # RQ looks at its horse in between by an alarm. One that rang while the horse is reaped would lose its status,
        # and RQ would take it for killed.
        if self._reaped is None:
            _wait_for(self._horse_pid)
            self._end_watch()
            signal.alarm(0)  # nothing is waited for any more, and to release must not be broken off either
            self._reaped = super().wait_for_horse()  # type: ignore[misc]
        if self._reaped[1] != 0:
            self._act("released", self._release)
        self._close()
        return self._reaped

    def request_force_stop(self, signum: int, frame: Any) -> None:
        """Shut down coldly, whatever else falls due meanwhile."""
        # The alarm for the next look at the horse would ring in this handler of a signal, and its exception take the
        # place of the SystemExit.
        left = signal.alarm(0)
        super().request_force_stop(signum, frame)  # type: ignore[misc]
        signal.alarm(left)  # RQ ignores a signal that comes within a second of the one before

    def teardown(self) -> None:
        """Sign off, on connections on which no answer is due."""
        # A signal that stops the worker may come between a command and its answer. What is sent next on that connection
        # waits until the command has ended: a `BLPOP` after minutes.
        pool = self.connection.connection_pool
        try:
            pool.disconnect(inuse_connections=False)
        except TypeError:  # before redis-py 7, a BlockingConnectionPool can close only all, also that of the commands
            pool.reset()
        super().teardown()  # type: ignore[misc]

    def _announce_shutdown(self, gone: threading.Event) -> None:
        """Announce a warm shutdown to the store, which a supervisor may cut short by killing worker and horse."""
        assert self._offer is not None
        while not gone.wait(LOOK_EVERY):
            held = self._offer.held() if getattr(self, "_stop_requested", False) else None
            if held is None or held.store is None:
                continue
            try:
                if store_of(held.store or None, self.connection).mark_shutdown(Lease(self._claim(held), 0)):
                    return
            except IdempotencyError as error:
                logger.warning("The shutdown could not be announced for the lease on %s: %s", held.key, error)
                return

    def _end_watch(self) -> None:
        if self._watch is not None:
            thread, gone = self._watch
            self._watch = None
            gone.set()
            thread.join()

    def _act(self, done: str, act: Any) -> None:
        held = self._offer.held() if self._offer is not None else None
        if held is None:
            return
        try:
            if held.store is not None:
                act(held)
            elif not self._reported:
                self._reported = True  # once for each horse, however long it runs
                logger.warning(
                    "The lease on %s can be neither renewed nor released for its horse: the store of %s is an object, "
                    "which its worker does not know. Give the store's URL instead.",
                    held.key,
                    held.task,
                )
        except IdempotencyError as error:
            logger.warning("The lease on %s could not be %s for its horse: %s", held.key, done, error)

    def _renew(self, held: HorseClaim) -> None:
        if held.max_lease is None or monotonic() - self._began < held.max_lease:
            lease.renew(store_of(held.store or None, self.connection), self._claim(held))

    def _release(self, held: HorseClaim) -> None:
        store, reason = store_of(held.store or None, self.connection), self._reason(held)
        record = lease.release(store, self._claim(held), reason)
        if record is not None:
            event = Released(
                held.key, held.task, held.task_id, holder=current_holder(), reason=reason.value, fence=record.fence
            )
            emit(event)
            if held.history:
                history.note(store, event, held.keep_ttl)

    def _claim(self, held: HorseClaim) -> Claim:
        assert self._offer is not None
        return Claim(held.key, self._offer.owner, held.lease_ttl, held.keep_ttl)

    def _reason(self, held: HorseClaim) -> Reason:
        if getattr(self, "_stopped_job_id", None) == held.task_id:  # that of a job which ended meanwhile stays
            return Reason.REVOKED
        return Reason.SHUTDOWN if getattr(self, "_stop_requested", False) else Reason.CRASHED

    def _close(self) -> None:
        if self._offer is not None:
            self._offer.close()
            self._offer = None


def _wait_for(pid: int) -> None:
    """Wait until a child has ended, and leave it to be reaped."""
    waitid: Any = getattr(os, "waitid", None)  # Python has it on macOS since 3.13
    if waitid is not None and pid:
        with suppress(ChildProcessError):
            waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


class IdempotentWorker(_Leases, Worker):
    """RQ's `Worker`, which looks after the leases of its horses."""


class IdempotentSpawnWorker(_Leases, SpawnWorker):
    """RQ's `SpawnWorker`, which looks after the leases of its horses."""
