"""`release`: a lease is given back for its holder."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace

import pytest
from celery import Celery

from celery_idempotent import IdempotentTask
from celery_idempotent.cli.common import Exit
from celery_idempotent.errors import LeaseLost
from celery_idempotent.stores import Claim, Lease, Outcome, Reason, Refusal, Release, State, Store, Verdict
from celery_idempotent.stores.redis import RedisStore
from tests.cli.conftest import Run, Said, app_with, by_app, pay
from tests.support.cli.shelf import Shelf, hold, keys, release, settle
from tests.support.cli.terminal import Terminal

KEY = "idem:shop.export::17"
NEXT = Claim(KEY, "the next owner", 60, 600, task_id="T2", holder="host:2")
DONE = Outcome(State.COMPLETED, b"json:1")


def test_the_next_delivery_may_run_and_the_late_holder_is_refused(on_redis: Run, redis_store: RedisStore) -> None:
    lease = hold(redis_store, KEY)
    said = on_redis("release", KEY, "--yes")
    assert said == (Exit.OK, f"{KEY} is released from host:1\n", "")
    assert redis_store.renew([lease]) == [lease]
    with pytest.raises(LeaseLost):
        redis_store.settle(lease, DONE, ttl=60)
    taken = redis_store.acquire(NEXT)
    assert isinstance(taken, Lease)
    assert taken.fence > lease.fence
    assert (taken.crashes, taken.taken_over) == (0, False)


def test_it_asks_and_shows_the_holder(on_redis: Run, redis_store: RedisStore) -> None:
    hold(redis_store, KEY)
    said = on_redis("release", KEY, answer="n\n")
    assert (said.status, said.out) == (Exit.NO, "")
    assert said.err.startswith(f"key        {KEY}\nholder     host:1, for ")
    assert "task id    T1\n" in said.err
    assert re.search(r"^lease      [3-5]\ds left$", said.err, re.MULTILINE)
    assert "last beat  unknown to the store\n" in said.err
    assert "may be done twice" in said.err
    record = redis_store.get(KEY)
    assert record is not None
    assert record.state is State.IN_PROGRESS
    assert on_redis("release", KEY, answer="y\n").status == Exit.OK


def test_where_nobody_answers_nothing_is_released(by_url: Callable[..., Said], shelf: Shelf) -> None:
    hold(shelf, KEY)  # not by click's own runner: before 8.2 it presses Enter
    said = Run(by_url, shelf)("release", KEY)
    assert said.status == Exit.NO
    assert "--yes releases without a question" in said.err


def app_with_export(store: Store, **policy: object) -> Celery:
    app = app_with(store)
    app.task(pay, name="shop.export", shared=False, base=IdempotentTask, idempotency=policy)
    return app


def test_an_app_knows_when_the_last_beat_was(shelf: Shelf) -> None:
    hold(shelf, KEY, lease_ttl=90)
    shelf.offset += 40
    said = by_app(app_with_export(shelf, lease_ttl=90), "release", KEY, answer="n\n")
    assert re.search(r"^last beat  4\ds ago, if its lease_ttl is 90 s$", said.err, re.MULTILINE)
    assert "host:1, for 4" in said.err
    said = by_app(app_with_export(shelf, lease_ttl=30), "release", KEY, answer="n\n")  # not what its holder was told
    assert "unknown to the store" in said.err


@pytest.mark.parametrize("before", [0, 2])
def test_crashes_and_attempts_stay_what_they_are(on_redis: Run, redis_store: RedisStore, before: int) -> None:
    claim = Claim(KEY, "an owner", 60, 600, task_id="T1", retries=3)
    for number in range(before):
        crashing = redis_store.acquire(replace(claim, owner=f"owner {number}"))
        assert isinstance(crashing, Lease)
        redis_store.release(crashing, Release(Reason.CRASHED))
    assert isinstance(redis_store.acquire(claim), Lease)
    assert on_redis("release", KEY, "--yes").status == Exit.OK
    late = redis_store.acquire(replace(claim, owner="a late copy", retries=2, redelivered=True))
    assert isinstance(late, Refusal)
    assert late.verdict is Verdict.SUPERSEDED
    again = redis_store.acquire(replace(claim, owner="another owner", redelivered=True))
    assert isinstance(again, Lease)
    assert again.crashes == before


def settled(store: Store) -> None:
    settle(store, KEY)


def freed(store: Store) -> None:
    release(store, KEY)


def retried(store: Store) -> None:
    store.release(hold(store, KEY), Release(Reason.RETRY, 45, 1))


def looped(store: Store) -> None:
    for owner in ("one", "another"):
        lease = store.acquire(Claim(KEY, owner, 60, 600, task_id="T1", max_crashes=1))
        if isinstance(lease, Lease):
            store.release(lease, Release(Reason.CRASHED))


@pytest.mark.parametrize(
    ("arrange", "words"),
    [
        (settled, f"it is completed. To let it run again: forget {KEY}"),
        (freed, "it is released already, and the next delivery may run now"),
        (
            retried,
            f"its retry is due in \\d+s, and other messages wait for it. To let them run before that: forget {KEY}",
        ),
        (looped, f"refused as a crash loop after 1 crashes. To let the same message run again: forget {KEY}"),
    ],
)
def test_what_nobody_holds_is_left_alone_and_it_says_what_to_do(
    on_redis: Run, redis_store: RedisStore, arrange: Callable[[Store], None], words: str
) -> None:
    arrange(redis_store)
    before = redis_store.get(KEY)
    said = on_redis("release", KEY)
    assert (said.status, said.out) == (Exit.NO, "")
    assert re.search(words, said.err)
    after = redis_store.get(KEY)
    assert before is not None
    assert after is not None
    assert (before.state, before.reason) == (after.state, after.reason)


def test_a_lease_that_ran_out_needs_no_release(on_shelf: Run, shelf: Shelf) -> None:
    hold(shelf, KEY)
    shelf.offset += 61
    said = on_shelf("release", KEY)
    assert said.status == Exit.NO
    assert "has run out" in said.err


def test_an_unknown_key_gets_a_hint(on_shelf: Run, shelf: Shelf) -> None:
    hold(shelf, KEY)
    said = on_shelf("release", KEY.removeprefix("idem:"), "--yes")
    assert said.status == Exit.NO
    assert f"did you mean {KEY}?" in said.err
    assert on_shelf("release").status == Exit.USAGE


def test_scripts_get_json_and_a_status_for_several_keys(on_redis: Run, redis_store: RedisStore) -> None:
    hold(redis_store, KEY)
    settle(redis_store, f"{KEY}8")
    said = on_redis("release", KEY, f"{KEY}8", "idem:no", "--yes", "--json")
    assert said.status == Exit.NO
    assert json.loads(said.out) == {"released": 1, "left": 1, "missing": ["idem:no"]}


def test_every_store_of_the_tasks_is_asked() -> None:
    own, other = Shelf(), Shelf()
    hold(other, KEY)
    assert by_app(app_with(own, other), "release", KEY, "--yes").status == Exit.OK
    assert isinstance(other.acquire(NEXT), Lease)
    assert keys(own) == set()


class Overtaken(Shelf):
    """Somebody else takes the lease over while a person thinks."""

    def release(self, lease: Lease, release: Release) -> bool:
        self.offset += 61
        assert isinstance(self.acquire(NEXT), Lease)
        return super().release(lease, release)


class Settling(Shelf):
    """As `PostgresStore` while an open transaction settles what it holds: true is the answer, and nothing changes."""

    def release(self, lease: Lease, release: Release) -> bool:
        return True


@pytest.mark.parametrize(
    ("store", "words"), [(Overtaken(), "another holder has it"), (Settling(), "an open transaction settles it")]
)
def test_what_changed_meanwhile_is_left_alone(store: Shelf, words: str) -> None:
    hold(store, KEY)
    said = by_app(app_with(store), "release", KEY, "--yes")
    assert (said.status, said.out) == (Exit.NO, "")
    assert words in said.err
    record = store.get(KEY)
    assert record is not None
    assert record.state is State.IN_PROGRESS


def test_what_is_released_is_kept_as_long_as_its_holder_wanted(shelf: Shelf) -> None:
    hold(shelf, KEY)
    by_app(app_with(shelf), "release", KEY, "--yes")
    record = shelf.get(KEY)
    assert record is not None
    assert 595 < record.retention <= 600


def test_a_person_at_a_terminal_says_yes(in_terminal: Callable[..., Terminal], redis_store: RedisStore) -> None:
    hold(redis_store, KEY)
    terminal = in_terminal("release", KEY)
    terminal.until("[y/N]: ")
    terminal.press(b"y\n")
    assert terminal.status() == Exit.OK
    assert "is released from host:1" in terminal.drawn
