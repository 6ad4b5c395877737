"""`stats`: what the records of each store come to."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from celery_idempotent.cli.common import Exit
from celery_idempotent.errors import StoreRefused
from celery_idempotent.stores import Claim, Lease, Outcome, Reason, Record, Release, State, Store
from celery_idempotent.stores.redis import RedisStore
from tests.cli.conftest import Run, app_with, by_app
from tests.support.cli.shelf import Shelf, hold, release, settle
from tests.support.cli.terminal import COLUMNS, Terminal


def crash(store: Store, key: str, times: int) -> None:
    """Put in a record whose holder died so often; at five it is refused."""
    for number in range(times + 1):
        lease = store.acquire(Claim(key, f"owner {number}", 60, 600, task_id="T1", holder="host:1"))
        if isinstance(lease, Lease):
            store.release(lease, Release(Reason.CRASHED if number < times else Reason.SHUTDOWN))


def fill(store: Store) -> None:
    settle(store, "idem:shop.charge::1")
    settle(store, "idem:shop.charge::2")
    store.settle(hold(store, "idem:shop.charge::3"), Outcome(State.FAILED, b"x" * 2000), ttl=600)
    hold(store, "idem:shop.export::17")
    release(store, "idem:shop.mail::bob")
    store.release(hold(store, "idem:shop.mail::eve"), Release(Reason.RETRY, 45, 1))
    crash(store, "idem:shop.crashy::a", 2)
    crash(store, "idem:shop.crashy::b", 5)


def told(said: Any, name: str = "") -> dict[str, Any]:
    assert said.status == Exit.OK
    stores = json.loads(said.out)
    found: dict[str, Any] = stores[name] if name else next(iter(stores.values()))
    return found


def test_records_are_counted(on_redis: Run, redis_store: RedisStore) -> None:
    fill(redis_store)
    found = told(on_redis("stats", "--json"))
    assert found["records"] == 8
    assert found["by_state"] == {"in_progress": 1, "completed": 2, "failed": 1, "released": 4}
    assert (found["held"], found["ran_out"], found["retries_waiting"], found["crash_loops"]) == (1, 0, 1, 1)
    assert (found["settled_last_minute"], found["settled_last_hour"], found["payload_bytes"]) == (3, 3, 2012)
    assert (found["oldest"]["key"], found["oldest"]["holder"]) == ("idem:shop.export::17", "host:1")
    assert found["complete"] is True
    assert found["room"].keys() == {"memory_bytes", "record_bytes"}
    assert 100 < found["room"]["record_bytes"] < 5000


def test_tasks_and_keys_that_crash_come_first(on_redis: Run, redis_store: RedisStore) -> None:
    fill(redis_store)
    found = told(on_redis("stats", "--json", "--top", "3"))
    assert [task["task"] for task in found["tasks"]] == ["shop.crashy", "shop.export", "shop.charge"]
    assert found["tasks"][0]["crashes"] == 7
    assert found["tasks"][2] == {
        "task": "shop.charge",
        "records": 3,
        "held": 0,
        "crashes": 0,
        "settled_last_hour": 3,
        "payload_bytes": 2012,
    }
    assert [(each["key"], each["crashes"]) for each in found["crashed"]] == [
        ("idem:shop.crashy::b", 5),
        ("idem:shop.crashy::a", 2),
    ]
    assert [each["crashes"] for each in told(on_redis("stats", "--json", "--top", "1"))["crashed"]] == [5]
    assert told(on_redis("stats", "--json", "--top", "0"))["tasks"] == []


def test_people_get_words(on_redis: Run, redis_store: RedisStore) -> None:
    fill(redis_store)
    said = on_redis("stats")
    assert (said.status, said.err) == (Exit.OK, "")
    for words in (
        "records      8 (2 completed, 1 failed, 1 in_progress, 4 released)",
        "held         1 by a live lease\n",
        "oldest       idem:shop.export::17 for ",
        "settled      3 in the last minute, 3 in the last hour",
        "retries      1 not due yet",
        "crash loops  1 refused",
        "payload      2.0 KiB",
        "for all that the server has",
        "SETTLED/H",
        "idem:shop.crashy::b",
    ):
        assert words in said.out
    assert "\x1b" not in said.out


def test_tasks_that_wait_for_an_operation_are_counted(on_redis: Run, redis_store: RedisStore) -> None:
    lease = hold(redis_store, "idem:shop.export::17")
    for task_id, copy in (("T2", 0), ("T2", 1), ("T3", 0)):
        redis_store.acquire(Claim(lease.key, f"{task_id} {copy}", 60, 600, task_id=task_id, copy=copy, token="t"))
    assert told(on_redis("stats", "--json"))["duplicates_waiting"] == 2
    assert "duplicates  2 waiting\n" in on_redis("stats").out
    redis_store.settle(lease, Outcome(State.COMPLETED, b"json:1"), ttl=600)
    assert told(on_redis("stats", "--json"))["duplicates_waiting"] == 0
    assert "duplicates" not in on_redis("stats").out


def test_what_was_settled_long_ago_is_no_rate(on_shelf: Run, shelf: Shelf) -> None:
    settle(shelf, "idem:shop.charge::1", ttl=9999)
    hold(shelf, "idem:shop.export::17")
    shelf.offset += 61
    settle(shelf, "idem:shop.charge::2", ttl=9999)
    found = told(on_shelf("stats", "--json"))
    assert (found["settled_last_minute"], found["settled_last_hour"], found["ran_out"]) == (1, 2, 1)
    assert "0 by a live lease; 1 ran out" in on_shelf("stats").out
    shelf.offset += 3600
    assert told(on_shelf("stats", "--json"))["settled_last_hour"] == 0


def test_an_empty_store_is_no_error(on_shelf: Run, shelf: Shelf) -> None:
    said = on_shelf("stats")
    assert said.status == Exit.OK
    assert "records  0\n" in said.out


def test_each_store_is_counted_by_itself() -> None:
    own, other = Shelf(), Shelf()
    settle(other, "idem:pay0::1")
    said = by_app(app_with(own, other), "stats", "--json")
    assert {name: found["records"] for name, found in json.loads(said.out).items()} == {"Shelf": 0, "Shelf (2)": 1}


def test_a_store_that_refuses_to_tell_its_room_is_counted_all_the_same() -> None:
    class Secretive(Shelf):
        def usage(self, sample: object = ()) -> dict[str, int]:
            raise StoreRefused("The store refused us.")

    store = Secretive()
    settle(store, "idem:shop.charge::1")
    found = told(by_app(app_with(store), "stats", "--json"))
    assert (found["records"], found["room"]) == (1, {})


def test_ctrl_c_prints_what_was_counted_and_ends_with_130() -> None:
    class Interrupted(Shelf):
        def scan(self, **options: Any) -> Iterator[Record]:
            yield from super().scan(**options)
            raise KeyboardInterrupt

    store, other = Interrupted(), Shelf()
    fill(store)
    said = by_app(app_with(store, other), "stats")
    assert said.status == Exit.INTERRUPTED
    assert "records      8" in said.out
    assert "these are the first 8 records of Interrupted" in said.err
    said = by_app(app_with(store, other), "stats", "--json")
    assert {name: found["complete"] for name, found in json.loads(said.out).items()} == {"Interrupted": False}


@pytest.mark.parametrize("arguments", [("--top", "-1"), ("--top", "many")])
def test_what_makes_no_sense_is_a_usage_error(on_shelf: Run, arguments: tuple[str, ...]) -> None:
    assert on_shelf("stats", *arguments).status == Exit.USAGE


@pytest.mark.nightly
@pytest.mark.thorough
def test_a_terminal_gets_colours_and_lines_that_fit(
    in_terminal: Callable[..., Terminal], redis_store: RedisStore
) -> None:
    fill(redis_store)
    hold(redis_store, f"idem:shop.invoices.tasks.{'make_invoice' * 6}:acme:{'1' * 60}")
    crash(redis_store, f"idem:shop.invoices.tasks.{'make_invoice' * 6}:acme:{'2' * 60}", 3)
    terminal = in_terminal("stats")
    assert terminal.status() == Exit.OK
    assert terminal.widest <= COLUMNS
    assert "\x1b[1;31m1 refused" in terminal.drawn
    plain = in_terminal("stats", NO_COLOR="1")
    assert plain.status() == Exit.OK
    assert "\x1b[1;31m" not in plain.drawn
