"""Valkey, with a real server of it: the contract, and a cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from celery_idempotent.stores import Store, open_store
from celery_idempotent.stores.redis import ClusterStore, RedisStore
from tests.conftest import missing
from tests.support.cluster import Cluster
from tests.support.servers import RedisServer, ServerMissing, fetch_valkey
from tests.support.stores.benches import DONE, known, take
from tests.support.stores.kinds import age_redis
from tests.support.stores.server_contract import ServerContract

pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def binary() -> str:
    try:
        return fetch_valkey()
    except ServerMissing as error:
        raise missing(error, optional="valkey") from None


@pytest.fixture(scope="module")
def valkey(binary: str) -> Iterator[RedisServer]:
    with RedisServer(binary=binary) as server:
        yield server


class TestTheContract(ServerContract):
    @pytest.fixture
    def store(self, valkey: RedisServer) -> Iterator[Store]:
        with valkey.client() as client:
            client.flushall()
        store = open_store(valkey.url().replace("redis://", "valkey://"))
        assert type(store) is RedisStore
        yield store
        store.close()

    def age(self, store: Store, key: str, seconds: float) -> None:
        age_redis(store, key, seconds)  # type: ignore[arg-type]


def test_it_is_valkey(valkey: RedisServer) -> None:
    with valkey.client() as client:
        assert client.info("server")["server_name"] == "valkey"


def test_a_cluster_of_it_is_used(binary: str, opened_cluster: Callable[..., ClusterStore]) -> None:
    with Cluster(binary=binary) as cluster:
        store = opened_cluster(cluster.url())
        leases = [take(store, f"idem:{number}") for number in range(20)]
        cluster.move(leases[0].key, next(node for node in cluster.primaries if node is not cluster.owner("idem:0")))
        assert store.renew(leases) == []
        for lease in leases:
            store.settle(lease, DONE, ttl=60)
        assert known(store, "idem:0").payload == DONE.payload
        assert len(list(store.scan(prefix="idem:"))) == 20
