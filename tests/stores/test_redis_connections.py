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
from typing import Any

import pytest
import redis

from celery_idempotent.stores.redis import RedisStore
from celery_idempotent.stores.redis.connections import LONGEST, LOOK_EVERY, PATIENCE, _after_fork
from tests.support.forks import served_after_fork
from tests.support.proxy import Proxy
from tests.support.servers import RedisServer
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


def test_calls_at_the_same_time_have_a_connection_each_and_give_it_back(
    store: RedisStore, redis_client: redis.Redis
) -> None:
    for _ in range(2):
        block(store, redis_client, 4)
    assert connected(redis_client) == 4


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


class Opening:
    """A lock that tells when somebody comes to it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.reached = threading.Event()
        self.release = self.lock.release

    def acquire(self, timeout: float) -> bool:
        self.reached.set()
        return self.lock.acquire(timeout=15 * timeout)


def test_who_waits_while_another_opens_a_connection_takes_one_that_was_given_back(
    store: RedisStore, redis_client: redis.Redis
) -> None:
    store.ping()
    connections = store._connections
    opening = connections._opening = Opening()  # type: ignore[assignment]
    with ThreadPoolExecutor(1) as thread:
        with opening.lock:
            given_back = connections._idle.pop()
            answer = thread.submit(store.get, "key")
            assert opening.reached.wait(15)
            connections._idle.append(given_back)
        assert answer.result(timeout=15) is None
    assert connected(redis_client) == 1


def test_who_opens_a_connection_does_not_keep_others_from_their_leases(
    store: RedisStore, redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("celery_idempotent.stores.redis.connections.PATIENCE", 0.01)
    with store._connections._opening:
        assert store.get("key") is None
    assert connected(redis_client) == 1


def test_who_finds_all_connections_in_use_waits_for_one(store: RedisStore, redis_client: redis.Redis) -> None:
    connections = store._connections
    connections._most = 2
    opening = connections._opening = Opening()  # type: ignore[assignment]
    with ThreadPoolExecutor(3) as threads:
        first = [threads.submit(connections.execute, "BLPOP", "list", 30) for _ in range(2)]
        try:
            wait_until(lambda: waiting(redis_client) == 2)
            opening.reached.clear()
            third = threads.submit(store.get, "key")
            assert opening.reached.wait(15)
            assert connected(redis_client) == 2
        finally:
            redis_client.rpush("list", 1, 2)
        assert third.result(timeout=15) is None
        assert all(each.result() for each in first)
    assert connected(redis_client) == 2


def test_many_that_have_waited_too_long_open_no_more_than_twice_as_many(
    store: RedisStore, redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine a hundred greenlets that settle together take seconds, and had opened one each."""
    now = [0.0]
    monkeypatch.setattr("celery_idempotent.stores.redis.connections.monotonic", lambda: now[0])
    connections = store._connections
    connections._most = 1

    def pop() -> object:
        return connections.execute("BLPOP", "list", 30)

    with ThreadPoolExecutor(4) as threads:
        try:
            answers = [threads.submit(pop)]
            wait_until(lambda: waiting(redis_client) == 1)
            answers += [threads.submit(pop) for _ in range(3)]
            wait_until(connections._opening.locked)
            now[0] = PATIENCE
            wait_until(lambda: waiting(redis_client) == 2)
            time.sleep(20 * LOOK_EVERY)
            assert connected(redis_client) == 2
            now[0] += LONGEST  # of those too that came late to it
            wait_until(lambda: waiting(redis_client) == 4)
        finally:
            redis_client.rpush("list", *range(4))
    assert all(answer.result() for answer in answers)


def test_a_limit_of_the_clients_pool_is_kept(redis_url: str) -> None:
    store = RedisStore.from_url(redis_url + "?max_connections=3")
    assert store._connections._most == 3
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
            wait_until(lambda: first.done() or proxy.accepted == 2 or len(connections._opened) == 1)
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
