"""SIGKILLs between a task's first statement and its ack: effects settled with their record, and asked of a gateway."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from celery.result import AsyncResult

from tests.support.celery.business import Business
from tests.support.celery.fixtures import StartWorker
from tests.support.celery.journal import Journal
from tests.support.docs import soaks
from tests.support.docs.soaks import GATEWAY, POSTGRES, SQLITE, Figures
from tests.support.faults.broker_file import BrokerFile
from tests.support.servers import RedisServer
from tests.support.waiting import WaitTimeout, wait_until

APP = "tests.support.faults.settle_app"
SEED = int(os.environ.get("SOAK_SEED", "0")) or random.SystemRandom().randrange(1, 2**31)
#: Kills of each soak.
KILLS = int(os.environ.get("SOAK_KILLS", "1000"))
#: Orders that are published at once: the next ones are there before the last of them are done.
WAVE = 100
#: Seconds in which no run begins and none is killed, after which a wave that is not answered is lost.
PATIENCE = 300.0
Results = dict[str, AsyncResult[str]]


@pytest.fixture
def store_url(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue(getattr(request, "param", "redis_url")))


@pytest.fixture
def app(client_app: Callable[..., Celery]) -> Celery:
    return client_app(APP)


@pytest.fixture
def start_killed_worker(start_worker: StartWorker) -> Callable[..., Any]:
    """A function that starts a worker whose children are killed."""

    def start(*, chance: float, seconds: float, concurrency: int = 12, **env: str) -> Any:
        doom = {"DOOM": str(chance), "DOOM_WITHIN": str(seconds), "DOOM_SEED": str(SEED)}
        print(f"\nSOAK_SEED={SEED} SOAK_KILLS={KILLS}")
        return start_worker(APP, concurrency=concurrency, env={**doom, **env})

    return start


def charge(task: Any, journal: Journal, kills: int, wave: int = WAVE) -> Results:
    """Publish orders until so many runs were killed; return the result of each, which may not have come."""
    waves: list[Results] = []
    while not waves or journal.count("killed") < kills:
        orders = [f"order-{len(waves)}-{n}" for n in range(wave)]
        waves.append({order: task.delay(order) for order in orders})
        for each in waves[-2:-1]:
            wait_for(each, journal)
    wait_for(waves[-1], journal)
    return {order: result for each in waves for order, result in each.items()}


def wait_for(results: Results, journal: Journal) -> None:
    seen = None
    while seen != (seen := (journal.count("ran"), journal.count("killed"))):  # else the machine is only slow
        try:
            wait_until(lambda: all(result.ready() for result in results.values()), PATIENCE)
            break
        except WaitTimeout as error:  # what is not answered is counted
            print(error)


def answers(results: Results) -> dict[str, str | None]:
    """Return what the caller of each order was answered, None if nothing."""
    return {order: result.get(propagate=False) if result.ready() else None for order, result in results.items()}


def losses(results: Results, effects: Mapping[str, Collection[str]], broker: RedisServer) -> tuple[int, int]:
    """Count the orders without an effect or an answer: those whose message Redis popped for nobody, and the others."""
    file, answered = BrokerFile(broker.directory), answers(results)
    lost = [order for order in results if not effects[order] or answered[order] is None]
    for order in lost:
        print(f"{order} has the effects {effects[order]}, the answer {answered[order]}, {file.of(results[order].id)}")
    popped = sum(results[order].id in file.vanished() for order in lost)
    return popped, len(lost) - popped


def settled_within(business: Business, journal: Journal, broker: RedisServer, what: str, results: Results) -> Figures:
    """Count what came of charges that were committed with their record."""
    charges: dict[str, list[str]] = {order: [] for order in results}
    for order, taken in business.charges():
        charges[order].append(taken)
    popped, lost = losses(results, charges, broker)
    return Figures(
        what,
        SEED,
        kills=journal.count("killed"),
        operations=len(results),
        runs=journal.count("ran"),
        duplicates=sum(len(taken) - 1 for taken in charges.values() if taken),
        popped=popped,
        lost=lost,
        wrong=sum(answer is not None and answer not in charges[order] for order, answer in answers(results).items()),
    )


def asked_of_the_gateway(directory: Path, journal: Journal, broker: RedisServer, results: Results) -> Figures:
    """Count what came of charges that were asked of a gateway."""
    payments: dict[str, list[str]] = {order: [] for order in results}
    for entry in journal.entries("asked"):
        payments[entry.key].append(entry.fields["payment"])
    struck = Counter(entry.key for entry in journal.entries("struck"))
    again = {order: len(asked) - 1 for order, asked in payments.items() if asked}
    taken = {file.name for file in directory.iterdir()}
    paid = {order: taken.intersection(asked) for order, asked in payments.items()}
    popped, lost = losses(results, paid, broker)
    return Figures(
        GATEWAY,
        SEED,
        kills=journal.count("killed"),
        operations=len(results),
        runs=journal.count("ran"),
        repeated=sum(min(count, struck[order]) for order, count in again.items()),
        unexplained=sum(max(0, count - struck[order]) for order, count in again.items()),
        duplicates=sum(len(each) - 1 for each in paid.values() if each),
        popped=popped,
        lost=lost,
        wrong=sum(answer is not None and answer not in paid[order] for order, answer in answers(results).items()),
    )


def check(figures: Figures) -> None:
    print(figures)
    assert figures.kills > 0
    assert (figures.unexplained, figures.duplicates, figures.lost, figures.wrong) == (0, 0, 0, 0)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("store_url", ["postgres_url"], indirect=True)
def test_orders_settled_within_their_transaction_are_charged_once_whatever_is_killed(
    broker: RedisServer, app: Celery, business: Business, journal: Journal, start_killed_worker: Callable[..., Any]
) -> None:
    start_killed_worker(chance=0.7, seconds=0.02)
    results = charge(app.module.within, journal, 1, wave=20)
    check(settled_within(business, journal, broker, POSTGRES, results))


@pytest.mark.soak
@pytest.mark.timeout(6000)
@pytest.mark.parametrize(
    ("store_url", "what"), [("postgres_url", POSTGRES), ("sqlite_url", SQLITE)], indirect=["store_url"]
)
def test_kills_of_orders_settled_within_their_transaction(
    what: str,
    broker: RedisServer,
    app: Celery,
    business: Business,
    journal: Journal,
    start_killed_worker: Callable[..., Any],
) -> None:
    # With few children the main process is often the last that has the file of SQLite open, and its log begins anew.
    start_killed_worker(chance=0.95, seconds=0.004, concurrency=random.Random(SEED).choice((2, 3, 12)))
    results = charge(app.module.within, journal, KILLS)
    figures = settled_within(business, journal, broker, what, results)
    soaks.add(figures)
    check(figures)
    assert not journal.entries("inherited")


@pytest.mark.soak
@pytest.mark.timeout(6000)
def test_kills_of_orders_asked_of_a_gateway(
    broker: RedisServer, app: Celery, gateway: Path, journal: Journal, start_killed_worker: Callable[..., Any]
) -> None:
    start_killed_worker(chance=0.95, seconds=0.002)
    results = charge(app.module.gateway, journal, KILLS)
    figures = asked_of_the_gateway(gateway, journal, broker, results)
    soaks.add(figures)
    check(figures)
    assert figures.repeated > 0, "the killer did not hit between effect and record: this shows nothing"
