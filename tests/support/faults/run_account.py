"""The account of what was told of runs: every run that began ended once, is live, or died with its process."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field

import psutil

from celery_idempotent import events
from celery_idempotent.events import Event
from tests.support.celery.journal import Entry, Journal

__all__ = ["ENDINGS", "STARTS", "TOLD", "Account", "write_down"]

STARTS = (events.Acquired, events.TakenOver)
ENDINGS = (
    events.Completed,
    events.Failed,
    events.Released,
    events.ReleaseFailed,
    events.LeaseLost,
    events.SettleFailed,
)
TOLD = frozenset((*STARTS, *ENDINGS))
#: After these the store still says that the run goes on, and the main process of a child that dies then releases it.
UNTOLD_TO_THE_STORE = ("ReleaseFailed", "SettleFailed")

Place = tuple[str, int]


def write_down(event: Event) -> None:
    """Write what is told of a run into the journal; the hook of the workers."""
    fields = {"fence": getattr(event, "fence", 0), "reason": getattr(event, "reason", "")}
    Journal.from_env().write(f"told {type(event).__name__}", event.key, **fields)


@dataclass
class Account:
    """What the journal has been told.

    Arguments:
        journal: Where `write_down` wrote.
    """

    journal: Journal
    #: starts, and endings, by lease and process
    starts: Counter[tuple[Place, int]] = field(default_factory=Counter)
    ends: Counter[tuple[Place, int]] = field(default_factory=Counter)
    #: what main processes released for children that were gone
    spoken_for: Counter[Place] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    last: dict[int, Place] = field(default_factory=dict)
    unrecorded: Counter[Place] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        told = [entry for entry in self.journal.entries() if entry.event.startswith("told ")]
        for entry in told:
            kind, place = entry.event.removeprefix("told "), (entry.key, entry.fields["fence"])
            if kind in {start.__name__ for start in STARTS}:
                self.starts[place, entry.pid] += 1
                self.last[entry.pid] = place
                self.kinds["starts"] += 1
        for entry in told:
            self._ends(entry)

    def _ends(self, entry: Entry) -> None:
        kind, place = entry.event.removeprefix("told "), (entry.key, entry.fields["fence"])
        if kind in {start.__name__ for start in STARTS}:
            return
        if entry.pid not in self.last and kind == "Released":  # a main process: it runs nothing itself
            self.spoken_for[place] += 1
            return
        self.ends[place, entry.pid] += 1
        self.kinds[kind] += 1
        self.unrecorded[place] += kind in UNTOLD_TO_THE_STORE

    def open(self) -> list[tuple[Place, int]]:
        """Return the runs that nobody was told the end of by their own process."""
        return [run for run, count in self.starts.items() if count != self.ends[run]]

    def live(self) -> list[tuple[Place, int]]:
        """Return those whose process lives."""
        return [run for run in self.open() if psutil.pid_exists(run[1])]

    def died(self) -> list[tuple[Place, int]]:
        """Return those that were the last of a process that is gone."""
        return [(place, pid) for place, pid in self.open() if not psutil.pid_exists(pid) and self.last[pid] == place]

    def faults(self) -> list[str]:
        """Return what breaks the law."""
        explained = {*self.live(), *self.died()}
        found = [
            f"{run} began {self.starts[run]} times, ended {self.ends[run]} times"
            for run in self.open()
            if run not in explained or self.starts[run] - self.ends[run] != 1
        ]
        found += [f"{run} ended and never began" for run in self.ends if run not in self.starts]
        died: dict[Place, int] = defaultdict(int)
        for place, _ in self.died():
            died[place] += 1
        begun = {place for place, _ in self.starts}
        for place, count in self.spoken_for.items():
            # A child that dies between the store's answer and its telling of it began nothing that anybody heard of.
            if place in begun and count > died[place] + self.unrecorded[place]:
                found.append(f"{place} was released {count} times for {died[place]} that died")
        return found

    def summary(self) -> str:
        """Return the law as a table."""
        begun = {place for place, _ in self.starts}
        lines = {
            "starts = the sum of these": self.kinds["starts"],
            **{f"  {kind.__name__}": self.kinds[kind.__name__] for kind in ENDINGS},
            "  live": len(self.live()),
            "  died with their process": len(self.died()),
            "of those, released by the main process": sum(n for place, n in self.spoken_for.items() if place in begun),
            "released for a child that died before it told its start": sum(
                n for place, n in self.spoken_for.items() if place not in begun
            ),
        }
        return "\n".join(f"{name:56}{value:>20}" for name, value in lines.items())
