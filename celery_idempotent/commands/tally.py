"""A number that rises on a terminal while a command works."""

from __future__ import annotations

import sys
from threading import Event, Thread
from time import monotonic
from types import TracebackType

import click

__all__ = ["Tally"]

#: Seconds between two looks of it.
EVERY = 0.2


class Tally:
    """Count what is done, and show it with the time on standard error while somebody watches.

    A thread shows it: a store may look through much and find nothing.

    Arguments:
        done: What was done, as in "removed".
    """

    def __init__(self, done: str) -> None:
        self.count = 0
        self._done = done
        self._over = Event()
        self._thread = Thread(target=self._show, daemon=True) if sys.stderr.isatty() else None

    def add(self, number: int) -> None:
        """Count so many more."""
        self.count += number

    def __str__(self) -> str:
        return f"{self.count:,} {self._done}"

    def _show(self) -> None:
        since = monotonic()
        while not self._over.wait(EVERY):
            click.echo(f"\r{self}, {monotonic() - since:.0f} s", nl=False, err=True)

    def __enter__(self) -> Tally:
        if self._thread is not None:
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: BaseException | TracebackType | None) -> None:
        if self._thread is not None:
            self._over.set()
            self._thread.join()
            click.echo("\r\033[K", nl=False, err=True)
        if kind is not None and self.count:  # interrupted, or the store went away: what is done is done
            click.echo(f"{self} before it ended", err=True)
