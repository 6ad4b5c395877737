"""Facts: one store, used from threads and after a fork."""

from __future__ import annotations

import os
import signal
import warnings
from concurrent.futures import ThreadPoolExecutor

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

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform cannot fork")
    def test_a_store_is_used_on_both_sides_of_a_fork(self, store: Store) -> None:
        """What the parent opened must not be written to by the child: their bytes would mix."""
        lease = take(store)
        reading, writing = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forking while other threads run
            child = os.fork()
        if child == 0:
            self._in_child(store, writing)
        os.close(writing)
        with open(reading, "rb") as pipe:
            for _ in range(50):
                assert store.renew([lease]) == []
                assert known(store).owner == lease.owner
            said = pipe.read()
        os.waitpid(child, 0)
        assert said == b"50 leases"
        store.settle(lease, DONE, ttl=RESULT)

    def _in_child(self, store: Store, writing: int) -> None:
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(CHILD_SECONDS)  # a child that hangs is a fact too
            answers = [store.acquire(claim(f"{KEY}-{number}")) for number in range(50)]
            os.write(writing, b"%d leases" % sum(isinstance(answer, Lease) for answer in answers))
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
