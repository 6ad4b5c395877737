"""The figures of soaks that were run, added up: `add` writes those of one more into docs/soaks.md."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass, fields, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

__all__ = ["GATEWAY", "PAGE", "POSTGRES", "SQLITE", "Figures", "add", "rows", "with_rows"]

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "soaks.md"
#: What happens to the effect of an operation.
POSTGRES = "settled in its transaction, PostgreSQL"
SQLITE = "settled in its transaction, SQLite"
GATEWAY = "asked of a gateway by `derived_key`, Redis"
IN_TRANSACTIONS = "settled in its transaction, both"
#: The sum lines, and the effects that each of them adds up.
LINES = {
    POSTGRES: (POSTGRES,),
    SQLITE: (SQLITE,),
    IN_TRANSACTIONS: (POSTGRES, SQLITE),
    GATEWAY: (GATEWAY,),
}
#: How many kills are to come together.
AIMS = {IN_TRANSACTIONS: 100_000, GATEWAY: 20_000}
NAMES = {
    "repeated": "repeated after a kill",
    "unexplained": "repeated otherwise",
    "popped": "lost by the broker",
    "wrong": "wrong answers",
}


def commit() -> str:
    """Return the tree's commit, with a plus if the library differs from it."""

    def git(*args: str) -> str:
        return subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    return git("rev-parse", "--short=8", "HEAD") + ("+" if git("status", "--porcelain", "celery_idempotent") else "")


@dataclass(frozen=True)
class Figures:
    """What came of one soak.

    Arguments:
        effect: `POSTGRES`, `SQLITE` or `GATEWAY`.
        seed: Of its killer.
        kills: SIGKILLs that hit between a body's first statement and its ack.
        operations: Orders that were published.
        runs: Bodies that began.
        repeated: Effects that a body asked for again, when an earlier run of the order had been killed.
        unexplained: Those for which no run had been killed.
        duplicates: Effects that took place more than once.
        popped: Orders without an effect or an answer, whose message Redis had popped for a client that was gone.
        lost: Others without an effect, or without an answer.
        wrong: Answers that name another effect than the one that took place.
        date, commit: When it was added to the page, and which commit was run.
    """

    effect: str
    seed: int
    kills: int
    operations: int
    runs: int
    repeated: int = 0
    unexplained: int = 0
    duplicates: int = 0
    popped: int = 0
    lost: int = 0
    wrong: int = 0
    date: str = ""
    commit: str = ""


COUNTS = tuple(each.name for each in fields(Figures) if each.type == "int" and each.name != "seed")
COLUMNS = ("date", "commit", "seed", "effect", *COUNTS)
SUMS = ("effect", "aim", "soaks", *COUNTS)


def table(columns: tuple[str, ...], lines: list[list[str]]) -> str:
    head = [NAMES.get(column, column) for column in columns]
    rule = ["---:" if column in (*COUNTS, "aim", "soaks", "seed") else "---" for column in columns]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in [head, rule, *lines])


def sums(soaks: list[Figures]) -> list[list[str]]:
    """Return the sum lines."""
    lines = []
    for line, effects in LINES.items():
        added = [each for each in soaks if each.effect in effects]
        counts = [sum(getattr(each, column) for each in added) for column in COUNTS]
        aim = f"{AIMS[line]:,} kills" if line in AIMS else ""
        lines.append([line, aim, *(f"{count:,}" for count in (len(added), *counts))])
    return lines


def rows(page: str) -> list[Figures]:
    """Return the soaks that a page lists."""
    found = []
    for line in re.findall(r"^\| (\d{4}-.*) \|$", page, re.MULTILINE):
        cells: dict[str, Any] = dict(zip(COLUMNS, line.split(" | "), strict=True))
        found.append(Figures(**{**cells, **{name: int(cells[name]) for name in ("seed", *COUNTS)}}))
    return found


def with_rows(page: str, soaks: list[Figures]) -> str:
    """Return the page with these soaks and their sums as its two tables."""
    head, tail = (rf"^\| {first} \|.*\n(?:\|.*\n)+" for first in (SUMS[0], COLUMNS[0]))
    lines = [[str(getattr(each, column)) for column in COLUMNS] for each in soaks]
    for pattern, written in ((head, table(SUMS, sums(soaks))), (tail, table(COLUMNS, lines))):
        page, count = re.subn(pattern, written, page, flags=re.MULTILINE)
        assert count == 1, f"{PAGE} has lost its table {pattern}"
    return page


def add(figures: Figures) -> None:
    """Add a soak to the page, as of today and of this commit."""
    page = PAGE.read_text(encoding="utf-8")
    dated = replace(figures, date=datetime.now(timezone.utc).date().isoformat(), commit=commit())
    PAGE.write_text(with_rows(page, [*rows(page), dated]), encoding="utf-8")
