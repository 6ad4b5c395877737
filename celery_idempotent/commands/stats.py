"""``stats``: what the records of each store come to."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import click

from ..errors import StoreError
from . import tables
from .exits import Exit
from .serving import StoreCommand, stores_of
from .tables import Cell, Column, Table
from .tally import Tally
from .wording import duration, size

if TYPE_CHECKING:
    from ..stores.used import UsedStore
    from .survey import Survey

__all__ = ["command"]

#: What the names of `Store.room` mean; a name that is not here is printed as it is.
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

    Reads every record of the store, page by page, so that nobody waits for it. Ctrl-C ends it with what was counted.
    """
    from .survey import Survey

    def count(used: UsedStore) -> Survey:
        survey = Survey(top)
        with Tally("records read") as tally:
            for _ in survey.read(used.store.scan()):
                tally.add(1)
        if survey.complete:
            with suppress(StoreError):  # a right that the rest needs not
                survey.room = used.store.room(survey.sample)
        return survey

    stores, facts = stores_of(ctx), {}
    for used, survey in stores.each(count):
        facts[used.name] = survey.facts()
        if not as_json:
            _print(used.name, survey)
        if not survey.complete:
            click.echo(f"Interrupted: these are the first {survey.records:,} records of {used.name}.", err=True)
            stores.status = Exit.INTERRUPTED
            break
    if as_json:
        click.echo(json.dumps(facts))
    ctx.exit(stores.status)


def _print(name: str, survey: Survey) -> None:
    states = ", ".join(f"{number:,} {state}" for state, number in sorted(survey.by_state.items()))
    oldest = survey.oldest
    facts = {
        "store": name,
        "records": f"{survey.records:,}" + (f" ({states})" if states else ""),
        "held": f"{survey.held:,} by a live lease" + (f"; {survey.ran_out:,} ran out" if survey.ran_out else ""),
        "oldest": oldest and f"{oldest.key} for {duration(oldest.held_for)} by {oldest.holder or 'somebody'}",
        "settled": f"{survey.settled_last_minute:,} in the last minute, {survey.settled_last_hour:,} in the last hour",
        "retries": survey.retries_waiting and f"{survey.retries_waiting:,} not due yet",
        "duplicates": survey.duplicates_waiting and f"{survey.duplicates_waiting:,} waiting",
        "crash loops": survey.crash_loops and Cell(f"{survey.crash_loops:,} refused", "bold red"),
        "payload": size(survey.payload_bytes),
        "room": "; ".join(_room(what, survey.room[what]) for what in sorted(survey.room, key=_rank)),
    }
    tables.show_facts({name: value for name, value in facts.items() if value})
    if survey.tasks and survey.top:
        click.echo()
        tables.show(Table(TASKS, [_task_row(vars(task)) for task in survey.top_tasks()]))
    if survey.worst():
        click.echo()
        rows = [
            [Cell(found.key), Cell(str(found.state)), Cell(str(found.crashes), "bold red"), Cell(found.reason or "-")]
            for found in survey.worst()
        ]
        tables.show(Table(CRASHED, rows))
    click.echo()


def _rank(what: str) -> int:
    return [*ROOM, what].index(what)


def _room(what: str, number: int) -> str:
    return ROOM.get(what, f"{{}} {what}").format(size(number) if what.endswith("_bytes") else f"{number:,}")


def _task_row(facts: dict[str, Any]) -> list[Cell]:
    return [
        Cell(facts["task"] or "-"),
        Cell(f"{facts['records']:,}"),
        Cell(f"{facts['held']:,}"),
        Cell(f"{facts['crashes']:,}", "bold red" if facts["crashes"] else ""),
        Cell(f"{facts['settled_last_hour']:,}"),
        Cell(size(facts["payload_bytes"])),
    ]
