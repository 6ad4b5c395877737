"""Published and worked end to end, beside two plugins that lock: needs `pip install celery-singleton celery-once`.

They promise less: both take a lock when a message is published, neither keeps a result for a later duplicate.
"""

from __future__ import annotations

import importlib.util
import signal
from functools import partial
from statistics import median

from tests.support.servers import RedisServer

from .figure import Figure
from .sampling import interleave, ratio
from .throughput import MODULE, drain_in_turns, two_workers
from .worker import BROKER_DB, PLAIN_DB

__all__ = ["POOLS", "installed", "measure"]

POOLS = ("prefork", "threads")
OTHER = "benchmarks.rival_app"
#: Of which of the two workers each is, and under which name.
TASKS = {
    "ours": (MODULE, "keyed"),
    "unique": (MODULE, "unique"),
    "singleton": (OTHER, "singleton"),
    "once": (OTHER, "once"),
    "plain": (OTHER, "plain"),
}


def installed() -> bool:
    """Tell whether both are there to be compared with."""
    return all(importlib.util.find_spec(name) for name in ("celery_singleton", "celery_once"))


def measure(server: RedisServer, *, pool: str, blocks: int, messages: int) -> list[Figure]:
    """Publish and drain blocks of each in turns; the end-to-end rate is 1 / (1 / publish rate + 1 / drain rate).

    Arguments:
        server: Broker, result backend and store.
        pool: prefork or threads.
        blocks: Blocks per arm.
        messages: Messages per block.
    """
    with two_workers(server, OTHER, TASKS, pool=pool, concurrency=2) as arms:
        workers = {worker for worker, _ in arms.values()}
        for worker in workers:
            worker.signal(signal.SIGSTOP)
        once = {name: partial(publish, 1) for name, (_, publish) in arms.items()}
        unique = once.pop("unique")  # later: other tasks of the app gain from what it does to the app's connections
        published = interleave(once, blocks=blocks, calls=messages)
        locking = {"unique": unique, "singleton": once["singleton"], "once": once["once"]}
        published_locking = interleave(locking, blocks=blocks, calls=messages)
        for number in (BROKER_DB, PLAIN_DB):
            with server.client(number) as broker:
                broker.flushdb()
        for worker in workers:
            worker.signal(signal.SIGCONT)
        rates, cpu = drain_in_turns(arms, blocks=blocks, messages=messages)
    both = {
        name: [1 / (sent + 1 / rate) for sent, rate in zip(published[name].medians, rates[name], strict=True)]
        for name in once
    }
    figures = []
    for rival, reach in (("singleton", 1.0), ("once", 1.0), ("plain", None)):
        value, spread = ratio(both["ours"], both[rival])
        told = [
            f"{name} {1 / published[name].median:.0f} / {median(rates[name]):.0f} / {median(cpu[name]) * 1e6:.0f}"
            for name in ("ours", rival)
        ]
        note = f"{', '.join(told)} published/s / worked/s / us of processor time to work one"
        figures.append(
            Figure("rivals", f"{pool}, end to end, ours / {rival}", value, "x", spread, reach, at_least=True, note=note)
        )
    for rival in ("singleton", "once"):  # which ask their store at this point, as unique tasks do, and no other
        value, spread = ratio(published_locking[rival].medians, published_locking["unique"].medians)
        rates_of = [f"{name} {1 / published_locking[name].median:.0f}" for name in ("unique", rival)]
        note = f"{', '.join(rates_of)} published/s"
        figures.append(
            Figure(
                "rivals", f"{pool}, publish rate, unique / {rival}", value, "x", spread, 1.0, at_least=True, note=note
            )
        )
    return figures
