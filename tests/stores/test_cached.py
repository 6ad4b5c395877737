"""A cache in front of a store: what it answers, and that it never does harm."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from time import monotonic
from typing import Any

import pytest

from celery_idempotent.errors import ConfigurationError, LeaseLost, RecordUnreadable, StoreUnreachable
from celery_idempotent.stores import Claim, Lease, Outcome, Reason, Refusal, Release, State, Verdict, open_store
from celery_idempotent.stores import cached as cached_module
from celery_idempotent.stores.cached import TIMEOUT, CachedStore, CachedUrl, fields_of, outcome_of
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.stores.redis import RedisStore
from celery_idempotent.stores.redis.records import by_name
from tests.support.servers import RedisServer, free_port
from tests.support.stores.benches import DONE, KEY, claim, known
from tests.support.waiting import wait_until

ENTRY = f"cached:{KEY}"
BROKEN = Outcome(State.FAILED, b"json:broken")
OTHER = Outcome(State.COMPLETED, b"json:other")


class Behind(MemoryStore):
    """A durable store that counts what it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: Counter[str] = Counter()

    def acquire(self, claim: Claim) -> Lease | Refusal:
        self.asked["acquire"] += 1
        return super().acquire(claim)

    def settle(self, lease: Lease, outcome: Outcome, *, ttl: float) -> None:
        self.asked["settle"] += 1
        super().settle(lease, outcome, ttl=ttl)

    def mark_dispatched(self, key: str, task_id: str) -> bool:
        self.asked["mark_dispatched"] += 1
        return super().mark_dispatched(key, task_id)


Front = Callable[..., CachedStore]


@pytest.fixture
def front() -> Iterator[Front]:
    """A function that puts the cache at a URL in front of a store, by default in front of a new one."""
    stores: list[CachedStore] = []

    def make(url: str, behind: MemoryStore | None = None, **options: Any) -> CachedStore:
        cache = RedisStore.from_url(url, socket_timeout=TIMEOUT, socket_connect_timeout=TIMEOUT)
        stores.append(CachedStore(behind or Behind(), cache, **options))
        return stores[-1]

    yield make
    for store in stores:
        store.close()


@pytest.fixture
def store(front: Front, redis_url: str) -> CachedStore:
    return front(redis_url)


@pytest.fixture
def behind(store: CachedStore) -> Behind:
    assert isinstance(store.durable, Behind)
    return store.durable


@pytest.fixture(autouse=True)
def patient_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loaded machine must not make a miss of a hit; tests of the timeout shorten it again."""
    monkeypatch.setattr("tests.stores.test_cached.TIMEOUT", 5.0)


def ask(store: CachedStore, **changes: Any) -> Lease | Refusal:
    return store.acquire(claim(**{"task_id": "b", **changes}))


def take(store: CachedStore, **changes: Any) -> Lease:
    answer = ask(store, **{"task_id": "a", **changes})
    assert isinstance(answer, Lease)
    return answer


def refused(store: CachedStore, **changes: Any) -> Refusal:
    answer = ask(store, **changes)
    assert isinstance(answer, Refusal)
    return answer


def settled(store: CachedStore, outcome: Outcome = DONE, ttl: float = 600, **changes: Any) -> Lease:
    lease = take(store, **changes)
    store.settle(lease, outcome, ttl=ttl)
    return lease


def commands(client: Any) -> Counter[str]:
    """Return how often each command came to the server, those within scripts among them."""
    return Counter({name: stats["calls"] for name, stats in client.info("commandstats").items()})


class TestWhatItAnswers:
    @pytest.mark.parametrize("outcome", [DONE, BROKEN], ids=lambda outcome: str(outcome.state))
    def test_what_is_settled_is_answered_without_the_durable_store(
        self, store: CachedStore, behind: Behind, outcome: Outcome
    ) -> None:
        lease = settled(store, outcome, fingerprint="f")
        behind.asked.clear()
        for task_id in ("b", "c"):
            answer = refused(store, task_id=task_id, fingerprint="f")
            assert (answer.verdict, answer.record.payload) == (outcome.state.value, outcome.payload)
            assert answer.record.fence == lease.fence
        assert not behind.asked

    def test_the_record_of_a_hit_is_that_of_the_durable_store(self, store: CachedStore, behind: Behind) -> None:
        settled(store, fingerprint="f")
        store.mark_dispatched(KEY, "c d")
        hit, truth = refused(store).record, known(behind)
        assert replace(hit, age=truth.age) == replace(truth, dispatched=frozenset())  # those of others are not told
        assert 0 <= hit.age < 30
        assert abs(hit.retention - truth.retention) < 30
        assert behind.asked["acquire"] == 1

    def test_a_hit_tells_how_long_ago_it_was_settled(self, store: CachedStore, redis_client: Any) -> None:
        settled(store)
        redis_client.hincrby(ENTRY, "ended", -100_000_000)
        assert 100 <= refused(store).record.age < 130

    def test_other_arguments_are_told_from_the_cache_too(self, store: CachedStore, behind: Behind) -> None:
        settled(store, fingerprint="f")
        behind.asked.clear()
        answer = refused(store, fingerprint="g")
        assert (answer.verdict, answer.record.fingerprint) == (Verdict.KEY_REUSED, "f")
        assert refused(store, fingerprint="").verdict is Verdict.COMPLETED
        assert not behind.asked

    def test_a_miss_asks_the_durable_store_and_tells_the_cache(
        self, store: CachedStore, behind: Behind, redis_client: Any
    ) -> None:
        settled(store)
        redis_client.flushdb()
        assert [refused(store, task_id=task_id).record.payload for task_id in "bcd"] == [DONE.payload] * 3
        assert behind.asked["acquire"] == 2
        assert 0 < redis_client.ttl(ENTRY) <= 600

    @pytest.mark.parametrize(
        "delivery", [{"task_id": "a"}, {"redelivered": True}, {"copy": 1, "token": "x"}, {"retries": 1}, {"nesting": 1}]
    )
    def test_a_delivery_that_may_have_called_back_before_asks_the_durable_store(
        self, store: CachedStore, behind: Behind, delivery: dict[str, Any]
    ) -> None:
        settled(store)
        asker = delivery.get("task_id", "b")
        behind.mark_dispatched(KEY, asker)  # by somebody who could not tell the cache
        behind.asked.clear()
        answer = refused(store, **delivery)
        assert behind.asked["acquire"] == 1
        assert answer.record.dispatched == {asker}

    def test_a_task_that_was_announced_is_announced_in_the_cache(self, store: CachedStore, behind: Behind) -> None:
        """A producer may publish a message twice, and no broker marks that."""
        settled(store)
        assert refused(store).record.dispatched == frozenset()
        assert store.mark_dispatched(KEY, "b")
        assert refused(store).record.dispatched == {"b"}
        assert behind.asked["acquire"] == 1

    def test_an_announcement_that_comes_before_the_outcome_is_kept_with_it(
        self, store: CachedStore, behind: Behind, redis_client: Any
    ) -> None:
        settled(store)
        stale = known(behind)
        redis_client.flushdb()
        assert store.mark_dispatched(KEY, "b")
        assert 0 < redis_client.ttl(ENTRY) <= 3600
        assert store._outcomes.find(KEY) is None
        store._outcomes.keep(stale, 600)  # by one who read it before
        assert refused(store).record.dispatched == {"b"}

    def test_nothing_is_announced_in_the_cache_that_is_not_completed(
        self, store: CachedStore, redis_client: Any
    ) -> None:
        take(store)
        assert not store.mark_dispatched(KEY, "a")
        assert not redis_client.exists(ENTRY)

    @pytest.mark.parametrize(("ttl", "max_age", "kept"), [(600, 60, 60), (60, 600, 60)])
    def test_an_outcome_is_kept_as_long_as_both_allow(
        self, front: Front, redis_url: str, redis_client: Any, ttl: float, max_age: float, kept: float
    ) -> None:
        store = front(redis_url, max_age=max_age)
        settled(store, ttl=ttl)
        assert kept - 30 < redis_client.ttl(ENTRY) <= kept
        redis_client.delete(ENTRY)
        refused(store)
        assert kept - 30 < redis_client.ttl(ENTRY) <= kept

    def test_what_expired_behind_runs_again(self, store: CachedStore, behind: Behind, redis_client: Any) -> None:
        settled(store)
        redis_client.pexpire(ENTRY, 1)
        wait_until(lambda: not redis_client.exists(ENTRY), message="the entry to expire")
        behind.offset += 601
        assert isinstance(ask(store), Lease)

    def test_what_is_not_finished_is_not_cached(self, store: CachedStore, redis_client: Any) -> None:
        lease = take(store)
        assert refused(store).verdict is Verdict.CONFLICT
        store.renew([lease])
        store.release(lease, Release(Reason.RETRY, retry_in=60, next_attempt=1))
        assert refused(store).verdict is Verdict.CONFLICT
        assert not redis_client.keys()

    def test_an_outcome_that_was_refused_is_not_cached(self, store: CachedStore, redis_client: Any) -> None:
        zombie = take(store)
        store.durable.delete(KEY)
        take(store)
        with pytest.raises(LeaseLost):
            store.settle(zombie, DONE, ttl=60)
        assert not redis_client.keys()

    def test_a_later_outcome_replaces_an_earlier_one_and_never_the_other_way(
        self, store: CachedStore, behind: Behind
    ) -> None:
        settled(store)
        store.mark_dispatched(KEY, "c")
        earlier = known(behind)
        behind.offset += 601
        settled(store, OTHER, redelivered=True)
        store._outcomes.keep(earlier, 600)
        answer = refused(store)
        assert (answer.record.payload, answer.record.dispatched) == (OTHER.payload, frozenset())
        assert behind.asked["acquire"] == 2

    def test_what_was_read_long_ago_is_not_cached(
        self, store: CachedStore, redis_client: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It may have been deleted since, and the mark of that be gone."""
        monkeypatch.setattr(cached_module, "LATE", 0.0)
        settled(store)
        assert not redis_client.keys()

    def test_what_was_deleted_is_not_cached_by_a_reply_that_comes_late(
        self, front: Front, redis_url: str, redis_client: Any
    ) -> None:
        store = front(redis_url, max_age=0.001)
        settled(store)
        store.delete(KEY)
        assert redis_client.pttl(ENTRY) > 1000 * cached_module.LATE

    def test_what_is_kept_for_an_untold_time_is_not_cached(
        self, front: Front, redis_url: str, redis_client: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store = front(redis_url)
        settled(store)
        redis_client.flushdb()
        answer = refused(store, redelivered=True)
        redis_client.flushdb()
        silent = Refusal(answer.verdict, replace(answer.record, retention=0.0))
        monkeypatch.setattr(store.durable, "acquire", lambda claim: silent)
        assert ask(store) == silent
        assert not redis_client.keys()

    def test_the_cache_shares_its_database_with_a_store(self, store: CachedStore, redis_url: str) -> None:
        settled(store)
        neighbour = open_store(redis_url)
        assert isinstance(neighbour.acquire(claim()), Lease)
        assert [record.key for record in neighbour.scan()] == [KEY]
        neighbour.close()


class TestDeleting:
    def test_what_is_deleted_is_not_answered_any_more(self, store: CachedStore, behind: Behind) -> None:
        settled(store)
        assert store.delete(KEY)
        assert behind.get(KEY) is None
        assert isinstance(ask(store), Lease)
        assert not store.delete("another")

    def test_what_was_read_before_it_was_deleted_does_not_come_back(
        self, store: CachedStore, behind: Behind, redis_client: Any
    ) -> None:
        settled(store)
        late = known(behind)
        store.delete(KEY)
        store._outcomes.keep(late, 600)
        assert store._outcomes.find(KEY) is None
        assert 3500 < redis_client.ttl(ENTRY) <= 3600
        assert isinstance(ask(store), Lease)

    def test_a_cache_that_cannot_be_told_is_told_of(self, own_redis: Callable[..., RedisServer], front: Front) -> None:
        server = own_redis()
        store = front(server.url())
        settled(store)
        server.kill()
        for _ in range(2):  # it is asked each time, though it failed a moment ago
            with pytest.raises(StoreUnreachable, match=r"forget .* Nothing was deleted"):
                store.delete(KEY)
        assert store.get(KEY) is not None
        server.start()
        assert store.delete(KEY)

    def test_a_cache_that_goes_away_in_the_middle_is_told_of(
        self, own_redis: Callable[..., RedisServer], front: Front
    ) -> None:
        server = own_redis()

        class Killing(MemoryStore):
            def delete(self, key: str) -> bool:
                server.kill()
                return super().delete(key)

        store = front(server.url(), Killing())
        settled(store)
        with pytest.raises(StoreUnreachable, match=r"deleted behind the cache"):
            store.delete(KEY)
        assert store.get(KEY) is None

    def test_a_full_cache_forgets_all_the_same(self, own_redis: Callable[..., RedisServer], front: Front) -> None:
        server = own_redis(maxmemory_policy="noeviction")
        store = front(server.url())
        settled(store)
        with server.client() as client:
            client.config_set("maxmemory", 1)
        assert store.delete(KEY)
        assert store._outcomes.find(KEY) is None
        assert not store.delete("another")

    def test_a_cache_that_may_not_be_written_is_told_of(
        self, own_redis: Callable[..., RedisServer], front: Front
    ) -> None:
        server = own_redis(min_replicas_to_write=1)
        with pytest.raises(StoreUnreachable, match=r"(?i)replicas"):
            front(server.url()).delete(KEY)


class TestCachesThatFail:
    """Whatever becomes of the cache, the durable store's answers stand."""

    def serves(self, store: CachedStore) -> None:
        """Take one key through a life of its own, and see that it is what it would be without a cache."""
        fresh = f"key-{monotonic()}"
        lease = store.acquire(claim(fresh, task_id="a"))
        assert isinstance(lease, Lease)
        answer = store.acquire(claim(fresh, task_id="b"))
        assert isinstance(answer, Refusal)
        assert answer.verdict is Verdict.CONFLICT
        store.settle(lease, DONE, ttl=60)
        answer = store.acquire(claim(fresh, task_id="b"))
        assert isinstance(answer, Refusal)
        assert (answer.verdict, answer.record.payload) == (Verdict.COMPLETED, DONE.payload)
        assert store.mark_dispatched(fresh, "b")
        assert known(store, fresh).dispatched == {"b"}
        store.ping()

    def test_a_cache_that_was_never_there(self, front: Front) -> None:
        self.serves(front(f"redis://127.0.0.1:{free_port()}/0"))

    def test_a_cache_that_refuses_us(self, own_redis: Callable[..., RedisServer], front: Front) -> None:
        server = own_redis(requirepass="hunter2")
        self.serves(front(f"redis://:wrong@127.0.0.1:{server.port}/0"))

    def test_a_cache_that_is_killed_and_comes_back_empty(
        self,
        own_redis: Callable[..., RedisServer],
        front: Front,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        caplog.set_level(logging.INFO, "celery_idempotent.stores")
        server = own_redis()
        store = front(server.url())
        settled(store)
        server.kill()
        for _ in range(3):
            self.serves(store)
            assert refused(store).record.payload == DONE.payload
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        server.start()
        monkeypatch.setattr(store, "_spared_until", 0.0)
        assert refused(store).record.payload == DONE.payload
        assert "serves again" in caplog.messages[-1]
        assert store._outcomes.find(KEY) is not None

    def test_a_cache_that_hangs_costs_one_timeout_a_second(
        self, own_redis: Callable[..., RedisServer], front: Front, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("tests.stores.test_cached.TIMEOUT", cached_module.TIMEOUT)
        monkeypatch.setattr(cached_module, "PROBE_EVERY", 600.0)
        server = own_redis()
        store = front(server.url())
        server.pause()
        began = monotonic()
        for _ in range(50):
            self.serves(store)
        assert monotonic() - began < 50 * cached_module.TIMEOUT
        server.resume()

    def test_a_cache_that_is_full(self, own_redis: Callable[..., RedisServer], front: Front) -> None:
        server = own_redis(maxmemory_policy="noeviction")
        store = front(server.url())
        with server.client() as client:
            client.config_set("maxmemory", 1)
        self.serves(store)

    def test_a_cache_that_evicts(self, own_redis: Callable[..., RedisServer], front: Front) -> None:
        server = own_redis(maxmemory_policy="allkeys-random")
        store = front(server.url())
        with server.client() as client:
            client.config_set("maxmemory", client.info("memory")["used_memory"] + 100_000)
        payload = b"x" * 20_000
        for number in range(20):
            settled(store, Outcome(State.COMPLETED, payload), key=f"key-{number}")
        answers = [refused(store, key=f"key-{number}") for number in range(20)]
        assert {answer.record.payload for answer in answers} == {payload}

    @pytest.mark.parametrize(
        "garbage",
        [
            {"payload": b"json:43"},
            {"state": "released"},
            {"fence": "many"},
            {"fence": "-1"},
            {"task": b"\xff"},
            {"version": "2"},
            {"checksum": "00000000"},
            {"ended": "yesterday"},
            {"expires": ""},
        ],
        ids=lambda garbage: next(iter(garbage)),
    )
    def test_an_entry_that_is_garbage_is_passed_over(
        self,
        store: CachedStore,
        behind: Behind,
        redis_client: Any,
        garbage: dict[str, Any],
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        settled(store)
        redis_client.hset(ENTRY, mapping=garbage)
        for _ in range(3):
            answer = refused(store)
            assert (answer.verdict, answer.record.payload) == (Verdict.COMPLETED, DONE.payload)
        assert len(caplog.records) <= 1
        assert behind.asked["acquire"] >= 2

    @pytest.mark.parametrize("field", ["version", "state", "fence", "task", "payload", "checksum", "ended", "expires"])
    def test_an_entry_that_lost_a_field_is_passed_over(self, store: CachedStore, redis_client: Any, field: str) -> None:
        settled(store)
        redis_client.hdel(ENTRY, field)
        assert refused(store).record.payload == DONE.payload

    def test_an_entry_that_is_something_else_is_passed_over(self, store: CachedStore, redis_client: Any) -> None:
        redis_client.set(ENTRY, "something else")
        settled(store)
        assert refused(store).record.payload == DONE.payload
        assert redis_client.get(ENTRY) == b"something else"

    def test_an_entry_of_a_state_that_is_none_of_an_outcome_is_garbage(self, store: CachedStore) -> None:
        settled(store)
        record = replace(known(store), state=State.RELEASED)
        fields = fields_of(record)
        with pytest.raises(RecordUnreadable, match="no outcome"):
            outcome_of(KEY, {**by_name(fields), b"ended": b"1", b"expires": b"2"}, 1)

    def test_the_durable_store_being_down_leaves_what_is_cached(
        self, store: CachedStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        settled(store)

        def down(claim: Claim) -> Lease | Refusal:
            raise StoreUnreachable("down")

        monkeypatch.setattr(store.durable, "acquire", down)
        assert refused(store).record.payload == DONE.payload
        with pytest.raises(StoreUnreachable):
            ask(store, key="another")


class TestCommands:
    """What each verb costs the cache."""

    def count(self, server: RedisServer, call: Callable[[], Any]) -> int:
        with server.client() as client:
            client.config_resetstat()
            call()
            found = commands(client)
        return found["cmdstat_evalsha"] + found["cmdstat_eval"]

    def test_a_first_run_costs_a_look_and_a_note_and_a_hit_one_look(
        self, own_redis: Callable[..., RedisServer], front: Front
    ) -> None:
        server = own_redis()
        store = front(server.url())
        settled(store, key="warm")  # the scripts are loaded, the connection is open
        store.mark_dispatched("warm", "a")
        refused(store, key="warm")
        lease = take(store, key="unlooked", redelivered=True)
        assert self.count(server, lambda: take(store)) == 1
        assert self.count(server, lambda: store.renew([lease])) == 0
        assert self.count(server, lambda: store.settle(lease, DONE, ttl=60)) == 1
        assert self.count(server, lambda: refused(store, key=lease.key)) == 1
        assert self.count(server, lambda: refused(store, key=lease.key, redelivered=True)) == 1  # tells the cache
        assert self.count(server, lambda: store.mark_dispatched(lease.key, "b")) == 1
        assert self.count(server, lambda: store.get(lease.key)) == 0
        assert self.count(server, lambda: list(store.scan())) == 0
        assert self.count(server, lambda: store.release(lease, Release(Reason.FAILED))) == 0

    def test_a_task_whose_key_is_its_id_costs_the_cache_nothing(
        self, own_redis: Callable[..., RedisServer], front: Front
    ) -> None:
        """All its duplicates are redeliveries of one message, which the durable store answers."""
        server = own_redis()
        store = front(server.url())
        store.acquire(claim("warm", task_id="x"))
        assert self.count(server, lambda: settled(store, task_id="")) == 0
        assert self.count(server, lambda: refused(store, task_id="")) == 0


class TestUrls:
    def test_a_url_names_both(self, fresh_redis: Callable[[], str]) -> None:
        durable, cache = fresh_redis(), fresh_redis()
        store = open_store(f"cached+{durable}?max_age=90s&cache={cache}")
        assert isinstance(store, CachedStore)
        assert isinstance(store.durable, RedisStore)
        settled(store)
        assert refused(store).verdict is Verdict.COMPLETED
        store.close()

    def test_its_cache_has_short_timeouts(self) -> None:
        store = open_store("cached+redis://one/0?cache=redis://two/1")
        assert isinstance(store, CachedStore)
        options = store._outcomes._redis._client.connection_pool.connection_kwargs
        assert options["socket_timeout"] == options["socket_connect_timeout"] == cached_module.TIMEOUT <= 0.5
        store.close()

    @pytest.mark.parametrize(
        ("url", "durable", "cache", "max_age"),
        [
            ("cached+sqlite:///x.db?cache=redis://h/1", "sqlite:///x.db", "redis://h/1", 3600),
            ("CACHED+redis://h?cache=rediss://:p%2F@h:1/1?a=b&c=d", "redis://h", "rediss://:p%2F@h:1/1?a=b&c=d", 3600),
            ("cached+a://h/b?c=d&max_age=15m&e=f&cache=redis://h", "a://h/b?c=d&e=f", "redis://h", 900),
            ("cached+a://h?max_age=90&cache=redis%3A%2F%2Fh%2F1%3Fa%3Db", "a://h", "redis://h/1?a=b", 90),
            ("cached+a://h?cache=unix:///run/r.sock?db=1", "a://h", "unix:///run/r.sock?db=1", 3600),
        ],
    )
    def test_a_url_is_taken_apart(self, url: str, durable: str, cache: str, max_age: float) -> None:
        parts = CachedUrl.of(url)
        assert (parts.durable, parts.cache, parts.max_age) == (durable, cache, max_age)

    @pytest.mark.parametrize(
        ("url", "hint"),
        [
            ("cached://:hunter2@h?cache=redis://h", "does not begin with cached+"),
            ("cached+redis://:hunter2@h/0", "does not end with cache="),
            ("cached+redis://:hunter2@h/0?cache=", "does not end with cache="),
            ("cached+redis://:hunter2@h/0?cache=h:6379", "does not end with cache="),
            ("cached+redis://:hunter2@h/0?cache=memory://", "does not end with cache="),
            ("cached+redis://h/0?cache=redis://:hunter2@h/1&max_age=5", "write it before"),
            ("cached+redis://h/0?max_age=soon&cache=redis://:hunter2@h/1", "max_age"),
            ("cached+redsi://:hunter2@h/0?cache=redis://h", "redis://"),
            ("cached+cached+redis://:hunter2@h/0?cache=redis://h", "does not end with cache="),
            ("cached+redis://h/0?cache=redis://:hunter2@h/one", "Expected a Redis URL"),
        ],
    )
    def test_a_url_that_cannot_be_meant_says_what_it_should_be_like(self, url: str, hint: str) -> None:
        with pytest.raises(ConfigurationError) as caught:
            open_store(url)
        assert hint in str(caught.value).replace("\n", " ")
        assert "hunter2" not in str(caught.value)

    def test_whoever_reaches_the_durable_store_by_whatever_name_meets_the_same_outcomes(
        self, fresh_redis: Callable[[], str]
    ) -> None:
        """Else what is deleted through one name would go on being answered through another."""
        durable, cache = fresh_redis(), fresh_redis()
        urls = [durable, durable.replace("127.0.0.1", "localhost")]
        one, other = (open_store(f"cached+{url}?cache={cache}") for url in urls)
        assert isinstance(one, CachedStore)
        assert isinstance(other, CachedStore)
        settled(one)
        assert refused(other).verdict is Verdict.COMPLETED
        assert one.delete(KEY)
        assert isinstance(ask(other), Lease)
        for store in (one, other):
            store.close()

    def test_only_a_redis_can_be_the_cache(self) -> None:
        with pytest.raises(ConfigurationError, match="RedisStore"):
            CachedStore(MemoryStore(), MemoryStore())  # type: ignore[arg-type]


def test_settling_within_a_transaction_tells_the_cache_nothing(front: Front, redis_url: str, redis_client: Any) -> None:
    """Who knows whether it commits."""

    class Within(Behind):
        def settle_within(self, lease: Lease, outcome: Outcome, *, ttl: float, using: Any) -> None:
            self.settle(lease, outcome, ttl=ttl)

    store = front(redis_url, Within())
    store.settle_within(take(store), DONE, ttl=60, using=object())
    assert not redis_client.keys()
    assert refused(store).verdict is Verdict.COMPLETED
    assert redis_client.exists(ENTRY)


def test_what_the_operators_of_a_store_do_is_done_behind_the_cache(store: CachedStore, behind: Behind) -> None:
    settled(store)
    assert [record.key for record in store.scan(prefix=KEY, state=State.COMPLETED)] == [KEY]
    assert store.pending_schema() == ""
    store.apply_schema()
    behind.offset += 601
    assert store.purge(1) == 1


def test_leases_are_renewed_apart_where_the_durable_store_has_parts(front: Front, redis_url: str) -> None:
    class Parted(Behind):
        def shard(self, key: str) -> str:
            return f"node of {key}"

    assert front(redis_url, Parted()).shard(KEY) == f"node of {KEY}"
