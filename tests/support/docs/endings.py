"""The tests that show how tasks end, by the endings that they are marked with.

`python -m tests.support.docs.endings` writes them into tests/README.md.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PAGES = (ROOT / "docs" / "endings.md", ROOT / "docs" / "contributing" / "endings.md")
INDEX = ROOT / "tests" / "README.md"
HEADING = "## Endings\n"
HEAD = "| ending | tests, in `tests/` |\n|---|---|\n"


@cache
def marked() -> dict[str, list[str]]:
    """Return the tests that carry `@pytest.mark.ending(...)`, as `file::function`, by ending."""
    found = defaultdict(list)
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if ".ending(" in text else ():
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                for ending in _endings(node):
                    found[ending].append(f"{path.relative_to(ROOT / 'tests')}::{node.name}")
    return dict(found)


def _endings(function: ast.FunctionDef) -> Iterator[str]:
    for decorator in function.decorator_list:
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.ending":
            yield from map(ast.literal_eval, decorator.args)


def rows(text: str) -> dict[str, list[str]]:
    """Return the rows of all tables in a text by their first cell."""
    found = {}
    for table in re.findall(r"(?:^\|.*\n?)+", text, re.MULTILINE):
        for line in table.splitlines()[2:]:
            first, *cells = [cell.strip() for cell in line.strip("|").split("|")]
            found[first] = cells
    return found


def described() -> dict[str, list[str]]:
    """Return the endings that the pages describe, each with the cells of its row."""
    return rows("\n\n".join(page.read_text(encoding="utf-8") for page in PAGES))


def parts() -> tuple[str, str]:
    """Return the index before and after the heading of the endings."""
    before, heading, after = INDEX.read_text(encoding="utf-8").partition(HEADING)
    assert heading, f"{INDEX} has lost its heading {HEADING.strip()!r}"
    return before, after


def table(endings: list[str]) -> str:
    """Return the table of tests for these endings."""
    tests = marked()
    lines = [f"| {ending} | {'<br>'.join(f'`{test}`' for test in tests.get(ending, []))} |\n" for ending in endings]
    return HEAD + "".join(lines)


def main() -> None:
    """Write the tests into the index."""
    before, _ = parts()
    INDEX.write_text(f"{before}{HEADING}\n{table(list(described()))}", encoding="utf-8")


if __name__ == "__main__":
    main()
