"""The pipe through which the horse that runs a job informs its worker about the lease.

The worker gives the delivery its owner, in the environment; the horse sends what it claims. So the worker
can renew and release for a horse that cannot, and imports nothing of what its jobs run.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from ..core.binding import Binding
from ..errors import ConfigurationError
from ..events import logger
from ..stores.records import Claim, new_owner

#: Entry of a horse's environment.
ENTRY = "CELERY_IDEMPOTENT_HORSE"
#: Bytes that are written to a pipe at once; a horse sends far less.
MOST = 4096


@dataclass(frozen=True, slots=True)
class HorseClaim:
    """The claim of a horse.

    Arguments:
        key: The operation.
        lease_ttl, keep_ttl: As in its claim.
        max_lease: Seconds for which it is renewed, or None.
        store: URL of its store, "" for the queue's own Redis, or None: it has no URL.
        history: Whether the worker is to note what it does.
        task, task_id: For events.
    """

    key: str
    lease_ttl: float
    keep_ttl: float
    max_lease: float | None
    store: str | None
    history: bool
    task: str
    task_id: str


class HorseEnd:
    """A horse's end.

    Arguments:
        owner: The owner of the delivery.
        writer: The pipe.
        interval: Seconds between two looks of the worker at its horse.
    """

    def __init__(self, owner: str, writer: int, interval: float) -> None:
        self.owner, self._writer, self._interval = owner, writer, interval

    @classmethod
    def take(cls) -> HorseEnd | None:
        """Return what the worker offers, once: a job that this one runs within itself is another delivery."""
        offered = os.environ.pop(ENTRY, None)
        if offered is None:
            return None
        worker, owner, writer, interval = offered.split()
        # A horse that takes no offer hands it on to the programs that it starts, where the pipe's number is another's.
        if int(worker) != os.getppid():
            return None
        os.set_inheritable(int(writer), False)
        return cls(owner, int(writer), float(interval))

    def check(self, binding: Binding) -> None:
        """Refuse a lease that the worker could not renew in time.

        Raises:
            ConfigurationError: it is shorter than two looks of the worker at its horse.
        """
        ttl, least = binding.policy.lease_ttl, 2 * self._interval
        if ttl < least:
            raise ConfigurationError(
                f"Expected lease_ttl of {binding.name} to be at least {least:g} s, twice the job_monitoring_interval "
                f"in which this worker renews leases, got {ttl:g} s. Give it a longer lease, or start the worker with "
                f"--job-monitoring-interval {max(1, int(ttl // 2))}; for `rq worker-pool` and django-rq's "
                "`rqworker`, which have no such option, derive a class of workers that has it."
            )

    def send(self, binding: Binding, claim: Claim, max_lease: float | None, task_id: str) -> None:
        """Send what is about to be claimed; the worker reads in the store whether it is held."""
        policy = binding.policy
        wanted = policy.store
        store = wanted if isinstance(wanted, str) else "" if wanted is None else None
        held = HorseClaim(
            claim.key, claim.lease_ttl, claim.keep_ttl, max_lease, store, policy.history, binding.name, task_id
        )
        line = json.dumps({name: getattr(held, name) for name in HorseClaim.__slots__}).encode() + b"\n"
        try:
            os.write(self._writer, line[:MOST])
        except OSError as error:
            logger.warning("The lease on %s could not be sent to the worker: %s", claim.key, error)


class WorkerEnd:
    """A worker's end.

    Arguments:
        interval: Seconds between two looks at the horse.
    """

    def __init__(self, interval: float) -> None:
        self.owner, self._interval = new_owner(), interval
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        self._read = b""

    @contextmanager
    def made(self) -> Iterator[None]:
        """Let the process that is started meanwhile take it."""
        os.set_inheritable(self._writer, True)
        os.environ[ENTRY] = f"{os.getpid()} {self.owner} {self._writer} {self._interval:g}"
        try:
            yield
        finally:
            os.environ.pop(ENTRY, None)
            os.close(self._writer)

    def held(self) -> HorseClaim | None:
        """Return the claim that the horse sent, or None: nothing yet."""
        with suppress(BlockingIOError):
            while piece := os.read(self._reader, MOST):
                self._read += piece
        line = self._read.partition(b"\n")
        claim: dict[str, Any] | None = json.loads(line[0]) if line[1] else None
        return HorseClaim(**claim) if claim else None

    def close(self) -> None:
        """Forget the horse."""
        os.close(self._reader)
