"""What a soak's journal says about every operation: runs, effects, overlaps, and whether they may be."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from itertools import combinations
from math import inf
from statistics import median
from urllib.parse import unquote

from tests.support.celery.journal import Entry, Journal

#: The soak's lease, in seconds.
LEASE_TTL = 6.0


@dataclass
class Run:
    """One run of a body."""

    order: str
    fence: int
    pid: int
    start: float
    effect: float | None = None
    end: float = inf
    killed: float = inf
    settled: float = inf
    #: when the store was last asked for the lease and granted it
    confirmed: float = -inf

    @property
    def over(self) -> float:
        return min(self.end, self.killed)


@dataclass
class Ledger:
    """The account of one soak.

    Arguments:
        journal: Where tasks and the storm wrote.
        lease_ttl: How long a confirmation holds.
    """

    journal: Journal
    lease_ttl: float
    runs: dict[str, list[Run]] = field(default_factory=lambda: defaultdict(list))
    counts: Counter[str] = field(default_factory=Counter)
    paid: Counter[str] = field(default_factory=Counter)
    answered: set[str] = field(default_factory=set)
    unrecorded: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        current: dict[int, Run] = {}  # a child does one thing at a time
        held: dict[tuple[str, int], Run] = {}
        confirmations: dict[tuple[str, int], float] = {}
        for entry in sorted(self.journal.entries(), key=lambda entry: entry.at):
            self.counts[entry.event] += 1
            match entry.event:
                case "started":
                    run = Run(entry.key, entry.fields["fence"], entry.pid, entry.at)
                    run.confirmed = confirmations.get((entry.key, run.fence), -inf)
                    current[entry.pid] = held[entry.key, run.fence] = run
                    self.runs[entry.key].append(run)
                case "charged":
                    current[entry.pid].effect = entry.at
                case "ended":
                    current[entry.pid].end = min(current[entry.pid].end, entry.at)
                case "confirmed" | "settled":
                    self._told(entry, held, confirmations)
                case "killed":
                    self._killed(current.get(int(entry.key)), entry.at)
                case _:
                    self._count(entry)

    def _count(self, entry: Entry) -> None:
        match entry.event:
            case "paid":
                self.paid[entry.key] += 1
            case "answered":
                self.answered.add(entry.key)
            case "SettleFailed":
                self.unrecorded.add(order_of(entry.key))

    def _told(
        self, entry: Entry, held: dict[tuple[str, int], Run], confirmations: dict[tuple[str, int], float]
    ) -> None:
        place = (order_of(entry.key), entry.fields["fence"])
        run = held.get(place)
        if entry.event == "settled":
            if run is not None:
                run.settled = entry.at
            return
        confirmations[place] = entry.fields["sent"]
        if run is not None:
            run.confirmed = max(run.confirmed, entry.fields["sent"])

    @staticmethod
    def _killed(run: Run | None, at: float) -> None:
        if run is not None and (run.end == inf or run.settled == inf):
            run.killed = min(run.killed, at)

    def _pairs(self) -> list[tuple[Run, Run]]:
        return [pair for runs in self.runs.values() for pair in combinations(runs, 2)]

    def _lapsed(self, first: Run, second: Run) -> bool:
        """Whether the first run's lease may have ended before the second began: nothing confirmed it in time."""
        return second.start >= first.confirmed + self.lease_ttl

    def overlaps(self) -> tuple[list[tuple[Run, Run]], list[tuple[Run, Run]]]:
        """Return the pairs of runs that overlapped: those whose holder had been silent for a lease, and the others."""
        pairs = [(a, b) for a, b in self._pairs() if b.start < a.over]
        return [p for p in pairs if self._lapsed(*p)], [p for p in pairs if not self._lapsed(*p)]

    def repeats(self) -> tuple[list[tuple[Run, Run]], list[tuple[Run, Run]]]:
        """Return the pairs of runs that both took effect: those that had to be expected, and the others.

        To be expected is the repetition of a run that was killed after its effect and before it had settled, or that
        was silent for a lease in between.
        """
        pairs = [(a, b) for a, b in self._pairs() if a.effect is not None and b.effect is not None]
        struck = [(a, b) for a, b in pairs if a.settled == inf and (a.killed < inf or self._lapsed(a, b))]
        return struck, [pair for pair in pairs if pair not in struck]

    def after_settle(self) -> list[tuple[Run, Run]]:
        """Return the runs that began after another run of the operation had settled."""
        return [(a, b) for a, b in self._pairs() if b.start > a.settled]

    def recovery(self) -> list[float]:
        """Return the seconds from each kill of a running body to the next run of the operation."""
        found = []
        for runs in self.runs.values():
            for run in runs:
                later = [other.start for other in runs if other.start > run.killed]
                if run.killed < run.end and later:
                    found.append(min(later) - run.killed)
        return found

    def summary(self, operations: int, lost: int) -> str:
        """Return the table of the soak."""
        runs = [run for runs in self.runs.values() for run in runs]
        quiet, loud = self.overlaps()
        expected, unexpected = self.repeats()
        times = self.recovery()
        lines = {
            "operations": operations,
            "runs": len(runs),
            "effects": self.counts["charged"],
            "duplicates at the gateway": sum(self.paid.values()) - len(self.paid),
            "duplicate effects, killed or silent before settle": len(expected),
            "duplicate effects, others": len(unexpected),
            "overlaps, holder silent for a lease": len(quiet),
            "overlaps, others": len(loud),
            "runs after settle": len(self.after_settle()),
            "runs under the lease of a killed one": len(runs) - len({(run.order, run.fence) for run in runs}),
            "values returned unrecorded (SettleFailed)": self.counts["SettleFailed"],
            "holders that found their lease gone (LeaseLost)": self.counts["LeaseLost"],
            "lost": lost,
            "recovery of killed bodies, median / worst": (
                f"{median(times):.1f} / {max(times):.1f} s ({len(times)})" if times else "-"
            ),
        }
        return "\n".join(f"{name:52}{value:>24}" for name, value in lines.items())


def order_of(key: str) -> str:
    """Return the operation that a store's key names."""
    return unquote(key.rsplit(":", 1)[-1])
