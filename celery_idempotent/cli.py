"""The command line: ``celery-idempotent``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import click

from .commands.exits import Exit
from .commands.group import Commands

__all__ = ["cli", "main"]


@click.group(
    cls=Commands,
    modules=("demo", "doctor", "explain", "forget", "list", "purge", "release", "schema", "show", "stats", "watch"),
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(package_name="celery-idempotent", prog_name="celery-idempotent")
def cli() -> None:
    """Celery tasks that take effect once per operation.

    What looks into a store takes its URL. Where there is an app, celery -A proj idempotency knows its stores.
    """


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


if __name__ == "__main__":
    main()
