"""What a file may be: new, ours, older, newer, somebody else's, damaged, gone, or not for us to write to."""

from __future__ import annotations

import os
import sqlite3
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from celery_idempotent.errors import RecordUnreadable, StoreError, StoreRefused, StoreUnreachable
from celery_idempotent.stores import HistoryEntry, Lease
from celery_idempotent.stores.base import unreadable_reported_to
from celery_idempotent.stores.sqlite import SqliteStore, connections, schema
from celery_idempotent.stores.sqlite.connections import Address
from celery_idempotent.stores.sqlite.schema import Schema
from celery_idempotent.stores.sqlite.store import PAGE
from tests.support.stores.benches import DONE, KEY, VERBS, age, claim, known, take, verb
from tests.support.stores.sqlite_children import Child

OpenSqlite = Callable[..., SqliteStore]
Fork = Callable[..., Child]
NOBODY = 65534


def execute(path: Path, *statements: str) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        for statement in statements:
            connection.execute(statement)


def answers(path: Path, question: str) -> list[tuple[object, ...]]:
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute(question).fetchall()


def test_the_first_verb_makes_the_file(sqlite_store: SqliteStore, sqlite_path: Path) -> None:
    assert not sqlite_path.exists()
    assert sqlite_store.get(KEY) is None
    assert answers(sqlite_path, "PRAGMA journal_mode") == [("wal",)]
    assert answers(sqlite_path, "SELECT * FROM celery_idempotency_meta ORDER BY name") == [
        ("last_fence", 0),
        ("version", 1),
    ]


@pytest.mark.unmeasured  # each child would save what all tests before it have reached
def test_processes_that_open_a_new_file_at_once_make_it_together(
    open_sqlite: OpenSqlite, forked: Fork, tmp_path: Path
) -> None:
    for turn in range(3):
        store = open_sqlite(tmp_path / f"{turn}.db", timeout=30)
        reading, writing = os.pipe()

        def ask(store: SqliteStore = store, reading: int = reading, writing: int = writing) -> str:
            os.close(writing)
            os.read(reading, 1)  # until the parent lets them all go
            return type(store.acquire(claim(f"key-{os.getpid()}"))).__name__

        children = [forked(ask) for _ in range(8)]
        os.close(reading)
        os.close(writing)
        assert [child.said() for child in children] == ["Lease"] * 8
        assert len(list(store.scan())) == 8


def test_a_file_that_is_no_database_is_refused_and_left_alone(open_sqlite: OpenSqlite, sqlite_path: Path) -> None:
    garbage = b"These are the accounts of 2019.\n" * 200
    sqlite_path.write_bytes(garbage)
    store = open_sqlite()
    for name in VERBS:
        with pytest.raises(StoreRefused, match="to be a SQLite database, and it is none"):
            verb(store, name)()
    with pytest.raises(StoreRefused, match="it is none"):
        store.pending_schema()
    assert sqlite_path.read_bytes() == garbage


def test_a_file_that_is_damaged_is_refused(open_sqlite: OpenSqlite, sqlite_path: Path) -> None:
    execute(sqlite_path, "CREATE TABLE orders (id)")
    content = bytearray(sqlite_path.read_bytes())
    content[100:200] = b"\xff" * 100
    sqlite_path.write_bytes(content)
    with pytest.raises(StoreRefused, match="damaged"):
        open_sqlite().ping()


def test_a_newer_version_of_the_tables_is_refused_and_left_alone(
    sqlite_store: SqliteStore, open_sqlite: OpenSqlite, sqlite_path: Path
) -> None:
    lease = take(sqlite_store)
    sqlite_store.close()
    execute(sqlite_path, "UPDATE celery_idempotency_meta SET value = 2 WHERE name = 'version'")
    store = open_sqlite()
    for name in VERBS:
        with pytest.raises(StoreRefused, match=r"version 1 or less, got 2.*Upgrade this worker"):
            verb(store, name, lease)()
    with pytest.raises(StoreRefused, match="Upgrade this worker"):
        store.pending_schema()
    assert answers(sqlite_path, "SELECT owner FROM celery_idempotency") == [(lease.owner,)]


@pytest.mark.parametrize(
    "theirs",
    [
        ["CREATE TABLE celery_idempotency (id)"],
        ["CREATE TABLE CELERY_idempotency (id)"],
        ["CREATE TABLE celery_idempotency_meta (id)"],
        ["CREATE TABLE celery_idempotency (id)", "CREATE TABLE celery_idempotency_meta (id)"],
        ["CREATE TABLE celery_idempotency (id)", "CREATE TABLE celery_idempotency_meta (name, value)"],
        [
            "CREATE TABLE celery_idempotency (id)",
            "CREATE TABLE celery_idempotency_meta (name, value)",
            "INSERT INTO celery_idempotency_meta VALUES ('version', 'draft')",
        ],
        ["CREATE VIEW celery_idempotency AS SELECT 1"],
    ],
)
def test_a_table_of_somebody_else_is_refused_and_left_alone(
    open_sqlite: OpenSqlite, sqlite_path: Path, theirs: list[str]
) -> None:
    execute(sqlite_path, *theirs)
    before = sqlite_path.read_bytes()
    with pytest.raises(StoreRefused, match=r"another application's.*Name another table"):
        open_sqlite().ping()
    assert sqlite_path.read_bytes() == before
    open_sqlite(table="tasks").ping()


def test_tables_that_were_emptied_serve_those_that_have_them_open_and_those_that_come(
    sqlite_store: SqliteStore, open_sqlite: OpenSqlite, sqlite_path: Path
) -> None:
    take(sqlite_store)
    execute(sqlite_path, "DELETE FROM celery_idempotency", "DELETE FROM celery_idempotency_meta")
    assert sqlite_store.delete(take(sqlite_store).key)
    take(open_sqlite(), "newer")
    assert dict(answers(sqlite_path, "SELECT * FROM celery_idempotency_meta"))["version"] == schema.VERSION


def test_a_table_that_only_looks_like_ours_is_refused_when_it_is_used(
    open_sqlite: OpenSqlite, sqlite_path: Path
) -> None:
    execute(
        sqlite_path,
        "CREATE TABLE celery_idempotency (id)",
        "CREATE TABLE celery_idempotency_meta (name, value)",
        "INSERT INTO celery_idempotency_meta VALUES ('version', 1)",
    )
    with pytest.raises(StoreRefused, match="Name another table"):
        open_sqlite().acquire(claim())


def test_the_tables_live_beside_those_of_an_application(open_sqlite: OpenSqlite, sqlite_path: Path) -> None:
    execute(sqlite_path, "PRAGMA user_version = 7", "CREATE TABLE orders (id)", "INSERT INTO orders VALUES ('ORD-1')")
    take(open_sqlite())
    assert answers(sqlite_path, "SELECT id FROM orders") == [("ORD-1",)]
    assert answers(sqlite_path, "PRAGMA user_version") == [(7,)]


def test_older_tables_are_upgraded_and_keep_their_records(
    sqlite_store: SqliteStore, open_sqlite: OpenSqlite, sqlite_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = take(sqlite_store)
    sqlite_store.close()
    monkeypatch.setattr(schema, "VERSION", 3)
    steps = {1: 'ALTER TABLE "{table}" ADD COLUMN a TEXT;\nALTER TABLE "{table}" ADD COLUMN b TEXT;\n'}
    steps[2] = 'ALTER TABLE "{table}" ADD COLUMN c TEXT'
    monkeypatch.setattr(schema, "UPGRADES", steps)
    store = open_sqlite()
    due = store.pending_schema()
    assert due.count(";\n") == 5
    assert 'ALTER TABLE "celery_idempotency" ADD COLUMN c TEXT;\n' in due
    assert known(store).owner == lease.owner
    assert store.pending_schema() == ""
    assert answers(sqlite_path, "SELECT a, b, c FROM celery_idempotency") == [(None, None, None)]
    assert answers(sqlite_path, "SELECT value FROM celery_idempotency_meta WHERE name = 'version'") == [(3,)]


def test_an_upgrade_that_fails_changes_nothing(
    sqlite_store: SqliteStore, open_sqlite: OpenSqlite, sqlite_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sqlite_store.ping()
    sqlite_store.close()
    monkeypatch.setattr(schema, "VERSION", 2)
    monkeypatch.setattr(schema, "UPGRADES", {1: 'ALTER TABLE "{table}" ADD COLUMN a TEXT;\nNONSENSE;\n'})
    with pytest.raises(StoreUnreachable, match="NONSENSE"):
        open_sqlite().ping()
    monkeypatch.undo()
    open_sqlite().ping()


def test_what_the_schema_would_be_is_told_without_making_it(sqlite_store: SqliteStore, sqlite_path: Path) -> None:
    text = sqlite_store.pending_schema()
    assert 'CREATE TABLE IF NOT EXISTS "celery_idempotency" (' in text
    assert "-- rises with every lease of the key" in text
    assert not sqlite_path.exists()
    execute(sqlite_path, "CREATE TABLE orders (id)")
    assert sqlite_store.pending_schema() == text
    assert answers(sqlite_path, "SELECT name FROM sqlite_master") == [("orders",)]
    sqlite_store.apply_schema()
    sqlite_store.apply_schema()
    assert sqlite_store.pending_schema() == ""


def test_the_text_of_the_schema_makes_tables_that_the_store_takes(sqlite_store: SqliteStore, sqlite_path: Path) -> None:
    text = sqlite_store.pending_schema()
    with closing(sqlite3.connect(sqlite_path)) as connection:
        connection.executescript(text)
    assert sqlite_store.pending_schema() == ""
    take(sqlite_store)


def test_a_database_without_a_write_ahead_log_is_refused() -> None:
    with closing(sqlite3.connect(":memory:")) as connection, pytest.raises(StoreRefused, match="stays with 'memory'"):
        Schema(Address("/x.db")).prepare(connection)


def test_a_folder_that_does_not_exist_is_named(open_sqlite: OpenSqlite, tmp_path: Path) -> None:
    with pytest.raises(StoreRefused, match=f"there is no folder {tmp_path}/nothing. Create it"):
        open_sqlite(tmp_path / "nothing" / "here.db").ping()


def test_a_folder_in_the_place_of_the_file_is_refused(open_sqlite: OpenSqlite, tmp_path: Path) -> None:
    (tmp_path / "folder.db").mkdir()
    with pytest.raises(StoreRefused, match="it is a folder"):
        open_sqlite(tmp_path / "folder.db").ping()


@pytest.fixture
def without_rights(forked: Fork) -> Callable[..., str]:
    """A function that does something in a child that is not root, whom no rights hold back."""
    return lambda step: forked(step, user=NOBODY if os.getuid() == 0 else None).said()


@pytest.fixture
def public_path() -> Iterator[Path]:
    """Where somebody else can see a file, and may not make one; not below pytest's folders, which are its user's."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o555)
        yield Path(folder) / "tasks.db"
        Path(folder).chmod(0o755)


def test_a_folder_that_we_may_not_write_to_is_refused(
    open_sqlite: OpenSqlite, public_path: Path, without_rights: Callable[..., str]
) -> None:
    said = without_rights(open_sqlite(public_path).ping)
    assert said.startswith("StoreRefused: Expected to be allowed to write to the idempotency store")


def test_a_file_that_we_may_only_read_is_refused(
    open_sqlite: OpenSqlite, public_path: Path, without_rights: Callable[..., str]
) -> None:
    public_path.parent.chmod(0o755)
    store = open_sqlite(public_path)
    take(store)
    store.close()
    public_path.chmod(0o444)
    public_path.parent.chmod(0o555)
    said = without_rights(store.ping)
    assert said.startswith("StoreRefused: Expected to be allowed to write to the idempotency store")


def test_a_full_disk_is_a_store_that_cannot_serve_and_serves_when_there_is_room(sqlite_store: SqliteStore) -> None:
    lease = take(sqlite_store)

    def limit(pages: int) -> None:
        pragma = f"PRAGMA max_page_count = {pages}"
        sqlite_store._connections.read(lambda cursor: cursor.execute(pragma).fetchall())

    limit(1)
    big = type(DONE)(DONE.state, b"x" * 100_000)
    with pytest.raises(StoreUnreachable, match="full"):
        sqlite_store.settle(lease, big, ttl=60)
    assert known(sqlite_store).owner == lease.owner
    limit(100_000)
    sqlite_store.settle(lease, big, ttl=60)
    assert known(sqlite_store).payload == big.payload


def test_a_file_that_was_removed_is_made_anew_by_the_next_verb(sqlite_store: SqliteStore, sqlite_path: Path) -> None:
    """Else every process would go on with a file that none of the others sees."""
    lease = take(sqlite_store)
    for path in sqlite_path.parent.glob("idempotency.db*"):
        path.unlink()
    assert sqlite_store.get(KEY) is None
    assert sqlite_store.renew([lease]) == []
    assert answers(sqlite_path, "SELECT owner FROM celery_idempotency") == [(lease.owner,)]


@pytest.mark.parametrize("ends", [("-wal", "-shm"), ("-wal",), ("-shm",)], ids=" ".join)
def test_a_log_that_was_removed_divides_no_processes(
    sqlite_store: SqliteStore, open_sqlite: OpenSqlite, sqlite_path: Path, forked: Fork, ends: tuple[str, ...]
) -> None:
    """Else this one would go on with a log that none which begins later sees: both would run the operation."""
    reading, writing = os.pipe()

    def ask() -> str:
        os.read(reading, 1)  # a fork would have closed our connections
        return open_sqlite().acquire(claim()).verdict.value  # type: ignore[union-attr]

    child = forked(ask)
    take(sqlite_store, "another")
    for end in ends:
        Path(f"{sqlite_path}{end}").unlink()
    lease = take(sqlite_store)
    os.write(writing, b".")
    assert child.said() == "conflict"
    assert known(sqlite_store).owner == lease.owner
    assert answers(sqlite_path, "PRAGMA integrity_check") == [("ok",)]
    os.close(reading)
    os.close(writing)


@pytest.mark.parametrize("among", ["idle", "lent"])
def test_nor_does_one_that_another_store_in_the_file_has_open(
    sqlite_store: SqliteStore, open_sqlite: OpenSqlite, sqlite_path: Path, forked: Fork, among: str
) -> None:
    """SQLite gives one index to all connections of a process."""
    reading, writing = os.pipe()

    def ask() -> str:
        os.read(reading, 1)
        return open_sqlite().acquire(claim()).verdict.value  # type: ignore[union-attr]

    child = forked(ask)
    other = SqliteStore(str(sqlite_path), table="other")
    take(sqlite_store, "another")

    def remove(cursor: sqlite3.Cursor) -> None:
        for end in ("-wal", "-shm"):
            Path(f"{sqlite_path}{end}").unlink()
        if among == "lent":
            with pytest.raises(StoreUnreachable, match="was removed while this process was using it"):
                take(sqlite_store)

    other._connections.read(remove)
    lease = take(sqlite_store)
    os.write(writing, b".")
    assert child.said() == "conflict"
    assert known(sqlite_store).owner == lease.owner
    other.ping()
    other.close()
    os.close(reading)
    os.close(writing)


def test_a_log_that_another_store_makes_just_then_is_none_that_was_removed(
    sqlite_store: SqliteStore, sqlite_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sqlite_store.ping()
    sqlite_store.close()
    other = SqliteStore(str(sqlite_path), table="other")
    identities, made, end = connections._identities, threading.Event(), threading.Event()

    def hold(cursor: sqlite3.Cursor) -> None:
        made.set()
        end.wait(30)

    def overtaken(path: str) -> connections.Files:
        found = identities(path)
        monkeypatch.setattr(connections, "_identities", identities)
        holding.start()
        assert made.wait(30)
        return found

    holding = threading.Thread(target=other._connections.read, args=(hold,))
    monkeypatch.setattr(connections, "_identities", overtaken)
    take(sqlite_store)
    end.set()
    holding.join()
    other.close()


def test_nor_does_one_beside_the_file_that_a_link_leads_to(
    sqlite_path: Path, forked: Fork, open_sqlite: OpenSqlite
) -> None:
    """As in a folder of releases, with the file in a shared one."""
    reading, writing = os.pipe()

    def ask() -> str:
        os.read(reading, 1)
        return open_sqlite().acquire(claim()).verdict.value  # type: ignore[union-attr]

    child = forked(ask)
    link = sqlite_path.with_name("link.db")
    link.symlink_to(sqlite_path)
    store = SqliteStore(str(link))
    take(store, "another")
    assert store.usage()["file_bytes"] > sqlite_path.stat().st_size
    for end in ("-wal", "-shm"):
        Path(f"{sqlite_path}{end}").unlink()
    lease = take(store)
    os.write(writing, b".")
    assert child.said() == "conflict"
    assert known(store).owner == lease.owner
    store.close()
    os.close(reading)
    os.close(writing)


def test_no_connection_is_opened_while_another_has_a_log_that_was_removed(
    sqlite_store: SqliteStore, sqlite_path: Path
) -> None:
    sqlite_store.ping()

    def look(cursor: sqlite3.Cursor) -> None:
        for end in ("-wal", "-shm"):
            Path(f"{sqlite_path}{end}").unlink()
        with pytest.raises(StoreUnreachable, match="was removed while this process was using it"):
            sqlite_store.ping()

    sqlite_store._connections.read(look)
    take(sqlite_store)


DAMAGE = [
    "state = 'paused'",
    "fence = 'high'",
    "payload = 'text'",
    "owner = CAST(x'ff' AS TEXT)",
    "waiting = '{'",
    "waiting = '[1]'",
    "waiting = '{\"a\": 1}'",
    'waiting = \'{"a": ["x", 1, "t"]}\'',
    "attempts = '5'",
    'attempts = \'{"a": "x"}\'',
    "announced = '5'",
]


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_record_that_is_damaged_is_unreadable_and_can_be_deleted(
    sqlite_store: SqliteStore, sqlite_path: Path, damage: str
) -> None:
    lease = take(sqlite_store)
    take(sqlite_store, "another")
    execute(sqlite_path, f"UPDATE celery_idempotency SET {damage} WHERE key = '{KEY}'")
    for name in set(VERBS) - {"delete", "scan", "ping"}:
        with pytest.raises(RecordUnreadable, match="damaged"):
            verb(sqlite_store, name, lease)()
    assert known(sqlite_store, "another")
    sqlite_store.delete(KEY)
    assert isinstance(sqlite_store.acquire(claim()), Lease)


@pytest.mark.parametrize("damage", [each for each in DAMAGE if "CAST" not in each])
def test_a_record_that_is_damaged_does_not_keep_others_from_being_found(
    sqlite_store: SqliteStore, sqlite_path: Path, damage: str
) -> None:
    take(sqlite_store)
    take(sqlite_store, "another")
    execute(sqlite_path, f"UPDATE celery_idempotency SET {damage} WHERE key = '{KEY}'")
    passed_by: list[str] = []
    with unreadable_reported_to(passed_by.append):
        assert [record.key for record in sqlite_store.scan()] == ["another"]
    assert passed_by == [KEY]


def test_a_record_that_is_damaged_does_not_keep_other_leases_from_being_renewed(
    sqlite_store: SqliteStore, sqlite_path: Path
) -> None:
    leases = [take(sqlite_store, key) for key in ("first", KEY, "last")]
    execute(sqlite_path, f"UPDATE celery_idempotency SET state = 'dancing' WHERE key = '{KEY}'")
    for lease in leases:
        age(sqlite_store, lease.key, 50)
    with pytest.raises(RecordUnreadable, match="damaged"):
        sqlite_store.renew(leases)
    assert [known(sqlite_store, key).remaining > 55 for key in ("first", "last")] == [True, True]


def test_a_scan_finds_each_record_once_though_others_go_meanwhile(sqlite_store: SqliteStore) -> None:
    keys = [f"key-{number:03}" for number in range(2 * PAGE + 10)]
    for key in keys:
        take(sqlite_store, key)
    found = []
    for record in sqlite_store.scan(prefix="key-"):
        sqlite_store.delete("".join(found[-1:]))
        found.append(record.key)
    assert found == keys


def test_a_record_that_is_kept_for_ever_is_kept(sqlite_store: SqliteStore) -> None:
    lease = take(sqlite_store, lease_ttl=1e30, keep_ttl=1e30)
    assert known(sqlite_store).remaining > 1e11
    sqlite_store.settle(lease, DONE, ttl=1e30)
    assert known(sqlite_store).payload == DONE.payload


def test_an_error_that_nobody_foresaw_is_a_store_that_cannot_serve(sqlite_store: SqliteStore) -> None:
    with pytest.raises(StoreError, match="cannot serve"):
        sqlite_store._connections.read(lambda cursor: cursor.execute("SELECT"))


def test_a_file_without_history_gets_it_and_stays_one_that_older_workers_take(
    open_sqlite: Callable[..., SqliteStore], sqlite_path: Path
) -> None:
    first = open_sqlite()
    lease = take(first)
    first.close()
    execute(sqlite_path, 'DROP TABLE "celery_idempotency_history"')  # as the first version made it
    store = open_sqlite()
    assert "_history" in store.pending_schema()
    store.append_history([HistoryEntry(KEY, "taken over", 0, 60)])
    assert store.pending_schema() == ""
    assert [noted.text for noted in store.history(KEY)] == ["taken over"]
    assert known(store).owner == lease.owner
    assert answers(sqlite_path, "SELECT value FROM celery_idempotency_meta WHERE name = 'version'") == [(1,)]


def test_a_history_that_has_expired_is_purged_and_does_not_come_back(
    sqlite_store: SqliteStore, sqlite_path: Path
) -> None:
    sqlite_store.append_history([HistoryEntry(key, "old", 0, 60) for key in ("a", "b")])
    execute(sqlite_path, "UPDATE celery_idempotency_history SET expires = 1")
    sqlite_store.append_history([HistoryEntry("a", "new", 0, 60)])
    assert [noted.text for noted in sqlite_store.history("a")] == ["new"]
    assert sqlite_store.purge() == 0
    assert answers(sqlite_path, "SELECT key FROM celery_idempotency_history") == [("a",)]


def test_a_history_that_is_damaged_is_unreadable_and_begins_anew(sqlite_store: SqliteStore, sqlite_path: Path) -> None:
    for damage in ("garbage", "[1]", '[["x", "y"]]'):
        sqlite_store.append_history([HistoryEntry(KEY, "one", 0, 60)])
        execute(sqlite_path, f"UPDATE celery_idempotency_history SET lines = '{damage}'")
        with pytest.raises(RecordUnreadable, match="damaged"):
            sqlite_store.history(KEY)
        sqlite_store.append_history([HistoryEntry(KEY, "two", 0, 60)])
        assert [noted.text for noted in sqlite_store.history(KEY)] == ["two"]
