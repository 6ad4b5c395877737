"""One operation, published many times at once."""

from __future__ import annotations

from time import perf_counter

from celery.result import ResultSet

from tests.support.celery.apps import close_app, load_app
from tests.support.servers import RedisServer

from .figure import Figure
from .throughput import MODULE
from .worker import Worker, environment

__all__ = ["measure"]

RUN_SECONDS = 1.0
LONGEST_WAIT = 120.0


def measure(server: RedisServer, *, messages: int) -> list[Figure]:
    """Let two workers loose on many messages with one key, and look at what every caller got."""
    app = load_app(MODULE, environment(server))
    task = app.tasks[f"{MODULE}.once_only"]
    before = _scripts(server)
    with (
        Worker(server, MODULE, pool="prefork", concurrency=2) as one,
        Worker(server, MODULE, pool="prefork", concurrency=2),
    ):
        since = perf_counter()
        sent = [task.apply_async((RUN_SECONDS,), idempotency_key="one operation") for _ in range(messages)]
        results = ResultSet(sent, app=app).join_native(timeout=LONGEST_WAIT, propagate=False)
        seconds = perf_counter() - since
        one.settled()
    close_app(app)
    commands = (_scripts(server) - before - 2) / max(1, messages - 1)  # two are the run's own
    what = f"{messages} duplicates at once"
    note = f"{seconds:.1f} s until every caller had the result of a run of {RUN_SECONDS:g} s"
    return [
        Figure("duplicates", f"{what}: runs", len(set(map(str, results))), "", reach=1, note=note),
        Figure("duplicates", f"{what}: equal results", results.count(results[0]), "", reach=messages, at_least=True),
        Figure(
            "duplicates",
            f"{what}: store commands per waiter",
            commands,
            "",
            note="one to replay, the others while it ran",
        ),
    ]


def _scripts(server: RedisServer) -> int:
    with server.client() as client:
        return int(client.info("commandstats").get("cmdstat_evalsha", {}).get("calls", 0))
