"""The command line ``celery-idempotent``; that of Celery, which knows an app, is in `app`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from io import StringIO

import click

from .common import URL, Commands, Exit


@click.group(
    cls=Commands,
    modules=(
        "demo",
        "doctor",
        "explain",
        "forget",
        "list",
        "purge",
        "release",
        "schema",
        "show",
        "stats",
        "watch",
        "web",
    ),
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
    if sys.stdout is None:  # it was closed
        sys.stdout = StringIO()
    if sys.stderr is None:
        sys.stderr = StringIO()
    try:
        status = cli.main(args, prog_name="celery-idempotent", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        status = error.exit_code
    except (click.Abort, KeyboardInterrupt):
        status = Exit.INTERRUPTED
    except OSError as error:  # of what it prints to: a store's are errors of stores
        click.echo(f"Error: Expected to write the output, got {error}. Look where it goes.", err=True)
        with suppress(OSError, ValueError):  # else Python tries again at its end, and complains
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = Exit.NO
    sys.exit(status or 0)
