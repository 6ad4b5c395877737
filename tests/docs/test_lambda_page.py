"""The handler of docs/guides/lambda.md, called with events as gateways send them, on tables of moto's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest

from celery_idempotent import functions
from celery_idempotent.stores import Claim, Lease
from celery_idempotent.stores.dynamodb import DynamoDBStore
from tests.support.docs.pages import PYTHON, blocks
from tests.support.dynamodb import REGION, DynamoServer

STORE = "dynamodb://idempotency?region=eu-west-1"
[CODE, *_] = [block.text for block in blocks("docs/guides/lambda.md") if block.language == PYTHON]


@pytest.fixture
def page(dynamodb_server: DynamoServer, dynamodb_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The names of the page, with a table of orders, and with times that a test can wait for."""
    monkeypatch.setattr(functions, "_stores", {})
    monkeypatch.setenv("AWS_ENDPOINT_URL_DYNAMODB", dynamodb_server.endpoint())
    code = CODE
    orders = f"orders-{uuid4().hex}"
    for old, new in {STORE: dynamodb_url, '"5s"': '"1s"', '"orders"': repr(orders)}.items():
        assert old in code
        code = code.replace(old, new)
    names: dict[str, Any] = {"orders": orders}
    exec(code, names)
    names["dynamodb"].create_table(
        TableName=orders,
        BillingMode="PAY_PER_REQUEST",
        AttributeDefinitions=[{"AttributeName": "id", "AttributeType": "S"}],
        KeySchema=[{"AttributeName": "id", "KeyType": "HASH"}],
    )
    yield names
    names["dynamodb"].close()
    for store in functions._stores.values():
        store.close()


def orders(page: dict[str, Any]) -> list[str]:
    items = page["dynamodb"].scan(TableName=page["orders"])["Items"]
    return [item["item"]["S"] for item in items]


def event(key: str | None, order: object, account: str = "anna", header: str = "idempotency-key") -> dict[str, Any]:
    """Return the event of a request to an HTTP API, in format 2.0; each has an id and a trace of its own."""
    return {
        "version": "2.0",
        "routeKey": "POST /orders",
        "rawPath": "/orders",
        "headers": {"x-amzn-trace-id": uuid4().hex, **({header: key} if key is not None else {})},
        "requestContext": {
            "authorizer": {"jwt": {"claims": {"sub": account}, "scopes": None}},
            "http": {"method": "POST", "path": "/orders"},
            "requestId": uuid4().hex,
        },
        "body": json.dumps(order),
        "isBase64Encoded": False,
    }


def kind(response: dict[str, Any]) -> str:
    return str(json.loads(response["body"])["type"]).rpartition("#")[2]


def test_a_request_that_is_sent_again_places_one_order_and_gets_the_same_response(page: dict[str, Any]) -> None:
    handler = page["handler"]
    answers = [
        handler(event('"k"', {"item": "book"}), None),
        handler(event("k", {"item": "book"}), None),
        handler(event("k", {"item": "book"}, header="Idempotency-Key"), None),  # as a REST API passes it
    ]
    assert answers[0]["statusCode"] == 201
    assert answers == answers[:1] * 3
    assert orders(page) == ["book"]
    of_ben = handler(event("k", {"item": "book"}, "ben"), None)
    assert of_ben["statusCode"] == 201
    assert of_ben["body"] != answers[0]["body"]


def test_what_is_refused_is_refused_with_the_name_that_clients_know(page: dict[str, Any]) -> None:
    handler = page["handler"]
    assert kind(handler(event(None, {"item": "book"}), None)) == "key-missing"
    assert kind(handler(event("a,b", {"item": "book"}), None)) == "key-malformed"
    assert kind(handler(event("k", {"things": 1}), None)) == "order-malformed"
    assert handler(event("k", {"item": "book"}), None)["statusCode"] == 201  # the key was free
    reused = handler(event("k", {"item": "pen"}), None)
    assert (reused["statusCode"], kind(reused)) == (422, "key-reused")
    assert orders(page) == ["book"]


def test_a_request_whose_lambda_died_in_another_environment_is_carried_out_by_one_repetition(
    page: dict[str, Any], dynamodb_url: str
) -> None:
    store = DynamoDBStore.from_url(dynamodb_url)
    store._records.clock.machine = "another environment"
    dead = store.acquire(Claim(key_of("k"), "the one that died", 1.0, 600))
    assert isinstance(dead, Lease)
    assert page["handler"](event("k", {"item": "book"}), None)["statusCode"] == 201
    assert orders(page) == ["book"]
    store.close()


def test_a_request_that_is_carried_out_for_longer_than_one_waits_is_in_progress(
    page: dict[str, Any], dynamodb_url: str
) -> None:
    store = DynamoDBStore.from_url(dynamodb_url)
    assert isinstance(store.acquire(Claim(key_of("k"), "one that runs", 60.0, 600)), Lease)
    names: dict[str, Any] = {}
    exec(CODE.replace(STORE, dynamodb_url).replace('"8s"', '"0.1s"'), names)
    busy = names["handler"](event("k", {"item": "book"}), None)
    assert (busy["statusCode"], kind(busy)) == (409, "in-progress")
    assert 1 <= int(busy["headers"]["Retry-After"]) <= 60
    names["dynamodb"].close()
    store.close()


@pytest.mark.usefixtures("page")
def test_a_store_that_does_not_answer_is_unavailable() -> None:
    names: dict[str, Any] = {}
    gone = f"dynamodb://gone?region={REGION}&endpoint_url=http%3A%2F%2F127.0.0.1%3A9&timeout=0.2"
    exec(CODE.replace(STORE, gone).replace('"8s"', '"0.1s"'), names)
    answer = names["handler"](event("k", {"item": "book"}), None)
    assert (answer["statusCode"], kind(answer)) == (503, "store-unavailable")
    names["dynamodb"].close()


def key_of(key: str) -> str:
    """Return the key in the store of Anna's request."""
    return f"idem:shop.place_order:anna:{key}"
