"""What a task has of its own transaction -> the driver's connection, on which a record can be written.

Taken are a connection of the driver itself, a SQLAlchemy ``Connection``, ``Session`` or ``scoped_session``, and a
connection of Django or its alias. SQLAlchemy is imported only where one of its objects was passed. Over a driver for
coroutines its own ``Connection`` is used, in the greenlet in which it makes coroutines of a driver's calls.
"""

from __future__ import annotations

import inspect
import re
import weakref
from collections.abc import Awaitable, Callable, Collection, Sequence
from itertools import count
from typing import Any, Protocol, TypeVar

from ..errors import ConfigurationError

TAKEN = "a connection of the driver, a SQLAlchemy Connection or Session, or a Django connection or its alias"

ONE_OF_THEM = (
    "Hand in the connection that writes the task's own rows, as "
    'using=session.connection(bind_arguments={"mapper": Payment}).'
)

#: the key in a Session's info of its transaction in which an operation settles
SETTLED = "celery_idempotent.settled"

T = TypeVar("T")


class OpenTransaction(Protocol):
    """What type checkers take for a connection or session with a transaction: no cursor, engine or coroutine's."""

    def commit(self) -> None:
        """Commit it."""

    def rollback(self) -> None:
        """Roll it back."""


class AsyncTransaction(Protocol):
    """What type checkers take for an ``AsyncSession`` or ``AsyncConnection`` of SQLAlchemy."""

    def run_sync(self, fn: Callable[..., Any], /) -> Awaitable[Any]:
        """Call with the synchronous one that is within it, in a greenlet."""


class Bridged:
    """SQLAlchemy's connection over a driver for coroutines; for use in the greenlet that it runs in alone.

    Arguments:
        connection: The synchronous ``Connection``.
    """

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self.url = connection.engine.url

    def scalar(self, statement: str, args: Sequence[Any]) -> Any:
        """Return the value that a statement answers, with ``%s`` for each argument; raise what SQLAlchemy raises."""
        if self._connection.dialect.paramstyle == "numeric_dollar":
            places = count(1)
            statement = re.sub("%s", lambda _: f"${next(places)}", statement)
        return self._connection.exec_driver_sql(statement, tuple(args)).scalar()

    def aside(self, call: Callable[[], T]) -> T:
        """Return what a call returns that waits for something else; in a thread, so that the event loop goes on."""
        import asyncio  # which a process without coroutines need not load

        found: T = self._connection.connection.dbapi_connection.run_async(lambda _: asyncio.to_thread(call))
        return found


async def in_greenlet_of(using: AsyncTransaction, call: Callable[[Any], None]) -> None:
    """Call with the synchronous session or connection that is within an asynchronous one of SQLAlchemy.

    Raises:
        ConfigurationError: it is none.
    """
    found: Any = using
    if hasattr(found, "registry") and callable(found):  # an async_scoped_session
        found = found()
    if not hasattr(found, "run_sync"):
        raise ConfigurationError(
            "asettle: expected using= to be an AsyncSession or AsyncConnection of SQLAlchemy, got "
            f"{type(using).__module__}.{type(using).__qualname__}. Another transaction is for settle(), without await."
        )
    await found.run_sync(call)


def driver_connection(using: Any, driver: type[Any], *, bridges: Collection[str] = ()) -> Any:
    """Return the driver's connection below what the caller has, with the caller's transaction open on it.

    Whether a bare connection of the driver is in a transaction is the store's to find out.

    Arguments:
        using: What the caller has.
        driver: The class of the store's driver's connections.
        bridges: What SQLAlchemy calls the drivers for coroutines over which a `Bridged` is returned.

    Raises:
        ConfigurationError: it is none of these, it leads to another driver, or it is in no transaction.
    """
    using = unwrapped(using, driver)
    if isinstance(using, str):
        found = _of_django(_known_to_django(using))
    elif _has(using, "django") and hasattr(using, "in_atomic_block"):
        found = _of_django(using)
    elif _has(using, "sqlalchemy"):
        found = _of_sqlalchemy(using, bridges)
    else:
        found = using
    if isinstance(found, Bridged):
        return found
    found = unwrapped(found, driver)
    # asyncpg's has no commit. Also below a Session of `run_sync`.
    if any(inspect.iscoroutinefunction(getattr(type(found), name, None)) for name in ("commit", "close")):
        raise _asynchronous(found)
    if not isinstance(found, driver):
        raise ConfigurationError(
            f"settle: expected using= to be {TAKEN}, over {driver.__module__.partition('.')[0]} as the store is, "
            f"got {type(using).__module__}.{type(using).__qualname__}"
            + ("" if found is using else f" over {type(found).__module__}.{type(found).__qualname__}")
            + ". The record must be written by the very connection that writes the task's own rows."
        )
    return found


def unwrapped(using: Any, driver: type[Any]) -> Any:
    """Return what is within a proxy, as instrumentation puts one around each connection of a driver.

    `isinstance` takes it for the connection, and the driver's own C code does not.
    """
    while not issubclass(type(using), driver) and hasattr(using, "__wrapped__"):
        using = using.__wrapped__
    return using


def _has(using: Any, package: str) -> bool:
    return any(cls.__module__.partition(".")[0] == package for cls in type(using).__mro__)


def _of_sqlalchemy(using: Any, bridges: Collection[str]) -> Any:
    if hasattr(using, "registry") and callable(using):  # a scoped_session stands for the session of this thread
        using = using()
    if any(cls.__module__.startswith("sqlalchemy.ext.asyncio") for cls in type(using).__mro__):
        raise _asynchronous(using)
    connection = _of_session(using) if _is_session(using) else using
    if not (hasattr(connection, "in_transaction") and hasattr(connection, "get_execution_options")):
        return using  # an Engine; or the pool's, which passes on what the driver's has
    # The driver's connection knows the mode of such an engine, and the store reads it there; to query the server would
    # cost a statement.
    if connection.get_execution_options().get("isolation_level") == "AUTOCOMMIT":
        raise no_transaction("its isolation level is AUTOCOMMIT")
    if not connection.in_transaction():
        raise no_transaction("the Connection has begun none: use `with engine.begin() as connection`")
    if not (connection.dialect.is_async and connection.dialect.driver in bridges):
        return connection.connection.driver_connection
    if connection.connection.dbapi_connection.autocommit:
        raise no_transaction("its isolation level is AUTOCOMMIT")
    return Bridged(connection)


def _asynchronous(using: Any) -> ConfigurationError:
    return ConfigurationError(
        f"settle: expected using= to be {TAKEN}, got {type(using).__module__}.{type(using).__qualname__}: use a "
        "synchronous one; or, where the store is in PostgreSQL, `await lease.asettle(result, using=session)` with an "
        "AsyncSession of SQLAlchemy, over psycopg or asyncpg. No other asynchronous one is supported."
    )


def _is_session(using: Any) -> bool:
    return hasattr(using, "flush") and hasattr(using, "connection")


def _of_session(session: Any) -> Any:
    """Return the one connection of a Session's transaction."""
    from sqlalchemy import event
    from sqlalchemy.exc import UnboundExecutionError

    if not session.in_transaction():  # it would begin one for the record alone
        raise no_transaction(
            "the Session has begun none, or has committed it. Write the task's own rows first, or use "
            "`with session.begin():` around them and this call"
        )
    try:
        connection = session.connection()
    except UnboundExecutionError as error:
        raise ConfigurationError(
            f"settle: expected using= to be a Session with an engine of its own, got one that has them for its mappers "
            f"alone ({error}). {ONE_OF_THEM}"
        ) from error
    session.info[SETTLED] = weakref.ref(session.get_transaction())
    _refuse_two_connections(session)
    # A flush may still need another engine, as that of a mapper.
    if not event.contains(session, "after_begin", _refuse_two_connections):
        event.listen(session, "after_begin", _refuse_two_connections)
    return connection


def _refuse_two_connections(session: Any, *_: Any) -> None:
    """Refuse a second connection in a transaction of a Session that settles an operation: the two commit apart."""
    root, settled = session.get_transaction(), session.info.get(SETTLED)  # which its owner may have emptied
    if root is None or settled is None or settled() is not root:
        return
    connections = {each for each in root._connections if hasattr(each, "in_transaction")}
    if len(connections) > 1:
        engines = ", ".join(sorted(str(each.engine) for each in connections))
        raise ConfigurationError(
            f"settle: expected using= to be a Session of one connection, got one of {len(connections)}, of {engines}: "
            f"they commit apart. {ONE_OF_THEM}"
        )


def _known_to_django(alias: str) -> Any:
    """Return Django's connection with this alias."""
    try:
        from django.core.exceptions import ImproperlyConfigured
        from django.db import connections
        from django.utils.connection import ConnectionDoesNotExist
    except ModuleNotFoundError:
        raise ConfigurationError(
            f"settle: expected using= to be {TAKEN}, got {alias!r}, and Django is not installed. "
            "A name is the alias of a Django database; hand in the connection itself otherwise."
        ) from None
    try:
        return connections[alias]
    except ImproperlyConfigured as error:
        raise ConfigurationError(
            f"settle: expected using={alias!r} to be the alias of a Django database, and Django is not set up: {error}"
        ) from None
    except ConnectionDoesNotExist:
        raise ConfigurationError(
            f"settle: expected using={alias!r} to be one of the Django databases {', '.join(connections)}."
        ) from None


def _of_django(wrapper: Any) -> Any:
    if not wrapper.in_atomic_block:
        raise no_transaction(f"there is no transaction.atomic(using={wrapper.alias!r}) around this call")
    if wrapper.needs_rollback:  # which Django does without a word at the end of the block
        raise no_transaction(
            "Django is going to roll it back, since something in it failed and the error was caught there. Put an "
            "atomic of its own around what may fail"
        )
    wrapper.ensure_connection()
    return wrapper.connection


def no_transaction(why: str) -> ConfigurationError:
    """Return the error for a connection that is in no transaction."""
    return ConfigurationError(
        f"settle: expected using= to be in an open transaction, and {why}. Without one the record and the task's own "
        "rows would be committed apart, and a crash between the two would repeat or lose the effect."
    )
