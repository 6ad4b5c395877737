"""What unique tasks, celery-once and celery-singleton make of the same faults: `python -m benchmarks.rival_faults`.

Needs `pip install celery-singleton celery-once`. Each fault is brought about on a real Redis with a real worker, one
after the other; a line says whether the work was done that a user would expect.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

from tests.support.celery.apps import close_app, load_app
from tests.support.servers import RedisServer
from tests.support.waiting import WaitTimeout, wait_until

from .worker import BROKER_DB, Worker, environment

MODULE = "benchmarks.rival_faults_app"
ARMS = ("unique", "once", "singleton")
JOURNAL_DB = 5


class Trial:
    """One plugin on one Redis, and what its bodies noted there."""

    def __init__(self, server: RedisServer, app: Any, name: str) -> None:
        self.server, self.app, self.task = server, app, app.tasks[f"{MODULE}.{name}"]
        self.plain = app.tasks[f"{MODULE}.plain"]
        self.journal = server.client(JOURNAL_DB)

    def begun(self, times: int, timeout: float = 12.0) -> bool:
        """Return whether bodies begin so often, in time."""
        try:
            wait_until(lambda: self.journal.llen("begun") >= times, timeout)
        except WaitTimeout:
            return False
        return True

    @contextmanager
    def worker(self) -> Any:
        """Start a worker, which is killed in the end."""
        with Worker(self.server, MODULE, pool="prefork", concurrency=1) as worker:
            yield worker

    def lost_with_its_worker(self) -> bool:
        """The worker is killed in the body, and the broker loses the message: the next call runs."""
        with self.worker():
            self.task.delay(1, 60)
            self.begun(1)
        with self.server.client(BROKER_DB) as broker:
            broker.flushdb()
        self.task.delay(1)
        with self.worker():
            return self.begun(2)

    def retried(self) -> bool:
        """`self.retry()` runs again."""
        with self.worker():
            self.task.delay(2, 0, True)
            return self.begun(2)

    def called_while_it_runs(self) -> bool:
        """A change is made while the body runs, which may have read before: the call after it runs."""
        with self.worker():
            self.task.delay(3, 3)
            self.begun(1)
            self.task.delay(3)
            return self.begun(2)

    def in_a_chord(self) -> bool:
        """A chord of two equal members ends."""
        from celery import chord

        with self.worker():
            try:
                return chord([self.task.si(4), self.task.si(4)], self.plain.si(9)).apply_async().get(timeout=12) == 9
            except Exception:  # noqa: BLE001 - however it fails
                return False

    def publisher_killed(self) -> bool:
        """The publisher is killed before its message is out: the next call runs."""
        code = (
            f"import os\nfrom {MODULE} import app\nfrom celery import signals\n"
            "signals.before_task_publish.connect(lambda **_: os._exit(1), weak=False)\n"
            f"app.tasks[{self.task.name!r}].delay(5)\n"
        )
        subprocess.run([sys.executable, "-c", code], env={**os.environ, **environment(self.server)}, check=False)
        self.task.delay(5)
        with self.worker():
            return self.begun(1)

    def revoked(self) -> bool:
        """A message is revoked while it waits: the next call runs."""
        waiting = self.task.apply_async((6,), countdown=3)
        with self.worker():
            self.app.control.revoke(waiting.id)
            time.sleep(5)
            self.task.delay(6)
            return self.begun(1)


FAULTS: tuple[Callable[[Trial], bool], ...] = (
    Trial.lost_with_its_worker,
    Trial.retried,
    Trial.called_while_it_runs,
    Trial.in_a_chord,
    Trial.publisher_killed,
    Trial.revoked,
)


def main() -> None:
    """Print a line for each fault, and what became of it under each plugin."""
    print(f"{'':24}{''.join(f'{name:>12}' for name in ARMS)}")
    with RedisServer() as server:
        app = load_app(MODULE, environment(server))
        for fault in FAULTS:
            found = []
            for name in ARMS:
                with server.client(BROKER_DB) as client:
                    client.flushall()
                found.append("yes" if fault(Trial(server, app, name)) else "NO")
            print(f"{fault.__name__:24}{''.join(f'{each:>12}' for each in found)}", flush=True)
        close_app(app)


if __name__ == "__main__":
    main()
