"""A store behind sentinels: who they name is asked, also when that becomes another server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from time import monotonic
from typing import Any

import pytest
import redis
import redis.sentinel

from celery_idempotent.errors import StoreError, StoreRefused, StoreUnreachable
from celery_idempotent.stores import Lease, Reason, Release, State, Store
from celery_idempotent.stores.redis import RedisStore, SentinelStore
from celery_idempotent.stores.redis.store import store_like
from tests.conftest import missing
from tests.support.proxy import Proxy
from tests.support.sentinel import NAME, Failover, Watch
from tests.support.servers import RedisServer, ServerMissing, free_port, open_client
from tests.support.stores.benches import DONE, KEY, VERBS, claim, known, take, verb
from tests.support.stores.interruptions import HalfMade, Interrupted, Interruption
from tests.support.stores.kinds import age_redis
from tests.support.stores.server_contract import ServerContract
from tests.support.waiting import wait_until

Start = Callable[..., RedisServer]
OpenSentinel = Callable[..., SentinelStore]
SECRET, THEIRS = "hunter2", "correct-horse"
#: Longest time that a call may take, in seconds, on a machine that is busy.
FEW = 15.0


@pytest.fixture
def opened_sentinel() -> Iterator[OpenSentinel]:
    """A function that opens a store behind sentinels."""
    stores: list[SentinelStore] = []

    def open_one(url: str, **options: Any) -> SentinelStore:
        stores.append(SentinelStore.from_url(url, **options))
        return stores[-1]

    yield open_one
    for store in stores:
        store.close()


class Watched:
    """A server, a proxy before it, and a sentinel that knows it by the proxy's address."""

    def __init__(self, server: RedisServer, proxy: Proxy, watch: Watch) -> None:
        self.server, self.proxy, self.watch = server, proxy, watch

    def url(self, query: str = "", *, db: int = 0) -> str:
        return f"redis+sentinel://127.0.0.1:{self.watch.port}/{NAME}/{db}{query and '?' + query}"


@pytest.fixture(scope="module")
def shared() -> Iterator[Watched]:
    with ExitStack() as stack:
        try:
            server = stack.enter_context(RedisServer())
        except ServerMissing as error:
            raise missing(error) from None
        proxy = stack.enter_context(Proxy(server.port))
        yield Watched(server, proxy, stack.enter_context(Watch({NAME: proxy.port})))


@pytest.fixture
def watched(shared: Watched) -> Iterator[Watched]:
    with shared.server.client() as client:
        client.flushall()
    yield shared
    shared.proxy.heal()


class TestTheServerThatTheyName:
    @pytest.mark.parametrize("kind", [Interrupted, HalfMade])
    def test_a_sentinel_whose_greeting_was_interrupted_is_asked_anew(
        self, watched: Watched, opened_sentinel: OpenSentinel, kind: type[redis.Connection]
    ) -> None:
        """A soft time limit comes wherever it comes, and redis-py keeps the connection as it was."""
        store = opened_sentinel(watched.url())
        [sentinel] = store._client.connection_pool.sentinel_manager.sentinels
        sentinel.connection_pool.connection_class = kind
        with pytest.raises(Interruption):
            store.ping()
        lease = take(store)
        assert store.renew([lease]) == []

    def test_it_is_the_store(self, watched: Watched, opened_sentinel: OpenSentinel) -> None:
        store = opened_sentinel(watched.url(db=3))
        lease = take(store)
        for name in VERBS:
            verb(store, name, lease)()
        store.settle(take(store), DONE, ttl=60)
        with watched.server.client(3) as client:
            assert client.hget(KEY, "state") == b"completed"
        assert [record.key for record in store.scan()] == [KEY]

    @pytest.mark.parametrize("protocol", [2, 3])
    def test_both_protocols_will_do(self, watched: Watched, opened_sentinel: OpenSentinel, protocol: int) -> None:
        store = opened_sentinel(watched.url(f"protocol={protocol}"))
        lease = take(store)
        assert store.renew([lease]) == []

    def test_sentinels_that_are_down_are_passed_by(self, watched: Watched, opened_sentinel: OpenSentinel) -> None:
        up = watched.watch.port
        url = watched.url().replace(f":{up}/", f":{free_port()},127.0.0.1:{free_port()},127.0.0.1:{up}/")
        store = opened_sentinel(url)
        assert take(store).fence > 0
        sentinels: Any = store._client.connection_pool
        first = sentinels.sentinel_manager.sentinels[0]
        assert first.connection_pool.connection_kwargs["port"] == up  # asked first from now on

    def test_while_no_sentinel_is_up_the_connections_that_are_open_serve(
        self, watched: Watched, opened_sentinel: OpenSentinel
    ) -> None:
        with Watch({NAME: watched.proxy.port}) as watch:
            store = opened_sentinel(f"redis+sentinel://127.0.0.1:{watch.port}/{NAME}")
            lease = take(store)
        assert store.renew([lease]) == []
        watched.proxy.reset()
        began = monotonic()
        with pytest.raises(StoreUnreachable, match="no sentinel names a primary of 'orders'"):
            store.renew([lease])
        assert monotonic() - began < FEW

    def test_a_service_that_they_do_not_watch_is_said_with_those_they_do(
        self, watched: Watched, opened_sentinel: OpenSentinel
    ) -> None:
        store = opened_sentinel(watched.url().replace(NAME, "order"))
        for name in VERBS:
            with pytest.raises(StoreUnreachable, match=f"'order' .*a sentinel watches {NAME}"):
                verb(store, name)()

    def test_a_server_that_they_take_for_dead_is_unreachable(
        self, own_redis: Start, opened_sentinel: OpenSentinel
    ) -> None:
        server = own_redis()
        with Watch({NAME: server.port}, f"sentinel down-after-milliseconds {NAME} 200") as watch:
            store = opened_sentinel(f"redis+sentinel://127.0.0.1:{watch.port}/{NAME}")
            lease = take(store)
            server.kill()

            def why() -> str:
                with pytest.raises(StoreUnreachable) as caught:
                    store.renew([lease])
                return str(caught.value)

            wait_until(lambda: "it is down" in why(), 30, "the sentinel to take it for dead")
            server.start()
            wait_until(lambda: renewed(store, lease), 30, "the sentinel to see it again")


def renewed(store: Store, *leases: Lease) -> bool:
    try:
        assert store.renew(leases) == []
    except StoreUnreachable:
        return False
    return True


class TestCredentials:
    @pytest.fixture
    def guarded(self, own_redis: Start) -> Iterator[Watch]:
        """A sentinel and a server, each with a password of its own."""
        server = own_redis(requirepass=SECRET)
        with Watch({NAME: server.port}, f"sentinel auth-pass {NAME} {SECRET}", f"requirepass {THEIRS}") as watch:
            yield watch

    def test_each_gets_its_own(self, guarded: Watch, opened_sentinel: OpenSentinel) -> None:
        url = f"redis+sentinel://:{SECRET}@127.0.0.1:{guarded.port}/{NAME}?sentinel_password={THEIRS}"
        assert take(opened_sentinel(url)).fence > 0

    @pytest.mark.parametrize(
        ("credentials", "query"),
        [
            (f":{SECRET}@", ""),
            (f":{SECRET}@", "?sentinel_password=wrong"),
            ("", f"?sentinel_password={THEIRS}"),
            (":wrong@", f"?sentinel_password={THEIRS}"),
        ],
    )
    def test_a_wrong_one_is_refused(
        self, guarded: Watch, opened_sentinel: OpenSentinel, credentials: str, query: str
    ) -> None:
        store = opened_sentinel(f"redis+sentinel://{credentials}127.0.0.1:{guarded.port}/{NAME}{query}")
        for _ in range(2):
            with pytest.raises(StoreRefused, match="Check the password") as caught:
                take(store)
            assert SECRET not in str(caught.value)
            assert THEIRS not in str(caught.value)


class TestLostReplies:
    @pytest.fixture
    def store(self, watched: Watched, opened_sentinel: OpenSentinel) -> SentinelStore:
        store = opened_sentinel(watched.url("socket_timeout=0.5"))
        store.ping()
        return store

    def lose(self, watched: Watched, call: Callable[[], Any], *, hang: bool) -> Any:
        before = watched.proxy.swallowed
        watched.proxy.swallow_reply(matching=b"EVALSHA", hang=hang)
        try:
            answer = call()
        except StoreUnreachable:
            assert hang
            answer = call()
        assert watched.proxy.swallowed == before + 1
        return answer

    @pytest.mark.parametrize("hang", [False, True])
    def test_what_is_asked_again_is_no_refusal(self, watched: Watched, store: SentinelStore, *, hang: bool) -> None:
        asked = claim()
        lease = self.lose(watched, lambda: store.acquire(asked), hang=hang)
        assert isinstance(lease, Lease)
        assert self.lose(watched, lambda: store.renew([lease]), hang=hang) == []
        assert self.lose(watched, lambda: store.release(lease, Release(Reason.CRASHED)), hang=hang) is True
        assert known(store).crashes == 1
        again = take(store)
        self.lose(watched, lambda: store.settle(again, DONE, ttl=60), hang=hang)
        assert known(store).payload == DONE.payload


@pytest.fixture
def failover() -> Iterator[Failover]:
    try:
        servers = Failover()
    except ServerMissing as error:
        raise missing(error) from None
    with servers:
        yield servers


@pytest.mark.thorough
def test_a_store_follows_a_failover(failover: Failover, opened_sentinel: OpenSentinel) -> None:
    url = f"redis+sentinel://127.0.0.1:{failover.port}/{NAME}"
    store, after = opened_sentinel(url), opened_sentinel(f"{url}?wait_replicas=1")
    both = opened_sentinel(f"{url}?wait_replicas=2")
    held, done = take(store, "held"), take(store, "done")
    store.settle(done, DONE, ttl=600)
    wait_until(lambda: renewed(both, held), 60, "both replicas to have it")
    failover.kill_main()
    slowest = 0.0
    while failover.main_address()[1] == failover.main.port:
        began = monotonic()
        with pytest.raises(StoreUnreachable):
            store.renew([held])
        slowest = max(slowest, monotonic() - began)
    failover.wait_for_promotion()
    assert slowest < FEW
    wait_until(lambda: renewed(after, held), 60, "the new primary to be asked")
    assert known(after, "done").payload == DONE.payload
    with pytest.raises(StoreUnreachable, match="wait_replicas=2 needs 2, and 1 confirmed"):
        both.renew([held])
    after.settle(held, DONE, ttl=600)
    assert known(store, "held").state is State.COMPLETED


@pytest.mark.nightly
@pytest.mark.thorough
def test_a_primary_that_was_demoted_is_not_asked_any_more(failover: Failover, opened_sentinel: OpenSentinel) -> None:
    """It lives on, with connections of ours, and would serve reads."""
    store = opened_sentinel(f"redis+sentinel://127.0.0.1:{failover.port}/{NAME}")
    held = take(store)
    before = failover.main_address()
    wait_until(lambda: ordered(failover.port), 60, "the sentinel to know of a replica that it can promote")
    wait_until(lambda: failover.main_address() != before, 60, "another server to be named")
    with failover.main.client() as client:  # until then there are two primaries, and what the old one takes is lost
        wait_until(lambda: role(client) == "slave", 60, "the old primary to be demoted")
    wait_until(lambda: renewed(store, held), 60, "the new primary to be asked")
    failures: list[StoreError] = []
    try:
        store.settle(held, DONE, ttl=60)
    except StoreError as error:
        failures.append(error)
    assert failures == []
    with open_client(f"redis://127.0.0.1:{failover.main_address()[1]}") as client:
        assert client.hget(KEY, "state") == b"completed"


def role(client: redis.Redis) -> str:
    try:
        return str(client.info("replication")["role"])
    except redis.ConnectionError:  # a sentinel closes the connections of who it demotes
        return ""


def ordered(port: int) -> bool:
    """Order a failover, and tell whether the sentinel will do it."""
    with open_client(f"redis://127.0.0.1:{port}") as client:
        try:
            client.execute_command("SENTINEL FAILOVER", NAME)
        except redis.ResponseError:
            return False
    return True


@pytest.mark.soak
class TestTheContract(ServerContract):
    @pytest.fixture
    def store(self, watched: Watched, opened_sentinel: OpenSentinel) -> Store:
        return opened_sentinel(watched.url())

    def age(self, store: Store, key: str, seconds: float) -> None:
        age_redis(store, key, seconds)  # type: ignore[arg-type]


def test_a_client_behind_sentinels_keeps_its_connections_for_itself(shared: Watched) -> None:
    sentinel = redis.sentinel.Sentinel([("127.0.0.1", shared.watch.port)])
    with sentinel.master_for(NAME, db=7) as client:
        store = RedisStore(client)
        take(store)
        assert [len(each.connection_pool._available_connections) for each in (client, *sentinel.sentinels)] == [0, 0]
        store.close()
        assert client.delete(KEY)
    client.connection_pool.disconnect()
    for each in sentinel.sentinels:
        each.close()


def test_a_client_behind_sentinels_is_followed_to_its_server_and_database(shared: Watched) -> None:
    """As RQ's own connection may be."""
    sentinel = redis.sentinel.Sentinel([("127.0.0.1", shared.watch.port)])
    client = sentinel.master_for(NAME, db=7)
    store = store_like(client)
    try:
        assert isinstance(store.acquire(claim()), Lease)
        assert client.hget(KEY, "state") == b"in_progress"
    finally:
        client.delete(KEY)
        store.close()
        client.close()
        for each in sentinel.sentinels:
            each.close()
