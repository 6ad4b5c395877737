"""Every pool: what works in all of them, and what each does in its own way. docs/guides/pools.md says it to users."""

from __future__ import annotations

import json
import signal
from asyncio import CancelledError
from collections.abc import Callable, Iterator
from typing import Any

import celery
import pytest
from celery import Celery, Task
from celery.exceptions import WorkerLostError

from celery_idempotent.core.results import Codec
from celery_idempotent.stores import Claim, Lease, Outcome, State
from celery_idempotent.stores.redis import RedisStore
from tests.support.celery.apps import messages, wait_for_commands
from tests.support.celery.fixtures import StartWorker
from tests.support.celery.gates import Gates
from tests.support.celery.journal import Journal
from tests.support.celery.nodes import WorkerNode
from tests.support.proxy import Proxy
from tests.support.servers import RedisServer, open_client
from tests.support.waiting import wait_until

POOLED = "tests.support.celery.pooled"
POOLS = ["prefork", "threads", "gevent", "eventlet", "solo"]
GREEN = ["gevent", "eventlet"]
#: Pools that do not end a body at any limit.
UNLIMITED = ["threads", "eventlet", "solo"]
#: Pools that can kill a greenlet; that of gevent has learnt it in Celery 5.5.
KILLING = GREEN if celery.VERSION >= (5, 5) else ["eventlet"]
#: Pools that start what waits for a slot when they grow.
GROWING = ["prefork", *GREEN] if celery.VERSION >= (5, 7) else ["prefork"]
#: Pools whose bodies end with a cold shutdown, and those of them that free the key before.
CUT_OFF = ["prefork", *GREEN]
FREEING = ["prefork", *KILLING] if celery.VERSION >= (5, 5) else ["prefork"]


def by_use(pools: list[str]) -> list[Any]:
    """Return the pools as cases; eventlet, which few use and which behaves as gevent does, is `nightly`."""
    return [pytest.param(pool, marks=pytest.mark.nightly) if pool == "eventlet" else pool for pool in pools]


@pytest.fixture
def app(client_app: Callable[..., Celery]) -> Celery:
    return client_app(POOLED)


@pytest.fixture
def store(store_url: str) -> Iterator[RedisStore]:
    store = RedisStore.from_url(store_url)
    yield store
    store.close()


@pytest.fixture
def start(start_worker: StartWorker) -> Callable[..., WorkerNode]:
    def start(pool: str, **options: Any) -> WorkerNode:
        options.setdefault("concurrency", 1 if pool == "solo" else 2)
        return start_worker(POOLED, pool=pool, **options)

    return start


def key(order_id: str) -> str:
    return f"idem:{POOLED}.charge::{order_id}"


def state(store: RedisStore, order_id: str) -> State | None:
    record = store.get(key(order_id))
    return record.state if record else None


def reason(store: RedisStore, order_id: str) -> str:
    record = store.get(key(order_id))
    return record.reason if record else ""


def lease_end(store: RedisStore, order_id: str) -> float:
    return float(store._client.hget(key(order_id), "lease_end")) / 1e6


def shut_down(node: WorkerNode, number: int) -> None:
    """Signal a worker, and wait until it has heard."""
    assert node.container.process is not None
    node.container.process.send_signal(number)
    said = ("Warm shutdown", "Cold shutdown", "Ctrl+C again")
    wait_until(lambda: any(words in node.logs() for words in said), 30, "the worker to shut down")


@pytest.mark.parametrize("pool", POOLS)
def test_a_task_runs_once_fails_retries_and_ends_before_its_worker(
    app: Celery, start: Callable[..., WorkerNode], journal: Journal, gates: Gates, pool: str
) -> None:
    node, charge = start(pool), app.module.charge
    assert [charge.delay("ORD-1").get(timeout=20) for _ in range(2)] == ["charged ORD-1"] * 2
    with pytest.raises(ValueError, match="no ORD-2"):
        charge.apply_async(("ORD-2", "raise"), idempotency_key="2").get(timeout=20)
    assert charge.apply_async(("ORD-2",), idempotency_key="2").get(timeout=20) == "charged ORD-2"
    assert charge.delay("ORD-3", "retry").get(timeout=20) == "charged ORD-3"
    assert [entry.fields["retries"] for entry in journal.entries("started", "ORD-3")] == [0, 1]

    gate = gates.close("gate ORD-4")
    last = charge.delay("ORD-4")
    gate.reached()
    shut_down(node, signal.SIGTERM)
    gate.open()
    assert last.get(timeout=20) == "charged ORD-4"
    assert node.wait() == 0
    # Greenlets that end during the shutdown are too late to ack with Celery 5.4, and once in some hundred stops the
    # main process of a busy machine does not read the last result of its child: then the next worker replays.
    if pool in ("prefork", *GREEN) and messages(app.conf.broker_url):
        start(pool).wait_for_log("Replayed")
        wait_until(lambda: not messages(app.conf.broker_url), message="the replay to be acked")
    assert not messages(app.conf.broker_url)
    assert [journal.count("charged", f"ORD-{n}") for n in range(1, 5)] == [1] * 4


@pytest.mark.nightly
@pytest.mark.parametrize("pool", by_use(POOLS))
def test_a_task_that_outlives_its_lease_keeps_it_and_duplicates_wait(
    app: Celery, start: Callable[..., WorkerNode], journal: Journal, gates: Gates, store: RedisStore, pool: str
) -> None:
    """Where the pool does not end a body at its limit, the limit does not end the renewals either."""
    gate = gates.close("gate ORD-1")
    options: dict[str, Any] = {"env": {"LEASE_TTL": "2", "GRACE": "0"}}
    nodes = [start(pool, **options)]
    first = app.module.charge.apply_async(("ORD-1",), **({"time_limit": 1} if pool in UNLIMITED else {}))
    gate.reached()
    granted = lease_end(store, "ORD-1")
    if pool == "solo":  # which takes no message while it runs one
        nodes.append(start(pool, **options))
    second = app.module.charge.delay("ORD-1")
    nodes[-1].wait_for_log("Deferred")
    wait_until(lambda: lease_end(store, "ORD-1") > granted + 2, message="the lease to be renewed beyond its first end")
    assert not second.ready()
    gate.open()
    assert first.get(timeout=20) == second.get(timeout=20) == "charged ORD-1"
    assert journal.count("started") == 1


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("pool", "limit", "error"),
    [("prefork", "soft_time_limit", "SoftTimeLimitExceeded"), ("gevent", "time_limit", "TimeLimitExceeded")],
)
def test_a_limit_that_ends_the_body_frees_the_key(
    app: Celery,
    start: Callable[..., WorkerNode],
    journal: Journal,
    gates: Gates,
    store: RedisStore,
    pool: str,
    limit: str,
    error: str,
) -> None:
    gate = gates.close("gate ORD-1")
    node, charge = start(pool), app.module.charge
    with pytest.raises(Exception, match=error):
        charge.apply_async(("ORD-1",), **{limit: 1}).get(timeout=20)
    wait_until(lambda: state(store, "ORD-1") is State.RELEASED, message="the key to be free")
    gate.open()
    assert charge.delay("ORD-1").get(timeout=20) == "charged ORD-1"
    assert journal.count("charged") == 1
    assert "OverflowError" not in node.logs()  # a greenlet has no process whose end one could wait for


@pytest.mark.nightly
@pytest.mark.skipif(not hasattr(Task, "acks_on_timeout"), reason="Celery before 5.7 drops the message")
def test_a_greenlet_that_goes_back_to_its_queue_at_its_hard_limit_does_not_do_so_for_ever(
    app: Celery, start: Callable[..., WorkerNode], journal: Journal, gates: Gates, store: RedisStore
) -> None:
    gates.close("gate ORD-1")
    node = start("gevent", env={"SETTINGS": json.dumps({"task_acks_on_timeout": False})})
    app.module.charge.apply_async(("ORD-1",), time_limit=1)
    node.wait_for_log("CrashLooped")
    wait_until(lambda: not messages(app.conf.broker_url), message="the message to be acked")
    assert journal.count("started") == 5
    assert state(store, "ORD-1") is State.RELEASED


@pytest.mark.nightly
@pytest.mark.parametrize("pool", KILLING)
def test_a_revoke_that_terminates_kills_the_greenlet_and_frees_the_key(
    app: Celery, start: Callable[..., WorkerNode], journal: Journal, gates: Gates, store: RedisStore, pool: str
) -> None:
    gate = gates.close("gate ORD-1")
    start(pool)
    result = app.module.charge.delay("ORD-1")
    gate.reached()
    # A greenlet of its own listens to commands, perhaps not yet; one that nobody hears is lost.
    wait_for_commands(app)
    result.revoke(terminate=True)
    wait_until(lambda: state(store, "ORD-1") is State.RELEASED, message="the key to be free")
    wait_until(lambda: result.state == "REVOKED", message="the task to be revoked")
    gate.open()
    assert app.module.charge.delay("ORD-1").get(timeout=20) == "charged ORD-1"
    assert journal.count("charged") == 1


@pytest.mark.nightly
@pytest.mark.parametrize("pool", by_use(KILLING))
def test_a_greenlet_that_is_killed_while_it_settles_has_settled(
    app: Celery,
    start: Callable[..., WorkerNode],
    journal: Journal,
    gates: Gates,
    store: RedisStore,
    redis_server: RedisServer,
    store_url: str,
    proxied: Callable[[int], Proxy],
    pool: str,
) -> None:
    proxy = proxied(redis_server.port)
    gate = gates.close("gate ORD-1")
    node = start(pool, store_url=proxy.url(int(store_url.rpartition("/")[2])))
    result = app.module.charge.delay("ORD-1")
    gate.reached()
    proxy.partition()
    gate.open()
    journal.wait_for_count(1, "charged")  # from here on the greenlet waits for the store, and nowhere before
    wait_for_commands(app)
    result.revoke(terminate=True)
    node.wait_for_log("trying again")
    proxy.heal()
    wait_until(lambda: state(store, "ORD-1") is State.COMPLETED, message="the task to be settled")
    assert app.module.charge.delay("ORD-1").get(timeout=20) == "charged ORD-1"
    assert journal.count("started") == 1


@pytest.mark.parametrize("pool", POOLS)
def test_a_cold_shutdown_loses_no_task(
    app: Celery, start: Callable[..., WorkerNode], journal: Journal, gates: Gates, store: RedisStore, pool: str
) -> None:
    """Bodies that the pool cannot cut off run to their end; the message of one that is cut off goes back."""
    count = 1 if pool == "solo" else 2
    gate = gates.close("gate")
    node = start(pool, env={"LEASE_TTL": "3"})
    results = [app.module.charge.delay(f"ORD-{n}", gate="gate") for n in range(count)]
    gate.reached(count)
    if pool in CUT_OFF:
        node.quit()
        left = State.RELEASED if pool in FREEING else State.IN_PROGRESS
        assert [state(store, f"ORD-{n}") for n in range(count)] == [left] * count
        assert journal.count("charged") == 0
        gate.open()
        start("threads")
    else:
        shut_down(node, signal.SIGQUIT)
        gate.open()
    assert [result.get(timeout=20) for result in results] == [f"charged ORD-{n}" for n in range(count)]
    assert journal.count("charged") == count


@pytest.mark.nightly
@pytest.mark.parametrize("pool", by_use(KILLING))
def test_a_cold_shutdown_frees_all_keys_also_where_it_interrupts_one_of_the_bodies(
    app: Celery, start: Callable[..., WorkerNode], gates: Gates, store: RedisStore, pool: str
) -> None:
    """Celery cuts off one after the other; where it comes to that which it interrupted, that is the end of the rest."""
    gate, quitter = gates.close("gate"), gates.close("quitter")
    gates.close("quit")
    node = start(pool, concurrency=6)
    app.module.charge.delay("ORD-0", "quit", gate="quitter")
    quitter.reached()
    for n in range(1, 6):
        app.module.charge.delay(f"ORD-{n}", gate="gate")
    gate.reached(5)
    quitter.open()
    wait_until(lambda: not node.running, 30, "the worker to end")
    assert [state(store, f"ORD-{n}") for n in range(6)] == [State.RELEASED] * 6


@pytest.mark.nightly
@pytest.mark.parametrize("pool", by_use(FREEING[1:]))
def test_what_waits_for_a_greenlet_does_not_begin_in_a_cold_shutdown(
    app: Celery, start: Callable[..., WorkerNode], journal: Journal, gates: Gates, pool: str
) -> None:
    """The end of one body makes room for the next, which the worker would wait for, or leave with its lease."""
    gate = gates.close("gate")
    node = start(pool, concurrency=1)
    results = [app.module.charge.delay(f"ORD-{n}", gate="gate") for n in range(3)]
    gate.reached()
    wait_until(lambda: node.logs().count("] received") > 1, 30, "the next message to wait for the greenlet")
    node.quit()
    assert journal.count("started") == 1
    gate.open()
    start("threads")
    assert [result.get(timeout=20) for result in results] == [f"charged ORD-{n}" for n in range(3)]
    assert journal.count("charged") == 3


@pytest.mark.nightly
@pytest.mark.parametrize("pool", ["threads", "gevent", "solo"])
def test_what_a_shutdown_cuts_off_with_its_worker_is_no_crash(
    app: Celery, start: Callable[..., WorkerNode], journal: Journal, gates: Gates, store: RedisStore, pool: str
) -> None:
    """SIGTERM, then SIGKILL. Of these pools, a solo worker runs the body in the thread that the signal interrupts."""
    options: dict[str, Any] = {"visibility_timeout": 1, "env": {"LEASE_TTL": "2"}}
    gate = gates.close("gate ORD-1")
    node = start(pool, **options)
    result = app.module.charge.delay("ORD-1")
    gate.reached()
    shut_down(node, signal.SIGTERM)
    wait_until(lambda: reason(store, "ORD-1") == "shutdown", message="the store to know of the shutdown")
    node.kill("SIGKILL")
    start("threads", **options)
    gate.reached(2, timeout=30)
    record = store.get(key("ORD-1"))
    assert record is not None
    assert (record.state, record.reason, record.crashes) == (State.IN_PROGRESS, "", 0)
    gate.open()
    assert result.get(timeout=20) == "charged ORD-1"


@pytest.mark.nightly
@pytest.mark.parametrize("pool", by_use(["prefork", "threads", *GREEN]))
def test_a_shutdown_by_remote_control_ends_a_slot_that_waits_for_the_store(
    app: Celery, start: Callable[..., WorkerNode], journal: Journal, own_redis: Callable[..., RedisServer], pool: str
) -> None:
    """It sends no signal. A solo worker cannot hear it: its slot is the thread that listens."""
    server = own_redis()
    node = start(pool, store_url=server.url(0))
    server.kill()
    result = app.module.charge.delay("ORD-1")
    node.wait_for_log("StoreFailed")
    wait_for_commands(app)
    app.control.shutdown()
    wait_until(lambda: not node.running, 20, lambda: f"the worker to end; its log:\n{node.logs()}")
    server.start()
    start(pool, store_url=server.url(0))
    assert result.get(timeout=20) == "charged ORD-1"
    assert journal.count("started") == 1


@pytest.mark.nightly
@pytest.mark.parametrize("ending", ["exit", "interrupt"])
@pytest.mark.parametrize("pool", by_use(POOLS))
def test_a_body_that_exits_is_run_again(
    app: Celery, start: Callable[..., WorkerNode], journal: Journal, pool: str, ending: str
) -> None:
    """In a pool without processes nothing ends with it, and Celery by itself would keep the message for ever."""
    start(pool)
    assert app.module.charge.delay("ORD-1", ending).get(timeout=20) == "charged ORD-1"
    assert journal.count("started") == 2


@pytest.mark.parametrize("pool", ["threads", *(pytest.param(pool, marks=pytest.mark.nightly) for pool in POOLS[2:])])
def test_a_body_that_raises_what_is_no_exception_fails_as_in_a_child(
    app: Celery, start: Callable[..., WorkerNode], store: RedisStore, pool: str
) -> None:
    """By itself Celery would neither answer it nor give it back."""
    start(pool)
    with pytest.raises(CancelledError, match="ORD-1"):
        app.module.charge.delay("ORD-1", "abandon").get(timeout=20)
    assert state(store, "ORD-1") is State.RELEASED
    wait_until(lambda: not messages(app.conf.broker_url), message="the message to be acked")


@pytest.mark.nightly
@pytest.mark.parametrize("pool", by_use(POOLS))
def test_a_task_whose_hook_exits_is_tried_again(
    app: Celery, start: Callable[..., WorkerNode], journal: Journal, pool: str
) -> None:
    start(pool)
    assert app.module.charge_checked.delay("ORD-1").get(timeout=20) == "charged ORD-1"
    assert (journal.count("checked"), journal.count("charged")) == (2, 1)
    wait_until(lambda: not messages(app.conf.broker_url), message="the message to be acked")


@pytest.mark.nightly
@pytest.mark.parametrize("pool", by_use(POOLS))
def test_duplicates_that_wait_or_replay_use_up_nothing_of_a_rate_limit(
    app: Celery, start: Callable[..., WorkerNode], store: RedisStore, journal: Journal, pool: str
) -> None:
    lease = store.acquire(Claim(f"idem:{POOLED}.seldom::ORD-1", "another worker's", 600, 600, task_id="T1"))
    assert isinstance(lease, Lease)
    node = start(pool)
    duplicates = [app.module.seldom.delay("ORD-1") for _ in range(4)]
    wait_until(lambda: node.logs().count("copy=2") == len(duplicates), 30, "all to be deferred twice")
    payload = Codec(compress_above=1024, result_max_bytes=1024).encode_value("charged by another")
    store.settle(lease, Outcome(State.COMPLETED, payload), ttl=600)
    assert [result.get(timeout=30) for result in duplicates] == ["charged by another"] * len(duplicates)
    assert app.module.seldom.delay("ORD-2").get(timeout=30) == "charged ORD-2"
    assert journal.count("charged") == 1


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_a_body_that_exits_when_its_message_was_acked_fails(
    app: Celery, start: Callable[..., WorkerNode], pool: str
) -> None:
    """There is nothing to give back: its caller would wait for ever."""
    start(pool)
    with pytest.raises(WorkerLostError):
        app.module.leave.delay("ORD-1").get(timeout=20)


@pytest.mark.nightly
@pytest.mark.parametrize("option", ["--max-tasks-per-child=1", "--max-memory-per-child=1"])
def test_children_that_are_replaced_after_every_task_lose_none(
    app: Celery, start: Callable[..., WorkerNode], journal: Journal, option: str
) -> None:
    start("prefork", extra_args=[option])
    results = [app.module.charge.delay(f"ORD-{n % 6}") for n in range(12)]
    assert [result.get(timeout=30) for result in results] == [f"charged ORD-{n % 6}" for n in range(12)]
    charged = journal.entries("charged")
    assert sorted(entry.key for entry in charged) == [f"ORD-{n}" for n in range(6)]
    assert len({entry.pid for entry in charged}) == 6


@pytest.mark.parametrize("pool", by_use(GROWING))
def test_a_pool_that_grows_under_load_runs_each_task_once(
    app: Celery, start: Callable[..., WorkerNode], journal: Journal, gates: Gates, pool: str
) -> None:
    gate = gates.close("gate")
    node = start(pool, concurrency=1, extra_args=["--autoscale=2,1"])
    results = [app.module.charge.delay(f"ORD-{n}", gate="gate") for n in range(2)]
    gate.reached(2, timeout=30)
    assert "Scaling up" in node.logs()
    gate.open()
    assert [result.get(timeout=20) for result in results] == ["charged ORD-0", "charged ORD-1"]
    assert journal.count("started") == 2


@pytest.mark.nightly
def test_a_pool_that_is_restarted_and_resized_runs_each_task_once(
    app: Celery, start: Callable[..., WorkerNode], journal: Journal, gates: Gates
) -> None:
    """The pool restarts while it is idle and while it works; children that run a task end it first."""
    gate = gates.close("gate ORD-1")
    node, charge = start("prefork"), app.module.charge
    before = set(node.children())

    def ask(command: str, **arguments: int) -> None:
        [reply] = app.control.broadcast(command, arguments=arguments, reply=True, limit=1, timeout=15)
        assert "ok" in next(iter(reply.values()))

    wait_for_commands(app)
    ask("pool_restart")
    ask("pool_grow", n=1)
    result = charge.delay("ORD-1")
    [pid] = gate.reached()
    ask("pool_restart")
    ask("pool_shrink", n=1)
    results = [result, charge.delay("ORD-1"), charge.delay("ORD-2")]
    wait_until(lambda: before - set(node.children()), message="a child to be replaced")
    assert pid in node.children()  # with its task
    gate.open()
    assert [result.get(timeout=20) for result in results] == ["charged ORD-1", "charged ORD-1", "charged ORD-2"]
    assert journal.count("started") == 2


@pytest.mark.nightly
@pytest.mark.parametrize("pool", by_use(GREEN))
def test_many_greenlets_share_a_few_connections(
    app: Celery, start: Callable[..., WorkerNode], journal: Journal, store_url: str, pool: str
) -> None:
    """A connection each would be more than the hundred that redis-py gives out."""
    count = 140  # a store opens 64 at most, however long they wait
    node = start(pool, concurrency=count)
    results = [app.module.meet.delay(f"ORD-{n}", count) for n in range(count)]
    assert [result.get(timeout=60) for result in results] == [f"met ORD-{n}" for n in range(count)]
    assert journal.count("started") == count
    assert "StoreFailed" not in node.logs()
    with open_client(store_url) as client:
        assert sum(each["db"] == store_url.rpartition("/")[2] for each in client.client_list()) < count // 2


@pytest.mark.nightly
@pytest.mark.parametrize("pool", by_use(GREEN))
def test_greenlets_that_wait_for_the_store_let_others_work(
    app: Celery, start: Callable[..., WorkerNode], journal: Journal, own_redis: Callable[..., RedisServer], pool: str
) -> None:
    server = own_redis()
    node = start(pool, store_url=server.url(0))
    server.kill()
    result = app.module.charge.delay("ORD-1")
    node.wait_for_log("StoreFailed")
    assert app.module.echo.delay("hello").get(timeout=20) == "hello"
    assert not result.ready()
    server.start()
    assert result.get(timeout=20) == "charged ORD-1"
    assert journal.count("charged") == 1
