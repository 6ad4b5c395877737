"""One measured figure beside the one to reach."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["Figure", "as_dicts", "as_table"]


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the report.

    Arguments:
        part: Which benchmark measured it.
        name: What was measured.
        value: The figure.
        unit: Of the figure; "x" for a ratio.
        spread: Where it may lie, 90 % of the resampled blocks.
        reach: The figure to reach, or None if it stands here to explain the others.
        at_least: Whether more is better; less is, where it is false.
        note: The medians behind a ratio, or whatever else explains it.
    """

    part: str
    name: str
    value: float
    unit: str = "x"
    spread: tuple[float, float] | None = None
    reach: float | None = None
    at_least: bool = False
    note: str = ""

    @property
    def reached(self) -> bool | None:
        """Tell whether the figure, as it is printed, reaches what it should; None if nothing was set."""
        if self.reach is None:
            return None
        shown = float(_number(self.value, self.unit))
        return shown >= self.reach if self.at_least else shown <= self.reach


def as_dicts(figures: Iterable[Figure]) -> list[dict[str, Any]]:
    """Return the figures for a script."""
    return [{**asdict(figure), "reached": figure.reached} for figure in figures]


def as_table(figures: Iterable[Figure]) -> str:
    """Return the figures for a person: aligned columns, no colour."""
    head = ("part", "what", "measured", "spread", "reach", "", "note")
    rows = [head, *(_row(figure) for figure in figures)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _row(figure: Figure) -> tuple[str, ...]:
    spread = "" if figure.spread is None else "..".join(_number(end, figure.unit) for end in figure.spread)
    reach = "" if figure.reach is None else f"{'>=' if figure.at_least else '<='} {figure.reach:g}"
    verdict = {None: "", True: "ok", False: "MISSED"}[figure.reached]
    measured = f"{_number(figure.value, figure.unit)} {figure.unit}"
    return figure.part, figure.name, measured, spread, reach, verdict, figure.note


def _number(value: float, unit: str) -> str:
    if unit in ("x", "%"):
        return f"{value:.2f}"
    return f"{value:.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.2f}"
