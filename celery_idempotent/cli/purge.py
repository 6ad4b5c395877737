"""``purge``: remove what has expired."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from .common import Number, ProgressCounter, StoreCommand, stores_of

if TYPE_CHECKING:
    from ..stores.maintenance import NamedStore


@click.command("purge", cls=StoreCommand)
@click.option("--limit", type=Number(), help="Remove about so many from each store and no more (default: all).")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def command(ctx: click.Context, limit: int | None, as_json: bool) -> None:
    """Remove expired records.

    Does so in stores whose server does not do it by itself. Works in batches beside everything
    else; safe to run at any time, also twice at once.
    """
    from ..stores.maintenance import purge_in_batches

    def purge(used: NamedStore) -> int:
        used.store.ping()  # a server that removes them itself is asked for nothing else
        with ProgressCounter("expired records removed") as tally:
            for removed in purge_in_batches(used.store, limit):
                tally.add(removed)
            return tally.count

    stores, removed = stores_of(ctx), {}
    for used, count in stores.each(purge):
        removed[used.name] = count
        if not as_json:
            click.echo(f"{used.name}: {count:,} expired records removed")
    stores.end(ctx, {"removed": removed} if as_json else None)
