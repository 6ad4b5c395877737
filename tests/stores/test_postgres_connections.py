"""PostgreSQL: servers that die, stop, restart or refuse, and connections that threads, forks and greenlets share."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest

from celery_idempotent.errors import ConfigurationError, StoreError, StoreRefused, StoreUnreachable
from celery_idempotent.stores import HistoryEntry, Lease, Refusal, State, Verdict, open_store
from celery_idempotent.stores import pool as pool_module
from celery_idempotent.stores.postgres import PostgresStore
from celery_idempotent.stores.postgres.connections import _INHERITED, TimedConnection, translate_error
from tests.support.postgres import PostgresServer
from tests.support.proxy import Proxy
from tests.support.servers import free_port
from tests.support.stores.benches import DONE, KEY, VERBS, claim, known, take, verb
from tests.support.stores.postgres import begun, run, with_schema
from tests.support.waiting import wait_until

pytestmark = pytest.mark.thorough  # in `full` alone: a server of its own kind, and slow

Opens = Callable[[str], PostgresStore]
#: Of a call that must not take longer than its timeouts of 2 s each, on a machine that is busy with other things.
SOON = 15.0


@pytest.fixture
def opens() -> Iterator[Opens]:
    stores: list[PostgresStore] = []

    def open_one(url: str) -> PostgresStore:
        stores.append(PostgresStore.from_url(url))
        return stores[-1]

    yield open_one
    for store in stores:
        store.close()


@pytest.fixture
def store(postgres_url: str, opens: Opens) -> PostgresStore:
    return opens(postgres_url)


def backends(store: PostgresStore) -> list[Any]:
    return [slot.connection.info.backend_pid for slot in store._connections._pool.idle if slot.connection]


def test_a_store_is_opened_by_both_names_of_the_scheme(postgres_url: str) -> None:
    for url in (postgres_url, postgres_url.replace("postgresql://", "postgres://")):
        store = open_store(url)
        assert isinstance(store, PostgresStore)
        store.ping()
        store.close()


def test_one_thread_uses_one_connection(store: PostgresStore) -> None:
    for number in range(20):
        take(store, f"key-{number}")
    assert len(backends(store)) == 1


def test_many_threads_share_the_connections_that_the_url_allows(postgres_url: str, opens: Opens) -> None:
    store = opens(f"{postgres_url}&connections=3")
    with ThreadPoolExecutor(30) as crowd:
        leases = list(crowd.map(lambda number: take(store, f"key-{number}"), range(120)))
    assert len(leases) == 120
    assert len(backends(store)) == 3


def test_a_renewal_comes_before_the_calls_that_wait_for_a_connection(postgres_url: str, opens: Opens) -> None:
    store = opens(f"{postgres_url}&connections=1")
    lease = take(store)
    connections = store._connections
    taken = connections._take()
    with ThreadPoolExecutor(2) as crowd:
        waiting = crowd.submit(connections._take)
        wait_until(lambda: len(connections._pool.line) == 1)
        renewed = crowd.submit(store.renew, [lease])
        wait_until(lambda: len(connections._pool.line) == 2)
        connections._give_back(*taken)
        assert renewed.result(15) == []
        connections._give_back(*waiting.result(15))


def test_a_slot_that_an_interruption_has_lost_makes_room_for_another(postgres_url: str, opens: Opens) -> None:
    store = opens(f"{postgres_url}&connections=1")
    slot, _ = store._connections._take()
    del slot
    gc.collect()
    take(store)
    assert len(backends(store)) == 1


def test_a_connection_that_was_opened_before_the_store_was_closed_is_used_no_more(store: PostgresStore) -> None:
    """Its call may be giving it back at this moment."""
    take(store)
    (before,) = backends(store)
    store._connections._generation += 1
    take(store, "another")
    assert before not in backends(store)


@pytest.mark.nightly
def test_calls_that_wait_while_all_pooled_connections_are_closed_are_served(postgres_url: str, opens: Opens) -> None:
    """As a restart or a failover does, of a server that serves again at once."""
    store = opens(f"{postgres_url}&connections=4")
    calls = store._connections.run
    with ThreadPoolExecutor(30) as crowd, psycopg.connect(store._place.conninfo, autocommit=True) as other:
        first = [crowd.submit(calls, "select pg_sleep(0.2)") for _ in range(4)]
        assert len([each.result() for each in first]) == 4
        then = [crowd.submit(calls, "select pg_sleep(0.4)") for _ in range(30)]
        wait_until(lambda: len(store._connections._pool.line) == 26)
        query = "select count(pg_terminate_backend(pid)) from pg_stat_activity where query like 'select pg_sleep(0.4)'"
        assert other.execute(query).fetchone() == (4,)
        assert len([each.result() for each in then]) == 30
    assert len(store._connections._pool.made) <= 4


def test_a_slot_of_the_parents_pool_is_not_lent_in_the_child(store: PostgresStore) -> None:
    connections = store._connections
    slot, pool = connections._take()
    connections._reset()
    connections._give_back(slot, pool)
    assert (pool.idle, connections._pool.idle) == ([], [])


def test_a_connection_that_was_interrupted_is_used_no_more(store: PostgresStore) -> None:
    """The reply that is still on its way would be taken for that of the next statement."""
    take(store)
    (before,) = backends(store)
    (slot,) = store._connections._pool.idle
    assert slot.connection is not None
    slot.connection.pgconn.send_query(b"select 'a stranger'")
    assert known(store).state is State.IN_PROGRESS
    take(store, "another")
    assert before not in backends(store)


@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt])
def test_an_interrupted_statement_is_done_before_what_comes_after_it(
    store: PostgresStore, monkeypatch: pytest.MonkeyPatch, kind: type[BaseException]
) -> None:
    """A claim that came after what was to give it back left a lease that nobody held."""
    wait = TimedConnection.wait

    def interrupted(self: TimedConnection, gen: Any) -> Any:
        next(gen)  # which sends the statement
        monkeypatch.setattr(TimedConnection, "wait", wait)
        raise kind

    take(store)
    (pid,) = backends(store)
    monkeypatch.setattr(TimedConnection, "wait", interrupted)
    with pytest.raises(kind):
        store._connections.run("select pg_sleep(0.3)")
    with psycopg.connect(store._place.conninfo) as other:
        assert other.execute("select state from pg_stat_activity where pid = %s", [pid]).fetchall() == [("idle",)]


def test_a_connection_that_the_server_closed_is_replaced_without_a_word(store: PostgresStore) -> None:
    with ThreadPoolExecutor(4) as crowd:
        list(crowd.map(lambda number: take(store, f"key-{number}"), range(40)))
    for _ in range(2):
        for pid in backends(store):
            with psycopg.connect(store._place.conninfo, autocommit=True) as other:
                other.execute("select pg_terminate_backend(%s, 5000)", (pid,))
        assert take(store, os.urandom(4).hex())


def test_a_child_opens_connections_of_its_own_and_its_end_does_not_end_its_parents(store: PostgresStore) -> None:
    lease = take(store)
    (parents,) = backends(store)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            known(store)
            os.write(writing, b"%d %d" % (backends(store)[0], len(_INHERITED)))
            store.close()
            _INHERITED.clear()  # even if they were collected
            gc.collect()
        except BaseException as error:  # noqa: BLE001 - it must not reach pytest, of which this is a copy
            os.write(writing, repr(error).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        said = pipe.read().split()
    os.waitpid(child, 0)
    assert said[1:] == [b"1"], said
    assert int(said[0]) != parents
    assert store.renew([lease]) == []
    assert backends(store) == [parents]


GREENLETS = """
from gevent import monkey; monkey.patch_all()
import sys, gevent
from celery_idempotent.stores import open_store
from celery_idempotent.stores import Claim, Lease
store = open_store(sys.argv[1])
beats = []
def beat():
    while True:
        beats.append(1)
        gevent.sleep(0.01)
gevent.spawn(beat)
def work(number):
    return isinstance(store.acquire(Claim(f"key-{number % 50}", f"o{number}", 60, 60, task_id=f"t{number}")), Lease)
jobs = [gevent.spawn(work, number) for number in range(200)]
gevent.joinall(jobs, timeout=60, raise_error=True)
before = len(beats)
store._connections.run("select pg_sleep(1)")
print(sum(job.value for job in jobs), len(beats) - before > 10)
store.close()
"""


@pytest.mark.nightly
def test_greenlets_share_a_store_and_one_that_waits_stops_no_other(postgres_url: str) -> None:
    pytest.importorskip("gevent")
    command = [sys.executable, "-c", GREENLETS, postgres_url]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert done.stdout.split() == ["50", "True"], done.stderr


ADAPTED = """
import sys, psycopg
from psycopg.types.json import JsonbDumper, set_json_loads
from psycopg.types.string import TextLoader
from celery_idempotent.stores import Claim, HistoryEntry, Outcome, State, open_store
for type_ in (bool, bytes, dict, int, list, str, type(None)):
    psycopg.adapters.register_dumper(type_, JsonbDumper)
for type_ in ("bool", "bytea", "int4", "int8", "jsonb", "text"):
    for number in (psycopg.adapters.types[type_].oid, psycopg.adapters.types[type_].array_oid):
        psycopg.adapters.register_loader(number, TextLoader)
set_json_loads(lambda text: ["nothing"])
store = open_store(sys.argv[1])
lease = store.acquire(Claim("key", "o", 60, 60, task_id="t"))
assert store.renew([lease]) == []
with psycopg.connect(sys.argv[2]) as theirs, theirs.transaction():
    store.settle_within(lease, Outcome(State.COMPLETED, b"\\x00json"), ttl=60, using=theirs)
assert store.mark_dispatched("key", "t")
store.append_history([HistoryEntry("key", "noted", 0, 60)])
record, refusal = store.get("key"), store.acquire(Claim("key", "p", 60, 60, task_id="t"))
print(record.payload, record.dispatched, refusal.record.dispatched, [noted.text for noted in store.history("key")])
store.close()
"""


@pytest.mark.nightly
def test_what_an_application_registers_with_psycopg_for_all_its_connections_changes_nothing_here(
    postgres_url: str, store: PostgresStore
) -> None:
    command = [sys.executable, "-c", ADAPTED, postgres_url, store._place.conninfo]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    told = "b'\\x00json' frozenset({'t'}) frozenset({'t'}) ['noted']"
    assert done.stdout.strip() == told, done.stderr


@pytest.fixture
def own(own_postgres: Callable[..., PostgresServer]) -> PostgresServer:
    return own_postgres()


@pytest.mark.nightly
def test_a_server_that_stops_answering_is_unreachable_soon_and_serves_when_it_goes_on(
    own: PostgresServer, opens: Opens
) -> None:
    store, fresh = opens(with_schema(own.url())), opens(own.url())
    lease = take(store)
    own.pause()
    try:
        with ThreadPoolExecutor(len(VERBS) + 1) as crowd:
            begun = time.monotonic()
            asked = [crowd.submit(verb(store, name, lease)) for name in VERBS]
            asked.append(crowd.submit(fresh.ping))  # one that has no connection yet
            errors = [each.exception(60) for each in asked]
            took = time.monotonic() - begun
    finally:
        own.resume()
    assert {type(error) for error in errors} == {StoreUnreachable}, errors
    assert took < SOON
    assert known(store).state is State.IN_PROGRESS
    assert store.renew([lease]) == []


def test_a_server_that_was_killed_or_restarted_serves_again_without_a_new_store(
    own: PostgresServer, opens: Opens
) -> None:
    store = opens(with_schema(own.url()))
    lease = take(store)
    own.restart()
    assert store.renew([lease]) == []
    own.kill()
    for name in VERBS:
        with pytest.raises(StoreUnreachable):
            verb(store, name, lease)()
    own.start()
    store.settle(lease, DONE, ttl=60)
    assert known(store).payload == DONE.payload


@pytest.fixture
def way(postgres_url: str) -> Iterator[tuple[Proxy, str]]:
    """A proxy before the server, and the store's URL that goes through it."""
    facts = psycopg.conninfo.conninfo_to_dict(postgres_url.split("?")[0])
    with Proxy(int(facts["port"] or 5432)) as proxy:
        yield proxy, postgres_url.replace(f":{facts['port']}/", f":{proxy.port}/")


def test_a_network_that_swallows_everything_is_unreachable_soon(way: tuple[Proxy, str], opens: Opens) -> None:
    proxy, url = way
    store = opens(url)
    lease = take(store)
    proxy.drop()
    begun = time.monotonic()
    with pytest.raises(StoreUnreachable, match="no answer within 2 s"):
        store.renew([lease])
    assert time.monotonic() - begun < SOON
    proxy.heal()
    assert store.renew([lease]) == []


def test_a_connection_that_was_idle_for_an_hour_is_replaced(
    way: tuple[Proxy, str], opens: Opens, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A NAT may have forgotten it, and swallows what comes: a healthy store would seem to be down for each of them."""
    nat, url = way
    store = opens(url)
    lease = take(store)
    assert store.renew([lease]) == []
    assert nat.accepted == 1
    nat.forget()
    monkeypatch.setattr(pool_module, "monotonic", lambda: time.monotonic() + 3600)
    assert store.renew([lease]) == []


@pytest.mark.nightly
def test_calls_that_wait_for_a_server_that_hangs_fail_together(way: tuple[Proxy, str], opens: Opens) -> None:
    """One after another, the last of them would wait for half a minute."""
    proxy, url = way
    url = re.sub(r"connect_timeout=\d+&", "", url)  # with which the tests' own connections wait for a busy machine
    store = opens(f"{url}&connections=2")
    take(store)
    proxy.drop()

    def fail(number: int) -> None:
        with pytest.raises(StoreUnreachable):
            take(store, f"key-{number}")

    begun = time.monotonic()
    with ThreadPoolExecutor(60) as crowd:
        assert len(list(crowd.map(fail, range(60)))) == 60
    assert time.monotonic() - begun < SOON


def test_a_port_where_nobody_listens_is_unreachable_and_uses_up_no_connections(opens: Opens) -> None:
    store = opens(f"postgresql://postgres@127.0.0.1:{free_port()}/postgres")
    gc.disable()
    try:
        for name in VERBS:
            with pytest.raises(StoreUnreachable):
                verb(store, name)()
        assert len(store._connections._pool.made) == 1
    finally:
        gc.enable()


def test_a_server_that_does_not_let_us_in_has_refused_and_no_message_has_the_password(
    own: PostgresServer, opens: Opens
) -> None:
    with psycopg.connect(own.url(), autocommit=True) as connection:
        connection.execute("create role teller login password 'right'; create role poor login")
    (own.data / "pg_hba.conf").write_text(
        "host all teller 127.0.0.1/32 scram-sha-256\nhost postgres postgres 127.0.0.1/32 trust\n"
        "host nowhere all 127.0.0.1/32 trust\nhost all poor 127.0.0.1/32 trust\n"
    )
    with_schema(own.url())
    own.restart()
    at = f"127.0.0.1:{own.port}"
    refused = {
        "wrong password": f"postgresql://teller:s3cret@{at}/postgres",
        "no password": f"postgresql://teller@{at}/postgres",
        "no such database": f"postgresql://postgres@{at}/nowhere",
        "no such user": f"postgresql://nobody@{at}/nowhere",
        "not in pg_hba.conf": f"postgresql://postgres@{at}/template1",
        "no rights": f"postgresql://poor@{at}/postgres",
    }
    for what, url in refused.items():
        with pytest.raises(StoreRefused, match="Check the user, the password") as caught:
            opens(url).acquire(claim())
        assert "s3cret" not in f"{what} {caught.value!r} {caught.value.__cause__!r}"
    take(opens(f"postgresql://postgres@{at}/postgres"))


def test_the_rights_that_the_documentation_names_suffice(own: PostgresServer, opens: Opens) -> None:
    owner = opens(with_schema(f"{own.url()}?schema=idem"))
    with psycopg.connect(own.url(), autocommit=True) as connection:
        connection.execute(
            "create role worker login; grant usage on schema idem to worker;"
            "grant select, insert, update, delete on idem.idempotency to worker;"
            "grant select on idem.idempotency_meta to worker; grant usage on idem.idempotency_fences to worker;"
        )
        store = opens(f"{own.url(user='worker')}?schema=idem")
        # As before there was a history: nothing is noted, nothing of it can be forgotten, and all else is as it was.
        assert store.renew([take(store, "early")]) == []
        with pytest.raises(StoreRefused, match="rights"):
            store.append_history([HistoryEntry("early", "taken over", 0, 60)])
        with pytest.raises(StoreRefused, match="rights"):
            store.delete("early")
        assert store.purge() == 0
        connection.execute("grant select, insert, update, delete on idem.idempotency_history to worker")
    store.append_history([HistoryEntry("early", "taken over", 0, 60), HistoryEntry("early", "completed", 0, 60)])
    assert len(store.history("early")) == 2
    assert store.delete("early")
    for name in VERBS:
        verb(store, name, take(store, name))()
    store.purge()
    with begun(own.url(user="worker")) as connection:
        store.settle_within(take(store, "within"), DONE, ttl=60, using=connection)
    assert known(owner, "within").state is State.COMPLETED
    with pytest.raises(StoreRefused):
        opens(f"{own.url(user='worker')}?schema=idem&table=more").apply_schema()


def test_a_record_that_a_policy_lets_us_read_and_not_change_is_refused(own: PostgresServer, opens: Opens) -> None:
    with_schema(own.url())
    with psycopg.connect(own.url(), autocommit=True) as connection:
        connection.execute(
            "create role tenant login; grant select, insert, update, delete on idempotency to tenant;"
            "grant usage on idempotency_fences to tenant; alter table idempotency enable row level security;"
            "create policy reads on idempotency for select using (true);"
            "create policy adds on idempotency for insert with check (true)"
        )
        store = opens(own.url(user="tenant"))
        take(store)
        with pytest.raises(StoreRefused, match="a row-level security policy hides it"):
            store.acquire(claim())
        connection.execute("create policy changes on idempotency for update using (true)")
    answer = store.acquire(claim())
    assert isinstance(answer, Refusal)
    assert answer.verdict is Verdict.CONFLICT


@pytest.mark.nightly
def test_a_standby_that_is_away_costs_no_more_sessions_than_a_process_may_have(
    own_postgres: Callable[..., PostgresServer], opens: Opens
) -> None:
    """A session that waits for it does not notice that its client has gone: each try would leave another one."""
    server = own_postgres()
    store = opens(with_schema(f"{server.url()}?connections=2"))
    with psycopg.connect(server.url(), autocommit=True) as connection:
        connection.execute("alter system set synchronous_standby_names = 'away'")
        connection.execute("select pg_reload_conf()")
        wait_until(
            lambda: connection.execute("show synchronous_standby_names").fetchone() == ("away",), 20, "the setting"
        )
        for number in range(5):
            with pytest.raises(StoreUnreachable, match="no answer" if number < 2 else "wait for a standby"):
                store.acquire(claim(f"key-{number}"))
        waiting = "select count(*) from pg_stat_activity where wait_event = 'SyncRep'"
        assert connection.execute(waiting).fetchone() == (2,)
        connection.execute("alter system reset synchronous_standby_names")
        connection.execute("select pg_reload_conf()")
        wait_until(lambda: connection.execute(waiting).fetchone() == (0,), 20, "the commits to end")
    assert take(store, "key-9").fence > 0


@pytest.mark.nightly
@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
def test_a_server_whose_transactions_are_stricter_by_default_serves_a_crowd(
    own_postgres: Callable[..., PostgresServer], opens: Opens, level: str
) -> None:
    server = own_postgres(default_transaction_isolation=level)
    store = opens(with_schema(server.url()))
    with ThreadPoolExecutor(16) as crowd:
        for number in range(5):
            claims = [claim(f"key-{number}", task_id=f"t{each}") for each in range(32)]
            answers = list(crowd.map(store.acquire, claims))
            (lease,) = [answer for answer in answers if isinstance(answer, Lease)]
            assert {a.record.owner for a in answers if isinstance(a, Refusal)} == {lease.owner}
    store.settle(lease, DONE, ttl=60)
    assert known(store, lease.key).payload == DONE.payload
    with pytest.raises(StoreRefused):  # an error within the longer form leaves nothing behind on the connection
        store._run("select no_such_function(%s)", (1,))
    assert known(store, lease.key).payload == DONE.payload


@pytest.mark.nightly
def test_where_transactions_are_stricter_a_call_waits_for_a_lock_only_once(
    own_postgres: Callable[..., PostgresServer], opens: Opens
) -> None:
    server = own_postgres(default_transaction_isolation="serializable")
    store = opens(with_schema(server.url()))
    store._connections._strict = True  # as it is from the first failure on
    with begun(server.url()) as connection:
        store.settle_within(take(store), DONE, ttl=60, using=connection)
        with pytest.raises(StoreUnreachable, match="open transaction"):
            store.delete(KEY)
    assert server.logs().count("canceling statement due to lock timeout") == 1


@pytest.mark.nightly
def test_a_deadlock_or_serialization_failure_that_does_not_end_is_an_error(store: PostgresStore) -> None:
    with pytest.raises(StoreUnreachable, match="SerializationFailure"):
        store._run("do $$ begin raise sqlstate '40001'; end $$", ())
    store.ping()


def test_where_all_tables_are_published_the_schema_is_made_and_upgraded(
    own_postgres: Callable[..., PostgresServer], opens: Opens
) -> None:
    """As for logical replication: what has no primary key cannot be updated then."""
    url = own_postgres(wal_level="logical").url()
    older, newer = opens(f"{url}?table=older"), opens(f"{url}?table=newer")
    older.apply_schema()
    run(older, "update {meta} set version = 1 returning 1")
    with psycopg.connect(url) as connection:
        connection.execute(
            older._schema.render("alter table {meta} drop constraint if exists older_meta_pkey").encode()
        )
        connection.execute("create publication everything for all tables")
    for store in (older, newer):
        store.apply_schema()
        assert store.pending_schema() == ""
        take(store)


def test_a_standby_is_unreachable(own_postgres: Callable[..., PostgresServer], opens: Opens) -> None:
    server = own_postgres()
    store = opens(with_schema(server.url()))
    store.close()
    server._end(2)
    (server.data / "standby.signal").touch()
    server.start()
    for name in ("ping", "acquire", "settle"):
        with pytest.raises(StoreUnreachable):
            verb(store, name)()
    store.close()


@pytest.mark.nightly
@pytest.mark.parametrize("level", ["read committed", "serializable"])
def test_connections_to_a_server_that_cannot_be_written_are_replaced(
    own_postgres: Callable[..., PostgresServer], opens: Opens, level: str
) -> None:
    """As after a failover: those that were opened meanwhile lead to the standby, and new ones to the primary."""
    server = own_postgres(default_transaction_isolation=level)
    store = opens(with_schema(server.url()))
    with psycopg.connect(server.url("template1"), autocommit=True) as connection:
        for name in ("acquire", "renew", "settle", "release", "mark_shutdown", "mark_dispatched", "delete"):
            lease = take(store, name)
            if name == "mark_dispatched":
                store.settle(lease, DONE, ttl=60)
            store.close()
            connection.execute("alter database postgres set default_transaction_read_only = on")
            with ThreadPoolExecutor(4) as crowd:
                list(crowd.map(store.get, [name] * 40))
            with pytest.raises(StoreUnreachable, match="may be written"):
                verb(store, name, lease)()
            with ThreadPoolExecutor(4) as crowd:
                list(crowd.map(store.get, [name] * 40))
            connection.execute("alter database postgres reset default_transaction_read_only")
            verb(store, name, lease)()


@pytest.mark.nightly
def test_of_several_hosts_the_one_that_can_be_written_is_taken(
    own: PostgresServer, own_postgres: Callable[..., PostgresServer], opens: Opens, monkeypatch: pytest.MonkeyPatch
) -> None:
    standby = own_postgres()
    for server in (own, standby):
        with_schema(server.url())
    standby._end(2)
    (standby.data / "standby.signal").touch()
    standby.start()
    url = f"postgresql://postgres@127.0.0.1:{standby.port},127.0.0.1:{own.port}/postgres"
    store = opens(url)
    lease = take(store)
    own._end(2)
    with pytest.raises(StoreUnreachable):
        store.get(KEY)  # which the standby would answer, though not with what is true
    own.start()
    assert store.renew([lease]) == []
    with pytest.raises(StoreUnreachable):
        opens(f"{url}?target_session_attrs=any").ping()
    monkeypatch.setenv("PGTARGETSESSIONATTRS", "any")
    with pytest.raises(StoreUnreachable):
        opens(url).ping()


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("postgresql://u:p@h/d?table=Orders", r"table= .* got 'Orders'\. Write table=orders\."),
        ("postgresql://u:p@h/d?table=2026-orders", r"Write table=_2026_orders\."),
        ("postgresql://u:p@h/d?table=x%22;drop", "table="),
        ("postgresql://u:p@h/d?schema=" + "s" * 41, "schema="),
        ("postgresql://u:p@h/d?schema=", r"Write schema=idempotency\."),
        ("postgresql://u:p@h/d?connections=0", "at least 1"),
        ("postgresql://u:p@h/d?connections=many", "whole number"),
        ("postgresql://u:p@h/d?tabel=x", "got 'tabel'. Did you mean table"),
        ("postgresql://h/d?tabel=x", "tabel"),
        ("postgresql://u:pa/ss@h:x/d", "%2F"),
        ("postgresql://u:p@h/d?x", "There are schema, table, connections and those of libpq"),
    ],
)
def test_a_wrong_url_is_said_when_the_store_is_made(url: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message) as caught:
        open_store(url)
    assert "pa/ss" not in str(caught.value)


def test_the_options_of_libpq_are_handed_on(postgres_url: str, opens: Opens) -> None:
    store = opens(f"{postgres_url}&application_name=my%20worker&connect_timeout=5")
    assert run(store, "select current_setting('application_name')") == [("my worker",)]


@pytest.mark.nightly
def test_a_database_without_an_encoding_serves(own: PostgresServer, opens: Opens) -> None:
    with psycopg.connect(own.url(), autocommit=True) as connection:
        connection.execute("create database plain encoding 'SQL_ASCII' template template0")
    store = opens(with_schema(own.url("plain")))
    lease = take(store, "Grüße")
    assert store.renew([lease]) == []
    store.settle(lease, DONE, ttl=60)
    with begun(own.url("plain")) as connection:
        store.settle_within(take(store), DONE, ttl=60, using=connection)
    assert [(record.key, record.payload) for record in store.scan()] == [("Grüße", DONE.payload), (KEY, DONE.payload)]


def test_what_a_database_cannot_keep_is_refused(store: PostgresStore) -> None:
    """A message with such an id fails: one that waited for its store would keep its slot for ever."""
    with pytest.raises(ConfigurationError, match="no NUL character"):
        store.acquire(claim(task_id="a\0b"))
    with pytest.raises(StoreError):
        store.acquire(claim(os.urandom(5000).hex()))
    assert store.get(KEY) is None


def test_a_full_disk_is_said_without_the_statement_that_met_it() -> None:
    """As PostgreSQL says it of a statement within a function."""
    said = (
        'could not extend file "base/5/16384_fsm": No space left on device\nHINT:  Check free disk space.\n'
        'CONTEXT:  SQL statement "insert into idempotency"\nPL/pgSQL function idempotency_acquire_9(text) line 80'
    )
    error = translate_error(psycopg.errors.DiskFull(said), "postgresql://shop")
    assert isinstance(error, StoreUnreachable)
    assert str(error) == (
        'The idempotency store postgresql://shop cannot serve (DiskFull: could not extend file "base/5/16384_fsm": '
        "No space left on device\nHINT:  Check free disk space.). Make room on its server's disk."
    )
