"""What five packages make of the same faults and duplicates: `python -m benchmarks.rival_faults`.

Needs `pip install celery-singleton celery-once idemkit`. Each fault is brought about on a real Redis with a real
worker, one after the other. A line of the first table says whether the work was done that a user would expect, one of
the second how often the body ran.
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

from tests.support.celery.apps import close_app, load_app
from tests.support.servers import RedisServer
from tests.support.waiting import WaitTimeout, wait_until

from .worker import BROKER_DB, Worker, environment

MODULE = "benchmarks.rival_faults_app"
ARMS = ("unique", "once", "singleton")
#: How the tasks of the second table are called, by the package.
DUPLICATED = ("keyed", "once", "singleton", "celerys", "idemkits", "plain")
JOURNAL_DB = 5


class Trial:
    """One plugin on one Redis, and what its bodies noted there."""

    def __init__(self, server: RedisServer, app: Any, name: str) -> None:
        self.server, self.app, self.task = server, app, app.tasks[f"{MODULE}.{name}"]
        self.plain, self.name = app.tasks[f"{MODULE}.plain"], name
        self.journal, self.broker = server.client(JOURNAL_DB), server.client(BROKER_DB)

    def begun(self, times: int, timeout: float = 30.0) -> bool:
        """Return whether bodies begin so often, in time."""
        try:
            wait_until(lambda: self.journal.llen("begun") >= times, timeout)
        except WaitTimeout:
            return False
        return True

    @contextmanager
    def worker(self) -> Any:
        """Start a worker, which is killed in the end."""
        os.environ["DEDUPLICATE"] = str(int(self.name == "celerys"))
        with Worker(self.server, MODULE, pool="prefork", concurrency=2) as worker:
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
                return chord([self.task.si(4), self.task.si(4)], self.plain.si(9)).apply_async().get(timeout=30) == 9
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
        with self.worker():
            wait_until(lambda: bool(self.app.control.ping(timeout=1)), 60)
            self.app.control.revoke(self.task.apply_async((6,), countdown=3).id)
            self.wait_until_acked()
            self.task.delay(6)
            return self.begun(1)

    def wait_until_acked(self) -> None:
        """Wait until no message is left, neither in the queue nor in the worker."""
        wait_until(lambda: not self.broker.hlen("unacked") and not self.broker.llen("celery"), 60)


FAULTS: tuple[Callable[[Trial], bool], ...] = (
    Trial.lost_with_its_worker,
    Trial.retried,
    Trial.called_while_it_runs,
    Trial.in_a_chord,
    Trial.publisher_killed,
    Trial.revoked,
)


class Duplicates(Trial):
    """One package on one Redis: how often the body runs where the operation comes twice."""

    def runs(self, seconds: float, again: Callable[[bytes], object], *, after: str) -> int:
        """Publish, have the duplicate come while the first message waits, runs or is done, and count the bodies."""
        self.task.delay(1, seconds)
        (message,) = self.broker.lrange("celery", 0, -1)
        if after == "waits":
            again(message)
        with self.worker():
            assert self.begun(1, timeout=60)
            if after != "waits":
                self.wait_until_acked() if after == "done" else None
                again(message)
            self.begun(2, timeout=seconds + 5)
            return int(self.journal.llen("begun"))

    def redeliver(self, raw: bytes) -> None:
        """Put the message into its queue once more, as the Redis transport does after its visibility timeout."""
        message = json.loads(raw)
        message["headers"]["redelivered"] = message["properties"]["delivery_info"]["redelivered"] = True
        self.broker.lpush("celery", json.dumps(message))

    def publish(self, raw: bytes) -> None:
        """Publish the same call once more, under an id of its own."""
        arguments = json.loads(base64.b64decode(json.loads(raw)["body"]))[0]
        self.task.delay(*arguments)

    def delivered_again_while_it_runs(self) -> int:
        return self.runs(5, self.redeliver, after="begun")

    def delivered_again_when_done(self) -> int:
        return self.runs(0, self.redeliver, after="done")

    def published_again_while_it_waits(self) -> int:
        return self.runs(0, self.publish, after="waits")

    def published_again_while_it_runs(self) -> int:
        return self.runs(5, self.publish, after="begun")

    def published_again_when_done(self) -> int:
        return self.runs(0, self.publish, after="done")


DUPLICATES: tuple[Callable[[Duplicates], int], ...] = (
    Duplicates.delivered_again_while_it_runs,
    Duplicates.delivered_again_when_done,
    Duplicates.published_again_while_it_waits,
    Duplicates.published_again_while_it_runs,
    Duplicates.published_again_when_done,
)


def main() -> None:
    """Print a line for each fault and each duplicate, and what became of it under each package."""
    with RedisServer() as server:
        app = load_app(MODULE, environment(server))
        show(server, ARMS, FAULTS, lambda name, fault: "yes" if fault(Trial(server, app, name)) else "NO")
        print()
        show(server, DUPLICATED, DUPLICATES, lambda name, twice: f"{twice(Duplicates(server, app, name))} run(s)")
        close_app(app)


def show(server: RedisServer, arms: tuple[str, ...], rows: tuple[Any, ...], cell: Callable[[str, Any], str]) -> None:
    """Print a table, each cell on an empty Redis."""
    print(f"{'':32}{''.join(f'{name:>12}' for name in arms)}")
    for row in rows:
        found = []
        for name in arms:
            with server.client(BROKER_DB) as client:
                client.flushall()
            found.append(cell(name, row))
        print(f"{row.__name__:32}{''.join(f'{each:>12}' for each in found)}", flush=True)


if __name__ == "__main__":
    main()
