"""What happened to a key is told in order, by whichever process saw it, and a first run leaves nothing to tell."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import Celery, signals

from celery_idempotent.celery import task
from celery_idempotent.core import history
from celery_idempotent.events import Replayed
from celery_idempotent.stores.history import facts_of
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.stores.redis import RedisStore
from tests.support.celery.fixtures import StartWorker
from tests.support.celery.gates import Gates
from tests.support.waiting import wait_until

SHOP = "tests.support.celery.shop"
KEY = f"idem:{SHOP}.charge::ORD-1"


@pytest.fixture
def app(client_app: Callable[..., Celery]) -> Celery:
    return client_app(SHOP)


@pytest.fixture
def store(store_url: str) -> Iterator[RedisStore]:
    store = RedisStore.from_url(store_url)
    yield store
    store.close()


def events(store: RedisStore) -> list[dict[str, Any]]:
    return [facts_of(noted.text) for noted in store.history(KEY)]


def names(store: RedisStore) -> list[str]:
    return [str(facts["event"]) for facts in events(store)]


def explain(store_url: str, *options: str) -> str:
    command = [sys.executable, "-m", "celery_idempotent.cli", "explain", KEY, "--store", store_url, *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout


def in_order(text: str, *wanted: str) -> bool:
    return re.search(".*".join(map(re.escape, wanted)), text, re.DOTALL) is not None


@pytest.mark.nightly
def test_a_killed_child_a_take_over_a_deferral_and_a_replay_are_explained_in_order(
    app: Celery, start_worker: StartWorker, gates: Gates, store: RedisStore, store_url: str
) -> None:
    gate = gates.close("before ORD-1")
    options = {"visibility_timeout": 1, "env": {"LEASE_TTL": "3"}}
    first = start_worker(SHOP, **options)
    result = app.module.charge.delay("ORD-1")
    [pid] = gate.reached()
    first.kill_child(pid)
    gate.reached(2)
    wait_until(lambda: names(store)[:2] == ["Released", "Acquired"], message=lambda: f"the crash: {names(store)}")
    first.kill("SIGKILL")
    start_worker(SHOP, **options)
    gate.reached(3, timeout=30)
    duplicate = app.module.charge.delay("ORD-1")

    def deferred() -> bool:
        return any(facts["event"] == "Deferred" and facts["task_id"] == duplicate.id for facts in events(store))

    wait_until(deferred, message=lambda: f"the duplicate to be deferred: {names(store)}")
    gate.open()
    assert result.get(timeout=20) == duplicate.get(timeout=30)
    # By two processes, in any order.
    wait_until(lambda: {"Completed", "Replayed"} <= set(names(store)), message=lambda: f"both: {names(store)}")
    told = explain(store_url)
    words = ("its process died", "begun by", "taken over by", "deferred: its copy", "completed after", "replayed to")
    assert in_order(told, *words), told
    assert f"replayed to task {duplicate.id[:8]}" in told
    assert "Now: completed" in told
    assert max(map(len, told.splitlines())) <= 80
    said = json.loads(explain(store_url, "--json"))
    [taken_over] = [facts for facts in said["history"] if facts["event"] == "TakenOver"]
    assert (taken_over["task_id"], taken_over["crashes"]) == (result.id, 2)
    assert said["now"]["state"] == "completed"


@pytest.mark.parametrize("pool", ["prefork", "threads", "gevent"])
def test_the_last_note_is_written_when_a_worker_stops_and_a_first_run_leaves_none(
    app: Celery, start_worker: StartWorker, store: RedisStore, pool: str
) -> None:
    node = start_worker(SHOP, pool=pool)
    first = app.module.charge.delay("ORD-1")
    first.get(timeout=20)
    again = app.module.charge.delay("ORD-1")
    again.get(timeout=20)
    assert node.stop() == 0
    assert [(facts["event"], facts["task_id"]) for facts in events(store)] == [("Replayed", again.id)]


@pytest.mark.nightly
def test_a_task_without_history_leaves_no_notes_and_is_explained_by_its_record(
    app: Celery, start_worker: StartWorker, gates: Gates, store: RedisStore, store_url: str
) -> None:
    gate = gates.close("before ORD-1")
    node = start_worker(SHOP, env={"NO_HISTORY": "1"})
    result = app.module.charge.delay("ORD-1")
    [pid] = gate.reached()
    node.kill_child(pid)
    gate.reached(2)
    duplicate = app.module.charge.delay("ORD-1")
    wait_until(lambda: "Deferred " in node.logs(), message="the duplicate to be deferred")
    record = store.get(KEY)
    assert record is not None
    assert record.waiting == 1
    gate.open()
    assert result.get(timeout=20) == duplicate.get(timeout=30)
    assert node.stop() == 0
    for told in ("Released", "Deferred", "Replayed"):
        assert f"{told} key={KEY}" in node.logs()
    assert events(store) == []
    told = explain(store_url)
    assert told.splitlines()[0] == KEY
    assert in_order(told, "Now: completed", f"by task {result.id[:8]}", "It is done: duplicates are answered"), told
    said = json.loads(explain(store_url, "--json"))
    assert (said["history"], said["now"]["state"]) == ([], "completed")


@pytest.mark.parametrize("ending", [signals.worker_process_shutdown, signals.worker_shutdown], ids=["child", "worker"])
def test_celerys_word_that_a_process_ends_has_its_notes_written(monkeypatch: pytest.MonkeyPatch, ending: Any) -> None:
    monkeypatch.setattr(history, "PAUSE", 3600.0)
    of_this_process, store = history.History(), MemoryStore()
    monkeypatch.setattr(task, "history", of_this_process)
    of_this_process.note(store, Replayed(KEY), 60)
    ending.send(sender=None)
    assert [facts_of(noted.text)["event"] for noted in store.history(KEY)] == ["Replayed"]
