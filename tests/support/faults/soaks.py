"""What the soaks add up to: each run appends a line to docs/soaks.md, and the sums are made anew."""

from __future__ import annotations

import os
import re
import subprocess
from collections import defaultdict
from datetime import date
from pathlib import Path

__all__ = ["ROOT", "add", "sums"]

ROOT = Path(__file__).resolve().parents[3]
RUNS, SUMS = "## Runs\n", "## Sums\n"
HEAD = "| {} | kills | operations | charged twice | lost | unequal answers |\n|---|---|---|---|---|---|\n"


def add(what: str, *, kills: int, operations: int, twice: int, lost: int, unequal: int) -> None:
    """Append a run to the page that SOAK_PAGE names, if it names one.

    Args:
        what: Which soak; lines of one are added up.
        kills: Effective SIGKILLs: each hit a run between its first statement and its ack.
        operations: How many.
        twice: Operations that took effect more than once.
        lost: Operations without an effect.
        unequal: Callers that got another answer than that of the effect.
    """
    page = os.environ.get("SOAK_PAGE")
    if not page:
        return
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()
    path = Path(page)
    line = f"| {what} | {date.today()} | {commit} | {kills} | {operations} | {twice} | {lost} | {unequal} |\n"
    text = path.read_text(encoding="utf-8").rstrip("\n") + "\n" + line
    head, _, runs = text.partition(RUNS)
    path.write_text(f"{head.partition(SUMS)[0]}{SUMS}\n{sums(runs)}\n{RUNS}{runs}", encoding="utf-8")


def sums(runs: str) -> str:
    """Return the table of sums over the lines of runs."""
    totals: dict[str, list[int]] = defaultdict(lambda: [0] * 5)
    for what, *numbers in re.findall(r"^\| (.*?) \| \S+ \| \w+ \|" + r" (\d+) \|" * 5 + "$", runs, re.MULTILINE):
        totals[what] = [total + int(number) for total, number in zip(totals[what], numbers, strict=True)]
    lines = [f"| {what} | {' | '.join(f'{total:,}' for total in totals[what])} |\n" for what in totals]
    return HEAD.format("soak") + "".join(lines)
