"""Workers of RQ that meet what happens to others once in many thousand times."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

from rq.job import Job, JobStatus

from celery_idempotent.rq import IdempotentSpawnWorker, IdempotentWorker

#: Seconds that a killed horse takes to be gone: longer than the interval at which its worker looks at it.
DYING = 2.5


class _DiesSlowly:
    def kill_horse(self, *args: Any) -> None:
        super().kill_horse(*args)  # type: ignore[misc]
        time.sleep(DYING)


class SlowlyDying(_DiesSlowly, IdempotentWorker):
    """One whose horse takes its time to die."""


class SlowlyDyingSpawned(_DiesSlowly, IdempotentSpawnWorker):
    """The same, with a horse that is spawned."""


class StoppedAsItAsks(IdempotentWorker):
    """One that is asked to stop after it sent its request for a job, and before it waits for the answer."""

    def dequeue_job_and_maintain_ttl(self, *args: Any) -> Any:
        pool = self.connection.connection_pool

        class Stopping(pool.connection_class):  # type: ignore[misc, name-defined]
            def send_command(self, *args: Any, **options: Any) -> None:
                super().send_command(*args, **options)
                if args[0] in ("BLMOVE", "BLPOP"):
                    os.kill(os.getpid(), signal.SIGTERM)

        pool.connection_class = Stopping
        pool.disconnect(inuse_connections=False)
        pool.reset()
        return super().dequeue_job_and_maintain_ttl(*args)


class ShortOfThreads(IdempotentWorker):
    """One that is at the limit of its threads when it has forked its horse."""

    def fork_work_horse(self, *args: Any) -> None:
        start = threading.Thread.start

        def limited(thread: threading.Thread) -> None:
            if thread.name == "celery-idempotent-shutdown":
                raise RuntimeError("can't start new thread")
            start(thread)

        threading.Thread.start = limited  # type: ignore[method-assign]
        super().fork_work_horse(*args)


class KilledAsItIsScheduled(Job):
    """A job whose horse and worker are killed once it is written that it is scheduled, if that is written by itself."""

    def set_status(self, status: JobStatus, pipeline: Any = None) -> None:
        super().set_status(status, pipeline=pipeline)
        if pipeline is None and status is JobStatus.SCHEDULED:
            os.kill(os.getppid(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
