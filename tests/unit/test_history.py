"""What happens to keys is noted off the hot path: late, at times not at all, and never to a task's harm."""

from __future__ import annotations

import inspect
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from celery_idempotent.core import binding
from celery_idempotent.core import history as module
from celery_idempotent.core.binding import Binding
from celery_idempotent.core.history import LONGEST, PENDING, TRIES, DeliveryEvents, History, text_of
from celery_idempotent.core.policy import Policy
from celery_idempotent.core.results import Codec
from celery_idempotent.errors import StoreRefused, StoreUnreachable
from celery_idempotent.events import (
    Acquired,
    Completed,
    Conflicted,
    Deferred,
    Event,
    LeaseLost,
    Replayed,
    SettleFailed,
    TakenOver,
)
from celery_idempotent.stores import Claim, HistoryEntry
from celery_idempotent.stores.history import facts_of
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.stores.records import HISTORY_LIMIT
from tests.support.stores.sqlite_children import fork
from tests.support.unit.scripted import PROMPTLY, listening
from tests.support.waiting import wait_until

KEEP = 3600.0
heard = pytest.fixture(listening)


def replayed(number: int = 0, key: str = "k") -> Replayed:
    return Replayed(key, "shop.charge", f"task-{number}", holder="host:1")


class Batches(MemoryStore):
    """Remembers in which batches it was given notes, and fails as it is told to."""

    def __init__(self, *errors: Exception) -> None:
        super().__init__()
        self.errors = list(errors)
        self.batches: list[Sequence[HistoryEntry]] = []

    def append_history(self, notes: Sequence[HistoryEntry]) -> None:
        self.batches.append(notes)
        if self.errors:
            raise self.errors.pop(0)
        super().append_history(notes)

    def told(self, key: str = "k") -> list[str]:
        return [facts_of(noted.text)["task_id"] for noted in self.history(key)]


@pytest.fixture
def still(monkeypatch: pytest.MonkeyPatch) -> History:
    """A history that writes when a test calls `write`, and not by itself."""
    monkeypatch.setattr(History, "_start", lambda self: None)
    return History()


# -- which events are noted --------------------------------------------------------------------------------------------


def delivery(note: Callable[[Event], None] | None, **claim: Any) -> DeliveryEvents:
    return DeliveryEvents(Claim("k", "me", 60.0, KEEP, holder="host:1", **claim), "shop.charge", "task-1", note)


def kinds(events: list[Event]) -> list[type[Event]]:
    return [type(event) for event in events]


def test_a_first_run_that_completes_is_not_noted(heard: list[Event]) -> None:
    noted: list[Event] = []
    told = delivery(noted.append)
    told.emit(Acquired, fence=7)
    told.emit(Completed, fence=7)
    assert noted == []
    assert heard == [Acquired("k", "shop.charge", "task-1", fence=7), Completed("k", "shop.charge", "task-1", fence=7)]
    assert [event.holder for event in heard] == ["host:1", "host:1"]


def test_of_a_run_that_took_over_all_is_noted_from_then_on(heard: list[Event]) -> None:
    noted: list[Event] = []
    told = delivery(noted.append)
    told.emit(TakenOver, crashes=1)
    told.emit(Completed)
    assert noted == heard
    assert kinds(noted) == [TakenOver, Completed]


@pytest.mark.parametrize("claim", [{"copy": 1}, {"retries": 1}, {"redelivered": True}])
def test_of_a_copy_a_retry_and_a_redelivery_all_is_noted(claim: dict[str, Any]) -> None:
    noted: list[Event] = []
    told = delivery(noted.append, **claim)
    told.emit(Acquired)
    told.emit(Completed)
    assert kinds(noted) == [Acquired, Completed]


def test_a_delivery_without_history_emits_its_events_all_the_same(heard: list[Event]) -> None:
    told = delivery(None, copy=1)
    for kind in (TakenOver, Completed, Deferred, Replayed):
        told.emit(kind)
    assert kinds(heard) == [TakenOver, Completed, Deferred, Replayed]


@pytest.mark.parametrize("kept", [True, False])
def test_the_policy_says_whether_a_task_has_a_history(still: History, kept: bool, monkeypatch: Any) -> None:
    monkeypatch.setattr(binding, "history", still)
    store = Batches()
    task = Binding("t", inspect.signature(len), Policy(history=kept), "idem")
    monkeypatch.setattr(task, "_store", lambda: store)
    monkeypatch.setattr(task, "_codec", lambda: Codec(compress_above=1024, result_max_bytes=1024))
    task.events_of(Claim("k", "me", 60.0, KEEP), "task-1").emit(Replayed)
    still.write()
    assert [facts_of(entry.text)["event"] for entry in store.history("k")] == ["Replayed"] * kept


def test_a_message_that_is_deferred_for_hours_does_not_fill_the_history_of_its_key(still: History) -> None:
    store = Batches()
    noted: list[Event] = []
    for copy in range(1, 1001):
        delivery(noted.append, copy=copy - 1).emit(Conflicted)
        still.note(store, Deferred("k", copy=copy), KEEP)
    still.write()
    assert kinds(noted) == [Conflicted]
    assert [facts_of(noted.text)["copy"] for noted in store.history("k")] == [2**n for n in range(10)]


# -- what a note says --------------------------------------------------------------------------------------------------


def test_a_note_says_what_happened_and_neither_the_key_nor_what_is_empty() -> None:
    text = text_of(Deferred("idem:shop.charge::1", "shop.charge", "T1", delay=1.23456, copy=2, holder="host:1"))
    said = {"event": "Deferred", "task_id": "T1", "delay": 1.235, "copy": 2, "holder": "host:1"}
    assert json.loads(text) == said == facts_of(text)
    assert "\n" not in text_of(Conflicted("k", held_by="a\nb☃"))
    assert text_of(Conflicted("k", held_by="a\nb☃")).isascii()


def test_of_an_exception_its_type_is_noted_and_not_its_message() -> None:
    """A message may have argument values in it, or be endless."""
    assert facts_of(text_of(LeaseLost("k", ending="ValueError: card 4111 1111")))["ending"] == "ValueError"
    assert len(facts_of(text_of(SettleFailed("k", error="x" * 5000)))["error"]) == LONGEST


@pytest.mark.parametrize("text", ["", "words", "[1]", "{}", '{"event": 1}', "7"])
def test_a_line_that_is_none_of_ours_is_told_as_it_is(text: str) -> None:
    assert facts_of(text) == {"event": text}


# -- how notes are written ---------------------------------------------------------------------------------------------


def test_notes_are_written_by_a_thread_that_the_first_one_starts() -> None:
    store, history = Batches(), History()
    before = set(threading.enumerate())  # of other tests, which may end at any moment
    history.note(store, replayed(), KEEP)
    [thread] = set(threading.enumerate()) - before
    wait_until(store.told, PROMPTLY)
    history.note(store, replayed(1), KEEP)
    wait_until(lambda: len(store.told()) == 2, PROMPTLY)
    assert set(threading.enumerate()) - before == {thread}


def test_notes_of_half_a_second_are_one_batch_for_each_store(still: History) -> None:
    one, other = Batches(), Batches()
    for number in range(10):
        still.note(one, replayed(number), KEEP)
        still.note(other, replayed(number, "o"), KEEP)
    still.write()
    assert [len(batch) for batch in one.batches] == [len(batch) for batch in other.batches] == [10]
    assert one.told() == [f"task-{number}" for number in range(10)]
    still.write()
    assert len(one.batches) == 1


def test_of_a_storm_on_one_key_only_what_is_kept_is_written(still: History) -> None:
    store = Batches()
    still.note(store, replayed(0, "other"), KEEP)
    for number in range(HISTORY_LIMIT + 7):
        still.note(store, replayed(number), KEEP)
    still.write()
    assert [len(batch) for batch in store.batches] == [HISTORY_LIMIT + 1]
    assert store.told() == [f"task-{number}" for number in range(7, HISTORY_LIMIT + 7)]
    assert still.lost == 0


def test_a_note_says_how_long_ago_it_happened(still: History, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(module, "monotonic", lambda: now)
    store = Batches()
    still.note(store, replayed(), KEEP)
    now = 107.0
    still.write()
    assert [(note.key, note.ago, note.keep) for note in store.batches[0]] == [("k", 7.0, KEEP)]


def test_a_store_that_keeps_no_history_is_left_alone(still: History, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Batches()
    monkeypatch.setattr(store, "keeps_history", False)
    still.note(store, replayed(), KEEP)
    still.write()
    assert store.batches == []


def test_of_too_many_notes_the_oldest_fall_out_and_are_counted(
    still: History, caplog: pytest.LogCaptureFixture
) -> None:
    store = Batches()
    for _ in range(2):
        for number in range(PENDING + 7):
            still.note(store, replayed(number, f"k{number}"), KEEP)
        still.write()
    assert [batch[0].text for batch in store.batches] == [text_of(replayed(7))] * 2
    assert still.lost == 14
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "7 notes fell out" in caplog.text


def test_while_the_store_cannot_serve_notes_are_kept_for_a_few_tries(still: History) -> None:
    store = Batches(*[StoreUnreachable("down")] * (TRIES - 1))
    still.note(store, replayed(1), KEEP)
    still.write()
    still.note(store, replayed(2), KEEP)
    for _ in range(TRIES):
        still.write()
    assert store.told() == ["task-1", "task-2"]
    assert still.lost == 0


def test_a_store_that_is_down_for_longer_loses_them_with_one_warning(
    still: History, caplog: pytest.LogCaptureFixture
) -> None:
    store, other = Batches(*[StoreUnreachable("down")] * 6), Batches()
    for number in range(6):
        still.note(store, replayed(number), KEEP)
        still.note(other, replayed(number), KEEP)
        still.write()
    assert [record.getMessage().count("down") for record in caplog.records] == [1]
    assert len(other.told()) == still.lost == 6
    still.note(store, replayed(6), KEEP)
    still.write()
    assert store.told() == ["task-6"]


@pytest.mark.parametrize("error", [StoreRefused("no right to it"), ValueError("a bug of somebody's store")])
def test_a_store_that_refuses_is_asked_once_and_told_of_once(
    still: History, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    store = Batches(error, error, error)
    for number in range(3):
        still.note(store, replayed(number), KEEP)
        still.write()
    assert [len(batch) for batch in store.batches] == [1, 1, 1]
    assert len(caplog.records) == 1
    assert caplog.records[0].levelno == logging.WARNING
    for number in range(2):  # mended, and broken again
        still.note(store, replayed(number), KEEP)
        still.write()
        store.errors = [error]
    assert len(caplog.records) == 2


def test_the_thread_outlives_whatever_goes_wrong(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, history, write = Batches(), History(), History.write
    failures = [RuntimeError("once")]

    def fails(self: History) -> None:
        if failures:
            raise failures.pop()
        write(self)

    monkeypatch.setattr(History, "write", fails)
    history.note(store, replayed(1), KEEP)
    wait_until(lambda: "could not be written" in caplog.text, PROMPTLY)
    history.note(store, replayed(2), KEEP)
    wait_until(lambda: len(store.told()) == 2, PROMPTLY)


def test_where_no_thread_can_be_started_no_task_is_hurt(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    history = History()
    history.note(Batches(), replayed(), KEEP)
    assert history.flush()


def test_a_signals_handler_may_note_while_the_thread_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def start_interrupted(thread: threading.Thread) -> None:
        monkeypatch.undo()
        history.note(store, replayed(2), KEEP)
        thread.start()

    def note() -> None:
        monkeypatch.setattr(threading.Thread, "start", start_interrupted)
        history.note(store, replayed(1), KEEP)

    history, store = History(), Batches()
    noting = threading.Thread(target=note, daemon=True)
    noting.start()
    noting.join(10)
    history.flush()
    assert sorted(store.told()) == ["task-1", "task-2"]


# -- the end of a process, and forks -----------------------------------------------------------------------------------


def test_at_the_end_of_a_process_what_is_pending_is_written_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PAUSE", 3600.0)
    store, history = Batches(), History()
    assert history.flush()
    history.note(store, replayed(), KEEP)
    assert history.flush(PROMPTLY)
    assert store.told() == ["task-0"]
    assert history.flush()


def test_the_end_of_a_process_waits_no_longer_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PAUSE", 3600.0)
    go_on, history = threading.Event(), History()

    class Hanging(Batches):
        def append_history(self, notes: Sequence[HistoryEntry]) -> None:
            go_on.wait(PROMPTLY)

    history.note(Hanging(), replayed(), KEEP)
    assert not history.flush(0.05)
    go_on.set()
    assert history.flush(PROMPTLY)


def test_the_end_of_a_process_gives_up_on_a_store_that_is_down(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PAUSE", 3600.0)
    store, history = Batches(*[StoreUnreachable("down")] * 99), History()
    history.note(store, replayed(), KEEP)
    assert history.flush(PROMPTLY)
    assert (len(store.batches), history.lost) == (TRIES, 1)


ENDING = """
from celery_idempotent.events import Replayed
from celery_idempotent.core.history import History
from celery_idempotent.stores import Claim
from celery_idempotent.stores.memory import MemoryStore
class Printing(MemoryStore):
    def append_history(self, notes):
        print([note.key for note in notes], flush=True)
History().note(Printing(), Replayed("k"), 60)
"""


def test_a_script_that_ends_has_its_notes_written() -> None:
    run = subprocess.run([sys.executable, "-c", ENDING], capture_output=True, text=True, timeout=30, check=True)
    assert (run.stdout, run.stderr) == ("['k']\n", "")


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["gevent", "eventlet"])
def test_greenlets_note_as_threads_do(kind: str) -> None:
    pytest.importorskip(kind)
    patch = {
        "gevent": "import gevent.monkey; gevent.monkey.patch_all()",
        "eventlet": "import eventlet; eventlet.monkey_patch()",
    }
    waits = "import time\nwhile not store.history('k'): time.sleep(0.01)\nprint('noted')"
    source = ENDING.replace("print([note.key for note in notes], flush=True)", "super().append_history(notes)")
    source = source.replace("History().note(Printing(), ", "store = Printing()\nHistory().note(store, ")
    command = [sys.executable, "-W", "ignore", "-c", f"{patch[kind]}\n{source}{waits}"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert run.stdout == "noted\n", run.stderr


def test_a_child_that_is_forked_notes_by_itself_and_leaves_its_parents_notes_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, history = Batches(), History()
    history.note(store, replayed(), KEEP)
    wait_until(store.told, PROMPTLY)
    monkeypatch.setattr(module, "PAUSE", 3600.0)
    history.note(store, replayed(1), KEEP)

    def note() -> Any:
        store.batches.clear()
        history.note(store, replayed(os.getpid()), KEEP)
        history.flush(PROMPTLY)
        return [len(batch) for batch in store.batches]

    child = fork(note)
    try:
        assert child.said() == "[1]"
    finally:
        child.end()
    assert history.flush(PROMPTLY)
    assert store.told() == ["task-0", "task-1"]
