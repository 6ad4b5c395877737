"""What a history takes of each store, and what it does with one that is none of ours; the facts are the contract's."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from celery_idempotent.core import keys
from celery_idempotent.errors import RecordUnreadable, StoreUnreachable
from celery_idempotent.stores import HistoryEntry, open_store
from celery_idempotent.stores.dynamodb import DynamoDBStore
from celery_idempotent.stores.dynamodb.store import SLACK, history_key
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.stores.postgres import PostgresStore
from celery_idempotent.stores.records import HISTORY_LIMIT
from celery_idempotent.stores.redis import ClusterStore, RedisStore
from celery_idempotent.stores.sqlite import SqliteStore
from tests.support.stores.benches import KEY, take
from tests.support.stores.postgres import run
from tests.support.unit.scripted import Clock

LIST = f"{KEY}:~history"


def notes(number: int, *, ago: float = 0.0, keep: float = 200.0) -> list[HistoryEntry]:
    return [HistoryEntry(KEY, str(place), ago, keep) for place in range(number)]


@pytest.mark.parametrize("kind", ["redis_store", "dynamodb_store"])
def test_no_key_that_a_producer_can_give_names_the_history_of_another(
    request: pytest.FixtureRequest, kind: str
) -> None:
    store = request.getfixturevalue(kind)
    by_id = keys.compose_default("idem", "shop.charge", "T-1")
    for word in (history_key(by_id).rpartition(":")[2], "history", ["history"], {"history": 1}):
        given = keys.compose("idem", "shop.charge", scope="T-1", key=word)
        assert given != history_key(by_id)
        take(store, key=given)
        store.append_history([HistoryEntry(by_id, "noted", 0, 60)])
        assert [noted.text for noted in store.history(by_id)] == ["noted"]
        store.delete(by_id)
        assert store.get(given) is not None


def test_a_list_of_redis_is_cut_to_the_newest_and_expires(redis_store: RedisStore) -> None:
    for _ in range(3):
        redis_store.append_history(notes(40, ago=100))
    assert redis_store._client.llen(LIST) == HISTORY_LIMIT
    assert 90_000 < redis_store._client.pttl(LIST) <= 100_000


def test_many_keys_are_noted_in_one_round_trip(redis_store: RedisStore, monkeypatch: pytest.MonkeyPatch) -> None:
    trips: list[int] = []
    pipeline = redis_store._connections.pipeline
    monkeypatch.setattr(
        redis_store._connections, "pipeline", lambda commands: trips.append(len(commands)) or pipeline(commands)
    )
    redis_store.append_history(notes(1))
    trips.clear()
    redis_store.append_history([HistoryEntry(f"{KEY}-{number}", "one", 0, 60) for number in range(300)])
    assert trips == [300]


def test_what_is_no_history_in_redis_is_unreadable_and_keeps_no_other_key_from_its_notes(
    redis_store: RedisStore,
) -> None:
    redis_store._client.rpush(LIST, "garbage")
    with pytest.raises(RecordUnreadable, match="not the history"):
        redis_store.history(KEY)
    redis_store._client.delete(LIST)
    redis_store._client.set(LIST, "somebody else's")
    with pytest.raises(RecordUnreadable, match="no record of celery_idempotent"):
        redis_store.append_history([*notes(1), HistoryEntry(f"{KEY}-2", "one", 0, 60)])
    assert [noted.text for noted in redis_store.history(f"{KEY}-2")] == ["one"]
    redis_store.delete(KEY)
    assert redis_store.history(KEY) == []


@pytest.mark.thorough
def test_a_node_of_a_cluster_that_fails_keeps_no_other_from_its_notes(
    cluster_url: str, opened_cluster: Callable[..., ClusterStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened_cluster(cluster_url)
    call = store._call

    def fails(verb: str, keys: list[str], args: list[object]) -> object:
        if keys[0] == LIST:
            raise StoreUnreachable("down")
        return call(verb, keys, args)

    monkeypatch.setattr(store, "_call", fails)
    with pytest.raises(StoreUnreachable, match=r"^down$"):
        store.append_history([*notes(1), HistoryEntry(f"{KEY}-2", "one", 0, 60)])
    assert [noted.text for noted in store.history(f"{KEY}-2")] == ["one"]


def test_a_row_of_sqlite_has_the_newest_alone(sqlite_store: SqliteStore) -> None:
    for _ in range(3):
        sqlite_store.append_history(notes(40))
    [(text,)] = sqlite_store._connections.read(
        lambda cursor: cursor.execute("SELECT lines FROM celery_idempotency_history").fetchall()
    )
    assert len(json.loads(text)) == HISTORY_LIMIT


@pytest.mark.thorough
def test_a_row_of_postgresql_has_the_newest_alone(postgres_url: str) -> None:
    store = open_store(postgres_url)
    assert isinstance(store, PostgresStore)
    for _ in range(3):
        store.append_history(notes(40))
    assert run(store, "select cardinality(at), cardinality(line) from {history}") == [(HISTORY_LIMIT, HISTORY_LIMIT)]
    store.close()


@pytest.mark.nightly
@pytest.mark.thorough
def test_an_item_of_dynamodb_has_few_more_than_the_newest(dynamodb_store: DynamoDBStore) -> None:
    sizes = set()
    for _ in range(HISTORY_LIMIT + 2 * SLACK):
        dynamodb_store.append_history(notes(1))
        item = dynamodb_store._table.read(history_key(KEY))
        assert item is not None
        sizes.add(len(item["lines"]["L"]))
    assert max(sizes) == HISTORY_LIMIT + SLACK
    dynamodb_store._histories._cut(KEY, HISTORY_LIMIT + 5)  # of another size by now: somebody else was faster
    assert len(dynamodb_store.history(KEY)) == HISTORY_LIMIT


@pytest.mark.thorough
def test_what_is_no_history_in_dynamodb_is_unreadable(dynamodb_store: DynamoDBStore) -> None:
    dynamodb_store._table.call("put_item", Item={"key": {"S": history_key(KEY)}, "expires": {"N": "99999999999"}})
    with pytest.raises(RecordUnreadable, match="not the history"):
        dynamodb_store.history(KEY)
    dynamodb_store.delete(KEY)
    assert dynamodb_store.history(KEY) == []


def test_a_purge_empties_the_memory_of_what_has_expired(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock().install(monkeypatch)
    store = MemoryStore()
    for _ in range(3):
        store.append_history(notes(40, keep=60))
    assert len(store._histories[KEY][1]) == HISTORY_LIMIT
    clock.advance(59)
    assert store.purge() == 0
    assert len(store.history(KEY)) == HISTORY_LIMIT
    clock.advance(2)
    assert store.history(KEY) == []
    assert store.purge() == 0
    assert store._histories == {}
