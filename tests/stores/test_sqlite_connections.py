"""How many connections a process has to the file, what becomes of them at a fork, and who waits for whom."""

from __future__ import annotations

import gc
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from types import FrameType

import psutil
import pytest

from celery_idempotent.errors import StoreRefused, StoreUnreachable
from celery_idempotent.stores import Lease, Refusal, Verdict
from celery_idempotent.stores.sqlite import SqliteStore, connections
from celery_idempotent.stores.sqlite.connections import KEPT
from tests.support.stores.benches import DONE, KEY, claim, known, take, verb
from tests.support.stores.sqlite_children import Child
from tests.support.waiting import wait_until

OpenSqlite = Callable[..., SqliteStore]
Fork = Callable[..., Child]


def opened(path: Path) -> int:
    """Return how many connections this process has to the file."""
    return sum(each.path == str(path) for each in psutil.Process().open_files())


@contextmanager
def writing(path: Path) -> Iterator[sqlite3.Connection]:
    """Hold a transaction open that has written, as a task does with its own rows."""
    with closing(sqlite3.connect(path, isolation_level=None, check_same_thread=False)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("CREATE TABLE orders (id)")
        yield connection
        if connection.in_transaction:
            connection.execute("ROLLBACK")


def test_threads_that_ask_one_after_another_share_one_connection(sqlite_store: SqliteStore, sqlite_path: Path) -> None:
    for number in range(20):
        with ThreadPoolExecutor(1) as thread:
            thread.submit(take, sqlite_store, f"key-{number}").result()
    assert opened(sqlite_path) == 1


def test_threads_that_ask_at_once_have_a_connection_each_and_few_are_kept(
    sqlite_store: SqliteStore, sqlite_path: Path
) -> None:
    crowd = KEPT + 4
    barrier = threading.Barrier(crowd)
    counts: list[int] = []

    def look(cursor: sqlite3.Cursor) -> object:
        barrier.wait(30)
        counts.append(opened(sqlite_path))
        barrier.wait(30)
        return cursor.execute("SELECT 1").fetchall()

    with ThreadPoolExecutor(crowd) as threads:
        list(threads.map(lambda _: sqlite_store._connections.read(look), range(crowd)))
    assert counts == [crowd] * crowd
    assert len(sqlite_store._connections._idle) == KEPT
    sqlite_store.close()
    assert opened(sqlite_path) == 0


def test_a_closed_store_has_nothing_open(sqlite_store: SqliteStore, sqlite_path: Path) -> None:
    take(sqlite_store)
    sqlite_store.close()
    assert opened(sqlite_path) == 0
    assert os.listdir(sqlite_path.parent) == [sqlite_path.name]


def test_what_is_in_use_while_the_store_is_closed_is_closed_afterwards(
    sqlite_store: SqliteStore, sqlite_path: Path
) -> None:
    def work(cursor: sqlite3.Cursor) -> object:
        sqlite_store.close()
        return cursor.execute("SELECT 1").fetchall()

    assert sqlite_store._connections.read(work) == [(1,)]
    assert opened(sqlite_path) == 0


def test_a_store_that_nobody_has_any_more_has_nothing_open(sqlite_path: Path) -> None:
    store = SqliteStore(str(sqlite_path))
    take(store)
    assert opened(sqlite_path) == 1
    del store
    gc.collect()
    assert opened(sqlite_path) == 0


def test_work_that_is_interrupted_leaves_nothing_locked_and_nothing_written(
    sqlite_store: SqliteStore, open_sqlite: OpenSqlite
) -> None:
    """As a soft time limit does, from a signal."""
    take(sqlite_store)

    def work(cursor: sqlite3.Cursor) -> None:
        cursor.execute("DELETE FROM celery_idempotency")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sqlite_store._connections.write(work)
    assert isinstance(open_sqlite(timeout=0).acquire(claim("other")), Lease)
    assert known(sqlite_store)


def test_a_transaction_that_was_lost_open_is_not_lent_again(sqlite_store: SqliteStore) -> None:
    sqlite_store._connections.read(lambda cursor: cursor.execute("BEGIN IMMEDIATE"))
    assert isinstance(sqlite_store.acquire(claim()), Lease)


def test_a_connection_that_found_the_file_damaged_is_not_asked_again(
    sqlite_store: SqliteStore, sqlite_path: Path
) -> None:
    """In 7,656 kills of a soak it once was for the one connection of a child, which waited for ever."""
    take(sqlite_store)
    checkpoint = f"import sqlite3; sqlite3.connect({str(sqlite_path)!r}).execute('PRAGMA wal_checkpoint(TRUNCATE)')"
    subprocess.run([sys.executable, "-c", checkpoint], check=True)
    content = sqlite_path.read_bytes()
    sqlite_path.write_bytes(content[:100] + b"\xff" * (len(content) - 100))
    with pytest.raises(StoreRefused, match="damaged"):
        list(sqlite_store.scan())
    sqlite_path.write_bytes(content)
    assert [record.key for record in sqlite_store.scan()] == [KEY]


def test_a_child_inherits_no_connection(sqlite_store: SqliteStore, sqlite_path: Path, forked: Fork) -> None:
    """To close one, or to open another beside it, would undo locks or believe in locks that only the parent has."""
    lease = take(sqlite_store)
    child = forked(lambda: opened(sqlite_path), lambda: known(sqlite_store).owner, lambda: opened(sqlite_path))
    assert [child.said() for _ in range(3)] == ["0", lease.owner, "1"]
    assert sqlite_store.renew([lease]) == []


def test_an_error_that_is_still_looked_at_keeps_no_connection_open(
    sqlite_store: SqliteStore, open_sqlite: OpenSqlite, sqlite_path: Path, forked: Fork
) -> None:
    """SQLite closes a connection when the last of its statements is gone, and the traceback of an error has some."""
    store = open_sqlite(timeout=0)
    store.ping()

    def interrupted(cursor: sqlite3.Cursor) -> None:
        cursor.execute("SELECT 1 UNION SELECT 2").fetchone()
        raise KeyboardInterrupt

    with writing(sqlite_path), pytest.raises(StoreUnreachable) as locked:
        store.ping()
    with pytest.raises(KeyboardInterrupt) as left:
        sqlite_store._connections.read(interrupted)
    assert forked(lambda: opened(sqlite_path)).said() == "0"
    assert locked.value is not left.value


def test_what_a_child_writes_survives_the_end_of_its_parents_connections(
    sqlite_store: SqliteStore, sqlite_path: Path, forked: Fork
) -> None:
    """Who closes last removes the log. A parent that took its child's locks for its own would not see the child."""
    take(sqlite_store, "first")
    begin, go_on = os.pipe()
    child = forked(
        lambda: type(sqlite_store.acquire(claim("second"))).__name__,
        lambda: os.read(begin, 1),
        lambda: type(sqlite_store.acquire(claim("third"))).__name__,
    )
    assert child.said() == "Lease"
    take(sqlite_store, "fourth")
    sqlite_store.close()
    assert sqlite_path.with_name(f"{sqlite_path.name}-wal").exists()
    other = forked(lambda: type(sqlite_store.acquire(claim("fifth"))).__name__)
    assert other.said() == "Lease"
    os.write(go_on, b".")
    assert [child.said() for _ in range(2)] == ["b'.'", "Lease"]
    os.close(begin)
    os.close(go_on)
    child.end()
    other.end()
    assert {record.key for record in sqlite_store.scan()} == {"first", "second", "third", "fourth", "fifth"}
    with closing(sqlite3.connect(sqlite_path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


def test_a_fork_waits_for_what_other_threads_are_doing(sqlite_store: SqliteStore, forked: Fork) -> None:
    started, done = threading.Event(), threading.Event()
    pool = sqlite_store._connections

    def work(cursor: sqlite3.Cursor) -> object:
        started.set()
        wait_until(lambda: pool._forking)
        done.set()
        return cursor.execute("SELECT 1").fetchall()

    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(pool.write, work)
        assert started.wait(30)
        child = forked(lambda: done.is_set(), lambda: type(sqlite_store.acquire(claim())).__name__)
        assert answer.result() == [(1,)]
    assert [child.said() for _ in range(2)] == ["True", "Lease"]


def test_threads_wait_for_a_fork(sqlite_store: SqliteStore, forked: Fork) -> None:
    end = threading.Event()

    def ask() -> int:
        turns = 0
        while not end.is_set():
            sqlite_store.get(KEY)
            turns += 1
        return turns

    with ThreadPoolExecutor(4) as threads:
        turns = [threads.submit(ask) for _ in range(4)]
        children = [forked(lambda: type(sqlite_store.acquire(claim(f"key-{os.getpid()}"))).__name__) for _ in range(5)]
        said = [child.said() for child in children]
        end.set()
        assert all(turn.result() for turn in turns)
    assert said == ["Lease"] * 5


def test_threads_that_fork_at_once_leave_the_store_to_the_others(sqlite_path: Path) -> None:
    """As `multiprocessing` does, or `subprocess` with a `preexec_fn`."""
    store = SqliteStore(str(sqlite_path))
    started, end = threading.Event(), threading.Event()

    def hold(cursor: sqlite3.Cursor) -> None:
        started.set()
        end.wait(30)

    def fork() -> None:
        if (pid := os.fork()) == 0:
            os._exit(0)
        os.waitpid(pid, 0)

    threads = [
        threading.Thread(target=target, args=args, daemon=True)
        for target, args in ((store._connections.read, (hold,)), (fork, ()), (fork, ()), (store.ping, ()))
    ]
    threads[0].start()
    assert started.wait(30)
    for thread in threads[1:3]:
        thread.start()
        time.sleep(0.05)
    end.set()
    for thread in threads[:3]:
        thread.join(30)
    threads[3].start()
    threads[3].join(5)
    assert not threads[3].is_alive()
    store.close()


def test_a_child_that_was_forked_beside_a_thread_that_hangs_does_not_touch_the_file(
    open_sqlite: OpenSqlite, forked: Fork, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "GRACE", 0.05)
    store = open_sqlite(timeout=0)
    started, end = threading.Event(), threading.Event()

    def hang(cursor: sqlite3.Cursor) -> None:
        started.set()
        end.wait(60)

    with ThreadPoolExecutor(1) as thread:
        hanging = thread.submit(store._connections.read, hang)
        assert started.wait(30)
        child = forked(store.ping)
        said = child.said()
        end.set()
        hanging.result()
    assert said.startswith("StoreUnreachable: This process was forked while its parent was using")
    store.ping()


def test_nor_does_a_child_of_that_child_nor_another_store_in_the_file(
    open_sqlite: OpenSqlite, sqlite_path: Path, forked: Fork, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the parent has open is not closed there either."""
    monkeypatch.setattr(connections, "GRACE", 0.05)
    store, other = open_sqlite(timeout=0), SqliteStore(str(sqlite_path), table="other")
    started, end = threading.Event(), threading.Event()

    def hang(cursor: sqlite3.Cursor) -> None:
        started.set()
        end.wait(60)

    def family() -> list[str]:
        grandchild = forked(store.ping, other.ping, lambda: opened(sqlite_path))
        return [verdict(other.ping), *(grandchild.said() for _ in range(3)), verdict(store.ping)]

    def verdict(ask: Callable[[], object]) -> str:
        try:
            return str(ask())
        except StoreUnreachable as error:
            return f"StoreUnreachable: {error}"

    with ThreadPoolExecutor(1) as thread:
        hanging = thread.submit(store._connections.read, hang)
        assert started.wait(30)
        said = forked(family).said()
        end.set()
        hanging.result()
    assert said.count("StoreUnreachable: This process was forked while its parent was using") == 4
    assert "'1'" in said


def test_a_store_that_is_made_while_a_fork_waits_opens_nothing_before_it(
    sqlite_store: SqliteStore, sqlite_path: Path, forked: Fork
) -> None:
    started = threading.Event()
    made: list[SqliteStore] = []
    begun: list[threading.Thread] = []

    def work(cursor: sqlite3.Cursor) -> None:
        started.set()
        wait_until(lambda: sqlite_store._connections._forking)
        made.append(SqliteStore(str(sqlite_path), table="other"))
        begun.append(threading.Thread(target=made[0].ping))
        begun[0].start()
        begun[0].join(0.3)

    with ThreadPoolExecutor(1) as thread:
        done = thread.submit(sqlite_store._connections.read, work)
        assert started.wait(30)
        assert forked(lambda: opened(sqlite_path)).said() == "0"
        done.result()
    begun[0].join(30)
    assert not begun[0].is_alive()
    made[0].close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_time_limit_that_rings_while_a_fork_waits_leaves_nothing_open_and_nothing_locked(
    sqlite_store: SqliteStore, open_sqlite: OpenSqlite, sqlite_path: Path, forked: Fork
) -> None:
    """Python drops what is raised before a fork, and forks all the same."""
    stores = (sqlite_store, open_sqlite())
    for store in stores:
        store.ping()
    started, rang = threading.Event(), threading.Event()

    def work(cursor: sqlite3.Cursor) -> None:
        started.set()
        wait_until(lambda: sqlite_store._connections._forking)
        signal.raise_signal(signal.SIGUSR1)
        assert rang.wait(30)

    def ring(*_: object) -> None:
        rang.set()
        raise KeyboardInterrupt

    def fork() -> None:
        if (pid := os.fork()) == 0:
            os._exit(0)
        os.waitpid(pid, 0)

    before = signal.signal(signal.SIGUSR1, ring)
    try:
        with ThreadPoolExecutor(1) as thread:
            done = thread.submit(sqlite_store._connections.read, work)
            assert started.wait(30)
            assert forked(lambda: opened(sqlite_path)).said() == "0"
            done.result()
    finally:
        signal.signal(signal.SIGUSR1, before)
    others = [threading.Thread(target=call, daemon=True) for call in (*(store.ping for store in stores), fork)]
    for other in others:
        other.start()
        other.join(10)
    assert not any(other.is_alive() for other in others)


def test_a_time_limit_that_rings_as_a_call_ends_keeps_no_connection_open(
    sqlite_store: SqliteStore, sqlite_path: Path, forked: Fork
) -> None:
    """In the first function that is called after the work, before the connection is given back."""
    take(sqlite_store)

    def ring(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            raise KeyboardInterrupt

    def work(cursor: sqlite3.Cursor) -> object:
        answer = cursor.execute("SELECT 1 UNION SELECT 2").fetchone()
        sys.setprofile(ring)
        return answer

    try:
        with pytest.raises(KeyboardInterrupt) as looked_at:
            sqlite_store._connections.read(work)
    finally:
        sys.setprofile(None)
    assert forked(lambda: opened(sqlite_path)).said() == "0"
    assert looked_at.value


def test_what_else_has_the_file_open_at_a_fork_is_named_once(
    sqlite_store: SqliteStore,
    sqlite_path: Path,
    forked: Fork,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """SQLite cannot see it: the child would believe in locks that only its parent has."""
    monkeypatch.setattr(connections, "_WARNED", set())
    monkeypatch.setattr(connections, "_OPEN_ELSEWHERE", set())
    monkeypatch.setattr(connections, "_INHERITED", [])
    sqlite_store.ping()
    assert forked(lambda: None).said() == "None"
    assert not caplog.records
    with closing(sqlite3.connect(sqlite_path)) as own:
        own.execute("SELECT * FROM celery_idempotency").fetchall()
        for _ in range(2):
            assert forked(lambda: None).said() == "None"
    [record] = caplog.records
    assert f"had the file of the idempotency store {sqlite_path} open" in record.getMessage()


def test_a_fork_that_nobody_told_of_leaves_the_parents_connection_alone(
    sqlite_store: SqliteStore, sqlite_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a server written in C may fork."""
    monkeypatch.setattr(connections, "_INHERITED", inherited := [])
    lease = take(sqlite_store)
    sqlite_store._connections._pid[0] = 1
    sqlite_store.close()  # as at the end of a child that never used the store
    assert opened(sqlite_path) == 1
    assert known(sqlite_store).owner == lease.owner
    assert opened(sqlite_path) == 2
    sqlite_store.close()
    [connection] = inherited
    assert connection.execute("SELECT 1").fetchall() == [(1,)]
    connection.close()


ENDING = """
import os, sys, threading
from celery_idempotent.stores import Claim
from celery_idempotent.stores import open_store

store = open_store(sys.argv[1])
ask = lambda key: store.acquire(Claim(key, "owner", 60, 60))
threads = [threading.Thread(target=ask, args=(str(number),)) for number in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
pid = os.fork()
ask(f"{pid}")
if pid: assert os.waitpid(pid, 0)[1] == 0
"""


def unmeasured() -> dict[str, str]:
    """Return the environment without what measures coverage, which uses sqlite3 too."""
    return {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE")}


def test_a_process_that_never_closes_its_store_ends_without_a_warning(sqlite_url: str) -> None:
    """Since Python 3.13 sqlite3 warns of connections that nobody closed."""
    command = [sys.executable, "-X", "dev", "-W", "error", "-c", ENDING, sqlite_url]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=unmeasured())
    assert (run.returncode, run.stderr) == (0, "")


def test_who_finds_the_file_locked_gives_up_after_its_timeout(
    sqlite_store: SqliteStore, open_sqlite: OpenSqlite, sqlite_path: Path
) -> None:
    lease = take(sqlite_store)
    store = open_sqlite(timeout=0.2)
    store.get(KEY)
    since = time.monotonic()
    with writing(sqlite_path):
        for name in ("acquire", "renew", "settle", "release", "mark_dispatched", "delete", "ping"):
            with pytest.raises(StoreUnreachable, match=r"is locked: another transaction .* is open for too long"):
                verb(store, name, lease)()
    assert 7 * 0.2 - 0.2 < time.monotonic() - since < 60
    assert store.renew([lease]) == []


@pytest.mark.nightly
def test_what_changes_nothing_is_answered_while_the_file_is_locked(open_sqlite: OpenSqlite, sqlite_path: Path) -> None:
    store = open_sqlite(timeout=0)
    store.settle(take(store, "done", fingerprint="f"), DONE, ttl=60)
    take(store, "running")
    waits = claim("running", task_id="b")
    assert isinstance(store.acquire(waits), Refusal)
    with writing(sqlite_path):
        assert known(store, "done").payload == DONE.payload
        assert len(list(store.scan())) == 2
        for asked, verdict in (
            (claim("done"), Verdict.COMPLETED),
            (claim("done", task_id="b", fingerprint="g"), Verdict.KEY_REUSED),
            (waits, Verdict.CONFLICT),
        ):
            answer = store.acquire(asked)
            assert isinstance(answer, Refusal)
            assert answer.verdict is verdict
        with pytest.raises(StoreUnreachable):
            store.acquire(claim("running", task_id="c"))  # that it came must be remembered


@pytest.mark.nightly
def test_who_waits_for_another_writer_gets_its_turn(open_sqlite: OpenSqlite, sqlite_path: Path) -> None:
    store = open_sqlite(timeout=60)
    store.ping()
    with ThreadPoolExecutor(1) as thread, writing(sqlite_path) as connection:
        answer = thread.submit(store.acquire, claim())
        assert not answer.done()
        connection.execute("COMMIT")
        assert isinstance(answer.result(), Lease)


GREENLETS = """
from gevent import monkey; monkey.patch_all()
import sqlite3, sys, gevent
from celery_idempotent.stores import Claim
from celery_idempotent.stores import open_store

store = open_store(sys.argv[1])
store.ping()
said = []

def hold():
    connection = sqlite3.connect(sys.argv[2], isolation_level=None)
    connection.execute("BEGIN IMMEDIATE")
    while len(said) < 50:
        gevent.sleep(0.001)
    connection.execute("COMMIT")
    connection.close()
    said.append("committed")

def tick():
    for _ in range(50):
        said.append("tick")
        gevent.sleep(0.001)

def ask():
    store.acquire(Claim("key", "owner", 60, 60))
    said.append("leased")

gevent.joinall([gevent.spawn(work) for work in (hold, ask, tick)], raise_error=True)
store.close()
print(said.index("committed") < said.index("leased"), said[:50].count("tick"))
"""


def test_greenlets_go_on_while_one_of_them_waits_for_a_writer(sqlite_url: str, sqlite_path: Path) -> None:
    """The writer may be one of them: if the process stood still, it would wait for itself."""
    pytest.importorskip("gevent")
    command = [sys.executable, "-c", GREENLETS, sqlite_url, str(sqlite_path)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=unmeasured())
    assert (run.stdout, run.stderr) == ("True 50\n", "")
