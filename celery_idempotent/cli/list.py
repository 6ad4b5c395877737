"""``list``: what the stores remember."""

from __future__ import annotations

from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import click

from . import tables
from .common import Exit, StoreCommand, Stores, say, stores_of, suggestion
from .search import Filter, SearchResult, filters, looked_up, search

if TYPE_CHECKING:
    from ..stores.maintenance import NamedStore


@click.command("list", cls=StoreCommand)
@filters
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def command(ctx: click.Context, /, as_json: bool, **options: Any) -> None:
    """List records.

    What is in progress is as old as its lease, and what is done as long ago as it was settled. Reads records until it
    has found as many as --limit; if there are not so many, it has read all of the store.
    """
    wish = looked_up(ctx, Filter(**options))
    stores, facts, more = stores_of(ctx), [], False
    for used, found in stores.each(partial(search, wish)):
        records, more = tables.in_order(found.records.values()), more or found.more
        facts += [tables.facts(record, None if stores.one else used.name) for record in records]
        if records and not as_json:
            if not stores.one:
                click.secho(used.name, bold=True)
            tables.show(tables.table(records))
        _report(stores, used, wish, found)
        if found.interrupted:
            stores.status = Exit.INTERRUPTED
            break
    stores.end(ctx, {"records": facts, "more": more} if as_json else None)


#: How many records are read to find the name of a task.
READ = 1000


def _meant_task(typed: str, used: NamedStore) -> str:
    """Return a question with the task that was meant: one of the app, or one of which there are records."""
    seen = (tables.task_of(record.key) for record in islice(used.store.scan(), READ))
    known = {*used.lease_ttls, *filter(None, seen)}
    alike = [name for name in sorted(known) if name.rpartition(".")[2] == typed]
    return f" Did you mean --task {alike[0]}?" if alike else suggestion(typed, known, "--task {}")


def _report(stores: Stores, used: NamedStore, wish: Filter, found: SearchResult) -> None:
    """Report on standard error what is not in the table."""
    where = "" if stores.one else f" in {used.name}"
    if found.interrupted:
        click.echo(f"Interrupted: there may be more{where}.", err=True)
    elif found.more:
        click.echo(f"There are more than these {wish.limit:,}{where}: narrow it down, or raise --limit.", err=True)
    elif not found.records:
        meant = used.meant_prefix(wish.prefix) if wish.prefix else None
        hint = f" Did you mean --prefix {meant}?" if meant else ""
        if wish.task and wish.task not in used.lease_ttls:
            hint = _meant_task(wish.task, used)
        say(f"No such record{where or f' in {used.name}'}.{hint}", err=True)
    if found.unreadable.count:
        say(f"{found.unreadable.count:,} cannot be read{where}; why: show {found.unreadable.first}", err=True)
    if found.ageless:
        click.echo(f"{found.ageless:,} more are of an age that the store does not know{where}.", err=True)
