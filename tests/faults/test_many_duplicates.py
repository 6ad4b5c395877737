"""One operation, published a thousand times at once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from celery import Celery

from tests.support.celery.apps import messages
from tests.support.celery.fixtures import StartWorker
from tests.support.celery.gates import Gates
from tests.support.celery.journal import Journal
from tests.support.servers import RedisServer
from tests.support.waiting import wait_until

SHOP = "tests.support.celery.shop"
TIMES = 1000
#: Store commands of a duplicate: one for each time it is put off, with growing pauses, and one to replay.
HANDFUL = 8


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_a_thousand_duplicates_run_once_and_get_the_same_result(
    client_app: Callable[..., Celery],
    start_worker: StartWorker,
    own_redis: Callable[..., RedisServer],
    journal: Journal,
    gates: Gates,
) -> None:
    server = own_redis()
    app = client_app(SHOP)
    nodes = [start_worker(SHOP, ready=False, store_url=server.url()) for _ in range(2)]
    for node in nodes:
        node.ready()
    gate = gates.close("before ORD-1")
    results = [app.module.charge.delay("ORD-1") for _ in range(TIMES)]
    gate.reached()
    # Every one of them has met the holder once, whose lease is then as busy as it gets.
    wait_until(lambda: sum(node.logs().count("copy=1") for node in nodes) >= TIMES - 1, 120, "all to be put off")
    gate.open()
    values = [result.get(timeout=120) for result in results]
    wait_until(lambda: messages(app.conf.broker_url) == 0, 120, "all messages to be worked off")
    with server.client() as client:
        commands = client.info("commandstats")["cmdstat_evalsha"]["calls"]
    print(f"\n{TIMES} duplicates: 1 run, {(commands - 2) / (TIMES - 1):.1f} store commands per waiter")
    assert values == [{"order": "ORD-1", "cents": 999}] * TIMES
    assert journal.count("started") == 1
    assert commands <= HANDFUL * TIMES
