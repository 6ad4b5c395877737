"""How many events of each kind have happened in a worker, its main process and all its children together."""

from __future__ import annotations

import mmap

from .. import hooks
from ..events import Event
from ..names import NAMES
from . import rows

__all__ = ["count", "counts", "prepare"]

KINDS = len(NAMES)
_PLACES = {kind: place for place, kind in enumerate(NAMES)}

_cells: memoryview | None = None


def prepare() -> None:
    """Begin at zero; children that are forked later count too."""
    global _cells
    rows.prepare()
    _cells = memoryview(mmap.mmap(-1, rows.ROWS * KINDS * 8)).cast("Q")
    hooks.add_counter(count)


def count(kind: type[Event]) -> None:
    """Count one event of this kind."""
    row = rows.own
    if _cells is not None and row is not None and kind in _PLACES:
        place = row * KINDS + _PLACES[kind]
        with rows.lock:
            _cells[place] += 1


def counts() -> dict[str, int]:
    """Return how many there were of each kind, by its name in `names`; a kind that never happened is left out."""
    if _cells is None:
        return {}
    found = {NAMES[kind]: sum(_cells[place::KINDS]) for kind, place in _PLACES.items()}
    return {name: number for name, number in found.items() if number}
