"""How many no-op tasks a real worker does per second, against a worker of plain Celery."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from statistics import median
from typing import Any

from kombu import pools

from tests.support.celery.apps import close_app, load_app
from tests.support.servers import RedisServer

from .figure import Figure
from .sampling import ratio
from .tasks import Publish, publishers
from .worker import BROKER_DB, PLAIN_DB, Worker, environment

__all__ = ["MODULE", "PLAIN", "drain_in_turns", "measure", "two_workers"]

MODULE, PLAIN = "benchmarks.app", "benchmarks.plain_app"
REACH = 0.85
#: What is compared with plain Celery, by the names of the tasks. The last two are what asks the server as often.
KINDS = {
    "guarded": "key = task id",
    "keyed": 'key="number"',
    "beside": "an unguarded task of the same worker",
    "two_scripts": "two scripts on a bare socket",
    "one_script": "one script on a bare socket",
}
#: Of which of the two workers each is, and under which name.
TASKS = {
    "plain": (PLAIN, "plain"),
    "guarded": (MODULE, "guarded"),
    "keyed": (MODULE, "keyed"),
    "beside": (MODULE, "plain"),
    "two_scripts": (PLAIN, "two_scripts"),
    "one_script": (PLAIN, "one_script"),
}

Arm = tuple[Worker, Publish]


@contextmanager
def two_workers(
    server: RedisServer,
    other: str,
    tasks: Mapping[str, tuple[str, str]],
    *,
    pool: str,
    concurrency: int,
    **options: Any,
) -> Iterator[dict[str, Arm]]:
    """Yield the arms of two workers, of our app and of one that has no part of this library.

    Arguments:
        server: Broker, result backend and store.
        other: The module of the other app.
        tasks: The module and the name of the task of each arm.
        pool: prefork or threads.
        concurrency: Children, or threads, of each worker.
        options: Of `apply_async`.
    """
    databases = {MODULE: BROKER_DB, other: PLAIN_DB}
    apps = {module: load_app(module, environment(server, number)) for module, number in databases.items()}
    of_arm = {arm: apps[module].tasks[f"{module}.{name}"] for arm, (module, name) in tasks.items()}
    sending = publishers(of_arm, **options)

    def worker(module: str) -> Worker:
        return Worker(server, module, pool=pool, concurrency=concurrency, broker=databases[module])

    with worker(MODULE) as ours, worker(other) as theirs:
        yield {arm: (ours if module == MODULE else theirs, sending[arm]) for arm, (module, _) in tasks.items()}
    for app in apps.values():
        close_app(app)
    pools.reset()  # which other apps would use on, with what was done to their connections


def measure(
    server: RedisServer, *, pool: str, ignore_result: bool, blocks: int, messages: int, concurrency: int = 2
) -> list[Figure]:
    """Have a worker drain blocks of guarded messages and another one blocks of plain Celery's, in turns.

    Arguments:
        server: Broker, result backend and store.
        pool: prefork, threads or solo.
        ignore_result: Leave the result backend out, which makes plain Celery faster and the comparison harder.
        blocks: Blocks per arm.
        messages: Messages per block.
        concurrency: Children, or threads, of each worker.
    """
    options = {"pool": pool, "concurrency": concurrency, "ignore_result": ignore_result}
    with two_workers(server, PLAIN, TASKS, **options) as arms:
        rates, cpu = drain_in_turns(arms, blocks=blocks, messages=messages)
    what = f"{pool}, results {'ignored' if ignore_result else 'in Redis'}"
    figures = []
    for name, kind in KINDS.items():
        value, spread = ratio(rates[name], rates["plain"])
        tasks_per_second = " against ".join(f"{median(rates[arm]):.0f}" for arm in (name, "plain"))
        micros = " against ".join(f"{median(cpu[arm]) * 1e6:.0f}" for arm in (name, "plain"))
        note = f"{tasks_per_second} tasks/s; {micros} us of processor time per task, worker and server"
        reach = REACH if name == "guarded" and pool != "solo" else None
        figures.append(
            Figure("throughput", f"{what}, {kind} / plain", value, "x", spread, reach, at_least=True, note=note)
        )
    return figures


def drain_in_turns(
    arms: Mapping[str, Arm], *, blocks: int, messages: int
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Return, per arm, the messages per second and the processor seconds per message of each block."""
    names = list(arms)
    rates: dict[str, list[float]] = {name: [] for name in names}
    cpu: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(blocks + 1):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            worker, publish = arms[name]
            used = worker.seconds_used()
            seconds = worker.drain(partial(publish, messages))
            if turn:  # the first block warms up
                rates[name].append(messages / seconds)
                cpu[name].append((worker.seconds_used() - used) / messages)
    return rates, cpu
