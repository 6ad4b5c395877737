"""Connections to PostgreSQL that all threads of a process share, the URL of a store, and what psycopg's errors mean.

Not psycopg_pool: it has threads of its own, which neither survive a fork nor belong into a process of greenlets.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from selectors import EVENT_READ, EVENT_WRITE, DefaultSelector
from time import monotonic
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode

import psycopg
from psycopg import errors, postgres, pq
from psycopg.adapt import AdaptersMap
from psycopg.conninfo import conninfo_to_dict
from psycopg.types.array import register_all_arrays
from psycopg.types.json import set_json_loads

from ...errors import ConfigurationError, StoreError, StoreRefused, StoreUnreachable
from .. import hide_password, unknown_parameter
from ..pool import Pool

#: Seconds a statement may take, and a connection attempt (libpq knows no less than 2). A lease call must answer or fail
#: long before a lease ends.
TIMEOUT = 2.0
#: What a statement begins with that is no function; these have the same limit, which is shorter than `TIMEOUT`.
LOCK_TIMEOUT = "set local lock_timeout = '1500ms'"
#: How often a statement is sent that a server gives up for the sake of another.
ATTEMPTS = 5
#: Which of the sessions that we have left wait for a standby to have their commit.
WAITING = "select pid from pg_stat_activity where pid = any(%s) and usename = current_user and wait_event = 'SyncRep'"
#: What a parent opened, in its children: kept, because a connection that is collected may end its parent's session.
_INHERITED: list[Any] = []


class NoAnswer(psycopg.OperationalError):
    """Raised when a server did not answer in time; the connection is of no use any more."""


#: What is raised where a connection was lost, though not only there.
LOST = (psycopg.OperationalError, psycopg.InterfaceError)
#: What a server answers while another transaction holds a record.
HELD = (errors.LockNotAvailable, errors.QueryCanceled)
#: What a standby answers, and a server that its operator has closed for writing.
READ_ONLY = errors.ReadOnlySqlTransaction
#: What no other connection would change, though this one may have been closed for it: its transaction is broken.
FINAL = (NoAnswer, *HELD)


class TimedConnection(psycopg.Connection[tuple[Any, ...]]):
    """A connection that waits for no answer longer than ``seconds``, whatever has become of the server.

    Neither a statement_timeout nor TCP notices a server that is stopped, or a network that swallows packets.
    """

    seconds = TIMEOUT

    def wait(self, gen: Any, *_: Any, **__: Any) -> Any:
        """Consume a generator of psycopg's, and raise `NoAnswer` when the time is up.

        Not with psycopg's own wait, of which only newer ones take a timeout.
        """
        end = monotonic() + self.seconds
        try:
            wanted = next(gen)
            with DefaultSelector() as selector:  # of greenlets, where they are patched in
                while True:
                    key = selector.register(self.pgconn.socket, wanted)
                    ready = selector.select(max(0.0, end - monotonic()))
                    if not ready:
                        raise NoAnswer(f"no answer within {self.seconds:g} s")
                    selector.unregister(key.fd)
                    wanted = gen.send(ready[0][1])
        except StopIteration as done:
            return done.value

    def finish(self) -> None:
        """Wait until the server has done what was sent and its answer is thrown away, or the time is up."""
        end = monotonic() + self.seconds
        with suppress(psycopg.Error, OSError):
            while self.pgconn.transaction_status == pq.TransactionStatus.ACTIVE:
                wanted = EVENT_READ | (EVENT_WRITE if self.pgconn.flush() else 0)
                with DefaultSelector() as selector:
                    selector.register(self.pgconn.socket, wanted)
                    if not selector.select(max(0.0, end - monotonic())):
                        return
                self.pgconn.consume_input()
                while not self.pgconn.is_busy() and self.pgconn.get_result():
                    pass


def _default_adapters() -> AdaptersMap:
    """Return how psycopg writes and reads values where nothing was registered with it."""
    adapters = AdaptersMap()
    postgres.register_default_types(adapters.types)
    postgres.register_default_adapters(adapters)
    set_json_loads(json.loads, adapters)
    register_all_arrays(adapters)
    return adapters


#: Of our own connections, and of our statements on others: an application may have changed its connections', or those
#: of all that are opened (`psycopg.adapters`), as to write lists as jsonb.
ADAPTERS = _default_adapters()


class DefaultCursor(psycopg.Cursor[tuple[Any, ...]]):
    """A cursor that writes and reads values as psycopg does by default, on whichever connection."""

    @property
    def adapters(self) -> AdaptersMap:
        """Not those of the connection."""
        return ADAPTERS


class Slot:
    """A place for one connection, which is opened when it is needed."""

    connection: TimedConnection | None = None
    #: of `Connections`, when this one was opened
    generation = 0

    @property
    def is_clean(self) -> bool:
        """Whether there is a connection, with no reply on its way that would answer the next statement."""
        connection = self.connection
        return connection is not None and connection.pgconn.transaction_status == pq.TransactionStatus.IDLE

    def close(self) -> None:
        """Close the connection, if there is one."""
        connection, self.connection = self.connection, None
        if connection is not None:
            connection.close()


class Connections:
    """Run statements, each in a transaction of its own, on a connection that no other thread is using.

    Arguments:
        place: Where the server is, and how many connections there may be.
    """

    def __init__(self, place: Address) -> None:
        self._place = place
        #: true once the server has shown that its default isolation level is stricter than READ COMMITTED
        self._strict = False
        self._generation = 0
        self._reset()

    def _reset(self) -> None:
        self._pool: Pool[Slot] = Pool(Slot, self._place.connections, unanswered=LOST)
        #: the server's processes that did not answer in time: they may wait for a standby, and do not end before
        self._left: list[int] = []
        self._pid = os.getpid()

    def run(
        self, statement: str, args: Sequence[Any] = (), *, urgent: bool = False, bounded: bool = False
    ) -> list[tuple[Any, ...]]:
        """Return the rows that a statement answers; raise what psycopg raises.

        Every verb may be called again: a pooled connection that the server has closed meanwhile, or that leads to a
        server which cannot be written, is replaced and the statement repeated, and so is one that the server gave up
        for another transaction's sake.

        Arguments:
            statement: What to run.
            args: Its parameters.
            urgent: Come before the calls that wait for a connection (default: after them).
            bounded: Have the server give up a lock before the client does (default: the statement is a function that
                does so by itself). Else each try leaves a session behind, which waits for the lock on and on.
        """
        attempt = 0
        while True:
            slot, pool = self._take(urgent=urgent)
            pooled = slot.connection is not None and slot.generation == self._generation
            try:
                rows = self._on(slot, statement, args, bounded=bounded)
            except BaseException as error:
                if isinstance(error, NoAnswer) and not slot.is_clean and slot.connection is not None:
                    self._left.append(slot.connection.pgconn.backend_pid)
                repeatable = isinstance(error, REPEATABLE)
                lost = not slot.is_clean and isinstance(error, LOST) and not isinstance(error, FINAL)
                read_only = isinstance(error, READ_ONLY)
                closed = pooled and (lost or read_only)
                if read_only and slot.generation == self._generation:
                    self.close()  # they lead to the same server; since a failover, new ones may lead to another
                elif closed and not repeatable:
                    self._drop_idle()  # the server has closed them too
                self._give_back(slot, pool, None if closed or repeatable else error)
                if repeatable:
                    self._strict = True
                    attempt += 1
                    if attempt == ATTEMPTS:
                        raise
                elif not closed:
                    raise
            else:
                self._give_back(slot, pool)
                return rows

    def _on(self, slot: Slot, statement: str, args: Sequence[Any], *, bounded: bool) -> list[tuple[Any, ...]]:
        if slot.generation != self._generation:  # opened before `close`
            slot.close()
        if slot.connection is None:
            slot.generation = self._generation
            slot.connection = self.connect()
        connection = slot.connection
        with connection.cursor() as cursor:
            if len(self._left) >= self._place.connections:
                self._left = [pid for (pid,) in cursor.execute(WAITING, (self._left,), prepare=False).fetchall()]
                if len(self._left) >= self._place.connections:  # another try would leave another one behind
                    raise NoAnswer(f"{len(self._left)} commits of this process wait for a standby of the server")
            if not (self._strict or bounded):
                return cursor.execute(statement, args, prepare=False).fetchall()
            # In one message, and thus in one transaction and one round trip.
            before, after = [LOCK_TIMEOUT] if bounded else [], []
            if self._strict:
                # In a stricter transaction a function does not see what those before it in the queue have committed.
                before, after = ["begin isolation level read committed", *before], ["commit"]
            text = psycopg.ClientCursor(connection).mogrify(statement, args)
            cursor.execute("; ".join([*before, text, *after]).encode())
            for _ in before:
                cursor.nextset()
            return cursor.fetchall()

    def connect(self, seconds: float = TIMEOUT) -> TimedConnection:
        """Return a new connection.

        Arguments:
            seconds: How long it waits for an answer (default: 2).
        """
        options: dict[str, Any] = {"connect_timeout": int(TIMEOUT), "fallback_application_name": "celery_idempotent"}
        known = conninfo_to_dict(self._place.conninfo)
        if "," in str(known.get("host", "")) and "PGTARGETSESSIONATTRS" not in os.environ:
            options["target_session_attrs"] = "read-write"  # by default libpq takes the first that answers
        options = {name: value for name, value in options.items() if name not in known}
        options["client_encoding"] = "utf8"  # with SQL_ASCII, which a database may have, psycopg gives bytes for texts
        # Nothing is prepared on the server: behind PgBouncer the next statement may reach another one.
        connection = TimedConnection.connect(
            self._place.conninfo, autocommit=True, prepare_threshold=None, context=ADAPTERS, **options
        )
        connection.seconds = seconds
        return connection

    def _take(self, *, urgent: bool = False) -> tuple[Slot, Pool[Slot]]:
        """Return a place, and the pool that it is of."""
        if self._pid != os.getpid():  # what came through a fork is our parent's
            _INHERITED.append((self._pool.idle, list(self._pool.made)))
            self._reset()
        pool = self._pool
        try:
            slot = pool.take(urgent=urgent) if pool.line else pool.idle.pop()
        except IndexError:
            slot = pool.take(urgent=urgent)
        if pool.is_stale(slot):
            slot.close()
        return slot, pool

    def _give_back(self, slot: Slot, pool: Pool[Slot], error: BaseException | None = None) -> None:
        if self._pid != os.getpid() or pool is not self._pool:  # it is our parent's
            return
        interrupted = error is not None and not isinstance(error, psycopg.Error)
        if interrupted and slot.connection is not None:
            # What gives back the lease comes on another connection, and must not come first.
            slot.connection.finish()
        answered = slot.is_clean or isinstance(error, HELD)
        if not slot.is_clean or slot.generation != self._generation:
            slot.close()
        pool.give_back(slot, None if answered else error)

    def _drop_idle(self) -> None:
        slots: list[Slot] = []
        with suppress(IndexError):
            while True:
                slots.append(self._pool.idle.pop())
        for slot in slots:
            slot.close()
        self._pool.idle += slots
        self._pool.wake()

    def close(self) -> None:
        """Close every connection, those of other threads as they give them back; the next call opens a new one."""
        if self._pid == os.getpid():
            self._generation += 1
            self._drop_idle()


#: What our statements meet where `apply_schema` was never called, or by an older version.
NO_SCHEMA = (errors.UndefinedTable, errors.UndefinedFunction, errors.InvalidSchemaName, errors.UndefinedObject)
#: What is over when the statement is sent again.
REPEATABLE = (errors.SerializationFailure, errors.DeadlockDetected)
#: Error classes by which a server refuses: authorization, a database that does not exist, rights.
_REFUSED = ("28", "3D", "42501")
#: The same while connecting, where libpq does not pass on the code of the error.
_WORDS = (
    "password authentication failed",
    "authentication failed",
    "no password supplied",
    "no pg_hba.conf entry",
    "permission denied",
    "is not permitted",
    "no such database",
    "no such user",
)


def translate_error(error: psycopg.Error, shown: str) -> StoreError:
    """Return the store's error that an error of psycopg means.

    Arguments:
        error: What psycopg raised.
        shown: What to call the server; no password in it.
    """
    text, _, _ = str(error).partition("\nCONTEXT:")  # behind which is a whole statement of the store
    what = f"{type(error).__name__}: {text.strip()}"
    refused = refusal(error, shown)
    if refused is not None:
        return refused
    if isinstance(error, errors.LockNotAvailable):
        return StoreUnreachable(
            f"A record of the idempotency store {shown}, or its table, is held by an open transaction ({what}). "
            "Is there one that settles a task and is not committed, or a VACUUM FULL or an ALTER TABLE?"
        )
    if isinstance(error, errors.DiskFull):
        return StoreUnreachable(f"The idempotency store {shown} cannot serve ({what}). Make room on its server's disk.")
    return StoreUnreachable(
        f"The idempotency store {shown} cannot serve ({what}). Check that it runs and may be written."
    )


def refusal(error: psycopg.Error, shown: str) -> StoreRefused | None:
    """Return the error if the server refuses this client by the configuration of either, else None."""
    text = str(error).strip()
    what = f"{type(error).__name__}: {text}"
    if isinstance(error, NO_SCHEMA):
        return no_schema(shown, what)
    state = error.sqlstate or ""
    unknown = "does not exist" in text and ("FATAL" in text or not state)
    if state.startswith(_REFUSED) or (not state and (unknown or any(words in text for words in _WORDS))):
        return StoreRefused(
            f"The idempotency store {shown} refused us ({what}). "
            "Check the user, the password, the database and the rights on the table and its functions."
        )
    if isinstance(error, psycopg.DataError):
        return StoreRefused(
            f"The idempotency store {shown} cannot keep such a record ({what}). "
            "Keys, task ids and names must be text that the database can hold: no NUL character, and no more than "
            "2,700 bytes of key."
        )
    return None


def no_schema(shown: str, why: str) -> StoreRefused:
    """Return the error for a database without what this version needs in it."""
    return StoreRefused(
        f"The idempotency store {shown} has no table and functions for this version ({why}). "
        "Make or upgrade them with: celery-idempotent --store URL schema --apply, or with manage.py migrate where "
        "celery_idempotent.django is in INSTALLED_APPS and Django's settings name this store"
    )


OPTIONS = ("schema", "table", "connections")
SCHEMA, TABLE, CONNECTIONS = "public", "idempotency", 8
#: The names of the functions are made of the table's, and PostgreSQL cuts names off at 63 bytes.
NAME = re.compile(r"[a-z_][a-z0-9_]{0,39}")


def _as_name(text: str) -> str:
    """Return the name that is nearest to a text which is none."""
    name = re.sub(r"[^a-z0-9_]", "_", text.lower())[:39] or TABLE
    return name if NAME.fullmatch(name) else f"_{name}"


@dataclass(frozen=True)
class Address:
    """Where the records are.

    Arguments:
        conninfo: The connection string without the library's own options, for libpq.
        shown: What to call the server in messages; no password in it.
        schema, table: Names of lower-case letters, digits and underscores, 40 at most.
        connections: Most connections of one process, unless none comes back for 2 seconds.
    """

    conninfo: str
    shown: str = "postgresql"
    schema: str = SCHEMA
    table: str = TABLE
    connections: int = CONNECTIONS

    def __post_init__(self) -> None:
        for option, name in (("schema", self.schema), ("table", self.table)):
            if not NAME.fullmatch(name):
                raise ConfigurationError(
                    f"Expected {option}= of a PostgreSQL store to be a name of 1 to 40 lower-case letters, digits and "
                    f"underscores that begins with no digit, got {name!r}. Write {option}={_as_name(name)}."
                )
        if self.connections < 1:
            raise ConfigurationError(
                f"Expected connections= of a PostgreSQL store to be at least 1, got {self.connections}."
            )

    @classmethod
    def of_url(cls, url: str) -> Address:
        """Return the place that a URL names.

        Arguments:
            url: As libpq takes it; its query may also carry ``schema``, ``table`` and ``connections``.

        Raises:
            ConfigurationError: the URL cannot be parsed, or an option is wrong.
        """
        shown = hide_password(url)
        base, _, query = url.partition("?")
        options, rest = {}, []
        _check_parameters(url, query)
        try:
            for name, value in parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query)):
                if name in OPTIONS:
                    options[name] = value
                else:
                    rest.append((name, value))
            conninfo = base + ("?" + urlencode(rest, quote_via=quote) if rest else "")
            ports = str(conninfo_to_dict(conninfo).get("port") or "")
            if not ports.replace(",", "0").isdecimal() and ports:  # libpq notices only when it connects
                raise ValueError("the port is no number")
            if base.partition("://")[2].partition("/")[0].count("@") > 1:
                raise ValueError("libpq takes what follows the first @ for the host, and shows it in its errors")
        except (ValueError, psycopg.ProgrammingError) as error:
            # What libpq could not read may be the password.
            why = "" if "@" in url else f" ({str(error).strip()})"
            raise ConfigurationError(
                f"Expected a PostgreSQL URL like postgresql://user:password@host:5432/database, got {shown!r}{why}. "
                "Write special characters of a password as %2F, %40 and so on."
            ) from None
        most = options.get("connections", str(CONNECTIONS))
        if not most.isdecimal():
            raise ConfigurationError(f"Expected connections= of a PostgreSQL store to be a whole number, got {most!r}.")
        return cls(conninfo, shown, options.get("schema", SCHEMA), options.get("table", TABLE), int(most))


def _check_parameters(url: str, query: str) -> None:
    libpq = [option.keyword.decode() for option in psycopg.pq.Conninfo.get_defaults()]
    known = (*OPTIONS, *libpq, "ssl")  # ssl=true, as JDBC has it, is sslmode=require
    for name, _ in parse_qsl(query, keep_blank_values=True):
        if name not in known:
            others = f"There are {', '.join(OPTIONS)} and those of libpq, as sslmode."
            raise unknown_parameter(url, name, known, others)
