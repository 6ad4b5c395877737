"""``schema``: what a store needs on its server."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from .common import Exit, StoreCommand, stores_of

if TYPE_CHECKING:
    from ..stores.maintenance import NamedStore


@click.command("schema", cls=StoreCommand)
@click.option("--apply", is_flag=True, help="Do it.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def command(ctx: click.Context, apply: bool, as_json: bool) -> None:
    """Print what a store needs on its server.

    Exits with 1 if anything is to be created or upgraded. With --apply it is done; safe to repeat, also
    at the same time.
    """

    def look(used: NamedStore) -> str:
        pending = used.store.pending_schema()
        if pending and apply:
            used.store.apply_schema()
        return pending

    stores, found = stores_of(ctx), {}
    for used, pending in stores.each(look):
        found[used.name] = {"pending": "" if apply else pending, "applied": pending if apply else ""}
        if pending and not apply:
            stores.status = stores.status or Exit.NO
        if not as_json:
            _say(used.name, pending, applied=apply)
    stores.end(ctx, found if as_json else None)


def _say(name: str, pending: str, *, applied: bool) -> None:
    """Print what is pending so that a database's own shell can read it; remarks go to standard error."""
    if not pending:
        click.echo(f"{name}: nothing is to be done", err=True)
        return
    click.echo(pending.rstrip())
    click.echo(f"{name}: this was done" if applied else f"{name}: this is to be done; --apply does it", err=True)
