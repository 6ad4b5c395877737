"""What the worker tests share: the app whose tasks end as told, and pytest-celery's `celery_setup` on processes.

Its broker, result backend and worker are those of `nodes.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from celery import Celery

from tests.celery.aftermath import PARTING, Aftermath
from tests.celery.apps import close_app
from tests.celery.fixtures import NODES
from tests.celery.gates import Gates
from tests.celery.journal import Journal
from tests.celery.nodes import RedisBackend, RedisBroker, WorkerNode
from tests.servers import RedisServer


@pytest.fixture
def setup_server(own_redis: Callable[..., RedisServer]) -> RedisServer:
    return own_redis(appendonly="yes")


@pytest.fixture
def celery_broker(setup_server: RedisServer) -> RedisBroker:
    return RedisBroker(setup_server, 0)


@pytest.fixture
def celery_backend(setup_server: RedisServer) -> RedisBackend:
    return RedisBackend(setup_server, 1)


@pytest.fixture
def celery_setup_app(celery_setup_app: Celery) -> Iterator[Celery]:
    yield celery_setup_app
    close_app(celery_setup_app)


@pytest.fixture
def celery_worker(
    request: pytest.FixtureRequest,
    celery_broker: RedisBroker,
    celery_backend: RedisBackend,
    setup_server: RedisServer,
    journal: Journal,
    gates: Gates,
    tmp_path: Path,
) -> Iterator[WorkerNode]:
    node = WorkerNode(
        "tests.celery.plain_app",
        celery_broker.config()["url"],
        setup_server.url(2),
        result_url=celery_backend.config()["url"],
        directory=tmp_path,
        env={"JOURNAL": str(journal.path), "GATES": str(gates.directory)},
    )
    request.node.stash.setdefault(NODES, []).append(node)
    node.start().ready()
    yield node
    node.teardown()


@pytest.fixture
def parting(client_app: Callable[..., Celery]) -> Celery:
    """The app of `parting.py`, whose tasks end as they are told."""
    return client_app(PARTING)


@pytest.fixture
def aftermath(parting: Celery, store_url: str, journal: Journal) -> Aftermath:
    """What is left of a task of `parting.py`."""
    return Aftermath(parting, store_url, journal)
