"""How many connections the threads of a process need, and what becomes of them."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any
from urllib.parse import urlsplit
from weakref import ref

import pytest
import redis

from celery_idempotent.errors import StoreUnreachable
from celery_idempotent.stores import pool as pool_module
from celery_idempotent.stores.redis import RedisStore
from celery_idempotent.stores.redis.connections import _after_fork
from tests.support.forks import served_after_fork
from tests.support.proxy import Proxy
from tests.support.servers import RedisServer
from tests.support.stores.benches import take
from tests.support.stores.interruptions import HalfMade, Interrupted, Interruption
from tests.support.waiting import wait_until

NAME = "connections-under-test"


@pytest.fixture
def store(redis_url: str) -> Iterator[RedisStore]:
    store = RedisStore.from_url(redis_url, client_name=NAME, socket_timeout=40)
    yield store
    store.close()


def connected(client: redis.Redis) -> int:
    return sum(each["name"] == NAME for each in client.client_list())


def waiting(client: redis.Redis) -> int:
    return sum(each["name"] == NAME and "b" in each["flags"] for each in client.client_list())


def block(store: RedisStore, client: redis.Redis, count: int) -> None:
    """Let so many threads wait for a reply at the same time."""

    def pop() -> object:
        return store._connections.execute("BLPOP", "list", 30)

    with ThreadPoolExecutor(count) as threads:
        answers = [threads.submit(pop) for _ in range(count)]
        try:
            wait_until(lambda: waiting(client) == count or any(answer.done() for answer in answers))
        finally:
            client.rpush("list", *range(count))
        for answer in answers:
            assert answer.result()


def test_threads_that_ask_one_after_another_share_one_connection(store: RedisStore, redis_client: redis.Redis) -> None:
    """A connection each would be more than redis-py gives out: 150 idle threads kept the next from its store."""
    end = threading.Event()
    asked: list[object] = []

    def ask_once(done: threading.Event) -> None:
        asked.append(store.get("key"))
        done.set()
        end.wait(60)

    threads: list[threading.Thread] = []
    try:
        for _ in range(150):
            done = threading.Event()
            threads.append(threading.Thread(target=ask_once, args=(done,)))
            threads[-1].start()
            assert done.wait(15)
        assert connected(redis_client) == 1
    finally:
        end.set()
        for thread in threads:
            thread.join()
    assert asked == [None] * 150


def test_a_store_that_nothing_uses_any_more_is_gone_at_once(redis_url: str) -> None:
    """In a cycle, its connections would wait for the collector, which may run when others are using them again."""
    store = RedisStore.from_url(redis_url)
    take(store)
    connections = ref(store._connections)
    gc.collect()  # redis-py 5.0.0 leaves an error, and what it came through, in a cycle
    gc.disable()
    try:
        del store
        assert connections() is None
    finally:
        gc.enable()


def test_calls_at_the_same_time_have_a_connection_each_and_give_it_back(
    store: RedisStore, redis_client: redis.Redis
) -> None:
    for _ in range(2):
        block(store, redis_client, 4)
    assert connected(redis_client) == 4


def test_a_script_that_the_server_forgot_is_sent_again_on_the_same_connection(
    store: RedisStore, redis_client: redis.Redis
) -> None:
    """Behind sentinels of which none is up there is no other connection."""

    def connections() -> set[str]:
        return {each["id"] for each in redis_client.client_list() if each["name"] == NAME}

    lease = take(store)
    before = connections()
    redis_client.script_flush()
    assert store.renew([lease]) == []
    assert connections() == before


def test_one_connection_that_the_server_has_closed_tells_of_the_others(
    store: RedisStore, redis_client: redis.Redis
) -> None:
    """A verb is asked again once; another thread's closed connection must not be what it is then given."""
    block(store, redis_client, 4)
    for each in redis_client.client_list():
        if each["name"] == NAME:
            redis_client.client_kill_filter(_id=each["id"])
    with pytest.raises(redis.ConnectionError):
        store._connections.execute("PING")
    block(store, redis_client, 4)


def test_a_connection_that_was_idle_for_an_hour_is_replaced(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A NAT may have forgotten it, and swallows what comes: a healthy store would seem to be down for each of them."""
    where = urlsplit(redis_url)
    with Proxy(where.port or 6379) as nat, closing(RedisStore.from_url(nat.url(int(where.path[1:])))) as store:
        lease = take(store)
        assert store.renew([lease]) == []
        assert nat.accepted == 1
        nat.forget()
        monkeypatch.setattr(pool_module, "monotonic", lambda: time.monotonic() + 3600)
        assert store.renew([lease]) == []
        assert nat.dropped == 0


def test_who_finds_all_connections_in_use_waits_for_one_and_a_renewal_comes_first(
    store: RedisStore, redis_client: redis.Redis
) -> None:
    """Else a heartbeat waits behind hundreds of threads, and loses its lease beside a living holder."""
    lease = take(store)
    connections = store._connections
    connections._pool.most = 2
    with ThreadPoolExecutor(4) as threads:
        first = [threads.submit(connections.execute, "BLPOP", "list", 30) for _ in range(2)]
        try:
            wait_until(lambda: waiting(redis_client) == 2)
            second = threads.submit(connections.execute, "BLPOP", "list", 30)
            wait_until(lambda: len(connections._pool.line) == 1)
            renewed = threads.submit(store.renew, [lease])
            wait_until(lambda: len(connections._pool.line) == 2)
            assert connected(redis_client) == 2
            redis_client.rpush("list", 1)
            assert renewed.result(timeout=15) == []
            assert not second.done()
        finally:
            redis_client.rpush("list", 2, 3)
        assert all(each.result() for each in (*first, second))
    assert connected(redis_client) == 2


@pytest.mark.parametrize(("limit", "most", "at_most"), [(3, 3, 3), (40, 32, 40), (100, 32, 64)])
def test_a_limit_of_the_clients_pool_is_kept(redis_url: str, limit: int, most: int, at_most: int) -> None:
    store = RedisStore.from_url(f"{redis_url}?max_connections={limit}")
    pool = store._connections._pool
    assert (pool.most, pool.limit) == (most, at_most)
    store.close()


@pytest.mark.nightly
def test_calls_that_wait_for_a_server_that_hangs_fail_together(redis_url: str) -> None:
    """One after another, the last of them would wait for half a minute."""
    address = urlsplit(redis_url)
    with Proxy(address.port or 6379) as proxy:
        store = RedisStore.from_url(f"{proxy.url(int(address.path[1:]))}?max_connections=2&socket_timeout=2")
        take(store)
        proxy.drop()

        def fail(number: int) -> None:
            with pytest.raises(StoreUnreachable, match="Timeout"):
                take(store, f"key-{number}")

        begun = time.monotonic()
        with ThreadPoolExecutor(60) as crowd:
            assert len(list(crowd.map(fail, range(60)))) == 60
        assert time.monotonic() - begun < 15  # of what takes 4, on a machine that is busy with other things
        store.close()


def test_a_child_that_is_forked_while_a_thread_opens_a_connection_reaches_the_store(store: RedisStore) -> None:
    """The main process of a worker forks a new child for one that died, while a thread releases that one's lease."""
    store.ping()
    assert served_after_fork(store, store._connections._client.connection_pool._lock)


@pytest.mark.parametrize("kind", [Interrupted, HalfMade])
def test_a_connection_whose_opening_was_interrupted_starts_anew(
    kind: type[redis.Connection], own_redis: Callable[..., RedisServer]
) -> None:
    """redis-py keeps it as it is: it fails for ever, or gives every command the reply to the one before."""
    with Proxy(own_redis().port) as proxy, ThreadPoolExecutor(1) as thread:
        options: dict[str, Any] = {"host": "127.0.0.1", "port": proxy.port, "socket_timeout": 40}
        store = RedisStore(redis.Redis(connection_pool=redis.ConnectionPool(connection_class=kind, **options)))
        connections = store._connections
        try:
            proxy.partition()
            with pytest.raises(Interruption):
                connections.execute("ECHO", "interrupted")
            first = thread.submit(connections.execute, "ECHO", "first")
            wait_until(lambda: first.done() or proxy.accepted == 2 or len(connections._pool.made) == 1)
            proxy.heal()
            assert first.result(timeout=15) == b"first"
            assert connections.execute("ECHO", "second") == b"second"
        finally:
            proxy.heal()
            store.close()


@pytest.mark.parametrize("forked", [False, True])
def test_a_client_that_is_collected_while_its_thread_is_within_the_pool_stops_nobody(
    redis_store: RedisStore, *, forked: bool
) -> None:
    """The collector runs when it likes, and a client's end is to give its connection back to the pool."""
    pool = redis_store._client.connection_pool
    if forked:
        pool.pid = 0
        _after_fork(pool)
    forgotten = [redis_store._client.client()]

    def collected() -> None:
        with pool._lock:
            forgotten.clear()
            gc.collect()

    thread = threading.Thread(target=collected, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()
    redis_store.ping()


SPELLING = """
import gc, signal, sys
from celery_idempotent.stores import open_store

class Interruption(Exception):
    pass

def interrupt(*_):
    raise Interruption

store = open_store(sys.argv[1])
connection = store._client.connection_pool.make_connection()
gc.disable()  # a destructor swallows what is raised in it
signal.signal(signal.SIGALRM, interrupt)
for _ in range(500):
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.0002)
        for _ in range(2000):  # an interruption that falls into a tracer is swallowed there
            connection.pack_command("EVALSHA", "digest", 1, "key", 60000, 1.5)
    except Interruption:
        pass
"""


@pytest.mark.parametrize("url", ["redis://localhost", "redis+sentinel://localhost/orders"])
def test_a_soft_time_limit_while_a_command_is_spelled_ends_no_process(url: str) -> None:
    """hiredis crashes where the handler of a signal raises while it spells a number."""
    # Not measured: that takes longer than the timer, so that no command is ever spelled to its end.
    env = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE")}
    subprocess.run([sys.executable, "-c", SPELLING, url], env=env, check=True, timeout=60)


NO_MORE_FILES = """
import os, resource, sys
from contextlib import suppress
from celery_idempotent.stores import Claim, Reason, Release, open_store

store = open_store(sys.argv[1])
lease = store.acquire(Claim("idem:a", "me", lease_ttl=60.0, keep_ttl=60.0))
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
with suppress(OSError):
    while True:
        os.dup(0)
print(store.renew([lease]), store.release(lease, Release(Reason.FAILED)))
"""


def test_a_process_that_can_open_no_more_files_renews_and_releases(store_url: str) -> None:
    """As one does that has too many connections. And the files may by now be those of another version."""
    command = [sys.executable, "-c", NO_MORE_FILES, store_url]
    said = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (said.stdout.strip(), said.stderr) == ("[] True", "")
