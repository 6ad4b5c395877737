"""The record in the caller's own transaction: written with the caller's items, or neither is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from botocore.exceptions import ClientError
from celery import Celery

from celery_idempotent import IdempotentTask, SettleNotCommitted
from celery_idempotent.errors import ConfigurationError
from celery_idempotent.stores import Outcome, Reason, Release, State
from celery_idempotent.stores.dynamodb import DynamoDBStore
from celery_idempotent.stores.dynamodb.records import LARGEST_PAYLOAD
from tests.support.stores.benches import DONE, KEY, age, known, take

pytestmark = pytest.mark.thorough  # in `full` alone: a server of its own kind, and slow


class Orders:
    """A business table beside the records."""

    def __init__(self, store: DynamoDBStore) -> None:
        self._store, self.client = store, store._table.client()
        self.name = f"{store._table.place.table}-orders"
        self.client.create_table(
            TableName=self.name,
            BillingMode="PAY_PER_REQUEST",
            KeySchema=[{"AttributeName": "id", "KeyType": "HASH"}],
            AttributeDefinitions=[{"AttributeName": "id", "AttributeType": "S"}],
        )

    def pay(self, *others: dict[str, Any], only_new: bool = False) -> None:
        paid: dict[str, Any] = {"TableName": self.name, "Item": {"id": {"S": "ORD-1"}}}
        if only_new:
            paid["ConditionExpression"] = "attribute_not_exists(id)"
        self.client.transact_write_items(TransactItems=[{"Put": paid}, *others])

    @property
    def paid(self) -> bool:
        return "Item" in self.client.get_item(TableName=self.name, Key={"id": {"S": "ORD-1"}}, ConsistentRead=True)


@pytest.fixture
def orders(dynamodb_store: DynamoDBStore) -> Iterator[Orders]:
    orders = Orders(dynamodb_store)
    yield orders
    orders.client.delete_table(TableName=orders.name)


def test_the_record_is_written_with_the_callers_items(dynamodb_store: DynamoDBStore, orders: Orders) -> None:
    lease = take(dynamodb_store, task_id="a", fingerprint="f")
    orders.pay(dynamodb_store.transact_item(lease, DONE, ttl=60))
    record = known(dynamodb_store)
    assert orders.paid
    assert (record.state, record.payload, record.fence) == (State.COMPLETED, DONE.payload, lease.fence)
    assert (record.task_id, record.fingerprint, record.owner) == ("a", "f", "")
    assert 30 < record.retention <= 61
    dynamodb_store.settle(lease, Outcome(State.COMPLETED, b"json:2"), ttl=60)  # as the guard may do
    assert known(dynamodb_store).payload == DONE.payload


def test_neither_is_written_after_a_take_over(dynamodb_store: DynamoDBStore, orders: Orders) -> None:
    zombie = take(dynamodb_store)
    age(dynamodb_store, KEY, 61)
    lease = take(dynamodb_store)
    with pytest.raises(ClientError, match="ConditionalCheckFailed"):
        orders.pay(dynamodb_store.transact_item(zombie, DONE, ttl=60))
    assert not orders.paid
    assert known(dynamodb_store).owner == lease.owner


@pytest.mark.parametrize("end", ["settled", "released", "made anew"])
def test_neither_is_written_by_who_holds_no_more(dynamodb_store: DynamoDBStore, orders: Orders, end: str) -> None:
    lease = take(dynamodb_store)
    if end == "settled":
        dynamodb_store.settle(lease, DONE, ttl=60)
    elif end == "released":
        assert dynamodb_store.release(lease, Release(Reason.FAILED))
    else:
        assert dynamodb_store.delete(KEY)
        take(dynamodb_store)
    before = known(dynamodb_store)
    with pytest.raises(ClientError, match="ConditionalCheckFailed"):
        orders.pay(dynamodb_store.transact_item(lease, Outcome(State.COMPLETED, b"json:2"), ttl=60))
    assert not orders.paid
    assert (known(dynamodb_store).state, known(dynamodb_store).payload) == (before.state, before.payload)


def test_the_lease_is_as_it_was_if_the_callers_own_condition_does_not_hold(
    dynamodb_store: DynamoDBStore, orders: Orders
) -> None:
    orders.pay()
    lease = take(dynamodb_store)
    with pytest.raises(ClientError, match="ConditionalCheckFailed"):
        orders.pay(dynamodb_store.transact_item(lease, DONE, ttl=60), only_new=True)
    assert known(dynamodb_store).owner == lease.owner
    assert dynamodb_store.renew([lease]) == []


def test_both_are_written_where_the_store_lost_the_record(dynamodb_store: DynamoDBStore, orders: Orders) -> None:
    """Nobody else has claimed the key: the effect is this run's to have."""
    lease = take(dynamodb_store)
    dynamodb_store.delete(KEY)
    orders.pay(dynamodb_store.transact_item(lease, DONE, ttl=60))
    assert orders.paid
    assert known(dynamodb_store).payload == DONE.payload


def test_a_task_hands_in_the_list_of_its_items(dynamodb_store: DynamoDBStore, orders: Orders) -> None:
    lease = take(dynamodb_store)
    items: list[dict[str, Any]] = []
    dynamodb_store.settle_within(lease, DONE, ttl=60, using=items)
    assert known(dynamodb_store).state is State.IN_PROGRESS
    orders.pay(*items)
    assert known(dynamodb_store).payload == DONE.payload


@pytest.mark.parametrize("writes", [True, False])
def test_a_task_that_settles_with_its_items_runs_once(
    dynamodb_store: DynamoDBStore, orders: Orders, *, writes: bool
) -> None:
    app = Celery("shop", set_as_current=False)
    app.conf.idempotency_store = dynamodb_store
    runs: list[str] = []

    @app.task(bind=True, base=IdempotentTask, name="pay", idempotency={"key": "order_id"})
    def pay(self: Any, order_id: str) -> str:
        runs.append(order_id)
        items: list[dict[str, Any]] = []
        self.lease.settle("receipt", using=items)
        if writes:
            orders.pay(*items, only_new=True)
        return "receipt"

    answers = [pay.apply(args=("ORD-1",)) for _ in range(2)]
    if writes:
        assert [answer.get() for answer in answers] == ["receipt"] * 2
    else:
        assert all(isinstance(answer.result, SettleNotCommitted) for answer in answers)
    assert (len(runs), orders.paid) == ((1, True) if writes else (2, False))
    app.close()


@pytest.mark.parametrize("using", ["default", object(), ()])
def test_what_is_no_list_of_items_is_refused_with_what_to_do(dynamodb_store: DynamoDBStore, using: object) -> None:
    with pytest.raises(ConfigurationError, match=r"TransactWriteItems.*transact_item\(\)"):
        dynamodb_store.settle_within(take(dynamodb_store), DONE, ttl=60, using=using)


def test_a_result_that_is_too_large_for_an_item_does_not_keep_the_transaction_from_being_written(
    dynamodb_store: DynamoDBStore, orders: Orders
) -> None:
    large = Outcome(State.COMPLETED, b"json:" + b"1" * LARGEST_PAYLOAD)
    orders.pay(dynamodb_store.transact_item(take(dynamodb_store), large, ttl=60))
    assert orders.paid
    assert known(dynamodb_store).payload.startswith(b"!unavailable:")
