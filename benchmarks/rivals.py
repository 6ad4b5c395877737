"""Published and worked end to end, beside two plugins that lock: needs `pip install celery-singleton celery-once`.

They promise less: both take a lock when a message is published, neither keeps a result for a later duplicate.
"""

from __future__ import annotations

import importlib.util
from functools import partial
from statistics import median

from tests.support.celery.apps import close_app, load_app
from tests.support.servers import RedisServer

from .figure import Figure
from .sampling import interleave, ratio
from .tasks import publishers
from .throughput import drain_in_turns
from .worker import BROKER_DB, Worker, environment

__all__ = ["installed", "measure"]

MODULE = "benchmarks.rival_app"


def installed() -> bool:
    """Tell whether both are there to be compared with."""
    return all(importlib.util.find_spec(name) for name in ("celery_singleton", "celery_once"))


def measure(server: RedisServer, *, blocks: int, messages: int) -> list[Figure]:
    """Publish and drain blocks of each in turns; the end-to-end rate is 1 / (1 / publish rate + 1 / drain rate)."""
    app = load_app(MODULE, environment(server))
    arms = publishers(
        {name: app.tasks[f"{MODULE}.{name}"] for name in ("ours", "unique", "singleton", "once", "plain")}
    )
    published = interleave({name: partial(arm, 1) for name, arm in arms.items()}, blocks=blocks, calls=messages)
    with server.client(BROKER_DB) as broker:
        broker.flushdb()
    with Worker(server, MODULE, pool="prefork", concurrency=2) as worker:
        rates, cpu = drain_in_turns(worker, arms, blocks=blocks, messages=messages)
    close_app(app)
    both = {
        name: [1 / (sent + 1 / rate) for sent, rate in zip(published[name].medians, rates[name], strict=True)]
        for name in arms
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
            Figure("rivals", f"end to end, ours / {rival}", value, "x", spread, reach, at_least=True, note=note)
        )
    for rival in ("singleton", "once"):  # which ask their store at this point, as unique tasks do, and no other
        value, spread = ratio(published[rival].medians, published["unique"].medians)
        note = f"unique {1 / published['unique'].median:.0f}, {rival} {1 / published[rival].median:.0f} published/s"
        figures.append(
            Figure("rivals", f"publish rate, unique / {rival}", value, "x", spread, 1.0, at_least=True, note=note)
        )
    return figures
