"""``stats``: the numbers of each store's records."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from heapq import heappush, heappushpop
from typing import TYPE_CHECKING, Any

import click

from ..errors import StoreError
from ..stores.base import Unreadable
from ..stores.records import Reason, Record, State, is_part, is_reservation
from ..units import format_size, shorten_duration
from . import tables
from .common import Exit, ProgressCounter, StoreCommand, stores_of
from .tables import Cell, Column, Table, task_of

if TYPE_CHECKING:
    from ..stores.maintenance import NamedStore


#: What the names of `Store.usage` mean; a name that is not here is printed as it is.
ROOM = {
    "record_bytes": "about {} a record",
    "memory_bytes": "{} for all that the server has",
    "file_bytes": "{} of file",
    "table_bytes": "{} of table and indexes",
    "counted_records": "{} items",
    "counted_bytes": "{} of table, when the server last counted",
}
TASKS = (
    Column("TASK", least=20),
    Column("RECORDS", right=True),
    Column("HELD", right=True),
    Column("CRASHES", right=True),
    Column("SETTLED/H", right=True, spare=1),
    Column("PAYLOAD", right=True, spare=2),
)
CRASHED = (Column("KEY", least=24), Column("STATE"), Column("CRASHES", right=True), Column("REASON", spare=1))


@click.command("stats", cls=StoreCommand)
@click.option(
    "--top", type=click.IntRange(min=0), default=5, show_default=True, help="Show so many tasks, and keys that crash."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def command(ctx: click.Context, /, top: int, as_json: bool) -> None:
    """Count what each store remembers.

    Reads every record of the store, page by page, so that no task waits for it. Ctrl-C ends it with what was counted.
    """

    def count(used: NamedStore) -> StoreStats:
        stats = StoreStats(top)
        with ProgressCounter("records read") as counter, used.unreadable_reported_to() as stats.unreadable:
            try:
                for record in used.store.scan():
                    stats.add(record)
                    counter.add(1)
            except KeyboardInterrupt:
                stats.complete = False
        if stats.complete:
            with suppress(StoreError):  # a right that the rest needs not
                stats.room = used.store.usage(stats.sample)
        return stats

    stores, facts = stores_of(ctx), {}
    for used, stats in stores.each(count):
        facts[used.name] = found = stats.facts()
        if not as_json:
            _print(used.name, found, stats)
        if not stats.complete:
            click.echo(f"Interrupted: these are the first {found['records']:,} records of {used.name}.", err=True)
            stores.status = Exit.INTERRUPTED
            break
    stores.end(ctx, facts if as_json else None)


def _print(name: str, found: dict[str, Any], stats: StoreStats) -> None:
    tables.show_facts(summary(name, found, stats))
    for table in details(stats):
        click.echo()
        tables.show(table)
    click.echo()


def summary(name: str, found: dict[str, Any], stats: StoreStats) -> dict[str, object]:
    """Return the figures of a store by name, without those that are zero.

    Arguments:
        name: What to call the store.
        found: The facts of the counts.
        stats: The counts.
    """
    states = ", ".join(f"{number:,} {state}" for state, number in sorted(stats.by_state.items()))
    oldest, room = stats.oldest, stats.room
    facts = {
        "store": name,
        "records": f"{found['records']:,}" + (f" ({states})" if states else ""),
        "held": f"{found['held']:,} by a live lease" + (f"; {found['ran_out']:,} ran out" if found["ran_out"] else ""),
        "oldest": oldest
        and f"{oldest.key} for {shorten_duration(oldest.held_for)} by {oldest.holder or 'an unknown worker'}",
        "settled": f"{stats.settled_last_minute:,} in the last minute, {found['settled_last_hour']:,} in the last hour",
        "retries": stats.retries_waiting and f"{stats.retries_waiting:,} not due yet",
        "duplicates": stats.duplicates_waiting and f"{stats.duplicates_waiting:,} waiting",
        "reservations": stats.reservations and f"{stats.reservations:,} messages of unique tasks wait",
        "unreadable": stats.unreadable.count and f"{stats.unreadable.count:,}; why: show {stats.unreadable.first}",
        "crash loops": stats.crash_loops and Cell(f"{stats.crash_loops:,} refused", "bold red"),
        "payload": format_size(found["payload_bytes"]),
        "room": "; ".join(_room(what, room[what]) for what in sorted(room, key=lambda what: [*ROOM, what].index(what))),
    }
    return {name: value for name, value in facts.items() if value}


def details(stats: StoreStats) -> list[Table]:
    """Return the table of tasks, and that of the keys whose holders died, without those that have no row."""
    tasks = [_task_row(task) for task in stats.top_tasks()]
    crashed = [
        [Cell(found.key), Cell(str(found.state)), Cell(str(found.crashes), "bold red"), Cell(found.reason or "-")]
        for found in stats.worst()
    ]
    return [Table(columns, rows) for columns, rows in ((TASKS, tasks), (CRASHED, crashed)) if rows]


def _room(what: str, number: int) -> str:
    return ROOM.get(what, f"{{}} {what}").format(format_size(number) if what.endswith("_bytes") else f"{number:,}")


def _task_row(task: Task) -> list[Cell]:
    return [
        Cell(task.task or "-"),
        Cell(f"{task.records:,}"),
        Cell(f"{task.held:,}"),
        Cell(f"{task.crashes:,}", "bold red" if task.crashes else ""),
        Cell(f"{task.settled_last_hour:,}"),
        Cell(format_size(task.payload_bytes)),
    ]


MINUTE, HOUR = 60.0, 3600.0
#: Keys whose size is read from the server.
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
class StoreStats:
    """Counts over the records of a store; each is looked at once, and none is kept but the oldest and the worst.

    Arguments:
        top: How many tasks, and keys that crash, to show.
    """

    top: int
    by_state: Counter[State] = field(default_factory=Counter)
    retries_waiting: int = 0
    duplicates_waiting: int = 0
    crash_loops: int = 0
    reservations: int = 0
    unreadable: Unreadable = field(default_factory=Unreadable)
    settled_last_minute: int = 0
    oldest: Record | None = None
    tasks: dict[str, Task] = field(default_factory=dict)
    sample: list[str] = field(default_factory=list)
    #: False after Ctrl-C
    complete: bool = True
    room: dict[str, int] = field(default_factory=dict)
    _worst: list[tuple[int, str, Record]] = field(default_factory=list)

    def add(self, record: Record) -> None:
        """Count one more; of the reservations of unique tasks, how many there are, and of claims of parts none."""
        if is_part(record.key):
            return
        if is_reservation(record.key):
            self.reservations += record.state is State.IN_PROGRESS and record.remaining > 0
            return
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
            return  # a scan of Redis may return one twice
        if len(self._worst) < self.top:
            heappush(self._worst, found)
        else:
            heappushpop(self._worst, found)

    def top_tasks(self) -> list[Task]:
        """Return the tasks that crash most, hold most, have most."""
        order = sorted(self.tasks.values(), key=lambda task: (-task.crashes, -task.held, -task.records, task.task))
        return order[: self.top]

    def worst(self) -> list[Record]:
        """Return the records with most crashes in a row, most first."""
        return [record for *_, record in sorted(self._worst, key=lambda found: (-found[0], found[1]))]

    def facts(self) -> dict[str, Any]:
        """Return all of it as JSON has it."""
        oldest, tasks = self.oldest, self.tasks.values()
        held = sum(task.held for task in tasks)
        return {
            "records": sum(self.by_state.values()),
            "by_state": {str(state): self.by_state[state] for state in State},
            "held": held,
            "ran_out": self.by_state[State.IN_PROGRESS] - held,
            "oldest": oldest and {"key": oldest.key, "holder": oldest.holder, "held_for": oldest.held_for},
            "retries_waiting": self.retries_waiting,
            "duplicates_waiting": self.duplicates_waiting,
            "crash_loops": self.crash_loops,
            "reservations": self.reservations,
            "unreadable": self.unreadable.count,
            "settled_last_minute": self.settled_last_minute,
            "settled_last_hour": sum(task.settled_last_hour for task in tasks),
            "payload_bytes": sum(task.payload_bytes for task in tasks),
            "room": self.room,
            "tasks": [vars(task) for task in self.top_tasks()],
            "crashed": [
                {"key": found.key, "state": str(found.state), "crashes": found.crashes} for found in self.worst()
            ],
            "complete": self.complete,
        }


def _settled(record: Record, within: float) -> bool:
    return record.state in (State.COMPLETED, State.FAILED) and record.age <= within
