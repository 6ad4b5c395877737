"""The gauntlet can be lost: without the lines that keep a fault out, its test fails."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.gauntlet.breaks import BREAKS, FAULTS, PACKAGE, ROOT, Break, shown_by

PAGE = ROOT / "docs" / "gauntlet.md"
#: Seconds that the tests may take in a copy of the tree.
LONGEST = 240


def test_every_fault_has_one_test_and_a_line_that_keeps_it_out() -> None:
    assert sorted(shown_by()) == list(FAULTS)
    assert {len(found) for found in shown_by().values()} == {1}
    assert sorted({each.fault for each in BREAKS}) == list(FAULTS)
    assert len({str(each) for each in BREAKS}) == len(BREAKS)


@pytest.mark.parametrize("each", BREAKS, ids=str)
def test_what_a_break_replaces_is_in_the_source_once(each: Break) -> None:
    for edit in each.edits:
        text = (ROOT / PACKAGE / edit.file).read_text(encoding="utf-8")
        assert text.count(edit.old) == 1, f"{edit.file}: {edit.old!r}"
        assert edit.new != edit.old


def test_the_page_lists_every_fault_with_its_test() -> None:
    rows = re.findall(r"^\| (\d+) \|.*\| `(\w+)` \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert [(int(number), name) for number, name in rows] == [(fault, shown_by()[fault][0][1]) for fault in FAULTS]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the package and its tests, to be broken."""
    caches = shutil.ignore_patterns("__pycache__")
    for folder in (PACKAGE, "tests"):
        shutil.copytree(ROOT / folder, tmp_path / "tree" / folder, ignore=caches)
    shutil.copy(ROOT / "pyproject.toml", tmp_path / "tree")
    return tmp_path / "tree"


def run(tree: Path, *names: str) -> subprocess.CompletedProcess[str]:
    """Run tests of the gauntlet in a copy of the tree."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *names]
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "COV"))}
    env["COLUMNS"] = "300"  # pytest shortens what failed to the width of a terminal
    return subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True, timeout=LONGEST, check=False)


@pytest.mark.soak
@pytest.mark.timeout(LONGEST + 30)
def test_the_gauntlet_is_passed_in_a_copy_that_is_not_broken(tree: Path) -> None:
    files = sorted({f"tests/gauntlet/{file}" for found in shown_by().values() for file, _ in found})
    ended = run(tree, *files)
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.soak
@pytest.mark.timeout(LONGEST + 30)
@pytest.mark.parametrize("each", BREAKS, ids=str)
def test_a_fault_that_is_let_in_fails_its_test(tree: Path, each: Break) -> None:
    for edit in each.edits:
        edit.apply(tree)
    [(file, name)] = shown_by()[each.fault]
    ended = run(tree, f"tests/gauntlet/{file}::{name}")
    said = ended.stdout + ended.stderr
    assert ended.returncode == 1, said
    # Failed by what it asserts, and not for want of a fixture.
    assert re.search(r"^1 failed\b|, 1 failed\b", said, re.MULTILINE), said
    why = re.search(r"^FAILED .*? - (.*)$", said, re.MULTILINE)
    print(f"\n{each.fault:>2}  {name}\n    without: {each.name}\n    fails:   {why[1] if why else '?'}")
