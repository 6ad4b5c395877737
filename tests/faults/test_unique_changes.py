"""The law of unique publishing under faults: after every call that was skipped, a body starts that sees its change."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable

import pytest
from celery import Celery

from tests.support.celery.apps import close_backend, messages
from tests.support.celery.fixtures import StartWorker
from tests.support.celery.journal import Journal
from tests.support.celery.nodes import WorkerNode
from tests.support.faults.documents import Documents
from tests.support.proxy import Proxy
from tests.support.waiting import wait_until

MODULE = "tests.support.faults.changes_app"
CALLS = int(os.environ.get("SOAK_CALLS", "20000"))
SEED = int(os.environ.get("SOAK_SEED", "0")) or random.SystemRandom().randrange(1, 2**31)
#: How many documents each task has: few, so that many calls find a message that waits.
DOCUMENTS = 7


class Editors:
    """Threads that change documents at random, and publish a call after each change."""

    def __init__(self, app: Celery, documents: Documents, seed: int) -> None:
        self.app, self.documents, self.random = app, documents, random.Random(seed)
        self.published: set[tuple[int, str]] = set()
        self.calls = 0
        self.errors: list[BaseException] = []

    def edit(self, calls: int, threads: int, pause: float) -> list[threading.Thread]:
        """Start them."""
        started = [
            threading.Thread(target=self._edit, args=(calls // threads, pause, self.random.random()))
            for _ in range(threads)
        ]
        for thread in started:
            thread.start()
        return started

    def _edit(self, calls: int, pause: float, seed: float) -> None:
        chance = random.Random(seed)
        try:
            for _ in range(calls):
                place = chance.randrange(len(self.app.module.TASKS))
                number = chance.randrange(DOCUMENTS) * 10 + place
                self.documents.change(number)
                self.published.add((number, self.app.module.TASKS[place].delay(number).id))
                self.calls += 1
                time.sleep(chance.uniform(0, 2 * pause))
        except BaseException as error:
            self.errors.append(error)
            raise
        finally:
            close_backend(self.app)


class Faults:
    """Faults at random, until the editors are done."""

    def __init__(self, nodes: list[WorkerNode], proxy: Proxy, seed: int, *, hosts: bool) -> None:
        self.nodes, self.proxy, self.random, self.hosts = nodes, proxy, random.Random(seed), hosts
        self.done: dict[str, int] = {}

    def happen(self, while_: Callable[[], bool], every: float) -> None:
        """Have one happen now and then."""
        kinds = [self.kill_child, self.cut_store, self.lose_reply, *([self.kill_host] if self.hosts else [])]
        while while_():
            time.sleep(self.random.uniform(0, 2 * every))
            kind = self.random.choice(kinds)
            kind()
            self.done[kind.__name__] = self.done.get(kind.__name__, 0) + 1

    def kill_child(self) -> None:
        node = self.random.choice(self.nodes)
        children = node.children()
        if children:
            node.kill_child(self.random.choice(children))

    def kill_host(self) -> None:
        node = self.random.choice(self.nodes)
        node.kill("SIGKILL")
        node.restart()

    def cut_store(self) -> None:
        self.proxy.reset()
        self.proxy.refuse()
        time.sleep(self.random.uniform(0.1, 1.0))
        self.proxy.heal()

    def lose_reply(self) -> None:
        self.proxy.swallow_each(3)
        time.sleep(self.random.uniform(0.1, 1.0))
        self.proxy.heal()  # else nothing is served, since no request is sent a fourth time


def run(
    calls: int,
    *,
    hosts: bool,
    pause: float,
    every: float,
    seconds: float,
    concurrency: int,
    client_app: Callable[..., Celery],
    start_worker: StartWorker,
    fresh_redis: Callable[[], str],
    broker_url: str,
    proxy: Proxy,
    way_through: str,
    journal: Journal,
) -> dict[str, int]:
    """Edit under faults; return the documents that are behind when all that was published is done.

    A body takes so many ``seconds``; each of two workers has so many children.
    """
    url = fresh_redis()
    env = {"DOCUMENTS": url, "SECONDS": str(seconds)}
    options = {"concurrency": concurrency, "visibility_timeout": 5, "store_url": way_through, "env": env}
    nodes = [start_worker(MODULE, ready=False, **options) for _ in range(2)]
    for node in nodes:
        node.ready()
    documents = Documents(url)
    editors = Editors(client_app(MODULE, STORE_URL=way_through, DOCUMENTS=url), documents, SEED)
    faults = Faults(nodes, proxy, SEED, hosts=hosts)
    threads = editors.edit(calls, 4, pause)
    faults.happen(lambda: any(thread.is_alive() for thread in threads), every)
    for thread in threads:
        thread.join()
    proxy.heal()
    assert not editors.errors
    wait_until(lambda: not messages(broker_url), 120 + calls / 20, "all that was published to be done")
    behind = documents.behind()
    begun = {entry.fields["task_id"] for entry in journal.entries("begin")}
    print(
        f"\nSOAK_SEED={SEED}: {editors.calls} calls, {len(editors.published)} published, {documents.runs()} runs; "
        f"faults: {faults.done}; behind: {behind}"
    )
    assert len(editors.published) < editors.calls  # some were skipped
    # What Redis has popped for a worker that died is lost to every task, unique or not.
    lost = {number for number, task_id in editors.published if task_id not in begun}
    return {number: version for number, version in behind.items() if not (hosts and int(number) in lost)}


@pytest.fixture
def edited(
    client_app: Callable[..., Celery],
    start_worker: StartWorker,
    fresh_redis: Callable[[], str],
    broker_url: str,
    proxy: Proxy,
    way_through: str,
    journal: Journal,
) -> Callable[..., dict[str, int]]:
    """`run` with what it needs."""

    def edit(calls: int, **how: float) -> dict[str, int]:
        return run(
            calls,
            client_app=client_app,
            start_worker=start_worker,
            fresh_redis=fresh_redis,
            broker_url=broker_url,
            proxy=proxy,
            way_through=way_through,
            journal=journal,
            **how,  # type: ignore[arg-type]
        )

    return edit


@pytest.mark.nightly
def test_no_change_is_swallowed_while_children_die_and_the_store_is_away(
    edited: Callable[..., dict[str, int]],
) -> None:
    # Bodies that take long, so that messages wait, and a store that is there for most of the time.
    assert edited(240, hosts=False, pause=0.15, every=1.5, seconds=0.3, concurrency=1) == {}


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_no_change_is_swallowed_in_a_storm(edited: Callable[..., dict[str, int]]) -> None:
    assert edited(CALLS, hosts=True, pause=0.05, every=1.0, seconds=0.1, concurrency=2) == {}
