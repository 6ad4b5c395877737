"""A queue with its workers, for each test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

import pytest

from celery_idempotent.rq import idempotent
from tests.support.celery.gates import Gates
from tests.support.celery.journal import Journal
from tests.support.proxy import Proxy
from tests.support.rq import shop
from tests.support.rq.desk import Desk
from tests.support.rq.nodes import RqNode
from tests.support.servers import open_client

NODES = pytest.StashKey[list[RqNode]]()
LOG_LINES = 100


class StartRq(Protocol):
    """Starts a worker of this test; the arguments are `RqNode`'s."""

    def __call__(self, *, ready: bool = True, **options: Any) -> RqNode: ...


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report = yield
    if report.failed:
        for node in item.stash.get(NODES, []):
            node.abort()
            text = "\n".join(node.logs().splitlines()[-LOG_LINES:])
            report.sections.append((f"log of {node.name}", text))
    return report


@pytest.fixture
def shop_env(journal: Journal, gates: Gates, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What the jobs read from their environment, here and in workers."""
    env = {"JOURNAL": str(journal.path), "GATES": str(gates.directory)}
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    return env


@pytest.fixture
def desk(redis_url: str, shop_env: dict[str, str], journal: Journal, gates: Gates) -> Iterator[Desk]:
    """A queue in an empty database."""
    with open_client(redis_url) as client:
        desk = Desk(redis_url, client, journal, gates)
        yield desk
        desk.close()


@pytest.fixture
def start_rq(request: pytest.FixtureRequest, tmp_path: Path, desk: Desk) -> Iterator[StartRq]:
    """A function that starts an `rq worker`, and waits until it is ready; at the end of the test it is killed."""
    nodes: list[RqNode] = request.node.stash.setdefault(NODES, [])

    def start(*, ready: bool = True, **options: Any) -> RqNode:
        options.setdefault("name", f"worker{len(nodes) + 1}")
        nodes.append(RqNode(desk.url, directory=tmp_path, **options).start())
        return nodes[-1].ready() if ready else nodes[-1]

    yield start
    desk.gates.open_all()
    for node in nodes:
        node.teardown()


@pytest.fixture
def through(desk: Desk, proxied: Callable[[int], Proxy], monkeypatch: pytest.MonkeyPatch) -> Proxy:
    """What lies between the store and the jobs of `tests.support.rq.shop.charge_through`."""
    where = urlsplit(desk.url)
    assert where.port is not None
    proxy = proxied(where.port)

    def charge_through(order: str) -> Any:
        return shop.end(order, "return", shop.effect(order))

    charge_through.__module__, charge_through.__qualname__ = shop.__name__, "charge_through"
    guarded = idempotent(key="order", wait_timeout=0.3, store=proxy.url(int(where.path[1:])))(charge_through)
    monkeypatch.setattr(shop, "charge_through", guarded, raising=False)
    return proxy
