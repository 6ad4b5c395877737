"""A few connections that all threads of a process share: a call takes the one that was used last, and gives it back.

Not psycopg_pool: it has threads of its own, which neither survive a fork nor belong into a process of greenlets.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from selectors import DefaultSelector
from time import monotonic
from typing import Any
from weakref import WeakSet

import psycopg
from psycopg import errors, pq
from psycopg.conninfo import conninfo_to_dict

from .postgres_errors import REPEATABLE
from .postgres_urls import Place

__all__ = ["Connections", "NoAnswer", "TimedConnection"]

#: Seconds a statement may take, and a connection attempt (libpq knows no less than 2). A lease call must answer or fail
#: long before a lease ends.
TIMEOUT = 2.0
#: Seconds a call waits for a connection of the others before it opens one more than there should be.
PATIENCE = 2.0
LOOK_EVERY = 0.002
#: How often a statement is sent that a server gives up for the sake of another.
ATTEMPTS = 5
#: What a parent opened, in its children: kept, because a connection that is collected may say goodbye to the server.
_INHERITED: list[Any] = []


class NoAnswer(psycopg.OperationalError):
    """Raised when a server did not answer in time; the connection is of no use any more."""


#: What no other connection would change, though this one may have been closed for it: its transaction is broken.
FINAL = (NoAnswer, errors.LockNotAvailable, errors.QueryCanceled)


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


class Slot:
    """A place for one connection, which is opened when it is needed."""

    def __init__(self, generation: int) -> None:
        self.connection: TimedConnection | None = None
        self.generation = generation


class Connections:
    """Run statements, each in a transaction of its own, on a connection that nobody else is using.

    Arguments:
        place: Where the server is, and how many connections there may be.
    """

    def __init__(self, place: Place) -> None:
        self._place = place
        #: true once the server has shown that its default isolation level is stricter than READ COMMITTED
        self._strict = False
        self._generation = 0
        self._reset()

    def _reset(self) -> None:
        self._idle: list[Slot] = []
        self._slots: WeakSet[Slot] = WeakSet()  # these, and those in use; not those that an interruption has lost
        self._pid = os.getpid()

    def run(self, statement: str, args: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Return the rows that a statement answers; raise what psycopg raises.

        Every verb may be asked again: a pooled connection that the server has closed meanwhile is replaced and the
        statement repeated, and so is one that the server gave up for another transaction's sake.
        """
        attempt = 0
        while True:
            slot = self._take()
            pooled = slot.connection is not None
            try:
                return self._on(slot, statement, args)
            except REPEATABLE:
                self._strict = True
                attempt += 1
                if attempt == ATTEMPTS:
                    raise
            except (psycopg.OperationalError, psycopg.InterfaceError) as error:
                if not pooled or slot.connection is not None or isinstance(error, FINAL):
                    raise
                self._drop_idle()  # the server has closed them too

    def _on(self, slot: Slot, statement: str, args: Sequence[Any]) -> list[tuple[Any, ...]]:
        try:
            connection = slot.connection = slot.connection or self.connect()
            with connection.cursor() as cursor:
                if not self._strict:
                    return cursor.execute(statement, args, prepare=False).fetchall()
                # In one message and thus one round trip. In a stricter transaction a function does not see what those
                # before it in the queue have committed.
                text = psycopg.ClientCursor(connection).mogrify(statement, args)
                cursor.execute(f"begin isolation level read committed; {text}; commit".encode())
                cursor.nextset()
                return cursor.fetchall()
        finally:
            self._give_back(slot)

    def connect(self, seconds: float = TIMEOUT) -> TimedConnection:
        """Return a new connection.

        Arguments:
            seconds: How long it waits for an answer (default: 2).
        """
        options: dict[str, Any] = {"connect_timeout": int(TIMEOUT), "fallback_application_name": "celery_idempotent"}
        options = {name: value for name, value in options.items() if name not in conninfo_to_dict(self._place.conninfo)}
        options["client_encoding"] = "utf8"  # with SQL_ASCII, which a database may have, psycopg gives bytes for texts
        # Nothing is prepared on the server: behind PgBouncer the next statement may reach another one.
        connection = TimedConnection.connect(self._place.conninfo, autocommit=True, prepare_threshold=None, **options)
        connection.seconds = seconds
        return connection

    def _take(self) -> Slot:
        if self._pid != os.getpid():  # what came through a fork is our parent's
            _INHERITED.append((self._idle, list(self._slots)))
            self._reset()
        end = monotonic() + PATIENCE
        while True:
            try:
                return self._idle.pop()
            except IndexError:
                pass
            if len(self._slots) < self._place.connections or monotonic() >= end:
                slot = Slot(self._generation)
                self._slots.add(slot)
                return slot
            time.sleep(LOOK_EVERY)

    def _give_back(self, slot: Slot) -> None:
        connection = slot.connection
        if connection is None or self._pid != os.getpid():
            return
        idle = connection.pgconn.transaction_status == pq.TransactionStatus.IDLE
        if not idle or slot.generation != self._generation:  # a reply on its way must not answer the next statement
            connection.close()
            slot.connection, slot.generation = None, self._generation
        self._idle.append(slot)

    def _drop_idle(self) -> None:
        while self._idle:
            slot = self._idle.pop()
            if slot.connection is not None:
                slot.connection.close()

    def close(self) -> None:
        """Close every connection, those of other threads as they give them back; the next call opens a new one."""
        if self._pid == os.getpid():
            self._generation += 1
            self._drop_idle()
