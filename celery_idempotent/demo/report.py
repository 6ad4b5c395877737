"""What the demo says at its end: a table for a person, JSON for a script."""

from __future__ import annotations

import importlib.util
import json
import sys
import textwrap
from collections.abc import Mapping
from typing import Any

import click

from .progress import Outcome
from .scenario import Fault
from .screen import NAMES

__all__ = ["as_json", "is_good", "show"]

WIDTH = 78
_TWICE = "Customers charged twice or more"
_LOST = "Orders lost"

_NEXT = """\
Next, in your code:

    from celery_idempotent import IdempotentTask

    @app.task(base=IdempotentTask, idempotency={"key": "order_id"})
    def charge(order_id, amount): ...

The README says what is promised and what is not; the tutorial lets you kill
a worker by hand. For scripts: celery-idempotent demo --json"""


def is_good(outcome: Outcome) -> bool:
    """Tell whether every customer was charged once."""
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
    _show_table(_rows(outcomes), _fault_rows(outcomes))
    idempotent = outcomes["idempotent"]
    click.secho(_verdict(idempotent), fg="green" if is_good(idempotent) else "red", bold=True)
    click.echo(f"\n{_why(idempotent)}\n\n{_NEXT}")


def _rows(outcomes: Mapping[str, Outcome]) -> list[list[str]]:
    runs = [outcomes[name] for name in NAMES]
    rows = [
        ["Orders", *(str(run.tally.orders) for run in runs)],
        ["Charges", *(str(run.tally.charges) for run in runs)],
        [_TWICE, *(str(run.tally.duplicates) for run in runs)],
        [_LOST, *(str(run.tally.lost) for run in runs)],
        ["Recovery after a kill, median", *(_seconds(run.recovery_median) for run in runs)],
        ["Recovery after a kill, worst", *(_seconds(run.recovery_worst) for run in runs)],
    ]
    if not all(run.finished for run in runs):
        rows.append(["All done before the deadline", *("yes" if run.finished else "NO" for run in runs)])
    return rows


def _fault_rows(outcomes: Mapping[str, Outcome]) -> list[list[str]]:
    rows = []
    for fault in Fault:
        cells = [outcomes[name].tally.by_fault[fault] for name in NAMES]
        rows.append([fault.text, *(f"{twice} of {number}" for number, twice in cells)])
    return rows


def _show_table(rows: list[list[str]], fault_rows: list[list[str]]) -> None:
    """Print the table, with rich if it is there."""
    titles = list(NAMES.values())
    faults_title = "Charged twice or more, by what went wrong"
    if importlib.util.find_spec("rich") is None or not sys.stdout.isatty():
        for left, *cells in ([""] * 3, ["", *titles], *rows, [""] * 3, [faults_title, "", ""], *fault_rows, [""] * 3):
            click.echo(f"{left:<48}{cells[0]:>14}{cells[1]:>16}".rstrip())
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False)
    table.add_column("")
    for title in titles:
        table.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(row[0], *(_coloured(row[0], cell) for cell in row[1:]))
    table.add_section()
    table.add_row(faults_title, style="bold")
    for row in fault_rows:
        table.add_row(*row)
    Console(highlight=False).print(table)


def _coloured(title: str, cell: str) -> str:
    if title not in (_TWICE, _LOST):
        return cell
    return f"[bold green]{cell}" if cell == "0" else f"[bold red]{cell}"


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
        "before the record of it leaves nothing that says it charged, and no library can know. Therefore the task "
        'hands the gateway self.lease.derived_key("gateway"), the same on every run of the order. The gateway honours '
        "such keys, as real ones do, and answered without a second charge. (The plain task hands it no key, as plain "
        "code does.)"
    )
    return f"{textwrap.fill(replayed, WIDTH)}\n\n{textwrap.fill(known, WIDTH)}"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} s"


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
