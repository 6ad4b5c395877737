"""`explain`: what happened to a key, in order, in words that fit a terminal, and what that means."""

from __future__ import annotations

import json
import os
import re
import uuid
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from celery_idempotent import IdempotentTask, events
from celery_idempotent.cli.common import Exit
from celery_idempotent.cli.explain import advice, describe_event, describe_record
from celery_idempotent.core.history import text_of
from celery_idempotent.core.results import Codec
from celery_idempotent.errors import StoreRefused
from celery_idempotent.events import Event
from celery_idempotent.stores import Claim, HistoryEntry, Lease, Outcome, PastEvent, Reason, Record, State, Store
from celery_idempotent.stores.history import facts_of
from celery_idempotent.stores.redis import RedisStore
from celery_idempotent.units import format_duration
from tests.cli.conftest import Run, Said, app_with, by_app, pay
from tests.support.cli.shelf import Shelf, hold, release, settle

KEY = "idem:shop.charge::ORD-1"
FIRST, SECOND = str(uuid.UUID(int=1)), str(uuid.UUID(int=2))


def note(store: Store, *told: Event, ago: float = 0.0) -> None:
    store.append_history([HistoryEntry(KEY, text_of(event), ago, 3600 + ago) for event in told])


def test_what_happened_is_told_in_order_and_what_it_means(on_redis: Run, redis_store: RedisStore) -> None:
    settle(redis_store, KEY)
    note(redis_store, events.TakenOver(KEY, task_id=FIRST, holder="worker-2:4711", crashes=1), ago=120)
    note(redis_store, events.Completed(KEY, task_id=FIRST, ran=31.2), ago=90)
    note(redis_store, events.Replayed(KEY, task_id=SECOND, original=FIRST), ago=40)
    said = on_redis("explain", KEY)
    assert said.status == Exit.OK
    lines = [re.sub(r"\d\d:\d\d:\d\d", "12:03:10", line) for line in said.out.splitlines()]
    assert lines[0] == KEY
    assert lines[1].endswith("(2 min ago)  taken over by worker-2:4711, task 00000000..., after 1")
    assert lines[2].strip() == "crash"
    assert lines[3].endswith("(2 min ago)  completed after 31 s")
    found = re.search(r"\((\d+) s ago\)   replayed to task 00000000\.\.\.$", lines[4])
    assert found is not None
    assert 40 <= int(found[1]) < 50  # the command itself takes some of it
    assert lines[5].startswith("Now: completed ")
    assert lines[6].startswith("What this means: It is done")


def test_a_result_that_was_not_kept_is_not_promised_to_duplicates(on_redis: Run, redis_store: RedisStore) -> None:
    kept_nothing = Codec(compress_above=1024, result_max_bytes=1024).encode_value({1, 2})
    redis_store.settle(hold(redis_store, KEY), Outcome(State.COMPLETED, kept_nothing), ttl=60)
    said = json.loads(on_redis("explain", KEY, "--json").out)["advice"]
    assert re.match(r"It is done: .*not kept \(.* as json: TypeError: .*\): those .* fail with ResultUnavailable", said)


def test_scripts_get_all_of_it_with_whole_ids(on_redis: Run, redis_store: RedisStore) -> None:
    settle(redis_store, KEY)
    note(redis_store, events.Replayed(KEY, task_id=SECOND, original=FIRST, age=7.0), ago=40)
    said = json.loads(on_redis("explain", KEY, "--json").out)
    [replayed] = said["history"]
    assert 40 <= replayed.pop("ago") < 60
    assert replayed.pop("at").endswith("+00:00")
    assert replayed == {"event": "Replayed", "task_id": SECOND, "original": FIRST, "age": 7.0}
    assert (said["key"], said["now"]["state"]) == (KEY, "completed")
    assert said["advice"].startswith("It is done")


def test_a_first_run_is_explained_by_its_record_alone(on_redis: Run, redis_store: RedisStore) -> None:
    hold(redis_store, KEY)
    said = on_redis("explain", KEY)
    assert said.status == Exit.OK
    assert said.out.splitlines()[1].startswith("Now: in progress by host:1, task T1; its lease lasts 60 s")
    assert "Wait: " in said.out
    assert json.loads(on_redis("explain", KEY, "--json").out)["history"] == []


def test_a_history_without_a_record_is_told_too(on_shelf: Run, shelf: Shelf) -> None:
    note(shelf, events.CrashLooped(KEY, task_id="T1", crashes=5))
    said = on_shelf("explain", KEY)
    assert said.status == Exit.OK
    assert "refused to task T1, after 5 crashes in a row" in said.out
    assert "Now: nothing is remembered" in said.out
    assert json.loads(on_shelf("explain", KEY, "--json").out)["now"] is None


def test_a_key_that_nobody_knows_gets_a_no_and_a_hint(on_shelf: Run, shelf: Shelf) -> None:
    settle(shelf, KEY)
    said = on_shelf("explain", "shop.charge::ORD-1")
    assert (said.status, said.out) == (Exit.NO, "")
    assert f"did you mean {KEY}?" in said.err


def test_with_several_stores_each_tells_what_it_knows() -> None:
    own, other = Shelf(), Shelf()
    app = app_with(own, other)
    settle(other, KEY)
    note(own, events.KeyReused(KEY, task_id="T2"))
    said = by_app(app, "explain", KEY)
    assert said.status == Exit.OK
    assert [line for line in said.out.splitlines() if line.startswith(KEY)] == [
        f"{KEY} in Shelf",
        f"{KEY} in Shelf (2)",
    ]
    first, second = (json.loads(line) for line in by_app(app, "explain", KEY, "--json").out.splitlines())
    assert (first["store"], second["store"]) == ("Shelf", "Shelf (2)")


class Refusing(Shelf):
    """A store that does not let us read what was noted."""

    def history(self, key: str) -> list[PastEvent]:
        raise StoreRefused("no right to it")


def test_a_store_that_refuses_its_history_says_so(by_url: Callable[..., Said]) -> None:
    said = Run(by_url, Refusing())("explain", KEY)
    assert (said.status, said.err) == (Exit.REFUSED, "Error: no right to it\n")


def test_an_older_day_is_told_with_its_date(on_shelf: Run, shelf: Shelf) -> None:
    shelf.append_history([HistoryEntry(KEY, "mended by hand", 3 * 86400, 9 * 86400)])
    assert re.search(r"  \d{4}-\d\d-\d\d \d\d:\d\d:\d\d  \(3 d ago\)  mended by hand\n", on_shelf("explain", KEY).out)


LONG = {"task_id": FIRST, "holder": "worker-17.eu-west-1.shop.example.com:31337"}
EVERY = [
    (events.Acquired(KEY, retries=2, copy=3, redelivered=True, **LONG), "(retry 2, copy 3, delivered before)"),
    (events.TakenOver(KEY, crashes=2, **LONG), "after 2 crashes"),
    (events.Completed(KEY, ran=0.04, **LONG), "completed after 0.04 s"),
    (events.Failed(KEY, error="CardDeclined", ran=5, **LONG), "failed for good after 5 s: CardDeclined"),
    (events.Released(KEY, reason="crashed", **LONG), "released: its process died"),
    (events.Released(KEY, reason="retry", ran=1, **LONG), "released after 1 s: the task retries"),
    (events.Released(KEY, reason="pondered", **LONG), "released: pondered"),
    (
        events.ReleaseFailed(KEY, reason="retry", error="down", ran=1, **LONG),
        "lease has to run out, for the store could",
    ),
    (events.Replayed(KEY, state="completed", **LONG), "replayed to task 00000000..."),
    (events.Replayed(KEY, state="failed", **LONG), "its failure replayed to task 00000000..."),
    (events.Conflicted(KEY, held_by="host:1", held_for=SECOND, **LONG), "is being done by host:1 for task 00000000..."),
    (events.Conflicted(KEY, held_by="host:1", **LONG), "is being done by host:1 for the same task"),
    (events.Conflicted(KEY, remaining=3, **LONG), "while it waits for a retry"),
    (events.Deferred(KEY, delay=30, copy=2, **LONG), "deferred: its copy 2 tries again in 30 s"),
    (events.Superseded(KEY, **LONG), "a copy of task 00000000... dropped: a later one has taken its place"),
    (events.KeyReused(KEY, original=SECOND, **LONG), "which has other arguments"),
    (events.CrashLooped(KEY, crashes=5, **LONG), "after 5 crashes in a row"),
    (events.LeaseLost(KEY, ending="ValueError: x", ran=9, **LONG), "taken over after 9 s: ValueError, unrecorded"),
    (events.SettleFailed(KEY, error="down " * 50, ran=9, **LONG), "after 9 s, and the store could not record it: down"),
    (events.RanUnprotected(KEY, error="down", **LONG), "without a lease, since the store could not serve: down"),
]


@pytest.mark.parametrize(("event", "words"), EVERY, ids=lambda value: type(value).__name__)
def test_every_event_has_a_sentence_that_fits_a_terminal(by_url: Callable[..., Said], event: Event, words: str) -> None:
    shelf = Shelf()
    note(shelf, event, ago=2 * 86400)
    assert words in describe_event(facts_of(text_of(event)))
    out = Run(by_url, shelf)("explain", KEY).out
    assert max(map(len, out.splitlines())) <= 80
    assert words.split()[-1] in out


def test_every_kind_of_event_that_is_noted_has_one() -> None:
    told = {type(event) for event, _ in EVERY}
    about_stores = {events.StoreFailed, events.StoreRecovered}
    of_publishers = {events.PublishSkipped, events.PublishReplaced, events.PublishRepeated}
    kinds = {getattr(events, name) for name in events.__all__} - {Event} - about_stores - of_publishers
    assert told == kinds


def test_what_this_version_does_not_know_is_told_by_its_name() -> None:
    assert describe_event({"event": "Teleported", "to": "host:2"}) == "Teleported"
    assert describe_event({"event": "Completed", "ran": "PT31S"}) == "completed after PT31S"


RECORD = Record(KEY, State.IN_PROGRESS, 1, owner="o", task_id="T1", holder="host:1")


@pytest.mark.parametrize(
    ("changes", "stands", "means"),
    [
        ({"remaining": 20.0}, "in progress by host:1, task T1; its lease lasts 20 s", "Wait"),
        ({"retention": 3600.0}, "whose lease ran out; kept for 60 min", "next delivery takes over"),
        ({"remaining": 20.0, "reason": "shutdown"}, "task T1, whose worker is shutting down; its lease", "Wait"),
        ({"reason": "shutdown"}, "whose lease ran out in a shutdown", "next delivery takes over"),
        ({"state": State.COMPLETED, "age": 60.0}, "completed 60 s ago by task T1", "answered with its result"),
        ({"state": State.FAILED, "age": 0.1}, "failed 0.1 s ago", "forget KEY"),
        ({"state": State.RELEASED, "reason": "failed"}, "released: the run failed", "next delivery runs"),
        ({"state": State.RELEASED, "reason": "retry", "remaining": 30.0}, "the task retries", "goes on within 30 s"),
        ({"state": State.RELEASED, "reason": "crashed", "crashes": 1}, "process died; 1 crash in a row", "runs"),
        ({"state": State.RELEASED, "reason": "crash_loop", "crashes": 5}, "kept dying; 5 crashes", "what kills the"),
        ({"state": State.RELEASED, "reason": ""}, "released: given back", "next delivery runs"),
        ({"state": State.RELEASED, "reason": "pondered"}, "released: pondered", "next delivery runs"),
    ],
)
def test_each_state_of_a_record_is_told_and_what_it_means(changes: dict[str, Any], stands: str, means: str) -> None:
    record = replace(RECORD, **changes)
    assert stands in describe_record(record)
    assert means in advice(record)


@pytest.mark.parametrize("reason", Reason)
def test_every_reason_of_a_release_has_words(reason: Reason) -> None:
    told = describe_record(replace(RECORD, state=State.RELEASED, reason=reason.value))
    assert len(told.removeprefix("released: ").split()) > 2


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.0001, "0 s"), (0.04, "0.04 s"), (3.14159, "3.1 s"), (31.2, "31 s"), (89, "89 s"), (120, "2 min"),
     (5400, "2 h"), (80000, "22 h"), (86400 * 30, "30 d")],
)  # fmt: skip
def test_a_duration_is_told_in_its_largest_unit(seconds: float, words: str) -> None:
    assert format_duration(seconds) == words


#: What a task id, a holder or the key of another program may hold; a terminal would obey it.
EVIL = "T-\x1b]0;owned\x07\x1b[2J\u202e\n12:00:00 completed"


@pytest.mark.parametrize(
    "arguments", ["explain", "show", "list --prefix", "forget --dry-run", "forget", "release", "release --yes"]
)
def test_what_comes_from_elsewhere_commands_no_terminal(on_redis: Run, redis_store: RedisStore, arguments: str) -> None:
    key = f"idem:{EVIL}"
    lease = redis_store.acquire(Claim(key, "o", 60, 600, task_id=EVIL, holder=EVIL))
    assert isinstance(lease, Lease)
    event = events.Completed(key, task=EVIL, task_id=EVIL, holder=EVIL)
    redis_store.append_history([HistoryEntry(key, text_of(event), 1.0, 60.0)])
    command, *options = arguments.split()
    for answer in ("n\n", "y\n"):
        said = on_redis(command, *options, key, answer=answer)
        assert all(line.isprintable() for line in (said.out + said.err).split("\n")), said
        assert "\n12:00:00 completed" not in said.out + said.err
        assert "\\x1b]0;owned\\x07" in said.out + said.err


def test_an_error_commands_no_terminal(on_redis: Run, redis_store: RedisStore) -> None:
    for arguments in (("show", EVIL), ("forget", "--prefix", EVIL), ("list", "--task", EVIL), ("show", "--arg", EVIL)):
        said = on_redis(*arguments)
        assert said.err
        assert all(line.isprintable() for line in said.err.split("\n")), said


def test_a_record_that_was_released_is_explained(on_shelf: Run, shelf: Shelf) -> None:
    release(shelf, KEY)
    assert "No worker is doing it. The next delivery runs." in on_shelf("explain", KEY).out


# -- what an operator did ----------------------------------------------------------------------------------------------


@pytest.fixture
def ada(monkeypatch: pytest.MonkeyPatch) -> str:
    """The operator, as a history names them."""
    monkeypatch.delenv("SUDO_USER", raising=False)
    monkeypatch.setenv("LOGNAME", "ada")
    monkeypatch.setattr("socket.gethostname", lambda: "desk-7")
    return "ada@desk-7"


def told(store: Store) -> list[dict[str, Any]]:
    return [facts_of(noted.text) for noted in store.history(KEY)]


def test_who_released_a_key_is_in_its_history(on_redis: Run, redis_store: RedisStore, ada: str) -> None:
    hold(redis_store, KEY)
    assert on_redis("release", KEY, "--yes").status == Exit.OK
    [facts] = told(redis_store)
    command = facts.pop("command")
    assert command.endswith(" release")
    assert facts == {"event": "ReleasedByOperator", "operator": ada, "holder": "host:1", "task_id": "T1"}
    said = on_redis("explain", KEY).out
    assert f"released by {ada} ({command}) from host:1, task T1" in " ".join(said.split())


@pytest.mark.parametrize(
    "how", [(KEY, "--yes"), ("--prefix", "idem:shop.charge:", "--yes", "--force")], ids=["", "all"]
)
def test_who_forgot_a_key_is_told_when_its_record_is_gone(
    on_redis: Run, redis_store: RedisStore, ada: str, how: tuple[str, ...]
) -> None:
    hold(redis_store, KEY)
    on_redis("release", KEY, "--yes")
    settle(redis_store, KEY)
    note(redis_store, events.Replayed(KEY, task_id=SECOND, original=FIRST), ago=40)
    assert on_redis("forget", *how).status == Exit.OK
    assert redis_store.get(KEY) is None
    # What operators did outlives the record; what deliveries did is forgotten with it.
    assert [facts["event"] for facts in told(redis_store)] == ["ReleasedByOperator", "ForgottenByOperator"]
    said = " ".join(on_redis("explain", KEY).out.split())
    assert re.search(rf"forgotten by {ada} \([\w -]+ forget\): it was completed, by task T1", said)
    assert "Now: nothing is remembered" in said


def test_forgetting_a_key_twice_leaves_in_its_history_that_it_was_forgotten(
    on_redis: Run, redis_store: RedisStore
) -> None:
    settle(redis_store, KEY)
    on_redis("forget", KEY)
    assert on_redis("forget", KEY).status == Exit.NO
    assert [facts["event"] for facts in told(redis_store)] == ["ForgottenByOperator"]


def test_what_an_operator_did_is_kept_no_longer_than_other_notes(on_shelf: Run, shelf: Shelf) -> None:
    settle(shelf, KEY)
    on_shelf("forget", KEY)
    assert len(shelf.history(KEY)) == 1
    shelf.offset += 24 * 3600 - 60
    assert len(shelf.history(KEY)) == 1
    shelf.offset += 120
    assert shelf.history(KEY) == []


def test_it_is_kept_as_long_as_the_options_of_the_task_say(shelf: Shelf) -> None:
    app = app_with(shelf, idempotency={"result_ttl": "7d"})
    app.task(pay, name="shop.charge", base=IdempotentTask)
    settle(shelf, KEY)
    by_app(app, "forget", KEY)
    shelf.offset += 7 * 24 * 3600 - 60
    assert len(shelf.history(KEY)) == 1


@pytest.mark.parametrize("command", [("forget", KEY, "--dry-run"), ("forget", KEY), ("release", KEY)])
def test_what_an_operator_only_asked_for_is_not_noted(on_shelf: Run, shelf: Shelf, command: tuple[str, ...]) -> None:
    hold(shelf, KEY)
    on_shelf(*command, answer="n\n")
    assert shelf.history(KEY) == []


class Mute(Shelf):
    """Forgets and releases, and takes no notes."""

    def append_history(self, notes: object) -> None:
        raise StoreRefused("Expected the table of histories, and it is not there.")


def test_a_store_that_takes_no_notes_forgets_all_the_same_and_says_so(invoke: Callable[..., Said]) -> None:
    store = Mute()
    run = Run(invoke, store)
    hold(store, KEY)
    released = run("release", KEY, "--yes")
    assert (released.status, f"{KEY} is released" in released.out) == (Exit.OK, True)
    forgotten = run("forget", KEY, "--yes")
    assert (forgotten.status, store.get(KEY)) == (Exit.OK, None)
    for said in (released, forgotten):
        assert "could not be noted in its history" in said.err


def test_an_operator_without_a_name_is_told_by_their_number(
    on_shelf: Run, shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nameless() -> str:
        raise KeyError("getpwuid(): uid not found: 4711")

    monkeypatch.delenv("SUDO_USER", raising=False)
    monkeypatch.setattr("getpass.getuser", nameless)
    settle(shelf, KEY)
    on_shelf("forget", KEY)
    assert told(shelf)[0]["operator"].startswith(f"{os.getuid()}@")


def test_behind_sudo_it_is_who_typed_it(on_shelf: Run, shelf: Shelf, ada: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUDO_USER", "grace")
    settle(shelf, KEY)
    on_shelf("forget", KEY)
    assert told(shelf)[0]["operator"] == "grace@desk-7"
