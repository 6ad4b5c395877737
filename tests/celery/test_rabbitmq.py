"""RabbitMQ as the broker: a real node, real workers; the store and the results stay in Redis."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import datetime
from decimal import Decimal
from time import monotonic
from typing import Any
from uuid import UUID

import pytest
from amqp.exceptions import ChannelError, InternalError, MessageNacked
from celery import Celery, chain
from kombu import Exchange, Queue
from kombu.exceptions import OperationalError

from celery_idempotent.celery import unique
from celery_idempotent.celery.message import publisher
from celery_idempotent.stores import Claim, Lease, Record, State
from celery_idempotent.stores.redis import RedisStore
from tests.conftest import missing
from tests.support.celery.fixtures import StartWorker
from tests.support.celery.gates import Gates
from tests.support.celery.journal import Journal
from tests.support.celery.monitor import Monitor
from tests.support.celery.nodes import WorkerNode
from tests.support.proxy import Proxy
from tests.support.rabbitmq import CONNECT_SECONDS, RabbitServer, Vhost, external_url
from tests.support.servers import ServerMissing
from tests.support.waiting import wait_until

RABBIT = "tests.support.celery.rabbit"
QUEUES = ("orders", "mails", "dead")

# Queue type and exchange type. Only the last pair has Celery's native delayed delivery.
CLASSIC, QUORUM, NATIVE = ("classic", "direct"), ("quorum", "direct"), ("quorum", "topic")


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
def app(client_app: Callable[..., Celery], kind: tuple[str, str]) -> Celery:
    """The app to publish with; all its queues are there, as if each had its workers."""
    app = client_app(RABBIT)
    if kind == NATIVE:
        wait_until(lambda: _delays(app), 60, "RabbitMQ to have the 28 quorum queues of Celery's delayed delivery")
    with app.connection_for_write(connect_timeout=CONNECT_SECONDS) as connection:
        for queue in app.amqp.queues.values():
            queue.bind(connection.default_channel).declare()
    return app


def _delays(app: Celery) -> bool:
    """Declare what delays messages; a worker whose declaration fails on a busy machine goes on without."""
    from kombu.transport.native_delayed_delivery import declare_native_delayed_delivery_exchanges_and_queues

    try:
        with app.connection_for_write() as connection:
            declare_native_delayed_delivery_exchanges_and_queues(connection, "quorum")
    except InternalError:
        return False
    return True


@pytest.fixture
def left(server: RabbitServer | None, vhost: Vhost) -> Callable[..., dict[str, int]]:
    """A function that ends workers once they have acked what they did, and returns what is in the queues then."""

    def left(*nodes: WorkerNode) -> dict[str, int]:
        if server:
            wait_until(lambda: at_rest(server), 30, "every message to be acked or given back")
        for node in nodes:
            node.kill() if server else node.stop()
        return vhost.left(*QUEUES)

    def at_rest(server: RabbitServer) -> bool:
        # A copy that RabbitMQ itself delays, for a second at least, is with no worker and will be.
        return not vhost.delayed() and server.unacked(vhost) == 0 and not vhost.delayed()

    return left


@pytest.fixture
def record(store_url: str) -> Callable[..., Record]:
    """A function that returns the record of an operation."""
    store = RedisStore.from_url(store_url)

    def record(operation: str, task: str = "charge") -> Record:
        found = store.get(f"idem:{RABBIT}.{task}::{operation}")
        assert found is not None, f"nothing is remembered of {operation}"
        return found

    return record


@pytest.fixture
def kind(request: pytest.FixtureRequest, worker_env: dict[str, str]) -> tuple[str, str]:
    """The type of the queues and of the exchange: classic unless the test says otherwise."""
    found: tuple[str, str] = getattr(request, "param", CLASSIC)
    worker_env["QUEUE_TYPE"], worker_env["EXCHANGE_TYPE"] = found
    return found


def logged(node: WorkerNode, text: str) -> None:
    """Wait until a worker has logged something."""
    wait_until(lambda: text in node.logs(), 30, f"{node.name()} to log {text!r}")


def on(*kinds: tuple[str, str]) -> pytest.MarkDecorator:
    """Run a test on these kinds of queues."""
    return pytest.mark.parametrize("kind", kinds, indirect=True, ids="-".join)


@on(CLASSIC, QUORUM, NATIVE)
def test_duplicates_get_the_same_result_while_it_runs_and_afterwards(
    app: Celery,
    start: Callable[..., WorkerNode],
    left: Callable[..., dict[str, int]],
    record: Callable[..., Record],
    journal: Journal,
    gates: Gates,
) -> None:
    gate = gates.close("before ORD-1")
    node = start()
    results = [app.module.charge.delay("ORD-1")]
    gate.reached()
    results.append(app.module.charge.delay("ORD-1"))
    logged(node, "copy=1")
    gate.open()
    results.append(app.module.charge.delay("ORD-1"))
    assert [result.get(timeout=30) for result in results] == ["charged ORD-1"] * 3
    assert left(node) == {}
    assert (journal.count("started"), journal.count("charged")) == (1, 1)
    assert (record("ORD-1").state, record("ORD-1").crashes) == (State.COMPLETED, 0)


def test_keys_that_amqp_has_no_form_for_name_their_operations_in_each_attempt_and_in_a_chain(
    app: Celery, start: Callable[..., WorkerNode], store_url: str, journal: Journal
) -> None:
    """Its tables have no UUIDs and no large integers, and times in whole seconds."""
    start()
    at = datetime(2026, 1, 1, 3, 4, 5, 100)
    given = [at, at.replace(microsecond=900), UUID(int=7), 2**70, (1, Decimal("1.10"))]
    flaky, steps = app.module.flaky, []
    for key in given:
        step = flaky.si("ORD-1", 1, 0).set(idempotency_key=key)
        steps += [step, chain(app.module.charge.si(f"before {key}"), step)]
    assert [step.apply_async().get(timeout=30) for step in steps] == ["ORD-1 after 1"] * 10
    assert journal.count("charged", "ORD-1") == len(given)
    with closing(RedisStore.from_url(store_url)) as store:
        records = [store.get(flaky.key_for("ORD-1", 1, 0, idempotency_key=key)) for key in given]
    assert [found and found.state for found in records] == [State.COMPLETED] * 5


@pytest.mark.nightly
@on(CLASSIC, NATIVE)
def test_a_monitor_sees_a_duplicate_deferred_while_it_waits_and_replayed_before_it_succeeds(
    app: Celery, start: Callable[..., WorkerNode], record: Callable[..., Record], gates: Gates
) -> None:
    with Monitor(app) as monitor:
        gate = gates.close("before ORD-1")
        start(extra_args=["-E"])
        first = app.module.charge.delay("ORD-1")
        gate.reached()
        second = app.module.charge.delay("ORD-1")
        monitor.wait_for(second.id, "deferred")
        wait_until(lambda: monitor.types(second.id).count("received") > 1, 30, "the copy to come")
        assert monitor.task(second.id).state == "DEFERRED"
        assert monitor.task(second.id).idempotency["key"] == record("ORD-1").key
        gate.open()
        assert first.get(timeout=30) == second.get(timeout=30)
        for result in (first, second):
            monitor.wait_for(result.id, "succeeded", 30)
        assert monitor.types(first.id) == ["received", "started", "succeeded"]
        # The worker may receive a copy, which it then holds itself, before it tells that there is one.
        assert monitor.types(second.id)[-2:] == ["replayed", "succeeded"]
        assert monitor.facts(second.id, "replayed")["original"] == first.id
        assert monitor.task(second.id).state == "SUCCESS"


@pytest.mark.nightly
@on(NATIVE)
def test_a_copy_that_rabbitmq_would_drop_for_want_of_a_route_is_not_lost(
    app: Celery, start: Callable[..., WorkerNode], journal: Journal, gates: Gates
) -> None:
    """A broker confirms what it cannot route, too. Celery goes on where it could declare a part of its queues alone."""
    gate = gates.close("before ORD-1")
    node = start()
    first = app.module.charge.delay("ORD-1")
    gate.reached()
    with app.connection_for_write() as connection:
        connection.default_channel.queue_delete("celery_delayed_0")
    second = app.module.charge.delay("ORD-1")
    logged(node, "cannot be published again")
    gate.open()
    assert first.get(timeout=30) == second.get(timeout=30) == "charged ORD-1"
    assert journal.count("started") == 1


@on(CLASSIC, QUORUM, NATIVE)
def test_a_call_is_skipped_once_the_broker_has_confirmed_the_message_that_waits(
    app: Celery, start: Callable[..., WorkerNode], left: Callable[..., dict[str, int]], journal: Journal
) -> None:
    index = app.module.index
    first = index.delay(7)
    assert [index.delay(7).id, index.apply_async((7,), countdown=5).id] == [first.id] * 2
    assert index.delay(8).id != first.id
    node = start()
    assert first.get(timeout=30) == 7
    assert index.delay(7).get(timeout=30) == 7
    assert left(node) == {}
    assert (journal.count("indexed", 7), journal.count("indexed", 8)) == (2, 1)


@on(CLASSIC)
def test_a_child_that_a_publisher_forks_leaves_its_confirming_connection_alone(app: Celery) -> None:
    """Also one of multiprocessing, in which kombu closes the connections of its other pools, sockets and all."""
    index = app.module.index
    index.delay(7)
    child = multiprocessing.get_context("fork").Process(target=int)
    child.start()
    child.join()
    assert index.apply_async((8,), retry=False).id == index.delay(8).id


@pytest.mark.nightly
@on(NATIVE)
def test_a_debounced_task_waits_for_whole_seconds_where_the_broker_delays(
    app: Celery, start: Callable[..., WorkerNode], journal: Journal
) -> None:
    start()
    results = [app.module.settle.delay(7, version) for version in range(3)]
    assert results[-1].get(timeout=30) == 2
    assert [entry.fields["version"] for entry in journal.entries("settled")] == [2]


@on(CLASSIC)
def test_nothing_is_skipped_for_a_message_that_the_broker_has_not_confirmed(app: Celery, vhost: Vhost) -> None:
    index, name = app.module.index, vhost.name("full")
    with app.producer_or_acquire() as producer:  # which does not confirm
        assert len({index.apply_async((7,), producer=producer).id for _ in range(2)}) == 2
    limits = {"x-max-length": 1, "x-overflow": "reject-publish", "x-expires": 60_000}
    with app.connection_for_write() as connection:
        full = Queue(name, Exchange(name, type="direct"), name, queue_arguments=limits)
        full.bind(connection.default_channel).declare()
    there = {"exchange": name, "routing_key": name, "retry": False}
    assert index.apply_async((8,), **there).id
    for _ in range(2):
        with pytest.raises(OperationalError) as refused:
            index.apply_async((9,), **there)
        assert isinstance(refused.value.__cause__, MessageNacked)
        with pytest.raises(ChannelError, match="NO_ROUTE"):
            index.apply_async((9,), **{**there, "routing_key": "nowhere"})
    assert index.delay(9).id == index.delay(9).id


@on(CLASSIC)
def test_a_publish_that_the_broker_refused_is_in_the_way_of_no_later_one(app: Celery, vhost: Vhost) -> None:
    """The pool closes the connection by which a publish failed, and lends it again."""
    queue = app.amqp.queues[vhost.name("orders")]
    with app.connection_for_write() as connection:
        queue.bind(connection.default_channel).declare()

    def publish(key: str) -> None:
        with publisher(app) as certain:
            app.send_task("any", exchange=queue.exchange.name, routing_key=key, **certain)

    for _ in range(2):
        with pytest.raises(ChannelError, match="NO_ROUTE"):
            publish("nowhere")
    publish(queue.routing_key)
    assert vhost.left("orders") == {"orders": 1}


@pytest.mark.nightly
@on(CLASSIC)
def test_a_call_does_not_wait_for_ever_for_a_broker_that_is_short_of_memory(
    app: Celery, own_server: RabbitServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unique, "ANSWER_TIMEOUT", 1.0)
    index = app.module.index
    index.delay(7)
    own_server.ctl("set_vm_memory_high_watermark", "0.00001")
    try:
        wait_until(lambda: own_server.evaluate("rabbit_alarm:get_alarms()") != "[]", 10)
        began = monotonic()
        with pytest.raises(OperationalError, match="timed out"):
            index.apply_async((8,), retry=False)
        with pytest.raises(OperationalError, match="timed out"):
            index.apply_async((9,), retry=False, timeout=0.5)
        assert monotonic() < began + 10
    finally:
        own_server.ctl("set_vm_memory_high_watermark", "absolute", "1GB")
    wait_until(lambda: own_server.evaluate("rabbit_alarm:get_alarms()") == "[]", 10)
    assert index.apply_async((10,)).id == index.delay(10).id


@pytest.mark.nightly
@on(CLASSIC, QUORUM)
def test_a_copy_shows_how_often_its_message_was_dead_lettered(
    app: Celery, start: Callable[..., WorkerNode], vhost: Vhost, store_url: str
) -> None:
    """As a body reads it that gives up after so many rejections; Celery leaves it out of what it publishes again."""
    lease = RedisStore.from_url(store_url).acquire(Claim(f"idem:{RABBIT}.charge::ORD-1", "another's", 600, 600))
    assert isinstance(lease, Lease)
    orders, delay = vhost.name("orders"), vhost.name("delay")
    arguments: dict[str, Any] = {
        "x-message-ttl": 1,
        "x-dead-letter-exchange": orders,
        "x-dead-letter-routing-key": orders,
        "x-expires": 60_000,
    }
    with app.connection_for_write() as connection:
        waiting = Queue(delay, Exchange(delay, type="direct"), delay, queue_arguments=arguments)
        waiting.bind(connection.default_channel).declare()
    node = start()
    app.module.charge.apply_async(("ORD-1",), exchange=delay, routing_key=delay)
    logged(node, "copy=1")
    node.kill()
    found: list[dict[str, Any]] = []
    with app.connection_for_read() as connection:
        queue = app.amqp.queues[orders](connection.default_channel)

        def came() -> bool:
            if (message := queue.get()) is not None:  # perhaps the first one, which was not acked yet
                found.append(message.headers)
            return any("idempotency" in headers for headers in found)

        wait_until(came, 30, "the copy to come back")
    deaths = [(death["queue"], death["reason"], death["count"]) for death in found[-1]["x-death"]]
    assert deaths == [(delay, "expired", 1)]


@pytest.mark.nightly
@on(NATIVE)
def test_copies_go_back_to_the_queue_that_the_message_came_from(
    app: Celery,
    start: Callable[..., WorkerNode],
    left: Callable[..., dict[str, int]],
    vhost: Vhost,
    journal: Journal,
    gates: Gates,
) -> None:
    """Celery's native delayed delivery would send them to the default queue, where nobody may be listening."""
    gate = gates.close("before ORD-1")
    node = start("mails")
    options = {"queue": vhost.name("mails")}
    results = [app.module.charge.apply_async(("ORD-1",), **options)]
    gate.reached()
    results.append(app.module.charge.apply_async(("ORD-1",), **options))
    logged(node, "copy=2")
    gate.open()
    assert [result.get(timeout=30) for result in results] == ["charged ORD-1"] * 2
    assert left(node) == {}
    assert journal.count("charged") == 1


@pytest.mark.nightly
def test_a_message_whose_copy_the_broker_refuses_is_not_acked(
    app: Celery,
    start: Callable[..., WorkerNode],
    left: Callable[..., dict[str, int]],
    own_server: RabbitServer,
    vhost: Vhost,
    journal: Journal,
    gates: Gates,
) -> None:
    """A publish that asks for no confirmation never hears of it, and the operation would be lost."""
    gate = gates.close("before ORD-1")
    node = start(env={"LEASE_TTL": "15"})  # no copy waits longer than that: one comes soon after the queue is full
    first = app.module.charge.delay("ORD-1")
    gate.reached()
    second = app.module.charge.delay("ORD-1")
    logged(node, "copy=1")
    own_server.fill_up(vhost)
    logged(node, "cannot be published again")
    gate.open()
    assert [result.get(timeout=30) for result in (first, second)] == ["charged ORD-1"] * 2
    assert left(node) == {}
    assert journal.count("charged") == 1


@pytest.mark.nightly
@on(CLASSIC)
def test_a_message_whose_retry_the_broker_refuses_goes_back_to_its_queue(
    app: Celery,
    start: Callable[..., WorkerNode],
    left: Callable[..., dict[str, int]],
    own_server: RabbitServer,
    vhost: Vhost,
    journal: Journal,
    gates: Gates,
) -> None:
    """Celery drops it, where the retry is confirmed at all."""
    gate = gates.close("retry ORD-1")
    node = start(env={"CONFIRM_PUBLISH": "1"})
    result = app.module.flaky.delay("ORD-1", 1, 0.1)
    gate.reached()
    own_server.fill_up(vhost)
    gate.open()
    logged(node, "took no retry of this message (MessageNacked")
    own_server.empty(vhost)
    assert result.get(timeout=30) == "ORD-1 after 1"
    assert left(node) == {}
    assert [entry.fields["retries"] for entry in journal.entries("tried")][-1:] == [1]
    assert journal.count("charged") == 1


@on(CLASSIC, NATIVE)
def test_after_the_kill_of_a_child_its_message_runs_once_more(
    app: Celery,
    start: Callable[..., WorkerNode],
    left: Callable[..., dict[str, int]],
    record: Callable[..., Record],
    journal: Journal,
    gates: Gates,
) -> None:
    gate = gates.close("before ORD-1")
    node = start(env={"LEASE_TTL": "600"})
    result = app.module.charge.delay("ORD-1")
    node.kill_child(gate.reached()[0])
    gate.reached(2, timeout=30)
    assert record("ORD-1").crashes == 1
    gate.open()
    assert result.get(timeout=30) == "charged ORD-1"
    assert left(node) == {}
    assert [entry.fields["redelivered"] for entry in journal.entries("started")] == [False, True]
    assert journal.count("charged") == 1


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("kind", "cancel"),
    [(CLASSIC, False), (NATIVE, False), (CLASSIC, True)],
    indirect=["kind"],
    ids=["goes on", "quorum, goes on", "is cancelled"],
)
def test_a_connection_that_is_closed_in_mid_task_costs_no_second_effect(
    app: Celery,
    start: Callable[..., WorkerNode],
    left: Callable[..., dict[str, int]],
    record: Callable[..., Record],
    own_server: RabbitServer,
    vhost: Vhost,
    journal: Journal,
    gates: Gates,
    cancel: bool,
) -> None:
    gate = gates.close("before ORD-1")
    node = start(env={"LEASE_TTL": "600", "CANCEL_ON_LOSS": str(int(cancel))})
    result = app.module.charge.delay("ORD-1")
    gate.reached()
    own_server.close_connections(vhost)
    if cancel:
        gate.reached(2, timeout=30)
    else:
        logged(node, "Deferred")
    gate.open()
    assert result.get(timeout=30) == "charged ORD-1"
    assert left(node) == {}
    assert journal.count("charged") == 1
    assert journal.count("started") == 1 + cancel
    assert (record("ORD-1").state, record("ORD-1").crashes) == (State.COMPLETED, 0)


@pytest.mark.nightly
@on(NATIVE)
@pytest.mark.parametrize("countdown", [1, 2, 3, 4])
def test_a_retry_with_a_countdown_goes_back_to_its_queue_and_runs(
    app: Celery,
    start: Callable[..., WorkerNode],
    left: Callable[..., dict[str, int]],
    record: Callable[..., Record],
    vhost: Vhost,
    journal: Journal,
    countdown: int,
) -> None:
    """RabbitMQ says of a delay of odd seconds, and of others, that it hands the message out by different exchanges."""
    node = start("mails")
    result = app.module.flaky.apply_async(("ORD-1", 2, countdown), queue=vhost.name("mails"))
    assert result.get(timeout=30) == "ORD-1 after 2"
    assert left(node) == {}
    assert [entry.fields["retries"] for entry in journal.entries("tried")] == [0, 1, 2]
    assert record("ORD-1", "flaky").state is State.COMPLETED


@pytest.mark.parametrize(
    ("kind", "requeue"),
    [(CLASSIC, True), (CLASSIC, False), (NATIVE, False)],
    indirect=["kind"],
    ids=["requeued", "dead-lettered", "dead-lettered from a quorum queue"],
)
def test_a_rejected_message_frees_its_key(
    app: Celery,
    start: Callable[..., WorkerNode],
    left: Callable[..., dict[str, int]],
    record: Callable[..., Record],
    journal: Journal,
    requeue: bool,
) -> None:
    node = start()
    result = app.module.picky.delay("ORD-1", requeue)
    if requeue:
        assert result.get(timeout=30) == "charged ORD-1"
        assert left(node) == {}
        assert (journal.count("tried"), journal.count("charged")) == (2, 1)
        assert record("ORD-1", "picky").state is State.COMPLETED
    else:
        wait_until(lambda: journal.count("tried") and record("ORD-1", "picky").state is State.RELEASED)
        assert left(node) == {"dead": 1}
        assert (journal.count("tried"), journal.count("charged")) == (1, 0)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("kind", "then"),
    [(CLASSIC, "the worker lives on"), (CLASSIC, "the worker ends"), (QUORUM, "the worker connects again")],
    indirect=["kind"],
)
def test_a_task_that_outlives_the_consumer_timeout_takes_effect_once(
    app: Celery,
    start: Callable[..., WorkerNode],
    left: Callable[..., dict[str, int]],
    record: Callable[..., Record],
    own_server: RabbitServer,
    vhost: Vhost,
    journal: Journal,
    gates: Gates,
    then: str,
) -> None:
    """RabbitMQ closes the channel, which Celery survives only with `broker_channel_error_retry`.

    From 4.3 on it has no such timeout for classic queues, and cancels the consumers of others, which Celery survives.
    """
    survives = then != "the worker ends"
    if (own_server.version >= (4, 3)) != (then == "the worker connects again"):
        pytest.skip(f"RabbitMQ {own_server.version} ends what takes too long in another way")
    gate = gates.close("before ORD-1")
    with own_server.consumer_timeout(1.0):  # of channels that are opened now
        node = start(env={"CHANNEL_ERROR_RETRY": str(int(then == "the worker lives on"))})
    result = app.module.charge.delay("ORD-1")
    gate.reached()
    logged(node, "Deferred" if survives else "Unrecoverable error")
    gate.open()
    assert result.get(timeout=30) == "charged ORD-1"
    if not survives:
        node.kill()  # it ends by itself, in Celery's own time: once in hundreds of runs that took more than a minute
        assert left() == {"orders": 1}
        node = start()
        logged(node, "Replayed")
    assert left(node) == {}
    assert (journal.count("started"), journal.count("charged")) == (1, 1)
    assert (record("ORD-1").state, record("ORD-1").crashes) == (State.COMPLETED, 0)


@pytest.mark.nightly
def test_a_copy_that_was_lost_on_its_way_is_published_again(
    app: Celery,
    start: Callable[..., WorkerNode],
    left: Callable[..., dict[str, int]],
    own_server: RabbitServer,
    proxied: Callable[[int], Proxy],
    vhost: Vhost,
    journal: Journal,
    gates: Gates,
) -> None:
    gate = gates.close("before ORD-1")
    proxy = proxied(own_server.port)
    node = start(env={"BROKER_WRITE_URL": vhost.url.replace(f":{own_server.port}/", f":{proxy.port}/")})
    first = app.module.charge.delay("ORD-1")
    gate.reached()
    second = app.module.charge.delay("ORD-1")
    logged(node, "copy=1")
    proxy.drop()
    wait_until(lambda: proxy.dropped, 30, "the next copy to be lost")
    proxy.heal()
    proxy.reset()
    logged(node, "copy=2")
    gate.open()
    assert [result.get(timeout=30) for result in (first, second)] == ["charged ORD-1"] * 2
    assert left(node) == {}
    assert journal.count("charged") == 1
