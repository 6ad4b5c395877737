"""What a guarded task costs its producer: nothing is asked of the store on the way out."""

from __future__ import annotations

from itertools import count

from tests.support.celery.apps import close_app, load_app
from tests.support.servers import RedisServer

from .figure import Figure
from .sampling import interleave, ratio
from .throughput import MODULE
from .worker import BROKER_DB, environment

__all__ = ["measure"]


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
