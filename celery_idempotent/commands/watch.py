"""``watch``: what is in progress, as it changes."""

from __future__ import annotations

import importlib.util
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from time import sleep
from types import FrameType
from typing import TYPE_CHECKING, Any

import click

from ..errors import ConfigurationError
from ..records import State
from .exits import Exit
from .filters import Filter, duration, filters
from .serving import StoreCommand, stores_of

if TYPE_CHECKING:
    from rich.live import Live

    from .view import View

__all__ = ["command"]

#: Signals that would leave the terminal as it is.
_ENDS = (signal.SIGTERM, signal.SIGHUP)


@click.command("watch", cls=StoreCommand)
@filters
@click.option(
    "--every", metavar="DURATION", default="2", show_default=True, callback=duration, help="Pause between two looks."
)
@click.pass_context
def command(ctx: click.Context, /, every: float, states: tuple[State, ...], **options: Any) -> None:
    """Show what is in progress in a table that is renewed, until Ctrl-C.

    Each look searches the store for what is in progress. The pause after it is no shorter than it took.
    """
    wish = Filter(states=states or (State.IN_PROGRESS,), **options)
    _check_terminal()
    from rich.live import Live

    from .tables import coloured
    from .view import View

    stores, console = stores_of(ctx), coloured()
    view = View(stores, wish, every, console)
    if not view.begin():
        ctx.exit(stores.status)
    with _ended_by_signals():
        _show(view, Live(view, console=console, screen=True, auto_refresh=False), every)
    console.print(view)  # what was seen last stays
    ctx.exit(Exit.INTERRUPTED)


def _show(view: View, live: Live, every: float) -> None:
    """Draw and look until Ctrl-C; nothing comes between the beginning of a drawing and its end."""
    try:
        with _undisturbed():
            live.start()
        while not view.interrupted:
            with _undisturbed():
                live.refresh()
            sleep(max(every, view.took))
            view.look()
    except KeyboardInterrupt:
        pass
    finally:
        with _undisturbed():
            live.stop()


def _check_terminal() -> None:
    instead = "For one look without it: list --state in_progress"
    if not sys.stdout.isatty():
        raise click.UsageError(
            f"Expected standard output to be a terminal that can be drawn on, and it is none. {instead}"
        )
    if importlib.util.find_spec("rich") is None:
        raise ConfigurationError(
            "Expected rich to be installed for the live table, and it is not. "
            f"Install it with: pip install 'celery-idempotent[cli]'. {instead}"
        )


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Let the signals that end a process end this one in order."""

    def end(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    before = {number: signal.signal(number, end) for number in _ENDS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Let signals wait until the end: of half a drawing the terminal would not recover."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, *_ENDS})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
