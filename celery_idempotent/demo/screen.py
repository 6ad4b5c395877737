"""What a person sees while the demo runs, on standard error.

Bars where there is a terminal and rich, else a line per event.
"""

from __future__ import annotations

import importlib.util
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click

from .progress import Progress
from .scenario import ORDERS

__all__ = ["NAMES", "Screen", "open_screen"]

#: What a person calls the runs.
NAMES = {"plain": "Plain Celery", "idempotent": "IdempotentTask"}
_WIDTH = max(map(len, NAMES.values()))


class Screen(ABC):
    """Shows one run after the other."""

    run = ""

    def begin(self, run: str) -> None:
        """Begin with a run."""
        self.run = run

    @abstractmethod
    def say(self, text: str) -> None:
        """Show what happens, in a few words."""

    @abstractmethod
    def show(self, progress: Progress) -> None:
        """Show how far the run is."""


class Lines(Screen):
    """A line per event."""

    def say(self, text: str) -> None:
        """Show what happens."""
        click.echo(f"{NAMES[self.run] + ':':<{_WIDTH + 1}} {text}", err=True)

    def show(self, progress: Progress) -> None:
        """Show nothing: a line per tick would hide the events."""


class Bars(Screen):
    """A bar per run, and below it what happened last."""

    def __init__(self, console: Any) -> None:
        from rich.live import Live
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as Bar
        from rich.text import Text

        self._bar = Bar(
            TextColumn("{task.description}", style="bold"),
            BarColumn(bar_width=None),
            TextColumn("{task.completed:>2.0f} of {task.total} orders"),
            TextColumn("{task.fields[charges]:>3} charges"),
            TextColumn("[{task.fields[style]}]{task.fields[twice]:>2} twice"),
            console=console,
            expand=True,
        )
        self._said = Text("", style="dim", no_wrap=True, overflow="ellipsis")
        self._tasks = {
            run: self._bar.add_task(f"{name:<{_WIDTH}}", total=ORDERS, charges=0, twice=0, style="dim")
            for run, name in NAMES.items()
        }
        self.live = Live(self, console=console, refresh_per_second=10)

    def __rich__(self) -> Any:
        from rich.console import Group

        return Group(self._bar, self._said) if self._said.plain else self._bar

    def say(self, text: str) -> None:
        """Show what happens."""
        self._said.plain = f"  {text}" if text else ""

    def show(self, progress: Progress) -> None:
        """Move the run's bar."""
        self._bar.update(
            self._tasks[self.run],
            completed=len(progress.done),
            charges=sum(progress.charges.values()),
            twice=progress.twice,
            style="bold red" if progress.twice else "green",
        )


@contextmanager
def open_screen() -> Iterator[Screen]:
    """Show the runs for as long as the context lasts."""
    if importlib.util.find_spec("rich") is None or not sys.stderr.isatty():
        yield Lines()
        return
    from rich.console import Console

    screen = Bars(Console(stderr=True, highlight=False))
    with screen.live:
        yield screen
        screen.say("")
