"""A crowd of tasks that wait for one key, retry on it, or are its duplicates: no verb costs more for it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from celery_idempotent.stores import Lease, Reason, Refusal, Release, Store, Verdict, open_store
from celery_idempotent.stores.cached import CachedStore
from celery_idempotent.stores.dynamodb import DynamoDBStore
from celery_idempotent.stores.postgres import PostgresStore
from celery_idempotent.stores.redis import RedisStore
from celery_idempotent.stores.rules import MOST_DISPATCHED, MOST_MARKS, MOST_WAITING
from celery_idempotent.stores.sqlite import SqliteStore
from tests.support.stores.benches import DONE, KEY, claim, known, take

thorough = pytest.mark.thorough
#: As long as Celery's task ids are.
NAMES = [f"{number:036d}" for number in range(10_000)]


@pytest.fixture(params=["memory_url", "redis_url", "sqlite_url", pytest.param("postgres_url", marks=thorough)])
def crowded(request: pytest.FixtureRequest) -> Iterator[Store]:
    store = open_store(request.getfixturevalue(request.param))
    yield store
    store.close()


def waits(store: Store, task_id: str, copy: int = 0) -> Verdict:
    answer = store.acquire(claim(task_id=task_id, copy=copy, token="x"))
    assert isinstance(answer, Refusal)
    return answer.verdict


def test_of_a_crowd_that_waits_a_thousand_are_told_apart(crowded: Store) -> None:
    take(crowded, task_id="first")
    for number in range(MOST_WAITING + 3):
        assert waits(crowded, str(number), 5) is Verdict.CONFLICT
    assert known(crowded).waiting == MOST_WAITING
    assert waits(crowded, "0", 4) is Verdict.SUPERSEDED
    assert waits(crowded, str(MOST_WAITING), 4) is Verdict.CONFLICT  # nothing is known of it, and it waits all the same
    assert waits(crowded, "0", 6) is Verdict.CONFLICT
    assert waits(crowded, "0", 5) is Verdict.SUPERSEDED


def test_of_a_crowd_that_retries_a_thousand_attempts_are_remembered(crowded: Store) -> None:
    """Each task that waits for its retry leaves a mark, and may never come back to remove it."""
    for number in range(MOST_MARKS + 3):
        lease = take(crowded, task_id=str(number))
        assert crowded.release(lease, Release(Reason.RETRY, next_attempt=1))
    for known_one in (0, MOST_MARKS - 1):
        assert waits_or_runs(crowded, str(known_one), redelivered=True) is Verdict.SUPERSEDED
    # Nothing is known of these, so their first attempts run again; as does a retry, without a mark.
    for unknown_one in (MOST_MARKS, MOST_MARKS + 1):
        assert waits_or_runs(crowded, str(unknown_one), redelivered=True) is None
    assert waits_or_runs(crowded, str(MOST_MARKS + 2), retries=1) is None
    assert waits_or_runs(crowded, str(MOST_MARKS + 2), redelivered=True) is None
    # One that has a mark moves it on.
    lease = take(crowded, task_id="7", retries=1)
    assert crowded.release(lease, Release(Reason.RETRY, next_attempt=2))
    assert waits_or_runs(crowded, "7", retries=1, redelivered=True) is Verdict.SUPERSEDED
    # And nobody who waits is marked beside so many.
    take(crowded, task_id="7", retries=2)
    waits(crowded, "late")
    assert known(crowded).waiting == 0


def waits_or_runs(store: Store, task_id: str, **changes: Any) -> Verdict | None:
    """Ask; give a lease that this brings back at once, as a worker that is shut down does."""
    answer = store.acquire(claim(task_id=task_id, **changes))
    if isinstance(answer, Lease):
        assert store.release(answer, Release(Reason.SHUTDOWN))
        return None
    return answer.verdict


def weight(value: object) -> int:
    """Return how many bytes there are in a reply, or a row, or an item."""
    if isinstance(value, (bytes, str)):
        return len(value)
    if isinstance(value, dict):
        return sum(weight(name) + weight(each) for name, each in value.items())
    if isinstance(value, (list, tuple)):
        return sum(map(weight, value))
    return 8


class Weighed:
    """A store, and how many bytes came from where it keeps its records."""

    def __init__(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        self.store, self.bytes = store, 0
        owner, name = self._source(store)
        read = getattr(owner, name)

        def weighed(*args: Any, **options: Any) -> Any:
            reply = read(*args, **options)
            self.bytes += weight(reply)
            return reply

        monkeypatch.setattr(owner, name, weighed)

    @staticmethod
    def _source(store: Store) -> tuple[Any, str]:
        if isinstance(store, CachedStore):
            return store._outcomes._redis, "_call"
        if isinstance(store, RedisStore):
            return store, "_call"
        if isinstance(store, PostgresStore):
            return store, "_run"
        if isinstance(store, SqliteStore):
            return store._rows, "read"
        assert isinstance(store, DynamoDBStore)
        return store._table, "ask"

    def of(self, ask: Callable[[], object]) -> int:
        """Return how many bytes this has read."""
        self.bytes = 0
        ask()
        return self.bytes


@pytest.fixture(params=["redis", "sqlite", *(pytest.param(name, marks=thorough) for name in ("postgres", "cached"))])
def weighed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Weighed]:
    store = open_store(request.getfixturevalue(f"{request.param}_url"))
    yield Weighed(store, monkeypatch)
    store.close()


#: Bytes of the marks where they are in the row, and the row is read from a disk of this machine.
IN_THE_ROW = 40 * MOST_DISPATCHED


def test_a_replay_reads_no_more_after_many_duplicates_have_announced_their_callbacks(weighed: Weighed) -> None:
    store = weighed.store
    store.settle(take(store, task_id="first"), DONE, ttl=600)

    def replay() -> None:
        assert waits(store, "another") is Verdict.COMPLETED

    sizes = []
    for names in (NAMES[:10], NAMES[: 2 * MOST_DISPATCHED]):
        for name in names:
            assert store.mark_dispatched(KEY, name)
        sizes.append(weighed.of(replay))
    few, many = sizes
    assert many <= few + (IN_THE_ROW if isinstance(store, SqliteStore) else 40)
    assert len(known(store).dispatched) == MOST_DISPATCHED


@pytest.mark.nightly
def test_ten_thousand_duplicates_cost_a_replay_and_a_conflict_in_redis_nothing(
    redis_store: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither in bytes nor on the server, which serves nobody else meanwhile."""
    client, weighed = redis_store._client, Weighed(redis_store, monkeypatch)
    redis_store.settle(take(redis_store, "settled", task_id="first"), DONE, ttl=600)
    take(redis_store, "held", task_id="first")
    asks: list[Callable[[], object]] = [
        lambda: redis_store.acquire(claim("settled", task_id="another")),
        lambda: redis_store.acquire(claim("held", task_id="another")),
    ]
    before = [weighed.of(ask) for ask in asks]
    for name in NAMES:
        assert redis_store.mark_dispatched("settled", name)
    for name in NAMES:
        redis_store.acquire(claim("held", task_id=name))
    assert [weighed.of(ask) for ask in asks] == pytest.approx(before, abs=40)
    client.config_resetstat()
    for ask in asks:
        ask()
    whole = {f"cmdstat_{name}" for name in ("hgetall", "hkeys", "hvals", "hscan")}
    assert not whole & client.info("commandstats").keys()
    # The hashes themselves end somewhere too.
    assert client.hlen("settled") < 2 * MOST_DISPATCHED + 20
    assert client.hlen("held") < MOST_WAITING + 20


@pytest.mark.parametrize("fields", [{}, {"task_id": "a"}, {"fingerprint": "f"}, {"task_id": "a", "fingerprint": "f"}])
def test_the_first_that_announced_is_remembered_in_redis_whatever_its_record_has(
    redis_store: RedisStore, fields: dict[str, str]
) -> None:
    redis_store.settle(take(redis_store, **fields), DONE, ttl=600)
    for name in NAMES[: MOST_DISPATCHED + 1]:
        assert redis_store.mark_dispatched(KEY, name)
    assert known(redis_store).dispatched == {NAMES[0], *NAMES[2 : MOST_DISPATCHED + 1]}


def test_marks_of_an_earlier_version_are_known_in_redis(redis_store: RedisStore) -> None:
    """It numbered none, and kept them all."""
    redis_store.settle(take(redis_store, task_id="first"), DONE, ttl=600)
    redis_store._client.hset(KEY, mapping={f"announced:{name}": "1" for name in "abc"})
    for name in ("d", "e"):
        assert redis_store.mark_dispatched(KEY, name)
    assert known(redis_store).dispatched == set("abcde")
    answers = [redis_store.acquire(claim(task_id=name)) for name in ("b", "e")]
    assert [answer.record.dispatched for answer in answers if isinstance(answer, Refusal)] == [{"b"}, {"e"}]


@thorough
def test_marks_of_an_earlier_version_are_known_and_bounded_in_postgresql(postgres_url: str) -> None:
    postgres_store = PostgresStore.from_url(postgres_url)
    postgres_store.settle(take(postgres_store, task_id="first"), DONE, ttl=600)
    marks = json.dumps(dict.fromkeys(NAMES[:1000], 1))
    query = postgres_store._schema.render("update {table} set announced = %s::jsonb where key = %s returning 1")
    postgres_store._run(query, (marks, KEY))
    assert known(postgres_store).dispatched == set(NAMES[:1000])
    assert postgres_store.mark_dispatched(KEY, "new")
    kept = known(postgres_store).dispatched
    assert (len(kept), {"new", NAMES[0], NAMES[999]} <= kept) == (MOST_DISPATCHED, True)
    postgres_store.close()


def test_marks_in_a_cache_end_too(fresh_redis: Callable[[], str]) -> None:
    store = CachedStore.from_url(f"cached+memory://?cache={fresh_redis()}")
    store.settle(take(store, task_id="first"), DONE, ttl=600)
    for name in NAMES[: 2 * MOST_DISPATCHED]:
        assert store.mark_dispatched(KEY, name)
        assert store.mark_dispatched(KEY, name)  # again, for want of a reply
    cache = store._outcomes._redis._client
    assert cache.hlen(f"cached:{KEY}") < 2 * MOST_DISPATCHED + 20
    told = {name: store.acquire(claim(task_id=name)) for name in (NAMES[1], NAMES[MOST_DISPATCHED + 5])}
    assert [answer.record.dispatched for answer in told.values() if isinstance(answer, Refusal)] == [
        frozenset(),
        {NAMES[MOST_DISPATCHED + 5]},
    ]
    store.close()
