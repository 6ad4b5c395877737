"""Tables of DynamoDB, each one test's alone, on the session's server."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import count

import pytest

from celery_idempotent.stores.dynamodb import DynamoDBStore, schema
from celery_idempotent.stores.dynamodb.connections import Table
from tests.conftest import missing
from tests.support.dynamodb import DynamoServer, credentials
from tests.support.servers import ServerMissing

__all__ = ["dynamodb_keys", "dynamodb_server", "dynamodb_store", "dynamodb_url", "fresh_table", "table_maker"]

NUMBERS = count(1)


@pytest.fixture(scope="session")
def dynamodb_server() -> Iterator[DynamoServer]:
    """The session's server. It is shared: never stop it."""
    try:
        server = DynamoServer().start()
    except ServerMissing as error:
        raise missing(error) from None
    yield server
    server.stop()


@pytest.fixture
def dynamodb_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys that boto3 finds in the environment, and nothing else there that it might believe."""
    for name in ("AWS_PROFILE", "AWS_REGION", "AWS_DEFAULT_REGION", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)
    for name, value in credentials().items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="session")
def table_maker(dynamodb_server: DynamoServer) -> Iterator[Table]:
    """What makes the tables of all tests: to connect takes longer than to make one."""
    store = DynamoDBStore.from_url(dynamodb_server.url("unused"))
    yield store._table
    store.close()


@pytest.fixture
def fresh_table(table_maker: Table, dynamodb_keys: None) -> str:
    """The name of an empty table, which is this test's alone."""
    name = f"records-{next(NUMBERS)}"
    table_maker.place = replace(table_maker.place, table=name)
    schema.apply(table_maker)
    return name


@pytest.fixture
def dynamodb_url(dynamodb_server: DynamoServer, fresh_table: str) -> str:
    """The URL of an empty table, which is this test's alone."""
    return dynamodb_server.url(fresh_table)


@pytest.fixture
def dynamodb_store(dynamodb_url: str) -> Iterator[DynamoDBStore]:
    """A store in an empty table."""
    store = DynamoDBStore.from_url(dynamodb_url)
    yield store
    store.close()
