"""The gauntlet: threads, forks, subclasses, and a store that goes away in the middle."""

from __future__ import annotations

import logging
import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
from celery import Celery

from celery_idempotent import IdempotentTask
from celery_idempotent.stores import State
from celery_idempotent.stores.redis import RedisStore
from tests.gauntlet.conftest import key_of
from tests.support.proxy import Proxy
from tests.support.servers import RedisServer, open_client
from tests.support.stores.benches import known, take
from tests.support.waiting import wait_until

#: Seconds after which a child that hangs is killed.
CHILD_SECONDS = 40


@pytest.mark.fault(7)
def test_a_connection_that_breaks_while_a_lease_is_renewed_ends_neither_the_renewals_nor_the_task(
    declare: Callable[..., Any],
    own_redis: Callable[..., RedisServer],
    proxied: Callable[[int], Proxy],
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = own_redis()
    proxy = proxied(server.port)

    def charge(self: Any, order_id: str) -> str:
        with server.client() as client:
            before = client.hget(self.lease.key, "lease_end")
            proxy.refuse()
            proxy.reset()
            wait_until(lambda: "could not be renewed" in caplog.text, message="a renewal to fail")
            proxy.heal()
            wait_until(lambda: client.hget(self.lease.key, "lease_end") != before, message="a renewal")
        self.lease.check()
        return f"charged {order_id}"

    with caplog.at_level(logging.WARNING, "celery_idempotent"):
        task = declare(charge, store=RedisStore.from_url(proxy.url()), lease_ttl=1.5)
        assert task.apply(("A",)).get() == "charged A"


@contextmanager
def held_by_another_thread(lock: Any) -> Iterator[None]:
    """Have a thread hold a lock meanwhile; a child that is forked has the lock, and not the thread."""
    parent, held, done = os.getpid(), threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            done.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    yield
    if os.getpid() == parent:
        done.set()
        thread.join()


@pytest.mark.fault(8)
def test_a_child_uses_neither_the_thread_nor_the_connection_of_its_parent(
    declare: Callable[..., Any], store: RedisStore, store_url: str
) -> None:
    children: list[int] = []

    def charge(self: Any, order_id: str) -> str:
        if order_id == "parent":  # whose lease a thread renews, which has the heartbeat's lock at times
            with held_by_another_thread(task._binding.guard.heartbeat._lock):
                children.append(fork())
            if children == [0]:
                say_and_end(in_child, writing)
        else:
            with open_client(store_url) as client:
                before = client.hget(self.lease.key, "lease_end")
                wait_until(lambda: client.hget(self.lease.key, "lease_end") != before, message="a renewal by the child")
        return f"charged {order_id}"

    def in_child() -> bytes:
        os.write(writing, b"%d\n" % store._command("CLIENT", "ID"))
        taken = [take(store, f"child-{number}").key for number in range(50)]
        assert taken == [known(store, key).key for key in taken]
        return str(task.apply(("child",)).get()).encode()

    task = declare(charge, lease_ttl=1.5)
    lease = take(store, "parents", owner="the parent")
    connection = store._command("CLIENT", "ID")
    reading, writing = os.pipe()
    task.apply(("parent",)).get()
    [child] = children
    os.close(writing)
    with open(reading, "rb") as pipe:
        try:
            assert int(pipe.readline()) != connection
            for _ in range(50):
                assert store.renew([lease]) == []
                assert known(store, "parents").owner == "the parent"
            said = pipe.read()
        finally:
            os.waitpid(child, 0)
    assert said == b"charged child"


def fork() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking while other threads run
        return os.fork()


def say_and_end(work: Callable[[], bytes], writing: int) -> None:
    """End this process, which is a copy of pytest and must not go on as one."""
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(CHILD_SECONDS)
        os.write(writing, work())
    except BaseException as error:  # noqa: BLE001 - see above
        os.write(writing, repr(error).encode())
    finally:
        os._exit(0)


@pytest.mark.fault(12)
def test_calls_within_calls_and_in_other_threads_settle_their_own_operation(
    declare: Callable[..., Any], store: RedisStore
) -> None:
    together = threading.Barrier(2)
    keys: list[tuple[str, str]] = []

    def charge(self: Any, order_id: str) -> str:
        if order_id == "outer":
            self.apply(("inner",)).get()
        if order_id.startswith("thread"):
            together.wait(20)
            together.wait(20)
        keys.append((order_id, self.lease.key))
        return f"charged {order_id}"

    task = declare(charge)
    task.apply(("outer",)).get()
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda name: task.apply((name,)).get(), ["thread-1", "thread-2"]))
    names = ["outer", "inner", "thread-1", "thread-2"]
    assert sorted(keys) == sorted((name, key_of(name)) for name in names)
    for name in names:
        record = known(store, key_of(name))
        assert (record.state, record.payload) == (State.COMPLETED, f'json:"charged {name}"'.encode())


@pytest.mark.fault(18)
def test_the_users_exception_is_not_hidden_by_a_store_that_is_gone(
    declare: Callable[..., Any], own_redis: Callable[..., RedisServer]
) -> None:
    server = own_redis()

    def charge(self: Any, order_id: str) -> None:
        server.kill()
        raise ValueError(f"no {order_id}")

    with pytest.raises(ValueError, match="no A"):
        declare(charge, store=RedisStore.from_url(server.url())).apply(("A",)).get()


def in_context(self: Any, *args: Any, **kwargs: Any) -> Any:
    """What Flask's documentation has a task's `__call__` do, but for the context."""
    return self.run(*args, **kwargs)


class ContextTask(IdempotentTask):
    abstract = True
    __call__ = in_context


class Selfish:
    """A mixin that does the same, and lets no other class know of its subclasses."""

    def __init_subclass__(cls, **_: Any) -> None:
        pass

    __call__ = in_context


class MixedTask(Selfish, IdempotentTask):
    abstract = True


@pytest.mark.fault(25)
@pytest.mark.parametrize("base", [ContextTask, MixedTask, IdempotentTask], ids=["subclass", "mixin", "annotation"])
def test_whatever_replaces_call_does_not_remove_the_guard(declare: Callable[..., Any], app: Celery, base: type) -> None:
    runs: list[str] = []
    if base is IdempotentTask:
        app.conf.task_annotations = {"charge": {"__call__": in_context}}

    def charge(self: Any, order_id: str) -> str:
        runs.append(order_id)
        return f"charged {order_id}"

    task = declare(charge, base=base)
    assert [task.apply(("A",)).get() for _ in range(2)] == ["charged A"] * 2
    assert runs == ["A"]
