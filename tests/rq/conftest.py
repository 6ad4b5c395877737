"""A queue with its workers, for each test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

import pytest

from celery_idempotent.rq import idempotent
from tests.support.celery.journal import Journal
from tests.support.proxy import Proxy
from tests.support.rq import shop
from tests.support.rq.desk import Desk
from tests.support.rq.nodes import RqNode

NODES = pytest.StashKey[list[RqNode]]()
LOG_LINES = 100


class StartRq(Protocol):
    """Starts a worker of this test: `Desk.start`."""

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
def desk(
    request: pytest.FixtureRequest, redis_url: str, tmp_path: Path, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Desk]:
    """A queue in an empty database; the jobs find its journal and gates in their environment, here and in workers."""
    desk = Desk(redis_url, tmp_path)
    assert desk.journal.path == journal.path, "which is what the report of a failure shows"
    request.node.stash[NODES] = desk.nodes
    for name, value in desk.env.items():
        monkeypatch.setenv(name, value)
    yield desk
    desk.close()


@pytest.fixture
def start_rq(desk: Desk) -> StartRq:
    """A function that starts an `rq worker`, and waits until it is ready; at the end of the test it is ended."""
    return desk.start


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
