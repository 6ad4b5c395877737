"""A worker that holds messages for their time, plain or guarded as ARM says, and writes down how late its loop is."""

from __future__ import annotations

import os
from time import monotonic
from typing import Any

import redis
from celery import Celery, bootsteps

from celery_idempotent import IdempotentTask

__all__ = ["LAGS", "app", "work"]

#: The list of the result backend that gets the longest delay of each window, in seconds.
LAGS = "lags"
#: Seconds between two ticks, and of a window.
TICK, WINDOW = 0.002, 1.0

# Not `benchmarks.app`'s: a worker that knows a guarded task of any app refreshes what all of them hold.
app = Celery("benchmarks.held_app")
app.conf.update(
    broker_url=os.environ.get("BROKER_URL"),
    result_backend=os.environ.get("RESULT_URL"),
    idempotency_store=os.environ.get("STORE_URL"),
    broker_connection_retry_on_startup=True,
    broker_transport_options={"visibility_timeout": int(os.environ.get("VISIBILITY", "60"))},
    worker_prefetch_multiplier=0,
)
guard: dict[str, Any] = {"base": IdempotentTask} if os.environ.get("ARM") == "guarded" else {"acks_late": True}


@app.task(**guard)
def work(number: int) -> None:
    """Do nothing, later."""


class Lag(bootsteps.StartStopStep):  # type: ignore[misc, unused-ignore]
    """Notes how much later than it should the main loop comes to a timer."""

    requires = ("celery.worker.components:Hub",)

    def __init__(self, worker: Any, **options: Any) -> None:
        self.results, self.last, self.longest = redis.Redis.from_url(os.environ["RESULT_URL"]), monotonic(), 0.0

    def start(self, worker: Any) -> None:
        """Begin to look."""
        worker.hub.call_repeatedly(TICK, self.tick)
        worker.hub.call_repeatedly(WINDOW, self.tell)

    def tick(self) -> None:
        """Note how long the last tick is ago."""
        now = monotonic()
        self.longest, self.last = max(self.longest, now - self.last - TICK), now

    def tell(self) -> None:
        """Write the window down, which is not part of the next one."""
        self.results.rpush(LAGS, self.longest)
        self.longest, self.last = 0.0, monotonic()


app.steps["worker"].add(Lag)
