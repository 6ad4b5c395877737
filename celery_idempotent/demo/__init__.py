"""The demo: one load and one set of faults, on plain Celery and on `IdempotentTask`."""

from __future__ import annotations

import os
import textwrap
from time import monotonic

import click

from . import report
from .errors import DemoError, Interrupted, Signals
from .processes import Processes
from .progress import Outcome
from .scenario import BURST, ORDERS, draw_orders
from .screen import NAMES, open_screen
from .servers import start_redis
from .trial import CHILDREN, WORKERS, Trial

__all__ = ["run"]

EXIT_BAD = 1
#: Seconds for each run, start included; what it does not need is left to the next. Orders not done by then are lost.
RUN_SECONDS = 27.0


def run(*, seed: int, as_json: bool, fetch_redis: bool) -> int:
    """Run the demo, and return its exit status.

    Arguments:
        seed: Draws the orders, and which of them meets which fault.
        as_json: Print JSON instead of a table.
        fetch_redis: Let pip fetch a redis-server into the demo's directory if there is none.

    Returns:
        0 if the idempotent run charged every customer once; 1 if not, or if the demo cannot run here; 128 + the number
        of the signal that ended it.
    """
    with Signals() as signals:
        try:
            outcomes = _run_both(signals, seed, fetch_redis)
        except DemoError as error:
            click.echo(f"celery-idempotent demo: {error}", err=True)
            return EXIT_BAD
        except Interrupted as interruption:
            click.echo("Interrupted; every process is ended and the temporary directory removed.", err=True)
            return 128 + interruption.number
    if as_json:
        click.echo(report.as_json(seed, outcomes))
    else:
        report.show(outcomes)
    return 0 if report.is_good(outcomes["idempotent"]) else EXIT_BAD


def _run_both(signals: Signals, seed: int, fetch_redis: bool) -> dict[str, Outcome]:
    _forget_celery_settings()
    orders = draw_orders(seed)
    deadline = monotonic()
    outcomes = {}
    with Processes() as processes:
        redis = start_redis(processes, signals.check, fetch=fetch_redis)
        click.echo(_introduction(redis.version, seed), err=True)
        with open_screen() as screen:
            for name in NAMES:
                screen.begin(name)
                deadline += RUN_SECONDS
                trial = Trial(
                    name,
                    orders,
                    idempotent=name == "idempotent",
                    redis=redis,
                    deadline=deadline,
                    processes=processes,
                    check=signals.check,
                    screen=screen,
                )
                outcomes[name] = trial.run()
    return outcomes


def _introduction(redis_version: str, seed: int) -> str:
    import celery

    head = click.style(f"Celery {celery.__version__}, Redis {redis_version}, seed {seed}", dim=True)
    text = (
        f"{ORDERS} orders, each to be charged once, go to {WORKERS} workers of {CHILDREN} processes: first on plain "
        "Celery with acks_late and reject_on_worker_lost, then with IdempotentTask. Both times the same orders meet "
        "the same faults: kill -9 before a charge, after it and before the ack; a visibility timeout that passes "
        f"during a charge; {BURST} publishes at once; a failure and its retry."
    )
    return f"\n{textwrap.fill(text, report.WIDTH)}\n{head}\n"


def _forget_celery_settings() -> None:
    """Forget what the environment tells Celery: CELERY_BROKER_URL would win over our own broker."""
    for name in [name for name in os.environ if name.startswith("CELERY_")]:
        del os.environ[name]
