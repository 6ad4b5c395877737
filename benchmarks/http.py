"""What the middlewares add to a request over loopback, to 1 and to 32 connections, and what a race of clients gets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from statistics import median
from time import perf_counter

import redis

from celery_idempotent.stores.redis import RedisStore
from tests.support.servers import RedisServer

from . import http_rivals
from .figure import Figure
from .http_client import Clients
from .http_servers import WebProcess, gunicorn, uvicorn, web
from .sampling import Sample, difference, interleave, ratio, timed
from .worker import STORE_DB

__all__ = ["KINDS", "measure", "race"]

#: Of one process each; and the milliseconds that they may add above two round trips.
KINDS = {"uvicorn": (uvicorn("benchmarks.http_app:asgi"), 0.6), "gunicorn": (gunicorn("benchmarks.http_app:wsgi"), 0.2)}
CONNECTIONS = 32
#: Requests per second of all connections together: some, so that what is measured is not the wait for a processor.
RATE = 200.0
P99_REACH = 5.0
ARMS = ("guarded", "plain")


@contextmanager
def _servers(kind: str, store: RedisServer) -> Iterator[dict[str, WebProcess]]:
    command = KINDS[kind][0]
    with (
        web(command, {"STORE_URL": store.url(STORE_DB)}) as guarded,
        web(command, {"STORE_URL": ""}) as plain,
    ):
        yield {"guarded": guarded, "plain": plain}


def measure(server: RedisServer, kind: str, *, blocks: int, calls: int, at_once: int) -> list[Figure]:
    """Send requests to an application with the middleware and without it, in turns.

    Arguments:
        server: The store.
        kind: One of `KINDS`.
        blocks: Blocks of each arm.
        calls: Requests per block and connection.
        at_once: Requests that come at the same time, each on a connection of its own.
    """
    with _servers(kind, server) as servers:
        samples = _latencies(server, servers, blocks=blocks, calls=calls)
        figures = [*_added(kind, samples), *_rates(kind, servers, blocks=blocks, calls=calls)]
        bursts = {name: _burst(servers[name], at_once) for name in ARMS}
    note = f"all are answered 201, p50 {_ms(bursts['guarded'].median)}; plain: the last {_ms(bursts['plain'].p99)}"
    name = f"{kind}, {at_once} requests at once, p99"
    return [*figures, Figure("http", name, bursts["guarded"].p99 * 1e3, "ms", note=note)]


def _latencies(server: RedisServer, servers: dict[str, WebProcess], *, blocks: int, calls: int) -> dict[str, Sample]:
    client = redis.Redis.from_url(server.url(STORE_DB), **RedisStore.connection_options())
    arms: dict[str, Callable[[], object]] = {"round trip": lambda: [timed(client.ping) for _ in range(calls)]}
    with ExitStack() as stack:
        stack.callback(client.close)
        for name in ARMS:
            one, many = (stack.enter_context(Clients(servers[name].port, n)) for n in (1, CONNECTIONS))
            arms[f"{name}, 1"] = partial(one.run, calls)
            arms[f"{name}, {CONNECTIONS}"] = partial(many.run, calls * 4, rate=RATE)
        return interleave(arms, blocks=blocks, calls=1)


def _added(kind: str, samples: dict[str, Sample]) -> list[Figure]:
    trip = samples["round trip"].median * 1e3
    figures = [Figure("http", f"{kind}, round trip to the store", trip, "ms", note=str(samples["round trip"]))]
    for connections, reach in ((1, 2 * trip + KINDS[kind][1]), (CONNECTIONS, None)):
        guarded, plain = samples[f"guarded, {connections}"], samples[f"plain, {connections}"]
        value, (low, high) = difference(guarded.medians, plain.medians)
        who = f"{kind}, 1 connection" if connections == 1 else f"{kind}, {connections} connections, {RATE:.0f}/s"
        said = f"{guarded}; plain {plain}"
        limit = None if reach is None else round(reach, 2)
        figures.append(
            Figure("http", f"{who}, added p50", value * 1e3, "ms", (low * 1e3, high * 1e3), limit, note=said)
        )
        figures.append(Figure("http", f"{who}, added p99", (guarded.p99 - plain.p99) * 1e3, "ms", reach=P99_REACH))
    return figures


def _rates(kind: str, servers: dict[str, WebProcess], *, blocks: int, calls: int) -> list[Figure]:
    """Keep every connection busy: responses per second, and the processor time of a server for one."""
    requests = calls * CONNECTIONS // 4
    used: dict[str, list[float]] = {"guarded": [], "plain": [], "replay": []}
    with ExitStack() as stack:
        clients = {name: stack.enter_context(Clients(servers[name].port, CONNECTIONS)) for name in ARMS}

        def load(arm: str) -> float:
            name, key = ("guarded", "once") if arm == "replay" else (arm, None)
            before, since = servers[name].seconds_used(), perf_counter()
            clients[name].run(requests, key=key)
            took = (perf_counter() - since) / requests
            used[arm].append((servers[name].seconds_used() - before) / requests)
            return took

        with Clients(servers["guarded"].port, 1) as first:
            first.run(1, key="once")
        samples = interleave({arm: partial(load, arm) for arm in used}, blocks=blocks, calls=1)
    figures = []
    for arm in ("guarded", "replay"):
        value, spread = ratio(samples["plain"].medians, samples[arm].medians)  # of rates, so upside down
        note = f"{1 / samples[arm].median:.0f}/s; plain {1 / samples['plain'].median:.0f}/s"
        figures.append(
            Figure("http", f"{kind}, {CONNECTIONS} busy connections, {arm} / plain", value, spread=spread, note=note)
        )
        added = (median(used[arm]) - median(used["plain"])) * 1e3
        figures.append(Figure("http", f"{kind}, processor time of the server, {arm} - plain", added, "ms"))
    return figures


def _burst(server: WebProcess, requests: int) -> Sample:
    with Clients(server.port, requests) as clients:
        return Sample([clients.run(requests)])


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms"


def race(middleware: http_rivals.Middleware, subject: http_rivals.Trial, *, clients: int) -> Figure:
    """Send one request from many clients at once to the processes of a middleware."""
    found = subject.race(clients)
    statuses = ", ".join(f"{times} x {status}" for status, times in sorted(found.statuses.items()))
    note = f"{statuses}; {found.responses} different; then {found.again}"
    reach = 1.0 if middleware.name.startswith("celery_idempotent") else None
    name = f"{middleware.name}: runs of {clients} equal requests at once on {http_rivals.PROCESSES} processes"
    return Figure("http", name, found.runs, "runs", reach=reach, note=note)
