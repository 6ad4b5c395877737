"""Copies of a deferred message: when they are tried, when they have expired."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from typing import Any
from unittest import mock
from uuid import UUID

import pytest
from amqp.serialization import dumps
from celery import Celery, signals
from celery.app.task import Context
from freezegun import freeze_time
from kombu.serialization import prepare_accept_content

from celery_idempotent import IdempotentTask
from celery_idempotent.celery import message as messages
from celery_idempotent.celery.delivery import seconds_until
from celery_idempotent.celery.message import (
    FIRST_DELAY,
    KEY_HEADER,
    LONGEST_DELAY,
    META_HEADER,
    DeliveryState,
    copy_delay,
    is_expired,
    publish_copy,
    read_key,
)
from celery_idempotent.celery.request import IdempotentRequest
from tests.support.waiting import wait_until

NOON = datetime(2026, 11, 21, 12, 0, tzinfo=timezone.utc)


def app_on(broker: str, **options: object) -> Celery:
    app = Celery("copies", broker=broker, set_as_current=False)
    app.conf.broker_transport_options = options
    return app


def test_delays_grow_from_copy_to_copy_up_to_a_minute() -> None:
    app = app_on("memory://")
    delays = [copy_delay(app, copy, remaining=3600) for copy in range(12)]
    assert FIRST_DELAY * 0.75 <= delays[0] <= FIRST_DELAY * 1.25
    assert delays[:6] == sorted(delays[:6])
    assert delays[-1] == LONGEST_DELAY


def test_a_copy_is_tried_as_soon_as_the_lease_in_its_way_can_have_run_out() -> None:
    assert copy_delay(app_on("memory://"), 9, remaining=2.5) == 2.5
    assert copy_delay(app_on("memory://"), 9, remaining=0.01) == 0.1


def test_a_copy_does_not_go_in_circles_while_a_transaction_is_open_for_longer_than_its_lease() -> None:
    delays = [copy_delay(app_on("memory://"), copy, remaining=0.0) for copy in range(12)]
    assert delays[:6] == sorted(delays[:6])
    assert delays[-1] == LONGEST_DELAY


@pytest.mark.parametrize(("timeout", "longest"), [(10, 5), (3600, 60)])
def test_a_delay_stays_below_half_of_the_visibility_timeout(timeout: float, longest: float) -> None:
    delay = copy_delay(app_on("redis://localhost", visibility_timeout=timeout), 10, remaining=3600)
    assert longest / 2 < delay <= longest


@pytest.mark.parametrize("expires", [NOON.isoformat(), "2026-11-21T12:00:00Z", "2026-11-21T12:00:00"])
def test_an_expiry_that_a_copy_carries_is_told_by_the_wall_clock(expires: str) -> None:
    app = app_on("memory://")
    with freeze_time(NOON - timedelta(seconds=1)):
        assert not is_expired(app, expires)
    with freeze_time(NOON + timedelta(seconds=1)):
        assert is_expired(app, expires)


@pytest.mark.parametrize(
    "when", [90, 90.0, NOON + timedelta(seconds=90), (NOON + timedelta(seconds=90)).replace(tzinfo=None)]
)
def test_a_retry_is_due_at_a_time_or_after_a_while(when: float | datetime) -> None:
    with freeze_time(NOON):
        assert seconds_until(when) == 90


@pytest.mark.parametrize("when", [None, NOON - timedelta(hours=1)])
def test_a_retry_that_is_due_already_is_due_now(when: datetime | None) -> None:
    with freeze_time(NOON):
        assert seconds_until(when) == 0


@pytest.fixture
def charge() -> Iterator[Any]:
    """A task whose messages stay in memory."""
    app = Celery("copied", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.update(idempotency_store="memory://", accept_content=["json", "yaml"])

    @app.task(base=IdempotentTask, shared=False)
    def charge(order_id: str) -> None: ...

    app.finalize()
    yield charge
    app.close()


def received(task: Any) -> IdempotentRequest:
    """Return the next message, acked, as the worker's main process reads it."""
    with task.app.connection_for_read() as connection, connection.SimpleQueue("celery") as queue:
        queue.consumer.accept = prepare_accept_content(task.app.conf.accept_content)
        message = wait_until(lambda: queue.get(timeout=10), message="a message")
        message.ack()
    return IdempotentRequest(message, app=task.app, task=task)


def deferred(request: IdempotentRequest, times: int = 1) -> IdempotentRequest:
    """Return what is left of a message when it was deferred so often."""
    for _ in range(times):
        publish_copy(request.task, request._context, DeliveryState.of(request._context).identity, 0.0)
        request = received(request.task)
    return request


SENT: dict[str, Any] = {
    "expires": NOON.isoformat(),
    "ignore_result": True,
    "serializer": "yaml",
    "compression": "zlib",
    "argsrepr": "('<secret>',)",
    "kwargsrepr": "{'hidden': 1}",
    "shadow": "charge of somebody",
    "time_limit": 30,
    "soft_time_limit": 20,
    "priority": 3,
    "reply_to": "somebody",
    "correlation_id": "C1",
    "message_id": "M1",
    "delivery_mode": 1,
    "customer": "acme",
    "root_id": "T0",
    "parent_id": "T0",
    "retries": 2,
    "group_id": "G1",
    "group_index": 4,
    "headers": {"tenant": "blue"},
}


@pytest.mark.parametrize("times", [1, 2])
def test_a_deferred_copy_carries_all_that_its_consumer_can_see_of_the_message(charge: Any, times: int) -> None:
    with freeze_time(NOON - timedelta(seconds=30)):
        charge.app.send_task(charge.name, ("ORD-1",), task_id="T1", **SENT)
        first = received(charge)
        copy = deferred(first, times)
    told = {"id", "task", "root_id", "parent_id", "group", "group_index", "shadow", "timelimit", "retries", "tenant"}
    told |= {"ignore_result", "argsrepr", "kwargsrepr", "compression"}
    wanted = {name: first.message.headers[name] for name in told}
    assert {name: copy.message.headers[name] for name in told} == wanted
    assert wanted["argsrepr"] == SENT["argsrepr"]
    assert (wanted["ignore_result"], wanted["compression"]) == (True, "application/x-gzip")
    assert copy.content_type == first.content_type == "application/x-yaml"
    assert copy.args == first.args == ["ORD-1"]
    properties = ("reply_to", "correlation_id", "priority", "message_id", "delivery_mode", "customer")
    assert [copy.message.properties[name] for name in properties] == ["somebody", "C1", 3, "M1", 1, "acme"]


DEAD_LETTERED: dict[str, Any] = {
    "x-death": [{"queue": "waiting", "reason": "rejected", "count": 2}],
    "x-first-death-queue": "waiting",
    "x-last-death-reason": "rejected",
}


def test_a_body_sees_how_often_its_message_was_dead_lettered_also_in_a_copy(charge: Any) -> None:
    charge.apply_async(("ORD-1",), headers=DEAD_LETTERED)
    headers = deferred(received(charge), 2).message.headers
    assert {name: headers[name] for name in DEAD_LETTERED} == DEAD_LETTERED


def test_what_queues_delay_that_dead_letter_it_does_not_say_that_they_did_before(
    charge: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RabbitMQ would drop it. Celery before 5.6.3 does not see to that, and neither does this request."""
    monkeypatch.setattr(messages, "delays_natively", lambda app: True)
    monkeypatch.setattr(Context, "_filter_x_death_headers", lambda _, headers: dict(headers or {}), raising=False)
    charge.apply_async(("ORD-1",), headers={**DEAD_LETTERED, "tenant": "blue"})
    request = received(charge)
    retry = charge.signature_from_request(request._context, retries=1).options["headers"]
    copy = deferred(request).message.headers
    for headers in (retry, copy):
        assert not DEAD_LETTERED.keys() & headers.keys()
        assert headers["tenant"] == "blue"


def test_a_copy_has_none_of_what_belongs_to_one_delivery_or_to_another_publisher(charge: Any) -> None:
    foreign = {"user_id": "guest", "expiration": "1000", "MessageDeduplicationId": "D1", "DelaySeconds": 60}
    charge.delay("ORD-1")
    first = received(charge)
    first._context.properties = {**first._context.properties, **foreign}
    copy = deferred(first)
    assert not foreign.keys() & copy.message.properties.keys()
    assert copy.message.delivery_tag != first.message.delivery_tag


@pytest.fixture
def traced() -> Iterator[None]:
    """Messages that ddtrace has seen, and sentry-sdk: what they add stands deeper, and then Celery reads no other."""

    def trace(headers: dict[str, Any], **_: Any) -> None:
        headers["headers"] = {"traceparent": "00-1-2-01"}

    with mock.patch.object(signals.before_task_publish, "receivers", list(signals.before_task_publish.receivers)):
        signals.before_task_publish.connect(trace, weak=False)
        yield


def test_headers_of_a_producer_are_found_beside_those_of_what_traces(charge: Any, traced: None) -> None:
    charge.apply_async(("ORD-1",), headers={"tenant": "blue"}, idempotency_key="K1")
    first = received(charge)
    for request in (first, deferred(first, 2)):
        assert DeliveryState.of(request._context).identity.key == "K1"
        assert request._context.headers == {"tenant": "blue", "traceparent": "00-1-2-01"}


@pytest.mark.parametrize("key", [UUID(int=7), 2**70, ("A", 1)])
def test_the_key_of_a_message_that_goes_on_is_written_as_amqp_has_it_wherever_it_is_copied(
    charge: Any, key: object
) -> None:
    """sentry-sdk copies each header deeper, before the message is published."""
    charge.apply_async(("ORD-1",), idempotency_key=key)
    first = DeliveryState.of(received(charge)._context).identity
    deeper = {"headers": first.headers(copy=1)}
    dumps("F", [deeper])
    assert read_key(deeper["headers"][KEY_HEADER]) == first.key


@pytest.mark.parametrize("eta", [NOON, None])
def test_the_body_of_a_copy_has_the_eta_of_the_message_and_a_retry_has_its_own(
    charge: Any, eta: datetime | None
) -> None:
    charge.apply_async(("ORD-1",), eta=eta)
    copy = deferred(received(charge), 2)
    identity = DeliveryState.of(copy._context).identity
    assert copy._context.eta == (eta and NOON.isoformat())
    assert "eta" not in identity.headers()[META_HEADER]


def test_a_copy_expires_out_of_the_brokers_sight_and_its_retry_as_the_message_did(charge: Any) -> None:
    """A broker that drops the copy, or a worker that revokes its id, would do so to the operation that is running."""
    with freeze_time(NOON - timedelta(seconds=30)):
        charge.apply_async(("ORD-1",), expires=30)
        copy = deferred(received(charge))
        assert copy.message.headers["expires"] is None
        assert "expiration" not in copy.message.properties
        assert copy.message.headers[META_HEADER]["expires"] == NOON.isoformat()
        charge.signature_from_request(copy._context, retries=1).apply_async()
        retry = received(charge)
    assert retry.expires == NOON
    assert copy._context.expires == NOON.isoformat()
