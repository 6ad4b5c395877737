"""What the records of one store come to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from heapq import heappush, heappushpop
from typing import Any

from ..records import Reason, Record, State
from .filters import task_of

__all__ = ["Survey", "Task"]

MINUTE, HOUR = 60.0, 3600.0
#: Keys whose size the server is asked for.
SAMPLE = 20


@dataclass
class Task:
    """The records of one task."""

    task: str
    records: int = 0
    held: int = 0
    crashes: int = 0
    settled_last_hour: int = 0
    payload_bytes: int = 0

    def add(self, record: Record) -> None:
        """Count one more."""
        self.records += 1
        self.held += record.state is State.IN_PROGRESS and record.remaining > 0
        self.crashes += record.crashes
        self.settled_last_hour += _settled(record, HOUR)
        self.payload_bytes += len(record.payload)


@dataclass
class Survey:
    """Counts over the records of a store; each is looked at once, and none is kept but the oldest and the worst.

    Arguments:
        top: How many tasks, and keys that crash, to tell.
    """

    top: int
    by_state: Counter[State] = field(default_factory=Counter)
    retries_waiting: int = 0
    duplicates_waiting: int = 0
    crash_loops: int = 0
    settled_last_minute: int = 0
    oldest: Record | None = None
    tasks: dict[str, Task] = field(default_factory=dict)
    sample: list[str] = field(default_factory=list)
    #: False if somebody pressed Ctrl-C
    complete: bool = True
    room: dict[str, int] = field(default_factory=dict)
    _worst: list[tuple[int, str, Record]] = field(default_factory=list)

    def read(self, records: Iterable[Record]) -> Iterator[Record]:
        """Count the records, and yield each after it was counted; Ctrl-C ends it early."""
        try:
            for record in records:
                self.add(record)
                yield record
        except KeyboardInterrupt:
            self.complete = False

    def add(self, record: Record) -> None:
        """Count one more."""
        self.by_state[record.state] += 1
        self.retries_waiting += record.state is State.RELEASED and record.remaining > 0
        self.duplicates_waiting += record.waiting
        self.crash_loops += record.reason == Reason.CRASH_LOOP
        self.settled_last_minute += _settled(record, MINUTE)
        name = task_of(record.key)
        self.tasks.setdefault(name, Task(name)).add(record)
        if len(self.sample) < SAMPLE:
            self.sample.append(record.key)
        if record.held_for > (self.oldest.held_for if self.oldest else 0.0):
            self.oldest = record
        if record.crashes and self.top:
            self._keep_worst((record.crashes, record.key, record))

    def _keep_worst(self, found: tuple[int, str, Record]) -> None:
        if any(key == found[1] for _, key, _ in self._worst):
            return  # a scan of Redis may tell of one twice
        if len(self._worst) < self.top:
            heappush(self._worst, found)
        else:
            heappushpop(self._worst, found)

    @property
    def records(self) -> int:
        """All of them."""
        return sum(self.by_state.values())

    @property
    def held(self) -> int:
        """Those that a live lease holds."""
        return sum(task.held for task in self.tasks.values())

    @property
    def ran_out(self) -> int:
        """Those in progress whose lease has run out."""
        return self.by_state[State.IN_PROGRESS] - self.held

    @property
    def settled_last_hour(self) -> int:
        """Those that were settled within an hour, and are remembered still."""
        return sum(task.settled_last_hour for task in self.tasks.values())

    @property
    def payload_bytes(self) -> int:
        """What all results take, as they are stored."""
        return sum(task.payload_bytes for task in self.tasks.values())

    def top_tasks(self) -> list[Task]:
        """Return the tasks that crash most, hold most, have most."""
        order = sorted(self.tasks.values(), key=lambda task: (-task.crashes, -task.held, -task.records, task.task))
        return order[: self.top]

    def worst(self) -> list[Record]:
        """Return the records with most crashes in a row, most first."""
        return [record for *_, record in sorted(self._worst, key=lambda found: (-found[0], found[1]))]

    def facts(self) -> dict[str, Any]:
        """Return all of it as JSON has it."""
        oldest = self.oldest
        return {
            "records": self.records,
            "by_state": {str(state): self.by_state[state] for state in State},
            "held": self.held,
            "ran_out": self.ran_out,
            "oldest": oldest and {"key": oldest.key, "holder": oldest.holder, "held_for": oldest.held_for},
            "retries_waiting": self.retries_waiting,
            "duplicates_waiting": self.duplicates_waiting,
            "crash_loops": self.crash_loops,
            "settled_last_minute": self.settled_last_minute,
            "settled_last_hour": self.settled_last_hour,
            "payload_bytes": self.payload_bytes,
            "room": self.room,
            "tasks": [vars(task) for task in self.top_tasks()],
            "crashed": [
                {"key": found.key, "state": str(found.state), "crashes": found.crashes} for found in self.worst()
            ],
            "complete": self.complete,
        }


def _settled(record: Record, within: float) -> bool:
    return record.state in (State.COMPLETED, State.FAILED) and record.age <= within
