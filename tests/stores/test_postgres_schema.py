"""PostgreSQL: the table and its functions, how they are made, upgraded and found missing; reading and purging."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest

from celery_idempotent.errors import RecordUnreadable, StoreRefused, StoreUnreachable
from celery_idempotent.stores import HistoryEntry, Lease, Reason, Refusal, Release, State
from celery_idempotent.stores.base import unreadable_reported_to
from celery_idempotent.stores.postgres import PostgresStore, schema
from celery_idempotent.stores.postgres import store as store_module
from celery_idempotent.stores.postgres.records import (
    claim_args,
    lease_args,
    outcome_args,
    release_args,
    stored,
    unstored,
)
from tests.support.stores.benches import DONE, KEY, VERBS, age, claim, known, take, verb
from tests.support.stores.postgres import begun, run
from tests.support.waiting import wait_until

Opens = Callable[..., PostgresStore]


@pytest.fixture
def opens(fresh_postgres: Callable[[], str]) -> Iterator[Opens]:
    """A function that opens a store in a schema of this test's, with nothing in it."""
    url, stores = fresh_postgres(), []

    def open_one(options: str = "") -> PostgresStore:
        stores.append(PostgresStore.from_url(url + options))
        return stores[-1]

    yield open_one
    for store in stores:
        store.close()


@pytest.fixture
def store(opens: Opens) -> PostgresStore:
    store = opens()
    store.apply_schema()
    return store


def names(store: PostgresStore) -> set[str]:
    rows = run(
        store,
        "select c.relname from pg_class c where c.relnamespace = %s::regnamespace "
        "union all select p.proname from pg_proc p where p.pronamespace = %s::regnamespace",
        store._place.schema,
        store._place.schema,
    )
    return {str(name) for (name,) in rows}


@pytest.mark.parametrize("name", VERBS)
def test_where_there_is_no_table_the_error_names_the_command_that_makes_it(opens: Opens, name: str) -> None:
    with pytest.raises(StoreRefused, match="celery-idempotent --store URL schema --apply"):
        verb(opens(), name)()


def test_the_schema_is_shown_before_and_nothing_is_pending_after(opens: Opens) -> None:
    store = opens("&table=orders_seen")
    pending = store.pending_schema()
    assert 'create table if not exists "' in pending
    assert '."orders_seen"' in pending
    assert "{" not in pending.replace("'{}'", "")
    store.apply_schema()
    assert store.pending_schema() == ""
    made = names(store)
    assert all(name.startswith("orders_seen") for name in made), made
    store.apply_schema()
    assert names(store) == made
    take(store)


def test_what_is_pending_may_be_run_by_hand(opens: Opens) -> None:
    store = opens()
    with psycopg.connect(store._place.conninfo) as connection:
        connection.execute(store.pending_schema().encode())
    assert store.pending_schema() == ""
    take(store)


def test_a_copy_of_the_schema_without_its_rows_is_refused_and_applying_repairs_it(store: PostgresStore) -> None:
    lease = take(store)
    run(store, "delete from {meta} returning 1")  # as pg_dump --schema-only, or a test that empties all tables
    with pytest.raises(StoreRefused, match="celery-idempotent --store URL schema --apply"):
        store.ping()
    with (
        begun(store._place.conninfo) as connection,
        pytest.raises(StoreRefused, match="celery-idempotent --store URL schema --apply"),
    ):
        store.settle_within(lease, DONE, ttl=60, using=connection)
    assert store.pending_schema()
    store.apply_schema()
    assert store.pending_schema() == ""
    store.ping()


@pytest.mark.parametrize("gone", ["function {release}", "table {history}"])
def test_what_is_gone_of_this_version_is_pending_and_applying_repairs_it(store: PostgresStore, gone: str) -> None:
    lease = take(store)
    with psycopg.connect(store._place.conninfo) as connection:  # as a restore that left it out
        connection.execute(store._schema.render(f"drop {gone}").encode())
    assert store.pending_schema()
    store.apply_schema()
    assert store.pending_schema() == ""
    assert store.release(lease, Release(Reason.FAILED))


def test_many_may_apply_the_schema_at_once(opens: Opens) -> None:
    stores = [opens() for _ in range(8)]
    with ThreadPoolExecutor(len(stores)) as crowd:
        list(crowd.map(PostgresStore.apply_schema, stores))
    assert run(stores[0], "select version from {meta}") == [(schema.VERSION,)]
    take(stores[0])


def test_two_tables_of_one_database_know_nothing_of_each_other(opens: Opens) -> None:
    one, two = opens(), opens("&table=order")  # a reserved word is a name like any other
    for store in (one, two):
        store.apply_schema()
        take(store)
    assert one.delete(KEY)
    assert known(two).state is State.IN_PROGRESS


def test_workers_of_the_old_version_go_on_while_and_after_the_schema_is_upgraded(
    opens: Opens, store: PostgresStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = take(store)
    monkeypatch.setattr(schema, "VERSION", 99)
    monkeypatch.setattr(schema, "FUNCTIONS", dict.fromkeys(schema.FUNCTIONS, 99))
    monkeypatch.setattr("celery_idempotent.stores.postgres.store.VERSION", 99)
    newer = opens()
    with pytest.raises(StoreRefused, match="schema --apply"):
        newer.acquire(claim())
    assert newer.pending_schema()
    newer.apply_schema()
    assert newer.pending_schema() == ""
    assert store.renew([lease]) == []
    take(store, "old")
    assert known(newer, "old").owner == known(store, "old").owner
    newer.settle(lease, DONE, ttl=60)
    assert known(store).payload == DONE.payload


def test_on_a_schema_without_history_a_worker_goes_on_and_the_upgrade_brings_it(store: PostgresStore) -> None:
    with psycopg.connect(store._place.conninfo) as connection:  # as the first version made it
        connection.execute(store._schema.render("drop table {history}; update {meta} set version = 1").encode())
    notes = [HistoryEntry(KEY, "taken over", 0, 60)]
    lease = take(store)
    with pytest.raises(StoreRefused, match="schema --apply"):
        store.append_history(notes)
    assert store.history(KEY) == []
    assert store.renew([lease]) == []
    store.settle(lease, DONE, ttl=60)
    assert store.delete(KEY)
    assert store.purge() == 0
    assert "_history" in store.pending_schema()
    store.apply_schema()
    assert store.pending_schema() == ""
    store.append_history(notes)
    assert [noted.text for noted in store.history(KEY)] == ["taken over"]


def test_a_history_that_has_expired_is_purged_and_does_not_come_back(store: PostgresStore) -> None:
    store.append_history([HistoryEntry(f"{KEY}-{number}", "old", 0, 60) for number in range(1200)])
    run(store, "update {history} set expires = 1 returning 1")
    store.append_history([HistoryEntry(f"{KEY}-7", "new", 0, 60)])
    assert [noted.text for noted in store.history(f"{KEY}-7")] == ["new"]
    assert store.purge(0) == 0
    assert run(store, "select count(*) from {history}") == [(1200,)]
    assert store.purge() == 0
    assert run(store, "select count(*) from {history}") == [(1,)]


def test_two_that_note_the_same_keys_wait_for_each_other(store: PostgresStore) -> None:
    def note(order: int) -> None:
        for turn in range(20):
            store.append_history([HistoryEntry(f"{KEY}-{number}", str(turn), 0, 60) for number in range(50)][::order])

    with ThreadPoolExecutor(4) as crowd:
        list(crowd.map(note, (1, -1, 1, -1)))
    assert len(store.history(f"{KEY}-7")) == 50


def test_a_newer_schema_is_left_alone(store: PostgresStore) -> None:
    run(store, "update {meta} set version = 99 returning 1")
    assert store.pending_schema() == ""
    store.apply_schema()
    assert run(store, "select version from {meta}") == [(99,)]


@pytest.mark.nightly
def test_a_schema_is_not_made_while_the_table_is_in_somebodys_hands_for_long(
    opens: Opens, store: PostgresStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An index that waits for an open transaction would have every delivery wait behind it."""
    run(store, "update {meta} set version = 0 returning 1")
    monkeypatch.setattr(
        store._schema, "statements", lambda: store._schema.render("set lock_timeout = '50ms'; lock table {table}")
    )
    with begun(store._place.conninfo) as connection:
        store.settle_within(take(store), DONE, ttl=60, using=connection)
        with pytest.raises(StoreUnreachable, match="open transaction"):
            store.apply_schema()


def test_an_upgrade_waits_for_no_transaction_that_settles(store: PostgresStore) -> None:
    """To wait for one would stop every claim, which would wait behind it."""
    run(store, "update {meta} set version = 1 returning 1")
    with begun(store._place.conninfo) as connection:
        store.settle_within(take(store), DONE, ttl=60, using=connection)
        connection.execute(store._schema.render("lock table {history} in row exclusive mode").encode())
        with psycopg.connect(store._place.conninfo) as by_hand:
            by_hand.execute("set lock_timeout = '1s'")
            by_hand.execute(store.pending_schema().encode())
            by_hand.rollback()
        store.apply_schema()
    assert store.pending_schema() == ""


@pytest.mark.nightly
def test_claims_go_on_while_an_index_that_is_gone_waits_for_a_transaction(store: PostgresStore) -> None:
    run(store, "update {meta} set version = 1 returning 1")
    with psycopg.connect(store._place.conninfo) as connection:
        connection.execute(store._schema.render('drop index {schema}."{name}_expires"').encode())
    waits = "select 1 from pg_stat_activity where wait_event_type = 'Lock' and query like %s"
    with begun(store._place.conninfo) as connection, ThreadPoolExecutor(1) as thread:
        store.settle_within(take(store), DONE, ttl=60, using=connection)
        applied = thread.submit(store.apply_schema)
        for number in range(3):
            wait_until(lambda: run(store, waits, f"%{store._place.schema}%") or applied.done())
            take(store, f"claimed-{number}")
        assert not applied.done()
        connection.commit()
        applied.result(30)
    assert "idempotency_expires" in names(store)


def test_what_others_made_in_a_schema_that_is_searched_is_not_executed(opens: Opens) -> None:
    """It would run with the worker's rights; up to PostgreSQL 14 everybody may make functions in `public`."""
    store = opens()
    store.apply_schema()
    theirs = f"{store._place.schema}_theirs"
    with psycopg.connect(store._place.conninfo, autocommit=True) as connection:
        connection.execute(f"create schema {theirs}; set search_path = {theirs}".encode())
        for function, arguments in [
            ("times", "a numeric, b integer"),
            ("times", "a double precision, b integer"),
            ("nextval", "a text"),
            ("jsonb_build_object", "a text, b jsonb"),
            ("counts", "a bigint, b name"),
            ("same", "a oid, b regnamespace"),
        ]:
            connection.execute(
                f"create function {function}({arguments}) returns bigint language plpgsql "
                "as $$ begin raise exception 'theirs'; end $$".encode()
            )
        for left in ("numeric", "double precision"):
            connection.execute(f"create operator * (leftarg = {left}, rightarg = integer, function = times)".encode())
        connection.execute(b"create operator = (leftarg = oid, rightarg = regnamespace, function = same)")
        connection.execute(b"create aggregate count (name) (sfunc = counts, stype = bigint, initcond = '0')")
        connection.execute(f"grant usage on schema {theirs} to public".encode())
    worker = opens(f"&options=-csearch_path%3D{theirs}")
    try:
        lease = take(worker)
        for name in VERBS:
            if name not in ("settle", "release"):
                verb(worker, name, lease)()
        worker.settle(take(worker, "settled"), DONE, ttl=60)
        worker.release(take(worker, "freed"), Release(Reason.RETRY, retry_in=1.0, next_attempt=1))
        worker.purge()
        assert isinstance(worker.acquire(claim("settled")), Refusal)
        assert worker.pending_schema() == ""
    finally:
        with psycopg.connect(store._place.conninfo, autocommit=True) as connection:
            connection.execute(f"set client_min_messages = warning; drop schema {theirs} cascade".encode())


def test_a_record_of_an_unknown_state_is_unreadable(store: PostgresStore) -> None:
    take(store)
    take(store, "another")
    planted = run(store, "update {table} t set state = 'pondered' where key = %s returning t", KEY)
    for name in ("get", "acquire"):
        with pytest.raises(RecordUnreadable, match="pondered"):
            verb(store, name)()
    assert run(store, "select t from {table} t where key = %s", KEY) == planted
    passed_by: list[str] = []
    with unreadable_reported_to(passed_by.append):
        assert [record.key for record in store.scan()] == ["another"]
    assert passed_by == [KEY]


@pytest.mark.parametrize(
    "damage", ['waiting = \'{"b": ["x", 1, "t"]}\'', 'attempts = \'{"b": "x"}\'', "fence = 9223372036854775807"]
)
def test_a_record_that_is_damaged_is_unreadable(store: PostgresStore, damage: str) -> None:
    """It is no store that refuses us, for which messages wait."""
    store.release(take(store), Release(Reason.FAILED))
    run(store, f"update {{table}} set {damage} returning key")
    with pytest.raises(RecordUnreadable, match="Delete the key"):
        store.acquire(claim(task_id="b", copy=1, token="x"))


@pytest.mark.parametrize("key", ["a\\b", "\\0", "\0", "\\\0\\\\0", "\0" * 3, "a\\"])
def test_a_key_with_what_postgresql_cannot_keep_is_kept_all_the_same(store: PostgresStore, key: str) -> None:
    assert unstored(stored(key)) == key
    assert "\0" not in stored(key)
    take(store, key)
    assert known(store, key).key == key
    assert [record.key for record in store.scan(prefix=key[:1])] == [key]
    assert list(store.scan(prefix="\0a")) == []


@pytest.mark.parametrize("prefix", ["\ud7ff", "\U0010ffff", "a\U0010ffff", "z"])
def test_a_scan_ends_where_the_prefix_does(store: PostgresStore, prefix: str) -> None:
    for key in (prefix, f"{prefix}1", f"{prefix}\U0010ffff", "b", "\ue000"):
        take(store, key)
    assert {record.key for record in store.scan(prefix=prefix)} == {prefix, f"{prefix}1", f"{prefix}\U0010ffff"}


def fill(store: PostgresStore, count: int, columns: str) -> None:
    """Insert many rows of key, state, fence and expiry, which may take longer than the store waits for an answer."""
    rows = "insert into {table} (key, state, fence, expires) select {columns} from generate_series(1, {count}) n"
    with psycopg.connect(store._place.conninfo, autocommit=True) as connection:
        connection.execute(
            store._schema.render(rows.replace("{columns}", columns).replace("{count}", str(count))).encode()
        )


def test_a_scan_reads_by_the_index_of_live_leases(store: PostgresStore) -> None:
    query = f"explain {store._page} and state = 'in_progress' order by key limit 500".replace("%s", "''")
    fill(store, 20_000, "'k' || n, 'completed', n, 9e18::bigint")
    take(store)
    with psycopg.connect(store._place.conninfo, autocommit=True) as connection:
        connection.execute(store._schema.render("analyze {table}").encode())
    plan = "\n".join(str(row[0]) for row in run(store, query))
    assert "idempotency_live" in plan


def test_a_scan_for_a_state_that_is_rare_asks_for_a_page_at_a_time(
    store: PostgresStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One statement that reads millions to find a few, or passes by as many that have expired, takes too long."""
    run(store, "insert into {table} (key, state, fence, expires) select 'k' || n, 'completed', n, "
        "case when n < 600 then 9e18::bigint else 1 end from generate_series(1, 1200) n returning 1")  # fmt: skip
    asked: list[Any] = []
    ask = store._connections.run

    def counted(statement: str, args: Sequence[Any] = (), **options: bool) -> list[tuple[Any, ...]]:
        asked.append(statement)
        return ask(statement, args, **options)

    monkeypatch.setattr(store._connections, "run", counted)
    assert list(store.scan(state=State.FAILED)) == []
    assert len(asked) > 2
    assert len(list(store.scan(state=State.COMPLETED))) == len(list(store.scan(prefix="k"))) == 599


def test_purging_is_done_in_short_batches_beside_deliveries_that_go_on(store: PostgresStore) -> None:
    expired = 3000
    run(
        store,
        "insert into {table} (key, state, fence, expires) select 'old-' || n, 'completed', n, n "
        "from generate_series(1, %s) n returning 1",
        expired,
    )
    settled = threading.Event()

    def deliver() -> int:
        done = 0
        while not settled.is_set() or not done:
            store.settle(take(store, f"new-{done}"), DONE, ttl=600)
            done += 1
        return done

    with ThreadPoolExecutor(3) as crowd:
        delivering = crowd.submit(deliver)
        purging = [crowd.submit(store.purge) for _ in range(2)]
        purged = sum(each.result(60) for each in purging)
        settled.set()
        done = delivering.result(60)
    assert purged + store.purge() == expired
    assert len(list(store.scan(prefix="new-"))) == done
    assert store.purge() == 0


@pytest.mark.parametrize(("expired", "pages"), [(0, 60), (30_000, 600)])
def test_a_purge_reads_what_it_removes_and_not_the_rest(store: PostgresStore, expired: int, pages: int) -> None:
    """However many rows there are, be they live or expired: each delivery that tidies up pays for what is read."""
    fill(store, 30_000, f"'k' || n, 'completed', n, case when n <= {expired} then n else 9e18::bigint - n end")
    explained = store._schema.render("explain (analyze, buffers) select {purge}(50)").encode()
    with psycopg.connect(store._place.conninfo, autocommit=True) as connection:
        connection.execute(store._schema.render("vacuum analyze {table}").encode())
        plans = [connection.execute(explained).fetchall() for _ in range(8)]
    # The first has the catalogues to read; a function that is called often is planned without knowing its arguments.
    for plan in plans[1:]:
        assert pages_read(plan) < pages


def test_a_purge_reads_what_it_has_removed_no_second_time_beside_an_old_transaction(
    store: PostgresStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a backup's, for which the index keeps what was removed: each batch goes on where the last one has ended."""
    asked: list[tuple[int, int]] = []
    scalar = store._scalar

    def asking(query: str, most: int, since: int, **options: Any) -> Any:
        asked.append((most, since))
        return scalar(query, most, since, **options)

    fill(store, 12_000, "'k' || n, 'completed', n, n")
    with psycopg.connect(store._place.conninfo) as old, psycopg.connect(store._place.conninfo, autocommit=True) as now:
        old.execute("set transaction isolation level repeatable read")
        old.execute(store._schema.render("select from {table} limit 1").encode())
        monkeypatch.setattr(store, "_scalar", asking)
        assert store.purge(10_000) == 10_000
        assert asked == [(500, since) for since in range(0, 10_000, 500)]
        batch = store._schema.render("explain (analyze, buffers) select {purge}(5, %s)").encode()
        begun = [pages_read(now.execute(batch, (10_000,)).fetchall()) for _ in range(3)]
        anew = [pages_read(now.execute(batch, (0,)).fetchall()) for _ in range(3)]
    assert max(begun[1:]) < min(anew[1:]) / 2  # the first has the catalogues to read


def pages_read(plan: list[tuple[object, ...]]) -> int:
    """Return how many pages a statement that was explained has read."""
    return sum(int(number) for number in re.findall(r"(?:hit|read)=(\d+)", str(plan[1][0])))


def test_a_renewal_reads_its_own_lease_and_not_those_of_others(store: PostgresStore) -> None:
    """Whatever the planner believes about how many there are: each worker renews three times per ttl."""
    many = "insert into {table} (key, state, fence, owner, expires) select %s || n, %s, n, 'o', 9e18::bigint " \
        "from generate_series(1, 3000) n returning 1"  # fmt: skip
    run(store, many, "done", "completed")
    with psycopg.connect(store._place.conninfo, autocommit=True) as connection:
        connection.execute(store._schema.render("vacuum analyze {table}").encode())
    run(store, many, "held", "in_progress")
    lease = take(store)
    plans = [run(store, f"explain (analyze, buffers) {store._renew}", *lease_args([lease])) for _ in range(8)]
    for plan in plans[1:]:  # the first has the catalogues to read
        assert pages_read(plan) < 100


def test_a_connection_that_knew_the_table_small_reads_no_more_when_it_has_grown(opens: Opens) -> None:
    """Its plans are kept until the table is analyzed again, which may be long after."""
    store = opens("&connections=1")
    store.apply_schema()
    store.purge_every = 0

    def statements(key: str) -> dict[str, tuple[str, Any]]:
        lease = take(store, f"settled-{key}")
        store.settle(lease, DONE, ttl=600)
        store.mark_dispatched(lease.key, "a")
        store.delete(lease.key)
        taken, freed = take(store, f"taken-{key}"), take(store, f"freed-{key}")
        return {
            "acquire": (store._acquire, claim_args(claim(f"new-{key}"))),
            "renew": (store._renew, lease_args([taken])),
            "settle": (store._settle, outcome_args(taken, DONE, 600, None)),
            "release": (store._release, release_args(freed, Release(Reason.FAILED))),
            "get": (store._get, (taken.key,)),
        }

    for number in range(10):
        if number == 2:
            with psycopg.connect(store._place.conninfo, autocommit=True) as connection:
                connection.execute(store._schema.render("vacuum analyze {table}").encode())
        for statement, args in statements(str(number)).values():
            run(store, statement, *args)
    fill(store, 30_000, "'old' || n, 'completed', n, 9e18::bigint")
    for name, (statement, args) in statements("last").items():
        assert pages_read(run(store, f"explain (analyze, buffers) {statement}", *args)) < 100, name


def test_a_purge_is_not_compiled_by_the_server_however_dear_it_believes_it_to_be(store: PostgresStore) -> None:
    """To compile takes longer than the purge; by default it would begin at some forty million records."""
    said: list[str] = []
    with psycopg.connect(store._place.conninfo, autocommit=True) as connection:
        connection.add_notice_handler(lambda notice: said.append(str(notice.message_primary)))
        connection.execute("set jit = on; set jit_above_cost = 10; set client_min_messages = debug1")
        connection.execute(store._schema.render("select {purge}(50)").encode())
        assert not [line for line in said if "JIT" in line]
        connection.execute("set jit_above_cost = 0; select count(*) from pg_class")
        assert [line for line in said if "JIT" in line]  # it says so where it does


@pytest.mark.parametrize(("limit", "gone"), [(0, 0), (1, 1), (700, 700), (None, 1200), (5000, 1200)])
def test_a_purge_removes_no_more_than_it_may(store: PostgresStore, limit: int | None, gone: int) -> None:
    run(store, "insert into {table} (key, state, fence, expires) select n, 'released', n, n "
        "from generate_series(1, 1200) n returning 1")  # fmt: skip
    assert store.purge(limit) == gone


def test_a_purge_that_waits_for_no_disk_lets_later_outcomes_wait_as_before(store: PostgresStore) -> None:
    run(store, "select set_config('synchronous_commit', 'on', false)")
    store.purge()
    assert run(store, "show synchronous_commit") == [("on",)]


def test_a_claim_waits_for_the_purge_that_has_its_expired_record(store: PostgresStore) -> None:
    """It is no conflict: nobody holds it."""
    take(store)
    age(store, KEY, 10_000)
    held, go_on = threading.Event(), threading.Event()

    def purge() -> None:
        with psycopg.connect(store._place.conninfo) as connection:
            connection.execute(store._schema.render("select {purge}(10)").encode())
            held.set()
            go_on.wait(30)

    with ThreadPoolExecutor(2) as crowd:
        purging = crowd.submit(purge)
        assert held.wait(30)
        asked = crowd.submit(store.acquire, claim())
        waiting: list[Any] = []
        while not waiting and not asked.done():
            waiting = run(store, "select 1 from pg_stat_activity where wait_event_type = 'Lock'")
        go_on.set()
        purging.result(30)
        answer = asked.result(30)
    assert isinstance(answer, Lease)
    assert not answer.taken_over


def test_the_fences_come_from_a_sequence_that_no_clock_sets_back(store: PostgresStore) -> None:
    first = take(store)
    store.delete(KEY)
    run(store, "update {table} set fence = fence - 1000 returning 1")
    assert take(store).fence > first.fence
    run(store, "update {table} set fence = fence + 1000000, expires = 1 returning 1")
    ahead = run(store, "select fence from {table}")[0][0]
    assert take(store).fence == int(str(ahead)) + 1


def test_the_store_removes_by_itself_what_has_expired(store: PostgresStore) -> None:
    for number in range(10):
        store.settle(take(store, f"old-{number}"), DONE, ttl=60)
        age(store, f"old-{number}", 61)
    take(store, "first")
    assert run(store, "select count(*) from {table}") == [(11,)]
    store.purge_every = 1
    take(store, "second")
    assert run(store, "select count(*) from {table}") == [(2,)]


def test_what_removes_slowly_is_left_to_purge_for_a_while(
    store: PostgresStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As while a backup runs, for whose transaction the server keeps what was removed."""
    removed, now = [], 1000.0

    def slow(limit: int | None = None) -> int:
        nonlocal now
        removed.append(now)
        now += 0.2
        return 0

    monkeypatch.setattr(store, "purge", slow)
    monkeypatch.setattr(store_module, "monotonic", lambda: now)
    store.purge_every = 1
    for number in range(5):
        assert isinstance(store.acquire(claim(f"{KEY}-{number}")), Lease)
    now += 19
    take(store, "sooner")
    assert removed == [1000.0]
    now += 1
    take(store, "later")
    assert len(removed) == 2


def test_a_lease_is_granted_although_nothing_can_be_removed(
    store: PostgresStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(limit: int | None = None) -> int:
        raise StoreUnreachable("just now")

    monkeypatch.setattr(store, "purge", fails)
    store.purge_every = 1
    assert isinstance(store.acquire(claim()), Lease)
