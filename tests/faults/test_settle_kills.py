"""SIGKILLs between a task's first statement and its ack, settled within the transaction and apart from it."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from celery import Celery

from celery_idempotent.stores import open_store
from tests.support.celery.business import Business
from tests.support.celery.fixtures import StartWorker
from tests.support.celery.journal import Journal
from tests.support.faults import soaks

SETTLE = "tests.support.faults.settle_app"
ORDERS = int(os.environ.get("SOAK_ORDERS", "2000"))
CHANCE, SECONDS = float(os.environ.get("DOOM", "0.95")), float(os.environ.get("DOOM_WITHIN", "0.004"))
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
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A database: PostgreSQL, or what the test's parameter says."""
    if getattr(request, "param", "PostgreSQL") == "PostgreSQL":
        return str(request.getfixturevalue("postgres_url"))
    url = f"sqlite:///{tmp_path}/store.sqlite3"
    store = open_store(url)
    store.apply_schema()
    store.close()
    return url


@pytest.fixture
def app(business: Business, client_app: Callable[..., Celery]) -> Celery:
    return client_app(SETTLE)


@pytest.fixture
def kill(
    app: Celery, business: Business, journal: Journal, start_worker: StartWorker, gateway: Path
) -> Callable[..., Count]:
    """A function that charges so many orders under a killer, and counts."""

    def run(task: str, orders: int, *, chance: float, seconds: float) -> Count:
        worker = start_worker(SETTLE, concurrency=4, env={"DOOM": str(chance), "DOOM_WITHIN": str(seconds)})
        runs, kills = journal.count("ran"), journal.count("killed")
        ids = [f"{task}-{number}" for number in range(orders)]
        results = {order: getattr(app.module, task).delay(order) for order in ids}
        values = {order: result.get(timeout=2500) for order, result in results.items()}
        paid = [tuple(path.name.split(".", 1)) for path in gateway.iterdir()]
        charges = [row for row in paid or business.charges() if row[0].startswith(f"{task}-")]
        counted = Counter(order for order, _ in charges)
        unequal = sum(values[order] not in [charge for one, charge in charges if one == order] for order in ids)
        count = Count(
            settled={
                "within": "within the task's transaction",
                "apart": "in a transaction of its own",
                "at_gateway": "by itself, paid at a gateway",
            }[task],
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
@pytest.mark.parametrize("store_url", ["PostgreSQL", "SQLite"], indirect=True)
@pytest.mark.parametrize(("task", "what"), [("within", "within its transaction"), ("at_gateway", "at a gateway")])
def test_whatever_is_killed_nothing_is_lost_and_each_order_is_charged_once(
    kill: Callable[..., Count], request: pytest.FixtureRequest, task: str, what: str
) -> None:
    count = kill(task, ORDERS, chance=CHANCE, seconds=SECONDS)
    print(f"\n{HEAD}\n{count}")
    store = request.node.callspec.params["store_url"]
    soaks.add(
        f"{what}, {store}",
        kills=count.kills,
        operations=count.orders,
        twice=count.twice,
        lost=count.lost,
        unequal=count.unequal,
    )
    assert count.kills > count.orders / 2
    assert (count.twice, count.surplus, count.lost, count.unequal) == (0, 0, 0, 0)


@pytest.mark.soak
@pytest.mark.timeout(3000)
def test_a_thousand_kills_beside_the_same_settled_apart(kill: Callable[..., Count]) -> None:
    within = kill("within", ORDERS, chance=CHANCE, seconds=SECONDS)
    print(f"\n{HEAD}\n{within}")
    assert (within.twice, within.surplus, within.lost, within.unequal) == (0, 0, 0, 0)
    apart = kill("apart", ORDERS, chance=CHANCE, seconds=SECONDS)
    print(apart)
    assert (apart.lost, apart.unequal) == (0, 0)
    assert apart.twice > 0, "the killer did not hit between effect and settle: this shows nothing"
