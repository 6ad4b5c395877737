"""SIGKILLs between a task's first statement and its ack, settled within the transaction and apart from it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from celery import Celery

from tests.support.celery.business import Business
from tests.support.celery.fixtures import StartWorker
from tests.support.celery.journal import Journal

SETTLE = "tests.support.faults.settle_app"
HEAD = "| settled | orders | runs | kills | charged twice | too many | lost | unequal results |"


@dataclass
class Count:
    """What came of the orders of one task."""

    settled: str
    orders: int
    runs: int
    kills: int
    twice: int
    surplus: int
    lost: int
    unequal: int

    def __str__(self) -> str:
        return f"| {' | '.join(str(value) for value in vars(self).values())} |"


@pytest.fixture
def store_url(postgres_url: str) -> str:
    return postgres_url


@pytest.fixture
def app(business: Business, client_app: Callable[..., Celery]) -> Celery:
    return client_app(SETTLE)


@pytest.fixture
def kill(app: Celery, business: Business, journal: Journal, start_worker: StartWorker) -> Callable[..., Count]:
    """A function that charges so many orders under a killer, and counts."""

    def run(task: str, orders: int, *, chance: float, seconds: float) -> Count:
        worker = start_worker(SETTLE, concurrency=4, env={"DOOM": str(chance), "DOOM_WITHIN": str(seconds)})
        runs, kills = journal.count("ran"), journal.count("killed")
        ids = [f"{task}-{number}" for number in range(orders)]
        results = {order: getattr(app.module, task).delay(order) for order in ids}
        values = {order: result.get(timeout=2500) for order, result in results.items()}
        charges = [row for row in business.charges() if row[0].startswith(f"{task}-")]
        counted = business.counted()
        unequal = sum(values[order] not in [charge for one, charge in charges if one == order] for order in ids)
        count = Count(
            settled={"within": "within the task's transaction", "apart": "in a transaction of its own"}[task],
            orders=orders,
            runs=journal.count("ran") - runs,
            kills=journal.count("killed") - kills,
            twice=sum(counted[order] > 1 for order in ids),
            surplus=sum(max(0, counted[order] - 1) for order in ids),
            lost=sum(counted[order] == 0 for order in ids),
            unequal=unequal,
        )
        worker.stop()
        return count

    return run


@pytest.mark.timeout(300)
def test_orders_settled_within_their_transaction_are_charged_once_whatever_is_killed(
    kill: Callable[..., Count],
) -> None:
    count = kill("within", 20, chance=0.7, seconds=0.02)
    print(f"\n{HEAD}\n{count}")
    assert count.kills > 0
    assert (count.twice, count.surplus, count.lost, count.unequal) == (0, 0, 0, 0)


@pytest.mark.soak
@pytest.mark.timeout(3000)
def test_a_thousand_kills_beside_the_same_settled_apart(kill: Callable[..., Count]) -> None:
    orders = int(os.environ.get("SOAK_ORDERS", "2000"))
    chance, seconds = float(os.environ.get("DOOM", "0.95")), float(os.environ.get("DOOM_WITHIN", "0.004"))
    within = kill("within", orders, chance=chance, seconds=seconds)
    print(f"\n{HEAD}\n{within}")
    assert (within.twice, within.surplus, within.lost, within.unequal) == (0, 0, 0, 0)
    apart = kill("apart", orders, chance=chance, seconds=seconds)
    print(apart)
    assert (apart.lost, apart.unequal) == (0, 0)
    assert apart.twice > 0, "the killer did not hit between effect and settle: this shows nothing"
