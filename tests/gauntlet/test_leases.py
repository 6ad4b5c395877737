"""The gauntlet: who holds an operation, for how long, and what is left when the holder is gone."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from freezegun import freeze_time

from celery_idempotent.errors import LeaseLost
from celery_idempotent.stores import Claim, Lease, Outcome, Reason, Refusal, Release, State, Verdict
from celery_idempotent.stores.redis import RedisStore
from tests.gauntlet.conftest import key_of
from tests.support.gauntlet.consumer import Consumer
from tests.support.proxy import Proxy
from tests.support.servers import RedisServer
from tests.support.stores.benches import DONE, KEY, age, claim, known, take

#: Seconds after which a lease of the default length has run out.
LAPSED = 61.0


def verdict(store: RedisStore, **changes: Any) -> Verdict:
    """Return why a claim on `KEY` gets no lease."""
    refusal = store.acquire(claim(**changes))
    assert isinstance(refusal, Refusal), f"{changes} got the lease"
    return refusal.verdict


@pytest.mark.fault(1)
def test_a_redelivery_of_a_running_task_does_not_run_beside_it(declare: Callable[..., Any], consumer: Consumer) -> None:
    """It has the same task id: were that the proof of who holds the lease, it would hold it too."""
    runs: list[str] = []

    def resize(self: Any, path: str) -> str:
        runs.append(path)
        if len(runs) == 1:
            consumer.deliver(message, redelivered=True)
        return f"small {path}"

    result = declare(resize, key=None).delay("a")
    message = consumer.receive()
    consumer.deliver(message)
    assert runs == ["a"]
    consumer.work()
    assert (runs, result.get(timeout=10)) == (["a"], "small a")


@pytest.mark.fault(4)
def test_a_holder_that_was_overtaken_neither_overwrites_nor_frees_what_its_heir_holds(store: RedisStore) -> None:
    zombie = take(store, task_id="first")
    age(store, KEY, LAPSED)
    heir = take(store, task_id="second")
    with pytest.raises(LeaseLost):
        store.settle(zombie, Outcome(State.COMPLETED, b"json:13"), ttl=60)
    assert not store.release(zombie, Release(Reason.FAILED))
    assert (known(store).owner, known(store).state) == (heir.owner, State.IN_PROGRESS)
    assert verdict(store, task_id="third") is Verdict.CONFLICT
    store.settle(heir, DONE, ttl=60)
    assert known(store).payload == DONE.payload


@pytest.mark.fault(5)
def test_a_task_whose_claim_was_granted_and_whose_reply_was_lost_runs(
    declare: Callable[..., Any], own_redis: Callable[..., RedisServer], proxied: Callable[[int], Proxy]
) -> None:
    proxy = proxied(own_redis().port)
    runs: list[str] = []

    def charge(self: Any, order_id: str) -> str:
        runs.append(order_id)
        return f"charged {order_id}"

    task = declare(charge, store=RedisStore.from_url(proxy.url()))
    task.apply(("first",)).get()  # the server has the scripts now, so that the next request is the claim
    proxy.swallow_reply(matching=b"EVALSHA")
    assert task.apply(("A",)).get() == "charged A"
    assert proxy.swallowed == 1
    assert runs == ["first", "A"]


@pytest.mark.fault(6)
def test_a_worker_whose_clock_is_wrong_takes_nothing_early_and_gives_nothing_away(store: RedisStore) -> None:
    def clock(ahead: int) -> Any:
        return freeze_time(datetime.now(timezone.utc) + timedelta(seconds=ahead), tick=True)

    for holders, others in [(0, 90), (-90, 0), (0, 86400)]:
        key = f"key-{holders}-{others}"
        with clock(holders):
            lease = take(store, key, lease_ttl=60.0, task_id="holder")
        with clock(others):
            answer = store.acquire(claim(key, task_id="other"))
        assert isinstance(answer, Refusal), "it stole a live lease"
        assert (answer.verdict, answer.record.owner) == (Verdict.CONFLICT, lease.owner)


@pytest.mark.fault(11)
def test_a_result_outlives_the_lease_and_a_dead_holder_does_not_block_as_long_as_a_result_is_kept(
    declare: Callable[..., Any], store: RedisStore
) -> None:
    runs: list[str] = []

    def charge(self: Any, order_id: str) -> str:
        runs.append(order_id)
        if runs.count(order_id) == 1 and order_id == "dead":
            age(store, self.lease.key, LAPSED)
            return str(self.apply((order_id,)).get())
        return f"charged {order_id}"

    task = declare(charge, lease_ttl=60, result_ttl="24h")
    assert task.apply(("A",)).get() == "charged A"
    age(store, key_of("A"), LAPSED)
    assert task.apply(("A",)).get() == "charged A"
    assert runs == ["A"]
    assert task.apply(("dead",)).get() == "charged dead"
    assert runs == ["A", "dead", "dead"]


@pytest.mark.fault(13)
def test_nothing_but_its_lease_stands_between_a_dead_holder_and_the_next_delivery(store: RedisStore) -> None:
    def everything() -> list[bytes]:
        return list(store._client.keys("*"))

    take(store, task_id="dead")
    assert everything() == [KEY.encode()]
    age(store, KEY, LAPSED)
    heir = take(store, task_id="heir")
    assert everything() == [KEY.encode()]
    store.settle(heir, DONE, ttl=60)
    assert everything() == [KEY.encode()]


@pytest.mark.fault(19)
def test_every_record_ends_by_itself_whatever_became_of_its_holder(store: RedisStore) -> None:
    """No scan has to tell who is alive: a dead holder's lease runs out, and then its record."""

    def expires_in(key: str) -> float:
        return float(store._client.pttl(key)) / 1000

    claims = {
        name: claim(name, lease_ttl=60.0, keep_ttl=600.0, task_id=name, max_crashes=1)
        for name in ("dead", "completed", "failed", "released", "retried", "crashed")
    }
    leases = {name: store.acquire(each) for name, each in claims.items()}
    assert all(isinstance(lease, Lease) for lease in leases.values())
    assert all(0 < expires_in(name) <= 660 for name in claims)
    held: dict[str, Any] = leases
    store.settle(held["completed"], DONE, ttl=300)
    store.settle(held["failed"], Outcome(State.FAILED, b"!exception:"), ttl=300)
    store.release(held["released"], Release(Reason.FAILED))
    store.release(held["retried"], Release(Reason.RETRY, 30, 1))
    age(store, "crashed", LAPSED)
    assert verdict(store, key="crashed", task_id="crashed", keep_ttl=600.0, max_crashes=1) is Verdict.CRASH_LOOP
    for name in claims:
        assert 0 < expires_in(name) <= 660, name
    age(store, "dead", LAPSED)
    assert 0 < expires_in("dead") <= 600
    assert isinstance(store.acquire(claim("dead", task_id="heir")), Lease)


@pytest.mark.fault(20)
def test_fences_rise_also_after_the_record_is_gone_and_lose_no_digit(store: RedisStore) -> None:
    ancient = take(store)
    fences = [ancient.fence]
    for _ in range(3):
        assert store.delete(KEY)
        fences.append(take(store).fence)
        assert fences[-1] == int(store._client.hget(KEY, "fence") or 0)
    assert fences == sorted(set(fences))
    with pytest.raises(LeaseLost):
        store.settle(ancient, DONE, ttl=60)
    assert store.renew([ancient]) == [ancient]


@pytest.mark.fault(21)
@pytest.mark.parametrize("on_conflict", ["wait", "raise", "defer"])
def test_a_waiter_that_gives_up_leaves_the_holder_its_record(
    declare: Callable[..., Any], store: RedisStore, on_conflict: str
) -> None:
    def charge(self: Any, order_id: str) -> None:
        raise AssertionError("it ran")

    key = key_of("A")
    lease = take(store, key, task_id="holder")
    waiter = declare(charge, on_conflict=on_conflict, wait_timeout=0.05)
    with pytest.raises(Exception, match="is being done") as caught:
        waiter.apply(("A",)).get()
    assert type(caught.value).__name__ == "Conflict"
    assert (known(store, key).owner, known(store, key).state) == (lease.owner, State.IN_PROGRESS)
    store.settle(lease, DONE, ttl=60)


@pytest.mark.fault(22)
def test_a_holder_that_settles_just_before_the_claim_arrives_is_seen(
    declare: Callable[..., Any], store_url: str
) -> None:
    """Whoever looked before has seen a holder at work; the claim itself must look again."""

    class Late(RedisStore):
        """A store whose claims are so long on their way that the holder is done when they arrive."""

        def acquire(self, claim: Claim) -> Lease | Refusal:
            self.settle(lease, DONE, ttl=60)
            return super().acquire(claim)

    def charge(self: Any, order_id: str) -> int:
        runs.append(order_id)
        return 42

    runs: list[str] = []
    late = Late.from_url(store_url)
    lease = take(late_free := RedisStore.from_url(store_url), key_of("A"), task_id="holder")
    task = declare(charge, store=late)
    assert task.apply(("A",)).get() == 42
    assert runs == []
    for store in (late, late_free):
        store.close()
