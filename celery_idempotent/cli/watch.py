"""``watch``: the operations in progress, as they change."""

from __future__ import annotations

import importlib.util
import signal
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from time import monotonic, sleep
from types import FrameType
from typing import TYPE_CHECKING, Any

import click

from ..errors import ConfigurationError, IdempotencyError
from ..stores.records import Record, State
from ..units import clean, format_duration
from . import tables
from .common import Exit, StoreCommand, Stores, stores_of
from .search import Filter, SearchResult, duration, filters, looked_up, search
from .tables import Table, dots_of

if TYPE_CHECKING:
    from rich.live import Live

    from ..stores.maintenance import NamedStore


#: Signals that would leave the terminal as it is.
_ENDS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))


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
    wish = looked_up(ctx, Filter(states=states or (State.IN_PROGRESS,), **options))
    _check_terminal()
    from rich.live import Live

    from .tables import coloured

    stores, console = stores_of(ctx), coloured()
    view = LiveView(stores, wish, every, console)
    if not view.begin():
        ctx.exit(stores.status)
    with _ended_by_signals():
        _show(view, Live(view, console=console, screen=True, auto_refresh=False), every)
    console.print(view)  # what was seen last stays
    ctx.exit(Exit.INTERRUPTED)


def _show(view: LiveView, live: Live, every: float) -> None:
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
    if not hasattr(signal, "pthread_sigmask"):  # on Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, *_ENDS})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


#: What ended last: how many are shown, and how many are read after one look.
ENDED, READ = 5, 20
#: Lines that are no rows: what is above and between the tables.
FRAME = 7


class LiveView:
    """Looks into the stores, and draws what it saw; to be given to rich.

    Arguments:
        stores: Where to look.
        wish: What to look for.
        every: Seconds between two looks.
        console: Rich's, on which it will be drawn.
    """

    def __init__(self, stores: Stores, wish: Filter, every: float, console: Any) -> None:
        self._stores, self._wish, self._every, self._console = stores, wish, every, console
        self._found: dict[str, SearchResult] = {}
        self._failed: dict[str, str] = {}
        #: By store: when it answered last.
        self._answered = dict.fromkeys((used.name for used in stores.used), monotonic())
        self._ended: deque[tuple[Record, float]] = deque(maxlen=ENDED)
        #: Seconds that the last look took.
        self.took = 0.0
        #: Whether Ctrl-C was pressed during a look.
        self.interrupted = False

    def begin(self) -> bool:
        """Look for the first time, and return whether any store could serve; errors are reported as always."""
        since = monotonic()
        for used, found in self._stores.each(partial(search, self._wish)):
            self._found[used.name] = found
            self.interrupted = self.interrupted or found.interrupted
        self.took = monotonic() - since
        return bool(self._found)

    def look(self) -> None:
        """Look again. A store that cannot serve is shown as that, with its last records."""
        since = monotonic()
        for used in self._stores.used:
            try:
                found = search(self._wish, used, progress=False)
                if found.interrupted:  # what was seen before is more
                    self.interrupted = True
                    return
                self._note_ended(used, found)
            except IdempotencyError as error:
                self._failed[used.name] = clean(" ".join(str(error).split()))
                continue
            self._failed.pop(used.name, None)
            self._answered[used.name] = monotonic()
            self._found[used.name] = found
        self.took = monotonic() - since

    def _note_ended(self, used: NamedStore, found: SearchResult) -> None:
        before = self._found.get(used.name, SearchResult()).records
        for key in [key for key in before if key not in found.records][:READ]:
            record = used.store.get(key)
            if record is not None and not self._wish.fits(record):
                self._ended.append((record, monotonic()))

    def __rich__(self) -> Any:
        from rich.console import Group

        return Group(*self._parts())

    def _parts(self) -> Iterator[Any]:
        from rich.text import Text

        records = tables.in_order(record for found in self._found.values() for record in found.records.values())
        height = self._console.height - FRAME - (len(self._ended) + 2 if self._ended else 0) - len(self._failed)
        shown = records[: max(3, height)]
        yield Text(self._headline(records), "bold", no_wrap=True, overflow="ellipsis")
        for name, message in self._failed.items():
            silent = format_duration(monotonic() - self._answered[name])
            yield Text(f"No answer for {silent}: {message}", "bold red", no_wrap=True, overflow="ellipsis")
        yield Text("")
        states = len(self._wish.wanted) > 1
        yield self._drawn(self._table(shown, states=states)) if shown else Text("Nothing.", "dim")
        hidden, more = (
            len(records) - len(shown),
            any(found.more and not found.interrupted for found in self._found.values()),
        )
        if hidden or more:
            yield Text(f"and {f'{hidden:,} ' if hidden else ''}more{', --limit leaves out others' * more}", "dim")
        if self._ended:
            ended = [replace(record, age=record.age + monotonic() - seen) for record, seen in reversed(self._ended)]
            yield Text("\nEnded meanwhile", "bold")
            yield self._drawn(self._table(ended, states=True))

    def _table(self, records: list[Record], *, states: bool) -> Table:
        """Return the rows with room for their keys: a task id that would be shortened is of no use."""
        table = _without(tables.table(records), {"FENCE"} if states else {"FENCE", "STATE"})
        widths = table.cleaned().widths()
        fits = sum(widths) + tables.GAP * (len(widths) - 1) <= self._console.width
        return table if fits else _without(table, {"TASK ID"})

    def _drawn(self, table: Table) -> Any:
        return table.cleaned().fitted(self._console.width, dots_of(self._console.encoding)).rich()

    def _headline(self, records: list[Record]) -> str:
        running = [record for record in records if record.state is State.IN_PROGRESS]
        ran_out = sum(not record.remaining for record in running)
        where = self._stores.used[0].name if self._stores.one else f"{len(self._stores.used)} stores"
        what = f"{len(running):,} in progress" + (f", {ran_out:,} of them ran out" if ran_out else "")
        others = len(records) - len(running)
        pause = max(self._every, self.took)
        return f"{what}{f', {others:,} others' if others else ''} | every {pause:.3g} s | Ctrl-C ends | {where}"


def _without(table: Table, titles: set[str]) -> Table:
    """Return a table without the columns of these titles."""
    for place in reversed(range(len(table.columns))):
        if table.columns[place].title in titles:
            table = table.without(place)
    return table
