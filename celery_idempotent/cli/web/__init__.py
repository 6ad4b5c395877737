"""``web``: the stores as pages in a browser, on this machine alone."""

from __future__ import annotations

import importlib.util
import signal
from contextlib import suppress
from typing import TYPE_CHECKING

import click

from ...errors import ConfigurationError
from ..common import KEYS, StoreCommand, Stores, stores_of

if TYPE_CHECKING:
    from .server import Server


@click.command("web", cls=StoreCommand)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8765,
    show_default=True,
    help="The port of 127.0.0.1 to listen on; 0 for one that is free.",
)
@click.option("--allow-changes", is_flag=True, help="Let the pages release and forget, after a confirmation.")
@click.pass_context
def command(ctx: click.Context, port: int, allow_changes: bool) -> None:
    """Show what the stores remember in a browser, until Ctrl-C.

    Prints the URL to open. It ends in a password, which is valid until the command ends: other users of the machine
    can reach the port, too. The pages change nothing, unless --allow-changes is given.
    """
    if importlib.util.find_spec("jinja2") is None:
        raise ConfigurationError(
            "Expected Jinja to be installed for the pages, and it is not. "
            "Install it with: pip install 'celery-idempotent[web]'"
        )
    stores = _shared(stores_of(ctx))
    from .pages import Site
    from .server import Access, Application, bind

    access = Access()
    site = Site(
        stores, ctx.meta[KEYS]() if KEYS in ctx.meta else None, access if allow_changes else None, ctx.command_path
    )
    with bind(port, Application(site, access)) as server:
        _serve(server, access.url(server.server_port))


def _shared(stores: Stores) -> Stores:
    """Return the stores that other processes share.

    Raises:
        ConfigurationError: there is none.
    """
    from ...stores.memory import MemoryStore

    used = [each for each in stores.used if not isinstance(each.store, MemoryStore)]
    if not used:
        raise ConfigurationError(
            "Expected a store that this process shares with the workers, got the memory of one process: each worker "
            "has its own. Name another, such as redis://localhost/1"
        )
    return Stores(used, stores.guesses)


def _serve(server: Server, url: str) -> None:
    """Print the URL, and serve until Ctrl-C or SIGTERM."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with suppress(KeyboardInterrupt):
            click.echo(url)
            server.serve_forever()
    finally:
        signal.signal(signal.SIGTERM, before)
