"""What a guarded task costs its producer, of which nothing is asked of the store, and what a unique one does."""

from __future__ import annotations

from itertools import count

from tests.support.celery.apps import close_app, load_app
from tests.support.servers import RedisServer

from .figure import Figure
from .sampling import interleave, ratio
from .throughput import MODULE, PLAIN
from .worker import BROKER_DB, PLAIN_DB, STORE_DB, environment

__all__ = ["measure", "measure_unique"]


def measure(server: RedisServer, *, blocks: int, calls: int) -> list[Figure]:
    """Publish plain and guarded messages in turns, with and without a key of the producer's."""
    app = load_app(MODULE, environment(server))
    plain, guarded, numbers = app.tasks[f"{MODULE}.plain"], app.tasks[f"{MODULE}.guarded"], count()
    arms = {
        "plain": lambda: plain.apply_async((next(numbers),)),
        "guarded": lambda: guarded.apply_async((next(numbers),)),
        "with idempotency_key": lambda: guarded.apply_async((next(numbers),), idempotency_key=f"req-{next(numbers)}"),
    }
    samples = interleave(arms, blocks=blocks, calls=calls)
    close_app(app)
    with server.client(BROKER_DB) as broker:
        broker.flushdb()
    figures = []
    for name, reach in (("guarded", 0.97), ("with idempotency_key", None)):
        value, spread = ratio(samples["plain"].medians, samples[name].medians)  # of rates, so upside down
        note = f"{samples[name]}; plain {samples['plain']}"
        figures.append(
            Figure("publishing", f"publish rate, {name} / plain", value, "x", spread, reach, at_least=True, note=note)
        )
    return figures


def measure_unique(server: RedisServer, *, blocks: int, calls: int) -> list[Figure]:
    """Publish plain and unique messages in turns, all of another number, and calls that are skipped for one that waits.

    A call of one number that is skipped must not cost more for those that were skipped before it. The plain ones are of
    an app with connections of its own: in ours they gain from what unique ones do to its connections.
    """
    app, other = load_app(MODULE, environment(server)), load_app(PLAIN, environment(server, PLAIN_DB))
    plain, unique, numbers = other.tasks[f"{PLAIN}.plain"], app.tasks[f"{MODULE}.unique"], count()
    waiting, often = unique.apply_async((-1,)), unique.apply_async((-2,))
    for _ in range(10_000 if calls > 9 else 100):
        unique.apply_async((-2,))
    arms = {
        "plain": lambda: plain.apply_async((next(numbers),)),
        "unique": lambda: unique.apply_async((next(numbers),)),
        "skipped": lambda: unique.apply_async((-1,)),
        "skipped for the 10,000th time": lambda: unique.apply_async((-2,)),
    }
    samples = interleave(arms, blocks=blocks, calls=calls)
    assert (unique.apply_async((-1,)).id, unique.apply_async((-2,)).id) == (waiting.id, often.id)
    close_app(app)
    close_app(other)
    for number in (BROKER_DB, PLAIN_DB, STORE_DB):
        with server.client(number) as client:
            client.flushdb()
    figures = []
    for name, reach in (("unique", 0.65), ("skipped", 2.0), ("skipped for the 10,000th time", 2.0)):
        value, spread = ratio(samples["plain"].medians, samples[name].medians)  # of rates, so upside down
        note = f"{samples[name]}; plain {samples['plain']}"
        figures.append(
            Figure("publishing", f"publish rate, {name} / plain", value, "x", spread, reach, at_least=True, note=note)
        )
    return figures
