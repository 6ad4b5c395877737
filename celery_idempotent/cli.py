"""The command line: ``celery-idempotent``."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Sequence

import click

__all__ = ["cli", "main"]

EXIT_INTERRUPTED = 130


class Commands(click.Group):
    """Commands that suggest the one that was meant."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command that the arguments name."""
        name = args[0] if args else ""
        if not name.startswith("-") and self.get_command(ctx, name) is None:
            known = self.list_commands(ctx)
            near = difflib.get_close_matches(name, known, 1)
            hint = f"Did you mean {near[0]!r}?" if near else f"There is {', '.join(map(repr, known))}."
            ctx.fail(f"No such command {name!r}. {hint}")
        return super().resolve_command(ctx, args)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="celery-idempotent", prog_name="celery-idempotent")
def cli() -> None:
    """Celery tasks that take effect once per operation.

    What looks into a store of yours is with Celery's own commands: celery -A proj idempotency --help
    """


@cli.command()
@click.option(
    "--json", "as_json", is_flag=True, help="Print the figures as JSON on standard output, and nothing else there."
)
@click.option("--seed", default=1, show_default=True, help="Draws the orders, and which of them meets which fault.")
@click.option(
    "--fetch-redis", is_flag=True, help="If there is no redis-server, let pip fetch one into the temporary directory."
)
@click.pass_context
def demo(ctx: click.Context, as_json: bool, seed: int, fetch_redis: bool) -> None:
    """Kill real workers in mid-charge, and count who pays twice.

    Starts a redis-server, Celery workers and a payment gateway of its own on loopback, charges the same orders on
    plain Celery and with IdempotentTask, and leaves nothing behind. Takes about half a minute.

    Exits with 0 if with IdempotentTask nobody was charged twice and no order was lost, else with 1.
    """
    from .demo import run

    ctx.exit(run(seed=seed, as_json=as_json, fetch_redis=fetch_redis))


def main(args: Sequence[str] | None = None) -> None:
    """Run the command that the arguments name, and exit with its status."""
    try:
        status = cli.main(args, prog_name="celery-idempotent", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        status = error.exit_code
    except (click.Abort, KeyboardInterrupt):
        status = EXIT_INTERRUPTED
    sys.exit(status or 0)


if __name__ == "__main__":
    main()
