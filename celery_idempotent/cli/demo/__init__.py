"""``celery-idempotent demo``."""

from __future__ import annotations

import os

import click

from ...errors import ConfigurationError


@click.command("demo")
@click.option(
    "--json", "as_json", is_flag=True, help="Print the figures as JSON on standard output, and nothing else there."
)
@click.option("--seed", default=1, show_default=True, help="Draws the orders, and which of them meets which fault.")
@click.option(
    "--fetch-redis", is_flag=True, help="If there is no redis-server, let pip fetch one into the temporary directory."
)
@click.pass_context
def command(ctx: click.Context, as_json: bool, seed: int, fetch_redis: bool) -> None:
    """Kill real workers in mid-charge, and count who pays twice.

    Starts a redis-server, Celery workers and a payment gateway of its own on loopback, charges the same orders on
    plain Celery and with IdempotentTask, and leaves nothing behind. Takes about half a minute.

    Exits with 0 if with IdempotentTask no customer was charged twice and no order was lost, else with 1.
    """
    if not hasattr(os, "killpg"):
        raise ConfigurationError(
            "Expected a system whose processes are killed in groups, got Windows. Run the demo on Linux or macOS."
        )
    from .run import run

    ctx.exit(run(seed=seed, as_json=as_json, fetch_redis=fetch_redis))
