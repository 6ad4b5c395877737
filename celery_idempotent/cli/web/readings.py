"""Readings: searches and counts of stores that go on from one request to the next."""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import datetime
from threading import Lock, Thread
from time import monotonic
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import unquote

from ...errors import IdempotencyError, StoreError
from ..common import Stores
from ..search import Filter, SearchResult, matches
from ..stats import StoreStats

if TYPE_CHECKING:
    from ...stores.maintenance import NamedStore
    from ...stores.records import Record

#: How many records a search finds at most.
MOST = 1000
#: How many tasks, and keys that crash, a count shows of each store.
TOP = 20
#: How many readings are remembered; one that was left is forgotten for a new one.
REMEMBERED = 16


class PageStores(Stores):
    """The stores of one page, which shows the errors of those that cannot serve."""

    def __init__(self, used: Sequence[NamedStore], guesses: Callable[[str], Sequence[str]] = lambda typed: ()) -> None:
        super().__init__(used, guesses)
        self.errors: list[str] = []

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Keep the error of a store that cannot serve; the page goes on."""
        try:
            yield
        except IdempotencyError as error:
            self.errors.append(" ".join(str(error).split()))


class Reading(ABC):
    """Work on stores that is done for as long as a request waits for it, and rests when none does.

    A store may take a while for its next record, as where no key has a prefix. A thread waits for that, and no request.

    Arguments:
        used: The stores.
    """

    def __init__(self, used: Sequence[NamedStore]) -> None:
        self.stores = PageStores(used)
        self.began = datetime.now().astimezone()
        #: Whether all is done.
        self.over = False
        self._since, self._ended = monotonic(), 0.0
        self._deadline: float = 0
        self._enough: Callable[[], bool] = lambda: False
        self._lock, self._thread = Lock(), Thread()
        self._steps = self.steps()

    @property
    def seconds(self) -> float:
        """How long it has taken so far, or took."""
        return (self._ended or monotonic()) - self._since

    @abstractmethod
    def steps(self) -> Iterator[object]:
        """Do the work, in steps."""

    def advance(self, seconds: float, enough: Callable[[], bool] = lambda: False) -> None:
        """Go on until all is done, or there is enough, for so many seconds at most."""
        self._deadline, self._enough = monotonic() + seconds, enough
        while not self.over and not enough() and (left := self._deadline - monotonic()) > 0:
            with self._lock:
                if not self._thread.is_alive():
                    self._thread = Thread(target=self._work, daemon=True)
                    self._thread.start()
            self._thread.join(left)

    def _work(self) -> None:
        """Go on for the last request that waits."""
        while not self.over and not self._enough() and monotonic() < self._deadline:
            try:
                next(self._steps)
            except StopIteration:
                self.over, self._ended = True, monotonic()


class Search(Reading):
    """The records that a filter leaves, up to `MOST`.

    Arguments:
        used: The stores.
        wish: The filter.
        text: What the keys contain, as it stands or escaped.
    """

    def __init__(self, used: Sequence[NamedStore], wish: Filter, text: str) -> None:
        super().__init__(used)
        self.wish, self.text = wish, text
        #: By the name of the store and the key; without payloads.
        self.records: dict[tuple[str, str], Record] = {}
        self.result = SearchResult()

    def steps(self) -> Iterator[object]:
        """Read one store after the other."""
        for used in self.stores.used:
            with self.stores.serving():
                for record in matches(self.wish, used, self.result):
                    if record is not None and (self.text in record.key or self.text in unquote(record.key)):
                        if len(self.records) == MOST and (used.name, record.key) not in self.records:
                            self.result.more = True
                            return
                        self.records[used.name, record.key] = replace(record, payload=b"")
                    yield record


class Count(Reading):
    """The statistics of each store.

    Arguments:
        used: The stores.
    """

    def __init__(self, used: Sequence[NamedStore]) -> None:
        super().__init__(used)
        self.stats: dict[str, StoreStats] = {}
        #: Held while the statistics change.
        self.changing = Lock()

    def steps(self) -> Iterator[object]:
        """Read one store after the other."""
        for used in self.stores.used:
            with self.stores.serving():
                stats = StoreStats(TOP, complete=False)
                with self.changing:
                    self.stats[used.name] = stats
                for record in used.store.scan():
                    with self.changing:
                        stats.add(record)
                    yield record
                with suppress(StoreError):  # a right that the rest needs not
                    stats.room = used.store.usage(stats.sample)
                stats.complete = True


T = TypeVar("T", bound=Reading)


class Readings:
    """The readings that pages go on with, by their names in URLs."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, Reading] = OrderedDict()
        self._lock = Lock()

    def get(self, name: str, kind: type[T], fits: Callable[[T], bool], make: Callable[[], T]) -> tuple[str, T]:
        """Return a reading with its name: the one of that name, or a new one if that is unknown or does not fit."""
        with self._lock:
            known = self._known.get(name)
            if isinstance(known, kind) and fits(known):
                self._known.move_to_end(name)
                return name, known
            while len(self._known) >= REMEMBERED:
                self._known.popitem(last=False)
            name, made = secrets.token_urlsafe(6), make()
            self._known[name] = made
            return name, made
