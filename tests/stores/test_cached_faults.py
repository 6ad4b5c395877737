"""Whatever the cache loses, garbles or fails to do: who may run is answered as the durable store alone would.

The machine is that of test_model.py, on a cached store; between its steps, real faults hit the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import rule, run_state_machine_as_test

from celery_idempotent.errors import StoreUnreachable
from celery_idempotent.stores import Claim, Lease, Refusal, cached, open_store
from celery_idempotent.stores.cached import PREFIX, CachedStore
from tests.stores.test_model import AGES, KEYS, TASKS, Twins
from tests.support.proxy import Proxy
from tests.support.servers import RedisServer
from tests.support.stores import benches
from tests.support.stores.kinds import KINDS, lead, port_of

EXAMPLES, STEPS = 30, 50
FIELDS = st.sampled_from(
    ["version", "state", "fence", "task", "fingerprint", "payload", "checksum", "ended", "expires"]
)


class Stale(NamedTuple):
    """An entry as it was: what a cache has that comes back from a backup, or a replica that fell behind."""

    dump: bytes
    ttl: int
    fence: int


class Faults(Twins):
    """Twins, one of which has a cache that cannot be relied on."""

    kind = KINDS["cached"]
    proxy: Proxy
    direct_url = ""

    def __init__(self) -> None:
        super().__init__()
        direct = open_store(self.direct_url)
        assert isinstance(direct, CachedStore)
        self.direct, self.cache = direct, direct._outcomes._redis._client
        self.stale: dict[str, Stale] = {}

    def teardown(self) -> None:
        self.proxy.heal()
        self.kind.empty(self.direct)
        self.direct.close()
        self.other.close()

    def ask(self, claim: Claim) -> None:
        if claim.is_copy or claim.attempt or not claim.task_id:
            return super().ask(claim)  # for those the cache must make no difference at all
        ours, theirs = self.memory.acquire(claim), self.other.acquire(claim)
        assert type(ours) is type(theirs), (ours, theirs)
        if isinstance(ours, Lease) and isinstance(theirs, Lease):
            assert (ours.taken_over, ours.crashes) == (theirs.taken_over, theirs.crashes)
            self.leases[claim.owner] = (ours, theirs)
        elif isinstance(ours, Refusal) and isinstance(theirs, Refusal):
            assert ours.verdict is theirs.verdict
            seen = (theirs.record.state, theirs.record.payload, theirs.record.task_id, theirs.record.fingerprint)
            assert seen == (ours.record.state, ours.record.payload, ours.record.task_id, ours.record.fingerprint)
            assert (
                theirs.record.dispatched <= ours.record.dispatched
            )  # what it lost may be dispatched again, under its ids
        self.look(claim.key)
        return None

    @rule(key=KEYS)
    def delete(self, key: str) -> None:
        self.stale.pop(key, None)
        try:
            found = self.other.delete(key)
        except StoreUnreachable:
            self.proxy.heal()
            self.other.delete(key)
            self.memory.delete(key)
        else:
            assert found == self.memory.delete(key)

    @rule(key=KEYS, seconds=AGES)
    def age(self, key: str, seconds: int) -> None:
        self.stale.pop(key, None)  # it would be older than it says
        for store in (self.memory, self.direct):
            benches.age(store, key, seconds)
        self.look(key)

    @rule()
    def the_cache_is_down(self) -> None:
        self.proxy.refuse()
        self.proxy.reset()

    @rule()
    def the_cache_is_back(self) -> None:
        self.proxy.heal()

    @rule()
    def a_connection_is_reset(self) -> None:
        self.proxy.reset()

    @rule(replies=st.integers(1, 3))
    def replies_are_lost(self, replies: int) -> None:
        self.proxy.swallow_reply(replies)

    @rule()
    def the_cache_is_flushed(self) -> None:
        self.stale.clear()  # with the marks of what was deleted
        self.cache.flushdb()

    @rule(key=KEYS)
    def an_entry_is_evicted(self, key: str) -> None:
        if self.direct.get(key) is not None:
            self.cache.delete(PREFIX + key)

    def has(self, key: str, field: str) -> bool:
        return self.cache.type(PREFIX + key) == b"hash" and bool(self.cache.hexists(PREFIX + key, field))

    @rule(key=KEYS, field=FIELDS, value=st.sampled_from([b"", b"\xff", b"1", b"completed"]))
    def an_entry_is_garbled(self, key: str, field: str, value: bytes) -> None:
        # The times are not part of the checksum, for the cache itself sets them.
        if self.has(key, field) and not (field in ("ended", "expires") and value == b"1"):
            self.cache.hset(PREFIX + key, field, value)

    @rule(key=KEYS, field=FIELDS)
    def an_entry_loses_a_field(self, key: str, field: str) -> None:
        if self.has(key, field):
            self.cache.hdel(PREFIX + key, field)

    @rule(key=KEYS, task=TASKS)
    def an_entry_loses_a_mark(self, key: str, task: str) -> None:
        if self.has(key, f"announced:{task}"):
            self.cache.hdel(PREFIX + key, f"announced:{task}")

    @rule(key=KEYS)
    def an_entry_becomes_something_else(self, key: str) -> None:
        if self.has(key, "state"):
            self.cache.set(PREFIX + key, "something else", ex=1000)

    @rule(key=KEYS)
    def an_entry_is_saved(self, key: str) -> None:
        dump: Any = self.cache.dump(PREFIX + key)
        record = self.direct.get(key)
        if dump is not None and record is not None:
            self.stale[key] = Stale(dump, self.cache.pttl(PREFIX + key), record.fence)

    @rule(key=KEYS)
    def an_entry_comes_back_stale(self, key: str) -> None:
        record, stale = self.direct.get(key), self.stale.get(key)
        if stale is not None and record is not None and record.fence == stale.fence:
            self.cache.restore(PREFIX + key, stale.ttl, stale.dump, replace=True)


@pytest.mark.nightly
@pytest.mark.thorough
def test_a_cache_that_fails_changes_no_answer_about_running(
    cached_url: str,
    redis_server: RedisServer,
    proxied: Callable[[int], Proxy],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cached, "PROBE_EVERY", 0.0)
    durable, _, cache = cached_url.rpartition("cache=")
    link = proxied(port_of(cache))
    url = f"{durable}cache={lead(cache, link.port)}?socket_timeout=5&socket_connect_timeout=5"

    class Machine(Faults):
        proxy = link
        direct_url = cached_url

    Machine.url = url
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=STEPS,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
