"""Tables for people, and records as their rows."""

from __future__ import annotations

import importlib.util
import shutil
import sys
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import click

from ..stores.records import Reason, Record, State, is_reservation
from ..units import clean, shorten_duration

GAP = 2
#: The text of a cell whose value is not known.
NOTHING = "-"


class Cell(NamedTuple):
    """A text, and how rich is to colour it."""

    text: str = NOTHING
    style: str = ""


@dataclass(frozen=True, slots=True)
class Column:
    """One column.

    Arguments:
        title: Its first line.
        right: Whether what is in it stands to the right.
        least: To how many columns of the terminal it may be shortened; 0 for not at all.
        spare: Whether to leave it out where there is no room: the highest first, 0 never.
    """

    title: str
    right: bool = False
    least: int = 0
    spare: int = 0


@dataclass(frozen=True, slots=True)
class Table:
    """Columns, and rows of one cell for each."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]

    def cleaned(self) -> Table:
        """Return the table with no text in it that a terminal would obey."""
        return Table(self.columns, [[Cell(clean(cell.text), cell.style) for cell in row] for row in self.rows])

    def without(self, place: int) -> Table:
        """Return the table without one of its columns."""
        keep = [index for index in range(len(self.columns)) if index != place]
        return Table([self.columns[index] for index in keep], [[row[index] for index in keep] for row in self.rows])

    def without_empty(self) -> Table:
        """Return the table without the columns in which no row has anything."""
        table = self
        for place in reversed(range(len(self.columns))):
            if self.rows and all(row[place].text == NOTHING for row in self.rows):
                table = table.without(place)
        return table

    def widths(self) -> list[int]:
        """Return how wide each column is."""
        texts = zip(*([cell.text for cell in row] for row in self.rows), strict=True) if self.rows else [()] * 99
        return [max(map(cells, [column.title, *found])) for column, found in zip(self.columns, texts, strict=False)]

    def fitted(self, width: int, dots: str) -> Table:
        """Return the table as wide as that: without empty columns and those that can be spared, and shortened.

        Arguments:
            width: Columns of the terminal.
            dots: What stands where something is left out.
        """
        table = self.without_empty()
        while True:
            widths = table.widths()
            least = [min(wide, column.least or wide) for column, wide in zip(table.columns, widths, strict=True)]
            room = width - GAP * (len(widths) - 1)
            spare = max((column.spare, place) for place, column in enumerate(table.columns))
            if sum(least) <= room or not spare[0]:
                return table.shortened(_shrunk(widths, least, room), dots)
            table = table.without(spare[1])

    def shortened(self, widths: Sequence[int], dots: str) -> Table:
        """Return the table with its texts shortened to these widths."""
        rows = [
            [Cell(shortened(cell.text, wide, dots), cell.style) for cell, wide in zip(row, widths, strict=True)]
            for row in self.rows
        ]
        return Table(self.columns, rows)

    def plain(self) -> str:
        """Return the table as lines of text."""
        widths = self.widths()
        lines = [[column.title for column in self.columns], *([cell.text for cell in row] for row in self.rows)]
        return "\n".join(self._line(line, widths) for line in lines)

    def _line(self, texts: Sequence[str], widths: Sequence[int]) -> str:
        padded = []
        for text, wide, column in zip(texts, widths, self.columns, strict=True):
            space = " " * (wide - cells(text))
            padded.append(f"{space}{text}" if column.right else f"{text}{space}")
        return (" " * GAP).join(padded).rstrip()

    def rich(self) -> Any:
        """Return the table as rich draws it."""
        from rich.table import Table as Drawn
        from rich.text import Text

        drawn = Drawn(box=None, pad_edge=False, header_style="bold", padding=(0, GAP // 2))
        for column in self.columns:
            drawn.add_column(column.title, justify="right" if column.right else "left", no_wrap=True)
        for row in self.rows:
            drawn.add_row(*(Text(cell.text, cell.style) for cell in row))
        return drawn


def _shrunk(widths: Sequence[int], least: Sequence[int], room: int) -> list[int]:
    """Return widths that fit the room, none below its least; what stands first is shortened last."""
    found = list(widths)
    for place in reversed(range(len(found))):
        found[place] = max(least[place], found[place] - max(0, sum(found) - room))
    return found


def dots_of(encoding: str | None) -> str:
    """Return what stands where something is left out, in what the terminal can print."""
    return "\N{HORIZONTAL ELLIPSIS}" if (encoding or "").lower().replace("-", "").startswith("utf") else ".."


def coloured() -> Any:
    """Return rich's console where standard output is a terminal and rich is installed, else None."""
    if not sys.stdout.isatty() or importlib.util.find_spec("rich") is None:
        return None
    from rich.console import Console

    context = click.get_current_context(silent=True)
    no_colour = True if context is not None and context.color is False else None  # None: rich reads NO_COLOR
    return Console(highlight=False, no_color=no_colour)


def show(table: Table) -> None:
    """Print a table: whole where it is piped, as wide as the terminal where there is one, coloured if rich is there."""
    table, console = table.cleaned(), coloured()
    if console is not None:
        console.print(table.fitted(console.width, dots_of(sys.stdout.encoding)).rich())
        return
    if sys.stdout.isatty():
        table = table.fitted(shutil.get_terminal_size().columns, dots_of(sys.stdout.encoding))
    click.echo(table.plain())


def cell_of(value: object) -> Cell:
    """Return a value as a cell."""
    return value if isinstance(value, Cell) else Cell(str(value))


def show_facts(facts: Mapping[str, object]) -> None:
    """Print names and values, one below the other; a value that is too long for the terminal goes on below itself."""
    console = coloured()
    if console is None:
        width = max(map(cells, facts))
        for name, value in facts.items():
            click.echo(f"{name:<{width}}  {clean(cell_of(value).text)}")
        return
    from rich.table import Table as Drawn
    from rich.text import Text

    drawn = Drawn.grid(padding=(0, GAP, 0, 0))
    drawn.add_column(style="bold", no_wrap=True)
    drawn.add_column(overflow="fold")
    for name, value in facts.items():
        cell = cell_of(value)
        drawn.add_row(name, Text(clean(cell.text), cell.style))
    console.print(drawn)


def age_of(record: Record) -> float | None:
    """Return for how many seconds a record has been held, or settled; None where the store does not know."""
    if record.state is State.RELEASED:
        return None
    return record.held_for or None if record.state is State.IN_PROGRESS else record.age


def task_of(key: str) -> str:
    """Return the name of the task whose key this is; "" for a key that names none."""
    from urllib.parse import unquote

    parts = key.split(":")
    if is_reservation(key):
        parts = parts[1:]
    return unquote(parts[1]) if len(parts) > 2 else ""


COLUMNS = (
    Column("KEY", least=24),
    Column("STATE"),
    Column("LEASE/REASON"),
    Column("AGE", right=True),
    Column("CRASHES", right=True),
    Column("HOLDER", least=12, spare=1),
    Column("TASK ID", least=9, spare=2),
    Column("FENCE", spare=3),
)
#: What is looked for most comes first.
_ORDER = (State.IN_PROGRESS, State.RELEASED, State.FAILED, State.COMPLETED)
_STYLES = {State.IN_PROGRESS: "cyan", State.FAILED: "red", State.COMPLETED: "green", State.RELEASED: "yellow"}


def in_order(records: Iterable[Record]) -> list[Record]:
    """Return the records by state; first those whose lease ran out, then the oldest."""
    return sorted(records, key=_place)


def _place(record: Record) -> tuple[int, bool, float, str]:
    return _ORDER.index(record.state), not _ran_out(record), -(age_of(record) or 0), record.key


def _ran_out(record: Record) -> bool:
    return record.state is State.IN_PROGRESS and not record.remaining


def table(records: Iterable[Record]) -> Table:
    """Return a row for each record."""
    return Table(COLUMNS, [_row(record) for record in records])


def _row(record: Record) -> list[Cell]:
    crashes = Cell(str(record.crashes), "bold red") if record.crashes else Cell()
    return [
        Cell(record.key),
        Cell(str(record.state), _STYLES[record.state]),
        _standing(record),
        Cell(NOTHING if (age := age_of(record)) is None else shorten_duration(age)),
        crashes,
        Cell(record.holder or NOTHING),
        Cell(record.task_id or NOTHING),
        Cell(str(record.fence)),
    ]


def _standing(record: Record) -> Cell:
    """Return what is left of the lease of what is in progress, and why what is released was."""
    left = shorten_duration(record.remaining)
    if record.state is State.IN_PROGRESS:
        return Cell("ran out", "bold red") if _ran_out(record) else Cell(f"{left} left")
    if record.reason == Reason.CRASH_LOOP:
        return Cell(record.reason, "bold red")
    if record.reason == Reason.RETRY:
        return Cell(f"retry in {left}" if record.remaining else "retry due")
    return Cell(record.reason or NOTHING)


def facts(record: Record, store: str | None = None) -> dict[str, Any]:
    """Return a record as JSON has it; null is what the store does not know, or what there is not in this state.

    Arguments:
        record: The record.
        store: What to call its store, where there are several.
    """
    settled = record.state in (State.COMPLETED, State.FAILED)
    return {
        **({} if store is None else {"store": store}),
        "key": record.key,
        "state": str(record.state),
        "task": task_of(record.key) or None,
        "task_id": record.task_id or None,
        "holder": record.holder or None,
        "remaining": None if settled else record.remaining,
        "held_for": record.held_for or None,
        "age": record.age if settled else None,
        "crashes": record.crashes,
        "reason": record.reason or None,
        "fence": record.fence,
        "payload_bytes": len(record.payload),
    }


def cells(text: str) -> int:
    """Return how many columns of a terminal a text takes."""
    if text.isascii():
        return len(text)
    return sum(0 if unicodedata.combining(x) else 1 + (unicodedata.east_asian_width(x) in "WF") for x in text)


def shortened(text: str, width: int, dots: str = "\N{HORIZONTAL ELLIPSIS}") -> str:
    """Return a text in so many columns; what is left out is left out of its middle, for keys begin and end alike.

    Arguments:
        text: The text.
        width: Columns of a terminal.
        dots: What stands where something is left out.
    """
    if cells(text) <= width:
        return text
    room = max(0, width - cells(dots))
    head, tail = _first(text, room // 2), _first(text[::-1], room - room // 2)[::-1]
    return f"{head}{dots}{tail}"


def _first(text: str, width: int) -> str:
    """Return as much of the beginning as fits."""
    return text[: sum(taken <= width for taken in accumulate(map(cells, text)))]
