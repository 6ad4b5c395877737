"""What may be written as the URL of a table, and what is said of the rest."""

from __future__ import annotations

import pytest

from celery_idempotent.errors import ConfigurationError, StoreRefused
from celery_idempotent.stores import open_store
from celery_idempotent.stores.dynamodb import DynamoDBStore
from celery_idempotent.stores.dynamodb.connections import TIMEOUT, Address
from tests.support.dynamodb import SECRET_KEY
from tests.support.stores.benches import take

SECRET = "hunter2"


def test_a_url_names_a_table_and_where_it_is() -> None:
    url = (
        "dynamodb://shop.records-1?region=eu-west-1&endpoint_url=http%3A%2F%2Flocalhost%3A8000&profile=shop&timeout=.5"
    )
    assert Address.in_url(url) == Address("shop.records-1", "eu-west-1", "http://localhost:8000", "shop", 0.5)
    assert Address.in_url("dynamodb://Records_2/") == Address("Records_2")


@pytest.mark.parametrize(
    ("url", "hint"),
    [
        ("dynamodb://", "3 to 255"),
        ("dynamodb://ab", "3 to 255"),
        ("dynamodb://a table", "3 to 255"),
        ("dynamodb://table/more", "3 to 255"),
        (f"dynamodb://AKIA:{SECRET}@table", "a user or a password"),
        (f"dynamodb://table?regoin={SECRET}", "Did you mean region?"),
        (f"dynamodb://table?aws_secret_access_key={SECRET}", "There are region, endpoint_url, profile, timeout"),
        ("dynamodb://table?endpoint_url=localhost:8000", "http://localhost:8000"),
        (f"dynamodb://table?endpoint_url=http://u:{SECRET}@localhost:8000", "without a password"),
        ("dynamodb://table?timeout=soon", "seconds above 0"),
        ("dynamodb://table?timeout=0", "seconds above 0"),
        ("dynamodb://table?timeout=inf", "seconds above 0"),
        ("dynamodb://table?timeout=nan", "seconds above 0"),
    ],
)
def test_a_url_that_cannot_be_meant_is_an_error_at_once(url: str, hint: str) -> None:
    with pytest.raises(ConfigurationError, match=r"like dynamodb://table") as caught:
        open_store(url)
    assert hint in str(caught.value)
    assert SECRET not in str(caught.value)


def test_opening_a_store_connects_nothing_and_looks_for_no_credentials() -> None:
    store = open_store("dynamodb://table?region=nowhere-1&profile=nobody")
    assert isinstance(store, DynamoDBStore)
    assert store._table._client is None
    store.close()


def test_the_timeouts_are_short_and_nothing_is_retried_in_the_client(dynamodb_keys: None) -> None:
    store = DynamoDBStore.from_url("dynamodb://table?region=eu-west-1")
    config = store._table.client().meta.config
    assert config.connect_timeout == config.read_timeout == TIMEOUT <= 2
    assert config.retries["total_max_attempts"] == 1
    store.close()


class TestWithoutCredentials:
    def test_no_region_is_refused_with_what_to_write(self, dynamodb_keys: None) -> None:
        with pytest.raises(StoreRefused, match=r"\?region="):
            take(open_store("dynamodb://table"))

    def test_no_credentials_are_refused(self, dynamodb_keys: None, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("AWS_ACCESS_KEY_ID")
        monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
        with pytest.raises(StoreRefused, match="NoCredentialsError"):
            take(open_store("dynamodb://table?region=eu-west-1"))

    def test_half_of_the_credentials_are_refused(self, dynamodb_keys: None, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("AWS_ACCESS_KEY_ID")
        monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIA")
        with pytest.raises(StoreRefused, match="PartialCredentialsError") as caught:
            take(open_store("dynamodb://table?region=eu-west-1"))
        assert SECRET_KEY not in str(caught.value)

    def test_a_profile_that_is_not_there_is_refused(self, dynamodb_keys: None) -> None:
        with pytest.raises(StoreRefused, match="ProfileNotFound"):
            take(open_store("dynamodb://table?region=eu-west-1&profile=nobody"))
