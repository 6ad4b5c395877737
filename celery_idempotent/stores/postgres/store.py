"""A store in PostgreSQL 13 and newer, by psycopg 3.

One row per record and one function per verb, so one statement and one round trip per verb; the server's clock is the
clock. The functions are made with the table, by ``celery-idempotent --store URL schema --apply``.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from time import monotonic
from typing import Any, TypeVar

import psycopg
from psycopg import errors, pq
from psycopg.rows import tuple_row

from ...errors import (
    ConfigurationError,
    IdempotencyError,
    LeaseLost,
    RecordUnreadable,
    StoreError,
    StoreRefused,
    StoreUnreachable,
)
from ..base import Store, pass_by_unreadable
from ..history import grouped, past_events
from ..records import (
    HISTORY_LIMIT,
    Claim,
    HistoryEntry,
    Lease,
    Outcome,
    PastEvent,
    Record,
    Refusal,
    Release,
    State,
    Verdict,
)
from ..transactions import Bridged, driver_connection, no_transaction, unwrapped
from .connections import NO_SCHEMA, Address, Connections, DefaultCursor, no_schema, refusal, translate_error
from .records import (
    COLUMNS,
    after,
    claim_args,
    lease_args,
    marks,
    outcome_args,
    record_of,
    release_args,
    stored,
    unstored,
    us,
)
from .schema import VERSION, Schema

logger = logging.getLogger("celery_idempotent.stores")

T = TypeVar("T")

#: Leases that one statement renews, records that one statement reads or purges.
RENEWED, READ, PURGED = 1000, 100, 500
#: Why a copy of the schema alone is none.
EMPTY = "its table of versions is empty"
#: The drivers for coroutines below SQLAlchemy on which a record can be settled.
BRIDGES = ("psycopg", "asyncpg")
#: Why nothing can be settled in a transaction.
FAILED = "a statement before this one has failed: roll it back"
#: Records that are removed in passing, at most. Where that takes longer than so many seconds, the next time comes after
#: so many times as long.
TIDIED, TIDY_SLOW, TIDY_SHARE = 50, 0.05, 100
#: Seconds a settle or a release waits for an open transaction to end, and looks every so often.
BUSY, LOOK_EVERY = 1.0, 0.02
#: Seconds a statement of the schema may take; how often it is tried while open transactions have the table, and the
#: seconds between, in which claims go on.
SCHEMA_SECONDS, SCHEMA_TRIES, SCHEMA_PAUSE = 60.0, 10, 0.5


class PostgresStore(Store):
    """Keep the records in a table of PostgreSQL.

    Weaker than the contract where a failover loses transactions that were not replicated (``synchronous_commit``).
    A holder that has settled within an open transaction keeps its lease until that ends; while it does, claims get
    `Verdict.CONFLICT` without being counted as waiting, renewals count as held, and a release that meets it for longer
    than a second answers true and leaves the lease to run out.

    Arguments:
        place: Where the records are.
    """

    keeps_history = True
    seeks_in_progress = True
    #: One lease of so many is followed by the removal of a few expired records; 0 leaves that to `purge`.
    purge_every = 25

    def __init__(self, place: Address) -> None:
        self._place = place
        self._connections = Connections(place)
        self._schema = schema = Schema(place)
        self._histories = Histories(schema, partial(self._run, bounded=True))
        self._home = ""  # learned when first needed: see home.sql
        self._tidy_after = 0.0
        record = ", ".join(f"(a.r).{name}" for name in COLUMNS[:-1]) + ", '{}'::jsonb"
        render = schema.render
        self._acquire = render(f"select a.verdict, a.clock, a.took_over, {record} from {{acquire}}({marks(14)}) a")
        self._renew = render(f"select {{renew}}({marks(10)})")
        self._settle = render(f"select {{settle}}({marks(9)})")
        # In a copy of the schema without its rows: which database that is, the server cannot know.
        self._settle_within = render(f"select case when {{home}}() is null then 'elsewhere' else ({self._settle}) end")
        self._release = render(f"select {{release}}({marks(11)})")
        # What an open transaction settles right now is not waited for.
        self._mark_shutdown = render(
            "update {table} t set reason = 'shutdown' from (select key from {table} where key = %s and owner = %s "
            "and state = 'in_progress' and expires > {now} for update skip locked) m where t.key = m.key returning true"
        )
        read = f"select {{now}}, {', '.join(COLUMNS)} from {{table}} where"
        self._get = render(f"{read} key = %s and expires > {{now}}")
        self._page = render(f"{read} key > %s and key >= %s")

    @classmethod
    def from_url(cls, url: str) -> PostgresStore:
        """Return a store on the server that ``url`` names (``postgresql://`` or ``postgres://``).

        Arguments:
            url: As libpq takes it; its query may also carry ``schema`` and ``table`` (default: ``public`` and
                ``idempotency``), and ``connections``, the most of one process (default: 8).

        Raises:
            ConfigurationError: the URL cannot be parsed, or an option is wrong.
        """
        return cls(Address.of_url(url))

    def acquire(self, claim: Claim) -> Lease | Refusal:
        try:
            ((verdict, now, took_over, *row),) = self._run(self._acquire, claim_args(claim))
        except StoreRefused as error:
            raise _as_the_claims(claim, error) from error.__cause__
        record = record_of(row, now)
        if verdict == "lease":
            if random.random() * self.purge_every < bool(self.purge_every) and monotonic() >= self._tidy_after:
                self._tidy()
            return Lease(claim, record.fence, taken_over=took_over, crashes=record.crashes)
        return Refusal(Verdict(verdict), record)

    def renew(self, leases: Sequence[Lease]) -> Sequence[Lease]:
        lost: list[Lease] = []
        locked: list[str] = []
        for start in range(0, len(leases), RENEWED):
            batch = leases[start : start + RENEWED]
            rows = self._run(self._renew, lease_args(batch), urgent=True)
            for place in sorted((place for (place,) in rows), key=abs):
                if place > 0:
                    lost.append(batch[place - 1])
                else:
                    locked.append(batch[-place - 1].key)
        if locked:  # the others are extended, and those that are lost will be so at the next try
            raise StoreUnreachable(
                f"Another transaction has locked {len(locked)} of the {len(leases)} records that were to be renewed in "
                f"the idempotency store {self._place.shown}, as {locked[0]!r}: commit it, or end its session. It may "
                "have been opened by hand, or its commit may wait for a standby."
            )
        return lost

    def settle(self, lease: Lease, outcome: Outcome, *, ttl: float) -> None:
        answer = self._unless_busy(self._settle, outcome_args(lease, outcome, ttl, None))
        if answer == "busy":
            raise StoreUnreachable(
                f"The record of {lease.key!r} in the idempotency store {self._place.shown} is held by an open "
                "transaction that settles it: nothing was settled by this call. Commit it, or roll it back."
            )
        self._held(answer, lease)

    def settle_within(self, lease: Lease, outcome: Outcome, *, ttl: float, using: Any) -> None:
        """Record how the operation ended in the caller's own open transaction: it counts when that commits.

        One statement on the caller's connection, and no commit. The row is locked until the transaction ends.

        Arguments:
            lease: The lease.
            outcome: How the operation ended.
            ttl: Seconds the record is kept.
            using: A connection of psycopg, a SQLAlchemy ``Connection`` or ``Session``, or the alias of a Django
                database, in a transaction in the database of the store. Over asyncpg, or psycopg's coroutines, the
                ``Connection`` or ``Session`` that SQLAlchemy's ``run_sync`` calls with.

        Raises:
            errors.LeaseLost: the lease was lost; nothing was written, and the caller should roll back.
            ConfigurationError: there is no transaction open, or it is in another database.
        """
        connection = caller_connection(using)
        aside = connection.aside if isinstance(connection, Bridged) else _here
        home = self._home or aside(self._find_home)
        while True:
            args = outcome_args(lease, outcome, ttl, home)
            where = {"shown": self._place.shown, "table": self._schema.names["table"]}
            answer = answer_within(connection, self._settle_within, args, **where)
            if answer != "elsewhere":
                return self._held(answer, lease)
            known, home = home, aside(self._find_home)  # the server may have been upgraded since
            if home == known:
                raise elsewhere(connection, **where)

    def release(self, lease: Lease, release: Release) -> bool:
        return self._unless_busy(self._release, release_args(lease, release)) != "lost"

    def mark_shutdown(self, lease: Lease) -> bool:
        return bool(self._run(self._mark_shutdown, (stored(lease.key), lease.owner), bounded=True))

    def mark_dispatched(self, key: str, task_id: str) -> bool:
        return bool(self._scalar("select {announce}(%s, %s)", stored(key), task_id))

    def get(self, key: str) -> Record | None:
        rows = self._run(self._get, (stored(key),), bounded=True)
        return record_of(rows[0][1:], rows[0][0]) if rows else None

    def delete(self, key: str) -> bool:
        self._histories.forget(key)
        return bool(self._scalar("select {forget}(%s)", stored(key)))

    def append_history(self, entries: Sequence[HistoryEntry]) -> None:
        self._histories.append(entries)

    def history(self, key: str) -> list[PastEvent]:
        return self._histories.read(key)

    def scan(self, *, prefix: str = "", state: State | None = None) -> Iterator[Record]:
        first, last = stored(prefix), ""
        query, bounds = self._page, [first]
        if end := after(first):
            query, bounds = f"{query} and key < %s", [first, end]
        # Others are not sought by the server: where they are few among millions, its statement would run out of time.
        if state is State.IN_PROGRESS:  # in the text, for the sake of the partial index
            query = f"{query} and state = '{state.value}'"
        while rows := self._run(f"{query} order by key limit {READ}", (last, *bounds), bounded=True):
            for now, *row in rows:
                if row[COLUMNS.index("expires")] > now and state in (None, row[1]):
                    try:
                        record = record_of(row, now)
                    except RecordUnreadable:
                        pass_by_unreadable(unstored(row[0]))
                        continue
                    yield record
            last = rows[-1][1]

    def purge(self, limit: int | None = None) -> int:
        purged = last = 0
        while limit is None or purged < limit:
            most = PURGED if limit is None else min(PURGED, limit - purged)
            gone, last = self._scalar("select {purge}(%s, %s)", most, last, bounded=True)
            purged += gone
            if gone < most:
                break
        self._histories.purge_all(PURGED if limit is None else min(PURGED, limit), PURGED)
        return purged

    def _tidy(self) -> None:
        began = monotonic()
        try:
            self.purge(TIDIED)
        except StoreError as error:  # the lease is granted, and others will tidy up
            logger.debug("Expired records were not removed: %s", error)
        # While a transaction of hours is open, as of a backup, what was removed stays in the index, and is read first.
        took = monotonic() - began
        if took > TIDY_SLOW:
            self._tidy_after = began + TIDY_SHARE * took

    def pending_schema(self) -> str:
        return self._schema.statements() if self._version() < VERSION else ""

    def apply_schema(self) -> None:
        if self._version() >= VERSION:
            return
        for tried in range(1, SCHEMA_TRIES + 1):
            try:
                with self._connections.connect(SCHEMA_SECONDS) as connection, connection.transaction():
                    connection.execute(self._schema.turn.encode())
                    connection.execute(self._schema.statements().encode())
                return
            except errors.LockNotAvailable as error:
                if tried == SCHEMA_TRIES:
                    raise StoreUnreachable(
                        f"The schema of the idempotency store {self._place.shown} was not changed: its table is in use "
                        f"by an open transaction ({type(error).__name__}: {str(error).strip()}). Commit it, or end its "
                        "session, which pg_stat_activity shows as idle in transaction, and apply the schema again."
                    ) from error
                time.sleep(SCHEMA_PAUSE)
            except psycopg.Error as error:
                raise translate_error(error, self._place.shown) from error

    def usage(self, sample: Sequence[str] = ()) -> dict[str, int]:
        query, table = "select pg_total_relation_size(%s)::bigint", self._schema.names["table"]
        return {"table_bytes": self._scalar(query, table, bounded=True)}

    def ping(self) -> None:
        query = "select pg_is_in_recovery(), exists (select from {meta})"
        ((standby, known),) = self._run(self._schema.render(query), (), bounded=True)
        if not known:
            raise no_schema(self._place.shown, EMPTY)
        if standby:
            self._connections.close()  # new ones may lead to another server
            raise StoreUnreachable(f"The idempotency store {self._place.shown} is a standby, which cannot be written.")

    def close(self) -> None:
        self._connections.close()

    def _version(self) -> int:
        """Return the version of the schema in the database; 0 if there is none, or its rows were not copied."""
        try:
            rows = self._connections.run(self._schema.version, bounded=True)
            return max((int(version) for (version,) in rows), default=0)
        except NO_SCHEMA:
            return 0
        except psycopg.Error as error:
            raise translate_error(error, self._place.shown) from error

    def _find_home(self) -> str:
        home = self._scalar("select {home}()", bounded=True)
        if home is None:
            raise no_schema(self._place.shown, EMPTY)
        self._home = str(home)
        return self._home

    def _held(self, answer: str, lease: Lease) -> None:
        if answer != "settled":
            raise LeaseLost(f"The lease on {lease.key!r} is held by another holder: nothing was settled.")

    def _unless_busy(self, statement: str, args: Sequence[Any]) -> str:
        """Run a statement again while an open transaction has the row, for a while."""
        end = monotonic() + BUSY
        while True:
            answer = str(self._run(statement, args)[0][0])
            if answer != "busy" or monotonic() >= end:
                return answer
            time.sleep(LOOK_EVERY)

    def _scalar(self, query: str, *args: Any, **options: Any) -> Any:
        return self._run(self._schema.render(query), args, **options)[0][0]

    def _run(self, statement: str, args: Sequence[Any], **options: Any) -> list[tuple[Any, ...]]:
        try:
            return self._connections.run(statement, args, **options)
        except psycopg.Error as error:
            raise translate_error(error, self._place.shown) from error


def _as_the_claims(claim: Claim, error: StoreRefused) -> IdempotencyError:
    """Return the error for a refused claim, which is not to be waited for where its key or message is at fault."""
    match error.__cause__:
        case errors.InvalidTextRepresentation() | errors.NumericValueOutOfRange() as cause:
            return RecordUnreadable(
                f"The record {claim.key!r} is damaged or was written by another program "
                f"({type(cause).__name__}: {str(cause).strip()}). Delete the key if it is garbage."
            )
        case psycopg.DataError():
            return ConfigurationError(str(error))
    return error


def _here(call: Callable[[], T]) -> T:
    return call()


def caller_connection(using: Any) -> psycopg.Connection[Any] | Bridged:
    """Return the connection on which the caller's transaction is open.

    One of SQLAlchemy or Django, which they have begun, may have sent no statement yet. A bare one that has sent none is
    in no transaction: to begin one here would commit the record apart from rows that were committed before.

    Raises:
        ConfigurationError: it is no connection of psycopg 3, or in no transaction.
    """
    found = driver_connection(using, psycopg.Connection, bridges=BRIDGES)
    if isinstance(found, Bridged):
        return found
    connection: psycopg.Connection[Any] = found
    if connection.closed:
        raise no_transaction("the connection is closed")
    if connection.pgconn.pipeline_status != pq.PipelineStatus.OFF:
        with connection.pipeline():  # which waits for what was sent: until then it is unknown whether there was a BEGIN
            pass
    status = connection.info.transaction_status
    if status == pq.TransactionStatus.INERROR:
        raise no_transaction(FAILED)
    if status == pq.TransactionStatus.IDLE and connection.autocommit:
        raise no_transaction("the connection is in autocommit mode: use `with connection.transaction():`")
    if status == pq.TransactionStatus.IDLE and unwrapped(using, psycopg.Connection) is connection:
        raise no_transaction(
            "this connection has begun none, or has committed it. Write the task's own rows first, or use "
            "`with connection.transaction():` around them and this call"
        )
    return connection


def answer_within(
    connection: psycopg.Connection[Any] | Bridged, statement: str, args: Sequence[Any], *, shown: str, table: str
) -> str:
    """Run settle.sql on the caller's connection and return its answer; what the server raises there breaks the
    transaction, and is raised as psycopg or SQLAlchemy raise it, but for the errors of this library.

    Raises:
        ConfigurationError: there is no such store in the caller's database, or an error has broken the transaction.
        StoreRefused: the caller's user may not write the table.
    """  # fmt: skip
    try:
        if isinstance(connection, Bridged):
            answer = connection.scalar(statement, args)
        else:
            # A cursor of our own: the caller's may have another row factory, adapters, or bind and fetch otherwise.
            with DefaultCursor(connection, row_factory=tuple_row) as cursor:
                row = cursor.execute(statement, args, prepare=False).fetchone()
            assert row is not None
            answer = row[0]
    except Exception as error:
        cause = _as_psycopgs(error)
        if isinstance(cause, NO_SCHEMA):
            raise elsewhere(connection, shown, table) from error
        if isinstance(cause, errors.InFailedSqlTransaction):
            raise no_transaction(FAILED) from error
        refused = None if cause is None else refusal(cause, shown)
        if refused is None:
            raise
        raise refused from error
    return answer.decode() if isinstance(answer, bytes) else str(answer)  # bytes where the encoding is SQL_ASCII


def _as_psycopgs(error: Exception) -> psycopg.Error | None:
    """Return an error of SQLAlchemy, of whichever driver, as the one that psycopg has for it; None if there is none."""
    raised = getattr(error, "orig", error)
    if isinstance(raised, psycopg.Error):
        return raised
    try:
        return errors.lookup(getattr(raised, "sqlstate", None) or "")(str(raised))
    except KeyError:
        return None


def elsewhere(connection: psycopg.Connection[Any] | Bridged, shown: str, table: str) -> ConfigurationError:
    """Return the error for a transaction in another database than the store's."""
    if isinstance(connection, Bridged):
        name, host, port = connection.url.database, connection.url.host, connection.url.port
    else:
        name, host, port = connection.info.dbname, connection.info.host, connection.info.port
    return ConfigurationError(
        f"settle: expected using= to lead to the database of the idempotency store, {shown} with the table {table}, "
        f"got the database {name!r} on {host or 'the default host'}:{port or 5432}, which is another one. "
        "Two databases cannot commit together: keep the store in the database of the task's own rows."
    )


#: Rows of one key's lines are locked in the order of the keys, so that two that write many wait and do not deadlock.
_APPEND = """
insert into {history} as h (key, at, line, expires)
  select n.key, array_agg({now} - n.ago order by n.place), array_agg(n.line order by n.place), max({now} + n.rest)
  from unnest(%s::text[], %s::bigint[], %s::bigint[], %s::text[]) with ordinality n (key, ago, rest, line, place)
  group by n.key order by n.key collate "C"
on conflict (key) do update set expires = greatest(h.expires, excluded.expires),
  at = (case when h.expires > {now} then h.at else '{}' end || excluded.at)
    [greatest(1, case when h.expires > {now} then cardinality(h.at) else 0 end + cardinality(excluded.at) - {last}):],
  line = (case when h.expires > {now} then h.line else '{}' end || excluded.line)
    [greatest(1, case when h.expires > {now} then cardinality(h.at) else 0 end + cardinality(excluded.at) - {last}):]
returning 1
"""
_READ = "select {now}, at, line from {history} where key = %s and expires > {now}"
_FORGET = "delete from {history} where key = %s returning 1"
#: The clock is read once, so that the index is not read beyond what has expired.
_PURGE = """
delete from {history} h where h.ctid = any (array(
  select o.ctid from {history} o where o.expires <= (select {now}) order by o.expires limit %s for update skip locked
)) returning 1
"""


class Histories:
    """The histories of one table's keys.

    Arguments:
        schema: Names the table.
        run: Runs a statement and returns its rows.
    """

    def __init__(self, schema: Schema, run: Callable[[str, Sequence[Any]], list[tuple[Any, ...]]]) -> None:
        self._run = run
        self._append, self._read, self._forget, self._purge = (
            schema.render(statement.replace("{last}", str(HISTORY_LIMIT - 1)))
            for statement in (_APPEND, _READ, _FORGET, _PURGE)
        )

    def append(self, entries: Iterable[HistoryEntry]) -> None:
        """Add lines.

        Raises:
            StoreRefused: among others, the database has the schema of an older version.
        """
        found = [(key, entry) for key, mine in grouped(entries).items() for entry in mine]
        if found:
            keys, agos = [stored(key) for key, _ in found], [us(entry.ago) for _, entry in found]
            rests = [us(entry.keep - entry.ago) for _, entry in found]
            self._run(self._append, (keys, agos, rests, [stored(entry.text) for _, entry in found]))

    def read(self, key: str) -> list[PastEvent]:
        """Return what was noted of a key."""
        rows = self._where_there_is_one(self._read, (stored(key),))
        return [
            event for now, at, line in rows for event in past_events(zip(at, map(unstored, line), strict=True), now)
        ]

    def forget(self, key: str) -> None:
        """Delete the history of a key."""
        self._where_there_is_one(self._forget, (stored(key),))

    def purge(self, most: int) -> int:
        """Delete what has expired, and return how much; 0 without the right to do so: the records are purged."""
        try:
            return len(self._where_there_is_one(self._purge, (most,)))
        except StoreRefused as error:
            logger.debug("Expired histories were not removed: %s", error)
            return 0

    def purge_all(self, most: int, batch: int) -> None:
        """Delete what has expired, so many at a time, until a time finds less than a whole batch."""
        while most and self.purge(most) == batch:
            pass

    def _where_there_is_one(self, statement: str, args: Sequence[Any]) -> list[tuple[Any, ...]]:
        """Run a statement, on a database of an older version as on one that has noted nothing."""
        try:
            return self._run(statement, args)
        except StoreRefused as error:
            if isinstance(error.__cause__, NO_SCHEMA):
                return []
            raise
