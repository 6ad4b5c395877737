"""Which file a sqlite:// URL names, and what is refused."""

from __future__ import annotations

import os
from pathlib import Path
from sqlite3 import Cursor
from typing import Any

import pytest

from celery_idempotent.errors import ConfigurationError
from celery_idempotent.stores import open_store
from celery_idempotent.stores.sqlite import SqliteStore
from celery_idempotent.stores.sqlite.connections import TABLE, Address
from tests.support.stores.benches import DONE, known, take


def test_three_slashes_name_a_file_below_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert Address.of("sqlite:///data/tasks.db").path == str(tmp_path / "data" / "tasks.db")


def test_four_slashes_name_a_file_from_the_root() -> None:
    assert Address.of("sqlite:////var/lib/tasks.db").path == "/var/lib/tasks.db"


def test_a_relative_path_is_looked_for_where_the_store_was_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that becomes a daemon changes its folder."""
    monkeypatch.chdir(tmp_path)
    store = open_store("sqlite:///tasks.db")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    take(store)
    store.close()
    assert (tmp_path / "tasks.db").exists()
    assert os.listdir() == []


def test_special_characters_of_a_path_are_escaped_as_in_any_url(tmp_path: Path) -> None:
    store = open_store(f"sqlite:///{tmp_path}/a%20b%3F%25.db")
    take(store)
    store.close()
    assert (tmp_path / "a b?%.db").exists()


def test_a_url_opens_nothing(tmp_path: Path) -> None:
    store = open_store(f"sqlite:///{tmp_path}/nothing/here.db")
    assert isinstance(store, SqliteStore)
    store.close()
    assert list(tmp_path.iterdir()) == []


def test_the_query_gives_options() -> None:
    assert Address.of("sqlite:////x.db") == Address("/x.db", TABLE, 2.0, "full")
    url = "sqlite:////x.db?table=tasks_2&timeout=0.5&synchronous=NORMAL"
    assert Address.of(url) == Address("/x.db", "tasks_2", 0.5, "normal")


def test_the_table_of_the_url_is_made(sqlite_path: Path) -> None:
    store = SqliteStore.from_url(f"sqlite:///{sqlite_path}?table=tasks")
    take(store)
    tables = "SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name"
    made = store._connections.read(lambda cursor: cursor.execute(tables).fetchall())
    assert made == [("tasks",), ("tasks_history",), ("tasks_meta",)]
    store.close()


OFF, NORMAL, FULL, EXTRA = 0, 1, 2, 3


@pytest.mark.parametrize(
    ("option", "claims", "outcomes"),
    [
        ("", NORMAL, FULL),
        ("?synchronous=extra", NORMAL, EXTRA),
        ("?synchronous=normal", NORMAL, NORMAL),
        ("?synchronous=off", OFF, OFF),
    ],
)
def test_an_outcome_waits_for_the_disk_and_a_claim_does_not(
    sqlite_path: Path, monkeypatch: pytest.MonkeyPatch, option: str, claims: int, outcomes: int
) -> None:
    """When the machine loses its power, the holders of all its leases end too."""
    store = SqliteStore.from_url(f"sqlite:///{sqlite_path}{option}")
    waits: list[int] = []
    keep = store._rows.keep

    def look(cursor: Cursor, *args: Any) -> None:
        waits.append(cursor.execute("PRAGMA synchronous").fetchall()[0][0])
        keep(cursor, *args)

    monkeypatch.setattr(store._rows, "keep", look)
    lease = take(store)
    store.renew([lease])
    store.settle(lease, DONE, ttl=60)
    store.mark_dispatched(lease.key, "a")
    take(store, "another")
    store.close()
    assert waits == [claims, claims, outcomes, outcomes, claims]


def test_two_tables_of_one_file_are_two_stores(sqlite_path: Path) -> None:
    stores = [SqliteStore(str(sqlite_path), table=table) for table in ("first", "second")]
    leases = [take(store) for store in stores]
    assert [known(store).owner for store in stores] == [lease.owner for lease in leases]
    for store in stores:
        store.close()


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("sqlite://", "memory://"),
        ("sqlite:///", "memory://"),
        ("sqlite:///:memory:", "memory://"),
        ("sqlite://?table=x", "memory://"),
        ("sqlite://tasks.db", "sqlite:///tasks.db"),
        ("sqlite://var/tasks.db", "three slashes"),
        ("sqlite:////x.db?tabel=x", "Did you mean table"),
        ("sqlite:////x.db?mode=ro", "table, timeout, synchronous"),
        ("sqlite:////x.db?table=", "letters, digits"),
        ("sqlite:////x.db?table=a%22b", "letters, digits"),
        ("sqlite:////x.db?table=1a", "letters, digits"),
        ("sqlite:////x.db?table=sqlite_x", "letters, digits"),
        ("sqlite:////x.db?table=" + "a" * 64, "letters, digits"),
        ("sqlite:////x.db?timeout=soon", "'soon'"),
        ("sqlite:////x.db?timeout=-1", "seconds, 0 or more"),
        ("sqlite:////x.db?timeout=nan", "seconds, 0 or more"),
        ("sqlite:////x.db?timeout=inf", "seconds, 0 or more"),
        ("sqlite:////x.db?synchronous=maybe", "'normal'"),
    ],
)
def test_what_names_no_file_is_refused_with_what_to_write(url: str, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words.replace("?", r"\?")):
        open_store(url)


def test_a_scheme_that_is_nearly_right_is_guessed() -> None:
    with pytest.raises(ConfigurationError, match="Did you mean sqlite://"):
        open_store("sqlite3:////x.db")
