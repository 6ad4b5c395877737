"""Tasks that settle within their own transaction, in real workers that are really killed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psutil
import pytest
from celery import Celery

from celery_idempotent.errors import SettleNotCommitted
from celery_idempotent.stores import State, open_store
from tests.support.celery.apps import wait_for_no_reader
from tests.support.celery.business import Business
from tests.support.celery.fixtures import StartWorker
from tests.support.celery.gates import Gates
from tests.support.celery.journal import Journal
from tests.support.waiting import wait_until

WITHIN = "tests.support.celery.within_app"
KEY = f"idem:{WITHIN}.charge::ORD-1"


@pytest.fixture(params=["postgres_url", "sqlite_url"])
def store_url(request: pytest.FixtureRequest) -> str:
    url: str = request.getfixturevalue(request.param)
    return url


@pytest.fixture
def app(business: Business, client_app: Callable[..., Celery]) -> Celery:
    return client_app(WITHIN)


def state_of(url: str) -> State | None:
    store = open_store(url)
    record = store.get(KEY)
    store.close()
    return record and record.state


@pytest.mark.smoke
def test_what_was_committed_is_replayed_after_a_kill_before_the_ack(
    app: Celery, start_worker: StartWorker, gates: Gates, journal: Journal, business: Business
) -> None:
    gate = gates.close("committed ORD-1")
    start_worker(WITHIN, concurrency=1)
    result = app.module.charge.delay("ORD-1")
    [pid] = gate.reached()
    psutil.Process(pid).kill()
    gate.open()
    taken = result.get(timeout=60)
    assert business.charges() == [("ORD-1", taken)]
    assert app.module.charge.delay("ORD-1").get(timeout=60) == taken
    assert journal.count("started") == 1


@pytest.mark.parametrize("where", ["charged ORD-1", "settled ORD-1"])
def test_what_was_not_committed_runs_again_after_a_kill(
    app: Celery, start_worker: StartWorker, gates: Gates, journal: Journal, business: Business, where: str
) -> None:
    gate = gates.close(where)
    start_worker(WITHIN, concurrency=1)
    result = app.module.charge.delay("ORD-1")
    [pid] = gate.reached()
    psutil.Process(pid).kill()
    gate.open()
    taken = result.get(timeout=60)
    assert business.charges() == [("ORD-1", taken)]
    assert journal.count("started") == 2


@pytest.mark.ending("settled in its own transaction")
def test_a_body_that_raises_after_its_commit_has_succeeded(
    app: Celery, start_worker: StartWorker, business: Business, store_url: str
) -> None:
    start_worker(WITHIN, concurrency=1)
    result = app.module.charge.delay("ORD-1", "raise late")
    taken = result.get(timeout=60)
    assert business.charges() == [("ORD-1", taken)]
    assert state_of(store_url) is State.COMPLETED


@pytest.mark.ending("settled in its own transaction, not committed")
def test_a_body_that_settles_and_does_not_commit_fails_and_its_next_delivery_runs(
    app: Celery, start_worker: StartWorker, business: Business, store_url: str
) -> None:
    start_worker(WITHIN, concurrency=1)
    with pytest.raises(SettleNotCommitted, match="not committed"):
        app.module.charge.delay("ORD-1", "forget to commit").get(timeout=60)
    assert business.charges() == []
    assert state_of(store_url) is State.RELEASED
    taken = app.module.charge.delay("ORD-2").get(timeout=60)
    assert business.charges() == [("ORD-2", taken)]


@pytest.mark.parametrize("store_url", ["postgres_url"], indirect=True)  # SQLite: a paused writer stops all others
def test_a_holder_that_wakes_after_its_lease_cannot_commit_what_another_has_done(
    app: Celery, start_worker: StartWorker, gates: Gates, journal: Journal, business: Business
) -> None:
    gate = gates.close("charged ORD-1")
    options: dict[str, Any] = {"visibility_timeout": 1, "concurrency": 1, "env": {"LEASE_TTL": "1.5"}}
    zombie = start_worker(WITHIN, **options)
    result = app.module.charge.delay("ORD-1")
    gate.reached()
    zombie.pause()
    wait_for_no_reader(app.conf.broker_url)
    gate.open()
    start_worker(WITHIN, **options)
    taken = result.get(timeout=60)
    zombie.resume()
    wait_until(lambda: "LeaseLost key=" in zombie.logs(), 60, lambda: f"the zombie to learn of it:\n{zombie.logs()}")
    assert journal.count("started") == 2
    assert business.charges() == [("ORD-1", taken)]
    assert app.module.charge.delay("ORD-1").get(timeout=60) == taken
