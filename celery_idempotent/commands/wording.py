"""Durations, sizes and texts as people read them."""

from __future__ import annotations

import unicodedata
from itertools import accumulate

__all__ = ["cells", "clean", "duration", "shortened", "size"]

_UNITS = ((86400, "d", 36 * 3600), (3600, "h", 90 * 60), (60, "m", 90))
_SIZES = ("B", "KiB", "MiB", "GiB", "TiB")


def duration(seconds: float) -> str:
    """Return seconds in the unit that says most in two digits, rounded down: 54s, 12m, 3h, 2d."""
    for unit, letter, least in _UNITS:
        if seconds >= least:
            return f"{int(seconds // unit):,}{letter}"
    return f"{int(seconds)}s"


def size(count: float) -> str:
    """Return a number of bytes: 17 B, 1.2 MiB."""
    unit = 0
    while count >= 1024 and unit < len(_SIZES) - 1:
        count, unit = count / 1024, unit + 1
    return f"{count:.1f} {_SIZES[unit]}" if unit else f"{count:.0f} B"


def clean(text: str) -> str:
    """Return a text that does to a terminal what it looks like: what somebody else wrote may hold its commands."""
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


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
