"""RabbitMQ as the broker: a real node, real workers; the store and the results stay in Redis."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import Celery

from celery_idempotent.records import Record, State
from celery_idempotent.stores.redis import RedisStore
from tests.celery.fixtures import StartWorker
from tests.celery.gates import Gates
from tests.celery.journal import Journal
from tests.celery.nodes import WorkerNode
from tests.conftest import missing
from tests.rabbitmq import RabbitServer, Vhost, external_url
from tests.servers import ServerMissing
from tests.waiting import wait_until

RABBIT = "tests.celery.rabbit"
QUEUES = ("orders", "mails", "dead")

# Queue type and exchange type. Only the last pair has Celery's native delayed delivery.
KINDS = [("classic", "direct"), ("quorum", "direct"), ("quorum", "topic")]


@pytest.fixture(scope="module")
def server() -> Iterator[RabbitServer | None]:
    """The node of these tests, or None where the environment names a server."""
    if external_url():
        yield None
        return
    try:
        server = RabbitServer()
    except ServerMissing as error:
        raise missing(error, optional="rabbitmq") from None
    with server:
        yield server


@pytest.fixture
def own_server(server: RabbitServer | None) -> RabbitServer:
    """The node of these tests, to be told what to do by its operator."""
    if server is None:
        pytest.skip("needs a RabbitMQ of its own; RABBITMQ_URL or AMQP_URL names another")
    return server


@pytest.fixture
def vhost(server: RabbitServer | None) -> Iterator[Vhost]:
    vhost = server.vhost() if server else Vhost(str(external_url()))
    yield vhost
    vhost.delete(QUEUES)


@pytest.fixture
def broker_url(vhost: Vhost) -> str:
    return vhost.url


@pytest.fixture
def worker_env(worker_env: dict[str, str], vhost: Vhost) -> dict[str, str]:
    return {**worker_env, "PREFIX": vhost.prefix}


@pytest.fixture
def start(start_worker: StartWorker, vhost: Vhost) -> Callable[..., WorkerNode]:
    """A function that starts a worker of one queue."""

    def start(*queues: str, **options: Any) -> WorkerNode:
        return start_worker(RABBIT, queues=[vhost.name(queue) for queue in queues or ("orders",)], **options)

    return start


@pytest.fixture
def record(store_url: str) -> Callable[..., Record | None]:
    store = RedisStore.from_url(store_url)
    return lambda operation, task="charge": store.get(f"idem:{RABBIT}.{task}::{operation}")


@pytest.fixture(params=KINDS, ids=["-".join(kind) for kind in KINDS])
def kind(request: pytest.FixtureRequest, worker_env: dict[str, str]) -> tuple[str, str]:
    """A type of queue and of exchange, in which the workers of this test find their messages."""
    worker_env["QUEUE_TYPE"], worker_env["EXCHANGE_TYPE"] = request.param
    return request.param


@pytest.fixture
def native(worker_env: dict[str, str]) -> None:
    """Quorum queues with Celery's native delayed delivery."""
    worker_env["QUEUE_TYPE"], worker_env["EXCHANGE_TYPE"] = "quorum", "topic"


def test_a_duplicate_after_success_replays(
    client_app: Callable[..., Celery],
    start: Callable[..., WorkerNode],
    vhost: Vhost,
    journal: Journal,
    record: Callable[..., Record | None],
    kind: tuple[str, str],
) -> None:
    app = client_app(RABBIT)
    node = start()
    assert app.module.charge.delay("ORD-1").get(timeout=20) == "charged ORD-1"
    assert app.module.charge.delay("ORD-1").get(timeout=20) == "charged ORD-1"
    assert node.stop() == 0
    assert vhost.ready(*QUEUES) == {}
    assert journal.count("charged") == 1
    found = record("ORD-1")
    assert found is not None
    assert (found.state, found.crashes) == (State.COMPLETED, 0)


def test_a_duplicate_while_running_is_deferred_and_both_get_the_same_result(
    client_app: Callable[..., Celery],
    start: Callable[..., WorkerNode],
    vhost: Vhost,
    journal: Journal,
    gates: Gates,
    kind: tuple[str, str],
) -> None:
    app = client_app(RABBIT)
    gate = gates.close("before ORD-1")
    node = start()
    first = app.module.charge.delay("ORD-1")
    gate.reached()
    second = app.module.charge.delay("ORD-1")
    node.wait_for_log("copy=2", timeout=30)
    gate.open()
    assert [first.get(timeout=30), second.get(timeout=30)] == ["charged ORD-1"] * 2
    assert node.stop() == 0
    assert vhost.ready(*QUEUES) == {}
    assert journal.count("charged") == 1
