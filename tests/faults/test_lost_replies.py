"""The store does the work, and its answer is lost: every verb is asked again, and nothing runs twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from celery import Celery

from celery_idempotent.stores.redis.store import script
from tests.support.celery.apps import messages
from tests.support.celery.fixtures import StartWorker
from tests.support.celery.gates import Gates
from tests.support.celery.journal import Journal
from tests.support.proxy import Proxy
from tests.support.waiting import wait_until

SHOP = "tests.support.celery.shop"
VERBS = ("acquire", "renew", "settle", "release", "mark_dispatched")


@pytest.fixture
def app(client_app: Callable[..., Celery]) -> Celery:
    return client_app(SHOP)


def lost(proxy: Proxy) -> Counter[str]:
    """Return how many replies of each verb were lost."""
    return Counter(
        {
            verb: sum(n for bytes_, n in proxy.requests_hit.items() if script(verb)[1].encode() in bytes_)
            for verb in VERBS
        }
    )


@pytest.mark.parametrize(
    ("times", "hang"),
    [
        pytest.param(1, False, id="once, connection reset"),
        pytest.param(3, False, id="three times, which is more than a client's own second try"),
        pytest.param(1, True, id="once, connection hangs", marks=pytest.mark.soak),  # two seconds each
    ],
)
def test_every_reply_of_every_verb_may_be_lost_and_each_task_runs_once(
    app: Celery,
    start_worker: StartWorker,
    proxy: Proxy,
    way_through: str,
    journal: Journal,
    gates: Gates,
    times: int,
    hang: bool,
) -> None:
    shop = app.module
    node = start_worker(SHOP, store_url=way_through, concurrency=4, env={"LEASE_TTL": "6"})
    proxy.swallow_each(times, matching=b"EVALSHA", hang=hang)
    held, doomed = gates.close("before HELD"), gates.close("before DOOMED")
    results = {
        "HELD": shop.charge.delay("HELD"),  # renews
        "DOOMED": shop.charge.delay("DOOMED"),  # loses its child: the main process releases
    }
    [child] = doomed.reached(timeout=30)
    node.kill_child(child)
    doomed.open()
    results["FLAKY"] = shop.flaky.delay("FLAKY", failures=1)  # releases for its retry
    results["FAILING"] = shop.failing.delay("FAILING")  # releases
    chain = (shop.charge.s("CHAINED") | shop.collect.s("CHAINED")).apply_async()  # announces
    results["CHAINED"] = chain.parent
    wait_until(lambda: lost(proxy)["renew"] >= times, 60, lambda: f"renewals to be lost: {lost(proxy)}")
    held.open()
    assert results["HELD"].get(timeout=60) == {"order": "HELD", "cents": 999}
    assert results["DOOMED"].get(timeout=60) == {"order": "DOOMED", "cents": 999}
    assert results["FLAKY"].get(timeout=60) == "FLAKY after 1"
    with pytest.raises(ValueError, match="no FAILING"):
        results["FAILING"].get(timeout=60)
    chain.get(timeout=60)
    wait_until(lambda: messages(app.conf.broker_url) == 0, 60, "all messages to be worked off")
    counts = lost(proxy)
    assert counts["acquire"] >= 7 * times
    assert counts["settle"] >= 4 * times
    assert counts["release"] >= 3, counts
    assert counts["mark_dispatched"] >= 1
    started = Counter(entry.key for entry in journal.entries("started"))
    assert started == {"HELD": 1, "DOOMED": 2, "CHAINED": 1, "FLAKY": 2, "FAILING": 1}
    charged = Counter(entry.key for entry in journal.entries("charged"))
    assert charged == {"HELD": 1, "DOOMED": 1, "CHAINED": 1, "FLAKY": 1}
    assert journal.count("collected") == 1
    assert "LeaseLost key=" not in node.logs(), "a holder took itself for a duplicate"
    # And it is remembered.
    for name in ("HELD", "DOOMED", "CHAINED"):
        assert shop.charge.delay(name).get(timeout=60) == {"order": name, "cents": 999}
    assert journal.count("charged") == len(charged)
