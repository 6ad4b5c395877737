"""How far a run is, and what came of it."""

from __future__ import annotations

import statistics
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from .scenario import Tally

__all__ = ["Outcome", "Progress"]


@dataclass
class Progress:
    """How far a run is: kept up to date from the events that the gateway writes."""

    port: int = 0
    ready: int = 0
    published: int = 0
    charges: Counter[str] = field(default_factory=Counter)
    #: Orders whose task has succeeded.
    done: set[str] = field(default_factory=set)
    #: Task runs by how they ended: SUCCESS, RETRY, IGNORED, ...
    ends: Counter[str] = field(default_factory=Counter)
    receipts: int = 0
    known_keys: int = 0
    redelivered: int = 0
    killed: dict[str, float] = field(default_factory=dict)
    recovery: dict[str, float] = field(default_factory=dict)
    #: Per process, the order that it is charging.
    charging: dict[int, str] = field(default_factory=dict)

    @property
    def twice(self) -> int:
        """Customers charged more than once so far."""
        return sum(number > 1 for number in self.charges.values())

    def take(self, event: dict[str, Any]) -> None:
        """Take note of an event."""
        match event["event"]:
            case "listening":
                self.port = event["port"]
            case "ready":
                self.ready += 1
            case "called":
                self.charging[event["pid"]] = event["order"]
            case "charged":
                self.charges[event["order"]] += 1
            case "known_key":
                self.known_keys += 1
            case "receipt":
                self.receipts += 1
            case "ended":
                self.charging.pop(event["pid"], None)
                self._ended(event["order"], event["state"], event["at"])

    def kill(self, order: str, pid: int, at: float) -> None:
        """Take note of the end of a process that was charging an order."""
        self.killed[order] = at
        self.charging.pop(pid, None)

    def _ended(self, order: str, state: str, at: float) -> None:
        self.ends[state] += 1
        if state != "SUCCESS":
            return
        self.done.add(order)
        if order in self.killed:
            self.recovery.setdefault(order, at - self.killed[order])


@dataclass(frozen=True)
class Outcome:
    """What came of a run.

    Arguments:
        tally: What the customers got.
        progress: What the gateway saw.
        finished: Whether everything was done before the deadline.
        seconds: How long it took, from the first order to the last ack.
    """

    tally: Tally
    progress: Progress
    finished: bool
    seconds: float

    @property
    def recovery_median(self) -> float | None:
        """Seconds within which half of the killed processes' orders had been worked to their end."""
        times = self.progress.recovery.values()
        return statistics.median(times) if times else None

    @property
    def recovery_worst(self) -> float | None:
        """Seconds within which all of them had."""
        return max(self.progress.recovery.values(), default=None)

    @property
    def replayed(self) -> int:
        """Deliveries that were answered with the recorded result, without a call of the gateway."""
        return self.progress.ends["SUCCESS"] - self.progress.receipts
