"""The test line is one text in three places: README.md, CONTRIBUTING.md and `.ci/run`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FENCED = re.compile(r"^```[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)


def ci_line() -> str:
    lines = [line.strip() for line in (ROOT / ".ci" / "run").read_text().splitlines()]
    [line] = [line for line in lines if line.endswith("tox -p 2") and not line.startswith("#")]
    return line


def fenced_lines(path: Path) -> list[str]:
    return [
        line.strip().removeprefix("$ ") for block in FENCED.findall(path.read_text()) for line in block.splitlines()
    ]


def test_ci_runs_the_whole_of_tox_and_nothing_weaker() -> None:
    assert ci_line() == "python3 -m venv .venv && .venv/bin/pip install -q tox && .venv/bin/tox -p 2"


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md"])
def test_a_page_states_the_line_that_ci_runs(name: str) -> None:
    path = ROOT / name
    assert path.exists(), f"{name} is missing; it states the test line in a fenced block: {ci_line()}"
    assert ci_line() in fenced_lines(path), f"{name} has no fenced block with the line of .ci/run: {ci_line()}"


def test_the_versions_of_python_are_the_same_wherever_they_are_named() -> None:
    named = re.findall(r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text())
    range_ = f"Python {named[0]} to {named[-1]}"
    for page in ("README.md", "CONTRIBUTING.md"):
        assert set(re.findall(r"Python 3\.\d+ to 3\.\d+", (ROOT / page).read_text())) == {range_}, page
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    assert set(re.findall(r"\b3\.\d+\b", workflow)) == {*named}


def test_nothing_is_installed_by_an_extra_of_celery_or_kombu() -> None:
    """`celery[redis]` bounds redis-py, and pins packaging: applications that pin others could not install both."""
    _, _, rest = (ROOT / "pyproject.toml").read_text().partition("\ndependencies = [\n")
    asked, _, _ = rest.partition("\n]")
    named = re.findall(r'^ *"(\w+)(\[?)', asked, re.MULTILINE)
    assert ("celery", "") in named
    assert ("kombu", "") in named
