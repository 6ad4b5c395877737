"""What it costs a worker to hold messages, which it refreshes so that the broker gives them to no other."""

from __future__ import annotations

import signal
from itertools import chain
from statistics import median
from time import monotonic, sleep

from tests.support.celery.apps import close_app, load_app
from tests.support.servers import RedisServer
from tests.support.waiting import wait_until

from .figure import Figure
from .worker import BROKER_DB, RESULT_DB, STORE_DB, Worker, environment

__all__ = ["measure"]

MODULE = "benchmarks.held_app"
#: Seconds until the messages are due: none is while anybody looks.
DUE = 3600
#: Seconds that a worker has to come to rest once it holds them all.
REST = 5.0


def measure(server: RedisServer, *, messages: int, seconds: float, rounds: int, visibility: int = 60) -> list[Figure]:
    """Have a plain and a guarded worker hold so many messages, in turns, and look at them for some seconds.

    Arguments:
        server: Broker and store.
        messages: How many each holds.
        seconds: For how long one is looked at; longer than a third of ``visibility``, so that it refreshes.
        rounds: How often each is.
        visibility: The broker's visibility timeout in seconds.
    """
    found: dict[str, list[tuple[float, list[float]]]] = {"plain": [], "guarded": []}
    for _ in range(rounds):
        for arm, samples in found.items():
            samples.append(_hold(server, {"ARM": arm, "VISIBILITY": str(visibility)}, messages, seconds))
    shares = {arm: 100 * median(used for used, _ in samples) / seconds for arm, samples in found.items()}
    # As many of the longest as there were refreshes: a machine with others on it has one or two that are nobody's.
    refreshes = int(rounds * seconds / (visibility / 3))
    longest = {arm: sorted(chain.from_iterable(each for _, each in found[arm]))[-refreshes:] for arm in found}
    stalls = {arm: 1e3 * median(each) for arm, each in longest.items()}
    every = f"refreshed every {visibility / 3:g} s"
    return [
        Figure(
            "held",
            f"share of a core over plain, {messages} messages held",
            shares["guarded"] - shares["plain"],
            "%",
            reach=1.0,
            note=f"{shares['guarded']:.2f}, plain {shares['plain']:.2f}; {every}",
        ),
        Figure(
            "held",
            f"median of the {refreshes} longest stalls of the main loop, {messages} messages held",
            stalls["guarded"],
            "ms",
            reach=5.0,
            note=f"plain {stalls['plain']:.1f}; at most {1e3 * longest['guarded'][-1]:.1f}, "
            f"plain {1e3 * longest['plain'][-1]:.1f}; {rounds * seconds:g} s of each",
        ),
    ]


def _hold(server: RedisServer, env: dict[str, str], messages: int, seconds: float) -> tuple[float, list[float]]:
    """Return the processor time of worker and server while a worker holds messages, and of each second its stall."""
    for number in (BROKER_DB, RESULT_DB, STORE_DB):
        with server.client(number) as client:
            client.flushdb()
    app = load_app(MODULE, {**environment(server), **env})
    with app.producer_pool.acquire() as producer:
        for number in range(messages):
            app.module.work.apply_async((number,), countdown=DUE, producer=producer)
    close_app(app)
    with (
        server.client(RESULT_DB) as results,
        Worker(server, MODULE, pool="prefork", concurrency=1, env=env) as worker,
    ):
        wait_until(lambda: worker.broker.hlen("unacked") >= messages, 120)
        sleep(REST)
        results.delete(app.module.LAGS)
        oldest = _oldest(worker)
        began, used = monotonic(), worker.seconds_used()
        sleep(seconds)
        used = (worker.seconds_used() - used) * seconds / (monotonic() - began)
        assert (_oldest(worker) > oldest) is (env["ARM"] == "guarded"), "the guarded worker refreshes, and no other"
        stalls = [float(each) for each in results.lrange(app.module.LAGS, 0, -1)]
        worker.signal(signal.SIGKILL)  # else it would put them all back
    return used, stalls


def _oldest(worker: Worker) -> float:
    """Return the time at which the first of the unacked messages was taken or refreshed."""
    [(_, since)] = worker.broker.zrange("unacked_index", 0, 0, withscores=True)
    return float(since)
