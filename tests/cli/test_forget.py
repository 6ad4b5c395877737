"""`forget`: keys by name, and all that begin with a prefix."""

from __future__ import annotations

import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from celery_idempotent import open_store
from celery_idempotent.cli.common import Exit
from celery_idempotent.errors import StoreUnreachable
from celery_idempotent.stores import Claim, Lease, Refusal, Release
from celery_idempotent.stores.cached import CachedStore
from celery_idempotent.stores.redis import RedisStore
from tests.cli.conftest import Run, Said, app_with, by_app
from tests.support.cli.shelf import Shelf, hold, keys, release, settle

ACME, BOLT = "idem:shop.invoice:acme:", "idem:shop.invoice:bolt:"


def fill(store: Shelf | RedisStore) -> None:
    settle(store, f"{ACME}1")
    settle(store, f"{ACME}2")
    release(store, f"{ACME}3")
    settle(store, f"{BOLT}1")


def test_a_prefix_forgets_what_begins_so_and_nothing_else(on_redis: Run, redis_store: RedisStore) -> None:
    fill(redis_store)
    said = on_redis("forget", "--prefix", ACME, "--yes")
    assert said.status == Exit.OK
    assert "2 completed, 1 released" in said.out
    assert "3 forgotten" in said.out
    assert keys(redis_store) == {f"{BOLT}1"}


def test_a_prefix_is_taken_as_it_is_typed(on_redis: Run, redis_store: RedisStore) -> None:
    settle(redis_store, "idem:a*b:1")
    settle(redis_store, "idem:axb:1")
    on_redis("forget", "--prefix", "idem:a*b", "--yes")
    assert keys(redis_store) == {"idem:axb:1"}


def test_it_asks_with_the_count(on_shelf: Run, shelf: Shelf) -> None:
    fill(shelf)
    said = on_shelf("forget", "--prefix", ACME, answer="n\n")
    assert said.status == Exit.NO
    assert f"Forget 3 records whose keys begin with {ACME}?" in said.err
    assert len(keys(shelf)) == 4
    assert on_shelf("forget", "--prefix", ACME, answer="y\n").status == Exit.OK
    assert keys(shelf) == {f"{BOLT}1"}


def test_where_nobody_answers_nothing_is_forgotten(on_shelf: Run, shelf: Shelf) -> None:
    fill(shelf)
    said = on_shelf("forget", "--prefix", ACME)
    assert said.status == Exit.NO
    assert len(keys(shelf)) == 4


def test_where_nobody_answers_it_says_how_to_do_without(by_url: Callable[..., Said], shelf: Shelf) -> None:
    fill(shelf)  # not by click's own runner: before 8.2 it presses Enter
    said = Run(by_url, shelf)("forget", "--prefix", ACME)
    assert said.status == Exit.NO
    assert "--yes" in said.err


def test_a_live_lease_is_left_alone_unless_forced(on_redis: Run, redis_store: RedisStore) -> None:
    fill(redis_store)
    hold(redis_store, f"{ACME}4")
    said = on_redis("forget", "--prefix", ACME, "--yes")
    assert said.status == Exit.NO
    assert "3 forgotten, and 1 left alone that a live lease holds" in said.out
    assert keys(redis_store) == {f"{ACME}4", f"{BOLT}1"}
    assert on_redis("forget", "--prefix", ACME, "--yes", "--force").status == Exit.OK
    assert keys(redis_store) == {f"{BOLT}1"}


def test_where_all_is_held_nobody_is_asked(on_shelf: Run, shelf: Shelf) -> None:
    hold(shelf, f"{ACME}4")
    said = on_shelf("forget", "--prefix", ACME)
    assert (said.status, said.err) == (Exit.NO, "")
    assert keys(shelf) == {f"{ACME}4"}


def test_a_lease_that_ran_out_is_forgotten(on_shelf: Run, shelf: Shelf) -> None:
    hold(shelf, f"{ACME}4")
    shelf.offset += 61
    assert on_shelf("forget", "--prefix", ACME, "--state", "in_progress", "--yes").status == Exit.OK
    assert keys(shelf) == set()


def test_a_state_narrows_it_down(on_shelf: Run, shelf: Shelf) -> None:
    fill(shelf)
    on_shelf("forget", "--prefix", ACME, "--state", "released", "--yes")
    assert keys(shelf) == {f"{ACME}1", f"{ACME}2", f"{BOLT}1"}
    said = on_shelf("forget", "--prefix", ACME, "--state", "failed", "--yes")
    assert said.status == Exit.NO
    assert "is failed" in said.err


def test_a_dry_run_counts_and_forgets_nothing(on_shelf: Run, shelf: Shelf) -> None:
    fill(shelf)
    hold(shelf, f"{ACME}4")
    said = on_shelf("forget", "--prefix", ACME, "--dry-run")
    assert "1 in_progress" in said.out
    assert "(1 held by a live lease)" in said.out
    assert "3 would be forgotten, and 1 left alone" in said.out
    assert "4 would be forgotten\n" in on_shelf("forget", "--prefix", ACME, "--dry-run", "--force").out
    assert "a live lease holds it" in on_shelf("forget", f"{ACME}4", "--dry-run").out
    assert len(keys(shelf)) == 5


def test_a_prefix_without_its_namespace_gets_a_hint(on_shelf: Run, shelf: Shelf) -> None:
    fill(shelf)
    said = on_shelf("forget", "--prefix", "shop.invoice:acme:", "--yes")
    assert said.status == Exit.NO
    assert f"did you mean --prefix {ACME}?" in said.err
    for unknown in ("idem:no", "shop.other:"):
        assert "did you mean" not in on_shelf("forget", "--prefix", unknown, "--yes").err
    assert len(keys(shelf)) == 4


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ((), "or --prefix PREFIX"),
        (("K", "--prefix", "P"), "or --prefix PREFIX"),
        (("K", "--state", "failed"), "--state"),
        (("--prefix", ""), "not empty"),
        (("--prefix", "P", "--state", "done"), "in_progress"),
    ],
)
def test_what_makes_no_sense_is_a_usage_error(on_shelf: Run, arguments: tuple[str, ...], word: str) -> None:
    said = on_shelf("forget", *arguments)
    assert said.status == Exit.USAGE
    assert word in said.err


def test_several_keys_are_forgotten_and_what_is_unknown_is_told(on_redis: Run, redis_store: RedisStore) -> None:
    fill(redis_store)
    said = on_redis("forget", f"{ACME}1", f"{ACME}9", f"{BOLT}1")
    assert said.status == Exit.NO
    assert f"{ACME}9" in said.err
    assert keys(redis_store) == {f"{ACME}2", f"{ACME}3"}


def test_a_named_key_that_is_held_is_forgotten_if_a_person_says_so(on_shelf: Run, shelf: Shelf) -> None:
    hold(shelf, f"{ACME}4")
    assert on_shelf("forget", f"{ACME}4", answer="n\n").status == Exit.NO
    assert keys(shelf) == {f"{ACME}4"}
    assert on_shelf("forget", f"{ACME}4", answer="y\n").status == Exit.OK
    hold(shelf, f"{ACME}5")
    assert on_shelf("forget", f"{ACME}5", "--yes").status == Exit.OK
    hold(shelf, f"{ACME}6")
    assert on_shelf("forget", f"{ACME}6", "--force").status == Exit.OK
    assert keys(shelf) == set()


def test_scripts_get_json(on_shelf: Run, shelf: Shelf) -> None:
    fill(shelf)
    hold(shelf, f"{ACME}4")
    dry = on_shelf("forget", "--prefix", ACME, "--dry-run", "--json")
    assert json.loads(dry.out) == {"forgotten": 3, "left": 1, "missing": []}
    assert json.loads(on_shelf("forget", f"{BOLT}1", "K", "--json").out) == {
        "forgotten": 1,
        "left": 0,
        "missing": ["K"],
    }
    done = on_shelf("forget", "--prefix", ACME, "--yes", "--json")
    assert (done.status, json.loads(done.out)) == (Exit.NO, {"forgotten": 3, "left": 1, "missing": []})


def test_every_store_of_the_tasks_is_searched() -> None:
    own, other, third = Shelf(), Shelf(), Shelf()
    app = app_with(own, other, third)
    fill(own)
    settle(other, f"{ACME}7")
    said = by_app(app, "forget", "--prefix", ACME, "--yes")
    assert said.status == Exit.OK
    assert "Shelf: 3 forgotten\n" in said.out
    assert "Shelf (2): 1 forgotten\n" in said.out
    assert "Shelf (3): nothing\n" in said.out
    assert keys(own) | keys(other) == {f"{BOLT}1"}


def test_a_key_is_forgotten_by_the_cache_too_where_the_record_is_gone_already(redis_url: str) -> None:
    durable = Shelf()
    store = CachedStore(durable, RedisStore.from_url(redis_url))
    key = f"{ACME}1"
    settle(store, key)
    durable.delete(key)
    another = Claim(key, "another owner", 60, 600, task_id="T2")
    assert by_app(app_with(store), "forget", key, "--dry-run").status == Exit.NO
    assert isinstance(store.acquire(another), Refusal)
    said = by_app(app_with(store), "forget", key)
    assert said.status == Exit.NO
    assert "Nothing is remembered of" in said.err
    assert isinstance(store.acquire(another), Lease)


# -- what cannot be read -----------------------------------------------------------------------------------------------

ODD = f"{ACME}odd"


@pytest.fixture
def odd(redis_store: RedisStore) -> RedisStore:
    """A store with a record as a newer version may write it."""
    redis_store._client.hset(ODD, mapping={"state": "quarantined", "fence": "7", "owner": "o"})
    return redis_store


@pytest.mark.parametrize("command", ["show", "explain", "release"])
def test_a_record_that_cannot_be_read_is_named_as_that(on_redis: Run, odd: RedisStore, command: str) -> None:
    said = on_redis(command, ODD)
    assert (said.status, said.out) == (Exit.UNREADABLE, "")
    assert f"The record '{ODD}' is damaged or was written by a newer version" in said.err


def test_a_record_that_cannot_be_read_is_forgotten_if_a_person_says_so(on_redis: Run, odd: RedisStore) -> None:
    asked = on_redis("forget", ODD, answer="n\n")
    assert asked.status == Exit.UNREADABLE
    assert f"The record '{ODD}' is damaged or was written by a newer version" in asked.err
    assert "Forget it all the same?" in asked.err
    assert on_redis("forget", ODD, "--dry-run").out == f"{ODD} would be forgotten (it cannot be read)\n"
    assert odd._client.exists(ODD)
    said = on_redis("forget", ODD, answer="y\n")
    assert (said.status, said.out) == (Exit.OK, f"{ODD} is forgotten\n")
    assert not odd._client.exists(ODD)
    assert re.search(
        r"forgotten by \S+ \([\w -]+\): it was unreadable Now:", " ".join(on_redis("explain", ODD).out.split())
    )


def test_a_prefix_leaves_records_alone_that_cannot_be_read_and_says_so(on_redis: Run, odd: RedisStore) -> None:
    said = on_redis("forget", "--prefix", ACME, "--yes")
    assert (said.status, said.out) == (Exit.NO, "")
    assert f"1 whose key begins with {ACME} cannot be read, and are left alone" in said.err
    settle(odd, f"{ACME}1")
    said = on_redis("forget", "--prefix", ACME, "--yes", "--json")
    assert (said.status, json.loads(said.out)) == (Exit.NO, {"forgotten": 1, "left": 1, "missing": []})
    assert odd._client.exists(ODD)
    settle(odd, f"{ACME}1")
    assert on_redis("forget", "--prefix", ACME, "--state", "completed", "--yes").status == Exit.OK


def test_lists_and_statistics_count_records_that_cannot_be_read(on_redis: Run, odd: RedisStore) -> None:
    odd._client.hset("of another program", "no", "record")
    said = on_redis("list")
    assert said.status == Exit.OK
    assert f"1 cannot be read; why: show {ODD}" in said.err
    assert f"1; why: show {ODD}" in on_redis("stats").out
    [facts] = json.loads(on_redis("stats", "--json").out).values()
    assert (facts["records"], facts["unreadable"]) == (0, 1)


def test_a_record_that_cannot_be_read_is_found_by_its_task(by_url: Callable[..., Said], odd: RedisStore) -> None:
    key = "idem:shop.charge:acme"
    odd._client.rename(ODD, key)
    said = Run(by_url, odd)("forget", "--task", "shop.charge", "acme", "--yes", "--json")
    assert (said.status, json.loads(said.out)) == (Exit.OK, {"forgotten": 1, "left": 0, "missing": []})
    assert not odd._client.exists(key)


def test_a_row_that_cannot_be_read_is_forgotten(by_url: Callable[..., Said], tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite3"
    with closing(open_store(f"sqlite:///{path}")) as store:
        settle(store, ODD)
        with closing(sqlite3.connect(path, isolation_level=None)) as database:
            database.execute("UPDATE celery_idempotency SET state = 'quarantined'")
        assert Run(by_url, store)("show", ODD).status == Exit.UNREADABLE
    with closing(open_store(f"sqlite:///{path}")) as store:
        assert Run(by_url, store)("forget", ODD, "--yes").out == f"{ODD} is forgotten\n"
    with closing(open_store(f"sqlite:///{path}")) as store:
        assert store.get(ODD) is None


class Fading(Shelf):
    """A store that goes away after two deletions."""

    deletions = 0

    def delete(self, key: str) -> bool:
        self.deletions += 1
        if self.deletions > 2:
            raise StoreUnreachable("The store cannot serve.")
        return super().delete(key)


def test_a_store_that_goes_away_says_how_far_it_came() -> None:
    store = Fading()
    fill(store)
    said = by_app(app_with(store), "forget", "--prefix", ACME, "--yes")
    assert said.status == Exit.UNREACHABLE
    assert "2 records forgotten before it ended" in said.err
    assert len(keys(store)) == 2


@pytest.mark.parametrize("verb", ["forget", "release"])
def test_a_key_whose_store_goes_away_keeps_no_other_key_from_its_turn_and_all_are_reported(verb: str) -> None:
    class Broken(Shelf):
        def delete(self, key: str) -> bool:
            raise StoreUnreachable("The store cannot serve.")

        def release(self, lease: Lease, release: Release) -> bool:
            raise StoreUnreachable("The store cannot serve.")

    broken, other = Broken(), Shelf()
    for store in (broken, other):
        hold(store, f"{ACME}1")
    said = by_app(app_with(broken, other), verb, f"{ACME}1", "--yes", "--json")
    assert said.status == Exit.UNREACHABLE
    assert "The store cannot serve." in said.err
    assert json.loads(said.out) == {{"forget": "forgotten", "release": "released"}[verb]: 1, "left": 0, "missing": []}
    assert len(keys(broken)) == 1


def interrupted(process: subprocess.Popen[bytes]) -> None:
    """Press Ctrl-C, and once more whenever nothing has come of it for some seconds, until the process has ended."""
    for _ in range(6):
        process.send_signal(signal.SIGINT)
        try:
            process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            continue
        return
    raise AssertionError("it does not end")


def test_ctrl_c_at_the_question_ends_with_130_and_forgets_nothing(redis_url: str, redis_store: RedisStore) -> None:
    fill(redis_store)
    command = [sys.executable, "-m", "celery_idempotent.cli", "forget", "--prefix", ACME, "--store", redis_url]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ}
    ) as process:
        assert process.stderr is not None
        said = b""
        while b"[y/N]" not in said:
            piece = os.read(process.stderr.fileno(), 1000)
            assert piece, said
            said += piece
        # Standard input stays open: nobody there is another answer. Python hears of an interrupt that comes right
        # before it begins to read only when something is read; people press again then.
        interrupted(process)
        rest = process.stderr.read()
    assert process.returncode == Exit.INTERRUPTED
    assert b"Traceback" not in rest
    assert len(keys(redis_store)) == 4
