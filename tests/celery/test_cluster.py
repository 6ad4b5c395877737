"""A worker whose records are in a Redis Cluster."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from celery import Celery

from tests.support.celery.fixtures import StartWorker
from tests.support.celery.journal import Journal
from tests.support.cluster import Cluster

SHOP = "tests.support.celery.shop"


@pytest.fixture
def store_url(cluster_url: str) -> str:
    """Everything in this file keeps its records there."""
    return cluster_url


@pytest.mark.smoke
def test_a_duplicate_gets_the_result_whichever_node_has_the_record(
    client_app: Callable[..., Celery], start_worker: StartWorker, journal: Journal, shared_cluster: Cluster
) -> None:
    app = client_app(SHOP)
    start_worker(SHOP, concurrency=2)
    orders = [f"ORD-{number}" for number in range(12)]
    for _ in range(2):
        results = [app.module.charge.delay(order, 5) for order in orders]
        results.append(app.module.resize.apply_async(("cat.png",), idempotency_key="cat"))
        assert [result.get(timeout=30) for result in results] == [
            *({"order": order, "cents": 5} for order in orders),
            "small cat.png",
        ]
    assert (journal.count("charged"), journal.count("resized")) == (len(orders), 1)
    held = [node.says("KEYS", "*") for node in shared_cluster.primaries]
    records = [[key for key in keys if not key.endswith(b":~history")] for keys in held]
    assert sum(map(len, records)) == len(orders) + 1
    assert sum(map(bool, records)) > 1
