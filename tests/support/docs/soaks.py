"""The figures of soaks that were run, added up: `add`, `add_schedules` write those of one more into docs/soaks.md."""

from __future__ import annotations

import re
import subprocess
from dataclasses import astuple, dataclass, fields, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypeVar

__all__ = [
    "GATEWAY",
    "PAGE",
    "POSTGRES",
    "SQLITE",
    "Figures",
    "Schedules",
    "add",
    "add_schedules",
    "next_seed",
    "rows",
    "schedules",
    "with_rows",
    "with_schedules",
]

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
#: Columns whose cells are no numbers.
TEXTS = ("date", "commit", "effect")


def table(columns: tuple[str, ...], lines: list[list[str]]) -> str:
    head = [NAMES.get(column, column) for column in columns]
    rule = ["---" if column in TEXTS else "---:" for column in columns]
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
    lines = [[str(getattr(each, column)) for column in COLUMNS] for each in soaks]
    return replace_table(replace_table(page, SUMS, sums(soaks)), COLUMNS, lines)


def replace_table(page: str, columns: tuple[str, ...], lines: list[list[str]]) -> str:
    """Return the page with these lines in its table of these columns."""
    page, count = re.subn(rf"^\| {columns[0]} \|.*\n(?:\|.*\n)+", table(columns, lines), page, flags=re.MULTILINE)
    assert count == 1, f"{PAGE} has lost its table of {columns}"
    return page


Dated = TypeVar("Dated", "Figures", "Schedules")


def dated(figures: Dated) -> Dated:
    """Return them as of today and of this commit."""
    return replace(figures, date=datetime.now(timezone.utc).date().isoformat(), commit=commit())


def add(figures: Figures) -> None:
    """Add a soak to the page, as of today and of this commit."""
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(with_rows(page, [*rows(page), dated(figures)]), encoding="utf-8")


# -- schedules of the simulation ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Schedules:
    """What came of some schedules of the simulation, whose seeds follow upon each other.

    Arguments:
        first, last: The seeds.
        kills: Children, workers and servers that were killed.
        lost: Leases that their holders had lost, and that bodies or endings found lost.
        broken: Schedules in which something did not hold.
        unended: Schedules of which it is not known whether they come to an end.
        date, commit: When they were added to the page, and which commit was run.
    """

    first: int
    last: int
    runs: int
    kills: int
    lost: int
    broken: int
    unended: int
    date: str = ""
    commit: str = ""


#: How many schedules are to come together.
SCHEDULES_AIM = 1_000_000
SCHEDULE_COUNTS = ("runs", "kills", "leases lost", "broken", "unended")
SCHEDULE_COLUMNS = ("first seed", "last seed", *SCHEDULE_COUNTS, "date", "commit")
SCHEDULE_SUMS = ("schedules", "aim", *SCHEDULE_COUNTS)


def schedules(page: str) -> list[Schedules]:
    """Return the schedules that a page lists."""
    listed = re.findall(r"^\| (\d+(?: \| \d+)+) \| (\d{4}-\S+) \| (\S+) \|$", page, re.MULTILINE)
    return [Schedules(*map(int, numbers.split(" | ")), date=date, commit=name) for numbers, date, name in listed]


def with_schedules(page: str, listed: list[Schedules]) -> str:
    """Return the page with these schedules and their sums as its other two tables."""
    rows = [astuple(each) for each in listed]
    counts = [sum(row[2 + at] for row in rows) for at in range(len(SCHEDULE_COUNTS))]
    ran = sum(each.last - each.first + 1 for each in listed)
    page = replace_table(page, SCHEDULE_SUMS, [[f"{count:,}" for count in (ran, SCHEDULES_AIM, *counts)]])
    return replace_table(page, SCHEDULE_COLUMNS, [list(map(str, row)) for row in rows])


def next_seed(page: str) -> int:
    """Return the first seed that no soak on a page has run."""
    return max((each.last + 1 for each in schedules(page)), default=0)


def add_schedules(found: Schedules) -> None:
    """Add schedules to the page, as of today and of this commit."""
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(with_schedules(page, [*schedules(page), dated(found)]), encoding="utf-8")
