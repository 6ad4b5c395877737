"""What is done is known in another store, or under another key, after it was copied there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, cast

import pytest

from celery_idempotent.errors import ConfigurationError
from celery_idempotent.stores import Outcome, Record, Refusal, State, Store, Verdict, open_store, rules
from celery_idempotent.stores.maintenance import COPYING, CopyCounts, copy
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.stores.redis import RedisStore
from tests.support.stores.benches import KEY, age, claim, known, take

DONE, FAILED = Outcome(State.COMPLETED, b"json:7"), Outcome(State.FAILED, b"pickle:1")


@pytest.fixture
def target(fresh_redis: Callable[[], str]) -> Iterator[Store]:
    """An empty store of another kind than most."""
    store = open_store(fresh_redis())
    yield store
    store.close()


def done(store: Store, key: str = KEY, outcome: Outcome = DONE, ttl: float = 600) -> None:
    store.settle(take(store, key, task_id="T1", fingerprint="f"), outcome, ttl=ttl)


@pytest.mark.parametrize("backwards", [False, True], ids=["out", "in"])
def test_what_is_done_is_known_in_the_other_store_for_as_long(any_store: Store, target: Store, backwards: bool) -> None:
    one, other = (target, any_store) if backwards else (any_store, target)
    done(one)
    done(one, "failed", FAILED, ttl=50)
    one.mark_dispatched(KEY, "T1")
    assert copy(one, other, "") == CopyCounts(copied=2)
    there = known(other)
    assert (there.state, there.payload, there.task_id, there.fingerprint) == (State.COMPLETED, b"json:7", "T1", "f")
    assert there.dispatched == {"T1"}
    assert 500 < there.retention <= 601
    assert known(other, "failed").state is State.FAILED
    assert 0 < known(other, "failed").retention <= 51
    refused = other.acquire(claim(task_id="T2", fingerprint="f"))
    assert isinstance(refused, Refusal)
    assert refused.verdict is Verdict.COMPLETED
    assert refused.record.payload == b"json:7"
    reused = other.acquire(claim(task_id="T2", fingerprint="g"))
    assert isinstance(reused, Refusal)
    assert reused.verdict is Verdict.KEY_REUSED


def test_what_is_known_there_stays_and_what_has_not_ended_is_not_copied() -> None:
    one, other = MemoryStore(), MemoryStore()
    for key in ("a:1", "a:2", "a:3", "b:1"):
        done(one, key)
    done(other, "a:1", FAILED)
    lease = take(other, "a:2", fingerprint="other")
    take(one, "a:4")
    take(one, "a:~unique:shop.index::7")
    assert copy(one, other, "a:") == CopyCounts(copied=1, known=1, held=2)
    assert copy(one, other, "a:") == CopyCounts(known=2, held=2)
    assert known(other, "a:1").state is State.FAILED
    assert other.renew([lease]) == []
    assert {record.key for record in other.scan()} == {"a:1", "a:2", "a:3"}


def test_what_cannot_be_read_there_is_counted_and_keeps_nothing_else_from_being_copied(target: Store) -> None:
    one, other = MemoryStore(), cast("RedisStore", target)
    for key in ("a:1", "a:2", "a:3", "a:4"):
        done(one, key)
    other._client.hset("a:1", "state", "of a newer version")
    other._client.set("a:2", "another program's")
    assert copy(one, other, "a:") == CopyCounts(copied=2, unreadable=2)


def test_callbacks_that_were_dispatched_after_the_first_copy_are_known_after_the_second(target: Store) -> None:
    one = MemoryStore()
    done(one)
    done(one, "another's")
    done(target, "another's", FAILED)
    copy(one, target, "")
    for task_id in ("T2", "T1"):
        one.mark_dispatched(KEY, task_id)
        one.mark_dispatched("another's", task_id)
    assert copy(one, target, "") == CopyCounts(known=2)
    assert known(target).dispatched == {"T1", "T2"}
    assert known(target, "another's").dispatched == frozenset()


def test_the_task_that_did_it_is_remembered_the_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "MOST_DISPATCHED", 2)
    one, other = MemoryStore(), MemoryStore()
    done(one)
    for store, task_id in ((one, "T1"), (one, "T0")):
        store.mark_dispatched(KEY, task_id)
    copy(one, other, "")
    other.mark_dispatched(KEY, "T9")
    assert known(other).dispatched == {"T1", "T9"}


def test_a_key_whose_holders_died_there_is_done_all_the_same() -> None:
    one, other = MemoryStore(), MemoryStore()
    done(one)
    for _ in range(12):
        take(other, task_id="T1", max_crashes=99)
        age(other, KEY, 61)
    assert copy(one, other, "") == CopyCounts(copied=1)


def test_a_later_copy_need_not_look_at_what_an_earlier_one_took(any_store: Store, target: Store) -> None:
    done(any_store)
    age(any_store, KEY, 400)
    done(any_store, "since")
    assert copy(any_store, target, "", max_age=300) == CopyCounts(copied=1)
    assert [record.key for record in target.scan()] == ["since"]


def test_what_a_copy_that_was_killed_has_claimed_is_copied_by_a_later_one(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = MemoryStore(), MemoryStore()
    done(one)
    with monkeypatch.context() as killed:
        killed.setattr(other, "settle", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            copy(one, other, "")
    assert copy(one, other, "") == CopyCounts(held=1)
    age(other, KEY, COPYING)
    assert copy(one, other, "") == CopyCounts(copied=1)


def test_keys_may_be_renamed_within_a_store_and_are_not_renamed_twice() -> None:
    store = MemoryStore()
    done(store, "idem:shop.charge::1")
    done(store, "idem:shop.charge::2")
    renamed = copy(
        store,
        store,
        "idem:shop.charge:",
        rename=lambda key: None if key.endswith("2") else key.replace(":shop.charge:", ":shop.bill:"),
    )
    assert renamed == CopyCounts(copied=1)
    assert known(store, "idem:shop.bill::1").payload == b"json:7"
    with pytest.raises(ConfigurationError, match=r"does not begin with 'idem:', got 'idem:new\.shop\."):
        copy(store, store, "idem:", rename=lambda key: key.replace("idem:", "idem:new."))


def test_a_store_that_was_opened_twice_is_one_store(fresh_redis: Callable[[], str]) -> None:
    """A scan may come by what was renamed, and it was renamed again."""
    url = fresh_redis()
    one, same, other = open_store(url), open_store(url), open_store(fresh_redis())
    done(one, "idem:shop.charge::1")
    longer = partial(copy, one, prefix="idem:", rename=lambda key: key.replace("idem:", "idem:new."))
    with pytest.raises(ConfigurationError, match=r"does not begin with 'idem:', got 'idem:new\.shop\."):
        longer(target=same)
    assert [record.key for record in one.scan()] == ["idem:shop.charge::1"]
    assert longer(target=other) == CopyCounts(copied=1)
    assert [record.key for record in other.scan()] == ["idem:new.shop.charge::1"]
    for store in (one, same, other):
        store.close()


def test_what_a_store_keeps_for_nobody_knows_how_long_is_counted_and_left(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = MemoryStore(), MemoryStore()
    done(one)
    scan = one.scan

    def untold(**options: Any) -> Iterator[Record]:
        return (replace(record, retention=0.0) for record in scan(**options))

    monkeypatch.setattr(one, "scan", untold)
    assert copy(one, other, "") == CopyCounts(unreadable=1)
    assert other.get(KEY) is None
