"""The stores that a command works on: those of an app, or the one that the command line names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from ..errors import IdempotencyError
from .exits import Exit
from .group import URL, CommandFailed

if TYPE_CHECKING:
    from ..stores.used import UsedStore

__all__ = ["CHECKUP", "STORES", "StoreCommand", "Stores", "from_url", "stores_of"]

#: Where a command line says what its stores are, in the meta of click's context: a function without arguments.
STORES = "celery_idempotent.stores"
#: Where it says what looks at its app, if it has one: a function without arguments.
CHECKUP = "celery_idempotent.checkup"
VARIABLE = "CELERY_IDEMPOTENT_STORE"


class StoreCommand(click.Command):
    """A command that works on stores; it asks for a URL where the command line has no app that knows them."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Return the parameters, with ``--store`` where it is needed."""
        params = super().get_params(ctx)
        return params if STORES in ctx.meta else [*params, _store_option()]


def _store_option() -> click.Option:
    def remember(ctx: click.Context, option: click.Parameter, value: str | None) -> None:
        # An option before the command is more specific than the environment, and less than one after the command.
        if URL not in ctx.meta or ctx.get_parameter_source(option.name or "") is ParameterSource.COMMANDLINE:
            ctx.meta[URL] = value

    return click.Option(
        ["--store"],
        metavar="URL",
        envvar=VARIABLE,
        show_envvar=True,
        expose_value=False,
        callback=remember,
        help="The store to look into, as the app's idempotency_store says it.",
    )


class Stores:
    """The stores of one command, one after the other; what one of them cannot do does not keep the others from it.

    Arguments:
        used: The stores.
    """

    def __init__(self, used: Sequence[UsedStore]) -> None:
        self.used = tuple(used)
        #: How the command ends if nothing else is said.
        self.status = Exit.OK

    @property
    def one(self) -> bool:
        """Whether there is no other store that a line of output could be about."""
        return len(self.used) == 1

    def each(self, work: Callable[[UsedStore], Any]) -> Iterator[tuple[UsedStore, Any]]:
        """Yield each store with what the work answers for it; say which could not serve, and go on."""
        for used in self.used:
            try:
                answer = work(used)
            except IdempotencyError as error:
                failed = CommandFailed(error)
                failed.show()
                self.status = self.status or Exit(failed.exit_code)
            else:
                yield used, answer


def stores_of(ctx: click.Context) -> Stores:
    """Return the stores that a command works on; they are closed when it ends.

    Raises:
        UsageError: there is neither an app nor a URL.
        ConfigurationError: the URL is wrong, or what the app says.
    """
    stores = Stores(ctx.meta[STORES]() if STORES in ctx.meta else [from_url(ctx)])
    for used in stores.used:
        ctx.call_on_close(used.store.close)
    return stores


def from_url(ctx: click.Context) -> UsedStore:
    """Return the store that ``--store`` or the environment names."""
    from ..stores import hide_password, open_store
    from ..stores.used import UsedStore

    url = ctx.meta.get(URL)
    if not url:
        raise click.UsageError(
            f"Expected the URL of a store: give --store redis://localhost/1, or set {VARIABLE}. "
            "With an app, use `celery -A proj idempotency`, which finds its stores.",
            ctx,
        )
    return UsedStore(hide_password(url), open_store(url))
