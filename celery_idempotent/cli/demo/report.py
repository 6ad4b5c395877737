"""The demo's output: progress while it runs, then a table for people or JSON for scripts."""

from __future__ import annotations

import importlib.util
import json
import statistics
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import click

from .scenario import ORDERS, Counts, Fault

WIDTH = 78
_TWICE = "Customers charged twice or more"
_LOST = "Orders lost"
_BY_FAULT = "Charged twice or more, by what went wrong"

_NEXT = """\
Next, in your code:

    from celery_idempotent import IdempotentTask

    @app.task(base=IdempotentTask, idempotency={"key": "order_id"})
    def charge(order_id, amount): ...

The README lists what is promised and what is not; the tutorial lets you kill
a worker by hand. For scripts: celery-idempotent demo --json"""


def is_good(outcome: Outcome) -> bool:
    """Return whether every customer was charged once."""
    return outcome.tally.duplicates == 0 and outcome.tally.lost == 0


def as_json(seed: int, outcomes: Mapping[str, Outcome]) -> str:
    """Return the outcomes of both runs as JSON."""
    return json.dumps({"seed": seed, **{name: _facts(outcome) for name, outcome in outcomes.items()}}, indent=2)


def _facts(outcome: Outcome) -> dict[str, Any]:
    tally, progress = outcome.tally, outcome.progress
    return {
        "orders": tally.orders,
        "charges": tally.charges,
        "duplicates": tally.duplicates,
        "lost": tally.lost,
        "recovery": {
            "median_seconds": _rounded(outcome.recovery_median),
            "worst_seconds": _rounded(outcome.recovery_worst),
        },
        "faults": {
            fault.value: {"orders": number, "duplicates": twice} for fault, (number, twice) in tally.by_fault.items()
        },
        "published": progress.published,
        "kills": len(progress.killed),
        "redelivered": progress.redelivered,
        "retries": progress.ends["RETRY"],
        "replayed": outcome.replayed,
        "stopped_by_gateway_key": progress.known_keys,
        "finished": outcome.finished,
        "seconds": _rounded(outcome.seconds),
    }


def show(outcomes: Mapping[str, Outcome]) -> None:
    """Print what a person reads."""
    click.echo()
    for title, *cells in _rows([outcomes[name] for name in NAMES]):
        line = click.style(f"{title:<46}" if cells else title, bold=title == _BY_FAULT)
        for cell in cells:
            colour = None if title not in (_TWICE, _LOST) else "green" if cell == "0" else "red"
            line += click.style(f"{cell:>16}", fg=colour, bold=bool(colour) or cell in NAMES.values())
        click.echo(line)
    idempotent = outcomes["idempotent"]
    click.secho(_verdict(idempotent), fg="green" if is_good(idempotent) else "red", bold=True)
    click.echo(f"\n{_why(idempotent)}\n\n{_NEXT}")


def _rows(runs: list[Outcome]) -> Iterator[list[str]]:
    """Yield the lines of the table: a title, and a cell for each run."""
    yield ["", *NAMES.values()]
    yield ["Orders", *(str(run.tally.orders) for run in runs)]
    yield ["Charges", *(str(run.tally.charges) for run in runs)]
    yield [_TWICE, *(str(run.tally.duplicates) for run in runs)]
    yield [_LOST, *(str(run.tally.lost) for run in runs)]
    yield ["Recovery after a kill, median", *(_seconds(run.recovery_median) for run in runs)]
    yield ["Recovery after a kill, worst", *(_seconds(run.recovery_worst) for run in runs)]
    if not all(run.finished for run in runs):
        yield ["All done before the deadline", *("yes" if run.finished else "NO" for run in runs)]
    yield [""]
    yield [_BY_FAULT]
    for fault in Fault:
        numbers = [run.tally.by_fault[fault] for run in runs]
        yield [fault.text, *(f"{twice} of {number}" for number, twice in numbers)]
    yield [""]


def _verdict(idempotent: Outcome) -> str:
    tally = idempotent.tally
    if is_good(idempotent):
        return "With IdempotentTask no customer was charged twice, and no order was lost."
    return (
        f"With IdempotentTask {tally.duplicates} customers were charged twice and {tally.lost} orders lost: a failure."
    )


def _why(idempotent: Outcome) -> str:
    replayed = f"{idempotent.replayed} deliveries too many got the recorded result; the gateway was not called."
    known = (
        f"{idempotent.progress.known_keys} times the charge did run again: a process killed after the charge and "
        "before the record of it leaves no record that it charged, and no library can know. Therefore the task "
        'hands the gateway self.lease.derived_key("gateway"), the same on every run of the order. The gateway honours '
        "such keys, as real ones do, and answered without a second charge. (The plain task hands it no key, as plain "
        "code does.)"
    )
    return f"{textwrap.fill(replayed, WIDTH)}\n\n{textwrap.fill(known, WIDTH)}"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} s"


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


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

    tally: Counts
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


#: The runs, and their names for people.
NAMES = {"plain": "Plain Celery", "idempotent": "IdempotentTask"}
_WIDTH = max(map(len, NAMES.values()))


class Lines:
    """The screen of the demo where there is no terminal or no rich: a line on standard error per event."""

    #: The run that is on.
    run = ""

    def log(self, text: str) -> None:
        """Show what happens, in a few words."""
        click.echo(f"{NAMES[self.run] + ':':<{_WIDTH + 1}} {text}", err=True)

    def show(self, progress: Progress) -> None:
        """Show how far the run is, which is nothing here: a line per tick would hide the events."""


class Bars(Lines):
    """The screen where there are both: a bar per run, and below it what happened last."""

    def __init__(self, console: Any) -> None:
        from rich.live import Live
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as Bar
        from rich.text import Text

        self._bar = Bar(
            TextColumn("{task.description}", style="bold"),
            BarColumn(bar_width=None),
            TextColumn("{task.completed:>2.0f} of {task.total} orders"),
            TextColumn("{task.fields[charges]:>3} charges"),
            TextColumn("[{task.fields[style]}]{task.fields[twice]:>2} twice"),
            console=console,
            expand=True,
        )
        self._last = Text("", style="dim", no_wrap=True, overflow="ellipsis")
        self._tasks = {
            run: self._bar.add_task(f"{name:<{_WIDTH}}", total=ORDERS, charges=0, twice=0, style="dim")
            for run, name in NAMES.items()
        }
        self.live = Live(self, console=console, refresh_per_second=10)

    def __rich__(self) -> Any:
        from rich.console import Group

        return Group(self._bar, self._last) if self._last.plain else self._bar

    def log(self, text: str) -> None:
        """Show what happens."""
        self._last.plain = f"  {text}" if text else ""

    def show(self, progress: Progress) -> None:
        """Move the run's bar."""
        self._bar.update(
            self._tasks[self.run],
            completed=len(progress.done),
            charges=sum(progress.charges.values()),
            twice=progress.twice,
            style="bold red" if progress.twice else "green",
        )


@contextmanager
def open_screen() -> Iterator[Lines]:
    """Show the runs for as long as the context lasts."""
    if importlib.util.find_spec("rich") is None or not sys.stderr.isatty():
        yield Lines()
        return
    from rich.console import Console

    screen = Bars(Console(stderr=True, highlight=False))
    with screen.live:
        yield screen
        screen.log("")
