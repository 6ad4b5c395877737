"""How the cost grows: with the children of a worker, and with the processes that share a store."""

from __future__ import annotations

import multiprocessing
from dataclasses import replace
from time import monotonic, process_time

from celery_idempotent.stores import open_store
from tests.support.servers import RedisServer

from . import throughput
from .figure import Figure
from .subject import StoreSubject

__all__ = ["measure_children", "measure_stores"]


def measure_children(server: RedisServer, *, children: int, blocks: int, messages: int) -> Figure:
    """Have a prefork worker of so many children drain plain and guarded messages in turns."""
    figures = throughput.measure(
        server, pool="prefork", ignore_result=False, blocks=blocks, messages=messages, concurrency=children
    )
    return replace(figures[0], part="growth", name=f"prefork, {children} children, guarded / plain", reach=None)


def measure_stores(kind: str, url: str, *, processes: int, seconds: float) -> Figure:
    """Have processes acquire and settle new operations, each as fast as it can."""
    context = multiprocessing.get_context("spawn")
    done = context.SimpleQueue()
    workers = [context.Process(target=_work, args=(url, seconds, done)) for _ in range(processes)]
    for worker in workers:
        worker.start()
    rates, used = zip(*(done.get() for _ in workers), strict=True)
    for worker in workers:
        worker.join()
    runs = sum(rates)
    note = f"{sum(used) / (runs * seconds) * 1e6:.0f} us of processor time per run in the clients"
    return Figure("growth", f"{kind}, {processes} processes: runs", runs, "per s", note=note)


def _work(url: str, seconds: float, done: multiprocessing.SimpleQueue[tuple[float, float]]) -> None:
    with StoreSubject(open_store(url)) as subject:
        subject.first_run(subject.claim())
        began, used, runs = monotonic(), process_time(), 0
        while monotonic() < began + seconds:
            subject.first_run(subject.claim())
            runs += 1
        done.put((runs / (monotonic() - began), process_time() - used))
