"""The command lines: ``celery-idempotent``, and ``celery -A proj idempotency`` with the stores of an app."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from ..errors import ConfigurationError
from .common import CHECKUP, KEYS, STORES, URL, Commands, Exit

if TYPE_CHECKING:
    from ..celery.app import TaskKeys
    from ..stores.maintenance import NamedStore
    from .doctor.app import Checkup


@click.group(
    cls=Commands,
    modules=("demo", "doctor", "explain", "forget", "list", "purge", "release", "schema", "show", "stats", "watch"),
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.option("--store", metavar="URL", help="The store to look into; may also follow the command.")
@click.version_option(package_name="celery-idempotent", prog_name="celery-idempotent")
@click.pass_context
def cli(ctx: click.Context, store: str | None) -> None:
    """Celery tasks that take effect once per operation.

    The commands that read or change a store need its URL. With an app, use `celery -A proj idempotency`, which finds
    the stores of its tasks.
    """
    if store is not None:
        ctx.meta[URL] = store


def main(args: Sequence[str] | None = None) -> None:
    """Run the command that the arguments name, and exit with its status."""
    try:
        status = cli.main(args, prog_name="celery-idempotent", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        status = error.exit_code
    except (click.Abort, KeyboardInterrupt):
        status = Exit.INTERRUPTED
    sys.exit(status or 0)


COMMANDS = ("doctor", "explain", "forget", "list", "purge", "release", "schema", "show", "stats", "watch")


@click.group(cls=Commands, modules=COMMANDS)
@click.pass_context
def idempotency(context: click.Context) -> None:
    """Look at what is remembered of idempotent tasks, in every store that they use."""
    context.meta[STORES] = partial(_stores, context.obj.app)
    context.meta[KEYS] = partial(_keys, context.obj.app)
    context.meta[CHECKUP] = partial(_checkup, context.obj.app)
    if getattr(context.obj, "no_color", False):  # celery --no-color
        context.color = False


def _stores(app: Any) -> list[NamedStore]:
    from ..celery.app import used_stores

    _load(app)
    return used_stores(app)


def _keys(app: Any) -> TaskKeys:
    from ..celery.app import TaskKeys

    _load(app)
    return TaskKeys(app)


def _checkup(app: Any) -> Checkup:
    from .doctor.app import checkup

    return checkup(app, partial(_load, app))


def _load(app: Any) -> None:
    try:
        app.loader.import_default_modules()  # a worker does, and tasks may name stores of their own
    except ImportError as error:
        raise ConfigurationError(
            f"Expected the modules of the app's tasks to be there, as its imports and include name them, got: {error}"
        ) from error
