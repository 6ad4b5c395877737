"""How the cost grows: with the children of a worker, and with the processes that share a store."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from time import monotonic, process_time, sleep

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
    spawn, ready = multiprocessing.get_context("spawn"), monotonic() + 1.0 + processes
    with ProcessPoolExecutor(processes, mp_context=spawn) as workers:
        done = [workers.submit(_work, url, ready, seconds) for _ in range(processes)]
        rates, used = zip(*(each.result() for each in done), strict=True)
    runs = sum(rates)
    note = f"{sum(used) / (runs * seconds) * 1e6:.0f} us of processor time per run in the clients"
    return Figure("growth", f"{kind}, {processes} processes: runs", runs, "per s", note=note)


def _work(url: str, ready: float, seconds: float) -> tuple[float, float]:
    """Return runs per second and the processor seconds that this process used, once all are there."""
    with StoreSubject(open_store(url)) as subject:
        subject.first_run(subject.claim())
        sleep(max(0.0, ready - monotonic()))
        began, used, runs = monotonic(), process_time(), 0
        while monotonic() < began + seconds:
            subject.first_run(subject.claim())
            runs += 1
        return runs / (monotonic() - began), process_time() - used
