"""What the worker tests share: the app whose tasks end as told, and pytest-celery's `celery_setup` on processes.

Its broker, result backend and worker are those of `nodes.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from celery import Celery
from celery.worker import state as worker_state
from kombu.message import Message

from celery_idempotent import IdempotentTask
from celery_idempotent.celery.request import IdempotentRequest
from celery_idempotent.stores.memory import MemoryStore
from tests.support.celery.aftermath import PARTING, Aftermath
from tests.support.celery.apps import close_app
from tests.support.celery.fixtures import NODES
from tests.support.celery.gates import Gates
from tests.support.celery.journal import Journal
from tests.support.celery.nodes import RedisBackend, RedisBroker, WorkerNode
from tests.support.servers import RedisServer


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
        "tests.support.celery.plain_app",
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


@pytest.fixture
def main_store() -> MemoryStore:
    """The store of `request_of`."""
    return MemoryStore()


@pytest.fixture
def request_of(main_store: MemoryStore) -> Iterator[Callable[..., IdempotentRequest]]:
    """A function that makes a request which runs, as a worker's main process knows it, under a policy."""
    app = Celery("main", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.idempotency_store = main_store
    requests: list[IdempotentRequest] = []

    def make(**policy: object) -> IdempotentRequest:
        options = {"key": "order_id", "lease_ttl": 30, **policy}

        if "main.charge" not in app.tasks:  # as the first request wants it

            @app.task(base=IdempotentTask, shared=False, name="main.charge", idempotency=options)
            def charge(order_id: str) -> None: ...

        sent = app.amqp.as_task_v2("id", "main.charge", ("ORD-1",), {})
        body = (("ORD-1",), {}, {"callbacks": None, "errbacks": None, "chain": None, "chord": None})
        message = Message(body=body, headers=sent.headers, content_type="application/json")
        task = app.tasks["main.charge"]
        requests.append(IdempotentRequest(message, app=app, task=task, decoded=True, headers=sent.headers, body=body))
        worker_state.active_requests.add(requests[-1])
        return requests[-1]

    yield make
    for request in requests:
        worker_state.active_requests.discard(request)
    app.close()


@pytest.fixture
def own_request_of_celery() -> Iterator[IdempotentRequest]:
    """A running request of ``celery.map``, in an app whose tasks are all idempotent and which names no store."""
    app = Celery("own", broker="memory://", backend="cache+memory://", task_cls=IdempotentTask, set_as_current=False)
    app.finalize()
    body = (({}, []), {}, {"callbacks": None, "errbacks": None, "chain": None, "chord": "a chord"})
    sent = app.amqp.as_task_v2("id", "celery.map", ({}, []), {})
    message = Message(body=body, headers=sent.headers, content_type="application/json")
    task = app.tasks["celery.map"]
    request = IdempotentRequest(message, app=app, task=task, decoded=True, headers=sent.headers, body=body)
    worker_state.active_requests.add(request)
    yield request
    worker_state.active_requests.discard(request)
    app.close()


@pytest.fixture
def own_logging() -> Iterator[None]:
    """A worker in this process sets logging up as a process of its own would; undo that after the test."""
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    yield
    root.setLevel(level)
    root.handlers[:] = handlers


@pytest.fixture
def inside(own_logging: None) -> Iterator[Celery]:
    """An app whose broker, results and store live in this process, for workers in a thread of it."""
    app = Celery("inside", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.update(idempotency_store=MemoryStore(), broker_transport_options={"polling_interval": 0.05})
    yield app
    app.close()
