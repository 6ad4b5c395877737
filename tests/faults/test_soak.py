"""Minutes of random faults: nothing is lost, and nothing happens twice that need not."""

from __future__ import annotations

import os
import random
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from celery import Celery

from celery_idempotent.stores import State
from celery_idempotent.stores.redis import RedisStore
from tests.support.celery.fixtures import StartWorker
from tests.support.celery.journal import Journal
from tests.support.faults.broker_file import BrokerFile
from tests.support.faults.ledger import LEASE_TTL, Ledger, order_of
from tests.support.faults.run_account import Account
from tests.support.faults.storm import Storm
from tests.support.proxy import Proxy
from tests.support.servers import RedisServer
from tests.support.waiting import wait_until

MODULE = "tests.support.faults.soak_app"
OPERATIONS = int(os.environ.get("SOAK_OPERATIONS", "2000"))
SECONDS = float(os.environ.get("SOAK_SECONDS", "210"))
SEED = int(os.environ.get("SOAK_SEED", "0")) or random.SystemRandom().randrange(1, 2**31)


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_operations_survive_minutes_of_random_faults(
    client_app: Callable[..., Celery],
    start_worker: StartWorker,
    broker: RedisServer,
    own_redis: Callable[..., RedisServer],
    proxied: Callable[[int], Proxy],
    journal: Journal,
    gateway: Path,
) -> None:
    print(f"\nSOAK_SEED={SEED} SOAK_OPERATIONS={OPERATIONS} SOAK_SECONDS={SECONDS:g}")
    server = own_redis(appendonly="yes", appendfsync="always")
    proxy = proxied(server.port)
    env = {"SOAK": "1"}
    options = {"store_url": proxy.url(), "concurrency": 3, "prefetch": 2, "visibility_timeout": 10, "env": env}
    nodes = [start_worker(MODULE, ready=False, **options) for _ in range(3)]
    for node in nodes:
        node.ready()
    storm = Storm(client_app(MODULE), nodes, broker, server, proxy, journal, random.Random(SEED))
    began = time.monotonic()
    storm.blow(OPERATIONS, SECONDS)
    proxy.heal()
    calm = time.monotonic()
    after = storm.settle_down(180)
    ledger = Ledger(journal, LEASE_TTL)
    print(ledger.summary(OPERATIONS, len(after.lost)))
    published = len(BrokerFile(broker.directory).messages)
    print(f"{'messages published, copies and retries included':52}{published:>24}")
    print(f"{'callers':52}{len(storm.callers):>24}")
    print(f"{'messages popped by Redis for a dying worker':52}{after.broker:>24}")
    print(f"{'answers that Celery overwrote with RETRY':52}{after.backend:>24}")
    print(f"{'seconds of storm, then until all was answered':52}{calm - began:>14.0f} + {time.monotonic() - calm:.1f}")
    print(f"faults: {dict(storm.done)}")
    assert not after.lost
    # What the store did not let it record within the lease, a run returns all the same and says SettleFailed.
    assert {name: v for name, v in different_results(storm).items() if name not in ledger.unrecorded} == {}
    assert ledger.overlaps()[1] == []
    assert ledger.repeats()[1] == []
    assert ledger.after_settle() == []
    assert set(ledger.paid.values()) == {1}
    assert len(ledger.paid) == OPERATIONS == len(list(gateway.iterdir()))
    check_records(RedisStore.from_url(server.url()), ledger)
    check_conservation(journal)


def different_results(storm: Storm) -> dict[str, list[Any]]:
    """Return the operations whose callers did not all get the same result."""
    values: dict[str, list[Any]] = defaultdict(list)
    for _, name, result in storm.callers:
        values[name].append(result.get(timeout=5))
    return {
        name: found
        for name, found in values.items()
        if any(each != found[0] or each["order"] != name for each in found)
    }


def check_conservation(journal: Journal) -> None:
    """Assert that every run that began ended once, or died with its process; paused holders may need a moment."""
    wait_until(lambda: not Account(journal).live(), 30, lambda: f"no run to be live: {Account(journal).live()}")
    account = Account(journal)
    print(account.summary())
    assert account.faults() == []
    assert account.kinds["starts"] == sum(account.ends.values()) + len(account.died())
    assert account.kinds["starts"] > OPERATIONS


def check_records(store: RedisStore, ledger: Ledger) -> None:
    """Assert that every operation's record says completed; paused holders may need a moment to learn it."""

    def stuck() -> list[str]:
        keys = [record.key for record in store.scan() if record.state is not State.COMPLETED]
        return [key for key in keys if order_of(key) not in ledger.unrecorded]

    wait_until(lambda: not stuck(), 30, lambda: f"no record to be open: {stuck()}")
