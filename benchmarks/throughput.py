"""How many no-op tasks a real worker does per second, against plain Celery on the same worker."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from statistics import median

from tests.support.celery.apps import close_app, load_app
from tests.support.servers import RedisServer

from .figure import Figure
from .sampling import ratio
from .tasks import Publish, publishers
from .worker import Worker, environment

__all__ = ["drain_in_turns", "measure"]

MODULE = "benchmarks.app"
REACH = 0.85
#: What is compared with plain Celery, by the names of the tasks. The last two are what no library can be quicker than.
KINDS = {
    "guarded": "key = task id",
    "keyed": 'key="number"',
    "two_scripts": "two scripts on a bare socket",
    "one_script": "one script on a bare socket",
}


def measure(
    server: RedisServer, *, pool: str, ignore_result: bool, blocks: int, messages: int, concurrency: int = 2
) -> list[Figure]:
    """Have one worker drain blocks of plain messages and of the others in turns.

    Arguments:
        server: Broker, result backend and store.
        pool: prefork or threads.
        ignore_result: Leave the result backend out, which makes plain Celery faster and the comparison harder.
        blocks: Blocks per arm.
        messages: Messages per block.
        concurrency: Children, or threads, of the worker.
    """
    app = load_app(MODULE, environment(server))
    tasks = {name: app.tasks[f"{MODULE}.{name}"] for name in ("plain", *KINDS)}
    with Worker(server, MODULE, pool=pool, concurrency=concurrency) as worker:
        rates, cpu = drain_in_turns(
            worker, publishers(tasks, ignore_result=ignore_result), blocks=blocks, messages=messages
        )
    close_app(app)
    what = f"{pool}, results {'ignored' if ignore_result else 'in Redis'}"
    figures = []
    for name, kind in KINDS.items():
        value, spread = ratio(rates[name], rates["plain"])
        tasks_per_second = " against ".join(f"{median(rates[arm]):.0f}" for arm in (name, "plain"))
        micros = " against ".join(f"{median(cpu[arm]) * 1e6:.0f}" for arm in (name, "plain"))
        note = f"{tasks_per_second} tasks/s; {micros} us of processor time per task, worker and server"
        reach = REACH if name == "guarded" else None
        figures.append(
            Figure("throughput", f"{what}, {kind} / plain", value, "x", spread, reach, at_least=True, note=note)
        )
    return figures


def drain_in_turns(
    worker: Worker, arms: Mapping[str, Publish], *, blocks: int, messages: int
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Return, per arm, the messages per second and the processor seconds per message of each block."""
    names = list(arms)
    rates: dict[str, list[float]] = {name: [] for name in names}
    cpu: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(blocks + 1):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            used = worker.seconds_used()
            seconds = worker.drain(partial(arms[name], messages))
            if turn:  # the first block warms up
                rates[name].append(messages / seconds)
                cpu[name].append((worker.seconds_used() - used) / messages)
    return rates, cpu
