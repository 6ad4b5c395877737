"""What a living worker holds is delivered once, however short the visibility timeout; what a dead one held, again.

The test itself is the idle worker that looks, all the time, for what has timed out. It does so with kombu's own method,
since kombu before 5.7 looks every 100 s, whatever it is told.
"""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock
from urllib.parse import urlsplit

import pytest
import redis
from celery import Celery, signals
from celery.worker import state
from kombu import Connection, Queue

from celery_idempotent.celery.visibility import BETWEEN_BATCHES, LONGEST_MUTEX, UnackedMessages, VisibilityStep, copied
from celery_idempotent.errors import ConfigurationError
from tests.support import processes
from tests.support.celery.apps import messages
from tests.support.celery.fixtures import StartWorker
from tests.support.celery.gates import Gates
from tests.support.celery.journal import Journal
from tests.support.celery.nodes import STOP_SECONDS, WorkerNode
from tests.support.proxy import Proxy
from tests.support.servers import RedisServer, free_port, open_client, redis_binary
from tests.support.waiting import wait_until

HELD = "tests.support.celery.held"
#: Seconds. A worker would have to stand still for two thirds of it to lose what it holds.
TIMEOUT = 3.0
#: How long a message is held in these tests.
LONG = 1.7 * TIMEOUT


class Sweeper:
    """One more consumer of the broker, that holds nothing and puts back what timed out."""

    def __init__(self, app: Celery) -> None:
        self.connection = app.connection_for_write()
        self.channel = self.connection.default_channel

    def sweep(self) -> None:
        self.channel.qos.restore_visible(num=None, interval=1)

    def until(self, condition: Callable[[], object], what: str, timeout: float = 30.0) -> None:
        """Wait for what can be seen, and sweep meanwhile."""

        def swept() -> object:
            self.sweep()
            return condition()

        wait_until(swept, timeout, what)

    def hold_on(self, seconds: float = LONG) -> None:
        """Sweep for so long."""
        end = time.monotonic() + seconds
        self.until(lambda: time.monotonic() > end, f"{seconds} s to pass", timeout=seconds + 30)

    def noted(self) -> dict[str, float]:
        """Return when each message that is held was last seen to be."""
        with self.channel.conn_or_acquire() as client:
            rows = client.zrange(self.channel.unacked_index_key, 0, -1, withscores=True)
        return {tag.decode(): when for tag, when in rows}


@pytest.fixture
def app(client_app: Callable[..., Celery]) -> Celery:
    return client_app(HELD, VISIBILITY_TIMEOUT=str(TIMEOUT))


@pytest.fixture
def sweeper(app: Celery) -> Iterator[Sweeper]:
    sweeper = Sweeper(app)
    yield sweeper
    sweeper.connection.close()


def deliveries(result: Any, *nodes: WorkerNode) -> int:
    """Return how often workers received a task."""
    return sum(node.logs().count(f"[{result.id}] received") for node in nodes)


def deferrals(result: Any, *nodes: WorkerNode) -> int:
    """Return how many copies of a task were published."""
    lines = [line for node in nodes for line in node.logs().splitlines()]
    return sum("Deferred" in line and result.id in line for line in lines)


@pytest.mark.parametrize(
    "refresh", [pytest.param(True, marks=pytest.mark.smoke, id="refreshed"), pytest.param(False, id="not refreshed")]
)
def test_what_a_worker_runs_prefetches_defers_or_keeps_for_its_eta_is_delivered_once(
    app: Celery, start_worker: StartWorker, sweeper: Sweeper, journal: Journal, gates: Gates, refresh: bool
) -> None:
    options = {"visibility_timeout": TIMEOUT, "env": {"VISIBILITY_REFRESH": str(int(refresh))}}
    node = start_worker(HELD, concurrency=2, prefetch=5, **options)
    module = app.module
    for name in ("running", "plain"):
        gates.close(name)
    running = module.guarded.delay("running")
    gates["running"].reached()
    deferred = module.guarded.delay("running")
    node.wait_for_log("Deferred")
    plain = module.plain.delay("plain")
    gates["plain"].reached()
    prefetched = module.guarded.delay("prefetched")
    later = module.plain.apply_async(("later",), countdown=2 * TIMEOUT)
    wait_until(lambda: deliveries(prefetched, node) and deliveries(later, node), message="both to be prefetched")
    idle = start_worker(HELD, concurrency=2, **options)  # that would run what is handed out again
    held = [running, plain, prefetched, later]
    if refresh:
        sweeper.hold_on()
        assert [deliveries(result, node, idle) for result in held] == [1, 1, 1, 1]
    else:
        again = "each to be delivered again"
        sweeper.until(lambda: all(deliveries(result, node, idle) > 1 for result in held), again)
    for name in ("running", "plain"):
        gates[name].open()
    assert [result.get(timeout=30) for result in (running, deferred)] == ["done running"] * 2
    assert [result.get(timeout=30) for result in held[1:]] == ["done plain", "done prefetched", "done later"]
    sweeper.until(lambda: messages(app.conf.broker_url) == 0, "all messages to be worked off", timeout=60)
    # A guarded task runs once with and without; the plain one has nothing but the refresh.
    assert [journal.count("started", name) for name in ("running", "prefetched")] == [1, 1]
    if refresh:
        assert [deliveries(result, node, idle) for result in held] == [1, 1, 1, 1]
        # Each copy that was published was delivered, once.
        assert deliveries(deferred, node, idle) == 1 + deferrals(deferred, node, idle)
        assert [journal.count("started", name) for name in ("plain", "later")] == [1, 1]
    else:
        assert journal.count("started", "plain") > 1


@pytest.mark.nightly
@pytest.mark.parametrize("pool", ["threads", "solo", "gevent", pytest.param("eventlet", marks=pytest.mark.nightly)])
def test_other_pools_keep_what_they_hold(
    app: Celery, start_worker: StartWorker, sweeper: Sweeper, gates: Gates, pool: str
) -> None:
    node = start_worker(HELD, pool=pool, concurrency=1, prefetch=3, visibility_timeout=TIMEOUT)
    later = app.module.plain.apply_async(("later",), countdown=LONG)
    wait_until(lambda: deliveries(later, node), message="the task to wait for its ETA")
    gate = gates.close("running")
    running = app.module.plain.delay("running")
    gate.reached()
    sweeper.hold_on(LONG - 1)
    assert len(sweeper.noted()) == messages(app.conf.broker_url) == 2  # and none in the queue
    gate.open()
    assert [result.get(timeout=30) for result in (running, later)] == ["done running", "done later"]
    wait_until(lambda: messages(app.conf.broker_url) == 0, message="all messages to be worked off")
    assert [deliveries(result, node) for result in (running, later)] == [1, 1]


@pytest.mark.nightly
@pytest.mark.parametrize("pool", ["threads", pytest.param("gevent", marks=pytest.mark.nightly)])
def test_what_a_pool_without_children_leaves_unanswered_times_out(
    app: Celery, start_worker: StartWorker, sweeper: Sweeper, journal: Journal, pool: str
) -> None:
    """As where the result backend is away when a task ends: Celery fails once more, and neither acks nor rejects."""
    start_worker(HELD, pool=pool, concurrency=1, visibility_timeout=1)
    app.module.failing.delay("ORD-1")
    sweeper.until(lambda: journal.count("ended", "ORD-1"), "the message to be delivered again")
    wait_until(lambda: messages(app.conf.broker_url) == 0, message="all messages to be worked off")
    assert journal.count("started", "ORD-1") == 2


@pytest.mark.nightly
def test_a_worker_that_waits_for_its_last_task_before_it_stops_keeps_it(
    app: Celery, start_worker: StartWorker, sweeper: Sweeper, gates: Gates
) -> None:
    node = start_worker(HELD, concurrency=1, visibility_timeout=TIMEOUT)
    gate = gates.close("running")
    running = app.module.plain.delay("running")
    gate.reached()
    node.kill(signal.SIGTERM)
    node.wait_for_log("Warm shutdown")
    sweeper.hold_on()
    assert node.running
    assert len(sweeper.noted()) == messages(app.conf.broker_url) == 1  # and none in the queue
    gate.open()
    assert running.get(timeout=20) == "done running"
    wait_until(lambda: not node.running, STOP_SECONDS, "the worker to end")
    assert messages(app.conf.broker_url) == 0


@pytest.mark.parametrize("pool", ["prefork", "solo"])
def test_what_a_dead_worker_held_is_delivered_again(
    app: Celery, start_worker: StartWorker, sweeper: Sweeper, journal: Journal, gates: Gates, pool: str
) -> None:
    options = {"concurrency": 1, "prefetch": 2, "visibility_timeout": TIMEOUT, "env": {"LEASE_TTL": "2"}}
    first = start_worker(HELD, pool=pool, **options)
    gate = gates.close("running")
    running = app.module.guarded.delay("running")
    gate.reached()
    prefetched = app.module.plain.delay("prefetched")
    if pool == "prefork":  # a busy solo worker takes no more
        wait_until(lambda: deliveries(prefetched, first), message="the task to be prefetched")
    published = sweeper.noted()
    refreshed = "the running task to be refreshed"
    wait_until(lambda: all(sweeper.noted()[tag] > when for tag, when in published.items()), message=refreshed)
    first.kill("SIGKILL")
    last = max(sweeper.noted().values())
    second = start_worker(HELD, **options)
    sweeper.until(lambda: deliveries(running, second), "the running task to be delivered again")
    assert time.time() > last + TIMEOUT
    gate.open()
    assert running.get(timeout=30) == "done running"
    sweeper.until(prefetched.ready, "the prefetched task to run")
    assert journal.count("started", "running") == 2


class Watched:
    """The commands of one database of a Redis server, with the server's time of each, from now on."""

    def __init__(self, monitor: Any, client: Any) -> None:
        self.monitor, self.client = monitor, client
        self.db = client.get_connection_kwargs()["db"]

    def commands(self) -> list[tuple[float, list[str]]]:
        """Return all up to this moment."""
        token = f"watched until {uuid.uuid4()}"
        self.client.echo(token)
        found: list[tuple[float, list[str]]] = []
        while (entry := self.monitor.next_command())["command"] != f"ECHO {token}":
            if entry["db"] == self.db:
                found.append((entry["time"], entry["command"].split(" ")))
        return found


@pytest.fixture
def watched(broker_url: str) -> Iterator[Watched]:
    with open_client(broker_url) as client, client.monitor() as monitor:
        yield Watched(monitor, client)


def late_looks(commands: list[tuple[float, list[str]]]) -> dict[str, int]:
    """Return for each message that was put back how many looks came between the moment it was overdue and that.

    A message is overdue once the visibility timeout has passed since it was last noted as held.
    """
    looks: list[float] = []
    noted: dict[str, float] = {}
    found: dict[str, int] = {}
    for when, (verb, *arguments) in commands:
        if arguments[:1] != ["unacked_index"]:
            continue
        if verb == "ZRANGE" and arguments[1:3] == ["0", "0"]:
            looks.append(when)
        elif verb == "ZADD":
            pairs = [each for each in arguments[1:] if each != "XX"]
            noted.update(zip(pairs[1::2], map(float, pairs[::2]), strict=True))
        elif verb == "ZREM" and when > (overdue := noted[arguments[1]] + TIMEOUT):
            found.setdefault(arguments[1], sum(overdue < look < when for look in looks))
    return found


@pytest.mark.nightly
@pytest.mark.parametrize("pool", ["gevent", pytest.param("eventlet", marks=pytest.mark.nightly), "prefork"])
def test_an_idle_worker_takes_over_what_a_dead_one_held_at_its_first_look_after_that_has_timed_out(
    app: Celery,
    watched: Watched,
    start_worker: StartWorker,
    journal: Journal,
    gates: Gates,
    pool: str,
) -> None:
    """By itself: kombu looks every 100 s at best, and never with gevent and eventlet.

    A worker looks again a second after each look, as `TestTheStep` shows. Here looks are counted, and not seconds,
    since a loaded machine may do anything late: by the server's clock, no look came after a message was overdue but the
    one that put it back. (Or none, if the worker was stopped between the command of the look before and its own clock.)
    """
    options = {"pool": pool, "visibility_timeout": TIMEOUT, "env": {"LEASE_TTL": "2"}}
    first = start_worker(HELD, concurrency=1, prefetch=2, **options)
    gate = gates.close("running")
    running = app.module.guarded.delay("running")
    gate.reached()
    prefetched = app.module.plain.delay("prefetched")
    wait_until(lambda: deliveries(prefetched, first), message="the task to be prefetched")
    idle = start_worker(HELD, concurrency=2, **options)
    first.kill("SIGKILL")
    # A worker that is killed in a look of its own leaves kombu's mutex behind, for as long as another test shows.
    watched.client.delete("unacked_mutex")
    gate.open()
    assert running.get(timeout=40) == "done running"
    assert prefetched.get(timeout=40) == "done prefetched"
    assert journal.count("started", "running") == 2
    assert deliveries(running, idle) >= 1
    looks = late_looks(watched.commands())
    assert len(looks) >= 2
    assert max(looks.values()) <= 1


@pytest.mark.nightly
def test_a_task_that_has_run_for_longer_than_its_max_lease_is_handed_to_others(
    app: Celery, start_worker: StartWorker, sweeper: Sweeper, journal: Journal, gates: Gates
) -> None:
    gates.close("bounded")
    node = start_worker(HELD, concurrency=2, visibility_timeout=TIMEOUT)
    result = app.module.bounded.delay("bounded")
    gates["bounded"].reached()
    sweeper.until(lambda: len(gates["bounded"].arrivals) == 2, "another delivery to take over")
    gates["bounded"].open()
    assert result.get(timeout=20) == "done bounded"
    assert deliveries(result, node) >= 2


def test_custom_names_of_the_brokers_keys_are_honoured(
    client_app: Callable[..., Celery], start_worker: StartWorker, gates: Gates, broker_url: str
) -> None:
    names = {"global_keyprefix": "shop:", "unacked_key": "waiting", "unacked_index_key": "waiting since"}
    env = {"TRANSPORT_OPTIONS": json.dumps(names), "VISIBILITY_TIMEOUT": str(TIMEOUT)}
    app = client_app(HELD, **env)
    node = start_worker(HELD, concurrency=1, env=env)
    gate = gates.close("running")
    running = app.module.guarded.delay("running")
    gate.reached()
    with open_client(broker_url) as client:
        [(tag, delivered)] = client.zrange("shop:waiting since", 0, -1, withscores=True)
        wait_until(lambda: client.zscore("shop:waiting since", tag) > delivered, message="the message to be refreshed")
        assert client.zcard("shop:waiting since") == 1
        assert not client.exists("waiting since", "unacked_index", "shop:unacked_index")
    gate.open()
    assert running.get(timeout=20) == "done running"
    assert deliveries(running, node) == 1


@pytest.mark.nightly
def test_a_refresh_that_fails_does_not_end_the_consumers_connection(
    app: Celery,
    start_worker: StartWorker,
    sweeper: Sweeper,
    gates: Gates,
    proxied: Callable[[int], Proxy],
    broker_url: str,
) -> None:
    proxy, path = behind(proxied, broker_url)
    node = start_worker(HELD, broker_url=path, concurrency=2, visibility_timeout=TIMEOUT)
    gate = gates.close("running")
    running = app.module.plain.delay("running")
    gate.reached()
    [tag] = sweeper.noted()
    proxy.swallow_reply(1000, matching=b"\r\nXX\r\n")
    node.wait_for_log("did not note", timeout=30)
    proxy.heal()
    assert app.module.plain.delay("other").get(timeout=30) == "done other"
    before = sweeper.noted()[tag]
    wait_until(lambda: sweeper.noted()[tag] > before, message="the message to be refreshed again")
    assert "Connection to broker lost" not in node.logs()
    gate.open()
    assert running.get(timeout=20) == "done running"
    assert deliveries(running, node) == 1


def behind(proxied: Callable[[int], Proxy], url: str) -> tuple[Proxy, str]:
    """Return a proxy before a Redis server, and the URL that leads through it."""
    parts = urlsplit(url)
    assert parts.port is not None
    proxy = proxied(parts.port)
    return proxy, proxy.url(int(parts.path.lstrip("/")))


@pytest.mark.nightly
def test_after_a_lost_connection_what_the_new_one_holds_is_refreshed(
    app: Celery,
    start_worker: StartWorker,
    sweeper: Sweeper,
    journal: Journal,
    gates: Gates,
    proxied: Callable[[int], Proxy],
    broker_url: str,
) -> None:
    proxy, path = behind(proxied, broker_url)
    node = start_worker(HELD, broker_url=path, concurrency=2, prefetch=4, visibility_timeout=TIMEOUT)
    gate = gates.close("running")
    running = app.module.guarded.delay("running")
    later = app.module.plain.apply_async(("later",), countdown=2 * TIMEOUT)
    gate.reached()
    wait_until(lambda: deliveries(later, node), message="the task to wait for its ETA")
    proxy.reset()
    # Celery puts back at once what the old connection held, and goes on with what runs.
    sweeper.until(lambda: deliveries(later, node) == 2, "what was held to be delivered on the new connection")
    sweeper.hold_on()
    assert deliveries(later, node) == 2
    gate.open()
    assert running.get(timeout=20) == "done running"
    assert later.get(timeout=20) == "done later"
    sweeper.until(lambda: messages(app.conf.broker_url) == 0, "all messages to be worked off")
    assert deliveries(later, node) == 2
    assert deliveries(running, node) == 2 + deferrals(running, node)
    assert [journal.count("started", name) for name in ("running", "later")] == [1, 1]


def test_a_broker_that_restarts_while_tasks_run_loses_none_and_gives_one_result(
    client_app: Callable[..., Celery],
    start_worker: StartWorker,
    own_redis: Callable[..., RedisServer],
    journal: Journal,
    gates: Gates,
) -> None:
    broker = own_redis(appendonly="yes", appendfsync="always")
    app = client_app(HELD, BROKER_URL=broker.url(), VISIBILITY_TIMEOUT=str(TIMEOUT))
    options = {"broker_url": broker.url(), "visibility_timeout": TIMEOUT, "env": {"LEASE_TTL": "2"}}
    node = start_worker(HELD, concurrency=2, prefetch=4, **options)
    gate = gates.close("running")
    running = app.module.guarded.delay("running")
    later = app.module.guarded.apply_async(("later",), countdown=1.5 * TIMEOUT)
    gate.reached()
    wait_until(lambda: deliveries(later, node), message="the task to wait for its ETA")
    broker.kill()
    node.wait_for_log("Connection to broker lost", timeout=60)
    broker.start()
    start_worker(HELD, concurrency=2, **options)  # Celery's main process may end with its broker
    sweeper = Sweeper(app)
    gate.open()
    for result, value in ((running, "done running"), (later, "done later")):
        sweeper.until(result.ready, f"{value} to be there", timeout=60)
        assert result.get(timeout=20) == value
    sweeper.until(lambda: messages(broker.url()) == 0, "all messages to be worked off", timeout=60)
    sweeper.connection.close()
    assert [journal.count("ended", name) for name in ("running", "later")] == [1, 1]


@pytest.fixture
def connect(redis_url: str) -> Iterator[Callable[[], Any]]:
    connections: list[Connection] = []

    def connect(url: str = redis_url, **options: object) -> Any:
        connections.append(Connection(url, transport_options={"visibility_timeout": TIMEOUT, **options}))
        return connections[-1].default_channel

    yield connect
    for connection in connections:
        connection.close()


@pytest.fixture
def queue(connect: Callable[[], Any]) -> Queue:
    queue = Queue("celery", channel=connect())
    queue.declare()
    with queue.channel.connection.client.Producer() as producer:
        producer.publish("work", routing_key="celery")
    return queue


class TestTheTagsOfAChannel:
    """On kombu's channels, without a worker."""

    @pytest.fixture
    def sentinel_of(self, tmp_path: Path) -> Iterator[Callable[[int], int]]:
        """A function that starts a sentinel before a server, and returns its port."""
        started = []

        def start(master: int) -> int:
            port, config = free_port(), tmp_path / "sentinel.conf"
            config.write_text(f"port {port}\nbind 127.0.0.1\nsentinel monitor shop 127.0.0.1 {master} 1\n")
            started.append(processes.spawn([redis_binary(), str(config), "--sentinel"], stdout=subprocess.DEVNULL))
            wait_until(lambda: knows_master(port), message="the sentinel to know its master")
            return port

        def knows_master(port: int) -> bool:
            with open_client(f"redis://127.0.0.1:{port}") as client:
                try:
                    return bool(client.sentinel_get_master_addr_by_name("shop"))
                except redis.RedisError:
                    return False

        yield start
        for process in started:
            processes.end(process)

    def test_what_this_channel_has_put_back_is_others_and_is_left_alone(
        self, connect: Callable[[], Any], queue: Queue, redis_client: redis.Redis
    ) -> None:
        first, second = connect(), connect()
        message = queue.bind(first).get()
        assert UnackedMessages(first).tags() == [message.delivery_tag]
        message.reject(requeue=True)
        assert queue.bind(second).get().delivery_tag == message.delivery_tag
        redis_client.zadd("unacked_index", {message.delivery_tag: 1})
        UnackedMessages(first).refresh()
        assert redis_client.zscore("unacked_index", message.delivery_tag) == 1
        UnackedMessages(second).refresh()
        assert redis_client.zscore("unacked_index", message.delivery_tag) == pytest.approx(time.time(), abs=60)

    def test_what_a_sweep_has_put_back_does_not_come_into_being_again(
        self, connect: Callable[[], Any], queue: Queue, redis_client: redis.Redis
    ) -> None:
        channel = connect()
        tag = queue.bind(channel).get().delivery_tag
        redis_client.zadd("unacked_index", {tag: 1})
        connect().qos.restore_visible(num=None, interval=1)
        assert UnackedMessages(channel).tags() == [tag]
        UnackedMessages(channel).refresh()
        assert redis_client.zscore("unacked_index", tag) is None
        assert redis_client.llen("celery") == 1

    @pytest.mark.parametrize("answer", [lambda message: message.ack(), lambda message: message.reject(requeue=True)])
    def test_what_it_could_not_answer_times_out_until_it_is_delivered_again(
        self,
        connect: Callable[..., Any],
        queue: Queue,
        redis_client: redis.Redis,
        monkeypatch: pytest.MonkeyPatch,
        answer: Callable[[Any], None],
    ) -> None:
        channel = connect()
        message = queue.bind(channel).get()
        tag, pool = message.delivery_tag, channel.pool
        held = UnackedMessages(channel)
        with monkeypatch.context() as others:  # they have all of its connections
            others.setattr(pool, "_available_connections", [])
            others.setattr(pool, "max_connections", 0)
            with pytest.raises(redis.ConnectionError):
                answer(message)
        assert held.tags() == UnackedMessages(channel).tags() == []
        connect().qos.restore_by_tag(tag)
        again = queue.bind(channel).get()
        assert held.tags() == [again.delivery_tag] == [tag]
        answer(again)
        assert held.tags() == []
        assert redis_client.zcard("unacked_index") == 0

    @pytest.mark.parametrize("refreshed", [True, False])
    def test_what_celery_fails_to_end_times_out_until_it_is_answered(
        self, connect: Callable[..., Any], queue: Queue, refreshed: bool
    ) -> None:
        channel = connect()
        message, other = queue.bind(channel).get(), Mock(_request_dict={})
        held = UnackedMessages(channel) if refreshed else None
        delivery = Mock(_request_dict={}, message=message)
        state.active_requests.update([delivery, other])
        signals.task_internal_error.send(sender=None, request=delivery._request_dict)
        held = held or UnackedMessages(channel)
        assert held.tags() == ([] if refreshed else [message.delivery_tag])
        message.ack()
        assert held.tags() == []
        assert not held._unanswered

    @pytest.mark.smoke
    @pytest.mark.parametrize("prefix", ["", "shop:"])
    def test_what_is_overdue_is_put_back_and_what_is_not_is_left_alone(
        self, connect: Callable[..., Any], redis_client: redis.Redis, prefix: str
    ) -> None:
        channel, dead = (connect(global_keyprefix=prefix) for _ in range(2))
        queue = Queue("celery", channel=dead)
        queue.declare()
        channel._active_queues.append("celery")
        with dead.connection.client.Producer() as producer:
            producer.publish("work", routing_key="celery")
        tag = queue.get().delivery_tag
        held = UnackedMessages(channel)
        held.restore()
        assert redis_client.zcard(f"{prefix}unacked_index") == 1
        redis_client.zadd(f"{prefix}unacked_index", {tag: time.time() - TIMEOUT - 1})
        channel._active_queues.clear()
        held.restore()
        assert redis_client.zcard(f"{prefix}unacked_index") == 1  # by what consumes nothing
        channel._active_queues.append("celery")
        held.restore()
        assert redis_client.zcard(f"{prefix}unacked_index") == 0
        assert redis_client.llen(f"{prefix}celery") == 1

    @pytest.mark.nightly
    def test_a_worker_that_is_killed_while_it_puts_back_holds_others_up_for_seconds(
        self, connect: Callable[..., Any], queue: Queue, redis_client: redis.Redis, redis_url: str
    ) -> None:
        redis_client.zadd("unacked_index", {queue.get().delivery_tag: 1})
        code = (
            "import os, signal\n"
            "from kombu import Connection\n"
            "from celery_idempotent.celery import visibility\n"
            "visibility.LONGEST_MUTEX = 2.0\n"
            f"options = {{'visibility_timeout': {TIMEOUT}}}\n"
            f"channel = Connection({redis_url!r}, transport_options=options).default_channel\n"
            "channel._active_queues.append('celery')\n"
            "channel.qos.restore_by_tag = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
            "visibility.UnackedMessages(channel).restore()\n"
        )
        assert subprocess.run([sys.executable, "-c", code]).returncode == -signal.SIGKILL
        assert 0 < redis_client.pttl("unacked_mutex") <= 2_000
        channel = connect()
        channel._active_queues.append("celery")
        held = UnackedMessages(channel)
        wait_until(lambda: held.restore() or redis_client.llen("celery") == 1)
        assert channel.qos.unacked_mutex_expire == LONGEST_MUTEX
        configured = connect(unacked_mutex_expire=5)
        UnackedMessages(configured)
        assert configured.qos.unacked_mutex_expire == 5

    def test_a_look_at_nothing_is_one_command_and_takes_no_mutex(
        self, connect: Callable[..., Any], queue: Queue, redis_client: redis.Redis
    ) -> None:
        channel = connect()
        queue.bind(channel).get()
        channel._active_queues.append("celery")
        UnackedMessages(channel).restore()
        before = redis_client.info("commandstats")
        UnackedMessages(channel).restore()
        after = redis_client.info("commandstats")
        rest = {"cmdstat_info"}
        calls = {name: after[name]["calls"] - before.get(name, {"calls": 0})["calls"] for name in after.keys() - rest}
        assert {name: count for name, count in calls.items() if count} == {"cmdstat_zrange": 1}

    def test_one_client_sends_what_a_channel_notes_acks_and_puts_back(
        self, connect: Callable[..., Any], queue: Queue, redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        channel = connect()
        made: list[Any] = []
        kind = channel.Client
        monkeypatch.setattr(channel, "Client", lambda **options: made.append(kind(**options)) or made[-1])
        for _ in range(2):  # as where its worker stops
            UnackedMessages(channel)
        message = queue.bind(channel).get()
        message.reject(requeue=True)
        queue.bind(channel).get().ack()
        assert len(made) == 1
        channel._disconnect_pools()  # as kombu does where a connection is lost: its pool is another one
        with channel.connection.client.Producer() as producer:
            producer.publish("work", routing_key="celery")
        queue.bind(channel).get().ack()
        assert [client.connection_pool is channel.pool for client in made] == [False, True]
        assert redis_client.zcard("unacked_index") == redis_client.llen("celery") == 0
        assert channel._create_client(asynchronous=True).connection_pool is channel.async_pool

    def test_many_are_refreshed_in_batches(
        self, connect: Callable[[], Any], queue: Queue, redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("celery_idempotent.celery.visibility.BATCH", 2)
        channel = connect()
        with queue.channel.connection.client.Producer() as producer:
            for _ in range(4):
                producer.publish("work", routing_key="celery")
        tags = [queue.bind(channel).get().delivery_tag for _ in range(5)]
        redis_client.zadd("unacked_index", dict.fromkeys(tags, 1.0))
        UnackedMessages(channel).refresh()
        assert min(redis_client.zmscore("unacked_index", tags)) > 1

    def test_transports_without_a_visibility_timeout_are_left_alone(self, connect: Callable[..., Any]) -> None:
        assert UnackedMessages.of(connect("memory://")) is None
        assert UnackedMessages.of(connect(ack_emulation=False)) is None
        assert UnackedMessages.of(object()) is None

    def test_a_broker_behind_sentinels_is_redis_too(
        self, connect: Callable[..., Any], own_redis: Callable[..., RedisServer], sentinel_of: Callable[[int], int]
    ) -> None:
        master = own_redis()
        channel = connect(f"sentinel://127.0.0.1:{sentinel_of(master.port)}/0", master_name="shop")
        queue = Queue("celery", channel=channel)
        queue.declare()
        with channel.connection.client.Producer() as producer:
            producer.publish("work", routing_key="celery")
        message = queue.get()
        held = UnackedMessages.of(channel)
        assert held is not None
        with master.client() as client:
            client.zadd("unacked_index", {message.delivery_tag: 1})
            held.refresh()
            assert client.zscore("unacked_index", message.delivery_tag) > 1
        message.ack()

    def test_the_interval_is_a_third_of_the_timeout_and_at_most_a_minute(self, connect: Callable[..., Any]) -> None:
        assert [UnackedMessages(connect(visibility_timeout=timeout)).interval for timeout in (30, 3600)] == [10, 60]

    def test_an_error_is_logged_once_until_it_is_over(
        self, own_redis: Callable[..., RedisServer], connect: Callable[..., Any], caplog: pytest.LogCaptureFixture
    ) -> None:
        server = own_redis()
        channel = connect(server.url())
        queue = Queue("celery", channel=channel)
        queue.declare()
        with channel.connection.client.Producer() as producer:
            producer.publish("work", routing_key="celery")
        message = queue.get()
        channel._active_queues.append("celery")
        held = UnackedMessages(channel)

        def fail() -> int:
            with server.client() as client:
                client.delete("unacked_index")
                client.set("unacked_index", "no sorted set")
            for _ in range(2):
                held.refresh()
                held.restore()
            with server.client() as client:
                client.delete("unacked_index")
            assert "WRONGTYPE" in caplog.text  # which the repr of redis-py's own errors lacks since 8.0
            assert caplog.text.count("was not searched") == caplog.text.count("did not note")
            return caplog.text.count("did not note")

        with caplog.at_level(logging.WARNING, "celery_idempotent"):
            assert fail() == 1
            held.refresh()
            held.restore()
            assert fail() == 2
        message.ack()

    def test_a_channel_that_a_shutdown_closes_meanwhile_is_no_error(
        self, connect: Callable[..., Any], queue: Queue, caplog: pytest.LogCaptureFixture
    ) -> None:
        for work in (UnackedMessages.refresh, UnackedMessages.restore):
            channel = connect()
            queue.bind(channel).get()
            channel._active_queues.append("celery")
            held = UnackedMessages(channel)

            def closing(channel: Any = channel) -> None:
                del channel.conn_or_acquire
                channel.close()
                raise redis.ConnectionError("Connection closed")

            channel.conn_or_acquire = closing
            work(held)
            assert channel.closed
        assert not caplog.records


class TestTheStep:
    """With a timer that the test turns, and kombu's channels."""

    @pytest.fixture
    def timers(self, connect: Callable[..., Any], queue: Queue) -> Iterator[list[tuple[float, Callable[[], None]]]]:
        """What the step has asked its timer for, on a channel that consumes: (seconds, callback)."""
        asked: list[tuple[float, Callable[[], None]]] = []
        channel = connect(visibility_timeout=30)
        channel._active_queues.append("celery")
        timer = SimpleNamespace(call_after=lambda seconds, callback: asked.append((seconds, callback)))
        consumer = SimpleNamespace(timer=timer, pool=None, task_consumer=SimpleNamespace(channel=channel))
        step = VisibilityStep(consumer)
        step.start(consumer)
        yield asked
        step.shutdown(consumer)

    def test_it_looks_a_second_after_it_has_begun_and_after_each_look_also_one_that_failed(
        self, connect: Callable[..., Any], queue: Queue, redis_client: redis.Redis, timers: list[Any]
    ) -> None:
        """So that with a second for the delivery a message runs within two seconds of when it was overdue."""
        tag = queue.bind(connect()).get().delivery_tag
        for overdue in (False, None, True):
            redis_client.delete("unacked_index")
            if overdue is None:
                redis_client.set("unacked_index", "no sorted set")
            else:
                redis_client.zadd("unacked_index", {tag: time.time() - (60 if overdue else 0)})
            [look] = [callback for seconds, callback in timers if seconds == 1.0]
            timers.clear()
            look()
            assert redis_client.llen("celery") == (1 if overdue else 0)
        assert [seconds for seconds, _ in timers] == [1.0]

    def test_it_leaves_the_loop_to_others_between_two_batches(
        self,
        connect: Callable[..., Any],
        queue: Queue,
        redis_client: redis.Redis,
        timers: list[Any],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        tags = [f"tag-{number}" for number in range(600)]
        redis_client.zadd("unacked_index", dict.fromkeys(tags, 1))
        monkeypatch.setattr(UnackedMessages, "tags", lambda held: tags)
        [refresh] = [callback for seconds, callback in timers if seconds == 10.0]
        refreshed = []
        for pause in (BETWEEN_BATCHES, BETWEEN_BATCHES, 10.0):
            timers.clear()
            refresh()
            refreshed.append(redis_client.zcount("unacked_index", 2, "inf"))
            [(seconds, refresh)] = timers
            assert seconds == pause
        assert refreshed == [250, 500, 600]

    def test_it_refreshes_each_third_of_the_timeout(self, timers: list[Any]) -> None:
        [refresh] = [callback for seconds, callback in timers if seconds == 10.0]
        timers.clear()
        refresh()
        assert [seconds for seconds, _ in timers] == [10.0]


def test_tags_are_copied_although_another_thread_adds_to_them() -> None:
    tags: dict[int, None] = {}

    class Growing:
        def __iter__(self) -> Iterator[int]:
            for tag in tags:
                if len(tags) < 3:
                    tags[len(tags)] = None  # as if another thread did
                yield tag

    tags[0] = None
    assert copied(Growing()) == [0, 1, 2]


@pytest.mark.parametrize(("setting", "included"), [(None, True), (True, True), (False, False), (0, False)])
def test_the_refresh_can_be_switched_off(app: Celery, setting: object, included: bool) -> None:
    app.conf.idempotency_visibility_refresh = setting
    assert VisibilityStep.include_if(SimpleNamespace(), SimpleNamespace(app=app)) is included


def test_a_setting_that_is_no_switch_is_refused(app: Celery) -> None:
    app.conf.idempotency_visibility_refresh = "false"
    with pytest.raises(ConfigurationError, match=r"True or False, got 'false'\. Write False"):
        VisibilityStep.include_if(SimpleNamespace(), SimpleNamespace(app=app))


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_a_timeout_of_5_s_a_task_of_30_s_and_two_workers_are_one_delivery_and_one_run(
    client_app: Callable[..., Celery], start_worker: StartWorker, journal: Journal, gates: Gates
) -> None:
    """The workers sweep by themselves, which with kombu before 5.7 takes up to 100 s."""
    app = client_app(HELD, VISIBILITY_TIMEOUT="5")
    options = {"concurrency": 1, "visibility_timeout": 5, "env": {"LEASE_TTL": "5"}}
    nodes = [start_worker(HELD, **options) for _ in range(2)]
    gate = gates.close("long")
    result = app.module.guarded.delay("long")
    gate.reached()
    end = time.monotonic() + 30
    wait_until(lambda: time.monotonic() > end, 40, "30 s to pass")
    gate.open()
    assert result.get(timeout=20) == "done long"
    assert (deliveries(result, *nodes), journal.count("started", "long")) == (1, 1)

    gate = gates.close("killed")
    result = app.module.guarded.delay("killed")
    gate.reached()
    [holder] = [node for node in nodes if deliveries(result, node)]
    [heir] = [node for node in nodes if node is not holder]
    holder.kill("SIGKILL")
    killed = time.monotonic()
    wait_until(lambda: deliveries(result, heir), 200, "the task to be delivered again")
    delivered = time.monotonic() - killed
    gate.reached(2, timeout=30)
    print(f"\ndelivered again {delivered:.1f} s after the kill, run {time.monotonic() - killed:.1f} s after it")
    gate.open()
    assert result.get(timeout=20) == "done killed"
    assert journal.count("ended", "killed") == 1
