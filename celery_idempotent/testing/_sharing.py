"""Facts: one store, used from threads and after a fork."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import BinaryIO

import pytest

from ..records import Lease, Outcome, State
from ..stores.base import Store
from ._asking import DONE, KEY, RESULT, Ages, claim, known, refused, take

CHILD_SECONDS = 30


class SharingFacts(Ages):
    """Promise 7."""

    def test_threads_share_a_store(self, store: Store) -> None:
        def work(number: int) -> bytes:
            payloads = b""
            for turn in range(10):
                key = f"{KEY}-{number}-{turn}"
                lease = take(store, key)
                assert store.renew([lease]) == []
                store.settle(lease, Outcome(State.COMPLETED, key.encode()), ttl=RESULT)
                _, record = refused(store, key)
                assert record.payload == key.encode()
                payloads += known(store, key).payload
            return payloads

        with ThreadPoolExecutor(8) as threads:
            answers = list(threads.map(work, range(8)))
        assert answers == [b"".join(f"{KEY}-{number}-{turn}".encode() for turn in range(10)) for number in range(8)]

    def test_threads_come_and_go(self, store: Store) -> None:
        """More than a store has connections; each gives back what it had."""
        for number in range(40):
            with ThreadPoolExecutor(1) as thread:
                assert isinstance(thread.submit(store.acquire, claim(f"{KEY}-{number}")).result(), Lease)
        assert known(store, f"{KEY}-39").task_id == "a"

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform cannot fork")
    def test_a_store_is_used_on_both_sides_of_a_fork(self, store: Store) -> None:
        """What the parent opened must not be written to by the child: their bytes would mix."""
        lease = take(store)
        with self._forked(lambda: self._fifty_leases(store)) as pipe:
            for _ in range(50):
                assert store.renew([lease]) == []
                assert known(store).owner == lease.owner
            assert pipe.read() == b"50 leases"
        store.settle(lease, DONE, ttl=RESULT)

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform cannot fork")
    def test_a_child_that_closes_its_store_leaves_its_parents_open(self, store: Store) -> None:
        lease = take(store)

        def close() -> bytes:
            store.close()
            owner = known(store).owner.encode()
            store.close()
            return owner

        with self._forked(close) as pipe:
            assert pipe.read() == lease.owner.encode()
        assert store.renew([lease]) == []
        store.settle(lease, DONE, ttl=RESULT)
        assert known(store).payload == DONE.payload

    def _fifty_leases(self, store: Store) -> bytes:
        answers = [store.acquire(claim(f"{KEY}-{number}")) for number in range(50)]
        return b"%d leases" % sum(isinstance(answer, Lease) for answer in answers)

    @contextmanager
    def _forked(self, work: Callable[[], bytes]) -> Iterator[BinaryIO]:
        """Do the work in a child, and let what it returns be read."""
        reading, writing = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forking while other threads run
            child = os.fork()
        if child == 0:
            self._in_child(work, writing)
        os.close(writing)
        try:
            with open(reading, "rb") as pipe:
                yield pipe
        finally:
            os.waitpid(child, 0)

    def _in_child(self, work: Callable[[], bytes], writing: int) -> None:
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(CHILD_SECONDS)  # a child that hangs is a fact too
            os.write(writing, work())
        except BaseException as error:  # noqa: BLE001 - it must not reach pytest, of which this is a copy
            os.write(writing, repr(error).encode())
        finally:
            os._exit(0)

    def test_a_closed_store_opens_again_when_it_is_used(self, store: Store) -> None:
        lease = take(store)
        store.close()
        assert known(store).owner == lease.owner
        store.close()
        store.close()
        store.settle(lease, DONE, ttl=RESULT)

    def test_a_store_that_can_serve_says_so(self, store: Store) -> None:
        store.ping()
