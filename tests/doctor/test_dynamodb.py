"""What doctor says of a table of DynamoDB, on moto's endpoint: once as it should not be, and once as it should."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from celery_idempotent.cli.doctor import dynamodb as checks
from celery_idempotent.cli.doctor.findings import Severity
from celery_idempotent.errors import StoreRefused
from celery_idempotent.stores.dynamodb import DynamoDBStore
from tests.support.doctor.wards import found_of, severities
from tests.support.dynamodb import REGION, DynamoServer

pytestmark = pytest.mark.thorough  # in `full` alone: a server of its own kind, and slow


def test_a_table_that_schema_made_is_well(dynamodb_url: str) -> None:
    found = found_of(dynamodb_url)
    assert severities(found) == {}
    assert found.keys() == {check.code for check in checks.CHECKS}


def test_nothing_is_left_behind(dynamodb_store: DynamoDBStore) -> None:
    found_of(dynamodb_store)
    assert list(dynamodb_store.scan()) == []


def test_a_table_that_is_not_there_is_an_error(dynamodb_server: DynamoServer, dynamodb_keys: None) -> None:
    found = found_of(dynamodb_server.url("nowhere"))
    assert severities(found) == {"schema-pending": "error"}
    assert "create the table nowhere" in found["schema-pending"].found


@pytest.fixture
def capacious(dynamodb_server: DynamoServer, dynamodb_keys: None) -> Iterator[DynamoDBStore]:
    """A store in a table of fixed capacity."""
    store = DynamoDBStore.from_url(dynamodb_server.url("capacious"))
    store._table.call(
        "create_table",
        ProvisionedThroughput={"ReadCapacityUnits": 5, "WriteCapacityUnits": 5},
        KeySchema=[{"AttributeName": "key", "KeyType": "HASH"}],
        AttributeDefinitions=[{"AttributeName": "key", "AttributeType": "S"}],
    )
    yield store
    store._table.call("delete_table")
    store.close()


def test_a_table_that_does_not_forget_is_an_error(capacious: DynamoDBStore) -> None:
    found = found_of(capacious)
    assert severities(found) == {"schema-pending": "error"}
    assert "TTL" in found["schema-pending"].found


def test_a_fixed_capacity_is_said_by_its_size(capacious: DynamoDBStore) -> None:
    capacious.apply_schema()
    found = found_of(capacious)
    assert severities(found) == {"capacity-fixed": "warning"}
    assert "--table-name capacious" in found["capacity-fixed"].remedy
    more = {"ReadCapacityUnits": 500, "WriteCapacityUnits": 500}
    capacious._table.call("update_table", ProvisionedThroughput=more)
    assert severities(found_of(capacious)) == {"capacity-fixed": "info"}


@pytest.mark.parametrize(
    ("said", "code", "word"),
    [
        ({"TableStatus": "DELETING"}, "table-not-active", "DELETING"),
        ({"Replicas": [{"RegionName": "us-east-1"}]}, "table-in-regions", "us-east-1"),
    ],
)
def test_what_only_aws_has_is_read_from_its_description(
    dynamodb_store: DynamoDBStore, monkeypatch: pytest.MonkeyPatch, said: dict[str, Any], code: str, word: str
) -> None:
    """No table of the tests' endpoint is ever going, and none is in two regions."""
    call = dynamodb_store._table.call

    def described(operation: str, **request: Any) -> dict[str, Any]:
        reply = call(operation, **request)
        if operation == "describe_table":
            reply["Table"].update(said)
        return reply

    monkeypatch.setattr(dynamodb_store._table, "call", described)
    found = found_of(dynamodb_store)
    assert severities(found) == {code: "error"}
    assert word in found[code].found


def describing_refused(store: DynamoDBStore, monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Have the store refused what describes its table: the tests' endpoint knows no rights."""
    call = store._table.call

    def refused(operation: str, **request: Any) -> dict[str, Any]:
        if operation.startswith("describe"):
            from botocore.exceptions import ClientError

            said = {"Error": {"Code": code, "Message": "no"}}
            raise StoreRefused(f"{code}: no") from ClientError(said, operation)  # type: ignore[arg-type]
        return call(operation, **request)

    monkeypatch.setattr(store._table, "call", refused)


def test_a_role_that_may_not_describe_is_a_note(dynamodb_store: DynamoDBStore, monkeypatch: pytest.MonkeyPatch) -> None:
    describing_refused(dynamodb_store, monkeypatch, "AccessDeniedException")
    found = found_of(dynamodb_store)
    assert severities(found) == {"not-checked": "info"}
    assert "DescribeTable" in found["not-checked"].remedy


def test_any_other_refusal_is_an_error(dynamodb_store: DynamoDBStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A role without rights is one thing, keys that are not valid another: no worker could claim with them."""
    describing_refused(dynamodb_store, monkeypatch, "UnrecognizedClientException")
    found = found_of(dynamodb_store)
    assert severities(found) == {"store-refused": "error"}
    assert "UnrecognizedClientException" in found["store-refused"].found


def test_a_region_that_the_machine_decides_is_said(dynamodb_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_DEFAULT_REGION", REGION)
    bare = dynamodb_url.replace(f"region={REGION}&", "").replace(f"&region={REGION}", "")
    assert "region" not in bare
    found = found_of(bare)
    assert severities(found) == {"region-unsaid": "info"}
    assert f"region={REGION}" in found["region-unsaid"].remedy


def test_a_table_of_somebody_else_is_an_error(dynamodb_server: DynamoServer, dynamodb_keys: None) -> None:
    store = DynamoDBStore.from_url(dynamodb_server.url("theirs"))
    store._table.call(
        "create_table",
        BillingMode="PAY_PER_REQUEST",
        KeySchema=[{"AttributeName": "id", "KeyType": "HASH"}],
        AttributeDefinitions=[{"AttributeName": "id", "AttributeType": "S"}],
    )
    found = found_of(store)
    store._table.call("delete_table")
    store.close()
    assert found["configuration"].severity is Severity.ERROR
