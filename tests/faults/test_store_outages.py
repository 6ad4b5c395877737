"""A store that cannot be reached, or forgets: workers wait, and nothing spins, runs twice or is lost."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import psutil
import pytest
from celery import Celery
from celery.result import AsyncResult

from celery_idempotent.stores import State
from celery_idempotent.stores.redis import RedisStore
from tests.support.celery.apps import messages
from tests.support.celery.fixtures import StartWorker
from tests.support.celery.gates import Gates
from tests.support.celery.journal import Journal
from tests.support.proxy import Proxy
from tests.support.servers import RedisServer, open_client
from tests.support.waiting import wait_until

SHOP = "tests.support.celery.shop"
FAULTS: dict[str, Callable[[Proxy], None]] = {
    "drop": lambda proxy: proxy.drop(),
    "reset": lambda proxy: (proxy.refuse(), proxy.reset())[0],
    "delay": lambda proxy: proxy.delay(3.0),  # longer than a lease call waits: every answer comes too late
    "partition": lambda proxy: proxy.partition(),
}


@pytest.fixture
def app(client_app: Callable[..., Celery]) -> Celery:
    return client_app(SHOP)


def charged(order: str) -> dict[str, Any]:
    return {"order": order, "cents": 999}


def empty(app: Celery) -> None:
    """Wait until the broker holds nothing more."""
    wait_until(lambda: messages(app.conf.broker_url) == 0, 60, lambda: f"{messages(app.conf.broker_url)} messages")


@pytest.mark.parametrize("fault", FAULTS)
def test_a_network_fault_at_every_verb_at_once_is_survived(
    app: Celery,
    start_worker: StartWorker,
    proxy: Proxy,
    way_through: str,
    store_url: str,
    journal: Journal,
    gates: Gates,
    fault: str,
) -> None:
    shop = app.module
    node = start_worker(SHOP, store_url=way_through, concurrency=4, env={"LEASE_TTL": "6"})
    renewing, settling, releasing = (gates.close(f"after {name}") for name in ("RENEWING", "SETTLING", "RELEASING"))
    results: dict[str, AsyncResult[Any]] = {
        "RENEWING": shop.charge.delay("RENEWING"),
        "SETTLING": shop.charge.delay("SETTLING"),
        "RELEASING": shop.failing.delay("RELEASING"),
    }
    for gate in (renewing, settling, releasing):
        gate.reached(timeout=30)
    FAULTS[fault](proxy)
    results["ACQUIRING"] = shop.charge.delay("ACQUIRING")
    settling.open()
    releasing.open()
    node.wait_for_log("StoreFailed", timeout=60)  # while acquiring
    node.wait_for_log("ReleaseFailed", timeout=60)
    node.wait_for_log("could not be renewed", timeout=60)
    assert journal.count("started", "ACQUIRING") == 0
    proxy.heal()
    renewing.open()
    for name in ("RENEWING", "SETTLING", "ACQUIRING"):
        assert results[name].get(timeout=60) == charged(name)
    with pytest.raises(ValueError, match="no RELEASING"):  # the user's exception, and not the store's
        results["RELEASING"].get(timeout=60)
    empty(app)
    runs = {name: journal.count("started", name) for name in results}
    assert runs == dict.fromkeys(results, 1)
    record = RedisStore.from_url(store_url).get(f"idem:{SHOP}.charge::ACQUIRING")
    assert record is not None
    assert record.state is State.COMPLETED
    for name in ("RENEWING", "ACQUIRING"):
        assert shop.charge.delay(name).get(timeout=60) == charged(name)
        assert journal.count("started", name) == 1


def test_while_the_store_is_down_slots_are_held_nothing_spins_and_the_queue_stays_where_it_is(
    app: Celery, start_worker: StartWorker, proxy: Proxy, way_through: str, broker_url: str, journal: Journal
) -> None:
    slots, prefetch, total = 2, 2, 40
    node = start_worker(SHOP, store_url=way_through, concurrency=slots, prefetch=prefetch)
    proxy.refuse()
    proxy.reset()
    # Counted from here on: attempts at the store, messages taken, processor time.
    before, since = proxy.accepted + proxy.refused, time.monotonic()
    used = cpu_seconds(node.members())
    results = [app.module.charge.delay(f"ORD-{n}") for n in range(total)]
    wait_until(lambda: proxy.refused >= 3 * slots, 60, lambda: f"some probes; {proxy.refused} so far")
    with open_client(broker_url) as client:
        in_memory, in_queue = client.hlen("unacked"), client.llen("celery")
    attempts, seconds = proxy.accepted + proxy.refused - before, time.monotonic() - since
    used = cpu_seconds(node.members()) - used
    assert journal.count("started") == 0
    assert in_memory <= slots * prefetch
    assert in_memory + in_queue == total, "no copies are published"
    # One probe a second and process, two connections each: the second for a connection that the server had closed.
    assert attempts <= slots * 2 * (seconds + 2)
    assert used < 0.8 * seconds + 2, f"{used:.1f} s of processor in {seconds:.1f} s"
    assert "Deferred" not in node.logs()
    proxy.heal()
    assert [result.get(timeout=60) for result in results] == [charged(f"ORD-{n}") for n in range(total)]
    empty(app)
    assert journal.count("charged") == total


def cpu_seconds(pids: list[int]) -> float:
    """Return the processor time that processes have used."""
    return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids)


@pytest.mark.parametrize("loss", ["flushed", "restarted without its data"])
def test_a_store_that_loses_its_data_gets_it_back_from_the_holders(
    app: Celery,
    start_worker: StartWorker,
    own_redis: Callable[..., RedisServer],
    journal: Journal,
    gates: Gates,
    loss: str,
) -> None:
    """The next renewal writes the lease anew: a duplicate that comes after it is put off as ever."""
    server = own_redis()
    store = RedisStore.from_url(server.url())
    gate = gates.close("after ORD-1")
    node = start_worker(SHOP, store_url=server.url(), env={"LEASE_TTL": "3"})
    first = app.module.charge.delay("ORD-1")
    gate.reached()
    held = store.get(f"idem:{SHOP}.charge::ORD-1")
    if loss == "flushed":
        with server.client() as client:
            client.flushall()
    else:
        server.kill()
        server.start()
    found = wait_until(lambda: store.get(f"idem:{SHOP}.charge::ORD-1"), 30, "the lease to be written anew")
    assert held is not None
    assert (found.state, found.owner, found.fence) == (State.IN_PROGRESS, held.owner, held.fence)
    duplicate = app.module.charge.delay("ORD-1")
    node.wait_for_log("Deferred", timeout=30)
    gate.open()
    assert first.get(timeout=30) == duplicate.get(timeout=30) == charged("ORD-1")
    empty(app)
    assert journal.count("started") == 1


@pytest.mark.nightly
def test_the_main_process_does_not_wait_for_a_store_that_hangs(
    app: Celery,
    start_worker: StartWorker,
    proxy: Proxy,
    way_through: str,
    journal: Journal,
    gates: Gates,
) -> None:
    """It puts the lost child's message back and takes it again while the release still waits for its answer."""
    gate = gates.close("before ORD-1")
    patient = f"{way_through}?socket_timeout=60"
    node = start_worker(SHOP, store_url=patient, concurrency=1, env={"LEASE_TTL": "3"})
    result = app.module.charge.delay("ORD-1")
    [child] = gate.reached()
    proxy.drop()
    node.kill_child(child)
    wait_until(lambda: node.logs().count("received") == 2, 30, "the message to be delivered again")
    assert "runs out by itself" not in node.logs(), "the store has answered already"
    [answer] = app.control.ping(timeout=20, limit=1)
    assert list(answer.values()) == [{"ok": "pong"}]
    proxy.heal()
    gate.open()
    assert result.get(timeout=60) == charged("ORD-1")
    empty(app)
    assert (journal.count("started"), journal.count("charged")) == (2, 1)
