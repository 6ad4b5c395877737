"""Workers whose store is a SQLite file: for one machine, without a server."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from celery import Celery

from celery_idempotent.stores import State
from celery_idempotent.stores.sqlite import SqliteStore
from tests.support.celery.fixtures import StartWorker
from tests.support.celery.gates import Gates
from tests.support.celery.journal import Journal

APP = "tests.support.celery.books_app"


@pytest.fixture
def books(tmp_path: Path) -> Path:
    path = tmp_path / "books.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE books (order_id TEXT)")
    return path


@pytest.fixture
def store_url(books: Path) -> str:
    return f"sqlite:///{books}"


@pytest.fixture
def worker_env(worker_env: dict[str, str], books: Path) -> dict[str, str]:
    return {**worker_env, "BOOKS": str(books)}


@pytest.fixture
def app(client_app: Callable[..., Celery]) -> Celery:
    return client_app(APP)


@pytest.fixture
def store(store_url: str) -> Iterator[SqliteStore]:
    store = SqliteStore.from_url(store_url)
    yield store
    store.close()


def booked(books: Path) -> list[str]:
    with closing(sqlite3.connect(books)) as connection:
        return [order for (order,) in connection.execute("SELECT order_id FROM books").fetchall()]


def test_duplicates_at_once_and_afterwards_get_the_result_of_one_run(
    app: Celery, start_worker: StartWorker, journal: Journal, gates: Gates
) -> None:
    gate = gates.close("before ORD-1")
    for _ in range(2):
        start_worker(APP, ready=False)
    results = [app.module.charge.delay("ORD-1") for _ in range(3)]
    gate.reached()
    gate.open()
    assert [result.get(timeout=30) for result in results] == ["charged ORD-1"] * 3
    assert app.module.charge.delay("ORD-1").get(timeout=30) == "charged ORD-1"
    assert (journal.count("started"), journal.count("charged")) == (1, 1)


@pytest.mark.nightly
def test_the_task_of_a_killed_child_runs_again_without_waiting_for_its_lease(
    app: Celery, start_worker: StartWorker, journal: Journal, gates: Gates, store: SqliteStore
) -> None:
    gate = gates.close("before ORD-1")
    node = start_worker(APP)
    result = app.module.charge.delay("ORD-1")
    [pid] = gate.reached()
    node.kill_child(pid)
    gate.reached(2)
    record = store.get(f"idem:{APP}.charge::ORD-1")
    assert record is not None
    assert (record.state, record.crashes) == (State.IN_PROGRESS, 1)
    gate.open()
    assert result.get(timeout=30) == "charged ORD-1"
    assert (journal.count("started"), journal.count("charged")) == (2, 1)


def test_a_child_that_is_killed_before_its_commit_has_done_nothing_and_runs_again(
    app: Celery, start_worker: StartWorker, journal: Journal, gates: Gates, books: Path
) -> None:
    gate = gates.close("before the commit of ORD-1")
    node = start_worker(APP)
    result = app.module.book.delay("ORD-1")
    [pid] = gate.reached()
    assert booked(books) == []
    node.kill_child(pid)
    gate.reached(2, timeout=30)
    gate.open()
    assert result.get(timeout=30) == "booked ORD-1"
    assert booked(books) == ["ORD-1"]
    assert journal.count("started") == 2


@pytest.mark.nightly
def test_a_child_that_is_killed_after_its_commit_has_done_it_and_replays(
    app: Celery, start_worker: StartWorker, journal: Journal, gates: Gates, books: Path, store: Any
) -> None:
    gate = gates.close("after the commit of ORD-1")
    node = start_worker(APP)
    result = app.module.book.delay("ORD-1")
    [pid] = gate.reached()
    node.kill_child(pid)
    assert result.get(timeout=30) == "booked ORD-1"
    assert app.module.book.delay("ORD-1").get(timeout=30) == "booked ORD-1"
    assert (booked(books), journal.count("started")) == (["ORD-1"], 1)
