"""The gauntlet: messages that come twice, early, late or never, and what is published in their place."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from celery import Celery
from celery.exceptions import Retry

from celery_idempotent.stores import State
from celery_idempotent.stores.redis import RedisStore
from tests.gauntlet.conftest import key_of
from tests.support.celery.apps import messages
from tests.support.celery.fixtures import StartWorker
from tests.support.celery.gates import Gates
from tests.support.celery.journal import Journal
from tests.support.gauntlet.consumer import Consumer
from tests.support.servers import RedisServer
from tests.support.stores.benches import age, known, take

SHOP = "tests.support.celery.shop"
LAPSED = 61.0
#: Seconds that a test waits for another thread.
PROMPTLY = 20.0


@pytest.mark.fault(2)
def test_a_job_that_was_handed_out_twice_survives_the_worker_that_was_running_it(
    client_app: Callable[..., Celery],
    start_worker: StartWorker,
    worker_env: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    journal: Journal,
    gates: Gates,
    store: RedisStore,
) -> None:
    """On Redis a restored message shares its entry with the one that runs: acked as a duplicate, both are gone."""
    for name, value in worker_env.items():
        monkeypatch.setenv(name, value)
    app = client_app(SHOP)
    gate = gates.close("before ORD-1")
    node = start_worker(SHOP, concurrency=1, prefetch=1)
    result = app.module.charge.delay("ORD-1")
    gate.reached()
    consumer = Consumer(app)
    [tag] = consumer.channel.client.hkeys("unacked")
    consumer.channel.qos.restore_by_tag(tag.decode())
    consumer.deliver(consumer.receive(), redelivered=True)
    node.kill()
    assert journal.count("charged") == 0
    gate.open()
    age(store, f"idem:{SHOP}.charge::ORD-1", LAPSED)
    consumer.work()
    assert journal.count("charged") == 1
    assert result.get(timeout=10) == {"order": "ORD-1", "cents": 999}
    assert messages(app.conf.broker_url) == 0
    consumer.close()


@pytest.mark.fault(3)
def test_a_retry_is_not_refused_by_the_lease_of_the_attempt_that_published_it(
    declare: Callable[..., Any], consumer: Consumer
) -> None:
    attempts: list[int] = []
    at_once: list[int] = []

    def charge(self: Any, order_id: str) -> str:
        attempts.append(self.request.retries)
        if self.request.retries == 2:
            return f"charged {order_id}"
        try:
            raise self.retry(countdown=0)
        except Retry:
            if self.request.retries == 0:  # the retry arrives before this attempt has ended
                consumer.deliver(consumer.receive())
                at_once.extend(attempts)
            raise

    result = declare(charge).delay("A")
    consumer.work()
    assert at_once == [0, 1]
    assert attempts == [0, 1, 2]
    assert result.get(timeout=10) == "charged A"


@pytest.mark.fault(16)
def test_a_task_is_published_also_while_the_store_is_down(
    declare: Callable[..., Any], consumer: Consumer, own_redis: Callable[..., RedisServer]
) -> None:
    server = own_redis()
    runs: list[str] = []

    def charge(self: Any, order_id: str) -> str:
        runs.append(order_id)
        return f"charged {order_id}"

    task = declare(charge, store=RedisStore.from_url(server.url()))
    server.kill()
    result = task.delay("A")
    assert result is not None
    assert consumer.waiting() == 1
    server.start()
    consumer.work()
    assert result.get(timeout=10) == "charged A"
    assert runs == ["A"]


@pytest.mark.fault(23)
def test_copies_that_are_handed_out_twice_each_do_not_multiply(
    declare: Callable[..., Any], consumer: Consumer, store: RedisStore
) -> None:
    runs: list[str] = []

    def charge(self: Any, order_id: str) -> str:
        runs.append(order_id)
        return f"charged {order_id}"

    holder = take(store, key_of("A"), task_id="holder")
    result = declare(charge).delay("A")
    for _ in range(6):
        for message in [consumer.receive() for _ in range(consumer.waiting())]:
            consumer.deliver(message)
            consumer.deliver(message, redelivered=True)
        # The message, and what was published while nobody could know of it.
        assert 1 <= consumer.waiting() <= 2
    age(store, holder.key, LAPSED)
    consumer.work()
    assert result.get(timeout=10) == "charged A"
    assert runs == ["A"]


@pytest.mark.fault(24)
@pytest.mark.parametrize("ending", ["retry", "raise"])
def test_what_a_zombie_publishes_or_raises_changes_nothing_for_its_heir(
    declare: Callable[..., Any], app: Celery, consumer: Consumer, store: RedisStore, ending: str
) -> None:
    runs: list[str] = []
    heir_runs, heir_may_end = threading.Event(), threading.Event()

    def charge(self: Any, order_id: str) -> str:
        runs.append(threading.current_thread().name)
        if len(runs) == 2:
            heir_runs.set()
            assert heir_may_end.wait(PROMPTLY)
        if len(runs) == 1:
            age(store, self.lease.key, LAPSED)
            heir.start()
            assert heir_runs.wait(PROMPTLY)
            raise self.retry(countdown=0) if ending == "retry" else ValueError("the zombie's")
        return f"charged by {threading.current_thread().name}"

    result = declare(charge).delay("A")
    message = consumer.receive()
    other = Consumer(app)
    heir = threading.Thread(target=other.deliver, args=(message,), kwargs={"redelivered": True}, name="heir")
    try:
        consumer.deliver(message)
        assert consumer.waiting() == 1  # the zombie's retry, or a copy of the message
        consumer.deliver(consumer.receive())
        assert runs == ["MainThread", "heir"]
        assert app.backend.get_task_meta(result.id)["status"] == "PENDING"
    finally:
        heir_may_end.set()
        heir.join(PROMPTLY)
        other.close()
    consumer.work()
    assert result.get(timeout=10) == "charged by heir"
    assert runs == ["MainThread", "heir"]
    assert known(store, key_of("A")).state is State.COMPLETED


@pytest.mark.fault(26)
def test_the_owner_of_a_delivery_is_not_inherited_by_what_its_body_publishes(
    declare: Callable[..., Any], consumer: Consumer
) -> None:
    runs: list[str] = []
    published: list[dict[str, Any]] = []
    seen: list[set[str]] = []

    def charge(self: Any, order_id: str) -> str:
        runs.append(self.request.id)
        seen.append(set(self.request.headers or {}) | set(vars(self.request)))
        if len(runs) == 1:
            # What a body does that passes everything on, and what a message would say that inherited.
            inherited = {"idempotency_delivery": {"owner": self.lease.lease.owner}}
            for headers in (self.request.headers or {}, inherited):
                self.apply_async((order_id,), headers=headers)
            for message in [consumer.receive(), consumer.receive()]:
                published.append(dict(message.headers))
                consumer.deliver(message)
        return f"charged {order_id}"

    result = declare(charge).delay("A")
    consumer.deliver(consumer.receive())
    assert runs == [result.id]
    assert not {"idempotency", "idempotency_delivery"} & seen[0]
    assert ["idempotency_delivery" in headers for headers in published] == [False, True]
    consumer.work()
    assert runs == [result.id]


def test_a_message_that_a_body_makes_of_its_own_request_waits_for_the_body(
    declare: Callable[..., Any], consumer: Consumer
) -> None:
    """Only a retry may overtake who published it, for it ends with that."""
    runs: list[str] = []

    def charge(self: Any, order_id: str) -> str:
        runs.append("begun")
        if len(runs) == 1:
            self.signature_from_request().apply_async()
            consumer.deliver(consumer.receive())
        runs.append("ended")
        return f"charged {order_id}"

    result = declare(charge).delay("A")
    consumer.work()
    assert runs == ["begun", "ended"]
    assert result.get(timeout=10) == "charged A"
