"""What the fault tests share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from celery import Celery

from celery_idempotent.stores.redis import RedisStore
from tests.support.celery.journal import Journal
from tests.support.faults.broker_file import PERSISTED
from tests.support.faults.failpoints import VARIABLE, FailPoints
from tests.support.faults.sweep import MODULE, Sweep
from tests.support.proxy import Proxy
from tests.support.servers import RedisServer


@pytest.fixture
def broker(own_redis: Callable[..., RedisServer]) -> RedisServer:
    """The broker of a test that reads the broker's file."""
    return own_redis(**PERSISTED)


@pytest.fixture
def broker_url(request: pytest.FixtureRequest, fresh_redis: Callable[[], str]) -> str:
    """An empty database for the broker: in a server of the test's own, if it asks for that."""
    return request.getfixturevalue("broker").url() if "broker" in request.fixturenames else fresh_redis()


@pytest.fixture
def gateway(tmp_path: Path, worker_env: dict[str, str]) -> Path:
    """A directory with one file per payment that was taken; whoever asks twice with one key pays once."""
    directory = tmp_path / "gateway"
    directory.mkdir()
    worker_env["GATEWAY"] = str(directory)
    return directory


@pytest.fixture
def sweep(client_app: Callable[..., Celery], journal: Journal, gateway: Path, tmp_path: Path, store_url: str) -> Sweep:
    """A kill sweep; its workers must be started with `sweep_env`."""
    points = FailPoints(tmp_path / "points")
    return Sweep(client_app(MODULE), points, journal, gateway, RedisStore.from_url(store_url))


@pytest.fixture
def sweep_env(sweep: Sweep) -> dict[str, str]:
    """What tells a worker that it may be killed; the test's own process must never see it."""
    return {VARIABLE: str(sweep.points.directory)}


@pytest.fixture
def proxy(store_url: str, proxied: Callable[[int], Proxy]) -> Proxy:
    """What stands between the workers and their store."""
    return proxied(urlsplit(store_url).port or 6379)


@pytest.fixture
def way_through(proxy: Proxy, store_url: str) -> str:
    """The store's URL for workers."""
    return proxy.url(int(urlsplit(store_url).path.lstrip("/")))
