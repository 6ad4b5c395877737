"""Every run that was told to begin is told to end, once, or died with its horse; however jobs end."""

from __future__ import annotations

import random

import pytest
from rq import Callback, Retry

from celery_idempotent import events
from celery_idempotent.stores import State
from tests.rq.conftest import StartRq
from tests.support.faults.run_account import ENDINGS, STARTS, Account
from tests.support.rq import shop
from tests.support.rq.desk import Desk, hearing
from tests.support.stores.kinds import age_redis
from tests.support.waiting import wait_until

KINDS = ["return", "raise", "raise at first", "decline", "retry 1", "retry 2 at first", "exit", "exit at first"]


def one_of_each_lost(desk: Desk, chance: random.Random) -> None:
    """Have some lease run out, and another take it over: its holder is overtaken.

    ORD-8's is always, ORD-9's never.
    """
    running = [one for one in desk.records() if one.state is State.IN_PROGRESS and "ORD-9" not in one.key]
    certain = [one for one in running if "ORD-8" in one.key]
    if certain or (running and chance.random() < 0.3):
        record = chance.choice(certain or running)
        age_redis(desk.store, record.key, record.remaining + 0.001)
        if certain or chance.random() < 0.7:
            desk.hold(record.key)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(2))
def test_every_run_that_began_ends_once_however_jobs_end(desk: Desk, seed: int) -> None:
    chance = random.Random(seed)
    functions = (shop.charge, shop.charge_slowly, shop.report)
    with (
        desk.scheduler() as scheduler,
        hearing(*STARTS, *ENDINGS, then=lambda event: one_of_each_lost(desk, chance)) as heard,
    ):
        for _ in range(40):
            desk.queue.enqueue(
                chance.choice(functions),
                f"ORD-{chance.randrange(8)}",
                ending=chance.choice(KINDS),
                retry=chance.choice([None, Retry(max=2), Retry(max=1, interval=9)]),
                on_success=chance.choice([None, Callback(shop.broken)]),
            )
            if chance.random() < 0.2:
                desk.burst()
                desk.bring_back(scheduler)
        desk.queue.enqueue(shop.charge, "ORD-8", ending="return")
        desk.queue.enqueue(shop.charge, "ORD-9", ending="decline")
        desk.burst()
    began = [(event.key, event.fence) for event in heard if isinstance(event, STARTS)]
    ended = [(event.key, event.fence) for event in heard if isinstance(event, ENDINGS)]
    assert len(began) > 25
    assert len(set(began)) == len(began)
    assert sorted(began) == sorted(ended)
    assert {type(event) for event in heard} >= {events.Completed, events.Released, events.Failed, events.LeaseLost}


@pytest.mark.parametrize("worker", ["rq.Worker", "tests.support.rq.shop.TellingWorker"], ids=["stock", "ours"])
def test_every_run_that_began_ends_once_or_dies_with_its_horse(desk: Desk, start_rq: StartRq, worker: str) -> None:
    chance = random.Random(7)
    kinds = ["die at first", "die at first", "exit at first", "raise at first", "return", "retry 2 at first"]
    jobs = [
        desk.queue.enqueue(shop.charge, f"ORD-{number % 4}", ending=chance.choice(kinds), retry=Retry(max=4))
        for number in range(10)
    ]
    for _ in range(2):
        start_rq(worker=worker, env={"LEASE_TTL": "2"}, options=["--job-monitoring-interval", "1"], ready=False)
    for job in jobs:
        desk.wait_for(job, "finished")
    account = Account(desk.journal)
    wait_until(lambda: not account.live() or not Account(desk.journal).live(), message="the horses to end")
    account = Account(desk.journal)
    assert account.faults() == [], f"{account.summary()}\n{desk.journal}"
    assert account.died()
    assert bool(account.spoken_for) == (worker != "rq.Worker")
    assert {desk.again(job).return_value() for job in jobs} <= {
        f"ORD-{number} charged {desk.effects(f'ORD-{number}')}" for number in range(4)
    }
