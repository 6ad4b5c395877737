"""The index of the tests, tests/README.md, and the pages that it is an index of.

`python -m tests.support.docs.index` writes its tables of endings and faults, which are made of the tests' marks.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from tests.support.docs.pages import ROOT
from tests.support.gauntlet.breaks import shown_by

TESTS = ROOT / "tests"
INDEX = TESTS / "README.md"
ENDINGS = ROOT / "docs" / "endings.md"
GUARANTEES = ROOT / "docs" / "guarantees.md"


def section(page: Path, heading: str) -> str:
    """Return what a page has below a heading, up to the next."""
    _, found, rest = page.read_text(encoding="utf-8").partition(f"\n## {heading}\n")
    assert found, f"{page} has lost its heading {heading!r}"
    return rest.partition("\n## ")[0]


def rows(table: str) -> list[list[str]]:
    """Return the cells of a table's rows."""
    lines = [line for line in table.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def endings() -> dict[str, list[str]]:
    """Return the rows of the page of endings by their first cell."""
    return {row[0]: row[1:] for row in rows(section(ENDINGS, "What happens"))}


def marked() -> dict[str, list[str]]:
    """Return the tests that carry `@pytest.mark.ending(...)`, as `file::function`, by ending."""
    found = defaultdict(list)
    for path in sorted(TESTS.rglob("test_*.py")):
        for function in functions(path):
            for ending in _endings(function):
                found[ending].append(f"{path.relative_to(TESTS)}::{function.name}")
    return dict(found)


def functions(path: Path) -> list[ast.FunctionDef]:
    """Return the test functions of a file, also those of its classes."""
    found = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return [node for node in found if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]


def _endings(function: ast.FunctionDef) -> Iterator[str]:
    for decorator in function.decorator_list:
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.ending":
            yield from map(ast.literal_eval, decorator.args)


def missing(text: str) -> list[str]:
    """Return the tests that a text names, as `file::function`, a file or a folder, and that are not there."""
    lost = []
    for name in re.findall(r"`([\w/]+(?:\.py(?:::\w+)?|/))`", text):
        path, _, function = name.partition("::")
        found = (TESTS / path).exists() and (not function or function in {one.name for one in functions(TESTS / path)})
        lost += [] if found else [name]
    return lost


def tables() -> dict[str, str]:
    """Return the tables that are made of the tests' marks, by their headings."""
    shown = marked()
    by_ending = [f"| {ending} | {'<br>'.join(f'`{test}`' for test in shown.get(ending, []))} |" for ending in endings()]
    by_fault = [f"| {fault} | `gauntlet/{file}::{name}` |" for fault, [(file, name)] in sorted(shown_by().items())]
    return {
        "Endings": "\n".join(["| ending | tests |", "|---|---|", *by_ending]),
        "Known faults": "\n".join(["| fault | test |", "|---|---|", *by_fault]),
    }


def main() -> None:
    """Write the tables into the index."""
    text = INDEX.read_text(encoding="utf-8")
    for heading, table in tables().items():
        old = section(INDEX, heading)
        text = text.replace(old, old[: old.index("\n|") + 1] + table + "\n")
    INDEX.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
