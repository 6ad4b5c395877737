"""A number that rises on a terminal while a command works."""

from __future__ import annotations

import sys
from time import monotonic
from types import TracebackType

import click

__all__ = ["Tally"]

#: Seconds between two looks of it.
EVERY = 0.2


class Tally:
    """Count what is done, and show it on standard error while somebody watches.

    Arguments:
        done: What was done, as in "removed".
    """

    def __init__(self, done: str) -> None:
        self.count = 0
        self._done = done
        self._watched = sys.stderr.isatty()
        self._shown = monotonic()

    def add(self, number: int) -> None:
        """Count so many more."""
        self.count += number
        if self._watched and monotonic() - self._shown >= EVERY:
            self._shown = monotonic()
            click.echo(f"\r{self}", nl=False, err=True)

    def __str__(self) -> str:
        return f"{self.count:,} {self._done}"

    def __enter__(self) -> Tally:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: BaseException | TracebackType | None) -> None:
        if self._watched:
            click.echo("\r\033[K", nl=False, err=True)
        if kind is not None:  # interrupted, or the store went away: what is done is done
            click.echo(f"{self} before it ended", err=True)
