"""Facts that a store, or an application over HTTP, must show, as base classes of tests; needs pytest.

`StoreContract` is for authors of stores. A subclass returns the store, and makes a record grow old without a sleep.
pytest does the rest::

    import pytest
    from celery_idempotent.testing import StoreContract

    class TestMyStore(StoreContract):
        @pytest.fixture
        def store(self):
            store = MyStore(...)      # empty, and this test's alone
            yield store
            store.close()

        def age(self, store, key, seconds):
            store.execute("update records set lease_end = lease_end - %s, ... where key = %s", (seconds, key))

`TransactionContract` has the facts of a store that can settle in the caller's own transaction, and `HttpContract` those
of an application behind a middleware of ``celery_idempotent.http``.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import pytest

# Before they are imported, so that a fact that does not hold shows what it saw instead.
pytest.register_assert_rewrite(
    *(
        f"{__package__}.{name}"
        for name in ("_acquire", "_facts", "_hold", "_http", "_http_client", "_keep", "_transactions")
    )
)
from ..stores.base import Store  # noqa: E402
from ._acquire import AcquiringFacts, CopyFacts, CrashFacts  # noqa: E402
from ._hold import EndingFacts, HoldingFacts  # noqa: E402
from ._http import CallerFacts, ClientFacts, ResponseFacts, RowFacts, TransportFacts  # noqa: E402
from ._keep import KeepingFacts, NotingFacts, SharingFacts  # noqa: E402
from ._transactions import WithinFacts  # noqa: E402


class StoreContract(
    AcquiringFacts, CopyFacts, CrashFacts, HoldingFacts, EndingFacts, KeepingFacts, NotingFacts, SharingFacts
):
    """What every store does; each test is one fact, named after it.

    The promises are those of `celery_idempotent.stores.base.Store`. A subclass overrides both members.
    """

    @pytest.fixture
    def store(self) -> Store:
        """An empty store, made for this test alone."""
        raise NotImplementedError("give your subclass of StoreContract a fixture `store`")

    def age(self, store: Store, key: str, seconds: float) -> None:
        """Make the record look as if this much more time had passed: bring forward, by so many seconds, the end of its
        lease, the time its retry is due, the time it was settled, and the time it is forgotten. The fence stays.
        """  # fmt: skip
        raise NotImplementedError("give your subclass of StoreContract a method `age`")


class TransactionContract(WithinFacts):
    """What every store does that can settle in the caller's own transaction (`celery_idempotent.Store.settle_within`).

    The caller has a table of names in the store's database. A subclass overrides all members but ``stalls``, which it
    sets to the error that others get where their writes wait for an open transaction, as in SQLite.
    """

    @pytest.fixture
    def store(self) -> Store:
        """An empty store, made for this test alone, with an empty table of names in the same database."""
        raise NotImplementedError("give your subclass of TransactionContract a fixture `store`")

    def age(self, store: Store, key: str, seconds: float) -> None:
        """Make the record look as if this much more time had passed, as in `StoreContract.age`."""
        raise NotImplementedError("give your subclass of TransactionContract a method `age`")

    def begin(self, store: Store) -> AbstractContextManager[Any]:
        """Begin a transaction, and give what ``using=`` takes of it; commit it at the end of the block, and roll it
        back if the block raises.
        """  # fmt: skip
        raise NotImplementedError("give your subclass of TransactionContract a method `begin`")

    def insert(self, using: Any, name: str) -> None:
        """Insert a name into the caller's table, in a transaction that `begin` has begun."""
        raise NotImplementedError("give your subclass of TransactionContract a method `insert`")

    def inserted(self, store: Store) -> set[str]:
        """Return the names that are in the caller's table, as another connection sees it."""
        raise NotImplementedError("give your subclass of TransactionContract a method `inserted`")

    def bare(self, store: Store) -> AbstractContextManager[Any]:
        """Give what ``using=`` takes, with no transaction open on it."""
        raise NotImplementedError("give your subclass of TransactionContract a method `bare`")


class HttpContract(RowFacts, CallerFacts, ResponseFacts, TransportFacts, ClientFacts):
    """What every application does behind a middleware of ``celery_idempotent.http``; each test is one fact.

    A subclass gives the URL of a server that runs, and the headers of two callers. The application behind it has one
    path, with two methods, and needs no key for either:

    - ``POST`` reads its body, adds one to the count of the query's ``tag``, where all processes of the server see it,
      sleeps for ``seconds`` where the query has them, and answers with the query's ``status``: with headers
      ``Location`` and ``Set-Cookie``, and a body of a new UUID and the bytes that it has read. Where ``status`` is 0,
      it raises an exception instead; where the query has ``stream``, it answers 201 with an event stream of any events.
    - ``GET`` answers with the count of ``tag``, as digits.

    The options of the middleware are the defaults, but those that the attributes below name.
    """

    #: Of the application, as it is requested.
    path = "/orders"
    #: Headers of a caller, and of another one; a request with neither is refused with 401.
    anna: Mapping[str, str] = {"Authorization": "Bearer anna"}
    bert: Mapping[str, str] = {"Authorization": "Bearer bert"}
    #: Headers of the first caller with other credentials, and of one who is locked out; None: those facts are skipped.
    anna_refreshed: Mapping[str, str] | None = None
    revoked: Mapping[str, str] | None = None
    #: Options of the middleware.
    request_max_bytes = 1048576
    response_max_bytes = 262144
    #: Whether the application reads a body without a length, and sends event streams. Django on WSGI reads none.
    reads_chunked = True
    streams = True
    #: How many clients send one request at once.
    clients = 20

    @pytest.fixture
    def url(self) -> str:
        """The URL of the server, as ``http://127.0.0.1:8000``; its scope may be wider than a test."""
        raise NotImplementedError("give your subclass of HttpContract a fixture `url`")
