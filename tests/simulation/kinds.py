"""The kinds of schedules: what each is about, and what must hold of it."""

from __future__ import annotations

from collections import Counter

from .canvases import Canvases
from .charges import Charges
from .coroutines import Coroutines
from .greenlets import Greenlets
from .indexing import Indexing
from .jobs import Jobs
from .law import Law
from .requests import Requests
from .threads import Threads
from .transactions import Transactions

#: The kinds of schedules, in turn: a seed fixes its kind, too.
TURNS = (
    *(Charges, Indexing, Charges, Canvases, Charges, Transactions),
    *(Charges, Requests, Threads, Coroutines, Jobs, Greenlets),
)
KINDS = {law.kind: law for law in TURNS}


class Laws:
    """One law of each kind."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._laws = {kind: law() for kind, law in KINDS.items()}
        for law in self._laws.values():
            law.counts = self.counts

    def of(self, seed: int, kind: str | None = None) -> Law:
        """Return the law of a seed, or of this kind."""
        return self._laws[kind or TURNS[seed % len(TURNS)].kind]
