"""A store that is down, refuses, or holds what is not ours: nothing is acked that did not run, nothing runs twice."""

from __future__ import annotations

from collections.abc import Callable
from urllib.parse import urlsplit

import pytest
from celery import Celery

from celery_idempotent.stores import State
from celery_idempotent.stores.redis import RedisStore
from tests.support.celery.aftermath import PARTING, Aftermath
from tests.support.celery.fixtures import StartWorker
from tests.support.celery.gates import Gates
from tests.support.celery.journal import Journal
from tests.support.proxy import Proxy
from tests.support.servers import RedisServer
from tests.support.waiting import wait_until

SHOP = "tests.support.celery.shop"
KEY = f"idem:{SHOP}.charge::ORD-1"
DONE = {"order": "ORD-1", "cents": 999}


@pytest.fixture
def app(client_app: Callable[..., Celery]) -> Celery:
    return client_app(SHOP)


@pytest.fixture
def store_server(own_redis: Callable[..., RedisServer]) -> RedisServer:
    return own_redis(appendonly="yes", appendfsync="always")


@pytest.mark.ending("store down while acquiring")
def test_a_task_that_meets_a_store_which_is_down_waits_and_runs_once_it_is_back(
    app: Celery, start_worker: StartWorker, store_server: RedisServer, journal: Journal
) -> None:
    node = start_worker(SHOP, store_url=store_server.url())
    store_server.kill()
    result = app.module.charge.delay("ORD-1")
    node.wait_for_log("StoreFailed")
    assert journal.count("started") == 0
    store_server.start()
    Aftermath(app, store_server.url(), journal, f"{SHOP}.charge").expect(result, "SUCCESS", State.COMPLETED)
    node.assert_log_exists("StoreRecovered")


def test_a_worker_starts_without_its_store_and_says_so(
    app: Celery, start_worker: StartWorker, store_server: RedisServer
) -> None:
    store_server.kill()
    node = start_worker(SHOP, store_url=store_server.url())
    node.assert_log_exists("cannot serve")
    store_server.start()
    assert app.module.charge.delay("ORD-1").get(timeout=30) == DONE


@pytest.mark.parametrize("policy", ["run", "raise"])
def test_a_policy_may_prefer_to_run_unprotected_or_to_fail(
    app: Celery, start_worker: StartWorker, store_server: RedisServer, journal: Journal, policy: str
) -> None:
    node = start_worker(SHOP, store_url=store_server.url(), env={"ON_STORE_ERROR": policy})
    store_server.kill()
    result = app.module.charge.delay("ORD-1")
    if policy == "run":
        assert result.get(timeout=30) == DONE
        node.assert_log_exists("RanUnprotected")
    else:
        with pytest.raises(Exception, match="cannot serve") as caught:
            result.get(timeout=30)
        assert type(caught.value).__name__ == "StoreUnreachable"
        assert journal.count("started") == 0


@pytest.mark.ending("store down while settling")
def test_a_store_that_goes_down_while_the_task_runs_is_told_when_it_is_back(
    app: Celery, start_worker: StartWorker, store_server: RedisServer, journal: Journal, gates: Gates
) -> None:
    gate = gates.close("after ORD-1")
    start_worker(SHOP, store_url=store_server.url())
    result = app.module.charge.delay("ORD-1")
    gate.reached()
    store_server.kill()
    gate.open()
    store_server.start()
    aftermath = Aftermath(app, store_server.url(), journal, f"{SHOP}.charge")
    aftermath.expect(result, "SUCCESS", State.COMPLETED)
    aftermath.expect(app.module.charge.delay("ORD-1"), "SUCCESS", State.COMPLETED)


@pytest.mark.ending("store down while renewing")
def test_a_store_that_misses_renewals_and_comes_back_finds_the_holder_where_it_was(
    parting: Celery, start_worker: StartWorker, store_server: RedisServer, journal: Journal, gates: Gates
) -> None:
    gate = gates.close("before ORD-1")
    node = start_worker(PARTING, store_url=store_server.url(), env={"LEASE_TTL": "2"})
    result = parting.module.part.delay("ORD-1")
    gate.reached()
    store_server.kill()
    wait_until(lambda: "could not be renewed" in node.logs(), message="a renewal to fail")
    store_server.start()
    gate.open()
    aftermath = Aftermath(parting, store_server.url(), journal)
    aftermath.expect(result, "SUCCESS", State.COMPLETED)
    assert journal.count("started") == 1


def test_a_store_that_lost_its_data_while_the_task_ran_learns_the_result_all_the_same(
    app: Celery, start_worker: StartWorker, store_server: RedisServer, journal: Journal, gates: Gates
) -> None:
    gate = gates.close("after ORD-1")
    start_worker(SHOP, store_url=store_server.url())
    result = app.module.charge.delay("ORD-1")
    gate.reached()
    with store_server.client() as client:
        client.flushall()
    gate.open()
    assert result.get(timeout=30) == DONE
    assert app.module.charge.delay("ORD-1").get(timeout=30) == DONE
    assert journal.count("charged") == 1


@pytest.mark.ending("store down while releasing")
def test_the_users_exception_wins_over_a_store_that_cannot_be_told(
    parting: Celery, start_worker: StartWorker, store_server: RedisServer, journal: Journal, gates: Gates
) -> None:
    gate = gates.close("after ORD-1")
    node = start_worker(PARTING, store_url=store_server.url(), env={"LEASE_TTL": "2"})
    result = parting.module.part.delay("ORD-1", "raise at first")
    gate.reached()
    store_server.kill()
    gate.open()
    wait_until(lambda: "ReleaseFailed" in node.logs(), 30, "the release to be given up")
    with pytest.raises(ValueError, match="no ORD-1"):
        result.get(timeout=30)
    store_server.start()
    aftermath = Aftermath(parting, store_server.url(), journal)
    aftermath.expect(result, "FAILURE", State.IN_PROGRESS)
    # The lease runs out by itself; that looks like a crash until the next run ends.
    again = parting.module.part.delay("ORD-1", "raise at first")
    aftermath.expect(again, "SUCCESS", State.COMPLETED, effects=2)


@pytest.mark.ending("store down while settling")
def test_a_result_is_returned_and_acked_when_the_store_stays_down(
    app: Celery, start_worker: StartWorker, store_server: RedisServer, journal: Journal, gates: Gates
) -> None:
    gate = gates.close("after ORD-1")
    node = start_worker(SHOP, store_url=store_server.url(), env={"LEASE_TTL": "2"})
    result = app.module.charge.delay("ORD-1")
    gate.reached()
    store_server.kill()
    gate.open()
    assert result.get(timeout=30) == DONE
    node.assert_log_exists("SettleFailed")
    store_server.start()
    aftermath = Aftermath(app, store_server.url(), journal, f"{SHOP}.charge")
    aftermath.expect(result, "SUCCESS", State.IN_PROGRESS)


def test_a_worker_whose_store_refuses_it_does_not_start(
    start_worker: StartWorker, own_redis: Callable[..., RedisServer]
) -> None:
    locked = own_redis(requirepass="secret")
    node = start_worker(SHOP, store_url=f"redis://:wrong@127.0.0.1:{locked.port}/0", ready=False)
    wait_until(lambda: not node.running, 30, "the worker to end")
    assert "Check the password" in node.logs()
    assert "wrong" not in node.logs().replace("wrong password", "")
    assert node.container.process is not None
    assert node.container.process.returncode != 0


def test_a_worker_whose_store_url_is_wrong_does_not_start(start_worker: StartWorker) -> None:
    node = start_worker(SHOP, store_url="reddis://127.0.0.1/0", ready=False)
    wait_until(lambda: not node.running, 30, "the worker to end")
    assert "Did you mean redis://" in node.logs()


@pytest.mark.parametrize("garbage", ["text", "newer"])
def test_a_record_that_cannot_be_read_defers_the_task_and_is_left_alone(
    app: Celery, start_worker: StartWorker, store_server: RedisServer, journal: Journal, garbage: str
) -> None:
    node = start_worker(SHOP, store_url=store_server.url())
    with store_server.client() as client:
        if garbage == "text":
            client.set(KEY, "not ours")
        else:
            client.hset(KEY, mapping={"version": "9", "state": "running", "fence": "1"})
        app.module.charge.delay("ORD-1")
        node.wait_for_log("copy=1")
        node.assert_log_exists(KEY)
        assert client.exists(KEY)
        assert journal.count("started") == 0
        client.delete(KEY)
    assert app.module.charge.delay("ORD-1").get(timeout=20) == DONE
    assert journal.count("charged") == 1


def test_scripts_that_the_server_forgot_are_sent_again(
    app: Celery, start_worker: StartWorker, store_server: RedisServer, gates: Gates
) -> None:
    gate = gates.close("before ORD-1")
    start_worker(SHOP, store_url=store_server.url())
    result = app.module.charge.delay("ORD-1")
    gate.reached()
    with store_server.client() as client:
        client.script_flush()
    gate.open()
    assert result.get(timeout=20) == DONE


def test_without_a_store_of_its_own_the_app_keeps_its_records_where_its_results_are(
    app: Celery, start_worker: StartWorker, worker_env: dict[str, str]
) -> None:
    start_worker(SHOP, env={"STORE_URL": ""})
    assert app.module.charge.delay("ORD-1").get(timeout=20) == DONE
    record = RedisStore.from_url(worker_env["RESULT_URL"]).get(KEY)
    assert record is not None
    assert record.state is State.COMPLETED


def test_a_store_that_no_other_process_sees_is_refused_where_processes_run_the_tasks(start_worker: StartWorker) -> None:
    node = start_worker(SHOP, store_url="memory://", ready=False)
    wait_until(lambda: not node.running, 30, "the worker to end")
    assert "all processes share" in node.logs()
    start_worker(SHOP, store_url="memory://", pool="threads")


def test_a_retry_that_the_broker_cannot_take_puts_the_message_back(
    client_app: Callable[..., Celery],
    start_worker: StartWorker,
    own_redis: Callable[..., RedisServer],
    journal: Journal,
    gates: Gates,
) -> None:
    broker = own_redis(appendonly="yes", appendfsync="always")
    app = client_app(SHOP, BROKER_URL=broker.url())
    gate = gates.close("before ORD-1")
    options = {"broker_url": broker.url(), "visibility_timeout": 2}
    node = start_worker(SHOP, **options)
    result = app.module.flaky.delay("ORD-1", failures=1)
    gate.reached()
    broker.kill()
    gate.open()
    node.wait_for_log("took no retry", timeout=60)
    broker.start()
    start_worker(SHOP, **options)  # Celery's main process may end with its broker
    assert result.get(timeout=60) == "ORD-1 after 1"


@pytest.mark.nightly
def test_a_retry_that_a_full_broker_refuses_waits_in_its_slot(
    client_app: Callable[..., Celery],
    start_worker: StartWorker,
    own_redis: Callable[..., RedisServer],
    gates: Gates,
) -> None:
    """Celery drops the message, and the operation with it."""
    broker = own_redis(maxmemory_policy="noeviction")
    app = client_app(SHOP, BROKER_URL=broker.url())
    gate = gates.close("before ORD-1")
    node = start_worker(SHOP, broker_url=broker.url())
    result = app.module.flaky.delay("ORD-1", failures=1)
    gate.reached()
    with broker.client() as client:
        client.config_set("maxmemory", 1)
        gate.open()
        node.wait_for_log("It waits in its slot", timeout=60)
        client.config_set("maxmemory", 0)
    assert result.get(timeout=60) == "ORD-1 after 1"


@pytest.mark.nightly
def test_what_was_acked_before_it_runs_waits_in_its_slot_for_a_broker_that_takes_nothing(
    app: Celery,
    start_worker: StartWorker,
    proxied: Callable[[int], Proxy],
    broker_url: str,
    journal: Journal,
    gates: Gates,
) -> None:
    """To put such a message back would have no effect: the broker has forgotten it."""
    gate = gates.close("before ORD-1")
    address = urlsplit(broker_url)
    proxy = proxied(address.port or 6379)
    node = start_worker(SHOP, env={"BROKER_WRITE_URL": proxy.url(int(address.path.removeprefix("/") or 0))})
    first = app.module.early.delay("ORD-1")
    gate.reached()
    proxy.refuse()
    second = app.module.early.delay("ORD-1")
    node.wait_for_log("took no copy", timeout=60)
    gate.open()
    node.wait_for_log("took no retry", timeout=60)
    assert [entry.fields["retries"] for entry in journal.entries("tried")] == [0]
    proxy.heal()
    assert first.get(timeout=60) == second.get(timeout=60) == "charged ORD-1"
    # Between the first message's end and its retry, the second may begin, and retry too.
    assert [entry.fields["retries"] for entry in journal.entries("tried")] in ([0, 1], [0, 0, 1])
    assert len(journal.entries("charged")) == 1


def test_a_worker_without_any_store_does_not_start_and_says_what_to_set(start_worker: StartWorker) -> None:
    urls = {"broker_url": "memory://", "result_url": "cache+memory://", "env": {"STORE_URL": ""}}
    node = start_worker(SHOP, ready=False, **urls)
    wait_until(lambda: not node.running, 30, "the worker to end")
    assert "Set app.conf.idempotency_store" in node.logs()
